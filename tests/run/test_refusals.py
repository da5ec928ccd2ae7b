"""Bad input ends in one line with the key or file and the remedy, before any work.

`golden/refusals.txt` has commands, each above what it says; `python tests/run/test_refusals.py` writes the latter anew.
"""

import hashlib
import json
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    import conftest  # noqa: F401 - the variables that jax reads
from asked import workdir
from refused import refusal
from small_run import new_folder

GOLDEN = Path(__file__).parents[1] / "golden" / "refusals.txt"
LINES = GOLDEN.read_text(encoding="utf-8").splitlines()
TABLE = dict(zip(LINES[::2], LINES[1::2], strict=True))
GOOD = '{"question": "Tom has 1 pens . How many now ?", "steps": ["1 + 2 = 3"], "answer": "3"}\n'
FILES = {
    "broken.jsonl": GOOD + '{"question": "Tom has\n',
    "nonumber.jsonl": GOOD.replace('"3"', '"three"'),
    "noanswer.json": '[{"question": "Tom has 1 pens ."}]',
    "barless.txt": "Tom has 1 pens . || #### 3\nTom has 2 pens .\n",
    "empty.jsonl": "",
    "long.jsonl": GOOD * 3 + GOOD.replace("pens . ", "pens . " + "He buys 2 . " * 4),
    "wordy.jsonl": GOOD + json.dumps({"question": "Tom has 1 pens .", "steps": ["1 + 2 = 3"] * 7, "answer": "3"}),
    "unknown.jsonl": GOOD.replace("pens", "zebras"),
    "pens.xlsx": "question,answer\n",
    "surrogate.jsonl": GOOD.replace("Tom", "Tom \\ud800"),
    "typo.py": "import sys; sys.path.insert(0, '.')\nfrom small import get_config as small\n\n\ndef get_config():\n"
    "    config = small()\n    config.rl.stepz = 3\n    return config\n",
    "syntax.py": "def get_config(:\n",
    "raises.py": "def get_config():\n    raise ValueError('no more')\n",
    "unread.py": "def get_config():\n    return open('not_there.txt')\n",
}
ALONE = ["--config.gate.enabled=False", "--config.stages=('imitate',)", "--config.imitate.control=False"]
TEXT = [*ALONE, "--config.reasoner=text_gpt2", "--config.imitate.c_thought=0", "--config.latent_policy.name=soft"]
SHORT = {
    "TEXT": TEXT,
    "LATENT_SFT": [*TEXT, "--config.imitate.recipe=latent_sft", "--config.prompt.closing=</think>",
                   "--config.prompt.format={question} <think>"],
    "COLAR": [*ALONE, "--config.reasoner=colar_gpt2", "--config.latent_policy.name=colar"],
    "QUESTION": ["Tom has 3 pens . He buys 2 . How many now ?"],
}  # fmt: skip
"""Words of the commands that stand for others; a flag that is given again goes before."""


def _folder(path: Path) -> Path:
    folder = new_folder(path)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    workdir("coconut_gpt2", folder / "asked")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return _folder(tmp_path_factory.mktemp("refusals"))


def _said(command: str, folder: Path) -> str:
    words = [word for each in shlex.split(command) for word in SHORT.get(each, [each])]
    return refusal(*words, folder=folder).replace(f"{folder}/", "")


def _digest(folder: Path) -> dict[Path, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc" and path.name != ".lock"]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("command", TABLE)
def test_one_line_and_nothing_else(command, folder):
    before = _digest(folder)
    assert _said(command, folder) == TABLE[command].strip()
    assert _digest(folder) == before


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        made = _folder(Path(path))
        GOLDEN.write_text("".join(f"{each}\n    {_said(each, made)}\n" for each in TABLE), encoding="utf-8")

"""Bad input ends in one line with the key or file and the remedy, before any work.

`golden/refusals.txt` has commands, each above what it says; `python tests/run/test_refusals.py` writes the latter anew.
`CHECKED` has settings that the checkpoint, the problems or a method refuse.
"""

import json
import os
import shlex
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    import conftest  # noqa: F401 - the variables that jax reads
from asked import contents, workdir
from refused import refusal
from slpo_jax.config.config_checks import check
from slpo_jax.errors import UserError
from slpo_jax.io.workdir import Workdir
from slpo_jax.rewards.reward import CORRECT, REWARDS, RewardEntry
from slpo_jax.run.experiment import Stage, build
from slpo_jax.run.run_checks import check_answers, check_prompts
from slpo_jax.run.run_stages import check_stages
from slpo_jax.run.train_stage import close_stage
from small_run import load_config, new_folder

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


def _files(folder: Path) -> dict[str, bytes]:
    return {name: text for name, text in contents(folder).items() if not name.endswith((".pyc", ".lock"))}


@pytest.mark.parametrize("command", TABLE)
def test_one_line_and_nothing_else(command, folder):
    before = _files(folder)
    assert _said(command, folder) == TABLE[command].strip()
    assert _files(folder) == before


BEST_OF_N = {"gate.enabled": False, "stages": ("imitate", "best_of_n")}
LATENT_RM = {"gate.enabled": False, "imitate.control": False, "stages": ("imitate", "latent_rm", "evaluate"),
             "evaluate.scorers": ("latent_rm",), "evaluate.samples": 4, "evaluate.beams": 2,
             "evaluate.candidates": 2}  # fmt: skip
IN_WORDS = {"reasoner": "text_gpt2", "gate.enabled": False, "imitate.c_thought": 0, "stages": ("imitate",)}
SOFT = {"latent_policy.name": "soft"}
CUT = "problem 0 takes 3 tokens with its end, more than config."
# What further settings and data of the small config are refused with: the line's beginning, and what else it says.
CHECKED = [
    ({"stages": ("imitate",), "max_answer_tokens": 2}, "data.train: the answer of ", f"{CUT}max_answer_tokens (2); "),
    ({"stages": ("cold_start",), "max_answer_tokens": 2}, "data.train: the answer of ", CUT),
    ({"evaluate.max_answer_tokens": 2}, "data.eval.made: the answer of ", f"{CUT}evaluate.max_answer_tokens (2); "),
    ({"stages": ("imitate", "cold_start"), "evaluate.max_answer_tokens": 2}, "data.valid: the answer of ", CUT),
    (BEST_OF_N | {"gate.enabled": True}, "stages: best_of_n stops by the gate", "put cold_start before it"),
    (BEST_OF_N | {"gate.enabled": True, "stages": ("best_of_n",)}, "stages: best_of_n stops by the gate", ""),
    (BEST_OF_N | {"best_of_n.scorer": "gate"}, "best_of_n.scorer: gate asks the gate", ""),
    (BEST_OF_N | {"best_of_n.scorer": "latent_rm"}, "best_of_n.scorer: 'latent_rm' is not valid; give one of", ""),
    (BEST_OF_N | {"reward": "mine", "reward_processes": 1}, "reward_processes: mine can't be asked in a process of its",
     " (TypeError: cannot pickle 'generator' object); set it and config.reward_seconds to 0, or "),
    (BEST_OF_N | {"best_of_n.batch_size": 5}, "best_of_n.batch_size: 5 is not a multiple of", ""),
    (LATENT_RM | {"stages": ("imitate", "evaluate")}, "evaluate.scorers: latent_rm has parameters of its own", ""),
    (LATENT_RM | {"stages": ("imitate", "evaluate"), "evaluate.scorers": ()}, "evaluate.beams: 2, and latent_rm", ""),
    (LATENT_RM | {"dropout.rate": 0.0}, "latent_rm.dropout: without noise all thoughts of a", ""),
    (LATENT_RM | {"evaluate.scorers": ("gate",)}, "evaluate.scorers: gate asks the gate, and config.gate", ""),
    (IN_WORDS | SOFT | {"latent_policy.soft.end_text": "how many"}, "latent_policy.soft.end_text: 'how many' is 2 t",
     "('<unk>', 'many'); give a text that is one"),
    (IN_WORDS | {"latent_policy.name": "gumbel", "latent_policy.gumbel.end_text": "zebra"},
     "latent_policy.gumbel.end_text: 'zebra' is no token of this tokenizer", "give a text that is one"),
    ({"latent_policy.name": "hybrid"}, "latent_policy.name: hybrid is for a text ", "not coconut_gpt2; use another"),
    ({"latent_policy.name": "colar"}, "latent_policy.name: colar is for a colar reasoner, not coconut", ""),
    (IN_WORDS | {"latent_policy.name": "hybrid", "max_latents": 0}, "max_latents: 0, but", "give at least 1"),
    ({"imitate.lora.rank": 2}, "imitate.control: True, which trains the reasoner's parameters alone", "set it to Fa"),
    ({"imitate.max_tokens": 3, "stages": ("imitate",)}, "imitate.max_tokens: 3 leaves no problem", ""),
    ({"imitate.recipe": "icot", "imitate.c_thought": 0, "max_latents": 0, "gate.enabled": False, "imitate.cot_steps": 4,
      "imitate.final_steps": 18, "imitate.control": False, "stages": ("imitate",), "imitate.icot.tokens_per_epoch": 6},
     "imitate.final_steps: 18, but iCoT drops the last token after 18 steps", ""),
]  # fmt: skip


def _check(folder, changes):
    config = load_config()
    config.update_from_flattened_dict(changes)
    check_stages(build(check(config), folder / "work"))


@pytest.mark.parametrize(("changes", "begins", "says"), CHECKED)
def test_one_line_before_the_first_stage(changes, begins, says, tmp_path, cpu_devices, monkeypatch):
    monkeypatch.setitem(REWARDS, "mine", RewardEntry(lambda completion, left=(line for line in ()): 1.0))
    with pytest.raises(UserError) as caught:
        _check(tmp_path, changes)
    line = str(caught.value)
    assert line.startswith(f"config.{begins}")
    assert says in line
    assert ("\n" in line, len(line) < 300) == (False, True)
    assert not (tmp_path / "work" / "checkpoints").exists()


# What is refused by what is there, or said and not refused.


def test_a_workdir_that_another_run_works_in(folder):
    """Refused while the other lives, whose files stay as they are; whoever comes after it is let in."""
    workdir = Workdir(folder / "work" / "shared")
    workdir.root.mkdir(parents=True)
    with workdir.in_use():
        line = refusal("train", "small.py", "--workdir=work/shared", folder=folder)
        assert line.startswith("--workdir=work/shared: another run is at work in it")
        assert [path.name for path in workdir.root.iterdir()] == [workdir.lock.name]
    with workdir.in_use():
        pass


def test_a_coordinator_s_port_that_another_program_has(folder):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        cluster = [f"--coordinator=localhost:{port}", "--processes=2", "--process=0"]
        line = refusal("train", "small.py", *cluster, folder=folder)
    assert line.startswith(f"--coordinator: port {port} can't be had (")


def test_a_smoke_test_refuses_batches_and_warm_ups_that_the_run_would(folder, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which it changes
    flags = "--config.imitate.optimizer.warmup_steps=20", "--config.rl.micro_batches=3"
    line = refusal("train", "small.py", "--smoke", *flags, folder=folder)
    assert line.startswith("config.imitate.optimizer.warmup_steps: 20 is not valid; ")
    assert "; and config.rl.batch_size: 4 is not a multiple of " in line


def test_long_problem_of_slots_that_the_positions_cut():
    """A larger bucket would be cut as well."""
    with pytest.raises(UserError, match=r"22 tokens, more than the 12 positions .*; lower config.max_latents or"):
        check_prompts("config.data.train", [[0] * 12, [0] * 22], 12, is_cut=True)


@pytest.mark.parametrize(("reward", "estimator", "said"), [
    ("mine", "pass_at_k", 1), ("mine", "mixture", 1), ("mine", "reward", 0), (CORRECT, "pass_at_k", 0),
])  # fmt: skip
def test_that_pathwise_learns_references_whatever_the_reward_is_said_before(
    estimator, said, reward, tmp_path, warnings, monkeypatch
):
    monkeypatch.setitem(REWARDS, "mine", RewardEntry(lambda completion: float(len(completion))))
    changes = {"reward": reward, "objective.pathwise.estimator": estimator, "rl.temperature": 1.0}
    _check(tmp_path, {"stages": ("imitate", "rl"), "rl.objectives": ("pathwise",)} | changes)
    lines = [line for line in warnings if "config.reward=mine" in line]
    assert [line[:58] for line in lines] == ["config.objective.pathwise: learns the reference answers, wh"[:58]] * said


@pytest.mark.parametrize("changes", [
    {"objective.pathwise.estimator": "reward"},
    {"objective.pathwise.estimator": "mixture", "objective.pathwise.mixture_weight": 0.0},
    {"latent_policy.name": "additive"},
    {"gate.enabled": True},
])  # fmt: skip
def test_pathwise_where_something_is_drawn(changes, tmp_path):
    """An answer, nothing that is compared, a thought, or its length: else it is refused, see golden/refusals.txt."""
    undrawn = {"rl.objectives": ("pathwise",), "dropout.rate": 0.0, "gate.enabled": False, "stages": ("imitate", "rl")}
    _check(tmp_path, undrawn | changes)


def test_some_references_of_an_evaluated_set_that_are_cut_are_counted(warnings):
    problems, budget = SimpleNamespace(answers=[[0] * n for n in (2, 4, 5, 7)]), "evaluate.max_answer_tokens"
    check_answers("config.data.eval.hard", problems, range(2), budget, 5)
    assert not warnings
    check_answers("config.data.eval.hard", problems, range(4), budget, 5)
    said = f"config.data.eval.hard: the answers of 2 of 4 problems take more tokens than config.{budget} (5), up to 8"
    assert warnings == [f"{said}; they count as wrong"]
    with pytest.raises(UserError, match=r"^config\.data\.train: the answer of problem 3 takes 8 tokens"):
        check_answers("config.data.train", problems, range(4), "max_answer_tokens", 7)


@pytest.mark.parametrize(("solved", "said"), [((0, 0), True), ((0, 0.5), False), ((), False)])
def test_a_stage_without_a_right_rollout_says_so_at_its_end(solved, said, tmp_path, warnings):
    rows = [{"stage": "slpo", "step": step, "solved": share} for step, share in enumerate(solved)]
    rows += [{"stage": "other", "step": 1, "solved": 0}, {"stage": "slpo", "step": 9, "loss": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = SimpleNamespace(params={}, step=9)
    stage = Stage(SimpleNamespace(workdir=Workdir(tmp_path)), "slpo")
    close_stage(stage, SimpleNamespace(finish=lambda *_: None), state)
    assert ["slpo: no rollout was right" in line for line in warnings] == [True] * said
    assert (tmp_path / "checkpoints/slpo/finished").read_text() == "9\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        made = _folder(Path(path))
        GOLDEN.write_text("".join(f"{each}\n    {_said(each, made)}\n" for each in TABLE), encoding="utf-8")

"""README's commands and those of two sections of docs/, in their order, with few steps and few problems."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

from data_sets import write_jsonl, write_set
from test_docs import ROOT, commands_of, defined, examples, fenced

PARTS = (
    ("README.md", ""),
    ("docs/train.md", "Your own problems"),
    ("docs/use.md", "Evaluate alone"),
)  # page, section
ASKED = "7 * 3 + 9 * 7 + 2"
RUNS = {  # of slpo_jax.main, by config: what makes them small
    "quickstart": {
        "data.chain.demos_size": 64, "data.chain.train_size": 64, "data.chain.valid_size": 8, "data.chain.test_size": 8,
    },
    "own": {},
    "coconut_gpt2": {},
}  # fmt: skip
ALL = {
    "model.n_layer": 1, "imitate.cot_steps": 2, "imitate.stage_steps": 0, "imitate.final_steps": 2,
    "imitate.max_latent_stage": 1, "imitate.control": False, "imitate.no_thought": False, "imitate.batch_size": 4,
    "imitate.optimizer.warmup_steps": 0, "cold_start.batch_size": 4, "cold_start.steps": 2,
    "cold_start.evaluate_every": 2, "cold_start.micro_batches": 1, "rl.batch_size": 4, "rl.group": 2, "rl.steps": 2,
    "rl.optimizer.warmup_steps": 0, "rl.capacities": "((1.0,1.0),)", "evaluate.limit": 3, "evaluate.samples": 2,
    "evaluate.seeds": 1, "evaluate.batch_size": 16, "evaluate.prompt_multiple": 256,
}  # fmt: skip


def _run(words: list[str], folder: Path) -> str:
    """What a command says; `words` begin with "python"."""
    config = next(
        (
            Path(word.partition("=")[2]).stem
            for word in words
            if word.startswith("--config=")
        ),
        "",
    )
    config = config or (
        "own" if any(word.startswith("--train=") for word in words) else ""
    )
    small = ALL | RUNS[config] if config else {}
    command = [
        sys.executable,
        *words[1:],
        *(f"--config.{key}={value}" for key, value in small.items()),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "BROWSER": "true",
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr[-3000:]}"
    return done.stdout


def _small(program: str) -> str:
    """A page's program, whose training has the settings of `RUNS`."""
    settings = RUNS["quickstart"] | ALL | {"rl.capacities": ((1.0, 1.0),)}
    call = 'slpo.train("quickstart", '
    if "slpo.train(" in program:
        assert call in program, program
    return program.replace(call, f"{call}config={settings!r}, ")


def _own_data(folder: Path) -> None:
    """Files of one's own, with words that no tokenizer here was made for."""
    pairs = [(a, b) for a in range(2, 9) for b in range(2, 9)]
    problems = [
        {
            "question": f"Zoë has {a} kiwis. She buys {b}.",
            "steps": [f"{a} + {b} = {a + b}"],
            "answer": str(a + b),
        }
        for a, b in pairs
    ]
    for name, part in (
        ("train", problems[:36]),
        ("valid", problems[36:42]),
        ("test", problems[42:]),
    ):
        write_jsonl(folder / f"my_{name}.jsonl", part)
        rows = [{**each, "steps": each["steps"][0]} for each in part]
        pandas.DataFrame(rows).to_csv(folder / f"my_{name}.csv", index=False)


def _published(folder: Path) -> None:
    """In the places of what comes from the hub, as published: a directory goes before a hub id."""
    from slpo_jax.api.conversion import export_checkpoint

    there = folder / "ModalityDance" / "latent-tts-coconut"
    export_checkpoint(folder / "runs" / "quickstart" / "checkpoints" / "imitate", there)
    for file in there.glob("reasoner.*"):
        file.unlink()
    config = json.loads((there / "config.json").read_text())
    for key in ("auto_map", "think_in_forward", "allow_plain_forward"):
        del config[key]
    (there / "config.json").write_text(json.dumps(config))
    data = folder / "openai" / "gsm8k"
    write_set(data, {"test": [{"question": ASKED, "answer": "5 + 3 = 8\n#### 8"}] * 3})
    configs = "[{config_name: main, data_files: [{split: test, path: data/test-*}]}]"
    (data / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The folder in which the blocks of `PARTS` were run one after the other, and what each said."""
    folder = tmp_path_factory.mktemp("readme")
    _own_data(folder)
    said: dict[str, list[str]] = {}
    files = dict(examples())
    (folder / "close.py").write_text(files["close.py"])
    found = [block for page, section in PARTS for block in fenced(ROOT / page, section)]
    for kind, text in (block for block in found if block[1] not in files.values()):
        for words in (
            commands_of(text)
            if kind == "bash"
            else [["python", "-c", _small(text)]]
            if kind == "python"
            else []
        ):
            name = (
                words[1]
                if kind == "python"
                else words[3 if words[2] == "slpo_jax" else 2]
            )
            if name in ("pip", "pytest"):  # as .ci/run does
                continue
            if "import AutoModelForCausalLM" in text:
                name = "transformers"
                if importlib.util.find_spec("torch") is None:
                    continue
            if any("ModalityDance" in word for word in words):
                _published(folder)
            said.setdefault(name, []).append(_run(words, folder))
    return folder, said


@pytest.mark.slow
def test_commands_run(said):
    folder, said = said
    counts = {
        name: len(texts) for name, texts in said.items() if name != "transformers"
    }
    assert counts == {"slpo_jax.main": 6, "view": 1, "solve": 1, "data": 1, "-c": 2}
    lines = (folder / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()
    assert not {name for line in lines for name in json.loads(line)} - defined()
    rows = json.loads((folder / "runs" / "three" / "report.json").read_text())["eval"]
    assert {"imitate", "cold_start", "slpo", "pathwise", "answer_only"} <= set(rows)
    assert rows["slpo"]["my_test"]["n"] == 3
    for name in ("mine", "close"):
        rows = json.loads((folder / "runs" / name / "report.json").read_text())["eval"]
        assert rows["slpo"]["my_test"]["n"] == 3
    published = json.loads((folder / "runs" / "published" / "report.json").read_text())
    assert published["eval"]["checkpoint"]["gsm8k"]["latent_steps"] == 6
    command = re.search(r'slpo solve \S+ "(.*)"', (ROOT / "README.md").read_text())
    assert f"question  {command[1]}" in said["solve"][0]
    trained, loaded = said["-c"]
    assert "'acc': " in trained
    assert "vote of 16 rollouts" in loaded
    assert "latents a problem on average" in loaded
    assert said["view"] == ["runs/quickstart/report.html\n"]
    # SIM-CoT's decoder says each latent in words.
    lines = said["solve"][0].splitlines()
    assert sum(line.strip().startswith("says ") for line in lines) == 4
    # What was exported is asked as the run was: T and budget go with it.
    facts = json.loads(
        _run(["python", "-m", "slpo_jax", "solve", "exported", "--json", ASKED], folder)
    )
    assert (facts["stopping"], facts["rule"]) == ("length", 4)


@pytest.mark.slow
def test_an_export_answers_in_transformers_as_here(said):
    pytest.importorskip("torch")
    folder, said = said
    facts = json.loads(
        _run(["python", "-m", "slpo_jax", "solve", "exported", "--json", ASKED], folder)
    )
    assert said["transformers"][0].split() == f"{ASKED} {facts['text']}".split()

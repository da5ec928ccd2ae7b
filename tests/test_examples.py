"""The scripts of examples/, at a tiny size, and launch/beside_paper.py on tiny checkpoints of the published layouts."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

import beside_paper
from data_sets import write_jsonl

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
TINY = {
    "model.n_layer": 1, "imitate.cot_steps": 2, "imitate.stage_steps": 0, "imitate.final_steps": 2,
    "imitate.max_latent_stage": 1, "imitate.control": False, "imitate.batch_size": 4,
    "imitate.optimizer.warmup_steps": 0, "rl.batch_size": 4, "rl.group": 2, "rl.steps": 2,
    "rl.optimizer.warmup_steps": 0, "rl.capacities": ((1.0, 1.0),), "evaluate.limit": 4, "evaluate.samples": 2,
    "evaluate.seeds": 1, "evaluate.batch_size": 16,
}  # fmt: skip


def script(name: str):
    """The module of one of the examples."""
    spec = importlib.util.spec_from_file_location(
        f"examples_{name}", ROOT / "examples" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_are_short():
    assert {path.stem for path in SCRIPTS} == {
        "own_reward",
        "own_data",
        "ask_checkpoint",
    }
    assert all(len(path.read_text().splitlines()) <= 60 for path in SCRIPTS)


@pytest.mark.parametrize(
    ("completion", "points"),
    [("### 19 * 3 + 11", 1), ("### 19 * 3 - 11", 0.5 / 23), ("### 3 * 19 + 11", 1), ("### 19 * 3 + 3", 0),
     ("### 68", 0), ("### 19 * 3 +", 0), ("### 19 ? 3 + 11", 0), ("", 0)],
)  # fmt: skip
def test_the_example_s_reward(completion, points):
    near = script("own_reward").near
    assert near(numbers=[3, 11, 19], goal=68, completion=completion) == pytest.approx(
        points
    )


@pytest.mark.slow
def test_a_reward_of_one_s_own(tmp_path, capsys):
    small = {f"data.countdown.{name}_size": size for name, size in
             (("train", 64), ("demos", 64), ("valid", 8), ("test", 8))}  # fmt: skip
    after = script("own_reward").main(tmp_path / "run", TINY | small)
    assert after.summary["n"] == 8
    said = capsys.readouterr().out
    assert "Pass@2" in said
    assert "3 11 19 = 68" in said


@pytest.mark.slow
def test_data_of_one_s_own(tmp_path, capsys):
    cold = {"cold_start.batch_size": 4, "cold_start.steps": 2, "cold_start.evaluate_every": 2,
            "cold_start.micro_batches": 1, "stages": ("imitate", "rl", "evaluate"), "gate.enabled": False}  # fmt: skip
    run = script("own_data").main(tmp_path, 5, TINY | cold)
    assert "imitate" in run.report["eval"]
    said = capsys.readouterr().out
    assert "64 problems, 2.0 steps each" in said
    assert "question  Ada has 3 pens" in said


def test_a_published_checkpoint_is_asked(tmp_path, capsys):
    pytest.importorskip("torch")
    published = importlib.import_module("published")
    case = published.coconut_hugging_face(tmp_path)
    question = published.QUESTIONS[0]
    solution = script("ask_checkpoint").main(str(tmp_path), question)
    tokens, latents = case.decode(question)
    assert len(solution.latents) == len(latents) == 6
    assert (
        solution.text.split()
        == case.tokenizer.decode(tokens, skip_special_tokens=True).split()
    )
    assert "latent 6:" in capsys.readouterr().out


@pytest.mark.slow
def test_published_checkpoints_stand_beside_the_paper(tmp_path, monkeypatch):
    """One is evaluated; the others' cells stay empty."""
    pytest.importorskip("torch")
    published = importlib.import_module("published")
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "ModalityDance" / "latent-tts-coconut"
    there.mkdir(parents=True)
    published.coconut_hugging_face(there)
    for name in ("gsm_valid", "gsm_test", "gsm_hard", "multiarith"):
        problems = [
            {"question": question, "steps": [], "answer": "7"}
            for question in published.QUESTIONS[:3]
        ]
        write_jsonl(tmp_path / "data" / f"{name}.json", problems)
    out = tmp_path / "published.json"
    small = [
        "--config.evaluate.samples=16",
        "--config.evaluate.seeds=1",
        "--config.prompt_slots=(64,)",
    ]
    assert (
        beside_paper.main(["data", "--only=coconut_gpt2", f"--out={out}", *small]) == 0
    )
    (table,) = json.loads(out.read_text())["tables"].values()
    rows = {row[0]: row[1:] for row in table["rows"]}
    paper = rows["COCONUT, GPT-2 124M, GSM8K"][::2]
    ours = rows["COCONUT, GPT-2 124M, GSM8K"][1::2]
    assert paper == [34.12, 45.79, 49.13]
    assert 3 * ours[0] / 100 == pytest.approx(round(3 * ours[0] / 100))
    assert rows["CODI, GPT-2 124M, GSM8K"][1::2] == [None] * 3


def test_a_checkpoint_that_nobody_published_is_refused(capsys):
    assert beside_paper.main(["data", "--only=coconut_llama1b"]) == 2
    assert "coconut_llama1b" in capsys.readouterr().err

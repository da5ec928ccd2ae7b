"""The whole job through the command, from random weights to a report, repeated and evaluated alone."""

import itertools
import json
import re
import struct

import numpy as np
import pytest

from same_run import checkpoint_of, rows_of, texts_of
from small_run import TOTALS, finished_run, new_folder, run

pytestmark = pytest.mark.slow
ROWS = ("imitate", "imitate_fixed_tmax", "imitate_control", "cold_start", "slpo")
SETS = {"real": 6, "made": 6}
COMMAND = ("--config=small.py", "--workdir=work")


@pytest.fixture(scope="module")
def work():
    return finished_run() / "work"


def _records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_smoke_test_is_a_whole_run_beside_the_real_one(tmp_path):
    folder = new_folder(tmp_path)
    stale = (
        folder / "runs" / "small_smoke" / "checkpoints" / "imitate" / "finished"
    )  # an earlier one's, of others
    stale.parent.mkdir(parents=True)
    stale.write_text("44\n")
    done = run("--config=small.py", "--smoke", folder=folder)
    assert done.stdout.splitlines()[-1] == "report: runs/small_smoke/report.html"
    assert [path.name for path in (folder / "runs").iterdir()] == ["small_smoke"]
    report = json.loads((folder / "runs" / "small_smoke" / "report.json").read_text())
    assert set(ROWS) <= report["eval"].keys()
    steps = {
        row["stage"]: row["step"] for row in rows_of(folder / "runs" / "small_smoke")
    }
    assert steps == {"imitate": 4, "imitate_control": 6, "cold_start": 2, "slpo": 2}


def test_metrics_have_a_row_a_step_with_every_scalar(work):
    rows = rows_of(work, timing=True)
    trained = [row for row in rows if "valid_accuracy" not in row]
    starts = {"imitate_control": TOTALS["imitate"]}
    expected = [
        (stage, n)
        for stage, end in TOTALS.items()
        for n in range(starts.get(stage, 0) + 1, end + 1)
    ]
    assert [(row["stage"], row["step"]) for row in trained] == expected
    scalars = {
        "imitate": {"loss", "accuracy"},
        "imitate_control": {"loss", "accuracy"},
        "cold_start": {"loss", "valid_share", "right_share", "expected_length"},
        "slpo": {"loss", "reward", "solved", "mixed", "latent_steps", "answer_tokens", "cut", "latent_log_likelihood",
                 "answer_log_likelihood", "answer_entropy", "stop_log_likelihood", "surrogate_variance",
                 "tokens_per_second"},
    }  # fmt: skip
    for row in trained:
        names = scalars[row["stage"]] | {
            "step",
            "stage",
            "grad_norm",
            "learning_rate",
            "seconds",
        }
        # The gate's loss is a mean over trajectories with a valid length, and a step may have none.
        if row.get("valid_share") == 0:
            names.remove("loss")
        assert set(row) == names
        assert all(
            np.isfinite(value) for value in row.values() if not isinstance(value, str)
        )
    assert [row["step"] for row in rows if "valid_accuracy" in row] == [3, 6, 7]


def test_every_stage_learned_something(work):
    """Or the tests of what it learned would be empty."""
    by_stage = {
        stage: [row for row in rows_of(work) if row["stage"] == stage]
        for stage in TOTALS
    }
    assert by_stage["imitate"][-1]["loss"] < 0.5 * by_stage["imitate"][0]["loss"]
    assert max(row["mixed"] for row in by_stage["slpo"]) > 0
    leaves = {stage: checkpoint_of(work, stage) for stage in TOTALS}
    assert {stage: found["step"] for stage, found in leaves.items()} == TOTALS
    wte = "['params']['reasoner']['backbone']['wte']"
    kernel = "['params']['gate']['out']['kernel']"
    for name, stages in (
        (wte, {"imitate_control", "slpo"}),
        (kernel, {"cold_start", "slpo"}),
    ):
        first = leaves["imitate"][name]
        assert {
            stage for stage, found in leaves.items() if (found[name] != first).any()
        } == stages


def test_records_of_every_row_and_set(work):
    most = json.loads((work / "config.json").read_text())["max_answer_tokens"]
    real = json.loads((work.parent / "real.json").read_text())
    for row, (name, count) in itertools.product(ROWS, SETS.items()):
        records = _records(work / "eval" / row / f"{name}.jsonl")
        assert [record["index"] for record in records] == list(range(count))
        for record in records:
            assert {"question", "reference", "completion"} <= set(record)
            assert 1 <= len(record["completion_tokens"]) <= most
            assert record["correct"] == (record["answer"] == record["reference"])
            assert [sample["seed"] for sample in record["samples"]] == [0, 0, 1, 1]
            for each in (record, *record["samples"]):
                assert each["latent_steps"] in {
                    "imitate_fixed_tmax": [3],
                    "imitate": [1],
                }.get(row, [1, 2, 3])
        if name == "real":
            assert [record["question"] for record in records] == [
                problem["question"] for problem in real[:6]
            ]
            assert [record["reference"] for record in records] == [
                problem["answer"][:1] for problem in real[:6]
            ]  # 3.0
        elif row == "slpo":  # the last row's are the run's
            assert (work / "eval" / "made.jsonl").read_bytes() == (
                work / "eval/slpo/made.jsonl"
            ).read_bytes()


def test_report_can_be_read_and_seen(work):
    text, page = ((work / name).read_text() for name in ("report.md", "report.html"))
    for label in (
        "SFT",
        "SFT, T_max latents",
        "SFT, as many steps more",
        "cold gate",
        "SLPO",
    ):
        assert label in text
        assert f'"label":"{label}"' in page
    assert "best@2 by likelihood" in text
    report = json.loads((work / "report.json").read_text())
    found = {
        row: {name: figures["n"] for name, figures in sets.items()}
        for row, sets in report["eval"].items()
    }
    assert found == dict.fromkeys(ROWS, SETS)
    right = [
        record["correct"]
        for row in ROWS
        for record in _records(work / "eval" / row / "real.jsonl")
    ]
    assert (
        0
        < np.mean([report["eval"][row]["real"]["acc"] for row in ROWS])
        == pytest.approx(np.mean(right))
    )
    headline = report["headline"]
    assert headline["title"].startswith("mean of 2 sets (")
    assert {row["row"]: row["control"] for row in headline["rows"]}[
        "slpo"
    ] == "imitate_control"
    assert all(" | ".join(row["cells"]) in text for row in headline["rows"])
    assert set(report["training"]) == set(TOTALS)
    every = [
        record
        for path in (work / "eval").glob("*/*.jsonl")
        for record in _records(path)
    ]
    assert len(re.findall('"stop":[n01]', page)) == sum(
        record["latent_steps"] for record in every
    )


def test_thresholds_are_the_validation_s_best(work):
    sweeps = json.loads((work / "report.json").read_text())["thresholds"]
    for name, rules in {
        "cold_start": ("0.5", "0.9"),
        "slpo": ("0.5", "0.9"),
        "imitate_control": ("1", "3"),
    }.items():
        best = max(rules, key=lambda rule: (sweeps[name][rule], -float(rule)))
        assert sweeps[name]["chosen"] == float(best)


def test_nothing_is_compiled_twice(work):
    """One program a phase, a stage, and a kind of rollout."""
    log = (work.parent / "stderr").read_text()
    names = re.findall(r"Compiling (?:jit\()?([\w.<>]+)\)? ", log)
    assert (
        names.count("train_step") == 2 + 1 + 1 + 1
    )  # imitation's phases and its control's, cold start, SLPO
    # Thresholds and lengths, clean; the same under dropout; and watched.
    assert names.count("local") == 5


def test_a_run_says_what_it_does(work):
    lines = (work.parent / "stderr").read_text().splitlines()
    starts = ("slpo_jax ", "model: coconut_gpt2, 5,265 parameters", "imitate: 0/44 steps",
              "imitate: 44/44 steps", "evaluate: ")  # fmt: skip
    places = [
        next(n for n, line in enumerate(lines) if line.startswith(start))
        for start in starts
    ]
    assert places == sorted(places)
    assert "workdir work, config small.py" in lines[places[0]]
    assert any(
        line.startswith("config.data.train: 136 problems, 1.0 steps each, answers are")
        for line in lines
    )


def test_again_changes_nothing(work):
    before = texts_of(work)
    rows = rows_of(work, timing=True)
    done = run(*COMMAND, folder=work.parent)
    assert done.stdout.splitlines()[-1] == "report: work/report.html"
    stages = ", ".join(f"{stage} (finished)" for stage in TOTALS)
    assert done.stderr.splitlines()[1:] == [
        "devices: 2 x cpu", "model: coconut_gpt2, 5,265 parameters", f"stages: {stages}, evaluate",
    ]  # fmt: skip
    assert texts_of(work) == before
    assert rows_of(work, timing=True) == rows


def test_evaluation_alone(work, tmp_path):
    """From a checkpoint of another workdir, without its training set, latents kept; then of another length."""
    folder = new_folder(tmp_path)
    (folder / "train.jsonl").unlink()

    def records_of(*flags):
        run(
            "--config=small.py", "--workdir=alone", "--config.stages=('evaluate',)",
            f"--config.init={work}/checkpoints/slpo", "--config.evaluate.save_latents=True",
            "--config.evaluate.samples=0", "--config.evaluate.datasets=('real',)", "--config.evaluate.limit=5", *flags,
            folder=folder,
        )  # fmt: skip
        return _records(folder / "alone" / "eval" / "checkpoint" / "real.jsonl")

    records = records_of()
    out = json.loads((folder / "alone" / "report.json").read_text())
    assert list(out["eval"]) == ["checkpoint"]
    row = out["rows"]["checkpoint"]
    assert (row["label"], row["gated"]) == ("checkpoint work/checkpoints/slpo", True)
    kept = np.load(folder / "alone" / "eval" / "real.latents.npz")
    assert (kept["latents"].shape, kept["latents"].dtype) == ((5, 3, 16), np.float32)
    for latents, steps, record in zip(
        kept["latents"], kept["latent_steps"], records, strict=True
    ):
        assert steps == record["latent_steps"]
        assert (np.abs(latents).max(axis=1) > 0).tolist() == [True] * steps + [
            False
        ] * (3 - steps)
    # The same weights, rule and noise-free pass as in the run.
    theirs = _records(work / "eval" / "slpo" / "real.jsonl")[:5]
    for key in ("completion_tokens", "latent_steps"):
        assert [record[key] for record in records] == [record[key] for record in theirs]
    again = records_of("--config.max_latents=2", "--config.gate.enabled=False")
    assert {record["latent_steps"] for record in again} == {2}


FILLING = """
import pathlib
import resource
import threading
import time


def _fill():
    while not pathlib.Path("work/checkpoints/imitate/2/checksums.json").exists():
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


if pathlib.Path("fills").exists():
    threading.Thread(target=_fill, daemon=True).start()
"""


def test_a_disk_that_fills_during_a_save(tmp_path):
    """No file can grow beyond some bytes any more after the first checkpoint; it stays, and is gone on from."""
    folder = new_folder(tmp_path)
    flags = ["--config.stages=('imitate',)", "--config.imitate.control=False"]
    flags += [
        "--config.model.n_embd=64",
        "--config.checkpoint_every=2",
        "--config.imitate.cot_steps=0",
    ]
    with (folder / "small.py").open("a") as file:
        file.write(FILLING)
    (folder / "fills").touch()
    done = run(*COMMAND, *flags, folder=folder, status=2)
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "work/checkpoints/imitate: the checkpoint can't be written (File too large); make room, and the same command "
        "goes on from the one before"
    )
    (folder / "fills").unlink()
    done = run(*COMMAND, *flags, folder=folder)
    first = re.search(r"imitate: (\d+)/40 steps", done.stderr)
    assert int(first[1]) > 0  # it goes on from a checkpoint


def test_final_figures_and_some_completions_reach_the_tracker(work):
    """TensorBoard's file has each figure of the report once, and the last row's answers.

    Before each of its records stands the size, and around them are sums.
    """
    from tensorboardX.proto.event_pb2 import Event

    figures = []
    texts = []
    for path in (work / "tensorboard").iterdir():
        data = path.read_bytes()
        place = 0
        while place < len(data):
            (size,) = struct.unpack("<Q", data[place : place + 8])
            event = Event.FromString(data[place + 12 : place + 12 + size])
            place += 16 + size
            for value in event.summary.value:
                if value.tag == "evaluate/completions/text_summary":
                    texts += [text.decode() for text in value.tensor.string_val]
                elif value.tag.startswith("evaluate/"):
                    figures.append((value.tag, pytest.approx(value.simple_value)))
    report = json.loads((work / "report.json").read_text())["eval"]
    expected = {
        f"evaluate/{name}/{row}/{key}": report[row][name][key]
        for row, name, key in itertools.product(ROWS, SETS, ("acc", "pass@1", "pass@2"))
    }
    assert len(figures) == len(expected)
    assert dict(figures) == expected
    (text,) = texts
    for name in SETS:
        for record in _records(work / "eval" / "slpo" / f"{name}.jsonl"):
            assert record["question"] in text

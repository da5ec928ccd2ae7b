"""Several objectives side by side, from one start; and a run of explicit text alone."""

import json
import shutil

import numpy as np
import pytest

from same_run import assert_same, checkpoint_of, rows_of
from slpo_jax.io.files import flatten
from slpo_jax.io.workdir import Workdir
from slpo_jax.run.provenance import bound_settings
from small_run import TOTALS, finished_run, new_folder, run

pytestmark = pytest.mark.slow
# A variant of an objective under a name of its own.
CONFIG = """
import sys

sys.path.insert(0, ".")
from small import get_config as small

from slpo_jax.config import objective_variant


def get_config():
    config = small()
    objective_variant(config, "sampled", "pathwise", estimator="reward", temperature=1.0, learning_rate=5e-4)
    return config
"""
FIRST = ("pathwise", "sampled", "slpo")
ALL = ("pathwise", "sampled", "slpo", "answer_only")


def _command(names):
    return ("--config=side.py", "--workdir=work", f"--config.rl.objectives={names}")


def _begin(alone, folder):
    for stage in ("imitate", "imitate_control", "cold_start", "reasoner"):
        shutil.copytree(
            alone / "checkpoints" / stage, folder / "work" / "checkpoints" / stage
        )


@pytest.fixture(scope="module")
def alone():
    """A run of slpo alone."""
    return finished_run() / "work"


@pytest.fixture(scope="module")
def work(alone, tmp_path_factory):
    """Three objectives from the very same start, in another order."""
    folder = new_folder(tmp_path_factory.mktemp("side"))
    (folder / "side.py").write_text(CONFIG)
    _begin(alone, folder)
    run(*_command(FIRST), folder=folder)
    return folder / "work"


def _facts(work, name):
    stage = Workdir(work).stage_folder(name)
    return bound_settings(flatten(stage.read_config()), name) | stage.read_inputs()


def test_slpo_does_not_know_what_is_trained_beside_it(work, alone):
    """Nor what was trained before: the same batches and keys, to the last bit."""
    assert_same(checkpoint_of(work, "slpo"), checkpoint_of(alone, "slpo"))
    rows = [
        [row for row in rows_of(each) if row["stage"] == "slpo"]
        for each in (work, alone)
    ]
    assert rows[0] == rows[1]
    assert _facts(work, "slpo") == _facts(alone, "slpo")


def test_each_objective_has_metrics_of_its_own(work):
    rows = {
        name: [row for row in rows_of(work) if row["stage"] == name] for name in FIRST
    }
    for name in FIRST:
        assert [row["step"] for row in rows[name]] == list(range(1, TOTALS["slpo"] + 1))
        assert all(
            np.isfinite(value)
            for row in rows[name]
            for value in row.values()
            if not isinstance(value, str)
        )
    common = {"step", "stage", "loss", "reward", "solved", "mixed", "latent_steps", "answer_tokens", "cut",
              "stop_log_likelihood", "grad_norm", "learning_rate"}  # fmt: skip
    assert set(rows["pathwise"][0]) == common | {
        "reference_log_likelihood",
        "pass_at_k",
    }
    assert set(rows["sampled"][0]) == common | {
        "answer_log_likelihood",
        "answer_entropy",
    }
    assert {"latent_log_likelihood", "surrogate_variance"} < set(rows["slpo"][0])
    # The first step is taken from one start, on the same rollouts.
    assert (
        len(
            {(rows[name][0]["reward"], rows[name][0]["latent_steps"]) for name in FIRST}
        )
        == 1
    )


def _untimed(figures):
    """A row's figures by set, without the milliseconds, which differ from run to run."""
    untimed = {}
    for name, values in figures.items():
        untimed[name] = {key: values[key] for key in values if key != "milliseconds"}
    return untimed


def test_each_objective_has_a_checkpoint_of_its_own_its_settings_beside_it_and_a_row(
    work, alone
):
    wte = "['params']['reasoner']['backbone']['wte']"
    names = ("cold_start", *FIRST)
    assert len({checkpoint_of(work, name)[wte].tobytes() for name in names}) == len(
        names
    )
    ours, theirs = (
        json.loads((each / "report.json").read_text()) for each in (work, alone)
    )
    assert tuple(ours["eval"]) == (
        "imitate",
        "imitate_fixed_tmax",
        "imitate_control",
        *names,
    )
    for row in theirs["eval"]:  # the shared rows and slpo's are what they were alone
        assert _untimed(ours["eval"][row]) == _untimed(theirs["eval"][row])
    for name in FIRST:
        saved = Workdir(work).stage_folder(name).read_config()
        assert (saved["stages"], saved["rl"]["objectives"]) == (["rl"], [name])
        facts = _facts(work, name)
        assert {key.split(".")[1] for key in facts if key.startswith("objective.")} == {
            name
        }
        row = json.loads((work / "eval" / name / "row.json").read_text())["value"]
        assert row["gated"]
        assert row["label"] in (work / "report.md").read_text()
    sampled = _facts(work, "sampled")
    expected = {
        "kind": "pathwise",
        "estimator": "reward",
        "temperature": 1.0,
        "learning_rate": 5e-4,
    }
    assert {key: sampled[f"objective.sampled.{key}"] for key in expected} == expected
    assert sampled["rl.optimizer.learning_rate"] == 5e-4


def test_an_objective_added_later_is_all_that_is_trained_and_may_come_after_another(
    work,
):
    """It is what a run of its own makes that starts from the other's checkpoint, to the last bit."""
    stages = [path.parent for path in (work / "checkpoints").glob("*/finished")]
    before = {
        path: path.stat().st_mtime_ns
        for stage in stages
        for path in stage.rglob("*")
        if path.is_file()
    }
    rows = rows_of(work, timing=True)
    after = (
        "--config.objective.answer_only.after=pathwise",
        "--config.objective.answer_only.steps=4",
    )
    run(*_command(ALL), *after, folder=work.parent)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    now = rows_of(work, timing=True)
    assert now[: len(rows)] == rows
    assert {row["stage"] for row in now[len(rows) :]} == {"answer_only"}
    assert tuple(json.loads((work / "report.json").read_text())["eval"])[-4:] == ALL
    run(
        "--config=side.py", "--workdir=then", f"--config.init={work / 'checkpoints' / 'pathwise'}",
        "--config.stages=('rl',)", "--config.rl.objectives=('answer_only',)", "--config.rl.steps=4",
        folder=work.parent,
    )  # fmt: skip
    ours = checkpoint_of(work, "answer_only")
    assert_same(ours, checkpoint_of(work.parent / "then", "answer_only"))
    wte = "['params']['reasoner']['backbone']['wte']"
    start, first = (
        np.abs(ours[wte] - checkpoint_of(work, name)[wte]).max()
        for name in ("pathwise", "cold_start")
    )
    assert (ours["step"], 0 < start < first) == (4, True)
    facts = _facts(work, "answer_only")
    assert (facts["start"]["stage"], facts["rl.steps"]) == ("pathwise", 4)


def test_a_text_reasoner_thinks_in_words_and_in_soft_tokens(tmp_path):
    """CoT-SFT in words alone; then a block of mixtures before them, trained by its likelihood and by replay.

    Its answers stand in boxes, so that the rewards come from the host.
    """
    folder = new_folder(tmp_path)
    run(
        "--config=small.py", "--workdir=work", "--config.stages=('imitate','rl','evaluate')", "--config.max_latents=2",
        "--config.reasoner=text_gpt2", "--config.gate.enabled=False", "--config.imitate.c_thought=0",
        "--config.imitate.cot_steps=100",
        "--config.imitate.final_steps=0", "--config.imitate.control=False", "--config.max_answer_tokens=12",
        "--config.rl.objectives=('exact','pathwise')", "--config.objective.pathwise.estimator=reward",
        "--config.latent_policy.name=gumbel", "--config.dropout.rate=0.0", "--config.evaluate.temperature=2.0",
        "--config.prompt.answers=boxed", folder=folder,
    )  # fmt: skip
    for name in ("exact", "pathwise"):
        rows = [row for row in rows_of(folder / "work") if row["stage"] == name]
        assert len(rows) == TOTALS["slpo"]
        assert all(
            np.isfinite(row["loss"]) and row["latent_steps"] == 2 for row in rows
        )
        assert "stop_log_likelihood" not in rows[0]
        assert max(row["mixed"] for row in rows) > 0
    found = {}
    for name in ("imitate", "imitate_fixed_tmax", "exact", "pathwise"):
        lines = (
            (folder / "work" / "eval" / name / "real.jsonl").read_text().splitlines()
        )
        found[name] = [json.loads(line) for line in lines]
        assert {record["latent_steps"] for record in found[name]} == {
            0 if name == "imitate" else 2
        }
    words = found["imitate"]
    assert np.mean([record["correct"] for record in words]) > 0.5
    assert all(" = " in record["completion"] for record in words), (
        "steps are written out"
    )
    assert all(
        record["answer"] in record["completion"].partition("boxed{")[2]
        for record in words
        if record["correct"]
    )
    assert (
        max(
            len({sample["completion"] for sample in record["samples"]})
            for record in found["pathwise"]
        )
        > 1
    )


def test_batches_of_mixed_groups_are_drawn_anew_where_a_run_goes_on(alone, tmp_path):
    """An interrupted run draws what one in one go does, and the metrics say how much that was."""
    folder = new_folder(tmp_path)
    _begin(alone, folder)
    command = ("--config=small.py", "--workdir=work", "--config.rl.dynamic_batches=3", "--config.checkpoint_every=4",
               "--config.stages=('imitate','cold_start','rl')")  # fmt: skip
    run(*command, folder=folder)
    whole = checkpoint_of(folder / "work", "slpo")
    rows = rows_of(folder / "work")
    drawn = [
        (row["groups_drawn"], row["groups_kept"])
        for row in rows
        if row["stage"] == "slpo"
    ]
    assert len(drawn) == TOTALS["slpo"]
    assert all(4 <= groups <= 12 and kept <= 4 for groups, kept in drawn)
    assert len({groups for groups, _ in drawn}) > 1
    left = folder / "work" / "checkpoints" / "slpo"
    (left / "finished").unlink()
    shutil.rmtree(left / str(TOTALS["slpo"]))
    run(*command, folder=folder)
    assert_same(whole, checkpoint_of(folder / "work", "slpo"))
    assert rows_of(folder / "work") == rows

"""A run that was interrupted, anywhere and in any way, ends as one that was not."""

import contextlib
import os
import shutil
import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from imitation import Crash, crash, fake_steps
from same_run import assert_same, assert_same_run, checkpoint_of, rows_of
from slpo_jax.config import read_config
from slpo_jax.errors import UserError
from slpo_jax.io.workdir import Workdir
from slpo_jax.run import train_stage
from slpo_jax.run.experiment import build
from slpo_jax.training import loop
from small_run import load_config, train

pytestmark = pytest.mark.usefixtures("cpu_devices")
STAGES = ("imitate", "imitate_control", "cold_start", "slpo")
BUMPY = (0.1, 0.5, 0.4, 0.7, 0.6, 0.7, 0.2, 0.3)  # validation accuracies, by evaluation


def _accuracy(experiment, params, stopping, rule):
    """By the gate's parameters alone, and going up and down."""
    return BUMPY[int(float(optax.tree.norm(params["gate"])) * 1e3) % len(BUMPY)]


@pytest.fixture(scope="module", autouse=True)
def record():
    """Stages without models; a vector a part is all that their steps need."""
    tiny = {"reasoner": {"w": jnp.arange(3.0)}, "gate": {"w": jnp.ones(2)}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_stage, "validation_accuracy", _accuracy)
        yield fake_steps(
            patch,
            tiny,
            lambda batch: (
                np.asarray(batch.draw_ids) * np.arange(1, len(batch.draw_ids) + 1)
            ),
        )


@pytest.fixture
def fake(record):
    """The record, as before the first step."""
    record["steps"].clear()
    record.update(at=None, learns=False)
    return record


def _config(**changes):
    """Phases of 4 and 5 steps, a control of 6 more, 7 of the gate with a validation every 2, a checkpoint every 2.

    A row is of 3 steps, so that what is stopped often has some of a row's steps behind it.
    """
    config = load_config()
    config.imitate.update(cot_steps=4, final_steps=5)
    config.cold_start.update(steps=7, evaluate_every=2)
    config.log_every = 3
    config.checkpoint_every = 2
    config.update(changes)
    return config


def _run(workdir, config=None):
    experiment = build(read_config(config or _config()), workdir)
    with contextlib.closing(experiment.log):
        train(experiment)


@pytest.fixture(scope="module")
def whole(record, tmp_path_factory):
    """What a run leaves that nobody interrupted."""
    workdir = tmp_path_factory.mktemp("whole")
    record.update(at=None, learns=False)  # before `fake`, which is of each test
    _run(workdir)
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize(("reset", "counts"), [(True, (5, 11)), (False, (9, 15))])
def test_optimizer_is_reset_at_every_phase(fake, tmp_path, reset, counts):
    config = _config(stages=("imitate",))
    config.imitate.reset_optimizer = reset
    _run(tmp_path, config)
    found = [checkpoint_of(tmp_path, stage) for stage in ("imitate", "imitate_control")]
    assert [
        {int(v) for path, v in each.items() if "rest" in path and "count" in path}
        for each in found
    ] == [{count} for count in counts]


def _terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def _cut(fake, at, workdir, config=None, what=crash):
    """A run in which this happens at the (stream, step) `at`; what it ends with. Nothing of it stays in the process."""
    fake.update(at=at, what=what)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Crash if what is crash else SystemExit) as ended:
        _run(workdir, config)
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    ] == before
    assert fake["at"] is None
    return ended.value


STOPS = (
    [("imitate", n) for n in (0, 3, 4, 8, 9, 12)]
    + [("cold_start", n) for n in (1, 3, 5, 6)]
    + [("rl", 5)]
)


@pytest.mark.slow
@pytest.mark.parametrize("what", [_terminate, crash])
def test_interrupted_anywhere(fake, whole, tmp_path, what):
    """One after the other, in one workdir: at each of these steps the run is stopped and started again.

    A kill may leave a torn line.
    """
    for at in STOPS:
        ended = _cut(fake, at, tmp_path, what=what)
        if what is _terminate:
            assert ended.code == 128 + signal.SIGTERM
        else:
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write('{"step": 5, "sta')
    _run(tmp_path)
    assert_same_run(tmp_path, whole, *STAGES)
    if what is _terminate:  # it saves before it leaves, so no step is taken twice
        assert len(fake["steps"]) == len(set(fake["steps"])) == 9 + 6 + 7 + 6


def _learning(every):
    """Phases of at most 14 and 10 steps, which end when the accuracies of three steps say so."""
    config = _config(checkpoint_every=every, stages=("imitate",))
    config.imitate.update(
        cot_steps=14, final_steps=10, stage_until=0.685, stage_least=2, no_thought=True
    )
    return config


def _learned():
    """The steps after which both end, by hand: a step after three whose mean of |sin(step)| is large enough."""
    ends = []
    start = 0
    for _ in range(2):
        right = (
            n + 4
            for n in range(start, 99)
            if np.mean([abs(np.sin(n + i)) for i in range(3)]) >= 0.685
        )
        start = next(right)
        ends.append(start)
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("what", [_terminate, crash])
def test_stages_end_when_they_are_learned_wherever_the_run_is_cut(
    fake, monkeypatch, tmp_path, what
):
    """In the middle of a window, at the end of a stage and after it, and in the control, which goes on from there.

    Without thoughts they end where they did with them, whatever is learned.
    """
    monkeypatch.setattr(loop, "WINDOW", 3)
    fake["learns"] = True
    _run(tmp_path / "whole", _learning(100))
    assert _learned() == [11, 17]
    assert fake["steps"] == [("imitate", n) for n in (*range(17 + 6), *range(17))]
    rows = [(row["stage"], row["step"]) for row in rows_of(tmp_path / "whole")]
    assert rows == [("imitate", n) for n in (3, 6, 9, 12, 15, 17)] + [
        ("imitate_control", n) for n in (18, 21, 23)
    ] + [("imitate_no_thought", n) for n in (3, 6, 9, 12, 15, 17)]
    for at in (0, 1, 6, 9, 10, 11, 12, 14, 16, 17, 20):
        _cut(fake, ("imitate", at), tmp_path / "cut", _learning(2), what)
    _run(tmp_path / "cut", _learning(2))
    _run(tmp_path / "cut", _learning(2))
    assert_same_run(tmp_path / "cut", tmp_path / "whole", *STAGES[:2])
    assert [checkpoint_of(tmp_path / "cut", stage)["step"] for stage in STAGES[:2]] == [
        17,
        23,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 7])
def test_the_cold_start_leaves_the_best_gate(fake, monkeypatch, tmp_path, every):
    """Also where a checkpoint of its last step was there before the choice was made."""
    accuracies = iter((0.2, 0.7, 0.7, 0.3))
    monkeypatch.setattr(train_stage, "validation_accuracy", lambda *_: next(accuracies))
    _run(tmp_path, _config(checkpoint_every=every))
    found = {
        row["step"]: row["valid_accuracy"]
        for row in rows_of(tmp_path)
        if "valid_accuracy" in row
    }
    assert found == {2: 0.2, 4: 0.7, 6: 0.7, 7: 0.3}
    gate = checkpoint_of(tmp_path, "cold_start")["['params']['gate']['w']"]
    best = 4  # the first of equals
    np.testing.assert_array_equal(
        gate, checkpoint_of(tmp_path, "cold_start", best)["['params']['gate']['w']"]
    )
    assert (
        Workdir(tmp_path).stage_folder("cold_start").steps
        == [best, 6, 7][:: 2 if every == 7 else 1]
    )


@pytest.mark.slow
def test_an_objective_leaves_its_best_if_asked_to(fake, tmp_path):
    """And the same if it was killed after the best validation."""
    config = _config()
    config.rl.update(evaluate_every=2, steps=10)
    _run(tmp_path / "whole", config)
    _cut(fake, ("rl", 7), tmp_path / "cut", config)
    _run(tmp_path / "cut", config)
    assert_same_run(tmp_path / "cut", tmp_path / "whole", *STAGES)
    rows = [
        row
        for row in rows_of(tmp_path / "cut")
        if row["stage"] == "slpo" and "valid_accuracy" in row
    ]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10]
    accuracies = [row["valid_accuracy"] for row in rows]
    step = rows[accuracies.index(max(accuracies))]["step"]
    best, left = (checkpoint_of(tmp_path / "cut", "slpo", at) for at in (step, 10))
    assert step < 10
    assert (
        best["['params']['reasoner']['w']"].tolist()
        == left["['params']['reasoner']['w']"].tolist()
    )


@pytest.mark.slow
def test_raised_steps_of_rewards_go_on_where_the_stage_has_ended(fake, whole, tmp_path):
    """As in a run that was asked for all of them at once, and so does the control; no rate falls to an end."""
    more = _config()
    more.rl.steps = 9
    _run(tmp_path / "at_once", more)
    shutil.copytree(whole, tmp_path / "raised")
    fake["steps"].clear()
    _run(tmp_path / "raised", more)
    assert {stage for stage, _ in fake["steps"]} == {"imitate", "rl"}
    for stage in STAGES:
        assert_same(
            checkpoint_of(tmp_path / "raised", stage),
            checkpoint_of(tmp_path / "at_once", stage),
        )
        rows = [
            [row for row in rows_of(tmp_path / name) if row["stage"] == stage]
            for name in ("raised", "at_once")
        ]
        assert rows[0] == rows[1]
    fake["steps"].clear()
    _run(tmp_path / "raised", more)
    assert not fake["steps"]
    with pytest.raises(UserError, match=r"^config\.rl\.steps: is 6, and 9 is what "):
        _run(tmp_path / "raised")
    falling = _config()
    falling.rl.optimizer.schedule = "linear"
    _run(tmp_path / "falling", falling)
    falling.rl.steps = 9
    falling.imitate.control = False
    with pytest.raises(UserError, match=r"^config\.rl\.steps: is 9, and 6 is what "):
        _run(tmp_path / "falling", falling)


@pytest.mark.slow
def test_the_cold_start_gives_up_in_time(fake, monkeypatch, tmp_path, caplog, capsys):
    monkeypatch.setattr(
        train_stage, "validation_accuracy", lambda *_: 0.5
    )  # never better than the first
    config = _config(checkpoint_every=100)
    config.cold_start.update(steps=100, patience=3)
    _run(tmp_path, config)
    assert checkpoint_of(tmp_path, "cold_start")["step"] == 2 + 3 * 2
    why = "no validation was better than at step 2 (config.cold_start.patience)"
    assert caplog.messages.count(f"cold_start: ends after step 8 of 100: {why}") == 1
    assert "cold_start: 8/8 steps" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_between_the_steps_is_obeyed(fake, whole, monkeypatch, tmp_path):
    """While the last gate is being validated, say: no step is left that could see to it."""
    accuracy = train_stage.validation_accuracy
    calls = []

    def validating(*arguments):
        calls.append(1)
        if len(calls) == 4:
            _terminate()
        return accuracy(*arguments)

    monkeypatch.setattr(train_stage, "validation_accuracy", validating)
    with pytest.raises(SystemExit):
        _run(tmp_path / "cut")
    assert not (tmp_path / "cut" / "checkpoints" / "slpo").exists()
    _run(tmp_path / "cut")
    assert_same_run(tmp_path / "cut", whole, *STAGES)


@pytest.mark.slow
def test_a_stage_that_never_got_to_a_checkpoint_binds_nobody(fake, tmp_path):
    _cut(fake, ("imitate", 1), tmp_path)
    config = _config(checkpoint_every=100)
    config.imitate.final_steps = 6
    _run(tmp_path, config)
    assert checkpoint_of(tmp_path, "imitate")["step"] == 10


@pytest.mark.slow
def test_the_best_gate_so_far_is_gone_on_from(fake, whole, tmp_path):
    """A kill where there is no other checkpoint of the stage, between two rows of the log."""
    config = _config(checkpoint_every=100)
    _cut(fake, ("cold_start", 5), tmp_path, config)
    (best,) = Workdir(tmp_path).stage_folder("cold_start").steps
    _run(tmp_path, config)
    assert_same_run(tmp_path, whole, *STAGES)
    assert [step for stage, step in fake["steps"] if stage == "cold_start"] == [
        *range(6),
        *range(best, 7),
    ]

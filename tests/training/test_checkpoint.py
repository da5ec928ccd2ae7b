"""Checkpoints hold the whole state, are told apart from others, and never outrun the log."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from same_run import rows_of
from slpo_jax.config import Config
from slpo_jax.errors import SaveError, UserError
from slpo_jax.io import artifact
from slpo_jax.io.orbax import load_params, stored_params
from slpo_jax.io.workdir import StageFolder, Workdir
from slpo_jax.run.experiment import Stage
from slpo_jax.run.train_stage import open_stage
from slpo_jax.runtime import backend
from slpo_jax.training import loop
from slpo_jax.training.loop import StageLoop
from slpo_jax.training.metrics import MetricsLog
from slpo_jax.training.stage_checkpoints import StageCheckpoints
from slpo_jax.training.state import TrainState


def _state(width: int = 3, layers: int = 1) -> TrainState:
    params = {
        "reasoner": {f"h_{n}": jnp.full((2, width), 1.5 + n) for n in range(layers)}
    }
    optimizer = optax.adam(1.0)
    return TrainState(jnp.int32(4), params, optimizer.init(params), jax.random.key(7))


def test_the_whole_state_comes_back(tmp_path):
    state = _state()
    grads = jax.tree.map(lambda x: x / 3, state.params)
    state = state.replace(opt_state=optax.adam(1.0).update(grads, state.opt_state)[1])
    keeper = StageCheckpoints(tmp_path)
    assert keeper.latest_step is None
    keeper.save(state, {"accuracy": 0.1, "step": 3})
    keeper.close()
    restored, extra = StageCheckpoints(tmp_path).restore(_state())
    assert extra == {"accuracy": 0.1, "step": 3}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for ours, theirs in zip(
        jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert (ours == theirs).all()


_RESTORED = """
import sys, jax, orbax.checkpoint as ocp

assert jax.device_count() == 1
(leaf,) = jax.tree.leaves(ocp.StandardCheckpointer().restore(sys.argv[1]))
print(leaf.tolist())
"""


@pytest.mark.slow
def test_orbax_alone_reads_parameters_on_another_number_of_devices(tmp_path):
    assert jax.device_count() > 1
    everywhere = NamedSharding(
        jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec()
    )
    state = jax.device_put(_state(), everywhere)
    keeper = StageCheckpoints(tmp_path)
    keeper.save(state)
    keeper.close()
    environment = os.environ | {
        "XLA_FLAGS": "",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", _RESTORED, str(tmp_path / "4" / "params")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120
    )
    assert json.loads(done.stdout) == state.params["reasoner"]["h_0"].tolist(), (
        done.stderr[-2000:]
    )


def test_what_is_saved_is_as_it_was_however_late_it_is_written(tmp_path, monkeypatch):
    """The next step gives the buffers away, and adds to the dicts that it was handed."""
    state = _state()
    keeper = StageCheckpoints(tmp_path)
    given = mock.Mock()
    extra = {"metric_sums": {"loss": [1.5, 2.0]}, "accuracies": [0.5]}
    before = jax.tree.map(
        np.array,
        {"opt_state": state.opt_state, "step": state.step, "skipped": state.skipped},
    )
    before |= {
        "params": np.array(state.params["reasoner"]["h_0"]),
        "key": np.array(jax.random.key_data(state.key)),
    }
    monkeypatch.setattr(keeper._manager, "save", given)
    monkeypatch.setattr(keeper, "_checksum", mock.Mock())
    keeper.save(state, extra)
    extra["metric_sums"]["loss"] = [9.0, 9.0]
    extra["accuracies"].append(0.75)
    for leaf in jax.tree.leaves((state, jax.random.key_data(state.key))):
        leaf.delete()
    saved = given.call_args.kwargs["args"]
    assert saved["extra"].item == {
        "metric_sums": {"loss": [1.5, 2.0]},
        "accuracies": [0.5],
    }
    found = {**saved["rest"].item, "params": saved["params"].item["reasoner"]["h_0"]}
    jax.tree.map(np.testing.assert_array_equal, found, before)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (_state(width=4), "reasoner/h_0 is (2, 3) there, (2, 4) here"),
        (_state(layers=2), "reasoner/h_1 is None there, (2, 3) here"),
        (_state(layers=0), "reasoner/h_0 is (2, 3) there, None here"),
    ],
)
def test_a_checkpoint_of_another_model(tmp_path, other, what):
    keeper = StageCheckpoints(tmp_path)
    keeper.save(_state())
    keeper.close()
    said = rf"^{tmp_path}\S* does .*\({re.escape(what)}\); set config\.gate, config\.model.*$"
    with pytest.raises(UserError, match=said):
        load_params(tmp_path, other.params)


@pytest.mark.parametrize("content", ["nothing", "empty", "text"])
def test_no_checkpoint_where_one_should_be(tmp_path, content):
    path = tmp_path / "there"
    if content == "empty":
        path.mkdir()
    elif content == "text":
        path.write_text("not a checkpoint")
    with pytest.raises(UserError, match=r"config\.init: .*there "):
        load_params(path, _state().params)


def _begun(workdir, total, *every, start=0, **more):
    """A stage's run, its state, and of what would be its checkpoints the steps, with those of the rows by then."""
    saved = {}
    keeper = mock.Mock(directory=Path("work/checkpoints/slpo"))

    def save(state, extra=None, replace=False):
        saved[int(state.step)] = [row["step"] for row in rows_of(workdir)]

    keeper.save = save
    run = StageLoop("slpo", total, start, MetricsLog(Workdir(workdir)), keeper, log_every=every[0],
                   checkpoint_every=every[1], max_skipped=3, **more)  # fmt: skip
    return run, _state().replace(step=jnp.int32(start)), saved


def _step(metrics_of):
    """A step whose metrics are a function of its batch."""

    @jax.transfer_guard("allow")
    def step(state, batch):
        return state.replace(step=state.step + 1), metrics_of(batch)

    return step


def test_rows_come_one_step_late_and_none_is_lost(tmp_path):
    """A checkpoint's own step is in the log before the checkpoint is on disk."""
    run, state, saved = _begun(tmp_path, 6, 2, 4)
    run.finish(
        run.advance(
            state,
            _step(lambda batch: {"loss": jnp.float32(batch)}),
            lambda step: step,
            6,
        )
    )
    assert saved == {4: [2, 4], 6: [2, 4, 6]}
    assert [row["loss"] for row in rows_of(tmp_path)] == [0.5, 2.5, 4.5]


def test_a_verifier_takes_a_part_of_its_steps(tmp_path, clock):
    """Each row has its own steps' seconds, also the last one, whose steps are over before the row before is written."""
    run, state, _ = _begun(tmp_path, 3, 1, 9)

    def metrics_of(number):
        judging = 1.0 + number
        clock[0] += 2 * judging
        return {"loss": jnp.float32(1.0), "verifier_seconds": judging}

    run.finish(run.advance(state, _step(metrics_of), lambda step: step, 3))
    rows = rows_of(tmp_path, timing=True)
    found = [(row["verifier_seconds"], row["seconds"]) for row in rows]
    assert found == [(1, 2), (2, 4), (3, 6)]


def test_a_mean_over_nothing_is_no_figure(tmp_path):
    """Such as the reward of a row of steps in which all completions are masked."""
    run, state, _ = _begun(tmp_path, 4, 2, 9)

    def metrics_of(number):
        counts = {"loss": 2.0, "reward": 8.0 if number > 1 else 0.0}
        reward = 0.5 if number > 1 else 0.0
        return {"loss": jnp.float32(1.0), "reward": reward, "counts": counts}

    run.finish(run.advance(state, _step(metrics_of), lambda step: step, 4))
    masked, judged = rows_of(tmp_path)
    assert "reward" not in masked
    assert judged["reward"] == 0.5


def test_a_verifier_takes_no_more_than_its_steps(tmp_path):
    """Where its clock has gone further than theirs, of rows of several steps."""
    run, state, _ = _begun(tmp_path, 4, 2, 9)

    def metrics_of(_):
        return {"loss": jnp.float32(1.0), "verifier_seconds": 60.0}

    run.finish(run.advance(state, _step(metrics_of), lambda step: step, 4))
    rows = rows_of(tmp_path, timing=True)
    assert len(rows) == 2
    for row in rows:
        assert row["verifier_seconds"] == pytest.approx(row["seconds"])
        assert row["verifier_share"] == pytest.approx(1.0)


# Of six steps: the loss, what it is a mean over, the gradient's norm, and whether the step changed nothing.
LOGGED = [
    (1.0, 2, 5.0, 0), (4.0, 1, 7.0, 0), (0.0, 0, 0.0, 0), (np.nan, 3, np.nan, 1), (8.0, 3, 1.0, 0), (2.0, 1, 3.0, 0),
]  # fmt: skip


def _logged(workdir, stop_at=None):
    """The rows of a run with those steps, rows of 4 steps and checkpoints of 3; it may be killed before one of them."""
    config = Config(log_every=4, checkpoint_every=3, max_skipped_steps=3)
    log = MetricsLog(Workdir(workdir))
    policy = types.SimpleNamespace(latent_policy=types.SimpleNamespace(says=None))
    experiment = types.SimpleNamespace(
        config=config, workdir=Workdir(workdir), log=log, policy=policy
    )
    run, state, _ = open_stage(
        Stage(experiment, "slpo"), _state().replace(step=jnp.int32(0)), 6
    )

    @jax.transfer_guard("allow")
    def step_fn(state, number):
        if number == stop_at:
            raise KeyboardInterrupt
        loss, count, norm, skipped = LOGGED[number]
        metrics = {
            "loss": jnp.float32(loss),
            "counts": {"loss": jnp.float32(count)},
            "grad_norm": jnp.float32(norm),
        }
        metrics |= {
            "skipped_in_a_row": jnp.int32(skipped),
            "skipped_steps": jnp.int32(number >= 3),
        }
        return state.replace(step=state.step + 1), metrics

    try:
        run.finish(run.advance(state, step_fn, lambda step: step, 6))
    except KeyboardInterrupt:
        run.checkpoints.close()
    experiment.log.close()
    return rows_of(workdir) if experiment.log.path.exists() else []


def test_logged_metrics_are_means_over_the_interval(tmp_path):
    """Weighted with what each step's are of; a step that was skipped is counted, and in no mean."""
    rows = _logged(tmp_path)
    assert rows == [
        {
            "step": 4,
            "stage": "slpo",
            "loss": 6 / 3,
            "grad_norm": 12 / 3,
            "skipped_steps": 1,
        },
        {
            "step": 6,
            "stage": "slpo",
            "loss": 26 / 4,
            "grad_norm": 4 / 2,
            "skipped_steps": 1,
        },
    ]


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass where the test says so; some were spent on compilation before."""
    now = [100.0]
    monkeypatch.setattr(
        loop, "time", types.SimpleNamespace(perf_counter=lambda: now[0])
    )
    monkeypatch.setattr(backend, "_seconds", 7.0)
    return now


def test_a_row_s_seconds_are_those_of_its_steps_alone(tmp_path, clock):
    """Of 2 s each, without 30 of compilation and 50 of validation; nor are tokens of an earlier command counted."""

    def metrics(number):
        if number == 4:
            clock[0] = clock[0] + 30
            backend._seconds = backend._seconds + 30
        clock[0] += 2
        found = {"latent_steps": jnp.float32(3), "answer_tokens": jnp.float32(2)}
        return found | {"counts": dict.fromkeys(found, 10)}

    sums = {"latent_steps": [900.0, 30.0], "answer_tokens": [60.0, 30.0]}
    run, state, _ = _begun(
        tmp_path, 8, 5, 9, start=3, sums=dict(sums), tokens=tuple(sums)
    )
    for until in (4, 5, 8):
        state = run.advance(state, _step(metrics), lambda step: step, until)
        with run.pause():
            clock[0] += 50
    (row, last) = rows_of(tmp_path, timing=True)
    assert (row["seconds"], row["tokens_per_second"]) == (2, 25)
    assert (row["latent_steps"], last["latent_steps"]) == (960 / 50, 3)
    assert (last["seconds"], last["tokens_per_second"]) == (2, 25)


@pytest.mark.parametrize("stop_at", [3, 4, 5])
def test_logged_metrics_of_a_run_killed_within_an_interval_are_the_same(
    tmp_path, stop_at
):
    assert len(_logged(tmp_path / "cut", stop_at)) == (stop_at > 4)
    assert _logged(tmp_path / "cut") == _logged(tmp_path / "whole")


def test_a_step_that_reads_the_host_s_memory_is_refused(tmp_path):
    run, state, _ = _begun(tmp_path, 2, 4, 5)
    step = jax.jit(
        lambda state, batch: (state.replace(step=state.step + 1), {"loss": batch.sum()})
    )
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"
    ):
        run.advance(state, step, lambda step: np.ones(3), 2)


def test_answers_cut_at_the_limit_are_said_once_a_stage(tmp_path, warnings):
    shares = [0.5, 0.75, 1.0, 0.2]
    run, state, _ = _begun(tmp_path, 4, 1, 9)
    step = _step(
        lambda number: {"loss": jnp.float32(0), "cut": jnp.float32(shares[number])}
    )
    run.advance(state, step, lambda step: step, 4)
    assert [row["cut"] for row in rows_of(tmp_path)] == pytest.approx(shares)
    said = "75% of the answers are truncated, and wrong whatever they say; raise config.max_answer_tokens"
    assert warnings == [f"slpo at step 2: {said}"]


def test_a_checkpoint_that_the_first_process_alone_sees_is_one_line(
    tmp_path, second_process
):
    with second_process(), pytest.raises(UserError, match="slpo: process 1 "):
        _logged(tmp_path)


@pytest.mark.parametrize("until", [1.0, 0.75])
def test_a_stage_ends_where_the_window_s_mean_is_what_is_asked_for(until):
    """Exactly that too, else one of 1 would never end; not before the window is full."""
    window = loop.AccuracyWindow()
    for _ in range(loop.WINDOW):
        assert not window.is_learned(until)
        window.add({"accuracy": np.float32(until)})
    window.add({"loss": 1.0})  # which says nothing
    assert window.is_learned(until)
    worse = loop.AccuracyWindow([*window.accuracies[1:], until - 0.01])
    assert not worse.is_learned(until)


@pytest.mark.parametrize(
    "where", ["step", "batch", "row", "checkpoint", "between the steps", ""]
)
def test_signals_are_let_go_of_on_every_way_out(tmp_path, monkeypatch, where):
    """Once what is being saved is on the disk; in a notebook the process goes on."""

    def fails(*_, **__):
        raise RuntimeError(where)

    stops = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in stops]
    run, state, _ = _begun(tmp_path, 4, 2, 3)
    assert all(
        signal.getsignal(number) != own
        for number, own in zip(stops, before, strict=True)
    )
    if where in ("row", "checkpoint"):
        what, name = (
            (run.metrics_log, "write") if where == "row" else (run.checkpoints, "save")
        )
        monkeypatch.setattr(what, name, fails)
    step, batch = _step(lambda batch: {"loss": jnp.float32(batch)}), lambda step: step
    with (
        pytest.raises(RuntimeError, match=where) if where else contextlib.nullcontext(),
        run,
    ):
        state = run.advance(
            state,
            fails if where == "step" else step,
            fails if where == "batch" else batch,
            4,
        )
        if where.startswith("between"):
            fails()
        run.finish(state)
    assert [signal.getsignal(number) for number in stops] == before
    run.checkpoints.close.assert_called_once_with()


def _skip(tmp_path, bad):
    """Twelve steps of which those in `bad` are counted as not finite."""

    @jax.transfer_guard("allow")
    def step(state, batch):
        skipped = (
            state.skipped * jnp.array([1, 0])
            if batch["number"] not in bad
            else state.skipped + 1
        )
        metrics = {
            "loss": jnp.float32(0),
            "skipped_steps": skipped[0],
            "skipped_in_a_row": skipped[1],
        }
        return state.replace(step=state.step + 1, skipped=skipped), metrics

    run, state, saved = _begun(tmp_path, 12, 4, 5)
    return run.advance(state, step, lambda step: {"number": np.int32(step)}, 12), [
        *saved
    ]


def test_a_run_ends_after_so_many_steps_in_a_row_that_are_not_finite(tmp_path):
    said = "loss or gradient was not finite in the last 3 steps, up to step 9, "
    with pytest.raises(
        UserError, match=rf"{said}.*failed_slpo_9\.npz.*work/checkpoints/slpo"
    ):
        _skip(tmp_path, {1, 2, 6, 7, 8, 9})
    assert (
        np.load(tmp_path / "failed_slpo_9.npz")["['number']"] == 8
    )  # the ninth step's
    assert {row["step"]: row.get("skipped_steps") for row in rows_of(tmp_path)} == {
        4: 2,
        8: 4,
    }


def test_a_few_steps_that_are_not_finite_are_no_more_than_counted(tmp_path):
    state, saved = _skip(tmp_path, {6, 7, 10, 11})
    assert (state.skipped.tolist(), saved) == ([4, 2], [5, 10])
    assert not list(tmp_path.glob("failed*"))
    assert ["skipped_steps" in row for row in rows_of(tmp_path)] == [False, True, True]


def _two(path):
    """Checkpoints of steps 4 and 8, the second's parameters one more."""
    keeper = StageCheckpoints(path)
    for step in (4, 8):
        params = jax.tree.map(lambda x, step=step: x + step, _state().params)
        keeper.save(
            _state().replace(step=jnp.int32(step), params=params), {"step": step}
        )
    keeper.close()


def test_the_best_stays_beside_the_newest_until_another_is(tmp_path):
    for best, steps, left in (
        (8, (4, 8, 12, 16), [8, 12, 16]),
        (8, (20,), [8, 16, 20]),
        (24, (24, 28), [24, 28]),
    ):
        keeper = StageCheckpoints(tmp_path)
        keeper.keep(best)
        for step in steps:
            keeper.save(_state().replace(step=jnp.int32(step)))
        keeper.close()
        assert StageFolder(tmp_path).steps == left


def _largest(folder):
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != "checksums.json"
    )
    return max(files, key=lambda path: path.stat().st_size)


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit": _flip,
    "the end cut off": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "a file gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_neither_read_nor_gone_on_from(tmp_path, how, caplog):
    """Nor are other parameters read in its stead: the stage's last are what is asked for."""
    _two(tmp_path)
    DAMAGE[how](_largest(tmp_path / "8" / "params"))
    for read in (
        lambda: load_params(tmp_path, _state().params),
        lambda: stored_params(tmp_path),
    ):
        with pytest.raises(UserError, match=r"8/params: .*delete .*8"):
            read()
    keeper = StageCheckpoints(tmp_path)
    with pytest.raises(UserError, match="holds no whole checkpoint"):
        keeper.restore(_state(), newest=True)
    state, extra = keeper.restore(_state())
    assert (int(state.step), extra) == (4, {"step": 4})
    np.testing.assert_array_equal(state.params["reasoner"]["h_0"], np.full((2, 3), 5.5))
    assert "step 8 is damaged" in caplog.text
    assert "going on from the checkpoint of step 4" in caplog.text
    # What comes after the one gone back to can be saved again.
    keeper.save(state.replace(step=jnp.int32(8)), {"step": 88})
    keeper.close()
    assert StageCheckpoints(tmp_path).restore(_state())[1] == {"step": 88}


def test_what_no_digest_covers_is_used_with_a_warning_or_not_at_all(tmp_path, caplog):
    _two(tmp_path)
    seal = tmp_path / "8" / "checksums.json"
    artifact.write(seal)  # of no file
    with pytest.raises(UserError, match=r"8/params: .*checksums\.json"):
        load_params(tmp_path, _state().params)
    seal.write_text(seal.read_text()[:-9])
    with pytest.raises(UserError, match=r"8/params: .*checksums\.json"):
        load_params(tmp_path, _state().params)
    seal.unlink()
    assert load_params(tmp_path, _state().params)["reasoner"]["h_0"][0, 0] == 9.5
    assert "8: is used unchecked, without its checksums.json" in caplog.text
    _largest(tmp_path / "8" / "params").write_bytes(b"")
    with pytest.raises(UserError, match="8/params: "):
        load_params(tmp_path, _state().params)
    for step in ("4", "8"):
        shutil.rmtree(tmp_path / step / "params")
    (tmp_path / "finished").write_text("8\n")
    with pytest.raises(UserError, match=r"step .*delete "):
        load_params(tmp_path, _state().params)


def test_damage_that_nobody_sealed_is_one_line_too(tmp_path):
    _two(tmp_path)
    for step in ("4", "8"):
        (tmp_path / step / "checksums.json").unlink()
        for path in (tmp_path / step).rglob("*"):
            if path.is_file():
                path.write_bytes(b"\0" * 9)
    with pytest.raises(UserError, match="no whole checkpoint"):
        StageCheckpoints(tmp_path).restore(_state())
    assert {path.name for path in tmp_path.iterdir()} >= {
        "4",
        "8",
    }  # nothing is lost that might be mended
    with pytest.raises(UserError, match="params: "):
        load_params(tmp_path, _state().params)


def test_what_can_not_be_read_is_no_damage_and_is_not_deleted(tmp_path):
    _two(tmp_path)
    for name in ("extra", "params"):  # a folder in the place of a file
        path = (
            tmp_path / "8" / name / {"extra": "metadata", "params": "_METADATA"}[name]
        )
        kept = path.read_bytes()
        (tmp_path / "8" / "checksums.json").unlink(missing_ok=True)
        path.unlink()
        path.mkdir()
        keeper = StageCheckpoints(tmp_path)
        with pytest.raises(IsADirectoryError, match=path.name):
            keeper.restore(_state())
        if name == "params":
            for read in (
                lambda: load_params(tmp_path, _state().params),
                lambda: stored_params(tmp_path),
            ):
                with pytest.raises(IsADirectoryError, match=path.name):
                    read()
        keeper.close()
        path.rmdir()
        path.write_bytes(kept)
    assert StageCheckpoints(tmp_path).restore(_state())[1] == {"step": 8}


def test_a_finished_stage_s_last_checkpoint_is_not_replaced_by_an_earlier_one(tmp_path):
    _two(tmp_path)
    (tmp_path / "finished").write_text("8\n")
    assert load_params(tmp_path, _state().params)["reasoner"]["h_0"][0, 0] == 9.5
    shutil.rmtree(tmp_path / "8")
    with pytest.raises(UserError, match=r"step 8.*delete .*finished.*step 4"):
        load_params(tmp_path, _state().params)
    for file in (tmp_path / "4").rglob("*.json"):
        file.write_text("")
    (tmp_path / "finished").write_text("4\n")
    with pytest.raises(UserError, match=r"4/params: .*delete .*4 .*finished"):
        load_params(tmp_path, _state().params)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    _two(tmp_path)
    keeper = StageCheckpoints(tmp_path)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1_000_000)
    )
    with pytest.raises(UserError, match=r"2 MB.* 1\.0"):
        keeper.save(_state().replace(step=jnp.int32(12)))
    keeper.close()
    assert StageCheckpoints(tmp_path).restore(_state())[1] == {"step": 8}


FULL = (
    'RESOURCE_EXHAUSTED: Error writing "h_1.bias/1" in OCDBT database at local file "/w/4.orbax-checkpoint-tmp/rest/": '
    'Failed writing: "/w/d/718a": Failed to write 198822 bytes to file 8: No space left on device '
    "[os_error_code='28'] [tensorstore_spec='{\"context\":{\"cache_pool\":{}}}']"
)


@pytest.mark.parametrize(
    "error", [ValueError(FULL), OSError(28, "No space left on device")]
)
def test_a_disk_that_fills_during_a_save_is_one_line_that_says_so(
    tmp_path, monkeypatch, error
):
    """tensorstore's error names the reason after hundreds of letters. What was begun takes no room after a new start.

    A save that fails in earnest leaves threads that may never end: tests/run/test_pipeline.py has one in a program.
    """
    _two(tmp_path)
    keeper = StageCheckpoints(tmp_path)
    keeper.save(_state().replace(step=jnp.int32(12)))
    keeper.wait()

    monkeypatch.setattr(keeper, "_checksum", mock.Mock(side_effect=error))
    keeper.save(_state().replace(step=jnp.int32(16)))
    with pytest.raises(SaveError, match="No space left on device"):
        keeper.wait()
    monkeypatch.undo()
    keeper.close()  # which waits for nothing that may never come; here it does
    keeper._manager.wait_until_finished()
    (tmp_path / "16").rename(tmp_path / "16.orbax-checkpoint-tmp")
    again = StageCheckpoints(tmp_path)
    assert int(again.restore(_state())[0].step) == 12
    again.save(_state().replace(step=jnp.int32(20)))
    again.close()
    assert not list(tmp_path.glob("16*"))


def test_a_full_disk_names_the_rows_file_and_the_first_error_is_said(tmp_path):
    log = MetricsLog(Workdir(tmp_path))
    log.path.write_text("[1]\n")  # another program's is kept
    log.write("slpo", 1, {"loss": 0.5})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (log.path.stat().st_size + 10, before[1])
    )  # in the midst of a row
    with pytest.raises(OSError, match="File too large") as raised:
        log.write("slpo", 2, {"loss": 0.5})
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.filename == str(log.path)
    log.rewind("slpo", 2)  # a torn row is none
    log.write("slpo", 2, {"loss": 0.5})
    log.close()
    first, *rows = log.path.read_text().splitlines()
    assert (first, [json.loads(row)["step"] for row in rows]) == ("[1]", [1, 2])


def test_a_checkpoint_that_was_being_replaced_is_there_again(tmp_path, monkeypatch):
    """A kill before the new one is whole, and one before the old one is gone."""
    kept = StageCheckpoints(tmp_path)
    new = _state().replace(params={"reasoner": {"h_0": jnp.zeros((2, 3))}})
    kept.save(_state())
    kept.wait()
    monkeypatch.setattr(
        kept._manager, "save", mock.Mock(side_effect=RuntimeError("killed"))
    )
    with pytest.raises(RuntimeError, match="killed"):
        kept.save(new, replace=True)
    again = StageCheckpoints(tmp_path)
    assert again.latest_step == 4
    np.testing.assert_array_equal(
        again.restore(new)[0].params["reasoner"]["h_0"],
        _state().params["reasoner"]["h_0"],
    )
    again.save(new, replace=True)
    again.close()
    assert not list(tmp_path.glob("*.replaced"))
    shutil.copytree(tmp_path / "4", tmp_path / "4.replaced")
    last = StageCheckpoints(tmp_path)
    np.testing.assert_array_equal(
        last.restore(_state())[0].params["reasoner"]["h_0"], np.zeros((2, 3))
    )
    assert not list(tmp_path.glob("*.replaced"))
    last.close()


@pytest.mark.parametrize(
    "gone", ["_CHECKPOINT_METADATA", "rest", "params/manifest.ocdbt", "params/d"]
)
def test_a_checkpoint_that_was_being_deleted_is_not_gone_on_from(tmp_path, gone):
    """Files go one by one, the digests among the first."""
    _two(tmp_path)
    for path in (tmp_path / "8" / "checksums.json", tmp_path / "8" / gone):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = StageCheckpoints(tmp_path)
    assert int(again.restore(_state())[0].step) == 4
    assert again.latest_step == 4
    again.close()

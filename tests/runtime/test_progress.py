"""Progress is a bar on a terminal, and in a log file a line a minute."""

import io
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from slpo_jax.runtime import backend, progress
from slpo_jax.runtime.progress import Progress, if_slow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def log(monkeypatch):
    """What is written, and `now`: seconds that pass when the test says so."""
    log = SimpleNamespace(file=io.StringIO(), now=100.0)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=log.file))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: log.now))
    return log


def _ten_minutes(log, keep: bool = True, seconds_a_step: float = 10.0, done: int = 0) -> list[str]:
    """The lines of 60 steps."""
    log.file.truncate(log.file.seek(0))
    progress = Progress("imitate", done + 60, done, "step", keep)
    for step in range(done + 1, done + 61):
        log.now += seconds_a_step
        progress.update(step, {"loss": f"{step / 100}"} if step % 5 == 0 else None)
    progress.close()
    assert "\r" not in log.file.getvalue()
    return log.file.getvalue().splitlines()


def test_a_log_file_gets_a_line_a_minute_and_one_at_the_end(log):
    lines = _ten_minutes(log)
    assert lines.pop(0) == "imitate: begins at step 0 of 60"
    assert [line.partition(" ")[2].partition("/")[0] for line in lines] == [*(str(6 * n) for n in range(1, 11)), "60"]
    assert lines[0] == "imitate: 6/60 steps, 0.1 steps/s, 09:00 left, loss 0.05"  # the newest that it was told
    assert lines[-1] == "imitate: 60/60 steps, 0.1 steps/s, loss 0.6"


def test_steps_done_before_are_no_speed(log):
    lines = _ten_minutes(log, done=40)
    assert lines[0] == "imitate: begins at step 40 of 100"
    assert lines[-1] == "imitate: 100/100 steps, 0.1 steps/s, loss 1.0"


def test_quick_work_has_no_lines_between(log):
    assert _ten_minutes(log, seconds_a_step=0.01)[1:] == ["imitate: 60/60 steps, 100 steps/s, loss 0.6"]
    assert _ten_minutes(log, keep=False, seconds_a_step=0.01) == []


@pytest.mark.parametrize(("seconds", "said"), [(0.01, ""), (0.5, "chain: 20 problems, about 00:09 left\n")])
def test_work_that_is_slow_is_said_once(log, seconds, said):
    tell = if_slow("chain: 20 problems", 20)
    for done in range(1, 21):
        log.now += seconds
        tell(done)
    assert log.file.getvalue() == said


@pytest.fixture
def compiler(monkeypatch):
    """What jax says of programs, and the seconds that they took."""
    monkeypatch.setattr(backend, "_seconds", 0.0)
    monkeypatch.setattr(backend, "PATIENCE", 0.05)

    def compiles(log, seconds, waits=0.5):
        backend._heard("/jax/core/compile/jaxpr_trace_duration", seconds / 4)
        backend._heard("/jax/core/compile/jaxpr_to_mlir_module_duration", seconds / 4)
        time.sleep(waits)
        backend._heard("/jax/core/compile/backend_compile_duration", seconds / 2)
        log.now += seconds

    return compiles


def test_a_log_file_says_what_compiles_and_is_as_fast_as_without(compiler, log):
    progress = Progress("slpo", 100)
    compiler(log, 40.0)
    for step in range(1, 51):
        log.now += 1.0
        progress.update(step)
    compiler(log, 8.0, waits=0.0)  # too quick to be said, and counted all the same
    log.now += 10.0
    progress.update(60)
    progress.close()
    lines = log.file.getvalue().splitlines()
    assert lines[1:3] == ["slpo: compiling ..", "slpo: compiled in 20 s"]
    assert lines[3:] == ["slpo: 20/100 steps, 1 steps/s, 01:20 left", "slpo: 60/100 steps, 1 steps/s, 00:40 left"]


def test_jax_tells_what_it_compiles(monkeypatch):
    """The names of its events are no promise."""
    monkeypatch.setattr(backend, "PATIENCE", 0.01)
    backend.watch()
    new = time.time() % 1000  # so that no cache has it

    def slow(x):
        for i in range(100):
            x = jnp.sort(jnp.sin(x) + i * new)
        return x

    before, said = backend.seconds(), []
    untell = backend.tell(said.append)
    jax.jit(slow).lower(jax.ShapeDtypeStruct((5,), jnp.float32)).compile()
    untell()
    assert (said[0], len(said)) == (None, 2)
    assert 0 < said[1] < backend.seconds() - before


@pytest.mark.parametrize("keep", [True, False])
def test_a_terminal_has_a_bar(monkeypatch, keep):
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    progress = Progress("imitate", 20, 5, unit="rollout", keep=keep)
    progress.update(9, {"loss": "0.5"})
    progress.update(20)
    progress.close()
    text = file.getvalue()
    assert "\r" in text
    assert "imitate" in text
    assert "5/20" in text  # where it began
    assert ("20/20" in text.rpartition("\r")[2]) == keep

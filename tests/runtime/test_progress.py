"""Progress is a bar on a terminal, and in a log file a line a minute."""

import io
import logging
import sys
import time
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from tqdm import tqdm

from slpo_jax.runtime import backend, progress
from slpo_jax.runtime.progress import Progress, if_slow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def log(monkeypatch, capsys):
    """What is written since it was asked last, and `now`: seconds that pass when the test says so."""
    log = SimpleNamespace(read=lambda: capsys.readouterr().err, now=100.0)
    monkeypatch.setattr("tqdm.std.time", lambda: log.now)
    monkeypatch.setattr("time.monotonic", lambda: log.now)
    return log


def _ten_minutes(
    log, keep: bool = True, seconds_a_step: float = 10.0, done: int = 0
) -> list[str]:
    """The lines of 60 steps."""
    progress = Progress("imitate", done + 60, done, "step", keep)
    for step in range(done + 1, done + 61):
        log.now += seconds_a_step
        progress.update(step, {"loss": f"{step / 100}"} if step % 5 == 0 else None)
    progress.close()
    text = log.read()
    assert "\r" not in text
    return text.splitlines()


def _counts(lines: list[str]) -> list[int]:
    return [int(line.removeprefix("imitate: ").partition("/")[0]) for line in lines]


def test_a_log_file_gets_a_line_a_minute_and_one_at_each_end(log):
    lines = _ten_minutes(log)
    assert _counts(lines) == [0, *range(6, 61, 6), 60]
    assert "/60 steps" in lines[1]
    assert "09:00 left" in lines[1]
    assert lines[1].endswith("loss=0.05")  # the newest that it was told
    assert lines[-1].endswith("loss=0.6")


def test_steps_done_before_are_no_speed(log):
    lines = _ten_minutes(log, done=40)
    assert (_counts(lines)[0], _counts(lines)[-1]) == (40, 100)
    assert all("10.00s/step" in line for line in lines[1:])


def test_quick_work_has_no_lines_between(log):
    assert _counts(_ten_minutes(log, seconds_a_step=0.01)) == [0, 60]


def test_quick_work_that_is_one_of_many_has_no_lines(log):
    assert _ten_minutes(log, keep=False, seconds_a_step=0.01) == []


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.01, ""), (0.5, "chain: 20 problems, about 00:09 left\n")]
)
def test_work_that_is_slow_is_said_once(log, seconds, said):
    tell = if_slow("chain: 20 problems", 20)
    for done in range(1, 21):
        log.now += seconds
        tell(done)
    assert log.read() == said


def test_a_log_file_says_what_compiles(log):
    """Which `backend.tell` has told to the newest who asked."""
    progress = Progress("slpo", 100)
    for seconds in (None, 20.4):
        backend.say_compilation(seconds)
    progress.close()
    backend.say_compilation(7.0)  # no longer of this
    lines = log.read().splitlines()
    assert lines[1].endswith("compiling ..")
    assert lines[2].endswith("compiled in 20 s")
    assert not [line for line in lines if "7 s" in line]


def test_jax_tells_what_it_compiles(monkeypatch):
    """The names of its events are no promise."""
    monkeypatch.setattr(backend, "PATIENCE", 0.01)
    backend.watch()
    new = time.time() % 1000  # so that no cache has it

    def slow(x):
        for i in range(100):
            x = jnp.sort(jnp.sin(x) + i * new)
        return x

    before = backend.seconds()
    said = []
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


def test_a_warning_has_a_line_of_its_own_beside_a_bar(monkeypatch):
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(logging.root, "handlers", [])
    # Below a bar that another test has left open, this one would not stand in the first line.
    monkeypatch.setattr(tqdm, "_instances", weakref.WeakSet())
    bar = Progress("imitate", 20)
    record = logging.LogRecord(
        "absl", logging.WARNING, progress.__file__, 1, "learned", None, None
    )
    assert not progress._print(record)
    bar.close()
    (line,) = [line for line in file.getvalue().split("\n") if "learned" in line]
    assert line.rpartition("\r")[2] == "learned"


def test_another_process_than_the_first_says_nothing(log, second_process):
    with second_process():
        progress = Progress("slpo", 4)
        progress.update(2, {"loss": "0.5"})
        progress.end_at(3)
        progress.update(3)
        progress.close()
    assert log.read() == ""

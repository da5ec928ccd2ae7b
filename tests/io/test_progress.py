"""Progress is a bar on a terminal, and in a log file a line a minute."""

import io

import pytest

from slpo_jax.io.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _ten_minutes(keep: bool = True, seconds_a_step: float = 10.0, done: int = 0) -> list[str]:
    """The lines of 60 steps."""
    file, clock = io.StringIO(), Clock()
    progress = Progress("imitate", done + 60, done, "step", keep, file, clock)
    for step in range(done + 1, done + 61):
        clock.now += seconds_a_step
        progress.update(step, {"loss": f"{step / 100}"} if step % 5 == 0 else None)
    progress.close()
    assert "\r" not in file.getvalue()
    return file.getvalue().splitlines()


def test_a_log_file_gets_a_line_a_minute_and_one_at_the_end():
    lines = _ten_minutes()
    assert [line.partition(" ")[2].partition("/")[0] for line in lines] == [*(str(6 * n) for n in range(1, 11)), "60"]
    assert lines[0] == "imitate: 6/60 steps, 0.1 steps/s, loss 0.05"  # the newest that it was told
    assert lines[-1] == "imitate: 60/60 steps, 0.1 steps/s, loss 0.6"


def test_steps_done_before_are_no_speed():
    assert _ten_minutes(done=40)[-1] == "imitate: 100/100 steps, 0.1 steps/s, loss 1.0"


def test_quick_work_has_its_last_line_alone():
    assert _ten_minutes(seconds_a_step=0.01) == ["imitate: 60/60 steps, 100 steps/s, loss 0.6"]
    assert _ten_minutes(keep=False, seconds_a_step=0.01) == []


def test_slow_work_that_is_one_of_many_ends_with_a_line():
    assert len(_ten_minutes(keep=False)) == 11


def test_work_given_up_says_how_far_it_was():
    file = io.StringIO()
    progress = Progress("rl", 10, file=file, clock=Clock())
    progress.close()
    assert file.getvalue() == "rl: 0/10 steps\n"


@pytest.mark.parametrize("keep", [True, False])
def test_a_terminal_has_a_bar(keep):
    file = Terminal()
    progress = Progress("imitate", 20, 5, unit="rollout", keep=keep, file=file)
    progress.update(9, {"loss": "0.5"})
    progress.update(20)
    progress.close()
    text = file.getvalue()
    assert "\r" in text
    assert "imitate" in text
    assert "5/20" in text  # where it began
    assert ("20/20" in text.rpartition("\r")[2]) == keep

"""Runs that are killed (-9) at random moments end as the run that nobody killed.

`KILLS` and `KILL_PROCESSES` in the environment ask for more kills than one, and for runs of several processes, of which
one or all are killed.
"""

import os
import random
import re
import shutil
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from same_run import differences
from small_run import finished_run, new_folder, start_all

pytestmark = pytest.mark.nightly
FLAGS = [
    "--config=small.py", "--config.stages=('rl','evaluate')", "--config.evaluate.datasets=('real',)",
    "--config.evaluate.batch_size=4", "--config.checkpoint_every=2",
]  # fmt: skip
GRACE = 2.0  # seconds in which the processes that are left may notice that one is gone


def _start(workdir: Path, processes: int) -> list[BaseProcess]:
    """The processes of one run."""
    return start_all(processes, *FLAGS, f"--workdir={workdir.name}", folder=workdir.parent, output=workdir.name)


def _ended(run: list[BaseProcess], workdir: Path) -> bool:
    """Whether all have ended, none by a fault of its own."""
    for number, process in enumerate(run):
        if process.exitcode:
            _kill(run, run)
            pytest.fail(workdir.with_name(f"{workdir.name}_{number}.stderr").read_text()[-2000:])
    return all(process.exitcode == 0 for process in run)


def _kill(run: list[BaseProcess], which: list[BaseProcess]) -> None:
    """-9 to some, and after a grace to those that are left."""
    for process in which:
        process.kill()
    until = time.monotonic() + (GRACE if len(which) < len(run) else 0)
    while time.monotonic() < until and any(process.exitcode is None for process in run):
        time.sleep(0.05)
    for process in run:
        process.kill()
        process.join()


def _signs(workdir: Path, moment: str) -> object:
    """What changes in a workdir when the moment has come."""
    if moment == "at a step":
        metrics = workdir / "metrics.jsonl"
        return metrics.stat().st_size if metrics.exists() else 0
    if moment == "at a save":
        return {path for path in workdir.glob("checkpoints/*/*") if "tmp" in path.name}
    return len(list(workdir.glob("eval/*/*.partial/*")))


def _wait_for_a_moment(run: list[BaseProcess], workdir: Path, chance: random.Random) -> bool:
    """Until a random one; False if the run has ended before."""
    evaluates = (workdir / "eval").exists()  # or else all that is before it would be run at once
    moment = "in evaluation" if evaluates else chance.choice(("at a step", "at a save"))
    for _ in range(chance.choice((1, 2, 6))):  # or the first steps would have nearly all the kills
        before = _signs(workdir, moment)
        while _signs(workdir, moment) in (before, set()):
            if _ended(run, workdir):
                return False
            time.sleep(0.002)
    time.sleep(chance.uniform(0, chance.choice((0.02, 0.1, 0.5))))
    return not _ended(run, workdir)


def test_a_run_that_is_killed_again_and_again_is_the_run(tmp_path):
    wanted, processes = (int(os.environ.get(name, "1")) for name in ("KILLS", "KILL_PROCESSES"))
    folder, chance, kills = new_folder(tmp_path), random.Random(0), 0
    reference, victim = folder / "reference", folder / "victim"
    run = _start(reference, processes)
    while not _ended(run, reference):
        time.sleep(0.05)
    while kills < wanted:
        shutil.rmtree(victim, ignore_errors=True)
        run = _start(victim, processes)
        while _wait_for_a_moment(run, victim, chance) if kills < wanted else not _ended(run, victim):
            if kills < wanted:
                _kill(run, run if chance.random() < 0.5 else [chance.choice(run)])
                kills += 1
                run = _start(victim, processes)
            time.sleep(0.05)
        assert differences(reference, victim) == []
    assert kills == wanted


def test_two_runs_are_told_apart(tmp_path):
    """By a row, an array or a file; the clock and locks don't count."""
    one, other = finished_run() / "work", tmp_path / "work"
    shutil.copytree(one, other)
    (other / ".lock").touch()
    metrics = other / "metrics.jsonl"
    metrics.write_text(re.sub(r'"seconds": [\d.e+-]+', '"seconds": 1.0', metrics.read_text()))
    assert differences(one, other) == []
    metrics.write_text(metrics.read_text().replace('"step": 2, "stage": "slpo"', '"step": 3, "stage": "slpo"'))
    (other / "eval" / "slpo" / "new.jsonl").touch()
    shutil.rmtree(other / "checkpoints" / "slpo")
    shutil.copytree(other / "checkpoints" / "cold_start", other / "checkpoints" / "slpo")
    assert [line.partition(":")[0] for line in differences(one, other)] == ["metrics.jsonl", "checkpoints", "files"]

"""Runs that are killed (-9) at random moments end as the run that nobody killed.

`KILLS` and `KILL_PROCESSES` in the environment ask for more kills than one, and for runs of several processes, of which
one or all are killed.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from same_run import differences
from small_run import ROOT, finished_run, local_flags, new_folder

FLAGS = [
    "--config.stages=('rl','evaluate')", "--config.evaluate.datasets=('real',)", "--config.evaluate.batch_size=4",
    "--config.checkpoint_every=2",
]  # fmt: skip
GRACE = 2.0  # seconds in which the processes that are left may notice that one is gone


def start(command: list[str], workdir: Path, processes: int) -> list[subprocess.Popen]:
    """The processes of one run."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    with workdir.with_suffix(".log").open("a") as log:
        return [
            subprocess.Popen([*command, f"--workdir={workdir}", *more], env=environment, stdout=log, stderr=log)
            for more in local_flags(processes)
        ]


def ended(run: list[subprocess.Popen], workdir: Path) -> bool:
    """Whether all have ended, none by a fault of its own."""
    states = [process.poll() for process in run]
    if any(state not in (None, 0) for state in states):
        kill(run, run)
        pytest.fail(workdir.with_suffix(".log").read_text()[-2000:])
    return all(state == 0 for state in states)


def kill(run: list[subprocess.Popen], which: list[subprocess.Popen]) -> None:
    """-9 to some, and after a grace to those that are left."""
    for process in which:
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + (GRACE if len(which) < len(run) else 0)
    while time.monotonic() < until and any(process.poll() is None for process in run):
        time.sleep(0.05)
    for process in run:
        process.kill()
        process.wait()


def signs(workdir: Path, moment: str) -> object:
    """What changes in a workdir when the moment has come."""
    if moment == "at a step":
        metrics = workdir / "metrics.jsonl"
        return metrics.stat().st_size if metrics.exists() else 0
    if moment == "at a save":
        return {path for path in workdir.glob("checkpoints/*/*") if "tmp" in path.name}
    return len(list(workdir.glob("eval/*/*.partial/*")))


def wait_for(run: list[subprocess.Popen], workdir: Path, chance: random.Random) -> bool:
    """Until a random moment; False if the run has ended before."""
    evaluates = (workdir / "eval").exists()  # or else all that is before it would be run at once
    moment = "in evaluation" if evaluates else chance.choice(("at a step", "at a save"))
    for _ in range(chance.choice((1, 2, 6))):  # or the first steps would have nearly all the kills
        before = signs(workdir, moment)
        while signs(workdir, moment) in (before, set()):
            if ended(run, workdir):
                return False
            time.sleep(0.002)
    time.sleep(chance.uniform(0, chance.choice((0.02, 0.1, 0.5))))
    return not ended(run, workdir)


@pytest.mark.nightly
def test_a_run_that_is_killed_again_and_again_is_the_run(tmp_path):
    wanted, processes = (int(os.environ.get(name, "1")) for name in ("KILLS", "KILL_PROCESSES"))
    folder, chance, kills = new_folder(tmp_path), random.Random(0), 0
    sources = {"train": "train.jsonl", "valid": "valid.txt", "eval.real": "real.json"}
    data = [f"--config.data.{key}={folder / file}" for key, file in sources.items()]
    command = [sys.executable, "-m", "slpo_jax.main", f"--config={folder / 'small.py'}", *FLAGS, *data]
    reference, victim = tmp_path / "reference", tmp_path / "victim"
    run = start(command, reference, processes)
    while not ended(run, reference):
        time.sleep(0.05)
    while kills < wanted:
        shutil.rmtree(victim, ignore_errors=True)
        run = start(command, victim, processes)
        while wait_for(run, victim, chance) if kills < wanted else not ended(run, victim):
            if kills < wanted:
                kill(run, run if chance.random() < 0.5 else [chance.choice(run)])
                kills += 1
                run = start(command, victim, processes)
            time.sleep(0.05)
        assert differences(reference, victim) == []
    assert kills == wanted


@pytest.mark.nightly
def test_two_runs_are_told_apart(tmp_path):
    """By a row, an array or a file; the clock, events and locks don't count."""
    one, other = finished_run() / "work", tmp_path / "work"
    shutil.copytree(one, other)
    (other / ".lock").touch()
    rows = re.sub(r'"seconds": [\d.e+-]+', '"seconds": 1.0', (other / "metrics.jsonl").read_text())
    (other / "metrics.jsonl").write_text(rows)
    assert differences(one, other) == []
    (other / "metrics.jsonl").write_text(
        rows.replace('"step": 2, "stage": "slpo"', '"step": 2, "stage": "slpo", "x": 1')
    )
    (other / "eval" / "slpo" / "new.jsonl").write_text("")
    shutil.rmtree(other / "checkpoints" / "slpo")
    shutil.copytree(other / "checkpoints" / "cold_start", other / "checkpoints" / "slpo")
    found = differences(one, other)
    assert [line.partition(":")[0] for line in found] == ["metrics.jsonl", "checkpoints", "files"]
    assert "first slpo" in found[1]
    assert "1 new, first eval/slpo/new.jsonl" in found[2]

"""A run that is killed (-9) at random moments ends as the run that nobody killed.

`KILLS` in the environment asks for more kills than one.
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
from small_run import finished_run, new_folder, run, start

pytestmark = pytest.mark.nightly
FLAGS = [
    "--config=small.py", "--config.stages=('rl','evaluate')", "--config.evaluate.datasets=('real',)",
    "--config.evaluate.batch_size=4", "--config.checkpoint_every=2",
]  # fmt: skip


def _signs(workdir: Path, moment: str) -> object:
    """What changes in a workdir when the moment has come."""
    if moment == "at a step":
        metrics = workdir / "metrics.jsonl"
        return metrics.stat().st_size if metrics.exists() else 0
    if moment == "at a save":
        return {path for path in workdir.glob("checkpoints/*/*") if "tmp" in path.name}
    return len(list(workdir.glob("eval/*/*.partial/*")))


def _is_killed(process: BaseProcess, workdir: Path, chance: random.Random) -> bool:
    """At a random moment; False if the run has ended before."""
    evaluates = (
        workdir / "eval"
    ).exists()  # or else all that is before it would be run at once
    moment = "in evaluation" if evaluates else chance.choice(("at a step", "at a save"))
    for _ in range(
        chance.choice((1, 2, 6))
    ):  # or the first steps would have nearly all the kills
        before = _signs(workdir, moment)
        while process.exitcode is None and _signs(workdir, moment) in (before, set()):
            time.sleep(0.002)
    process.join(chance.uniform(0, chance.choice((0.02, 0.1, 0.5))))
    process.kill()
    process.join()
    assert process.exitcode in (0, -9)
    return process.exitcode == -9


def test_a_run_that_is_killed_again_and_again_is_the_run(tmp_path):
    folder = new_folder(tmp_path)
    chance = random.Random(0)
    left = int(os.environ.get("KILLS", "1"))
    run(*FLAGS, "--workdir=reference", folder=folder)
    while left:
        shutil.rmtree(folder / "victim", ignore_errors=True)
        while left and _is_killed(
            start(*FLAGS, "--workdir=victim", folder=folder), folder / "victim", chance
        ):
            left -= 1
        run(*FLAGS, "--workdir=victim", folder=folder)
        assert differences(folder / "reference", folder / "victim") == []


def test_two_runs_are_told_apart(tmp_path):
    """By a row, an array or a file; the clock and locks don't count."""
    one = finished_run() / "work"
    other = tmp_path / "work"
    shutil.copytree(one, other)
    (other / ".lock").touch()
    metrics = other / "metrics.jsonl"
    metrics.write_text(
        re.sub(r'"seconds": [\d.e+-]+', '"seconds": 1.0', metrics.read_text())
    )
    assert differences(one, other) == []
    metrics.write_text(
        metrics.read_text().replace(
            '"step": 2, "stage": "slpo"', '"step": 3, "stage": "slpo"'
        )
    )
    (other / "eval" / "slpo" / "new.jsonl").touch()
    shutil.rmtree(other / "checkpoints" / "slpo")
    shutil.copytree(
        other / "checkpoints" / "cold_start", other / "checkpoints" / "slpo"
    )
    assert [line.partition(":")[0] for line in differences(one, other)] == [
        "metrics.jsonl",
        "checkpoints",
        "files",
    ]

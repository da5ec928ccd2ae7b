"""Runs that are killed at random moments, by the command that does so as often as one likes."""

import re
import shutil
import subprocess
import sys

import pytest
from same_run import differences
from small_run import ROOT, finished_run, new_folder

FLAGS = [
    "--config.stages=('rl','evaluate')", "--config.evaluate.datasets=('real',)", "--config.evaluate.batch_size=4",
    "--config.checkpoint_every=2",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_is_the_run(tmp_path):
    folder = new_folder(tmp_path)
    sources = {"train": "train.jsonl", "valid": "valid.txt", "eval.real": "real.json"}
    data = [f"--config.data.{key}={folder / file}" for key, file in sources.items()]
    (tmp_path / "kills").mkdir()
    (tmp_path / "kills" / "mine.txt").write_text("somebody's")
    command = [sys.executable, str(ROOT / "launch" / "kill_test.py"), "--kills=1", f"--workdir={tmp_path / 'kills'}"]
    done = subprocess.run(
        [*command, f"--config={folder / 'small.py'}", *FLAGS, *data], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills, runs, failed = map(int, re.search(r"(\d+) kills, (\d+) runs, (\d+) of them", done.stdout).groups())
    assert kills == 1
    assert runs >= 1
    assert failed == 0
    assert (tmp_path / "kills" / "mine.txt").exists()


@pytest.mark.slow
def test_two_runs_are_told_apart(tmp_path):
    """By a row, an array or a file; the clock, events and locks don't count."""
    one, other = finished_run() / "work", tmp_path / "work"
    shutil.copytree(one, other)
    (other / ".lock").touch()
    rows = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(re.sub(r'"steps_per_second": [\d.e+-]+', '"steps_per_second": 1.0', rows))
    assert differences(one, other) == []
    (other / "metrics.jsonl").write_text(
        rows.replace('"step": 2, "stage": "slpo"', '"step": 2, "stage": "slpo", "x": 1')
    )
    (other / "report.md").write_text("another")
    (other / "eval" / "slpo" / "new.jsonl").write_text("")
    slpo = other / "checkpoints" / "slpo"
    shutil.rmtree(slpo)
    shutil.copytree(other / "checkpoints" / "cold_start", slpo)
    found = differences(one, other)
    assert [line.partition(":")[0] for line in found] == [
        "metrics.jsonl", "checkpoints/slpo", "eval/slpo/new.jsonl", "report.md"
    ]  # fmt: skip
    assert all(line.endswith(": differs") for line in found[2:])

"""Pools of processes that a reward opens, in the process of the run itself."""

import subprocess
import sys

import pytest

FORKED = """
import multiprocessing, sys, time
from pathlib import Path
from types import SimpleNamespace
from slpo_jax.io.workdir import Workdir
from slpo_jax.training.loop import StageLoop
from slpo_jax.training.metrics import MetricsLog

keeper = SimpleNamespace(close=lambda: None)
log = MetricsLog(Workdir(Path(sys.argv[1])))
with StageLoop("slpo", 9, 0, log, keeper, log_every=9, checkpoint_every=9, max_skipped=1):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(len, ["a", "bb"]))
        pool.map_async(time.sleep, [600, 600])  # is under way when the pool is ended
        time.sleep(0.5)
"""
ENDED_AT_ONCE = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from slpo_jax.io.workdir import Workdir
from slpo_jax.training.loop import StageLoop
from slpo_jax.training.metrics import MetricsLog

keeper = SimpleNamespace(close=lambda: None)
log = MetricsLog(Workdir(Path(sys.argv[1])))
with StageLoop("slpo", 9, 0, log, keeper, log_every=9, checkpoint_every=9, max_skipped=1):
    for _ in range(100):
        child = os.fork()
        if not child:
            time.sleep(600)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
print(os.WTERMSIG(status) == signal.SIGTERM)
"""
SPAWNED = """
import sys
from slpo_jax.config.registry import read_registrations

read_registrations(sys.argv[1] + "/slow.py")
print(sys.modules["slpo_jax_slow"].pooled(["a", "bb"]))
"""
SPAWNED_BY_A_PROCESS = """
import sys
from slpo_jax.config.registry import read_registrations
from slpo_jax.rewards.processes import Processes

read_registrations(sys.argv[1] + "/slow.py")
processes = Processes(sys.modules["slpo_jax_slow"].pooled, 1)
(answer,) = processes.ask([{"completions": ["a", "bb"]}])
print(answer)
"""
OWN = """
import multiprocessing
from beside import length

def apart(text):
    return length(text)

def pooled(completions):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return pool.map(apart, completions)
"""


def _said(program: str, folder) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_processes_that_are_forked_in_a_stage_obey_the_signal_that_ends_them(tmp_path):
    assert _said(FORKED, tmp_path) == "[1, 2]"


@pytest.mark.slow
def test_a_signal_that_comes_before_a_forked_process_has_begun_is_obeyed(tmp_path):
    assert _said(ENDED_AT_ONCE, tmp_path) == "True"


@pytest.mark.slow
@pytest.mark.parametrize("program", [SPAWNED, SPAWNED_BY_A_PROCESS])
def test_processes_that_are_spawned_import_a_user_s_file(tmp_path, program):
    """By the name that it has here, and with what lies beside it; also by a process in which a reward is asked."""
    (tmp_path / "slow.py").write_text(OWN)
    (tmp_path / "beside.py").write_text("length = len\n")
    assert _said(program, tmp_path) == "[1, 2]"

"""What stopping and growing cost, measured on a stand-in that logs steps as the real command does, and real saves."""

import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks import recovery
from benchmarks.measure.workload import ROOT
from slpo_jax.errors import UserError

# Logs a step every 20 ms, the first after PAUSE seconds, and stops 0.3 s after a SIGTERM.
STAND_IN = """
import itertools, json, os, pathlib, signal, sys, time
workdir = pathlib.Path(next(word for word in sys.argv if word.startswith("--workdir=")).partition("=")[2])
workdir.mkdir(parents=True, exist_ok=True)
def stop(*_):
    time.sleep(0.3)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
cache = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
time.sleep(0.1 if cache.exists() else 1.0)  # what is compiled is kept
cache.mkdir(exist_ok=True)
(cache / "program").touch()
for step in itertools.count(1):
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "steps_per_second": 1.0 if step <= 2 else 50.0}) + "\\n")
    time.sleep(0.02)
"""


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """Of tiny shapes, and the real command replaced."""
    started = []

    def popen(command, cwd, **quiet):
        assert (command[:3], cwd) == ([sys.executable, "-m", "slpo_jax.main"], ROOT)
        assert Path(command[3].partition("=")[2]).exists()
        started.append(real([sys.executable, "-c", STAND_IN, *command[3:]], **quiet))
        return started[-1]

    real = recovery.subprocess.Popen
    monkeypatch.setattr(recovery.subprocess, "Popen", popen)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    yield recovery.parse(["--shapes", "quickstart", "--prompts", "4", "--steps", "5", "--warmup", "2", "--saves", "2"])
    assert started
    assert all(process.poll() is not None for process in started), "one goes on"


def test_steps_a_second_are_the_median_after_the_warm_up(flags, tmp_path):
    found = recovery.measure_layout(flags, 2, 2, tmp_path)
    assert found == {"processes": 2, "devices": 2, "steps_per_second": 50.0}


def test_a_restart_waits_for_its_first_new_step_and_a_stop_for_its_end(flags, tmp_path):
    found = recovery.measure_stops(flags, tmp_path)
    assert found["cold_restart"] > 1.0 > found["warm_restart"] > 0.1
    assert 0.3 < found["stop"] < 1.0
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "cache")


def test_a_run_that_ends_by_itself_is_no_measurement(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "rows", lambda _: [])
    run = recovery.start(flags, tmp_path / "work", 2, 1)
    run[0].send_signal(signal.SIGKILL)
    with pytest.raises(UserError, match="a run ended by itself"):
        recovery.wait(run, lambda: False)


@pytest.mark.slow
def test_saves_are_whole_after_they_let_the_next_step_go(tmp_path, cpu_devices):
    flags = recovery.parse(["--shapes", "quickstart", "--prompts", "4", "--saves", "2"])
    found = recovery.measure_saves(flags, tmp_path)
    assert len(found["blocked"]) == len(found["whole"]) == 2
    assert all(0 < blocked < whole for blocked, whole in zip(found["blocked"], found["whole"], strict=True))
    # AdamW keeps two numbers beside each parameter, and the vocabulary alone has 32 of them a token.
    assert found["bytes"] > 3 * 4 * 32 * 100
    assert found["restore"] > 0


def test_what_is_lost_adds_up():
    result = {
        "machine": {"cpu": "x"}, "work": {"shapes": "quickstart"}, "definitions": ["d"],
        "layouts": [{"processes": 1, "devices": 1, "steps_per_second": 4.0},
                    {"processes": 2, "devices": 2, "steps_per_second": 3.0}],
        "saves": {"blocked": [0.1, 0.2, 0.3], "whole": [0.5, 0.6, 0.7], "bytes": 2_500_000, "restore": 0.25},
        "stops": {"cold_restart": 30.0, "warm_restart": 12.0, "stop": 1.5},
    }  # fmt: skip
    text = recovery.markdown(result)
    for line in (
        "| 2 | 2 | 3.00 | 0.75x |",
        "| a save keeps the next step waiting | 0.200 (0.100-0.300) |",
        "| a checkpoint's size (MB) | 2.5 |",
        "| lost to a preemption with a warning | 13.5 |",
    ):
        assert line in text

"""Ctrl-C while XLA compiles, in processes of their own."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import dataclasses, sys
from pathlib import Path
import jax, jax.numpy as jnp
from slpo_jax.io.workdir import Workdir
from slpo_jax.run.command import run_command
from slpo_jax.training.loop import StageRun
from slpo_jax.training.metrics import MetricsLog

def slow(x, sorts):
    for i in range(sorts):
        x = jnp.sort(jnp.sin(x) + i)
    return x

def compiled(sorts):
    traced = jax.jit(slow, static_argnums=1).lower(jax.ShapeDtypeStruct((16,), float), sorts)
    print("compiling", flush=True)
    traced.compile()
    print("compiled", flush=True)

@dataclasses.dataclass
class State:
    step: int

class Keeper:
    saving = False
    def save(self, state, extra=None):
        print("saved", state.step, flush=True)
    def wait(self): ...
    close = wait

def alone(argv):
    compiled(2500)

def stage(argv):
    log = MetricsLog(Workdir(Path(argv[3])))
    run = StageRun("slpo", 9, 0, log, Keeper(), 99, 99, 1)
    def step(state, compiles):
        if compiles:
            compiled(int(argv[2]))
        return State(state.step + 1), {}
    run.advance(State(0), step, lambda step: step == int(argv[4]), 9)

run_command(globals()[sys.argv[1]])
"""
AT_ONCE = 15  # seconds, on a busy machine; 2,500 sorts take a minute to compile on an idle one
LINE = "interrupted; the same command goes on from what is finished"


def _interrupted(*arguments: object, times: int = 1) -> tuple[int, list[str], list[str], float]:
    """Status, lines on both outputs, and seconds from the last Ctrl-C, of which the first is during a compilation."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    # No cache may have what is to be compiled; and what a shell starts in the background ignores Ctrl-C.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout.readline() == "compiling\n"
        for _ in range(times):
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out.splitlines(), [line for line in err.splitlines() if line], time.monotonic() - began


def test_ctrl_c_while_compiling_ends_at_once():
    status, out, err, seconds = _interrupted("alone")
    assert (status, out, err) == (130, [], [LINE])
    assert seconds < AT_ONCE


@pytest.mark.slow
def test_a_stage_s_first_compilation_has_nothing_to_lose(tmp_path):
    status, out, err, seconds = _interrupted("stage", 2500, tmp_path, 0)
    assert (status, out, err) == (130, [], [LINE])
    assert seconds < AT_ONCE


@pytest.mark.slow
def test_steps_since_the_last_checkpoint_are_saved_first(tmp_path):
    """A program of another shape, in the third step; it says so at once, and a second Ctrl-C ends at once."""
    status, out, err, _ = _interrupted("stage", 800, tmp_path, 2)  # seconds, on a fast machine too
    assert status == 130
    assert out == ["compiled", "saved 3", "saved 3", "slpo: interrupted at step 3; the same command goes on from there"]
    assert any("Ctrl-C again ends at once" in line for line in err)
    status, out, err, seconds = _interrupted("stage", 2500, tmp_path, 2, times=2)
    assert (status, out, err[-1]) == (130, [], LINE)
    assert seconds < AT_ONCE

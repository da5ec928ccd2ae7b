"""Ctrl-C while jax compiles or computes, in processes of their own."""

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
from slpo_jax.cli.command import run_command
from slpo_jax.training.loop import StageRun
from slpo_jax.training.metrics import MetricsLog

def computed(rounds):
    long = jax.jit(lambda x: jax.lax.fori_loop(0, rounds, lambda i, x: jnp.sin(x), x))
    run = long.lower(jax.ShapeDtypeStruct((64,), float)).compile()
    print("computing", flush=True)
    with jax.transfer_guard("allow"):
        jax.device_get(run(jnp.ones(64)))

@dataclasses.dataclass
class State:
    step: int

class Keeper:
    def save(self, state, extra=None):
        print("saved", state.step, flush=True)
    def wait(self): ...
    close = wait

def alone(arguments):
    computed(int(arguments[0]))

def stage(arguments):
    run = StageRun("slpo", 9, 0, MetricsLog(Workdir(Path(arguments[1]))), Keeper(), 99, 99, 1)
    def step(state, is_long):
        if is_long:
            computed(int(arguments[0]))
        return State(state.step + 1), {}
    run.advance(State(0), step, lambda step: step == 2, 9)

run_command(globals()[sys.argv[1]], sys.argv[2:], goes_on=True)
"""
LINE = "interrupted; the same command goes on from what is finished"
FOR_EVER, SECONDS = 10**9, 4 * 10**7  # rounds


def _interrupted(*arguments: object, times: int) -> tuple[int, list[str], list[str]]:
    """Status and lines on both outputs, after so many Ctrl-C, of which the first is in a long computation."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
    )
    try:
        assert process.stdout.readline() == "computing\n"
        for _ in range(times):
            time.sleep(1)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out.splitlines(), [line for line in err.splitlines() if line]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_what_python_waits_for(tmp_path):
    """Of a stage, its step would be finished and saved first, as the line says."""
    for arguments in (("alone", FOR_EVER), ("stage", FOR_EVER, tmp_path)):
        status, out, (*_, said, line) = _interrupted(*arguments, times=2)
        assert (status, out, line) == (130, [], LINE)
        assert "Ctrl-C again ends at once" in said


@pytest.mark.slow
def test_after_one_the_steps_are_saved_first(tmp_path):
    status, out, _ = _interrupted("stage", SECONDS, tmp_path, times=1)
    assert status == 130
    assert out == ["saved 3", "saved 3", "slpo: interrupted at step 3; the same command goes on from there"]

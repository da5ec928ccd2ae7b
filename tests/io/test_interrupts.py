"""Ctrl-C while XLA compiles or computes, in processes of their own."""

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

def slow(x, sorts):
    for i in range(sorts):
        x = jnp.sort(jnp.sin(x) + i)
    return x

def compiled(sorts):
    traced = jax.jit(slow, static_argnums=1).lower(jax.ShapeDtypeStruct((16,), float), sorts)
    print("compiling", flush=True)
    traced.compile()
    print("compiled", flush=True)

def computed():
    long = jax.jit(lambda x: jax.lax.fori_loop(0, 10**9, lambda i, x: jnp.sin(x), x))
    run = long.lower(jax.ShapeDtypeStruct((64,), float)).compile()
    print("compiling", flush=True)
    with jax.transfer_guard("allow"):
        jax.device_get(run(jnp.ones(64)))

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

def computes(argv):
    computed()

def stage(argv):
    log = MetricsLog(Workdir(Path(argv[3])))
    run = StageRun("slpo", 9, 0, log, Keeper(), 99, 99, 1)
    def step(state, compiles):
        if compiles:
            compiled(int(argv[2])) if int(argv[2]) else computed()
        return State(state.step + 1), {}
    run.advance(State(0), step, lambda step: step == int(argv[4]), 9)

run_command(globals()[sys.argv[1]])
"""
AT_ONCE = 15  # seconds, on a busy machine; 2,500 sorts take a minute to compile on an idle one
LINE = "interrupted; the same command goes on from what is finished"


def _interrupted(*arguments: object, times: int = 1, pause: float = 0.5) -> tuple[int, list[str], list[str], float]:
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
            time.sleep(pause)
            process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out.splitlines(), [line for line in err.splitlines() if line], time.monotonic() - began


@pytest.mark.parametrize("what", [pytest.param("alone", marks=pytest.mark.slow), "computes"])
def test_ctrl_c_while_jax_is_at_work_ends_at_once(what):
    status, out, err, seconds = _interrupted(what)
    assert (status, out, err) == (130, [], [LINE])
    assert seconds < AT_ONCE


@pytest.mark.slow
def test_a_stage_s_first_compilation_has_nothing_to_lose(tmp_path):
    status, out, err, seconds = _interrupted("stage", 2500, tmp_path, 0)
    assert (status, out, err) == (130, [], ["slpo: begins at step 0 of 9", LINE])
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


@pytest.mark.slow
def test_a_long_step_is_finished_first_but_not_for_long(tmp_path):
    """As it is said; a second Ctrl-C ends at once."""
    status, out, err, seconds = _interrupted("stage", 0, tmp_path, 2, times=2, pause=3)
    assert (status, out, err[-1]) == (130, [], LINE)
    assert any("Ctrl-C again ends at once" in line for line in err)
    assert seconds < AT_ONCE


def test_ctrl_c_in_a_callback_is_not_lost():
    """Out of which nothing can be raised."""
    program = """if True:
        import os, signal, time, weakref
        from slpo_jax.cli.command import run_command
        class Thing: ...
        def main(argv):
            thing = Thing()
            watched = weakref.ref(thing, lambda _: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.1)))
            del thing
            time.sleep(30)
            print("not interrupted")
        run_command(main)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", LINE)


@pytest.mark.parametrize("interrupted", [True, False])
def test_ctrl_c_in_an_import_is_no_broken_package(interrupted):
    program = f"""if True:
        import os, signal, time
        from slpo_jax.cli.command import run_command
        def main(argv):
            try:
                os.kill(os.getpid(), signal.SIGINT) if {interrupted} else None
                time.sleep(0.5)
            except KeyboardInterrupt:
                time.sleep(0.2)
            raise ImportError("Encountered an error while initializing the extension.")
        run_command(main)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == (130 if interrupted else 1)
    assert (done.stderr.strip() == LINE) == interrupted

"""How every command ends."""

import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import slpo_jax
from commands import fault
from slpo_jax.cli import commands
from slpo_jax.cli.command import take_keys
from slpo_jax.config.registry import list_shipped

PROGRAM = """
import sys
from slpo_jax.cli.command import run_command

def main(argv):
    raise {error}

run_command(main, {flags}{more})
"""


def _end(error: str, *flags: str, more: str = "") -> tuple[int, list[str]]:
    """Status and lines of a program that ends with an error."""
    program = PROGRAM.format(error=error, flags=list(flags), more=more)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    return done.returncode, [line for line in done.stderr.splitlines() if line]


ROOM = "make room; what was finished is kept, and the same command goes on"
ENDS = {
    "__import__('slpo_jax.errors').errors.UserError('config.seed: no; give another')": "config.seed: no; give another",
    f"OSError({errno.ENOSPC}, 'No space left on device')": f"No space left on device; {ROOM}",
    f"OSError({errno.EACCES}, 'Denied', 'a/b')": "a/b: Denied; check the path and its permissions",
    f"OSError({errno.EISDIR}, 'No file', '.b.tmp', None, 'b')": "b: No file; check the path and its permissions",
}


@pytest.mark.parametrize("error", ENDS)
def test_one_line_and_status_2(error):
    assert _end(error) == (2, [f"error: {ENDS[error]}"])


@pytest.mark.parametrize(
    "error", ["__import__('jax').numpy.zeros(2**46)", "MemoryError()"]
)
def test_out_of_memory_names_the_settings_that_help(error):
    """The first asks a device for 281 TB."""
    status, (line,) = _end(error)
    assert status == 2
    assert line.startswith("error: out of memory (")
    for key in (
        "micro_batches",
        "model.remat",
        "model.scan_layers",
        "sharding.fsdp",
        "evaluate.batch_size",
    ):
        assert f"config.{key}" in line or f"config.STAGE.{key}" in line


def test_ctrl_c_is_a_line(tmp_path):
    assert _end("KeyboardInterrupt") == (130, ["interrupted"])
    assert _end("KeyboardInterrupt", more=", goes_on=True") == (
        130,
        ["interrupted; the same command goes on from what is finished"],
    )


def test_ctrl_c_in_a_callback_of_the_collector_ends_the_command():
    """Where Python drops what is raised."""
    program = """if True:
        import gc, signal, time
        from slpo_jax.cli.command import run_command

        def interrupt(phase, info):
            gc.callbacks.clear()
            signal.raise_signal(signal.SIGINT)

        def main(argv):
            # A shell that began the tests in the background has them ignore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            gc.callbacks.append(interrupt)
            gc.collect()
            for _ in range(200):
                time.sleep(0.05)

        run_command(main, [])
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.split()) == (130, ["interrupted"])


def test_a_mistake_of_ours_is_a_traceback():
    status, lines = _end("ZeroDivisionError('sum')")
    assert status == 1
    assert lines[-1] == "ZeroDivisionError: sum"


def test_debug_shows_where():
    status, lines = _end(
        f"OSError({errno.ENOSPC}, {os.strerror(errno.ENOSPC)!r})", "--debug"
    )
    assert status == 1
    assert any(line.startswith("Traceback") for line in lines)


@pytest.mark.parametrize("flush", [True, False])
def test_a_closed_pipe_is_silence(flush):
    """Whether a line finds out, or the last flush."""
    main = f"    print('what nobody reads', flush={flush})\n    raise SystemExit(0)"
    program = PROGRAM.format(error="", flags=[], more="").replace("    raise ", main)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--config=small.py:x", "--workdir", "a/b"], "workdir a/b, config small.py:x"),
        (["--train=set.jsonl"], "workdir runs/own, config own"),
        (["--config=small.py", "--smoke"], "workdir runs/small_smoke, config small.py"),
        (["--config=quickstart", "--process=1"], ""),
        (["--config=quickstart", "--distributed"], ""),
    ],
)
def test_a_run_says_where_it_is_before_jax_is_imported(flags, line):
    program = f"""if True:
        import sys
        from slpo_jax.cli.train import train
        sys.modules["slpo_jax.config.config_checks"] = None
        try:
            train({flags})
        except ImportError:
            print("jax" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("False\n")
    assert done.stderr == (f"slpo_jax {slpo_jax.__version__}: {line}\n" if line else "")


def test_keys_of_a_config_are_taken_from_between_the_other_arguments():
    """A value may be the next argument, but no flag is one."""
    argv = [
        "slpo",
        "-config.a.b=1",
        "x",
        "--config.c",
        "-2",
        "--config.d",
        "--config.a.b=3",
        "--x=4",
    ]
    assert take_keys(argv) == (["slpo", "x", "--x=4"], {"a.b": "3", "c": "-2", "d": ""})


@pytest.mark.slow
@pytest.mark.parametrize("command", ["", *commands._COMMANDS])
def test_help_fits_a_screen(command):
    """What a command does, three examples that can be begun, then its flags, each of which says what it is."""
    flag = "-h" if command in ("", "solve", "report", "configs") else "--help"
    done = _slpo(*command.split(), flag, env=os.environ | {"COLUMNS": "100"})
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    examples = [line for line in lines if re.match(r" {4}(\S+ )*slpo ", line)]
    assert len(examples) >= 3
    for line in examples:
        said = re.split(r"  +| > ", line.strip())[0].partition("slpo ")
        assert fault(["slpo", *shlex.split(said[2])]) == ""
    if command:
        assert (
            lines.index("Examples:") < lines.index("arguments:") < lines.index("flags:")
        )
        assert not [line for line in lines if re.fullmatch(r"  -\S+( \S+)?", line)]


def test_slpo_alone_says_what_to_do_first():
    done = _slpo()
    first = done.stdout.index("slpo train quickstart --smoke")
    then = done.stdout.index("Commands:")
    assert (done.returncode, first < then) == (0, True)
    listed = re.findall(r"^    (\w+)  +\w.*: slpo (\w+)", done.stdout, re.MULTILINE)
    assert listed == [(name, name) for name in commands._COMMANDS]


def test_configs_are_a_line_each():
    done = _slpo("configs")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(list_shipped())
    assert max(map(len, lines)) <= 100
    named = set()
    for line in lines:
        for name in re.findall(r" (\w+):[a-zA-Z]", line):
            assert name == line.split()[0]
            named.add(name)
    assert len(named) > 10


def _slpo(*arguments: str, **settings: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "slpo_jax", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        **settings,
    )


def test_warnings_look_as_all_other_lines():
    """Those of others say where they are from."""
    ours = f"compile(\"logging.warning('lost %d', 3)\", {slpo_jax.__path__[0] + '/text/x.py'!r}, 'exec')"
    logs = "__import__('absl.logging').logging"
    status, lines = _end(
        f"exec({ours}, {{'logging': {logs}}}) or {logs}.warning('theirs') or SystemExit(0)"
    )
    assert (status, lines[:2]) == (0, ["lost 3", "WARNING:absl:theirs"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configured", "said"),
    [
        ("", ["lost 3", "WARNING:absl:theirs"]),
        (
            "import logging; logging.basicConfig(format='mine %(message)s'); ",
            ["mine lost 3", "mine theirs"],
        ),
    ],
)
def test_warnings_look_so_in_python_too(configured, said):
    """Without touching what the user has said of messages."""
    ours = f"compile(\"logging.warning('lost %d', 3)\", {slpo_jax.__path__[0] + '/text/x.py'!r}, 'exec')"
    code = f"{configured}import slpo_jax; slpo_jax.Evaluation; from absl import logging; exec({ours})"
    code += "; logging.warning('theirs')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines() == said


@pytest.mark.slow
def test_an_encoding_without_a_character_is_no_error():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    program = PROGRAM.format(
        error="SystemExit(print('61.7 ± 2.3', '–', '猫'))", flags=[], more=""
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"61.7 \\xb1 2.3 \\u2013 \\u732b\n")
    done = _slpo("solve", "./nowhere", "-", input="Zoë ?", env=environment)
    assert (done.returncode, done.stderr[:31]) == (2, "error: checkpoint: ./nowhere is")


# Ctrl-C while jax compiles or computes.
COMPUTING = """
import dataclasses, sys
from pathlib import Path
import jax, jax.numpy as jnp
from slpo_jax.io.workdir import Workdir
from slpo_jax.cli.command import run_command
from slpo_jax.training.loop import StageLoop
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
    def save(self, state, extra=None, replace=False):
        print("saved", state.step, flush=True)
    def wait(self): ...
    close = wait

def alone(arguments):
    computed(int(arguments[0]))

def stage(arguments):
    run = StageLoop("slpo", 9, 0, MetricsLog(Workdir(Path(arguments[1]))), Keeper(), log_every=99,
                   checkpoint_every=99, max_skipped=1)  # fmt: skip
    def step(state, is_long):
        if is_long:
            computed(int(arguments[0]))
        return State(state.step + 1), {}
    run.advance(State(0), step, lambda step: step == 2, 9)

run_command(globals()[sys.argv[1]], sys.argv[2:], goes_on=True)
"""
FOR_EVER = 10**9
SECONDS = 4 * 10**7  # rounds


def _interrupted(*arguments: object, times: int) -> tuple[int, list[str], list[str]]:
    """Status and lines on both outputs, after so many Ctrl-C, of which the first is in a long computation."""
    command = [sys.executable, "-c", COMPUTING, *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background ignores it
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
    return (
        process.returncode,
        out.splitlines(),
        [line for line in err.splitlines() if line],
    )


@pytest.mark.slow
def test_a_second_ctrl_c_ends_what_python_waits_for(tmp_path):
    """Of a stage, its step would be finished and saved first, as the line says."""
    for arguments in (("alone", FOR_EVER), ("stage", FOR_EVER, tmp_path)):
        status, out, (*_, said, line) = _interrupted(*arguments, times=2)
        assert (status, out, line) == (
            130,
            [],
            "interrupted; the same command goes on from what is finished",
        )
        assert "Ctrl-C again ends at once" in said


@pytest.mark.slow
def test_after_one_the_steps_are_saved_first(tmp_path):
    status, out, _ = _interrupted("stage", SECONDS, tmp_path, times=1)
    assert status == 130
    assert out == [
        "saved 3",
        "saved 3",
        "slpo: interrupted at step 3; the same command goes on from there",
    ]

"""The command that trains; --help shows its docstring."""

import argparse
import functools
import os
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import slpo_jax.config
from slpo_jax.cli.command import CommandParser, take_keys
from slpo_jax.config.overrides import merge_settings, values
from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten
from slpo_jax.io.workdir import Workdir
from slpo_jax.runtime import hosts
from slpo_jax.runtime.backend import set_up_jax
from slpo_jax.runtime.progress import say_start
from slpo_jax.stages import LATENT_RM, REASONER_STAGES, RL

if TYPE_CHECKING:
    from slpo_jax.config import Config

STEPS = 2  # of a phase or an objective in a smoke test
ROWS = 8  # problems of a batch and of an evaluated set there
_GYM = {
    "data.gym.train_size": 8 * ROWS,
    "data.gym.valid_size": ROWS,
    "data.gym.test_size": ROWS,
}
"""Fewer problems of reasoning-gym, where one may take a second."""
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def _make_parser() -> CommandParser:
    def list_keys() -> list[str]:
        return [*flatten(values(slpo_jax.config.Config()))]

    parser = CommandParser("train", train.__doc__, list_keys)
    flag = parser.add_argument
    flag(
        "start",
        nargs="?",
        default="",
        metavar="NAME|FILE",
        help="a shipped config or a file; --config is the same",
    )
    flag("--config", default="", help=argparse.SUPPRESS)
    flag(
        "--workdir",
        metavar="DIR",
        help="where checkpoints and reports go; default runs/NAME of the config",
    )
    flag(
        "--smoke",
        action="store_true",
        help="a few steps of every stage and a report, in runs/NAME_smoke by default",
    )
    flag(
        "--train",
        default="",
        metavar="FILE",
        help="to train on; without a config, settings are chosen from them",
    )
    flag(
        "--valid",
        default="",
        metavar="FILE",
        help="to choose on; without a config, a part of --train's by default",
    )
    flag(
        "--test",
        action="append",
        default=[],
        metavar="FILE",
        help="or NAME=FILE: to evaluate on, not the config's",
    )
    flag(
        "--base",
        default="",
        metavar="MODEL",
        help="without a config: to begin with, a directory, hub id or file",
    )
    flag(
        "--distributed",
        action="store_true",
        help="one of several processes, as SLURM, Open MPI, .. say which",
    )
    flag(
        "--coordinator",
        metavar="HOST:PORT",
        help="of process 0, where no such cluster says it",
    )
    flag(
        "--processes",
        type=int,
        metavar="N",
        help="how many there are, with --coordinator",
    )
    flag("--process", type=int, metavar="I", help="which of them this is, from 0")
    return parser


def train(arguments: list[str]) -> None:
    """Run the stages of a config: slpo train NAME|FILE [--config.KEY=VALUE ..].

    `slpo configs` lists the names, docs/configuration.md the keys. Without a config, the settings are chosen from the
    problems of --train, and shown. Run again with the same workdir, it goes on where it was.

    Examples:
        slpo train quickstart --smoke
        slpo train quickstart --workdir=runs/sixteen --config.rl.group=16
        slpo train --train=my_train.csv --test=my_test.csv --workdir=runs/mine
    """
    rest, keys = take_keys(arguments)
    flags = _make_parser().read(rest)
    start = flags.config or flags.start
    if flags.workdir == "":
        raise UserError(
            "--workdir: is empty; give a folder, or leave it out for runs/NAME of the config"
        )
    name = Path(start.partition(":")[0]).stem or "own"
    if flags.smoke:
        name += "_smoke"
    workdir = Path(flags.workdir or f"runs/{name}").expanduser()
    if not flags.distributed and not flags.process:
        say_start(workdir, start or "own")
    # Imports that take seconds wait until they are needed: --help comes at once.
    from slpo_jax.config.config_checks import check
    from slpo_jax.run.requested_config import requested_config

    # Make the config, and refuse wrong values.
    sources = {"train": flags.train, "valid": flags.valid, "base": flags.base}
    begin = functools.partial(_begin, flags)
    cut = functools.partial(_lower, most=_GYM) if flags.smoke else None
    tests = _name_tests(flags.test)
    config = check(requested_config(start, sources, tests, keys, begin, cut))

    # A smoke test cuts it short. The uncut config tells what the run itself would do.
    uncut = None
    if flags.smoke:
        uncut = config
        config, line = smoke(config)
        if flags.workdir:
            line += f"; the run itself needs another --workdir than {flags.workdir}"
        print(line, file=sys.stderr)
        config = check(config)
        uncut = merge_settings(uncut, {"data": config.data})

    # Each smoke test begins from nothing, unless it has a workdir of its own.
    if flags.smoke and not flags.workdir:
        if hosts.is_first() and workdir.is_dir():
            with Workdir(workdir).in_use():
                shutil.rmtree(workdir)
        hosts.barrier("smoke")
    from slpo_jax.run.run_stages import run_stages

    experiment = run_stages(config, workdir, uncut)
    if experiment.workdir.report_html.exists() and hosts.is_first():
        print(f"report: {experiment.workdir.report_html}")


def _name_tests(texts: list[str]) -> dict[str, str]:
    """Return the sources of --test by name: the given one, or the file's."""
    sets = dict[str, str]()
    for text in texts:
        match = re.fullmatch(r"([\w-]+)=(.+)", text, re.DOTALL)
        if match:
            name, source = match.groups()
        else:
            name = re.sub(r"[^\w-]", "_", Path(text).stem)
            source = text
        if name in sets:
            raise UserError(
                f"--test={source}: another set is called {name} too; give this one a name, NAME=FILE"
            )
        sets[name] = source
    return sets


def _begin(flags: argparse.Namespace, cpu_devices: int) -> None:
    """Set up jax, and join the other processes that the flags name, before anything asks for devices."""
    if flags.smoke:
        # Compiling is most of a smoke test. Slower programs are compiled in half the time.
        os.environ["XLA_FLAGS"] = f"{_QUICK} {os.environ.get('XLA_FLAGS', '')}".rstrip()
    set_up_jax(cpu_devices)
    places = (flags.coordinator, flags.processes, flags.process)
    if flags.distributed or places != (None, None, None):
        _join(*places)


def _join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Become one of several processes.

    Raises:
        UserError: the flags don't tell which process it is, or the others can't be reached.
    """
    if (coordinator, processes, process) != (None, None, None):
        if (
            coordinator is None
            or processes is None
            or process is None
            or not 0 <= process < processes
        ):
            raise UserError(
                "--coordinator: goes with --processes and --process, from 0 to one less; give all three"
            )
        if not re.fullmatch(r".+:\d+", coordinator):
            raise UserError(
                f"--coordinator: {coordinator} is no HOST:PORT; give e.g. node1:1234"
            )
        if process == 0:
            _check_port(int(coordinator.rpartition(":")[2]))
    try:
        hosts.join(coordinator, processes, process)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--distributed: the processes can't be joined ({reason}); give --coordinator=HOST:PORT, "
                        "--processes and --process") from error  # fmt: skip


def _check_port(port: int) -> None:
    """Refuse a port that the first process can't have; jax would end the program without a traceback."""
    with socket.socket() as server:
        # A port that a run had a minute ago is free.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--coordinator: port {port} can't be had ({error}); give another"
            ) from error


def smoke(config: "Config") -> tuple["Config", str]:
    """Cut all lengths of a config, also those that flags set; compiling takes the most time then.

    Returns:
        the config, and a line that says so.
    """
    from slpo_jax.data.generated import GENERATED  # jax comes with it

    # Lower the numbers of steps, problems and samples.
    most = _GYM | {
        "imitate.cot_steps": STEPS,
        "imitate.stage_steps": STEPS,
        "imitate.final_steps": STEPS,
        "imitate.max_latent_stage": 1,
        "cold_start.trajectories": 2,
        "rl.dynamic_batches": 1,
        "evaluate.samples": 2,
        "evaluate.seeds": 1,
        "evaluate.batch_size": 4 * ROWS,
        "evaluate.probed": STEPS,
    }
    for stage in REASONER_STAGES:
        most[f"{stage}.steps"] = STEPS
        most[f"{stage}.evaluate_every"] = STEPS
    for name in config.objective:
        most[f"objective.{name}.steps"] = STEPS
    for task in GENERATED:
        most[f"data.{task}.train_size"] = 64 * ROWS
        most[f"data.{task}.demos_size"] = 64 * ROWS

    # Compile one program of each kind; a whole run gains from one for each shape.
    slots = max(config.prompt_slots)
    minibatches = max([1, *(kind.minibatches for kind in config.objective.values())])
    cut: dict[str, Any] = {
        "imitate.icot": {"all_from": 1, "tokens_per_epoch": 2**20},  # a step for the one token that is dropped
        "imitate.suffix_slots": (), "rl.capacities": ((1.0, 1.0),), "prompt_slots": (slots,), "log_every": 1,
        "evaluate.prompt_multiple": slots, "evaluate.limit": min(config.evaluate.limit or ROWS, ROWS),
    }  # fmt: skip
    for section in REASONER_STAGES:
        stage = getattr(config, section)
        size = ROWS * minibatches if section == RL else ROWS
        cut[section] = {
            "batch_size": min(size, stage.batch_size // stage.micro_batches),
            "micro_batches": 1,
            "optimizer": {"warmup_steps": 0},
        }

    # A reward model can't be trained without right answers.
    line = f"--smoke: {STEPS} steps of each phase and objective, {ROWS} problems of each set; nothing is learned by it"
    if LATENT_RM in config.stages:
        line = f"{line}; {LATENT_RM} is left out, which needs right answers"
        cut["stages"] = tuple(stage for stage in config.stages if stage != LATENT_RM)
        if not config.evaluate.reward_model:
            scorers = [name for name in config.evaluate.scorers if name != LATENT_RM]
            cut |= {"evaluate.scorers": tuple(scorers), "evaluate.beams": 0}
    return _lower(config, most, cut), line


def _lower(config: "Config", most: dict[str, int], *layers: dict[str, Any]) -> "Config":
    """Lower keys of the config to these values at most, unless they are None; then apply further layers."""
    now = flatten(values(config))
    keys = [key for key in most if now.get(key) is not None]
    lower = {key: min(now[key], most[key]) for key in keys}
    return merge_settings(config, lower, *layers)

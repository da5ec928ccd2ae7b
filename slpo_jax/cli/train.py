"""The command that trains; its docstring is what --help shows."""

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
from slpo_jax.config.overrides import changed, values
from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten
from slpo_jax.io.workdir import Workdir
from slpo_jax.runtime import hosts
from slpo_jax.runtime.backend import set_up_jax
from slpo_jax.runtime.progress import say_start
from slpo_jax.stages import LATENT_RM, REASONER_STAGES, RL

if TYPE_CHECKING:
    from slpo_jax.config import Config

STEPS = 2
ROWS = 8  # steps of a phase or an objective, and problems of a batch and of an evaluated set
_GYM = {
    "data.gym.train_size": 8 * ROWS,
    "data.gym.valid_size": ROWS,
    "data.gym.test_size": ROWS,
}
"""Fewer problems of reasoning-gym, where one may take a second."""
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def _parser() -> CommandParser:
    parser = CommandParser(
        "train", train.__doc__, lambda: [*flatten(values(slpo_jax.config.Config()))]
    )
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
    flags = _parser().read(rest)
    start = flags.config or flags.start
    if flags.workdir == "":
        raise UserError(
            "--workdir: is empty; give a folder, or leave it out for runs/NAME of the config"
        )
    name = Path(start.partition(":")[0]).stem or "own"
    workdir = Path(flags.workdir or f"runs/{name}{'_smoke' * flags.smoke}").expanduser()
    if not flags.distributed and not flags.process:
        say_start(workdir, start or "own")
    # Imports that take seconds wait until they are needed: --help comes at once.
    from slpo_jax.config.config_checks import check
    from slpo_jax.run.requested_config import requested_config

    sources = {"train": flags.train, "valid": flags.valid, "base": flags.base}
    begin = functools.partial(_begin, flags)
    cut = functools.partial(_lowered, most=_GYM) if flags.smoke else None
    config = uncut = check(
        requested_config(start, sources, _tests(flags.test), keys, begin, cut)
    )
    if flags.smoke:
        apart = f"; the run itself needs another --workdir than {flags.workdir}" * bool(
            flags.workdir
        )
        config, line = smoke(config)
        print(line + apart, file=sys.stderr)
        config = check(config)
        uncut = changed(uncut, {"data": config.data})
    if (
        flags.smoke and not flags.workdir
    ):  # each is a run of its own, whatever the one before it was of
        if hosts.is_first() and workdir.is_dir():
            with Workdir(workdir).in_use():
                shutil.rmtree(workdir)
        hosts.barrier("smoke")
    from slpo_jax.run.run_stages import run_stages

    experiment = run_stages(config, workdir, uncut if flags.smoke else None)
    if experiment.workdir.report_html.exists() and hosts.is_first():
        print(f"report: {experiment.workdir.report_html}")


def _tests(texts: list[str]) -> dict[str, str]:
    """Return the sets of --test, by name."""
    sets = dict[str, str]()
    for text in texts:
        match = re.fullmatch(r"([\w-]+)=(.+)", text, re.DOTALL)
        name, source = (
            match.groups() if match else (re.sub(r"[^\w-]", "_", Path(text).stem), text)
        )
        if name in sets:
            raise UserError(
                f"--test={source}: another set is called {name} too; give this one a name, NAME=FILE"
            )
        sets[name] = source
    return sets


def _begin(flags: argparse.Namespace, cpu_devices: int) -> None:
    """Set jax up, and become one of several processes, as the flags say; nothing has asked for devices yet."""
    if flags.smoke:  # slow programs in half the time, which is most of a smoke test's
        os.environ["XLA_FLAGS"] = f"{_QUICK} {os.environ.get('XLA_FLAGS', '')}".rstrip()
    set_up_jax(cpu_devices)
    if flags.distributed or {flags.coordinator, flags.processes, flags.process} != {
        None
    }:
        _join(flags.coordinator, flags.processes, flags.process)


def _join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Become one of several processes.

    Raises:
        UserError: which of them can't be said, or the others can't be reached.
    """
    if {coordinator, processes, process} != {None}:
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
    """Refuse a port that the first process can't have, on which jax ends the program without a traceback."""
    with socket.socket() as server:
        server.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a port that a run had a minute ago is free
        try:
            server.bind(("", port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--coordinator: port {port} can't be had ({error}); give another"
            ) from error


def smoke(config: "Config") -> tuple["Config", str]:
    """Cut all lengths of a config, those that flags set as well; compiling takes the most time then.

    Returns:
        the config, and a line that says so.
    """
    from slpo_jax.data.generated import GENERATED  # jax comes with it

    most = _GYM | dict.fromkeys(("imitate.cot_steps", "imitate.stage_steps", "imitate.final_steps"), STEPS) | {
        "imitate.max_latent_stage": 1, "cold_start.trajectories": 2, "rl.dynamic_batches": 1,
        "evaluate.samples": 2, "evaluate.seeds": 1, "evaluate.batch_size": 4 * ROWS, "evaluate.probed": STEPS,
    }  # fmt: skip
    most |= {
        f"{stage}.{key}": STEPS
        for stage in REASONER_STAGES
        for key in ("steps", "evaluate_every")
    }
    most |= {f"objective.{name}.steps": STEPS for name in config.objective}
    most |= {
        f"data.{task}.{key}": 64 * ROWS
        for task in GENERATED
        for key in ("train_size", "demos_size")
    }
    # A program for each of several shapes is what a whole run gains from.
    slots = max(config.prompt_slots)
    parts = max([1, *(kind.rollout_parts for kind in config.objective.values())])
    cut: dict[str, Any] = {
        "imitate.icot": {"all_from": 1, "tokens_per_epoch": 2**20},  # a step for the one token that is dropped
        "imitate.suffix_slots": (), "rl.capacities": ((1.0, 1.0),), "prompt_slots": (slots,), "log_every": 1,
        "evaluate.prompt_multiple": slots, "evaluate.limit": min(config.evaluate.limit or ROWS, ROWS),
    }  # fmt: skip
    for section in REASONER_STAGES:
        stage = getattr(config, section)
        size = min(
            ROWS * parts if section == RL else ROWS,
            stage.batch_size // stage.micro_batches,
        )
        cut[section] = {
            "batch_size": size,
            "micro_batches": 1,
            "optimizer": {"warmup_steps": 0},
        }
    line = f"--smoke: {STEPS} steps of each phase and objective, {ROWS} problems of each set; nothing is learned by it"
    if LATENT_RM in config.stages:
        line = f"{line}; {LATENT_RM} is left out, which needs right answers"
        cut["stages"] = tuple(stage for stage in config.stages if stage != LATENT_RM)
        if not config.evaluate.reward_model:
            scorers = tuple(
                name for name in config.evaluate.scorers if name != LATENT_RM
            )
            cut |= {"evaluate.scorers": scorers, "evaluate.beams": 0}
    return _lowered(config, most, cut), line


def _lowered(
    config: "Config", most: dict[str, int], *layers: dict[str, Any]
) -> "Config":
    """Lower the config's keys to these at most, but for those that are None, and lay further layers over it."""
    now = flatten(values(config))
    lower = {
        key: min(now[key], size)
        for key, size in most.items()
        if now.get(key) is not None
    }
    return changed(config, lower, *layers)

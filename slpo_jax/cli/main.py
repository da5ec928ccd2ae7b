"""`slpo train NAME|FILE [--workdir=DIR] [--config.KEY=VALUE ..]`: run the stages of a config, a shipped one or a file.

`slpo train --train=FILE [--base=MODEL]` chooses the settings from the problems, and shows them. With --smoke every
stage takes two steps, to see whether all of it works. --config=NAME|FILE is the config too, as in
`python -m slpo_jax.main --config=configs/NAME.py`.

Run again with the same workdir, it goes on where it was. Bad input ends with one line and status 2.
"""

import re
import shutil
import socket
import sys
from pathlib import Path

from absl import flags

from slpo_jax.cli.command import parse_flags, run_command, take_keys, with_first
from slpo_jax.cli.smoke import compile_quickly, smoke
from slpo_jax.errors import UserError
from slpo_jax.io import hosts
from slpo_jax.io.backend import set_up_jax
from slpo_jax.io.workdir import Workdir
from slpo_jax.run.header import say_start

_CONFIG = flags.DEFINE_string("config", "", "Shipped config or config file, e.g. quickstart or configs/quickstart.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where checkpoints and reports go; default runs/NAME of the config.")
_SMOKE = flags.DEFINE_bool("smoke", False, "A few steps of every stage and a report, in runs/NAME_smoke by default.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "One of several processes, as SLURM, Open MPI, .. say which.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where no such cluster says it.")
_PROCESSES = flags.DEFINE_integer("processes", None, "How many there are, with --coordinator.", lower_bound=1)
_PROCESS = flags.DEFINE_integer("process", None, "Which of them this is, from 0.")


def _define_data_flags() -> None:
    """Not on import: other commands have flags of the same names."""
    flags.DEFINE_string("train", "", "Problems to train on; without a config the settings are chosen from them.")
    flags.DEFINE_string("valid", "", "Problems to choose on; without a config a part of --train's by default.")
    flags.DEFINE_multi_string("test", [], "Problems to evaluate on, FILE or NAME=FILE, instead of the config's.")
    flags.DEFINE_string("base", "", "Without a config: the model to begin with, a directory, hub id or file.")


def main(argv: list[str]) -> None:
    # Here and below imports that take seconds wait until they are needed: --help comes at once.
    from slpo_jax.config.validate import check
    from slpo_jax.run.derived import requested

    (_, *others), keys = take_keys(argv)
    if others:
        raise UserError(
            f"{others[0]}: is no flag; write --config.KEY=VALUE, with quotes around a value that has spaces"
        )
    if _WORKDIR.value == "":
        raise UserError("--workdir: is empty; give a folder, or leave it out for runs/NAME of the config")
    sources = {name: flags.FLAGS[name].value or "" for name in ("train", "valid", "base")}
    node, given = requested(_CONFIG.value, sources, _tests(), keys, texts=True)
    config = check(node, given)
    if _SMOKE.value:
        apart = f"; the run itself needs another --workdir than {_WORKDIR.value}" * bool(_WORKDIR.value)
        print(smoke(node, given) + apart, file=sys.stderr)
        config = check(node, given)
    workdir = _workdir()
    if _SMOKE.value:
        compile_quickly()
    set_up_jax(config.cpu_devices)
    if _DISTRIBUTED.value or {_COORDINATOR.value, _PROCESSES.value, _PROCESS.value} != {None}:
        _join()
    if _SMOKE.value and not _WORKDIR.value:  # each is a run of its own, whatever the one before it was of
        if hosts.is_first() and workdir.is_dir():
            with Workdir(workdir).in_use():
                shutil.rmtree(workdir)
        hosts.barrier("smoke")
    from slpo_jax.run.plan import run_stages

    experiment = run_stages(config, workdir, given)
    if experiment.workdir.report_html.exists() and hosts.is_first():
        print(f"report: {experiment.workdir.report_html}")


def _workdir() -> Path:
    name = Path(_CONFIG.value.partition(":")[0]).stem or "own"
    return Path(_WORKDIR.value or f"runs/{name}{'_smoke' * _SMOKE.value}").expanduser()


def _tests() -> dict[str, str]:
    """The sets of --test, by name."""
    found = dict[str, str]()
    for given in flags.FLAGS["test"].value or ():
        named = re.fullmatch(r"([\w-]+)=(.+)", given, re.DOTALL)
        name, source = named.groups() if named else (re.sub(r"[^\w-]", "_", Path(given).stem), given)
        if name in found:
            raise UserError(f"--test={source}: another set is called {name} too; give this one a name, NAME=FILE")
        found[name] = source
    return found


def _join() -> None:
    """Become one of several processes.

    Raises:
        UserError: which of them can't be said, or the others can't be reached.
    """
    coordinator, processes, process = given = (_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    if set(given) != {None}:
        if coordinator is None or processes is None or process is None:
            raise UserError("--coordinator: goes with --processes and --process; give all three, or --distributed")
        if not re.fullmatch(r".+:\d+", coordinator):
            raise UserError(f"--coordinator: {coordinator} is no HOST:PORT; give e.g. node1:1234")
        if not 0 <= process < processes:
            raise UserError(f"--process: {process} is none of the {processes}; count from 0")
        _check_port(int(coordinator.rpartition(":")[2]), listens=process == 0)
    try:
        hosts.join(coordinator, processes, process)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--distributed: the processes can't be joined ({reason}); give --coordinator=HOST:PORT, "
                        "--processes and --process") from error  # fmt: skip


def _check_port(port: int, listens: bool) -> None:
    """jax ends the program without a word on a port that it can't have.

    Args:
        listens: whether this process is the one that the others come to.
    Raises:
        UserError: there is no such port, or another program has it.
    """
    if not 0 < port < 2**16:
        raise UserError(f"--coordinator: there is no port {port}; give one from 1 to {2**16 - 1}")
    if listens:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that a run had a minute ago is free
            try:
                tried.bind(("", port))
            except OSError as error:
                raise UserError(f"--coordinator: port {port} can't be had ({error.strerror}); give another") from error


def _parse(argv: list[str]) -> list[str]:
    """What is no flag, and the config's keys; the header's first line is said before jax is imported."""
    rest, keys = take_keys(argv)
    others = with_first("config", parse_flags(rest))
    if not _DISTRIBUTED.value and not _PROCESS.value:
        say_start(_workdir(), _CONFIG.value or "own")
    return [*others, *(f"--config.{key}={text}" for key, text in keys.items())]


def run() -> None:
    """The command: one line and status 2 for what the user can mend."""
    _define_data_flags()
    run_command(main, _parse)


if __name__ == "__main__":
    run()

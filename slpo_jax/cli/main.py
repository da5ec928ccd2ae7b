"""`slpo train NAME|FILE [--workdir=DIR] [--config.KEY=VALUE ..]`: run the stages of a config, a shipped one or a file.

`slpo train --train=FILE [--base=MODEL]` chooses the settings from the problems, and shows them. With --smoke every
stage takes two steps, to see whether all of it works. --config=NAME|FILE is the config too, as in
`python -m slpo_jax.main --config=configs/NAME.py`.

Run again with the same workdir, it goes on where it was. Bad input ends with one line and status 2.
"""

import functools
import re
import shutil
import socket
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from slpo_jax.cli.command import refused_value, register, run_command
from slpo_jax.cli.options import KEYS, Data, check_once, derived_later, take_data, take_eval_sets, with_config
from slpo_jax.cli.smoke import compile_quickly, smoke
from slpo_jax.config.config_files import override, shipped, shipped_folder
from slpo_jax.errors import UserError
from slpo_jax.io import hosts
from slpo_jax.io.backend import set_up_jax
from slpo_jax.io.files import flatten
from slpo_jax.io.workdir import Workdir
from slpo_jax.run.header import say_start

_ARGV: list[str] = []  # where the flag below looks for its keys: the command line, as far as they exist
_NONE: list[str] = []  # keys that are given as None, which flags of numbers don't read
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, e.g. configs/quickstart.py.", lock_config=True, sys_argv=_ARGV
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where checkpoints and reports go; default runs/NAME of the config.")
_SMOKE = flags.DEFINE_bool("smoke", False, "A few steps of every stage and a report, in runs/NAME_smoke by default.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "One of several processes, as SLURM, Open MPI, .. say which.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where no such cluster says it.")
_PROCESSES = flags.DEFINE_integer("processes", None, "How many there are, with --coordinator.")
_PROCESS = flags.DEFINE_integer("process", None, "Which of them this is, from 0.")


def _define_data_flags() -> None:
    """For --help; `arguments.take_data` reads them. Not on import: other commands have flags of the same names."""
    flags.DEFINE_string("train", "", "Problems to train on; without a config the settings are chosen from them.")
    flags.DEFINE_string("valid", "", "Problems to choose on; without a config a part of --train's by default.")
    flags.DEFINE_multi_string("test", [], "Problems to evaluate on, FILE or NAME=FILE, instead of the config's.")
    flags.DEFINE_string("base", "", "Without a config: the model to begin with, a directory, hub id or file.")


def main(argv: list[str]) -> None:
    # Here and below imports that take seconds wait until they are needed: --help and most errors come at once.
    from slpo_jax.config.validate import check

    if argv[1:]:
        raise UserError(f"{argv[1]}: is no flag; write --config.KEY=VALUE, with quotes around a value that has spaces")
    config = check(_CONFIG.value, _given())
    if _SMOKE.value:
        apart = f"; the run itself needs another --workdir than {_WORKDIR.value}" * bool(_WORKDIR.value)
        print(smoke(_CONFIG.value, _given()) + apart, file=sys.stderr)
        config = check(_CONFIG.value, _given())
    from slpo_jax.run.sources import check_sources

    name = Path(config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")[0]).stem
    if _WORKDIR.value == "":
        raise UserError("--workdir: is empty; give a folder, or leave it out for runs/NAME of the config")
    workdir = Path(_WORKDIR.value or _default_workdir(name, _SMOKE.value)).expanduser()
    check_sources(config, workdir)
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

    experiment = run_stages(config, workdir, _given())
    if experiment.workdir.report_html.exists() and hosts.is_first():
        print(f"report: {experiment.workdir.report_html}")


def _default_workdir(name: str, smokes: bool) -> str:
    return f"runs/{name}{'_smoke' * smokes}"


def _given() -> set[str]:
    """The keys of the config that flags set."""
    return {*config_flags.get_override_values(flags.FLAGS["config"]), *_NONE}


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
        if processes < 1:
            raise UserError(f"--processes: {processes} is too few; give 1 or more")
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
    """absl's flags, with what can be wrong in them said in one line."""
    register(argv)
    argv, data = take_data(argv)
    written = {KEYS[name]: f"--{name}={source}" for name, source in data.sources.items()}
    written |= {f"data.eval.{name}": f"--test={name}={source}" for name, source in data.tests.items()}
    check_once(written, [arg.lstrip("-").removeprefix("config.").partition("=")[0] for arg in argv])
    argv, eval_sets = take_eval_sets(argv)
    whole = with_config(argv, data)
    nones = [arg for arg in whole if re.fullmatch(r"--?config\.[\w.]+=None", arg)]
    _NONE[:] = [arg.lstrip("-").removeprefix("config.").partition("=")[0] for arg in nones]
    argv = [arg for arg in whole if arg not in nones]
    _ARGV[:] = argv
    given = {arg.partition("=")[0].lstrip("-"): arg.partition("=")[2] for arg in argv[1:]}
    if "config" in given:
        _say_start(argv)
    try:
        rest = flags.FLAGS(argv)
        missing = _CONFIG.value is None
        if not missing:  # a file that could not be loaded raises only when it is looked into
            data_node = _CONFIG.value.data
            with data_node.unlocked():
                data_node.eval = dict(data.tests or data_node.eval) | eval_sets
            override(_CONFIG.value, dict.fromkeys(_NONE))
            if f"--config={derived_later()}" in argv:
                _choose(data)
    except (UserError, BrokenPipeError):  # the latter is of what --help prints
        raise
    except Exception as error:  # the config file is the user's code, and can raise anything
        reason = _reason(error)
        words = set(re.findall(r"\w+", reason))
        keys = [key for key in given if key.startswith("config.")]
        unknown = [key for key in keys if words & set(key.split(".")[1:])]
        unknown = unknown if isinstance(error, AttributeError | KeyError) else list(filter(_is_below_a_value, keys))
        if unknown:
            raise UserError(f"{unknown[0]}: unknown config key; {_neighbours(unknown[0])}") from error
        in_flags = isinstance(error, flags.Error) and "Traceback" not in str(error)
        if in_flags and (refused := re.match(r"flag --config\.([\w.]+)=", reason)):
            _say_range(refused[1], given[f"config.{refused[1]}"])
        if in_flags and (said := refused_value(reason)):
            raise UserError(f"{said}; see --help") from error
        ours = given.get("config") == derived_later()  # which the user doesn't know of
        source = "" if in_flags or ours else f"--config={given.get('config', '')}: "
        raise UserError(f"{source}{reason}; see slpo_jax/config/config.py for the keys and their types") from error
    if missing:
        raise UserError(f"--config: not given; give a file, or one of {', '.join(shipped())}")
    _check_repeated(whole)
    return rest


def _choose(data: Data) -> None:
    """Choose from the data what no flag has set."""
    from slpo_jax.run.derived import derived_settings

    override(_CONFIG.value, {KEYS[name]: source for name, source in data.sources.items()})
    print("\n".join(derived_settings(_CONFIG.value, _given())), file=sys.stderr)


def _say_start(argv: list[str]) -> None:
    """The header's first line, of a run that is alone or the first; flags are read only after jax is imported."""
    found = {}
    for place, arg in enumerate(argv[1:], 1):
        name, given, value = arg.lstrip("-").partition("=")
        found[name] = value if given else "".join(argv[place + 1 : place + 2])
    path, colon, argument = found["config"].partition(":")
    config = Path(path).stem if Path(path).parent == shipped_folder() else path
    silent = {"help", "helpfull", "helpshort", "helpxml", "?", "distributed"} & found.keys()
    if found.get("process", "0") == "0" and not silent:
        smokes = found.get("smoke", "false") != "false"
        workdir = Path(found.get("workdir") or _default_workdir(Path(path).stem, smokes)).expanduser()
        say_start(workdir, config + (colon + argument) * bool(argument))


def _check_repeated(argv: list[str]) -> None:
    """Of a flag that is given twice the last counts, but a list's entries would add up.

    Raises:
        UserError: a list is given twice.
    """
    names = [arg.partition("=")[0].lstrip("-") for arg in argv if re.match(r"--?config\.", arg)]
    for name in dict.fromkeys(names):
        value = functools.reduce(getattr, name.split(".")[1:], _CONFIG.value)
        if names.count(name) > 1 and isinstance(value, tuple):
            raise UserError(f"{name}: given {names.count(name)} times, whose entries would add up; give it once")


def _reason(error: Exception) -> str:
    """What went wrong in one line: ml_collections adds whole tracebacks and whole configs."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    last = lines[-1] if "Traceback" in str(error) else " ".join(" ".join(lines).split())
    reason = last.partition(" since the config is locked")[0].strip()
    return reason[1:-1] if reason[:1] in "'\"" and reason[-1:] == reason[:1] else reason  # a KeyError's message


def _say_range(key: str, text: str) -> None:
    """Fail with what a key takes, where that is known: the flag's own words are of types alone."""
    from slpo_jax.config.config import default_config, read_config

    node = default_config()
    if key in flatten(node.to_dict()):
        override(node, {key: text})
        read_config(node)


def _is_below_a_value(key: str) -> bool:
    """Whether a key is given as if a value were a section."""
    from slpo_jax.config.config import default_config

    names = key.split(".")[1:]
    above = [".".join(names[:count]) for count in range(1, len(names))]
    return not flatten(default_config().to_dict()).keys().isdisjoint(above)


def _neighbours(key: str) -> str:
    """The keys that stand where an unknown one was given."""
    from slpo_jax.config.config import default_config

    node = default_config()
    for part in key.split(".")[1:-1]:
        node = node.get(part) if hasattr(node, "get") else None
    return f"use one of {', '.join(sorted(node))}" if hasattr(node, "keys") else "there is no such section"


def run() -> None:
    """The command: one line and status 2 for what the user can mend."""
    _define_data_flags()
    run_command(main, _parse)


if __name__ == "__main__":
    run()

"""`slpo COMMAND ..`, which is `python -m slpo_jax COMMAND ..`.

    train    run the stages of a config: slpo train quickstart [--smoke] [--config.KEY=VALUE ..]
    data     see how problems are understood, before training: slpo data FILE
    solve    ask a reasoner, and watch it think: slpo solve RUN "question"
    eval     measure a reasoner on problems: slpo eval RUN FILE
    view     open a run's report in the browser: slpo view RUN
    report   make the report of a run anew, or one over several: slpo report RUN [RUN ..] [--out=DIR]
    export   write a reasoner for transformers: slpo export RUN DIR
    import   make a published reasoner one of ours: slpo import HUB_ID DIR
    configs  list the shipped configs, or print one: slpo configs [NAME]

RUN is a workdir, WORKDIR/checkpoints/STAGE, an export, a Hugging Face directory or a hub id.
`slpo COMMAND --help` has a command's flags.
"""

import importlib
import signal
import sys
from collections.abc import Callable

import slpo_jax
from slpo_jax.errors import UserError, silent_when_unread

_MODULES = {
    "train": "main", "data": "cli.data", "solve": "cli.solve", "eval": "cli.measure", "view": "cli.view",
    "report": "evaluation.report", "export": "cli.convert", "import": "cli.convert",
}  # fmt: skip


def main() -> None:
    """The command: status 2 and one line for what the user can mend."""
    try:
        with silent_when_unread():
            sys.exit(_run(sys.argv[1:]))
    except KeyboardInterrupt:  # before the command itself takes care of it
        print("\ninterrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _run(arguments: list[str]) -> int | None:
    command, *rest = arguments or ["--help"]
    if command in ("--help", "-h", "help"):
        print(__doc__)
        return 0
    if command == "--version":
        print(slpo_jax.__version__)
        return 0
    try:
        if command == "configs":
            return _configs(rest)
        if command not in _MODULES:
            raise UserError(f"{command}: no such command; give one of {', '.join([*_MODULES, 'configs'])}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    name, arguments = as_module([command, *rest])
    module = importlib.import_module(name)
    sys.modules["__main__"].__doc__ = module.__doc__  # what absl's --help shows
    sys.argv = [f"slpo {command}", *arguments]
    run: Callable[[], int | None] = module.main if command == "report" else module.run
    return run()


def as_module(arguments: list[str]) -> tuple[str, list[str]]:
    """The module that a command is, but for `configs`, and that module's arguments."""
    name = _MODULES[arguments[0]]
    return f"slpo_jax.{name}", arguments if name == "cli.convert" else arguments[1:]


def _configs(names: list[str]) -> int:
    from slpo_jax.config.config_files import find_config, shipped

    if {"--help", "-h"} & set(names):
        print("slpo configs [NAME ..]: list the shipped configs, or print some.")
        return 0
    for name in names:
        with open(find_config(name), encoding="utf-8") as file:
            print(file.read(), end="")
    if not names:
        found = shipped()
        width = max(map(len, found))
        print("\n".join(f"{name:<{width}}  {text}" for name, text in found.items()))
    return 0

"""Train, evaluate and compare language models that reason in latent vectors.

First:

    slpo train quickstart --smoke               does all of it work here? In a minute
    slpo train quickstart                       train and evaluate, in minutes on two CPU cores
    slpo view runs/quickstart                   the report
    slpo solve runs/quickstart "7 * 3 + 9 * 7 + 2"
                                                ask what was trained, and watch it think

Commands:

    train    run the stages of a config: slpo train quickstart [--config.KEY=VALUE ..]
    data     see how problems are understood, before training: slpo data FILE
    solve    ask a reasoner, and watch it think: slpo solve RUN "question"
    eval     measure a reasoner on problems: slpo eval RUN FILE
    view     open a run's report in the browser: slpo view RUN
    report   make the report of a run anew, or one over several: slpo report RUN [RUN ..]
    export   write a reasoner for transformers: slpo export RUN DIR
    import   make a published reasoner one of ours: slpo import HUB_ID DIR
    configs  list the shipped configs, or print one: slpo configs [NAME]

RUN is a workdir, WORKDIR/checkpoints/STAGE, an export, a Hugging Face directory or a hub id.
`slpo COMMAND --help` has a command's flags.
"""

import importlib
import signal
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path

import slpo_jax
from slpo_jax.cli.command import CommandParser, run_command
from slpo_jax.errors import UserError

# The function of each, in this package: of its arguments alone. Nothing is imported before it is used.
_COMMANDS = {
    "train": "cli.train:train", "data": "cli.reasoner_commands:data", "solve": "cli.reasoner_commands:solve",
    "eval": "cli.reasoner_commands:evaluate", "view": "cli.commands:view", "report": "cli.commands:report",
    "export": "cli.reasoner_commands:export", "import": "cli.reasoner_commands:import_",
    "configs": "cli.commands:configs",
}  # fmt: skip


def main() -> None:
    """Run the command: status 2 and one line for what the user can mend."""
    try:
        run_command(_run, sys.argv[1:], goes_on=sys.argv[1:2] == ["train"])
    except KeyboardInterrupt:  # while it ends
        sys.exit(128 + signal.SIGINT)


def _run(arguments: list[str]) -> None:
    command, *rest = arguments or ["--help"]
    if command in ("--help", "-h", "help"):
        print(__doc__.rstrip())
    elif command == "--version":
        print(slpo_jax.__version__)
    else:
        function_of(command)(rest)


def function_of(command: str) -> Callable[[list[str]], None]:
    """Return the function of a command, of its arguments alone.

    Raises:
        UserError: there is no such command.
    """
    if command not in _COMMANDS:
        raise UserError(
            f"{command}: no such command; give one of {', '.join(_COMMANDS)}"
        )
    module, _, name = _COMMANDS[command].partition(":")
    function: Callable[[list[str]], None] = getattr(
        importlib.import_module(f"slpo_jax.{module}"), name
    )
    return function


def view(arguments: list[str]) -> None:
    """Open a run's report.html in the browser, and print where it is: slpo view RUN.

    Where only the records of an evaluation are there, the page is made first.

    Examples:
        slpo view runs/quickstart
        slpo view runs/quickstart/report.html
        BROWSER=true slpo view runs/quickstart    # prints where it is, and opens nothing
    """
    from slpo_jax.evaluation.report import write_report
    from slpo_jax.io.workdir import Workdir

    parser = CommandParser("view", view.__doc__)
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="a workdir, the folder of a report, or a page itself",
    )
    path = parser.read(arguments).run.expanduser()
    page = path if path.suffix == ".html" else Workdir(path).report_html
    if not page.is_file():
        if not Workdir(path).list_evaluated():
            problem = "no such folder"
            if path.exists():
                problem = "holds no records of an evaluation"
            raise UserError(
                f"{path}: {problem}; give the workdir of a run that was evaluated"
            )
        write_report(path)
    print(page, flush=True)
    webbrowser.open(page.resolve().as_uri())


def report(arguments: list[str]) -> None:
    """Make the report of a run anew, or with --out one over several: slpo report RUN ..

    Several are seeds of one config: figures become means, with their standard error over runs.

    Examples:
        slpo report runs/quickstart
        slpo report runs/seed_0 runs/seed_1 runs/seed_2 --out=runs/seeds
        slpo report runs/seed_* --out=runs/seeds
    """
    from slpo_jax.evaluation.headline import headline_text
    from slpo_jax.evaluation.report import compare_runs, write_report

    parser = CommandParser("report", report.__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="workdir of a run that was evaluated"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder for the report over several runs"
    )
    flags = parser.read(arguments)
    if flags.out is None and len(flags.runs) > 1:
        raise UserError(
            "--out: missing; name the folder for the report over several runs"
        )
    one = flags.out is None
    runs = flags.runs
    content = write_report(runs[0]) if one else compare_runs(runs, flags.out)
    for note in content["notes"]:
        print(note, file=sys.stderr)
    print(headline_text(content["headline"]))
    print(Path(flags.out or flags.runs[0]) / "report.html")


def configs(arguments: list[str]) -> None:
    """List the shipped configs, or print some: slpo configs [NAME ..].

    What follows a name after a colon is an argument: DIR has the data (`data` by default), METHOD and REASONER are
    named in the config's own text. A config of your own begins as a copy.

    Examples:
        slpo configs
        slpo configs quickstart
        slpo configs quickstart > my_config.py
    """
    from slpo_jax.config.registry import find_config, list_shipped

    parser = CommandParser("configs", configs.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a shipped config")
    names = parser.read(arguments).names
    for name in names:
        print(Path(find_config(name)).read_text(encoding="utf-8"), end="")
    if not names:
        abouts = list_shipped()
        width = max(map(len, abouts))
        for name, text in abouts.items():
            print(f"{name:<{width}}  {text}")

"""`slpo view RUN`: a run's report in the browser."""

import sys
import webbrowser
from pathlib import Path

from slpo_jax.cli.command import run_command
from slpo_jax.errors import UserError
from slpo_jax.evaluation.report import write_report
from slpo_jax.io.workdir import Workdir


def view(run: str | Path) -> None:
    """Open a run's `report.html` in the browser, and print where it is; made first where only its records are there.

    Args:
        run: a workdir, the folder of a report over several runs, or a page itself.
    Raises:
        UserError: there is neither a page nor anything to make it of.
    """
    path = Path(run).expanduser()
    page = path if path.suffix == ".html" else Workdir(path).report_html
    if not path.exists():
        raise UserError(f"{path}: no such run; give the workdir of a run that was evaluated")
    if not page.is_file():
        if not Workdir(path).evaluated():
            raise UserError(f"{path}: holds no records of an evaluation; run the evaluate stage first")
        write_report(path)
    print(page)
    sys.stdout.flush()
    webbrowser.open(page.resolve().as_uri())


def main(argv: list[str]) -> None:
    """The command, after its flags are parsed."""
    if len(argv) != 2:
        raise UserError("RUN: give the workdir of a run that was evaluated, or its report.html; see --help")
    view(argv[1])


def run() -> None:
    """The command: one line and status 2 for what the user can mend."""
    run_command(main, goes_on=False)


if __name__ == "__main__":
    run()

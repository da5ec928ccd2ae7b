"""`slpo view RUN`: a run's report in the browser."""

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from slpo_jax.errors import FlagParser, UserError, silent_when_unread
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


@silent_when_unread()
def run(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = FlagParser(prog="slpo view", description="Open a run's report in the browser.")
    parser.add_argument("run", metavar="RUN", help="workdir of a run that was evaluated, or its report.html")
    try:
        view(parser.parse_args(argv).run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run())

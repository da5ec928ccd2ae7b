"""`python launch/first_run.py RUN RECORDING`: what a quick start shows, as results/first_run.json.

The run is recorded by the program `script` of Linux, and drawn in a terminal of 134 columns:

    stty cols 134
    script --log-out runs/shown --log-timing runs/shown.timing -c "slpo train quickstart"
    python launch/first_run.py runs/quickstart runs/shown

The file has the training curves, what each latent says of the first test problem, and the lines of the terminal with
their times. `python launch/tables.py` draws them. In the lines the run has the folder that it gets without --workdir.
"""

import argparse
import codecs
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import slpo_jax as slpo
from reproduce import provenance
from slpo_jax.errors import FlagParser, UserError, silent_when_unread
from slpo_jax.evaluation.curves import read_metrics, training_curves
from slpo_jax.io.files import read_json, write_text
from tables import dump

FILE = Path(__file__).resolve().parents[1] / "results" / "first_run.json"
COLUMNS = 134
_VERSIONS = 8  # of a line that is written anew, such as a bar
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def curves(run: Path, labels: Mapping[str, str]) -> dict[str, Any]:
    """Make a table of imitation's accuracy and one of the mean reward, in percent, with a column for each step.

    Args:
        labels: names of rows by stage.
    """
    logged = training_curves(read_metrics(run / "metrics.jsonl")[0])
    made = {}
    for scalar in ("accuracy", "reward"):
        lines = {}
        for stage, scalars in logged.items():
            if scalar in scalars:
                steps, values = scalars[scalar]
                lines[labels.get(stage, stage)] = dict(zip(steps, values, strict=True))
        steps = sorted(set().union(*lines.values()))
        rows: list[list[Any]] = []
        for name, line in lines.items():
            cells = [
                round(100 * line[step], 2) if step in line else None for step in steps
            ]
            rows.append([name, *cells])
        made[scalar] = {"columns": ["", *map(str, steps)], "rows": rows}
    return made


def thought(run: Path) -> dict[str, Any]:
    """Make a table of the latents for the first test problem: the decoder's step, and the likeliest tokens."""
    reasoner = slpo.load(run)
    question = reasoner.problems("test")[0].question
    solution = reasoner.solve(question)
    rows = []
    for number, latent in enumerate(solution.latents, 1):
        cells: list[Any] = [str(number), latent.words]
        for token, probability in latent.likeliest:
            cells += [token.strip() or repr(token)[1:-1], float(f"{probability:.3g}")]
        rows.append(cells)
    pairs = ["token", "probability"] * len(solution.latents[0].likeliest)
    return {
        "question": question.strip(),
        "answer": solution.answer,
        "columns": ["latent", "says", *pairs],
        "rows": rows,
    }


def chunks(recording: Path) -> Iterator[tuple[float, str]]:
    """Read what `script` has recorded: texts, and the seconds since its beginning at which they came."""
    timing = recording.with_name(f"{recording.name}.timing")
    # Its first line is a comment of `script` itself, and so is its last.
    written = recording.read_bytes().partition(b"\n")[2]
    written = written.rpartition(b"\nScript done on")[0] or written
    decoder = codecs.getincrementaldecoder("utf-8")()
    seconds = 0.0
    for line in timing.read_text().splitlines():
        delay, size = line.split()
        seconds += float(delay)
        yield seconds, decoder.decode(written[: int(size)])
        written = written[int(size) :]


def terminal(written: Iterator[tuple[float, str]]) -> list[list[Any]]:
    """Follow a terminal's screen: what stands in which line, from which second on and until which.

    Returns:
        rows [line, text, from, until]; until is None of what is there at the end.
    """
    screen: list[str] = [""]
    column = 0
    versions: dict[int, list[tuple[float, str]]] = {}
    for seconds, text in written:
        for character in _ESCAPE.sub("", text):
            if character == "\r":
                column = 0
                continue
            if character == "\n" or column == COLUMNS:
                screen.append("")
                column = 0
            if character != "\n":
                line = screen[-1].ljust(column)
                screen[-1] = line[:column] + character + line[column + 1 :]
                column += 1
        for place, line in enumerate(screen):
            known = versions.setdefault(place, [])
            if not known or known[-1][1] != line.rstrip():
                known.append((round(seconds, 1), line.rstrip()))
    rows = []
    for place, known in versions.items():
        some = _thin(known)
        ends = [begin for begin, _ in some[1:]]
        for (begin, line), end in zip(some, [*ends, None], strict=True):
            rows.append([str(place), line, begin, end])
    return rows


def _thin(versions: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Keep the first, the last, and some between, evenly in time."""
    begin = versions[0][0]
    wait = (versions[-1][0] - begin) / _VERSIONS
    kept = [versions[0]]
    for version in versions[1:-1]:
        if version[0] - kept[-1][0] >= wait:
            kept.append(version)
    if len(versions) > 1:
        kept.append(versions[-1])
    return kept


@silent_when_unread()
def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = FlagParser(
        prog="python launch/first_run.py",
        description="Curves, a thought and the terminal of a run.",
    )
    parser.add_argument("run", type=Path, help="a finished quick start")
    parser.add_argument("recording", type=Path, help="by the program `script`")
    try:
        flags: argparse.Namespace = parser.parse_args(argv)
        lines = terminal(chunks(flags.recording))
        for line in lines:
            line[1] = line[1].replace(str(flags.run), "runs/quickstart")
        report = read_json(flags.run / "report.json", "give a run that has ended")
        labels = {name: row["label"] for name, row in report["rows"].items()}
        tables = {
            **curves(flags.run, labels | {"imitate": "SFT"}),
            "thought": thought(flags.run),
            "terminal": {"columns": ["line", "text", "from", "until"], "rows": lines},
        }
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    names = ["runs/quickstart", "runs/shown"]
    command = shlex.join(["python", "launch/first_run.py", *names])
    write_text(FILE, dump({**provenance(command), "seeds": [0], "tables": tables}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python launch/tables.py [--check]`: writes the tables of README.md and docs/ anew from results/.

A page says where one stands, and between the two lines nothing is written by hand:

    <!-- table: results/NAME.json, TABLE -->
    <!-- table: results/NAME.json, TABLE; rows: SLPO | cold gate; columns: Acc | pass@8 -->
    <!-- end -->

Rows and columns are picked by their names, in the order given; without, all are there. A results file holds
"command", "commit", "machine", "date", "seeds" (null where it isn't known; a table may have its own) and "tables":
{NAME: {"columns": [..], "rows": [[name, cell, ..], ..]}}. A cell is a text, a number, null, or one of {"value", "low",
"high"}: a difference with its interval, bold where that excludes 0; {"value", "se"}; {"median", "min", "max"}. A table
may have "digits" (after the point; 2, and none from 100 on) and "signed" (numbers have a sign). `FIGURES` are drawn.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from figure import intervals, lines
from slpo_jax.errors import FlagParser, UserError, silent_when_unread
from slpo_jax.io.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
PROVENANCE = ("command", "commit", "machine", "date", "seeds")
FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "docs/arena.svg": (
        "results/arena.json", lambda tables: intervals(tables["groups, minus reference"], ("Acc", "Pass@16"))
    ),
    "docs/depth.svg": (
        "results/depth.json",
        lambda tables: lines({"Acc (%)": tables["Acc by set"], "latents": tables["latents by set"]}, "latents"),
    ),
}  # fmt: skip
"""File -> the results file that it shows, and what draws it from the tables there."""
_PLACE = re.compile(r"(<!-- table: (\S+), ([^;\n]+?)((?:; \w+: [^;\n]+)*) -->\n).*?(<!-- end -->)", re.DOTALL)

_TODAY = {
    r"no thought": "no latents", r"^(.*: )?Pass@k": r"\1pathwise", r"\bkeys\b": "reference",
    r"\breplay\b": "pathwise (reward)", r"\breplay_pkpo\b": "pathwise (PKPO)", r", improvement$": ", policy update",
    r"\bon (GPT-2|Llama)\b(?![ -]\d)": r"on tiny \1",
}  # fmt: skip
"""A row's name of older files -> what it is called now."""


def cell(value: Any, digits: int = 2, signed: bool = False) -> str:
    """A cell's text."""
    sign = "+" if signed else ""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int):
        return f"{value:{sign}d}"
    middle = value if isinstance(value, float) else value.get("value", value.get("median"))
    if abs(middle) >= 100:
        digits = 0
    if isinstance(value, float):
        return f"{value:{sign}.{digits}f}"
    if "se" in value:
        return f"{middle:{sign}.{digits}f} ± {value['se']:.{digits}f}"
    if "median" in value:
        return f"{middle:.{digits}f} ({value['min']:.{digits}f}-{value['max']:.{digits}f})"
    low, high = value["low"], value["high"]
    mean = f"{middle:+.{digits}f}"
    return f"{f'**{mean}**' if low > 0 or high < 0 else mean} [{low:+.{digits}f}, {high:+.{digits}f}]"


def markdown(table: Mapping[str, Any]) -> str:
    """A table; names on the left, figures on the right.

    Args:
        table: as in a results file.
    """
    how = {key: table[key] for key in ("digits", "signed") if key in table}
    rows = [table["columns"], *([cell(value, **how) for value in row] for row in table["rows"])]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"| --- |{' ---: |' * (len(rows[0]) - 1)}", *lines[1:]]) + "\n"


def in_todays_words(tables: Mapping[str, Any]) -> dict[str, Any]:
    """A results file's tables, whose rows have the names of `compare` today; the file keeps those of its day."""

    def named(row: list[Any]) -> list[Any]:
        name = row[0]
        for pattern, today in _TODAY.items():
            name = re.sub(pattern, today, name)
        return [name, *row[1:]]

    return {name: {**table, "rows": [named(row) for row in table["rows"]]} for name, table in tables.items()}


def picked(table: Mapping[str, Any], picks: Mapping[str, list[str]]) -> dict[str, Any]:
    """Some of a table's rows and columns.

    Raises:
        KeyError: one that it lacks.
    """
    rows, columns = {row[0]: row for row in table["rows"]}, list(table["columns"])
    chosen = [rows[name] for name in picks.get("rows", list(rows))]
    names = picks.get("columns", columns[1:])
    if lacking := set(names) - set(columns):
        raise KeyError(sorted(lacking)[0])
    places = [0, *(columns.index(name, 1) for name in names)]
    return {**table, "columns": [columns[i] for i in places], "rows": [[row[i] for i in places] for row in chosen]}


def rendered(text: str, folder: Path = ROOT) -> str:
    """A page with its tables as results/ has them now.

    Raises:
        UserError: a table, row or column that results/ lacks.
    """

    def fill(match: re.Match[str]) -> str:
        start, file, name, more, end = match.groups()
        picks = (pick.partition(": ") for pick in more.split("; ")[1:])
        tables = in_todays_words(read_json(folder / file, "give a file of results/")["tables"])
        try:
            chosen = picked(tables[name], {key: names.split(" | ") for key, _, names in picks})
        except KeyError as error:
            raise UserError(f"{file}: {name} has no {error}; give one of its own") from None
        return f"{start}\n{markdown(chosen)}\n{end}"

    return _PLACE.sub(fill, text)


def dump(result: Mapping[str, Any]) -> str:
    """A results file, a table's row on each line."""
    text = json.dumps({**result, "tables": None}, indent=1, ensure_ascii=False)
    tables = []
    for name, table in result["tables"].items():
        about = {key: value for key, value in table.items() if key != "rows"}
        rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in table["rows"])
        facts = "".join(f'   "{key}": {json.dumps(value, ensure_ascii=False)},\n' for key, value in about.items())
        tables.append(f'  {json.dumps(name, ensure_ascii=False)}: {{\n{facts}   "rows": [\n{rows}\n   ]\n  }}')
    return text.replace('"tables": null', '"tables": {\n' + ",\n".join(tables) + "\n }") + "\n"


def drawn(name: str) -> str:
    """One of `FIGURES`."""
    file, draw = FIGURES[name]
    return draw(in_todays_words(read_json(ROOT / file)["tables"]))


def pages() -> list[Path]:
    """Those that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@silent_when_unread()
def main(argv: list[str] | None = None) -> int:
    """The command; status 1 if --check finds a page that is not as results/."""
    parser = FlagParser(prog="python launch/tables.py", description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--check", action="store_true", help="write nothing, and name the pages that would change")
    try:
        check = parser.parse_args(argv).check
        made = {page: rendered(page.read_text()) for page in pages()} | {ROOT / name: drawn(name) for name in FIGURES}
        changed = {page: text for page, text in made.items() if not page.exists() or text != page.read_text()}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for page, text in changed.items():
        print(page.relative_to(ROOT))
        if not check:
            write_text(page, text)
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())

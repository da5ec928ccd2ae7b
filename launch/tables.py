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

from figure import curves, intervals, points, terminal, thought
from slpo_jax.errors import FlagParser, UserError, silent_when_unread
from slpo_jax.io.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
PROVENANCE = ("command", "commit", "machine", "date", "seeds")
FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "docs/arena.svg": (
        "results/arena.json", lambda tables: intervals(tables["groups, minus SFT on keys"], ("Acc", "Pass@16"))
    ),
    "docs/cost.svg": ("results/depth.json", lambda tables: _draw_cost(tables)),
    "docs/training.svg": ("results/first_run.json", lambda tables: curves(
        {name: tables[name] for name in ("accuracy", "reward")},
        {"accuracy": "imitation: texts with all tokens right (%)", "reward": "rewards: mean reward (%)"},
    )),
    "docs/thought.svg": ("results/first_run.json", lambda tables: thought(tables["thought"])),
    "docs/first_run.svg": (
        "results/first_run.json", lambda tables: terminal(tables["terminal"], "slpo train quickstart")
    ),
}  # fmt: skip
"""File -> the results file that it shows, and what draws it from the tables there."""


def _draw_cost(tables: Mapping[str, Any]) -> str:
    """Draw accuracy on the deepest chains against the sequential steps that an answer takes."""
    rows = {"rows": ["no latents: SFT", "SIM-CoT: SFT", "chain of thought: SFT"]}
    steps = pick(tables["steps by set"], rows)
    right = pick(tables["Acc by set"], rows)
    return points(
        steps, right, "depth 5", ("sequential steps for an answer", "Acc (%)")
    )


_PLACE = re.compile(
    r"(<!-- table: (\S+), ([^;\n]+?)((?:; \w+: [^;\n]+)*) -->\n).*?(<!-- end -->)",
    re.DOTALL,
)

_TODAY = {
    r"no thought": "no latents",
    r"^(.*: )?Pass@k": r"\1pathwise",
    r"further imitation": "SFT, as many steps more",
    r"imitation, own length": "SFT",
    r"\bimitation\b": "SFT",
    r"(^|: |above |minus )(keys|reference)(?=$|,|:)": r"\1SFT on keys",
    r"pathwise \(reward\)": "replay",
    r"pathwise \(PKPO\)": "replay (PKPO)",
    r"\breplay_pkpo\b": "replay (PKPO)",
    r", improvement$": ", policy update",
    r"\bon (GPT-2|Llama)\b(?![ -]\d)": r"on tiny \1",
}
"""A name in older files -> what it is called now. What has today's name keeps it."""


def cell(value: Any, digits: int = 2, signed: bool = False) -> str:
    """A cell's text."""
    if value is None or isinstance(value, str):
        return value or ""
    sign = "+" if signed else ""
    if isinstance(value, int):
        return f"{value:{sign}d}"
    middle = value
    if isinstance(value, dict):
        middle = value.get("value", value.get("median"))
    if abs(middle) >= 100:
        digits = 0
    # Whole numbers and texts are done; the others have so many digits.
    places = f".{digits}f"
    if isinstance(value, float):
        return f"{value:{sign}{places}}"
    if "se" in value:
        return f"{middle:{sign}{places}} ± {value['se']:{places}}"
    if "median" in value:
        ends = f"{value['min']:{places}}-{value['max']:{places}}"
        return f"{middle:{places}} ({ends})"
    # A difference is bold where its interval excludes 0.
    low = value["low"]
    high = value["high"]
    mean = f"{middle:+{places}}"
    if low > 0 or high < 0:
        mean = f"**{mean}**"
    return f"{mean} [{low:+{places}}, {high:+{places}}]"


def markdown(table: Mapping[str, Any]) -> str:
    """A table; names on the left, figures on the right.

    Args:
        table: as in a results file.
    """
    how = {key: table[key] for key in ("digits", "signed") if key in table}
    header = table["columns"]
    rule = f"| --- |{' ---: |' * (len(header) - 1)}"
    lines = [
        f"| {' | '.join(header)} |",
        rule,
    ]
    for row in table["rows"]:
        cells = [cell(value, **how) for value in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def todays_name(name: str) -> str:
    """What a row or a table of an older file is called now."""
    for pattern, today in _TODAY.items():
        name = re.sub(pattern, today, name)
    return name


def in_todays_words(tables: Mapping[str, Any]) -> dict[str, Any]:
    """A results file's tables, which have the names of `compare` today, as have their rows; the file keeps its own."""
    renamed = {}
    for title, table in tables.items():
        rows = [
            [
                todays_name(name),
                *cells,
            ]
            for name, *cells in table["rows"]
        ]
        renamed[todays_name(title)] = {**table, "rows": rows}
    return renamed


def parse_picks(text: str) -> dict[str, list[str]]:
    """What a page's line picks, `; rows: A | B; columns: C`; rows by today's names or by those of an older file."""
    picks = {}
    for part in text.split("; ")[1:]:
        key, _, names = part.partition(": ")
        picks[key] = names.split(" | ")
    if "rows" in picks:
        picks["rows"] = list(map(todays_name, picks["rows"]))
    return picks


def pick(table: Mapping[str, Any], picks: Mapping[str, list[str]]) -> dict[str, Any]:
    """Some of a table's rows and columns.

    Raises:
        KeyError: one that it lacks.
    """
    rows = {row[0]: row for row in table["rows"]}
    columns = list(table["columns"])
    places = [0]
    for name in picks.get("columns", columns[1:]):
        if name not in columns:
            raise KeyError(name)
        places.append(columns.index(name, 1))
    chosen = []
    for name in picks.get("rows", rows):
        chosen.append([rows[name][i] for i in places])
    header = [columns[i] for i in places]
    return {**table, "columns": header, "rows": chosen}


def render(text: str, folder: Path = ROOT) -> str:
    """A page with its tables as results/ has them now.

    Raises:
        UserError: a table, row or column that results/ lacks.
    """

    def fill(match: re.Match[str]) -> str:
        start, file, title, more, end = match.groups()
        found = read_json(folder / file, "give a file of results/")
        tables = in_todays_words(found["tables"])
        try:
            chosen = pick(tables[todays_name(title)], parse_picks(more))
        except KeyError as error:
            raise UserError(
                f"{file}: {title} has no {error}; give one of its own"
            ) from None
        return f"{start}\n{markdown(chosen)}\n{end}"

    return _PLACE.sub(fill, text)


def dump(result: Mapping[str, Any]) -> str:
    """A results file, a table's row on each line."""
    tables = []
    for name, table in result["tables"].items():
        facts = []
        for key, value in table.items():
            if key != "rows":
                facts.append(f"   {_json(key)}: {_json(value)},\n")
        rows = [f"    {_json(row)}" for row in table["rows"]]
        begin = f"  {_json(name)}: {{\n" + "".join(facts)
        tables.append(begin + '   "rows": [\n' + ",\n".join(rows) + "\n   ]\n  }")
    text = json.dumps(
        {
            **result,
            "tables": None,
        },
        indent=1,
        ensure_ascii=False,
    )
    whole = '"tables": {\n' + ",\n".join(tables) + "\n }"
    return text.replace('"tables": null', whole) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def draw_figure(name: str) -> str:
    """One of `FIGURES`."""
    file, draw = FIGURES[name]
    return draw(in_todays_words(read_json(ROOT / file)["tables"]))


def pages() -> list[Path]:
    """Those that may have tables."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]


@silent_when_unread()
def main(argv: list[str] | None = None) -> int:
    """The command; status 1 if --check finds a page that is not as results/."""
    parser = FlagParser(
        prog="python launch/tables.py", description=(__doc__ or "").partition("\n")[2]
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, and name the pages that would change",
    )
    try:
        check = parser.parse_args(argv).check
        made = {ROOT / name: draw_figure(name) for name in FIGURES}
        for page in pages():
            made[page] = render(page.read_text())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    is_changed = False
    for page, text in made.items():
        if page.exists() and text == page.read_text():
            continue
        is_changed = True
        print(page.relative_to(ROOT))
        if not check:
            write_text(page, text)
    return int(check and is_changed)


if __name__ == "__main__":
    sys.exit(main())

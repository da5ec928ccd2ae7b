"""Tables of measured figures: how they are shown, where they are from, and that the pages show those of results/."""

import json
import re
from pathlib import Path

import pytest

import hardware
import tables
from commands import commands_in, fault, words_of
from slpo_jax.errors import UserError

# Files with more seeds or runs of another file's table.
PARTS = {
    "depth_again": "depth",
    "depth_more": "depth",
    "depth_controls": "depth",
    "depth_coconut": "depth",
    "depth_last": "depth",
    "gradients_chains_more": "gradients_chains",
    "quickstart_cot": "quickstart",
    "quickstart_cot_more": "quickstart",
    "quickstart_four": "quickstart",
    "quickstart_rates_further": "quickstart_rates",
}

FILES = sorted((tables.ROOT / "results").glob("*.json"))
OLDER = {
    "ablations.json": {"benchmarks.ablations": "now launch/reproduce.py ablations"},
    "accelerator.json": {"benchmarks.accelerator": "now benchmarks.predicted"},
    "arena_words.json": {"arena": "on word problems, before the arena's graphs", "arena_rates": "the same"},
    "figures.json": {
        "sweeps": "now figure3", "advantages": "now figure4", "difficulty": "now figure7", "thresholds": "retired",
    },
    "generate.json": {"benchmarks.generate": "retired"},
    "gradients.json": {"gradients": "retired"},
    "passk.json": {"--plain": "retired", "--shapes quickstart": "now --shapes graph"},
    "real_budget.json": {"--budget": "retired"},
    "real_budget_countdown.json": {"--budget": "retired"},
    "recovery.json": {"benchmarks.recovery": "retired", "launch/kill_test.py": "now tests/run/test_kill.py"},
    "step.json": {
        "benchmarks.slpo_step": "now benchmarks.step", "benchmarks.growth": "retired",
        "benchmarks.levers": "retired", "benchmarks.floor": "retired",
    },
    "table1.json": {
        "twelve": "now table1", "twelve_rates": "now table1_rates", "slpo_jax.evaluation.report": "now slpo report",
    },
    "table1_falling.json": {"falling": "now table1_falling", "falling_rates": "retired"},
    "table1_seconds.json": {"seconds": "now table1_seconds"},
    "table2.json": {"text": "now table2"},
    "table4.json": {"soft": "now table4", "soft_rates": "now table4_rates"},
    "words.json": {
        "benchmarks.words": "retired",
        "slpo train quickstart": "of word problems, now arithmetic; a shell takes the quotes away",
    },
    "xla_cpu.json": {"measure.py": "a script of the day"},
}  # fmt: skip
"""Records whose commands are older than this checkout's: file -> what of a command has gone, and why. No new ones."""
INTERVAL = {"value": 1.255, "low": 0.5, "high": 2.0}
TABLE = {
    "columns": ["", "Acc", "pass@8"],
    "rows": [["SLPO", INTERVAL, None], ["cold gate", 3, 0.25]],
    "digits": 1,
}


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (INTERVAL, 1, "**+1.3** [+0.5, +2.0]"),
        (INTERVAL | {"value": -0.1, "low": -0.3, "high": 0.0}, 1, "-0.1 [-0.3, +0.0]"),
        (
            INTERVAL | {"value": -0.2, "low": -0.3, "high": -0.1},
            2,
            "**-0.20** [-0.30, -0.10]",
        ),
        ({"value": 40.0, "se": 0.72}, 1, "40.0 ± 0.7"),
        ({"median": 2.0, "min": 1.5, "max": 2.25}, 2, "2.00 (1.50-2.25)"),
        ({"value": 667.0, "se": 34.5}, 1, "667 ± 34"),
        (3, 2, "3"),
        (3.0, 2, "3.00"),
        ("5 of 12", 2, "5 of 12"),
        (None, 2, ""),
    ],
)
def test_a_cell_says_what_it_is(value, digits, text):
    assert tables.cell(value, digits) == text


def test_numbers_may_have_a_sign():
    assert [tables.cell(x, 1, signed=True) for x in (2.0, -2.0, 3)] == [
        "+2.0",
        "-2.0",
        "+3",
    ]


def test_a_page_s_tables_are_those_of_results(tmp_path):
    """Whole, or rows and columns that are picked; what lies between the lines is replaced, the rest stays."""
    (tmp_path / "results").mkdir()
    file = tmp_path / "results" / "one.json"
    file.write_text(tables.dump({"command": "x", "tables": {"gains": TABLE}}))
    assert json.loads(file.read_text())["tables"]["gains"] == TABLE
    whole = "| | Acc | pass@8 |\n| --- | ---: | ---: |\n| SLPO | **+1.3** [+0.5, +2.0] | |\n| cold gate | 3 | 0.2 |\n"
    whole = whole.replace("| |", "|  |")
    page = "Before\n<!-- table: results/one.json, gains -->\nold\n<!-- end -->\nafter"
    text = tables.render(page, tmp_path)
    assert (
        text
        == f"Before\n<!-- table: results/one.json, gains -->\n\n{whole}\n<!-- end -->\nafter"
    )
    assert tables.render(text, tmp_path) == text
    some = page.replace("gains", "gains; rows: cold gate | SLPO; columns: pass@8")
    rows = [
        line
        for line in tables.render(some, tmp_path).splitlines()
        if line.startswith("|")
    ]
    assert rows == [
        "|  | pass@8 |",
        "| --- | ---: |",
        "| cold gate | 0.2 |",
        "| SLPO |  |",
    ]
    for lacking in ("losses", "gains; rows: SLP", "gains; columns: acc"):
        with pytest.raises(UserError, match=r"results/one\.json: .* has no"):
            tables.render(page.replace("gains", lacking), tmp_path)


TODAY = {
    "no thought on Llama": "no latents on tiny Llama",
    "Pass@k, 800": "pathwise, 800",
    "CODI on GPT-2: Pass@k": "CODI on tiny GPT-2: pathwise",
    "any of N (Pass@N)": "any of N (Pass@N)",
    "replay, above keys": "replay, above SFT on keys",
    "pathwise (reward)": "replay",
    "CODI on GPT-2: replay_pkpo": "CODI on tiny GPT-2: replay (PKPO)",
    "imitation, own length": "SFT",
    "imitation, T_max latents": "SFT, T_max latents",
    "minus further imitation": "minus SFT, as many steps more",
    "groups, minus reference, Acc by set": "groups, minus SFT on keys, Acc by set",
    "keys and values": "keys and values",
    "others than the reference": "others than the reference",
}


def test_rows_and_tables_have_the_names_of_today(tmp_path):
    """Those of older files are renamed, and a page may ask by both; what has today's name, or is a metric, stays."""
    rows = [[name, 1] for name in TODAY]
    older = {"minus imitation": {"columns": ["", "x"], "rows": rows}}
    renamed = tables.in_todays_words(older)
    today = [[name, 1] for name in TODAY.values()]
    assert renamed == {"minus SFT": {"columns": ["", "x"], "rows": today}}
    assert tables.in_todays_words(renamed) == renamed
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "one.json").write_text(tables.dump({"tables": older}))
    for title, row in (
        ("minus imitation", "keys and values"),
        ("minus SFT", "replay, above keys"),
    ):
        page = f"<!-- table: results/one.json, {title}; rows: {row} -->\n<!-- end -->"
        assert f"| {TODAY[row]} | 1 |" in tables.render(page, tmp_path)


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_pages_are_rendered_from_results(page):
    """After a change of results/ or of a page: python launch/tables.py."""
    text = page.read_text()
    assert tables.render(text) == text
    assert text.count("<!-- table: ") == text.count("<!-- end -->")
    # Where a figure is from stands in its file alone.
    assert not re.search(
        r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,40}\b|AMD|EPYC|Intel|Xeon", text
    )


_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_VERSION = r"(?:Python|jax) [\d.]+(?: to [\d.]+)?"
_NO_PROSE = re.compile(
    rf"<!--.*?-->|^\|[^\n]*|`[^`]*`|\]\([^)]*\)|{_VERSION}", re.DOTALL | re.MULTILINE
)
_NUMBER = r"(?<![\w.-])[-+]?(\d+\.\d+)(?![\w-]|\.\d)"
_CLAIM = re.compile(
    rf"(?:{_NUMBER}[^\[\]\d]{{0,20}} )?\[[-+]?(\d+\.\d+), [-+]?(\d+\.\d+)\]|{_NUMBER} ± (\d+\.\d+)|{_NUMBER}"
)


def cells_of(table):
    """The numbers of each cell of a results file's table, without their signs."""
    for row in table["rows"]:
        for cell in row[1:]:
            numbers = list(cell.values()) if isinstance(cell, dict) else [cell]
            yield [abs(number) for number in numbers if isinstance(number, int | float)]


def unfounded(text, read):
    """Claims of a page's prose that no cell of a results file has which their section names.

    A claim is a figure with a decimal point; with its interval or its standard error it is one, and of one cell.

    Args:
        read: a results file's tables by its name, such as results/arena.json.
    """
    found = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        names = dict.fromkeys(re.findall(r"results/\w+\.json", section))
        cells = [
            cell
            for name in names
            for table in read(name).values()
            for cell in cells_of(table)
        ]
        prose = " ".join(_NO_PROSE.sub(" ", _FENCE.sub("", section)).split())
        for groups in _CLAIM.findall(prose):
            claim = [figure for figure in groups if figure]
            if not any(all(_holds(cell, figure) for figure in claim) for cell in cells):
                found.append(claim)
    return found


def _holds(cell, figure):
    """Whether a cell has a number that is printed so."""
    half = 0.5001 * 10.0 ** -len(figure.partition(".")[2])
    return any(abs(number - float(figure)) <= half for number in cell)


def test_a_claim_without_a_cell_is_found():
    stored = {
        "a": {
            "rows": [
                [
                    "x",
                    {"value": -1.26, "low": -2.0, "high": 0.5},
                    0.25,
                    {"value": 7.0, "se": 3.0},
                ]
            ]
        }
    }
    page = "## One\nLost 1.3 points [-2.0, +0.5] on SmolLM-1.7B; v 1.2.3 `9.9`\n"
    page += "<!-- results/one.json 6.6 -->\n| 8.8 |\n"
    page += "or 0.25, 7.0 ± 3.0\n"
    assert unfounded(page, lambda name: stored) == []
    changed = page.replace("1.3", "0.2").replace("or 0.25", "or 0.26")
    assert unfounded(changed, lambda name: stored) == [["0.2", "2.0", "0.5"], ["0.26"]]
    assert unfounded(page.replace("7.0 ±", "0.2 ±"), lambda name: stored) == [
        ["0.2", "3.0"]
    ]
    assert unfounded(f"{page}## Two\nIt gained 1.3.\n", lambda name: stored) == [
        ["1.3"]
    ]


@pytest.mark.parametrize("name", ["README.md", "docs/results.md", "docs/tutorial.md"])
def test_figures_in_prose_are_of_a_file_that_their_section_names(name):
    """A link, a table or a comment, <!-- figures: results/NAME.json -->, names it."""
    text = (tables.ROOT / name).read_text()
    assert (
        unfounded(
            text, lambda file: json.loads((tables.ROOT / file).read_text())["tables"]
        )
        == []
    )


@pytest.mark.parametrize("name", tables.FIGURES)
def test_figures_are_drawn_from_results(name):
    """After a change of results/: python launch/tables.py."""
    assert (tables.ROOT / name).read_text() == tables.draw_figure(name)
    assert any(
        f"{name.removeprefix('docs/')})" in page.read_text() for page in tables.pages()
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_results_say_where_they_are_from(path):
    found = json.loads(path.read_text())
    for table in found["tables"].values():
        facts = found | table
        assert set(tables.PROVENANCE) <= set(facts)
        assert facts["command"].startswith("python ")
        assert facts["seeds"] is None or all(
            isinstance(seed, int) for seed in facts["seeds"]
        )
        assert all(
            len(row) == len(table["columns"]) and isinstance(row[0], str)
            for row in table["rows"]
        )
        assert all(
            tables.cell(value) is not None for row in table["rows"] for value in row
        )
    shown = [
        page.name
        for page in tables.pages()
        if f"results/{path.name}" in page.read_text()
    ]
    assert shown, "no page has it"


def test_the_tables_of_hardware_are_made_of_today_s_results():
    """After a change of results/: python launch/hardware.py."""
    stored = json.loads(hardware.FILE.read_text())["tables"]
    assert stored == json.loads(json.dumps(hardware.make_tables()))


def _gone(path: Path, command: str) -> str:
    """Return what is wrong with a record's command; a table of launch/runs.py is that of its file too."""
    words = words_of(command)
    if words[1] == "launch/reproduce.py":
        table = words[2]
        name = PARTS.get(path.stem, path.stem)
        if not table.startswith(name.rstrip("s")):
            return f"{table} is not a table of {path.name}"
    return fault(words)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_of_results_can_be_begun(path, monkeypatch):
    monkeypatch.chdir(tables.ROOT)
    found = json.loads(path.read_text())
    given = dict.fromkeys(
        (found | table)["command"] for table in found["tables"].values()
    )
    commands = [command for text in given for command in commands_in(text)]
    assert len(commands) >= len(given)
    gone = {command: reason for command in commands if (reason := _gone(path, command))}
    older = {
        part
        for part in OLDER.get(path.name, {})
        if any(f" {part} " in f" {command} " for command in gone)
    }
    assert {command: reason for command, reason in gone.items()
            if not any(f" {part} " in f" {command} " for part in older)} == {}  # fmt: skip
    assert older == OLDER.get(path.name, {}).keys(), (
        "begins again: take it out of OLDER"
    )


@pytest.mark.parametrize(
    "command",
    ["slpo look runs/x", "slpo solve runs/x --sample=16 q", "slpo train nowhere", "slpo train prosqa:nowhere",
     "slpo train graph --config.rl.step=3", "python -m slpo_jax.solve", "python -m benchmarks.passk --shapes bert",
     "python launch/reproduce.py twelve", "python launch/reproduce.py figure4 --only=main", "python launch/kill.py"],
)  # fmt: skip
def test_what_is_looked_for_is_found(command):
    assert commands_in(f"First {command}; then another.") == [command]
    assert fault(words_of(command))

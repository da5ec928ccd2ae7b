"""How the report looks, a pure function of what `report.json` holds: as Markdown, and as a page.

The page has the report and its problems as JSON, put into `report.html` with its style and its scripts.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from slpo_jax.evaluation.cells import format_figure
from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.evaluation.curves import SHARED, scalars
from slpo_jax.evaluation.records import EvalRecords, Evals, Pair
from slpo_jax.evaluation.report_rows import BEST_FIXED
from slpo_jax.evaluation.statistics import explain_figure
from slpo_jax.io import artifact
from slpo_jax.io.files import digest, to_json
from slpo_jax.io.workdir import Workdir

_ENDS = """\
**Acc**: one greedy rollout. **P@k**: any of k rollouts with noise; in parentheses its error over the noise's seeds.
**maj@k**: the commonest answer of k. **#L**: latents of the greedy rollout. **steps**: its sequential steps, latents
and tokens. **ms**: milliseconds an answer takes in a batch, see the notes. ± is the standard error over {over}; for
shares of 0 or 100, brackets have Wilson's 95 % interval.

[report.html](report.html) opens in any browser: every metric and its definition, differences with intervals, curves,
settings and, of a single run, its problems with each row's answers and thoughts.
[report.json](report.json) has its numbers."""

MOST_BYTES = 4_900_000
"""Of a page: browsers open it at once, and it can be sent."""
_PAGE_BYTES = 100_000  # of the page's own style and scripts
WRONG, RIGHT, CUT = range(3)
"""What an answer was; one that was cut has no end and is wrong."""

Outcome = tuple[str | None, int]
"""An answer, and whether it is wrong, right or cut."""
Thoughts = dict[Pair, list[dict[str, Any]]]
"""(row, set) -> what was seen of the first problems' thoughts."""


def render_page(
    title: str, report: Mapping[str, Any], evals: Evals, thoughts: Thoughts
) -> str:
    """Render the page as HTML, which asks no network for anything.

    Args:
        title: of the page.
        report: what `report.json` holds.
        evals: row -> set -> records; the page shows as many of their problems as fit. {} for several runs.
        thoughts: of these, see `read_thoughts`.
    """
    metrics = _define_metrics(report["eval"])
    main_columns = shown_columns(report["eval"])
    runs = report.get("runs", ())
    training = report.get("training", {})
    data = {
        "title": title,
        "report": report,
        "columns": {
            "main": [*main_columns, "cut"],
            "all": list(metrics),
        },
        "metrics": metrics,
        "scalars": _define_scalars(training),
        "row_about": about_rows(report["rows"]),
        "differences_about": about_differences(len(runs)),
    }
    # As many problems as there is room for beside it.
    taken = len(_as_json(data).encode())
    room = MOST_BYTES - _PAGE_BYTES - taken
    data["problems"] = browse_problems(evals, thoughts, room)
    scripts = ("common.js", "charts.js", "problems.js", "report.js")
    parts = {
        "title": escape(title),
        "data": _as_json(data),
        "css": _asset("report.css"),
        "js": "\n".join(map(_asset, scripts)),
    }
    page = _asset("report.html")
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], page)


def _define_metrics(evaluated: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return title and meaning of each metric that some row has on some set."""
    metrics = {}
    for sets in evaluated.values():
        for figures in sets.values():
            for key in figures:
                definition = explain_figure(key)
                if definition:
                    title, about = definition
                    metrics[key] = {"title": title, "about": about}
    return metrics


def _define_scalars(training: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the meaning of what training logged, and of what it might have logged."""
    logged: set[str] = set()
    for curves in training.values():
        logged.update(curves)
    rewards = [name for name in logged if name.startswith("reward/")]
    shared = {*SHARED, *rewards, "elapsed"}
    meanings = dict(SHARED)
    # Methods that log more say what it means.
    if not logged <= shared:
        meanings = scalars()
    for name in rewards:
        meanings[name] = SHARED["reward/NAME"]
    return meanings


def _as_json(value: Any) -> str:
    """Write JSON that can't end the script that it stands in."""
    text = to_json(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    path = files(__package__) / "page" / name
    text = path.read_text(encoding="utf-8")
    return text.strip()


def about_rows(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Say what each row is, and how its rollouts stop.

    Args:
        rows: what they say of themselves, see `report_rows.Row`.
    """
    about = {}
    labels = []
    for name, row in rows.items():
        about[name] = _about_row(row)
        if row["fixed"]:
            label = row["label"]
            labels.append(f'"{label}"')
    if labels:
        fixed = ", ".join(labels)
        about[BEST_FIXED] = (
            f"The best of {fixed}, chosen for each metric and set: "
            "a choice made on the test set itself."
        )
    return about


def _about_row(row: Mapping[str, Any]) -> str:
    sentences: list[str] = []
    if row["about"]:
        sentences.append(row["about"])
    rule = row["rule"]
    each = row["latents_a_step"]
    chosen = ""
    if len(row["rules"]) > 1:
        chosen = ", chosen on the validation split"
    if rule is None:
        pass
    elif row["stopping"] == "threshold":
        sentences.append(f"Stops when the gate's probability reaches {rule}{chosen}.")
    elif each:
        sentences.append(
            f"Thinks {each} latent(s) for each step of a problem, {rule} at most."
        )
    else:
        sentences.append(f"Stops after {rule} latents{chosen}.")
    if row["source"]:
        sentences.append(f"Taken from {row['source']}.")
    return " ".join(sentences)


def about_differences(runs: int) -> str:
    """Say what the differences' intervals are.

    Args:
        runs: how many are compared; 0 or 1 is one.
    """
    of_runs = ""
    if runs > 1:
        of_runs = (
            " and, independently, of training runs, paired in both (with a few runs such intervals are somewhat too "
            "narrow: the bootstrap of R runs understates their variance by 1/R)"
        )
    return (
        "Percentage points, or numbers of latents, with 95 % percentile intervals of 10,000 bootstrap draws of problems"
        f"{of_runs}. ▲ and ▼ mark intervals that exclude 0; of twenty without any true difference, "
        "about one does so. The mean of the sets weighs all sets equally, and takes them as given."
    )


def read_thoughts(workdir: Path, evals: Evals) -> Thoughts:
    """Read what was seen of thoughts of these very evaluations."""
    thoughts: Thoughts = {}
    folder = Workdir(workdir)
    for row, sets in evals.items():
        for name in sets:
            of_set = folder.set_files(name, row)
            manifest = artifact.read(of_set.manifest)
            if manifest:
                evaluation = digest(manifest.facts)
                seen = artifact.value_of(of_set.thoughts, evaluation)
                thoughts[row, name] = seen or []
    return thoughts


def browse_problems(
    evals: Evals, thoughts: Thoughts, room: int
) -> dict[str, dict[str, Any]]:
    """Return as many of each set's first problems as there is room for.

    Args:
        evals: row -> set -> records.
        thoughts: see `read_thoughts`.
        room: bytes that the problems may take as JSON.

    Returns:
        {set: {"total": problems of the set, "problems": [[question, reference, outcomes, cells, thoughts], …]}}, where
        outcomes are [answer, WRONG | RIGHT | CUT], and cells {row: [outcome of the greedy rollout, its latents, and of
        the rollouts with noise: outcome, count, outcome, count, …]}. Rows on other problems are left out.
    """
    names: dict[str, None] = {}
    for sets in evals.values():
        names |= dict.fromkeys(sets)

    # Every problem of each set, with the rows that are on the same problems as the last one.
    most = 0
    pages: dict[str, dict[str, Any]] = {}
    for name in names:
        of_set: dict[str, EvalRecords] = {}
        for row, sets in evals.items():
            if name in sets:
                of_set[row] = sets[name]
        *_, last = of_set.values()
        records = {}
        probed = {}
        for row, record in of_set.items():
            if record.same_problems(last):
                records[row] = record
                probed[row] = thoughts.get((row, name), [])
        total = len(last.references)
        most = max(most, total)
        problems = [_problem(index, records, probed) for index in range(total)]
        pages[name] = {"total": total, "problems": problems}

    # The first problem of every set, then the second, and so on until the room is used up.
    for index in range(most):
        for page in pages.values():
            problem = page["problems"][index : index + 1]
            text = json.dumps(problem, ensure_ascii=False)
            room -= len(text.encode())
        if room < 0:
            for page in pages.values():
                page["problems"] = page["problems"][:index]
            break
    return pages


def _problem(
    index: int,
    records: Mapping[str, EvalRecords],
    probed: Mapping[str, Sequence[dict[str, Any]]],
) -> list[Any]:
    """Return one problem as the page has it, see `browse_problems`."""
    places: dict[Outcome, int] = {}
    cells = {}
    for row, rec in records.items():
        state = _state(rec.correct[index], rec.cut[index])
        greedy = (rec.answers[index], state)
        place = places.setdefault(greedy, len(places))
        latents = int(rec.latent_steps[index])
        cells[row] = [place, latents]

        # Equal outcomes of the rollouts with noise are counted.
        counts: Counter[Outcome] = Counter()
        answers = rec.sample_answers[:, index].ravel().tolist()
        correct = rec.sample_correct[:, index].ravel().tolist()
        cut = rec.sample_cut[:, index].ravel().tolist()
        samples = zip(answers, correct, cut, strict=True)
        for answer, is_right, is_cut in samples:
            state = _state(is_right, is_cut)
            counts[answer, state] += 1
        for outcome, count in counts.items():
            place = places.setdefault(outcome, len(places))
            cells[row] += [place, count]

    # What was seen of the rows' thoughts, of the first problems alone.
    thoughts = {}
    for row, seen in probed.items():
        if index < len(seen):
            thoughts[row] = seen[index]
    first = next(iter(records.values()))
    outcomes = list(map(list, places))
    return [
        first.questions[index],
        first.references[index],
        outcomes,
        cells,
        thoughts,
    ]


def _state(right: bool, cut: bool) -> int:
    if right:
        return RIGHT
    return CUT if cut else WRONG


def render_markdown(report: Mapping[str, Any]) -> str:
    """Write the report as Markdown, about a screen: the first lines, the means over the sets, and where the rest is.

    Args:
        report: what `report.json` holds, see `report.write_report` and `report.compare_runs`.
    """
    # The rows beside their controls.
    headline = report["headline"]
    title = headline["title"]
    blocks = ["# Evaluation report", f"### {title}"]
    cells = [row["cells"] for row in headline["rows"]]
    blocks.append(markdown_table(headline["columns"], cells))
    if headline["caption"]:
        blocks.append(headline["caption"])
    blocks += headline["warnings"]

    # More figures, and what they are to be read against.
    blocks.append("## Figures")
    blocks += _figure_tables(report)
    runs = report.get("runs", ())
    if len(runs) > 1:
        names = ", ".join(runs)
        sentences = [f"Means over {len(runs)} training runs ({names})."]
        over = "runs"
    else:
        sentences = [
            "One training run: another training seed may move its figures more than the errors say."
        ]
        over = "problems"
    for level in report["chance"].values():
        sentences.append(level["text"])
    blocks.append(" ".join(sentences))
    blocks.append(_ENDS.format(over=over))
    if report["notes"]:
        notes = [f"- {note}" for note in report["notes"]]
        blocks += ["## Notes", "\n".join(notes)]
    return "\n\n".join(blocks) + "\n"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table: names on the left, figures on the right."""
    _, *figures = header
    rule = ["---"] + ["---:"] * len(figures)
    lines: list[str] = []
    for cells in (header, rule, *rows):
        line = " | ".join(cells)
        lines.append(f"| {line} |")
    return "\n".join(lines)


def _figure_tables(report: Mapping[str, Any]) -> list[str]:
    """Write the table of the sets' mean, or of each set where there is no mean."""
    columns = shown_columns(report["eval"])
    header = ["row"]
    for key in columns:
        title = key
        definition = explain_figure(key)
        if definition:
            title, _ = definition
        header.append(title)
    header.append("truncated")

    # The sets' rows.
    by_set: dict[str, dict[str, Any]] = {}
    if report[AVERAGE]:
        by_set["mean of the sets"] = report[AVERAGE]
    else:
        for row, sets in report["eval"].items():
            for name, figures in sets.items():
                of_set = by_set.setdefault(name, {})
                of_set[row] = figures

    # A table of a title, a header and a line for each row.
    blocks = []
    for name, rows in by_set.items():
        counts = []
        lines = []
        for row, figures in rows.items():
            counts.append(figures["n"])
            label = report["rows"][row]["label"]
            line = [label]
            for key in (*columns, "cut"):
                cell = format_figure(figures, key)
                line.append(cell)
            lines.append(line)
        fewest = min(counts)
        most = max(counts)
        n = f"{fewest:,}"
        if most > fewest:
            n += f" to {most:,}"
        blocks.append(f"### {name} ({n} problems)")
        blocks.append(markdown_table(header, lines))
    return blocks


def shown_columns(evaluated: Mapping[str, Any]) -> list[str]:
    """Return the metrics of a table's columns: Acc, P@1, P@8, P@16 and up, the largest maj@k, #L, steps, ms.

    Of every scorer the best of the most samples, and their votes.
    """
    # Which figures there are, and which k.
    names: dict[str, None] = {}  # of figures that some row has, in order
    for sets in evaluated.values():
        for figures in sets.values():
            for name, value in figures.items():
                if value is not None:
                    names[name] = None

    columns = ["acc"]
    pass_ks = _ks(names, "pass")
    for k in pass_ks:
        is_last = k == pass_ks[-1]
        if k in (1, 8) or k >= 16 or is_last:
            columns.append(f"pass@{k}")
    majority_ks = _ks(names, "maj")
    if majority_ks:
        k = majority_ks[-1]
        columns.append(f"maj@{k}")

    # What scorers choose or vote for.
    scorers: dict[str, None] = {}
    for name in names:
        match = re.fullmatch(r"best@\d+_(\w+)(?<!_se)", name)
        if match:
            scorers[match[1]] = None
    for scorer in scorers:
        for way in ("best", "vote"):
            ks = _ks(names, way, f"_{scorer}")
            if ks:
                k = ks[-1]
                columns.append(f"{way}@{k}_{scorer}")

    if "searched" in names:
        columns.append("searched")

    # What an answer costs.
    columns += ["latent_steps", "sequential_steps"]
    if "milliseconds" in names:
        columns.append("milliseconds")
    return columns


def _ks(
    names: Mapping[str, None],
    metric: str,
    suffix: str = "",
) -> list[int]:
    """List the k of figures that are called METRIC@k and then the suffix, ascending."""
    pattern = rf"{metric}@(\d+){suffix}"
    ks = []
    for name in names:
        match = re.fullmatch(pattern, name)
        if match:
            k = int(match[1])
            ks.append(k)
    return sorted(ks)

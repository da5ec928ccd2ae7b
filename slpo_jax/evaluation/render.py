"""How the report looks, a pure function of what `report.json` holds: as Markdown, and as a page.

The page has the report and its problems as JSON, put into `report.html` with its style and its scripts.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.evaluation.curves import SHARED, scalars
from slpo_jax.evaluation.records import EvalRecords, Evals
from slpo_jax.evaluation.report_rows import BEST_FIXED
from slpo_jax.evaluation.statistics import COUNTS, defined
from slpo_jax.io import artifact
from slpo_jax.io.files import digest, to_json
from slpo_jax.io.workdir import Workdir

_ENDS = """\
**Acc**: one greedy rollout. **P@k**: any of k rollouts with noise; in parentheses its error over the noise's seeds.
**maj@k**: the commonest answer of k. **#L**: latents of the greedy rollout. **steps**: its sequential steps, latents
and tokens. **ms**: milliseconds an answer takes in a batch, see the notes. ± is the standard error over {over}; of
shares that are 0 or 100, brackets are Wilson's 95 % interval.

[report.html](report.html) opens in any browser: every metric and its definition, differences with intervals, curves,
settings and, of a single run, its problems with each row's answers and thoughts.
[report.json](report.json) has its numbers."""

MOST_BYTES = 4_900_000
"""Of a page: browsers open it at once, and it can be sent."""
WRONG, RIGHT, CUT = range(3)
"""What an answer was; one that was cut has no end and is wrong."""

Thoughts = dict[tuple[str, str], list[dict[str, Any]]]
"""(row, set) -> what was seen of the first problems' thoughts."""


def render_page(
    title: str, report: Mapping[str, Any], evals: Evals, thoughts: Thoughts
) -> str:
    """Render the page as HTML, which asks no network for anything.

    Args:
        title: of the page.
        report: what `report.json` holds.
        evals: row -> set -> records, of which problems are shown as far as they fit; {} for several runs.
        thoughts: of these, see `thoughts_of`.
    """
    figures = dict.fromkeys(
        key
        for sets in report["eval"].values()
        for figure in sets.values()
        for key in figure
    )
    metrics = {
        key: dict(zip(("title", "about"), texts, strict=True))
        for key in figures
        if (texts := defined(key))
    }
    logged = {name for curves in report.get("training", {}).values() for name in curves}
    rewards = {
        name: SHARED["reward/NAME"] for name in logged if name.startswith("reward/")
    }
    data = {
        "title": title,
        "report": report,
        "columns": {"main": [*shown_columns(report["eval"]), "cut"], "all": [*metrics]},
        "metrics": metrics,
        "scalars": (SHARED if logged <= {*SHARED, *rewards, "elapsed"} else scalars())
        | rewards,
        "row_about": about_rows(report["rows"]),
        "differences_about": about_differences(len(report.get("runs", ()))),
    }
    room = (
        MOST_BYTES - len(_as_json(data).encode()) - 100_000
    )  # the rest is the page's own
    data["problems"] = browsed(evals, thoughts, room)
    scripts = "\n".join(
        _asset(name) for name in ("common.js", "charts.js", "problems.js", "report.js")
    )
    parts = {
        "title": escape(title),
        "data": _as_json(data),
        "css": _asset("report.css"),
        "js": scripts,
    }
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], _asset("report.html"))


def _as_json(value: Any) -> str:
    """Write JSON that can't end the script that it stands in."""
    return to_json(value, ensure_ascii=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )


def _asset(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8").strip()


def about_rows(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Say what each row is, and how its rollouts stop.

    Args:
        rows: what they say of themselves, see `report_rows.Row`.
    """
    fixed = [f'"{row["label"]}"' for row in rows.values() if row["fixed"]]
    best = f"The best of {', '.join(fixed)}, by the very metric on the very set: a choice made on the test set itself."
    return {name: " ".join(_about(row)) for name, row in rows.items()} | (
        {BEST_FIXED: best} if fixed else {}
    )


def _about(row: Mapping[str, Any]) -> list[str]:
    chosen = ", chosen on the validation split" if len(row["rules"]) > 1 else ""
    gate = f"Stops when the gate's probability reaches {row['rule']}{chosen}."
    length = f"Stops after {row['rule']} latents{chosen}."
    if row["latents_a_step"]:
        length = f"Thinks {row['latents_a_step']} latent(s) for each step of a problem, {row['rule']} at most."
    sentences = [row["about"]] if row["about"] else []
    sentences += (
        [gate if row["stopping"] == "threshold" else length]
        if row["rule"] is not None
        else []
    )
    return sentences + ([f"Taken from {row['source']}."] if row["source"] else [])


def about_differences(runs: int) -> str:
    """Say what the differences' intervals are.

    Args:
        runs: how many are compared; 0 or 1 is one.
    """
    of_runs = (
        " and, independently, of training runs, paired in both (with a few runs such intervals are somewhat too "
        "narrow: the bootstrap of R runs understates their variance by 1/R)"
    )
    return (
        "Points of percent, or latents, with 95 % percentile intervals of 10,000 bootstrap draws of problems"
        f"{of_runs if runs > 1 else ''}. ▲ and ▼ where they exclude 0; of twenty intervals for no difference, about "
        "one does. The mean of the sets weighs sets equally, and takes them as given."
    )


def thoughts_of(workdir: Path, evals: Evals) -> Thoughts:
    """Read what was seen of thoughts of these very evaluations."""
    thoughts: Thoughts = {}
    for row, name in [(row, name) for row, sets in evals.items() for name in sets]:
        files = Workdir(workdir).set_files(name, row)
        if manifest := artifact.read(files.manifest):
            thoughts[row, name] = (
                artifact.value_of(files.thoughts, digest(manifest.facts)) or []
            )
    return thoughts


def browsed(evals: Evals, thoughts: Thoughts, room: int) -> dict[str, dict[str, Any]]:
    """Return as many of each set's first problems as there is room for.

    Args:
        evals: row -> set -> records.
        thoughts: see `thoughts_of`.
        room: bytes that the problems may take as JSON.

    Returns:
        {set: {"total": problems of the set, "problems": [[question, reference, outcomes, cells, thoughts], ..]}}, where
        outcomes are [answer, WRONG | RIGHT | CUT], and cells {row: [outcome of the greedy rollout, its latents, and of
        the rollouts with noise: outcome, count, outcome, count, ..]}. Rows on other problems are left out.
    """
    pages: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for sets in evals.values() for name in sets):
        records = {row: sets[name] for row, sets in evals.items() if name in sets}
        last = [*records.values()][-1]
        records = {
            row: record for row, record in records.items() if record.same_problems(last)
        }
        probed = {row: thoughts.get((row, name), []) for row in records}
        problems = [
            _problem(index, records, probed) for index in range(len(last.references))
        ]
        pages[name] = {"total": len(problems), "problems": problems}
    for index in range(max((page["total"] for page in pages.values()), default=0)):
        for page in pages.values():
            room -= len(
                json.dumps(
                    page["problems"][index : index + 1], ensure_ascii=False
                ).encode()
            )
        if room < 0:
            return {
                name: {**page, "problems": page["problems"][:index]}
                for name, page in pages.items()
            }
    return pages


def _problem(
    index: int,
    records: Mapping[str, EvalRecords],
    probed: Mapping[str, list[dict[str, Any]]],
) -> list[Any]:
    place: dict[tuple[str | None, int], int] = {}  # of an outcome
    cells = {}
    for row, rec in records.items():
        greedy = rec.answers[index], _state(rec.correct[index], rec.cut[index])
        cells[row] = [
            place.setdefault(greedy, len(place)),
            int(rec.latent_steps[index]),
        ]
        samples = (
            x[:, index].ravel().tolist()
            for x in (rec.sample_answers, rec.sample_correct, rec.sample_cut)
        )
        for outcome, count in Counter(
            (answer, _state(*mark)) for answer, *mark in zip(*samples, strict=True)
        ).items():
            cells[row] += [place.setdefault(outcome, len(place)), count]
    thoughts = {
        row: latents[index] for row, latents in probed.items() if index < len(latents)
    }
    first = next(iter(records.values()))
    return [
        first.questions[index],
        first.references[index],
        list(map(list, place)),
        cells,
        thoughts,
    ]


def _state(right: bool, cut: bool) -> int:
    return RIGHT if right else CUT if cut else WRONG


def render_markdown(report: Mapping[str, Any]) -> str:
    """Write the report as Markdown, about a screen: the verdict, the means over the sets, and where the rest is.

    Args:
        report: what `report.json` holds, see `report.write_report` and `report.compare_runs`.
    """
    runs = report.get("runs", ())
    head = "One training run: another training seed may move its figures more than the errors say."
    if len(runs) > 1:
        head = f"Means over {len(runs)} training runs ({', '.join(runs)})."
    blocks = [
        "# Evaluation report",
        *report["verdict"],
        *_tables(report),
        " ".join([head, *(level["text"] for level in report["chance"].values())]),
        _ENDS.format(over="runs" if len(runs) > 1 else "problems"),
        *(
            ["## Notes", "\n".join(f"- {note}" for note in report["notes"])]
            if report["notes"]
            else []
        ),
    ]
    return "\n\n".join(blocks) + "\n"


def percent(figures: Mapping[str, Any], key: str) -> str:
    """Write a share and how sure it is: `61.7 ± 2.1`, or of none and all `0.0 [0.0, 3.7]`."""
    interval = figures.get("intervals", {}).get(key)
    error = figures.get(f"{key}_se")
    if interval:
        low, high = (f"{100 * bound:.1f}" for bound in interval)
        return f"{100 * figures[key]:.1f} [{low}, {high}]"
    return f"{100 * figures[key]:.1f}" + (
        "" if error is None else f" ± {100 * error:.1f}"
    )


def shown_columns(eval_: Mapping[str, Any]) -> list[str]:
    """Return the metrics of a table's columns: Acc, P@1, P@8, P@16 and up, the largest maj@k, #L, steps, ms.

    Of every scorer the best of the most samples, and their votes.
    """
    figures = [metrics for sets in eval_.values() for metrics in sets.values()]
    names = dict.fromkeys(
        name
        for metrics in figures
        for name, value in metrics.items()
        if value is not None
    )

    def ks(metric: str, suffix: str = "") -> list[int]:
        return sorted(
            int(match[1])
            for name in names
            if (match := re.fullmatch(rf"{metric}@(\d+){suffix}", name))
        )

    scorers = dict.fromkeys(
        match[1]
        for name in names
        if (match := re.fullmatch(r"best@\d+_(\w+)(?<!_se)", name))
    )
    columns = [
        "acc",
        *(
            f"pass@{k}"
            for k in ks("pass")
            if k in (1, 8) or k >= 16 or k == ks("pass")[-1]
        ),
    ]
    columns += [f"maj@{k}" for k in ks("maj")[-1:]]
    for scorer in scorers:
        columns += [
            f"{way}@{k}_{scorer}"
            for way in ("best", "vote")
            for k in ks(way, f"_{scorer}")[-1:]
        ]
    if "searched" in names:
        columns.append("searched")
    columns += ["latent_steps", "sequential_steps"]
    if "milliseconds" in names:
        columns.append("milliseconds")
    return columns


def _tables(report: Mapping[str, Any]) -> list[str]:
    """Write the table of the sets' mean, or of each set where there is no mean."""
    columns = shown_columns(report["eval"])
    by_set = dict[str, dict[str, Any]]()
    for row, sets in report["eval"].items():
        for name, figures in sets.items():
            by_set.setdefault(name, {})[row] = figures
    header = ["row", *((defined(key) or (key,))[0] for key in columns), "truncated"]
    out = []
    for name, rows in (
        {"mean of the sets": report[AVERAGE]} if report[AVERAGE] else by_set
    ).items():
        counts = [figures["n"] for figures in rows.values()]
        n = " to ".join(f"{n:,}" for n in dict.fromkeys((min(counts), max(counts))))
        lines = [
            [
                report["rows"][row]["label"],
                *(cell(figures, key) for key in (*columns, "cut")),
            ]
            for row, figures in rows.items()
        ]
        table = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
        out += [
            f"### {name} ({n} problems)",
            "\n".join("| " + " | ".join(line) + " |" for line in table),
        ]
    return out


def cell(figures: Mapping[str, Any], key: str) -> str:
    """Write a figure as tables have it, with how sure it is; a dash for none."""
    if figures.get(key) is None:
        return "–"
    if key in COUNTS:
        error = figures.get(f"{key}_se")
        digits = ".3g" if key == "milliseconds" else ".2f"
        return f"{figures[key]:{digits}}" + (
            "" if error is None else f" ± {error:{digits}}"
        )
    over_seeds = (
        None if key in figures.get("intervals", {}) else figures.get(f"{key}_seed_se")
    )
    return percent(figures, key) + (
        "" if over_seeds is None else f" ({100 * over_seeds:.1f})"
    )

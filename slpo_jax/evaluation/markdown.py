"""The text of `report.md`, a pure function of what `report.json` holds."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.evaluation.statistics import COUNTS

_ENDS = """\
**Acc**: one greedy rollout. **P@k**: any of k rollouts with noise; in parentheses its error over the noise's seeds.
**maj@k**: the commonest answer of k. **#L**: latents of the greedy rollout. ± is the standard error over {over}; of
shares that are 0 or 100, brackets are Wilson's 95 % interval.

[report.html](report.html) opens in any browser: every metric and its definition, differences with intervals, curves,
settings and, of a single run, its problems with each row's answers and thoughts.
[report.json](report.json) has its numbers."""


def render(report: Mapping[str, Any]) -> str:
    """The report as Markdown, about a screen: the verdict, the means over the sets, and where the rest is.

    Args:
        report: what `report.json` holds, see `report.write_report` and `report.compare_runs`.
    """
    runs = report.get("runs", ())
    labels = {name: row["label"] for name, row in report["rows"].items()}
    columns = [*shown_columns(report["eval"]), ("cut", "cut at the limit")]
    head = "One training run: another training seed may move its figures more than the errors say."
    if len(runs) > 1:
        head = f"Means over {len(runs)} training runs ({', '.join(runs)})."
    blocks = [
        "# Evaluation report",
        *report["verdict"],
        *_tables(report["eval"], report[AVERAGE], columns, labels),
        " ".join([head, *(level["text"] for level in report["chance"].values())]),
        _ENDS.format(over="runs" if len(runs) > 1 else "problems"),
        *(["## Notes", "\n".join(f"- {note}" for note in report["notes"])] if report["notes"] else []),
    ]
    return "\n\n".join(blocks) + "\n"


def percent(figures: Mapping[str, Any], key: str) -> str:
    """A share and how sure it is: `61.7 ± 2.1`, or of none and all `0.0 [0.0, 3.7]`."""
    interval, error = figures.get("intervals", {}).get(key), figures.get(f"{key}_se")
    if interval:
        low, high = (f"{100 * bound:.1f}" for bound in interval)
        return f"{100 * figures[key]:.1f} [{low}, {high}]"
    return f"{100 * figures[key]:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def shown_columns(eval_: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Metric and header of a table's columns: Acc, P@1, P@8, P@16 and up, the largest maj@k, #L."""
    ks = _ks_of(eval_.values(), "pass@")
    columns = [(f"pass@{k}", f"P@{k}") for k in ks if k in (1, 8) or k >= 16 or k == ks[-1]]
    maj = [(f"maj@{k}", f"maj@{k}") for k in _ks_of(eval_.values(), "maj@")[-1:]]
    search = (
        [("searched", "beam search")] if any("searched" in x for sets in eval_.values() for x in sets.values()) else []
    )
    return [("acc", "Acc"), *columns, *maj, *_chosen_columns(eval_), *search, ("latent_steps", "#L")]


def _chosen_columns(eval_: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of every scorer the best of the most samples, and their votes."""
    names = dict.fromkeys(name for sets in eval_.values() for figures in sets.values() for name in figures)
    scorers = dict.fromkeys(match[1] for name in names if (match := re.fullmatch(r"best@\d+_(\w+?)(?<!_se)", name)))
    return [
        (f"{way}@{k}_{scorer}", f"{way}@{k} by {scorer}")
        for scorer in scorers
        for way in ("best", "vote")
        for k in _ks_of(eval_.values(), f"{way}@", f"_{scorer}")[-1:]
    ]


def _ks_of(rows: Iterable[Mapping[str, Mapping[str, Any]]], prefix: str, suffix: str = "") -> list[int]:
    """The k of a metric that some set of some row has, ascending.

    Args:
        rows: {set: figures} each.
        prefix: of the metric's name, "pass@" or "maj@".
        suffix: of its name after k.
    """
    names = {name for sets in rows for figures in sets.values() for name, value in figures.items() if value is not None}
    found = (re.fullmatch(rf"{prefix}(\d+){suffix}", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _tables(
    eval_: Mapping[str, Any], average: Mapping[str, Any], columns: list[tuple[str, str]], labels: Mapping[str, str]
) -> list[str]:
    """The mean of the sets, or each set where there is no mean."""
    sets = dict.fromkeys(name for sets in eval_.values() for name in sets)
    by_set = {name: {row: found[name] for row, found in eval_.items() if name in found} for name in sets}
    out = []
    for name, rows in ({AVERAGE: average} if average else by_set).items():
        lines = [[labels[row], *(cell(figures, key) for key, _ in columns)] for row, figures in rows.items()]
        title = _title(name, [figures["n"] for figures in rows.values()])
        out += [f"### {title}", _table(["row", *(header for _, header in columns)], lines)]
    return out


def _title(name: str, counts: Iterable[int]) -> str:
    """A set in words, with the number of problems of its rows."""
    found = sorted(set(counts))
    ends = " to ".join(f"{n:,}" for n in dict.fromkeys((found[0], found[-1])))
    return f"{'mean of the sets' if name == AVERAGE else name} ({ends} problems)"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(figures: Mapping[str, Any], key: str) -> str:
    """A figure as tables have it, with how sure it is; a dash for none."""
    if figures.get(key) is None:
        return "–"
    if key in COUNTS:
        error = figures.get(f"{key}_se")
        return f"{figures[key]:.2f}" + ("" if error is None else f" ± {error:.2f}")
    over_seeds = None if key in figures.get("intervals", {}) else figures.get(f"{key}_seed_se")
    return percent(figures, key) + ("" if over_seeds is None else f" ({100 * over_seeds:.1f})")

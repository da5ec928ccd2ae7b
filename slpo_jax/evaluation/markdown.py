"""The text of `report.md`, a pure function of what `report.json` holds."""

import re
from collections.abc import Mapping
from typing import Any

from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.evaluation.statistics import COUNTS, defined

_ENDS = """\
**Acc**: one greedy rollout. **P@k**: any of k rollouts with noise; in parentheses its error over the noise's seeds.
**maj@k**: the commonest answer of k. **#L**: latents of the greedy rollout. ± is the standard error over {over}; of
shares that are 0 or 100, brackets are Wilson's 95 % interval.

[report.html](report.html) opens in any browser: every metric and its definition, differences with intervals, curves,
settings and, of a single run, its problems with each row's answers and thoughts.
[report.json](report.json) has its numbers."""


def render(report: Mapping[str, Any]) -> str:
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
        *(["## Notes", "\n".join(f"- {note}" for note in report["notes"])] if report["notes"] else []),
    ]
    return "\n\n".join(blocks) + "\n"


def percent(figures: Mapping[str, Any], key: str) -> str:
    """Write a share and how sure it is: `61.7 ± 2.1`, or of none and all `0.0 [0.0, 3.7]`."""
    interval, error = figures.get("intervals", {}).get(key), figures.get(f"{key}_se")
    if interval:
        low, high = (f"{100 * bound:.1f}" for bound in interval)
        return f"{100 * figures[key]:.1f} [{low}, {high}]"
    return f"{100 * figures[key]:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def shown_columns(eval_: Mapping[str, Any]) -> list[str]:
    """Return the metrics of a table's columns: Acc, P@1, P@8, P@16 and up, the largest maj@k, #L.

    Of every scorer the best of the most samples, and their votes.
    """
    figures = [metrics for sets in eval_.values() for metrics in sets.values()]
    names = dict.fromkeys(name for metrics in figures for name, value in metrics.items() if value is not None)

    def ks(metric: str, suffix: str = "") -> list[int]:
        return sorted(int(match[1]) for name in names if (match := re.fullmatch(rf"{metric}@(\d+){suffix}", name)))

    scorers = dict.fromkeys(match[1] for name in names if (match := re.fullmatch(r"best@\d+_(\w+)(?<!_se)", name)))
    columns = ["acc", *(f"pass@{k}" for k in ks("pass") if k in (1, 8) or k >= 16 or k == ks("pass")[-1])]
    columns += [f"maj@{k}" for k in ks("maj")[-1:]]
    for scorer in scorers:
        columns += [f"{way}@{k}_{scorer}" for way in ("best", "vote") for k in ks(way, f"_{scorer}")[-1:]]
    return [*columns, *(["searched"] if "searched" in names else []), "latent_steps"]


def _tables(report: Mapping[str, Any]) -> list[str]:
    """Write the table of the sets' mean, or of each set where there is no mean."""
    columns, by_set = shown_columns(report["eval"]), dict[str, dict[str, Any]]()
    for row, sets in report["eval"].items():
        for name, figures in sets.items():
            by_set.setdefault(name, {})[row] = figures
    header = ["row", *((defined(key) or (key,))[0] for key in columns), "truncated"]
    out = []
    for name, rows in ({"mean of the sets": report[AVERAGE]} if report[AVERAGE] else by_set).items():
        counts = [figures["n"] for figures in rows.values()]
        n = " to ".join(f"{n:,}" for n in dict.fromkeys((min(counts), max(counts))))
        lines = [
            [report["rows"][row]["label"], *(cell(figures, key) for key in (*columns, "cut"))]
            for row, figures in rows.items()
        ]
        table = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
        out += [f"### {name} ({n} problems)", "\n".join("| " + " | ".join(line) + " |" for line in table)]
    return out


def cell(figures: Mapping[str, Any], key: str) -> str:
    """Write a figure as tables have it, with how sure it is; a dash for none."""
    if figures.get(key) is None:
        return "–"
    if key in COUNTS:
        error = figures.get(f"{key}_se")
        return f"{figures[key]:.2f}" + ("" if error is None else f" ± {error:.2f}")
    over_seeds = None if key in figures.get("intervals", {}) else figures.get(f"{key}_seed_se")
    return percent(figures, key) + ("" if over_seeds is None else f" ({100 * over_seeds:.1f})")

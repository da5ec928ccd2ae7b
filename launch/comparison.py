"""A comparison of a grid's finished runs: figures, tables and a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from grid import Grid
from jobs import DONE, make_job
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.evaluation.drawing import Style, style_at
from slpo_jax.evaluation.report import compare_runs

Figures = dict[str, float]
_LOGARITHMIC = frozenset({"noise_along"})
_UNITS = (
    "Percent or percentage points; latent_steps and answer_tokens: how many; distinct_answers: of a problem's samples."
)


def compare(grid: Grid, root: Path, limit: int | None = None) -> dict[str, Any]:
    """Figures of every label with a finished run, over its seeds; writes the labels' own reports.

    Runs that were finished with other settings or data than the grid's now, or whose results were changed or lost
    since, are left out, saying so.

    Args:
        limit: problems of each test set; None: the config's own.
    Returns:
        line -> {"row": its name, "kind": what its settings are counted as, "seeds": how many, "means": metric ->
        figure, "differences" and "by_set"}: baseline -> metric -> figure or set -> figure. A figure is {"value", "low",
        "high"}: of a mean over the sets with one standard error on each side, of a difference with its interval. There
        is a line for each label and row.
    """
    found: dict[str, Any] = {}
    for run in grid.runs:
        folders = []
        done = (path.parent for path in (root / run.label).glob(f"seed_*/{DONE}"))
        for folder in sorted(path for path in done if path.name.removeprefix("seed_").isdecimal()):
            if make_job(grid, run, root.resolve(), int(folder.name.removeprefix("seed_")), limit).is_finished:
                folders.append(folder)
            else:
                print(
                    f"{folder}: left out, it was run with other settings or data, or its results have changed since; "
                    "run it again", flush=True,
                )  # fmt: skip
        if not folders:
            continue
        report = compare_runs(folders, root / run.label)
        for row in (row for row in run.rows or grid.rows if row in report["eval"]):
            line = run.label if len(grid.rows) == 1 else f"{run.label}, {row}"
            differences = {b: _differences(report, row, b, grid.metrics) for b in grid.minus if b != row}
            found[line] = {
                "row": row,
                "kind": run.kind or row,
                "seeds": len(folders),
                "means": _means(report, row, grid.metrics),
                # The mean of the sets comes after them; where there is one set alone, its figure stands.
                "differences": {
                    b: {metric: list(sets.values())[-1] for metric, sets in metrics.items()}
                    for b, metrics in differences.items()
                },
                "by_set": {
                    b: {metric: {s: x for s, x in sets.items() if s != AVERAGE} for metric, sets in metrics.items()}
                    for b, metrics in differences.items()
                },
            }
    return found


def _means(report: dict[str, Any], name: str, metrics: Sequence[str]) -> dict[str, Figures]:
    """Of the mean of the sets, or of the only one."""
    row = report[AVERAGE].get(name) or next(iter(report["eval"].get(name, {}).values()), {})
    known = {metric: (row[metric], row.get(f"{metric}_se") or 0.0) for metric in metrics if row.get(metric) is not None}
    return {metric: {"value": x, "low": x - se, "high": x + se} for metric, (x, se) in known.items()}


def _differences(report: dict[str, Any], a: str, b: str, metrics: Sequence[str]) -> dict[str, dict[str, Figures]]:
    """Metric -> set -> figure."""
    found: dict[str, dict[str, Figures]] = {}
    for entry in report["differences"]:
        if (entry["a"], entry["b"]) == (a, b) and entry["metric"] in metrics:
            figure = {"value": entry["difference"], "low": entry["low"], "high": entry["high"]}
            found.setdefault(entry["metric"], {})[entry["set"]] = figure
    return found


def markdown(compared: Grid, found: dict[str, Any]) -> str:
    """The tables: the rows themselves, and their differences from each baseline."""
    lines = [_UNITS]
    head, rows = ["run", "seeds", *compared.metrics], _named(compared)

    def table(title: str, figures_of: Callable[[dict[str, Any]], dict[str, Figures]], cell: Callable[..., str]) -> None:
        lines.extend(["", f"{title}:", "", *_table(head)])
        for label, line in found.items():
            if figures := figures_of(line):
                cells = [cell(metric, figures.get(metric)) for metric in compared.metrics]
                lines.append(f"| {label} | {line['seeds']} | {' | '.join(cells)} |")

    table(f"{rows}; ± one standard error", lambda line: line["means"], _mean_cell)
    for b in compared.minus:
        title = f"{rows} minus {b}, mean of the sets; 95 % intervals, bold without 0"
        table(title, lambda line, b=b: line["differences"].get(b, {}), _difference_cell)
    return "\n".join([*lines, *_tally(compared, found)]) + "\n"


def _table(head: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"| --- | {' | '.join(['---:'] * len(head[1:]))} |"]


def _tally(compared: Grid, found: dict[str, Any]) -> list[str]:
    """In how many settings, each label and set being one, is a row above a baseline, and above all of them?"""
    counts: dict[tuple[str, str], dict[str, list[Figures]]] = {}
    for line in found.values():
        by_set = {b: metrics for b, metrics in line.get("by_set", {}).items() if metrics}
        if len(by_set) > 1 and {*by_set} == {*compared.minus} - {line["row"]}:
            by_set["all of them"] = _least(list(by_set.values()))
        for b, metrics in by_set.items():
            for metric, sets in metrics.items():
                counts.setdefault((line["kind"], b), {}).setdefault(metric, []).extend(sets.values())
    if all(len(figures) < 2 for metrics in counts.values() for figures in metrics.values()):
        return []
    lines = ["", "Settings in which the row is above (whose interval lies above 0) of all:", ""]
    lines += _table(["row", "above", *compared.metrics])
    for (row, b), metrics in counts.items():
        cells = []
        for figures in (metrics.get(metric, []) for metric in compared.metrics):
            above = (sum(figure[key] > 0 for figure in figures) for key in ("value", "low"))
            cells.append("{} ({}) of {}".format(*above, len(figures)) if figures else "")
        lines.append(f"| {row} | {b} | {' | '.join(cells)} |")
    return lines


def _least(baselines: Sequence[dict[str, dict[str, Figures]]]) -> dict[str, dict[str, Figures]]:
    """Metric -> set -> the least of each figure over the baselines."""
    keys = ("value", "low")
    return {
        metric: {name: {key: min(b[metric][name][key] for b in baselines) for key in keys} for name in sets}
        for metric, sets in baselines[0].items()
    }


def _named(compared: Grid) -> str:
    """What stands in the lines: their rows, where they are few."""
    return ", ".join(compared.rows) if 0 < len(compared.rows) < 4 else "each row"


def _scale(metric: str) -> int:
    return 100 if metric.startswith(("acc", "pass@")) else 1


def _mean_cell(metric: str, figure: Figures | None) -> str:
    if figure is None:
        return ""
    scale = _scale(metric)
    return f"{scale * figure['value']:.2f} ± {scale * (figure['high'] - figure['value']):.2f}"


def _difference_cell(metric: str, figure: Figures | None) -> str:
    if figure is None:
        return ""
    text = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*(_scale(metric) * figure[key] for key in ("value", "low", "high")))
    return f"**{text}**" if figure["low"] > 0 or figure["high"] < 0 else text


def shown(compared: Grid, found: dict[str, Any]) -> dict[str, Any]:
    """The lines that a picture has something to show of."""
    different = {name: line for name, line in found.items() if compared.minus and any(line["differences"].values())}
    return different or found


def draw(compared: Grid, found: dict[str, Any], path: Path) -> None:
    """A panel a metric, lines as in the tables: differences with a colour a baseline, or else the means.

    Where there are differences, what is the baseline of others alone has no line.
    """
    found = shown(compared, found)
    looks: dict[str, Style] = {b: style_at(place, f"minus {b}") for place, b in enumerate(compared.minus)}
    metrics, names = compared.metrics, list(found)
    figure = Figure(figsize=(2.6 * len(metrics) + 2, 0.3 * len(found) + 1.5), dpi=130, layout="constrained")
    axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axis, metric in zip(axes, metrics, strict=True):
        for place, line in enumerate(found.values()):
            parts = [(looks[b], line["differences"].get(b, {})) for b in looks]
            parts = parts or [(style_at(0, ""), line["means"])]
            for offset, (style, figures) in zip(np.linspace(-0.2, 0.2, len(parts) + 2)[1:-1], parts, strict=True):
                if point := figures.get(metric):
                    value, low, high = (_scale(metric) * point[key] for key in ("value", "low", "high"))
                    label = style.label if style.label not in axis.get_legend_handles_labels()[1] else None
                    axis.errorbar(
                        value, place + offset, xerr=[[value - low], [high - value]], fmt=style.marker, ms=4,
                        color=style.colour, label=label or None,
                    )  # fmt: skip
        if metric in _LOGARITHMIC:
            axis.set_xscale("log")
        if compared.minus:
            axis.axvline(0, color="#7F7F7F", lw=1)
        axis.set(title=metric, ylim=(len(found) - 0.5, -0.5))
        axis.set_yticks(range(len(found)), names if metric == metrics[0] else [])
        axis.spines[["top", "right"]].set_visible(False)
    if compared.minus:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    FigureCanvasAgg(figure).print_png(path)

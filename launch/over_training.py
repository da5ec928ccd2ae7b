"""A picture of a grid's runs while they train: a metric by step, a line a method, means over the seeds."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from grid import Grid
from jobs import DONE
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from slpo_jax.evaluation.drawing import style_at
from slpo_jax.evaluation.records import read_metrics
from slpo_jax.io.workdir import Workdir

Curve = dict[int, list[float]]
"""Step -> a value a seed."""


def curves(grid: Grid, root: Path, metric: str) -> dict[str, Curve]:
    """Label -> curve of the metric while its rows were trained, of the runs that are finished and log it."""
    found: dict[str, Curve] = {}
    for run in grid.runs:
        values: Curve = defaultdict(list)
        for done in sorted((root / run.label).glob(f"seed_*/{DONE}")):
            for row in read_metrics(Workdir(done.parent).metrics)[0]:
                if row["stage"] in (run.rows or grid.rows) and metric in row:
                    values[row["step"]].append(row[metric])
        if values:
            found[run.label] = dict(sorted(values.items()))
    return found


def draw_curves(grid: Grid, root: Path, metrics: Sequence[str], path: Path) -> None:
    """A panel a metric; bands are one standard error over the seeds. Nothing is drawn where nothing was logged."""
    panels = {metric: found for metric in metrics if (found := curves(grid, root, metric))}
    if not panels:
        return
    figure = Figure(figsize=(5 * len(panels) + 2, 3.6), dpi=130, layout="constrained")
    labels = [run.label for run in grid.runs]
    for axis, (metric, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for label, curve in found.items():
            style, steps = style_at(labels.index(label), label), np.array(list(curve))
            mean = np.array([np.mean(values) for values in curve.values()])
            error = np.array([np.std(x, ddof=1) / len(x) ** 0.5 if len(x) > 1 else 0.0 for x in curve.values()])
            axis.plot(steps, mean, color=style.colour, ls=style.dash, label=label)
            axis.fill_between(steps, mean - error, mean + error, color=style.colour, alpha=0.15, lw=0)
        axis.set(title=metric, xlabel="step")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    FigureCanvasAgg(figure).print_png(path)

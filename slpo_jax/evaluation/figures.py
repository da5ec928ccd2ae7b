"""Pass@k as a figure, drawn without pyplot so that no global backend or style is touched.

Colours are Okabe and Ito's, which stay apart under colour blindness; lines also differ in dash and marker.
"""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from slpo_jax.evaluation.curves import pass_curve
from slpo_jax.evaluation.records import Evals
from slpo_jax.evaluation.rows import Rows
from slpo_jax.evaluation.statistics import powers_of_two

_COLOURS = ("#000000", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#7F7F7F")
_MARKERS = ("o", "s", "^", "D", "o", "v", "P", "X", "*")  # nine, so that a colour that comes again has another
_DASHES = ("-", "--", "-.", "--", "-", ":", (0, (5, 1)))
_LOOK: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "axes.titlesize": 11,
}


def style_at(place: int, label: str) -> dict[str, Any]:
    """How matplotlib draws the line of the place'th row."""
    looks = {"color": _COLOURS, "marker": _MARKERS, "ls": _DASHES}
    return {key: choices[place % len(choices)] for key, choices in looks.items()} | {"label": label}


@matplotlib.rc_context(_LOOK)
def pass_at_k_figure(evals: Evals, rows: Rows) -> Figure | None:
    """Unbiased Pass@k up to the samples of a seed, a line a row and a panel a set; bands are one standard error."""
    curves = {row: {name: pass_curve(rec) for name, rec in sets.items()} for row, sets in evals.items()}
    names = list(dict.fromkeys(name for sets in curves.values() for name, curve in sets.items() if curve))
    styles = {name: style_at(place, row.label) for place, (name, row) in enumerate(rows.items())}
    if not names:
        return None
    columns = min(len(names), 4)
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.7 * columns + 0.4, 3.3 * lines + 0.2), dpi=130, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for spare in grid[len(names) :]:
        spare.remove()
    for axis, name in zip(grid, names, strict=False):
        _draw(axis, {row: sets[name] for row, sets in curves.items() if sets.get(name)}, styles)
        axis.set(title=name, xlabel="k (rollouts)")
    grid[0].set_ylabel("Pass@k (%)")
    _legend_below(figure)
    return figure


def _draw(axis: Axes, curves: dict[str, dict[str, list[Any]]], styles: dict[str, dict[str, Any]]) -> None:
    """One set's curves, by row."""
    for row, curve in curves.items():
        mean, se = 100 * np.array(curve["value"]), 100 * np.array([error or 0.0 for error in curve["se"]])
        marks = [k - 1 for k in powers_of_two(len(mean))]  # a marker at each k would hide the lines
        axis.plot(curve["k"], mean, **styles[row], ms=5, lw=1.6, markevery=marks)
        low, high = np.clip([mean - se, mean + se], 0, 100)
        axis.fill_between(curve["k"], low, high, color=styles[row]["color"], alpha=0.12, lw=0)
    axis.set_xscale("log", base=2)
    ticks = powers_of_two(max(len(curve["k"]) for curve in curves.values()))
    axis.set_xticks(ticks, [str(k) for k in ticks])
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, 0), min(high, 100))  # it goes a little beyond the data, but not beyond what a share can be


def _legend_below(figure: Figure) -> None:
    """One legend for all panels, each row once."""
    found = [axis.get_legend_handles_labels() for axis in figure.axes]
    handles = {label: handle for axis in found for handle, label in zip(*axis, strict=True)}
    per_line = max(2, int(figure.get_figwidth() // 2.2))
    figure.set_figheight(figure.get_figheight() + 0.22 * -(-len(handles) // per_line))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(per_line, len(handles)), columnspacing=1
    )

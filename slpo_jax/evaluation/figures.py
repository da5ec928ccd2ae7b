"""The report's figures as PNG, drawn without pyplot so that no global backend or style is touched.

Colours are Okabe and Ito's, which stay apart under colour blindness; lines also differ in dash and marker.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from slpo_jax.evaluation.records import Evals
from slpo_jax.evaluation.rows import Rows
from slpo_jax.evaluation.statistics import mean_se, pass_at_k_unbiased, powers_of_two

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
_REWARDED = (("reward", "mean reward"), ("latent_steps", "mean latent length"))
"""Scalars of the stages that have rewards, and their titles: a panel each, with a line a stage."""
_SUPERVISED = (("loss", "loss"), ("accuracy", "accuracy"), ("valid_share", "share with a valid length"))
"""Scalars of the others, a panel a stage and scalar."""
_SHARES = ("reward", "accuracy", "valid_share")


def style_at(place: int, label: str) -> dict[str, Any]:
    """How matplotlib draws the line of the place'th row, in all figures of a report."""
    looks = {"color": _COLOURS, "marker": _MARKERS, "ls": _DASHES}
    return {key: choices[place % len(choices)] for key, choices in looks.items()} | {"label": label}


def draw_figures(evals: Evals, rows: Rows, metrics: Sequence[Mapping[str, Any]], folder: str | Path) -> list[str]:
    """Draws every figure there is data for, and removes an older one there is none for.

    Args:
        evals: row -> set -> records.
        rows: what the rows say of themselves.
        metrics: rows {stage, step, scalars...} of metrics.jsonl in order of step.
        folder: where the PNGs go.

    Returns:
        Names of the files drawn: of pass_at_k.png and training.png.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with matplotlib.rc_context(_LOOK):
        for name, figure in (
            ("pass_at_k.png", pass_at_k_figure(evals, rows)),
            ("training.png", training_figure(metrics, rows)),
        ):
            if figure is None:
                (folder / name).unlink(missing_ok=True)
                continue
            FigureCanvasAgg(figure).print_png(folder / name)
            drawn.append(name)
    return drawn


def pass_at_k_figure(evals: Evals, rows: Rows) -> Figure | None:
    """Unbiased Pass@k up to the samples of a seed, a line a row and a panel a set; bands are one standard error."""
    evals = {row: {s: rec for s, rec in sets.items() if rec.sample_correct.size} for row, sets in evals.items()}
    names = list(dict.fromkeys(name for sets in evals.values() for name in sets))
    styles = {name: style_at(place, row.label) for place, (name, row) in enumerate(rows.items())}
    if not names:
        return None
    figure, axes = open_panels(len(names))
    for axis, name in zip(axes, names, strict=True):
        most = 1
        for row, records in ((row, sets[name]) for row, sets in evals.items() if name in sets):
            seeds, _, per_seed = records.sample_correct.shape
            top, right = per_seed if per_seed > 1 else seeds, records.sample_correct.sum(axis=(0, 2))
            ks, most = np.arange(1, top + 1), max(most, top)
            curves = np.stack([pass_at_k_unbiased(right, seeds * per_seed, int(k)) for k in ks])
            mean = 100 * curves.mean(axis=1)
            se = np.array([100 * (mean_se(curve) or 0.0) for curve in curves])
            marks = [k - 1 for k in powers_of_two(top)]  # a marker at each k would hide the lines
            axis.plot(ks, mean, **styles[row], ms=5, lw=1.6, markevery=marks)
            low, high = np.clip([mean - se, mean + se], 0, 100)
            axis.fill_between(ks, low, high, color=styles[row]["color"], alpha=0.12, lw=0)
        axis.set_xscale("log", base=2)
        ticks = powers_of_two(most)
        axis.set_xticks(ticks, [str(k) for k in ticks])
        within(axis, 100)
        axis.set(title=name, xlabel="k (rollouts)")
    axes[0].set_ylabel("Pass@k (%)")
    return legend_below(figure, axes)


def training_figure(metrics: Sequence[Mapping[str, Any]], rows: Rows) -> Figure | None:
    """Rewards and latent lengths of all stages that have them, losses of the others: logged values, a running mean."""
    # A stage stands and looks like the first row of its checkpoint; one without a row, like a further row.
    place_of = {row.stage: place for place, row in reversed(list(enumerate(rows.values())))}
    found = dict.fromkeys(str(row.get("stage")) for row in metrics)
    stages = sorted(found, key=lambda stage: place_of.get(stage, len(rows)))
    looks = {stage: style_at(place_of.get(stage, len(rows) + i), _words(stage)) for i, stage in enumerate(stages)}

    def points(stage: str, scalar: str) -> np.ndarray:
        found = [(row["step"], row[scalar]) for row in metrics if row.get("stage") == stage and _finite(row, scalar)]
        return np.array(found, np.float64).reshape(-1, 2).T

    rewarded = [stage for stage in stages if points(stage, "reward").size]
    supervised = [stage for stage in stages if stage not in rewarded]
    wanted = [(f"{_words(stage)}: {words}", scalar, [stage]) for stage in supervised for scalar, words in _SUPERVISED]
    alone = f"{_words(rewarded[0])}: " if len(rewarded) == 1 else ""
    wanted += [(f"{alone}{words}", scalar, rewarded) for scalar, words in _REWARDED]
    known = [
        (title, scalar, [stage for stage in which if points(stage, scalar).size]) for title, scalar, which in wanted
    ]
    known = [panel for panel in known if panel[2]]
    if not known:
        return None
    figure, axes = open_panels(len(known))
    for axis, (title, scalar, shown) in zip(axes, known, strict=True):
        for stage in shown:
            _training_line(axis, points(stage, scalar), looks[stage], named=scalar in dict(_REWARDED))
        if scalar in _SHARES:
            within(axis, 1)
        axis.set(title=title, xlabel="step")
    figure.suptitle("faint: logged values; bold: centred running mean", fontsize=9, color="#555555")
    return legend_below(figure, axes) if len(rewarded) > 1 else figure


def _training_line(axis: Axes, points: np.ndarray, style: dict[str, Any], named: bool) -> None:
    """Points (step, value) [2, n] and, where they are many, their running mean, which a legend may name."""
    steps, values = points
    window = 2 * max(2, len(values) // 40) + 1
    smooth = len(values) >= 2 * window  # whole windows only: a shorter one at the ends would wag
    label = style["label"] if named else None
    marker = "." if len(values) < 30 else None
    axis.plot(steps, values, color=style["color"], alpha=0.4, lw=1, marker=marker, label=None if smooth else label)
    if smooth:
        inner = steps[window // 2 : len(steps) - window // 2]
        mean = np.convolve(values, np.full(window, 1 / window), mode="valid")
        axis.plot(inner, mean, color=style["color"], lw=2, label=label)


def within(axis: Axes, most: float) -> None:
    """Cuts the axis of a share, whose range goes a little beyond the data, to what a share can be."""
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, 0), min(high, most))


def open_panels(count: int, columns: int = 4) -> tuple[Figure, list[Axes]]:
    """A figure of as many panels, each 3.7 inches wide.

    Args:
        columns: panels in a line, at most.
    """
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.7 * columns + 0.4, 3.3 * rows + 0.2), dpi=130, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for spare in grid[count:]:
        spare.remove()
    return figure, list(grid[:count])


def legend_below(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """One legend for all panels, each row once."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    per_line = max(2, int(figure.get_figwidth() // 2.2))
    figure.set_figheight(figure.get_figheight() + 0.22 * -(-len(handles) // per_line))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(per_line, len(handles)), columnspacing=1
    )
    return figure


def _words(stage: str) -> str:
    return stage.replace("_", " ")


def _finite(row: Mapping[str, Any], scalar: str) -> bool:
    return isinstance(row.get(scalar), (int, float)) and bool(np.isfinite(row[scalar]))

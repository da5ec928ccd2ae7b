"""The report's figures as PNG, drawn without pyplot so that no global backend or style is touched."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from slpo_jax.evaluation.drawing import (
    LOOK,
    Style,
    Styles,
    grouped,
    legend_below,
    open_panels,
    set_title,
    style_at,
    styles_of,
    within,
)
from slpo_jax.evaluation.records import EvalRecords, Evals
from slpo_jax.evaluation.rows import Rows
from slpo_jax.evaluation.statistics import difficulty, mean_se, pass_at_k_unbiased, pearson, powers_of_two

_REWARDED = (("reward", "mean reward"), ("latent_steps", "mean latent length"))
"""Scalars of the stages that have rewards, and their titles: a panel each, with a line a stage."""
_SUPERVISED = (("loss", "loss"), ("accuracy", "accuracy"), ("valid_share", "share with a valid length"))
"""Scalars of the others, a panel a stage and scalar."""
_SHARES = ("reward", "accuracy", "valid_share")


def draw_figures(evals: Evals, rows: Rows, metrics: Sequence[Mapping[str, Any]], folder: str | Path) -> list[str]:
    """Draws every figure there is data for, and removes an older one there is none for.

    Args:
        evals: row -> set -> records, of one run or pooled (`pool_runs`).
        rows: what the rows say of themselves.
        metrics: rows {stage, step, scalars...} of metrics.jsonl in order of step.
        folder: where the PNGs go.

    Returns:
        Names of the files drawn: of pass_at_k.png, training.png, stop_times.png, difficulty.png.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with matplotlib.rc_context(LOOK):
        for name, figure in (
            ("pass_at_k.png", pass_at_k_figure(evals, rows)),
            ("training.png", training_figure(metrics, rows)),
            ("stop_times.png", stop_times_figure(evals, rows)),
            ("difficulty.png", difficulty_figure(evals, rows)),
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
    names, styles = _set_names(evals), styles_of(rows)
    if not names:
        return None
    figure, axes = open_panels(len(names))
    for axis, name in zip(axes, names, strict=True):
        most = 1
        for row, records in _of_set(evals, name):
            seeds, _, per_seed = records.sample_correct.shape
            top, right = per_seed if per_seed > 1 else seeds, records.sample_correct.sum(axis=(0, 2))
            ks, most = np.arange(1, top + 1), max(most, top)
            curves = np.stack([pass_at_k_unbiased(right, seeds * per_seed, int(k)) for k in ks])
            mean = 100 * curves.mean(axis=1)
            se = np.array([100 * _problem_se(curve, records.index) for curve in curves])
            marks = [k - 1 for k in powers_of_two(top)]  # a marker at each k would hide the lines
            axis.plot(ks, mean, **styles[row].line, ms=5, lw=1.6, markevery=marks)
            low, high = np.clip([mean - se, mean + se], 0, 100)
            axis.fill_between(ks, low, high, color=styles[row].colour, alpha=0.12, lw=0)
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


def _training_line(axis: Axes, points: np.ndarray, style: Style, named: bool) -> None:
    """Points (step, value) [2, n] and, where they are many, their running mean, which a legend may name."""
    steps, values = points
    window = 2 * max(2, len(values) // 40) + 1
    smooth = len(values) >= 2 * window  # whole windows only: a shorter one at the ends would wag
    label = style.label if named else None
    marker = "." if len(values) < 30 else None
    axis.plot(steps, values, color=style.colour, alpha=0.4, lw=1, marker=marker, label=None if smooth else label)
    if smooth:
        inner = steps[window // 2 : len(steps) - window // 2]
        mean = np.convolve(values, np.full(window, 1 / window), mode="valid")
        axis.plot(inner, mean, color=style.colour, lw=2, label=label)


def stop_times_figure(evals: Evals, rows: Rows) -> Figure | None:
    """Histogram of the clean rollout's latent length, for the rows with a gate; a panel a set."""
    evals = {row: sets for row, sets in evals.items() if rows[row].gated}
    names, styles = _set_names(evals), styles_of(rows)
    if not names:
        return None
    figure, axes = open_panels(len(names))
    for axis, name in zip(axes, names, strict=True):
        found = list(_of_set(evals, name))
        low = min(int(records.latent_steps.min()) for _, records in found)
        lengths = np.arange(low, max(int(records.latent_steps.max()) for _, records in found) + 1)
        notes = []
        for offset, width, (row, records) in grouped(found, 0.8):
            share = np.array([100 * (records.latent_steps == length).mean() for length in lengths])
            axis.bar(lengths + offset, share, width, color=styles[row].colour, label=styles[row].label)
            notes.append((f"{styles[row].label}: mean {records.latent_steps.mean():.2f}", styles[row].colour))
        axis.set(xlabel="latents used", xlim=(lengths[0] - 0.7, lengths[-1] + 0.7))
        set_title(axis, name, notes)
        within(axis, 100)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("problems (%)")
    return legend_below(figure, axes)


def difficulty_figure(evals: Evals, rows: Rows) -> Figure | None:
    """Mean latent length by number of steps and by difficulty bin (paper, figure of the difficulty section).

    Bars are bin means with standard errors, the dashed line is the least-squares fit over problems, r Pearson's over
    problems. First a panel a set by written steps, then by difficulty in fifths, where they are known; rows with a
    gate only.
    """
    evals = {row: sets for row, sets in evals.items() if rows[row].gated}
    views = (("number of written steps", _steps), ("difficulty (share of samples that fail)", difficulty))
    panels = []
    for label, view in views:
        for name in _set_names(evals):
            found = [(row, records, view(records)) for row, records in _of_set(evals, name)]
            known = [(row, records, x) for row, records, x in found if x is not None]
            if known:
                panels.append((label, name, known, np.arange(0, 1, 0.2) + 0.1 if view is difficulty else None))
    if not panels:
        return None
    in_first = sum(label == panels[0][0] for label, *_ in panels)
    columns = (
        in_first if len(panels) in (in_first, 2 * in_first) else 4
    )  # a line of panels a view, where that comes out
    figure, axes = open_panels(len(panels), columns=columns, height=3.4)
    for axis, (label, name, known, centres) in zip(axes, panels, strict=True):
        notes = _difficulty_panel(axis, known, centres, styles_of(rows))
        set_title(axis, name, notes)
        axis.set_xlabel(label)
    for axis in axes[::columns]:
        axis.set_ylabel("mean latents used")
    return legend_below(figure, axes)


def _difficulty_panel(
    axis: Axes, rows: list[tuple[str, EvalRecords, np.ndarray]], centres: np.ndarray | None, styles: Styles
) -> list[tuple[str, str]]:
    """Bars at the bins' centres (None: each whole number is a bin) for rows of (row, records, x [N]); notes on them."""
    fifths = centres is not None
    if centres is None:
        centres = np.unique(np.concatenate([x[np.isfinite(x)] for _, _, x in rows]))
    notes = []
    for offset, width, (row, records, x) in grouped(rows, 0.16 if fifths else 0.8):
        bins = np.minimum(np.floor(x * 5 + 1e-9), 4) / 5 + 0.1 if fifths else x
        lengths, index = records.latent_steps, records.index
        groups = [np.isclose(bins, centre) for centre in centres]
        at = [i for i, group in enumerate(groups) if group.any()]
        means = np.array([lengths[groups[i]].mean() for i in at])
        errors = np.array([_problem_se(lengths[groups[i]], index[groups[i]]) for i in at])
        colour, label = styles[row].colour, styles[row].label
        axis.bar(centres[at] + offset, means, width, color=colour, alpha=0.4, label=label)
        axis.errorbar(centres[at] + offset, means, errors, fmt="o", ms=3, color=colour, capsize=2.5, lw=1.2)
        r, p, _ = pearson(x, lengths)
        text = f"{label}: no correlation defined"
        if r is not None and p is not None:
            keep = np.isfinite(x)
            ends = np.array([x[keep].min(), x[keep].max()])
            axis.plot(ends, np.polyval(np.polyfit(x[keep], lengths[keep], 1), ends), color=colour, ls="--", lw=1.5)
            text = f"{label}: r = {r:.2f}"
            if np.unique(index).size == index.size:  # with several runs, pairs of one problem are not independent
                text += f", p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}"
        notes.append((text, colour))
    if fifths:
        axis.set(xticks=np.linspace(0, 1, 6), xlim=(-0.02, 1.02))
    else:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylim(bottom=0)
    return notes


def _problem_se(values: np.ndarray, index: np.ndarray) -> float:
    """Standard error over problems of values [n] of problems index [n], a problem's runs averaged; 0 for one."""
    _, place = np.unique(index, return_inverse=True)
    return mean_se(np.bincount(place, values) / np.bincount(place)) or 0.0


def _steps(records: EvalRecords) -> np.ndarray | None:
    return records.problem_steps if np.isfinite(records.problem_steps).any() else None


def _set_names(evals: Evals) -> list[str]:
    return list(dict.fromkeys(name for sets in evals.values() for name in sets))


def _of_set(evals: Evals, name: str) -> Iterator[tuple[str, EvalRecords]]:
    return ((row, sets[name]) for row, sets in evals.items() if name in sets)


def _words(stage: str) -> str:
    return stage.replace("_", " ")


def _finite(row: Mapping[str, Any], scalar: str) -> bool:
    return isinstance(row.get(scalar), (int, float)) and bool(np.isfinite(row[scalar]))

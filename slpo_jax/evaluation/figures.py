"""The report's figures as PNG, drawn without pyplot so that no global backend or style is touched.

Colours are Okabe and Ito's, which stay apart under colour blindness; lines also differ in dash and marker.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from slpo_jax.evaluation.records import ROW_LABELS, EvalRecords, Evals, is_gated
from slpo_jax.evaluation.statistics import difficulty, mean_se, pass_at_k_unbiased, pearson

MAX_K = 16
_K_TICKS = (1, 2, 4, 8, 16)
_STYLES = {
    "imitate": ("#000000", "o", "-"),
    "imitate_fixed_tmax": ("#56B4E9", "s", "--"),
    "imitate_control": ("#E69F00", "^", "-."),
    "cold_start": ("#009E73", "D", "--"),
    "slpo": ("#D55E00", "o", "-"),
}
_OTHERS = (("#CC79A7", "v", ":"), ("#0072B2", "P", ":"), ("#7F7F7F", "X", ":"))
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
_TRAINING = (
    ("imitate", "loss", "imitation: loss"),
    ("imitate", "accuracy", "imitation: accuracy"),
    ("imitate_control", "loss", "imitation control: loss"),
    ("cold_start", "loss", "cold start: gate loss"),
    ("cold_start", "valid_share", "cold start: share with a valid length"),
    ("slpo", "reward", "SLPO: mean reward"),
    ("slpo", "latent_steps", "SLPO: mean latent length"),
)


def draw_figures(evals: Evals, metrics: Sequence[Mapping[str, Any]], folder: str | Path) -> list[str]:
    """Draws every figure there is data for, and removes an older one there is none for.

    Args:
        evals: row -> set -> records, of one run or pooled (`pool_runs`).
        metrics: rows {stage, step, scalars...} of metrics.jsonl in order of step.
        folder: where the PNGs go.

    Returns:
        Names of the files drawn: of pass_at_k.png, training.png, stop_times.png, difficulty.png.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with matplotlib.rc_context(_LOOK):
        for name, figure in (
            ("pass_at_k.png", pass_at_k_figure(evals)),
            ("training.png", training_figure(metrics)),
            ("stop_times.png", stop_times_figure(evals)),
            ("difficulty.png", difficulty_figure(evals)),
        ):
            if figure is None:
                (folder / name).unlink(missing_ok=True)
                continue
            FigureCanvasAgg(figure).print_png(folder / name)
            drawn.append(name)
    return drawn


def pass_at_k_figure(evals: Evals) -> Figure | None:
    """Unbiased Pass@k, k = 1..16, a line a row and a panel a set; bands are one standard error over problems."""
    evals = {row: {s: rec for s, rec in sets.items() if rec.sample_correct.size} for row, sets in evals.items()}
    names = _set_names(evals)
    if not names:
        return None
    figure, axes = _panels(len(names))
    for axis, name in zip(axes, names, strict=True):
        for row, records in _of_set(evals, name):
            seeds, _, per_seed = records.sample_correct.shape
            n, right = seeds * per_seed, records.sample_correct.sum(axis=(0, 2))
            ks = np.arange(1, min(MAX_K, n) + 1)
            curves = np.stack([pass_at_k_unbiased(right, n, int(k)) for k in ks])
            mean, se = (
                100 * curves.mean(axis=1),
                np.array([100 * _problem_se(curve, records.index) for curve in curves]),
            )
            colour, marker, dash = _style(row)
            marks = [i for i, k in enumerate(ks) if k in _K_TICKS]  # a marker at each k would hide the lines
            look: dict[str, Any] = {
                "color": colour,
                "marker": marker,
                "ls": dash,
                "ms": 5,
                "lw": 1.6,
                "markevery": marks,
            }
            axis.plot(ks, mean, label=_label(row), **look)
            axis.fill_between(ks, mean - se, mean + se, color=colour, alpha=0.12, lw=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(_K_TICKS, [str(k) for k in _K_TICKS])
        axis.set(title=name, xlabel="k (rollouts)")
    axes[0].set_ylabel("Pass@k (%)")
    return _legend_below(figure, axes)


def training_figure(metrics: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Losses, reward and latent length over the steps of each stage: every logged value, and a running mean."""
    series = []
    for stage, scalar, title in _TRAINING:
        points = [(row["step"], row[scalar]) for row in metrics if row.get("stage") == stage and _finite(row, scalar)]
        if points:
            series.append((stage, title, np.array(points, np.float64).T))
    if not series:
        return None
    figure, axes = _panels(len(series), columns=3)
    for axis, (stage, title, (steps, values)) in zip(axes, series, strict=True):
        colour = _style(stage)[0]
        axis.plot(steps, values, color=colour, alpha=0.4, lw=1, marker="." if len(values) < 30 else None)
        window = 2 * max(2, len(values) // 40) + 1
        if len(values) >= 2 * window:  # whole windows only: a shorter one at the ends would wag
            inner = steps[window // 2 : len(steps) - window // 2]
            axis.plot(inner, np.convolve(values, np.full(window, 1 / window), mode="valid"), color=colour, lw=2)
        axis.set(title=title, xlabel="step")
    figure.supxlabel("faint: logged values; bold: centred running mean", fontsize=9, color="#555555")
    return figure


def stop_times_figure(evals: Evals) -> Figure | None:
    """Histogram of the clean rollout's latent length, for the rows with a gate; a panel a set."""
    evals = {row: sets for row, sets in evals.items() if is_gated(row)}
    names = _set_names(evals)
    if not names:
        return None
    figure, axes = _panels(len(names))
    for axis, name in zip(axes, names, strict=True):
        rows = list(_of_set(evals, name))
        low = min(int(records.latent_steps.min()) for _, records in rows)
        lengths = np.arange(low, max(int(records.latent_steps.max()) for _, records in rows) + 1)
        top = 0.0
        for place, (offset, width, (row, records)) in enumerate(_grouped(rows, 0.8)):
            share = np.array([100 * (records.latent_steps == length).mean() for length in lengths])
            colour = _style(row)[0]
            axis.bar(lengths + offset, share, width, color=colour, label=_label(row))
            _note(axis, place, f"{_label(row)}: mean {records.latent_steps.mean():.2f}", colour)
            top = max(top, float(share.max()))
        axis.set(title=name, xlabel="latents used", xlim=(lengths[0] - 0.7, lengths[-1] + 0.7))
        axis.set_ylim(0, top * (1.1 + 0.14 * len(rows)))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("problems (%)")
    return _legend_below(figure, axes)


def difficulty_figure(evals: Evals) -> Figure | None:
    """Mean latent length by number of steps and by difficulty bin (paper, figure of the difficulty section).

    Bars are bin means with standard errors, the dashed line is the least-squares fit over problems, r Pearson's over
    problems. Top: annotated steps; bottom: difficulty in fifths; a column a set, rows with a gate only.
    """
    evals = {row: sets for row, sets in evals.items() if is_gated(row)}
    views = [("number of annotated steps", _steps), ("difficulty (share of samples that fail)", difficulty)]
    names = _set_names(evals)
    views = [v for v in views if any(v[1](rec) is not None for sets in evals.values() for rec in sets.values())]
    if not names or not views:
        return None
    figure, axes = _panels(len(names) * len(views), columns=len(names), height=3.4)
    for axis, (label, view), name in zip(
        axes, [v for v in views for _ in names], list(names) * len(views), strict=True
    ):
        rows = [(row, rec, view(rec)) for row, rec in _of_set(evals, name)]
        known = [(row, rec, x) for row, rec, x in rows if x is not None]
        if known:
            _difficulty_panel(axis, known, np.arange(0, 1, 0.2) + 0.1 if view is difficulty else None)
        else:
            axis.text(0.5, 0.5, "not known for this set", ha="center", va="center", transform=axis.transAxes)
            axis.set(xticks=[], yticks=[])
        axis.set(title=name, xlabel=label)
    for axis in axes[:: len(names)]:
        axis.set_ylabel("mean latents used")
    return _legend_below(figure, axes)


def _difficulty_panel(axis: Axes, rows: list[tuple[str, EvalRecords, np.ndarray]], centres: np.ndarray | None) -> None:
    """Bars at the bins' centres (None: each whole number is a bin) for rows of (row, records, x [N])."""
    fifths = centres is not None
    if centres is None:
        centres = np.unique(np.concatenate([x[np.isfinite(x)] for _, _, x in rows]))
    top = 0.0
    for place, (offset, width, (row, records, x)) in enumerate(_grouped(rows, 0.16 if fifths else 0.8)):
        bins = np.minimum(np.floor(x * 5 + 1e-9), 4) / 5 + 0.1 if fifths else x
        lengths, index = records.latent_steps, records.index
        groups = [np.isclose(bins, centre) for centre in centres]
        at = [i for i, group in enumerate(groups) if group.any()]
        means = np.array([lengths[groups[i]].mean() for i in at])
        errors = np.array([_problem_se(lengths[groups[i]], index[groups[i]]) for i in at])
        colour = _style(row)[0]
        axis.bar(centres[at] + offset, means, width, color=colour, alpha=0.4, label=_label(row))
        axis.errorbar(centres[at] + offset, means, errors, fmt="o", ms=3, color=colour, capsize=2.5, lw=1.2)
        r, p, _ = pearson(x, lengths)
        text = f"{_label(row)}: no correlation defined"
        if r is not None and p is not None:
            keep = np.isfinite(x)
            ends = np.array([x[keep].min(), x[keep].max()])
            axis.plot(ends, np.polyval(np.polyfit(x[keep], lengths[keep], 1), ends), color=colour, ls="--", lw=1.5)
            text = f"{_label(row)}: r = {r:.2f}"
            if np.unique(index).size == index.size:  # with several runs, pairs of one problem are not independent
                text += f", p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}"
        _note(axis, place, text, colour)
        top = max(top, float((means + errors).max()))
    axis.set_ylim(0, top * (1.1 + 0.14 * len(rows)))
    if fifths:
        axis.set(xticks=np.linspace(0, 1, 6), xlim=(-0.02, 1.02))
    else:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _problem_se(values: np.ndarray, index: np.ndarray) -> float:
    """Standard error over problems of values [n] of problems index [n], a problem's runs averaged; 0 for one."""
    _, place = np.unique(index, return_inverse=True)
    return mean_se(np.bincount(place, values) / np.bincount(place)) or 0.0


def _note(axis: Axes, place: int, text: str, colour: str) -> None:
    """A line of text at the top left, above the data, one below the other."""
    axis.text(0.02, 0.97 - 0.09 * place, text, color=colour, transform=axis.transAxes, va="top", fontsize=9)


def _steps(records: EvalRecords) -> np.ndarray | None:
    return records.problem_steps if np.isfinite(records.problem_steps).any() else None


def _grouped(rows: Sequence[Any], total: float) -> Iterator[tuple[float, float, Any]]:
    """Offset and width of each row's bars, so that they stand side by side within `total`."""
    width = total / len(rows)
    for place, row in enumerate(rows):
        yield (place - (len(rows) - 1) / 2) * width, width, row


def _set_names(evals: Evals) -> list[str]:
    return list(dict.fromkeys(name for sets in evals.values() for name in sets))


def _of_set(evals: Evals, name: str) -> Iterator[tuple[str, EvalRecords]]:
    return ((row, sets[name]) for row, sets in evals.items() if name in sets)


def _style(row: str) -> tuple[str, str, str]:
    return _STYLES.get(row) or _OTHERS[sum(row.encode()) % len(_OTHERS)]


def _label(row: str) -> str:
    return ROW_LABELS.get(row, row)


def _finite(row: Mapping[str, Any], scalar: str) -> bool:
    return isinstance(row.get(scalar), (int, float)) and bool(np.isfinite(row[scalar]))


def _panels(count: int, columns: int = 4, height: float = 3.3) -> tuple[Figure, list[Axes]]:
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.7 * columns + 0.4, height * rows + 0.2), dpi=130, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for spare in grid[count:]:
        spare.remove()
    return figure, list(grid[:count])


def _legend_below(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """One legend for all panels, each row once."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    per_line = max(2, int(figure.get_figwidth() // 2.2))
    figure.set_figheight(figure.get_figheight() + 0.22 * -(-len(handles) // per_line))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(per_line, len(handles)), columnspacing=1
    )
    return figure

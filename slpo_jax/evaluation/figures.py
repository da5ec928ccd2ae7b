"""Pass@k as a figure, drawn without pyplot so that no global backend or style is touched."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from slpo_jax.evaluation.curves import pass_curve
from slpo_jax.evaluation.records import EvalRecords
from slpo_jax.evaluation.statistics import powers_of_two

# Okabe and Ito's, which stay apart under colour blindness; lines also differ in marker.
_COLOURS = ("#000000", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#7F7F7F")
_MARKERS = ("o", "s", "^", "D", "o", "v", "P", "X", "*")  # nine, so that a colour that comes again has another


def pass_at_k_figure(evaluated: Mapping[str, EvalRecords]) -> Figure | None:
    """Draw unbiased Pass@k up to a seed's samples, a line each, bands of one standard error. None without samples.

    Args:
        evaluated: records by label.
    """
    curves = {label: curve for label, records in evaluated.items() if (curve := pass_curve(records))}
    if not curves:
        return None
    figure = Figure(figsize=(4.1, 3.7), dpi=130, layout="constrained")
    axis = figure.subplots()
    for place, (label, curve) in enumerate(curves.items()):
        mean, se = 100 * np.array(curve["value"]), 100 * np.array([error or 0.0 for error in curve["se"]])
        colour, marks = _COLOURS[place % len(_COLOURS)], [k - 1 for k in powers_of_two(len(mean))]
        axis.plot(curve["k"], mean, marker=_MARKERS[place % len(_MARKERS)], color=colour, label=label, markevery=marks)
        axis.fill_between(curve["k"], *np.clip([mean - se, mean + se], 0, 100), color=colour, alpha=0.12, lw=0)
    ticks = powers_of_two(max(len(curve["k"]) for curve in curves.values()))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(k) for k in ticks])
    axis.set(xlabel="k (rollouts)", ylabel="Pass@k (%)")
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, 0), min(high, 100))  # it goes a little beyond the data, but not beyond what a share can be
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure

"""How tables write a figure and a difference, each with how sure it is."""

from collections.abc import Mapping
from typing import Any

from slpo_jax.evaluation.statistics import COUNTS


def percent(figures: Mapping[str, Any], key: str) -> str:
    """Write a share and how sure it is: `61.7 ± 2.1`, or of none and all `0.0 [0.0, 3.7]`."""
    share = f"{100 * figures[key]:.1f}"
    interval = figures.get("intervals", {}).get(key)
    if interval:
        low, high = interval
        return f"{share} [{100 * low:.1f}, {100 * high:.1f}]"
    error = figures.get(f"{key}_se")
    return share if error is None else f"{share} ± {100 * error:.1f}"


def format_figure(figures: Mapping[str, Any], key: str) -> str:
    """Write a figure as tables have it, with how sure it is; a dash for none."""
    value = figures.get(key)
    if value is None:
        return "–"
    if key in COUNTS:
        digits = ".3g" if key == "milliseconds" else ".2f"
        error = figures.get(f"{key}_se")
        if error is None:
            return f"{value:{digits}}"
        return f"{value:{digits}} ± {error:{digits}}"
    # In parentheses stands the error over the noise's seeds.
    over_seeds = figures.get(f"{key}_seed_se")
    if over_seeds is None or key in figures.get("intervals", {}):
        return percent(figures, key)
    return f"{percent(figures, key)} ({100 * over_seeds:.1f})"


def format_difference(entry: Mapping[str, Any]) -> str:
    """Write a difference of shares in points with its interval, marked where that excludes 0."""
    mean = f"{100 * entry['difference']:+.1f}"
    interval = f"[{100 * entry['low']:+.1f}, {100 * entry['high']:+.1f}]"
    mark = ""
    if entry["excludes_zero"]:
        mark = "▲ " if entry["difference"] > 0 else "▼ "
    return f"{mark}{mean} {interval}"

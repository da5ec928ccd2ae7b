"""How tables write a figure and a difference, each with how sure it is."""

from collections.abc import Mapping
from typing import Any

from slpo_jax.evaluation.statistics import COUNTS

Figures = Mapping[str, Any]
"""Of a row on a set: figures and their errors, see `statistics.summarise`."""


def percent(figures: Figures, key: str) -> str:
    """Write a share and how sure it is: `61.7 ± 2.1`, or of none and all `0.0 [0.0, 3.7]`."""
    share = _points(figures[key])
    intervals = figures.get("intervals", {})
    if key in intervals:
        low, high = map(_points, intervals[key])
        return f"{share} [{low}, {high}]"
    error = figures.get(f"{key}_se")
    if error is None:
        return share
    return f"{share} ± {_points(error)}"


def _points(share: float, sign: str = "") -> str:
    points = 100 * share
    return f"{points:{sign}.1f}"


def format_figure(figures: Figures, key: str) -> str:
    """Write a figure as tables have it, with how sure it is; a dash for none."""
    value = figures.get(key)
    if value is None:
        return "–"
    if key in COUNTS:
        return _format_count(figures, key)
    # In parentheses stands the error over the noise's seeds.
    text = percent(figures, key)
    over_seeds = figures.get(f"{key}_seed_se")
    if over_seeds is None:
        return text
    if key in figures.get("intervals", {}):
        return text
    error = _points(over_seeds)
    return f"{text} ({error})"


def _format_count(figures: Figures, key: str) -> str:
    digits = ".2f"
    if key == "milliseconds":
        digits = ".3g"
    text = format(figures[key], digits)
    error = figures.get(f"{key}_se")
    if error is None:
        return text
    return f"{text} ± {error:{digits}}"


def format_difference(entry: Mapping[str, Any]) -> str:
    """Write a difference of shares in points with its interval, marked where that excludes 0."""
    mean = _points(entry["difference"], "+")
    low = _points(entry["low"], "+")
    high = _points(entry["high"], "+")
    mark = ""
    if entry["excludes_zero"]:
        mark = "▼ "
        if entry["difference"] > 0:
            mark = "▲ "
    return f"{mark}{mean} [{low}, {high}]"

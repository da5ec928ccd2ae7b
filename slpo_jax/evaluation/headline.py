"""The report's first lines: a small table of the rows, each beside its control."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from slpo_jax.evaluation.cells import (
    Figures,
    format_difference,
    format_figure,
    percent,
)
from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.evaluation.report_rows import BEST_FIXED, BEST_FIXED_LABEL
from slpo_jax.stages import ABOUT, CONTROL, IMITATE, section_of

_K = 8  # of the Pass@k that the table has, where there is one
_NONE = "–"  # the cell of what a row does not have
_CAPTION = (
    "Differences from the control are paired by problem, in points, with their 95 % interval; "
    "▲ and ▼ where it excludes 0."
)
_LEVEL_REWARDS = "in training no reward differed from the others of its problem, so none taught anything"
_LEARNED = 0.9
"""The share of right training texts from which imitation has learned them; half of it is expected in a test."""

Report = Mapping[str, Any]


def make_headline(report: Report) -> dict[str, Any]:
    """Put each row beside its control, on the mean of the sets or on the first one.

    Args:
        report: what `report.json` holds.

    Returns:
        title; columns, the table's header; rows, each {row, control, cells}, with the texts of all columns in cells;
        caption; and warnings, sentences on what leaves no room for a difference.
    """
    figures_of = _figures_of(report)
    place = AVERAGE
    if not report[AVERAGE]:
        place = next(iter(_sets(report)))
    metrics = ["acc", *_chosen_pass_at_k(figures_of)]

    # A row's label, its figures, its control's label, and the differences from that.
    rows = []
    caption = ""
    for name, figures in figures_of.items():
        differences = _differences(report, name, place)
        control = choose_control(report, name, differences)
        cells = [label_of(report, name)]
        for metric in metrics:
            cell = _NONE
            if figures.get(metric) is not None:
                cell = percent(figures, metric)
            cells.append(cell)
        cells.append(format_figure(figures, "sequential_steps"))
        control_label = _NONE
        if control:
            control_label = label_of(report, control)
            caption = _CAPTION
        cells.append(control_label)
        from_control = differences.get(control, {})
        for metric in metrics:
            cell = _NONE
            entry = from_control.get(metric)
            if entry:
                cell = format_difference(entry)
            cells.append(cell)
        row = {
            "row": name,
            "control": control,
            "cells": cells,
        }
        rows.append(row)

    titles = [_title(metric) for metric in metrics]
    minus = [f"{title} − control" for title in titles]
    columns = ["row", *titles, "steps", "control", *minus]
    return {
        "title": _headline_title(report, place, figures_of.values()),
        "columns": columns,
        "rows": rows,
        "caption": caption,
        "warnings": find_warnings(report, figures_of),
    }


def _sets(report: Report) -> list[str]:
    """List the names of all sets."""
    names: dict[str, None] = {}
    for sets in report["eval"].values():
        names |= dict.fromkeys(sets)
    return list(names)


def _figures_of(report: Report) -> dict[str, Figures]:
    """Return each row's figures: their mean over the sets, or else those on the first set."""
    if report[AVERAGE]:
        return dict(report[AVERAGE])
    first, *_ = _sets(report)
    figures: dict[str, Figures] = {}
    for name, sets in report["eval"].items():
        if first in sets:
            figures[name] = sets[first]
    return figures


def _headline_title(report: Report, place: str, figures: Iterable[Figures]) -> str:
    """Say which set the table is of, and how many problems and training runs."""
    counts = sorted({row["n"] for row in figures})
    fewest = counts[0]
    most = counts[-1]
    n = f"{fewest:,}"
    if len(counts) > 1:
        n += f" to {most:,}"
    where = place
    if place == AVERAGE:
        sets = _sets(report)
        where = f"mean of {len(sets)} sets"
    runs = report.get("runs", ())
    if len(runs) > 1:
        return f"{where} ({n} problems, {len(runs)} training runs)"
    return f"{where} ({n} problems)"


def _chosen_pass_at_k(figures_of: Mapping[str, Figures]) -> list[str]:
    """Choose the Pass@k of the table: 8, or else the largest k; none without samples."""
    ks = set()
    for figures in figures_of.values():
        for key in figures:
            match = re.fullmatch(r"pass@(\d+)", key)
            if match:
                k = int(match[1])
                ks.add(k)
    if not ks:
        return []
    chosen = _K if _K in ks else max(ks)
    return [f"pass@{chosen}"]


def _differences(
    report: Report,
    name: str,
    place: str,
) -> dict[Any, dict[str, Any]]:
    """Return a row's differences on one set: {other row: {metric: entry}}."""
    found: dict[Any, dict[str, Any]] = {}
    for entry in report["differences"]:
        if entry["a"] == name and entry["set"] == place:
            of_other = found.setdefault(entry["b"], {})
            of_other[entry["metric"]] = entry
    return found


def choose_control(
    report: Report, name: str, differences: Mapping[str, Figures]
) -> str | None:
    """Choose what a row is measured against: of the rows without rewards the one that is hardest to beat by Acc.

    Of equally hard ones that is SFT with as many steps more. Where no row without rewards is compared, the control is
    the row where training started; None where that isn't compared either.
    """
    compared = []
    unrewarded = []
    for other, entries in differences.items():
        if "acc" in entries:
            compared.append(other)
            if _has_no_reward(report, other):
                unrewarded.append(other)
    if unrewarded:

        def difficulty(other: str) -> tuple[float, bool]:
            difference = differences[other]["acc"]["difference"]
            return difference, other != CONTROL

        return min(unrewarded, key=difficulty)

    # No row without rewards: where training started.
    settings = report["rows"][name]["settings"]
    start = settings.get("start", {})
    stage = start.get("stage")
    return stage if stage in compared else None


def _has_no_reward(report: Report, name: str) -> bool:
    """Return whether a row was trained without a verifier."""
    if name == BEST_FIXED:
        return True
    settings = report["rows"][name]["settings"]
    stage = settings.get("stage")
    if not stage:
        return False
    section = section_of(stage)
    return not ABOUT[section].rewarded


def find_warnings(report: Report, figures_of: Mapping[str, Figures]) -> list[str]:
    """Say which rows can't be good: imitation that has memorised, cut answers alone, rewards that are all the same."""
    warnings = []
    logged = report.get("training", {})
    memorised = _find_memorised(report)
    if memorised:
        warnings.append(memorised)
    for name, figures in figures_of.items():
        reasons: list[str] = []
        samples_cut = figures.get("sample_cut", 1)  # there may be no samples
        if figures.get("cut") == 1 and samples_cut == 1:
            reasons.append("every answer was truncated")
        stage = report["rows"][name].get("stage")
        training = logged.get(stage, {})
        # An objective that learns from the references' likelihood needs no rewards.
        needs_rewards = "reference_log_likelihood" not in training
        if "mixed" in training and needs_rewards:
            _, shares = training["mixed"]
            if not any(shares):
                reasons.append(_LEVEL_REWARDS)
        if reasons:
            label = label_of(report, name)
            sentence = "; ".join(reasons)
            warnings.append(f"{label}: {sentence}.")
    return warnings


def _find_memorised(report: Report) -> str:
    """Say that imitation is right where it was trained, and on no set a third as often; nothing if that is not so.

    A run that is right half as often has learned something: rewards took one on the quick start from 48 % to 94 %.
    """
    sets = report["eval"].get(IMITATE, {})
    logged = report.get("training", {})
    training = logged.get(IMITATE, {})
    if not sets or "accuracy" not in training:
        return ""
    _, accuracies = training["accuracy"]
    learned = accuracies[-1]
    best = max(figures["acc"] for figures in sets.values())
    if learned < _LEARNED or best >= learned / 3:
        return ""
    label = label_of(report, IMITATE)
    in_training = f"{100 * learned:.0f} %"
    in_test = f"{100 * best:.0f} %"
    return (
        f"{label}: right on {in_training} of its demonstrations, but on {in_test} of the problems here, "
        "so it has probably memorised them; try more demonstrations, or another config.seed."
    )


def label_of(report: Report, name: str) -> str:
    """Return what tables call a row."""
    if name == BEST_FIXED:
        return BEST_FIXED_LABEL
    return report["rows"][name]["label"]


def _title(metric: str) -> str:
    if metric == "acc":
        return "Acc"
    return metric.replace("pass@", "Pass@")


def headline_text(headline: Mapping[str, Any]) -> str:
    """Write the first lines for a terminal: the title, the table in aligned columns, caption and warnings."""
    lines = [headline["columns"]]
    for row in headline["rows"]:
        lines.append(row["cells"])
    widths = []
    for column in zip(*lines, strict=True):
        lengths = [len(cell) for cell in column]
        widths.append(max(lengths))
    first_width, *figure_widths = widths

    # Names on the left, figures on the right.
    out = [headline["title"]]
    for name, *figures in lines:
        cells = [name.ljust(first_width)]
        for figure, width in zip(figures, figure_widths, strict=True):
            cells.append(figure.rjust(width))
        line = "  ".join(cells)
        out.append(line.rstrip())
    out.append(headline["caption"])
    out += headline["warnings"]
    return "\n".join(line for line in out if line)

"""The verdict of a report: a sentence a trained row, and what guessing gets right."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.evaluation.records import EvalRecords
from slpo_jax.evaluation.render import percent
from slpo_jax.evaluation.report_rows import BEST_FIXED
from slpo_jax.evaluation.statistics import most_k, pass_ks
from slpo_jax.rewards.texts import compared
from slpo_jax.stages import CONTROL, IMITATE, RL

_K = 8  # of the Pass@k that is told, where there is one
_CHOICE = re.compile(
    r"^\(?([A-Za-z])[.):]\s+(.+)$", re.MULTILINE
)  # as `data.choices` writes them, a line each
_EITHER = re.compile(
    r"\b(\w+) or (?:an? |the )?(\w+)\?\s*\Z"
)  # ProsQA: Is Tom a lempus or a scrompus?


def verdict(report: Mapping[str, Any]) -> list[str]:
    """Say how the rows that rewards trained differ from the best without rewards, and from where they started.

    With intervals, and honest where those hold zero; a start may be worse than what it was made from. Without such rows
    it is told of the last one; where nothing can be compared, its accuracy.

    Args:
        report: what `report.json` holds.
    """
    rows = report["rows"]
    entries = report["differences"]
    compared = list(dict.fromkeys(entry["a"] for entry in entries))
    trained = [
        name
        for name in rows
        if name in compared and rows[name]["settings"].get("stage") == RL
    ]
    names = trained or compared[:1]
    return [_compared(report, name) for name in names] or [_alone(report)]


def _compared(report: Mapping[str, Any], name: str) -> str:
    entries = [entry for entry in report["differences"] if entry["a"] == name]
    start = report["rows"][name]["settings"].get("start", {}).get("stage")
    sets = list(dict.fromkeys(entry["set"] for entry in entries))
    where = AVERAGE if AVERAGE in sets else sets[0]
    metrics_of: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry["set"] == where:
            metrics_of.setdefault(entry["b"], {})[entry["metric"]] = entry
    gaps = {row: _told(metrics) for row, metrics in metrics_of.items()}
    unrewarded = [row for row in gaps if _had_no_reward(report, row)]
    usual = start if start in gaps else next(iter(gaps))
    first = min(
        unrewarded,
        key=lambda row: (gaps[row]["Acc"]["difference"], row != CONTROL),
        default=usual,
    )
    place = f"mean of {len(sets) - 1} sets" if where == AVERAGE else where
    runs = len(report.get("runs", ()))
    problems = f"({gaps[first]['Acc']['n']:,} problems{f', {runs} training runs' if runs > 1 else ''})"
    gains = f"{_gains(gaps[first])} points; {_holds_zero(gaps[first])}"
    if start in gaps and start != first:
        gains += (
            f"; over {_label(report, start)}, where it began, {_gains(gaps[start])}"
        )
    sentence = f"{report['rows'][name]['label']} over {_label(report, first)}, {place} {problems}: {gains}"
    return f"{sentence}{_why(report, name, first, where)}."


def _told(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the differences of a row from another that a verdict tells."""
    ks = sorted(
        int(match[1]) for key in metrics if (match := re.fullmatch(r"pass@(\d+)", key))
    )
    return {
        f"Pass@{k}": metrics[f"pass@{k}"] for k in ([_K] if _K in ks else ks[-1:])
    } | {"Acc": metrics["acc"]}


def _gains(gaps: Mapping[str, Any]) -> str:
    return " and ".join(f"{metric} {_points(entry)}" for metric, entry in gaps.items())


def _had_no_reward(report: Mapping[str, Any], name: str) -> bool:
    """Return whether a row is of imitation alone: what rewards are worth is told against the best of these."""
    return (
        name == BEST_FIXED or report["rows"][name]["settings"].get("stage") == IMITATE
    )


def _why(report: Mapping[str, Any], name: str, other: str, where: str) -> str:
    """Say what leaves no room for a difference: answers that were all cut, rewards that were all the same."""
    cut = [_label(report, row) for row in (name, other) if _all_cut(report, row, where)]
    reasons = (
        f"; every answer{f' of {cut[0]}' if len(cut) == 1 else ''} was truncated"
        if cut
        else ""
    )
    training = report.get("training", {}).get(report["rows"][name].get("stage"), {})
    # What learns from the references' likelihood needs no rewards.
    if (
        training.get("mixed")
        and not any(training["mixed"][1])
        and "reference_log_likelihood" not in training
    ):
        reasons += "; in training no reward differed from the others of its problem, so none taught anything"
    return reasons


def _all_cut(report: Mapping[str, Any], name: str, where: str) -> bool:
    """Return whether no rollout of a row ended, with noise or without."""
    sets = report.get(AVERAGE if where == AVERAGE else "eval", {}).get(name, {})
    figures = sets if where == AVERAGE else sets.get(where, {})
    return figures.get("cut") == 1 and figures.get("sample_cut", 1) == 1


def _points(entry: Mapping[str, Any]) -> str:
    mean, low, high = (
        f"{100 * entry[key]:+.1f}" for key in ("difference", "low", "high")
    )
    return f"{mean} [{low}, {high}]"


def _holds_zero(gaps: Mapping[str, Mapping[str, Any]]) -> str:
    sure = [metric for metric, entry in gaps.items() if entry["excludes_zero"]]
    if len(gaps) == 1:
        return (
            "the interval excludes 0"
            if sure
            else "the interval holds 0, so no difference is shown"
        )
    if len(sure) == len(gaps):
        return "both intervals exclude 0"
    return (
        f"only that of {sure[0]} excludes 0"
        if sure
        else "both intervals hold 0, so no difference is shown"
    )


def _alone(report: Mapping[str, Any]) -> str:
    name = [*report["eval"]][-1]
    sets = report["eval"][name]
    average: Mapping[str, Any] | None = report[AVERAGE].get(name)
    figures = average or next(iter(sets.values()))
    place = f"mean of {len(sets)} sets" if average else next(iter(sets))
    label = report["rows"][name]["label"]
    acc = f"Acc {percent(figures, 'acc')} %" + ", every answer was truncated" * (
        figures.get("cut") == 1
    )
    return f"{label}, {place} ({figures['n']:,} problems): {acc}, and no row to compare with."


def _label(report: Mapping[str, Any], name: str) -> Any:
    return "best fixed length" if name == BEST_FIXED else report["rows"][name]["label"]


def candidates(question: str, reference: str) -> int:
    """Count the answers that a question offers, the reference among them; 0 where it offers none."""
    choices = _CHOICE.findall(question)
    target = compared(reference)
    if target in {compared(part) for choice in choices for part in choice}:
        return len(choices)
    either = _EITHER.search(question)
    words = target.decode().split()
    return (
        2
        if either and sum(word.lower() in words for word in either.groups()) == 1
        else 0
    )


def chance(records: EvalRecords, name: str) -> dict[str, Any]:
    """Compute the better of the two ways to guess.

    Args:
        records: of any row.
        name: of the set.
    Returns:
        acc, the share that one guess gets right; pass@k, that k guesses do, where there are samples, k as in a verdict;
        and both in a sentence.
    """
    total = len(records.references)
    ks = pass_ks(most_k(records))
    k = 8 if 8 in ks else ks[-1] if ks else 0
    common = Counter(map(compared, records.references)).most_common()
    shown = next(text for text in records.references if compared(text) == common[0][0])
    acc, of_k = (sum(count for _, count in common[:tries]) / total for tries in (1, k))
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    guess = f"the commonest answer, {shown},"
    more = f"one of the {k} commonest"
    offered = np.array(
        [
            candidates(*pair)
            for pair in zip(records.questions, records.references, strict=False)
        ]
    )
    if offered.size and offered.all() and (share := np.mean(1 / offered)) >= acc:
        acc = float(share)
        of_k = float(np.mean(1 - (1 - 1 / offered) ** k))
        guess = f"one of the {'/'.join(map(str, np.unique(offered)))} candidates"
        more = f"one of {k} such guesses"
    sentence = f"Chance level on {name}: {guess} is right on {100 * acc:.1f} %"
    if not k:
        return {"acc": acc, "text": f"{sentence}."}
    sentence += (
        f"; {more} is on {100 * of_k:.1f} %, which Pass@{k} is to be read against."
    )
    return {"acc": acc, f"pass@{k}": of_k, "text": sentence}

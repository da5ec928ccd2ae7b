"""The curves of a report: Pass@k, stop times, and what training logged."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slpo_jax.evaluation.records import EvalRecords, Evals
from slpo_jax.evaluation.statistics import mean_se, most_k, pass_at_k_unbiased

Curves = dict[str, dict[str, dict[str, Any]]]
"""row -> set -> lists by name."""


def pass_curve(records: EvalRecords) -> dict[str, list[Any]]:
    """Pass@k as `statistics.problem_values` has it, for every k up to `most_k`.

    Returns:
        k, value and se, of equal length: the standard error over problems, None of one problem; {} without samples.
    """
    seeds, _, per_seed = records.sample_correct.shape
    if not records.sample_correct.size:
        return {}
    right = records.sample_correct.sum(axis=(0, 2))
    ks = range(1, most_k(records) + 1)
    curves = [pass_at_k_unbiased(right, seeds * per_seed, k) for k in ks]
    return {"k": [*ks], "value": [float(c.mean()) for c in curves], "se": [mean_se(c) for c in curves]}


def pass_curves(runs: Sequence[Evals]) -> Curves:
    """`pass_curve` of each row and set; of several runs the mean, with its standard error over runs."""

    def over_runs(row: str, name: str) -> dict[str, Any]:
        found = [pass_curve(run[row][name]) for run in runs]
        if len(found) == 1 or not all(found):
            return found[0] if len(found) == 1 else {}
        shortest = min((curve["k"] for curve in found), key=len)
        values_RK = np.array([curve["value"][: len(shortest)] for curve in found])
        return {"k": shortest, "value": values_RK.mean(axis=0).tolist(), "se": [mean_se(v) for v in values_RK.T]}

    found = {row: {name: over_runs(row, name) for name in sets} for row, sets in runs[0].items()}
    return {row: {name: curve for name, curve in sets.items() if curve} for row, sets in found.items()}


def stop_times(runs: Sequence[Evals]) -> Curves:
    """How many rollouts had 0, 1, 2, .. latents: the greedy ones, and those with noise where there are any."""

    def counts(parts: list[np.ndarray]) -> list[int]:
        return np.bincount(np.concatenate([part.ravel() for part in parts])).tolist()

    def of(found: list[EvalRecords]) -> dict[str, Any]:
        sampled = [records.sample_latent_steps for records in found]
        noisy = {"noisy": counts(sampled)} if all(part.size for part in sampled) else {}
        return {"greedy": counts([records.latent_steps for records in found])} | noisy

    return {row: {name: of([run[row][name] for run in runs]) for name in sets} for row, sets in runs[0].items()}


def training_curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[list[float]]]]:
    """What was logged, as curves.

    Args:
        metrics: rows {stage, step, scalars..} in order of step, see `records.read_metrics`.

    Returns:
        {stage: {scalar: [steps, values]}} of finite values; with `elapsed`, the seconds of its steps so far, where
        those of a step were logged.
    """
    found: dict[str, dict[str, list[list[float]]]] = {}
    for row in metrics:
        stage = found.setdefault(str(row["stage"]), {})
        for scalar, value in row.items():
            if scalar not in ("stage", "step") and isinstance(value, (int, float)) and np.isfinite(value):
                steps, values = stage.setdefault(scalar, [[], []])
                steps.append(row["step"])
                values.append(value)
    for stage in found.values():
        if "seconds" in stage:
            steps, of_a_step = stage["seconds"]
            # The first line is of as many steps as the second: a stage need not begin at step 0.
            taken = np.diff(steps, prepend=2 * steps[0] - steps[min(1, len(steps) - 1)]) * of_a_step
            stage["elapsed"] = [steps, np.cumsum(taken).round(3).tolist()]
    return {stage: scalars for stage, scalars in found.items() if scalars}

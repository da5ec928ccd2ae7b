"""The curves of a report: Pass@k, drawn too, stop times, and what training logged, with its meaning."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slpo_jax.evaluation.records import EvalRecords, Evals
from slpo_jax.evaluation.statistics import mean_se, most_k, powers_of_two, solved_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's, which stay apart under colour blindness; lines also differ in marker.
_COLOURS = ("#000000", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#7F7F7F")
_MARKERS = ("o", "s", "^", "D", "o", "v", "P", "X", "*")  # nine, so that a colour that comes again has another

SHARED = {
    "loss": "The stage's or the objective's own loss.",
    "grad_norm": "Norm of the gradient before it is clipped.",
    "learning_rate": "The optimizer's.",
    "seconds": "Of a step by the clock, without compilation and validation.",
    "skipped_steps": "Steps so far whose loss or gradient was not finite: they change nothing.",
    "valid_accuracy": "Share of the validation split's problems that the greedy rollout gets right.",
    "accuracy": "Share of texts all of whose tokens are the likeliest ones; with `config.imitate.gate_weight` the gate "
    "has to stop where the steps end, too.",
    "valid_share": "Share of thoughts that are right at one candidate length at least.",
    "right_share": "Share of candidate lengths with a right answer.",
    "expected_length": "Mean number of latents under the gate's distribution.",
    "reward": "Mean reward of the rollouts.",
    "reward/NAME": "Of several rewards, each without its weight, over the rollouts that it judged.",
    "unjudged": "Share of rollouts that were not judged on the host: truncated ones, and those without a verdict.",
    "reward_failed": "Share of rollouts on which a verifier failed.",
    "verifier_seconds": "Of a step, that verifiers on the host took.",
    "verifier_share": "Their share of the step's seconds.",
    "solved": "Share of prompts with a rollout that counts as right: its first reward with a verdict is 1 or more.",
    "mixed": "Share of prompts whose rewards differ, which alone have a gradient.",
    "latent_steps": "Mean number of latents of the training rollouts.",
    "answer_tokens": "Mean number of tokens that the training rollouts write.",
    "cut": "Share of training rollouts without an end within the maximum of new tokens.",
    "tokens_per_second": "Latents and answer tokens that are rolled out in a second of training.",
    "groups_drawn": "Prompts that were rolled out for a step (`config.rl.dynamic_batches`).",
    "groups_kept": "Of those, prompts with right and wrong rollouts, which the step learned from.",
    "answer_log_likelihood": "Of the answers.",
    "stop_log_likelihood": "Of the stops, under the gate.",
    "answer_entropy": "Nats a token: minus the answers' log-likelihood by their tokens.",
    "latent_log_likelihood": "Of the thoughts: SLPO's under its surrogate.",
    "chosen_share": "LatentRM's share of right completions of the thoughts that it likes best.",
    "thought_share": "The same share of all thoughts of its problems.",
}
"""What all methods log while training, by name."""


def scalars() -> dict[str, str]:
    """Return the meaning of what training logs, by name: what all methods share, and what they say of their own."""
    from slpo_jax.training.objectives import OBJECTIVES  # with jax, for which a report without them need not wait
    from slpo_jax.training.recipes import RECIPES

    methods: tuple[Any, ...] = (*OBJECTIVES.values(), *RECIPES.values())
    return SHARED | {name: about for method in methods for name, about in method.metrics.items()}


Curves = dict[str, dict[str, dict[str, Any]]]
"""row -> set -> lists by name."""


def pass_curve(records: EvalRecords) -> dict[str, list[Any]]:
    """Return Pass@k as `statistics.problem_values` has it, for every k up to `most_k`.

    Returns:
        k, value and se, of equal length: the standard error over problems, None of one problem; {} without samples.
    """
    seeds, _, per_seed = records.sample_correct.shape
    if not records.sample_correct.size:
        return {}
    right = records.sample_correct.sum(axis=(0, 2))
    ks = range(1, most_k(records) + 1)
    curves = [solved_share(seeds * per_seed, right, k) for k in ks]
    return {"k": [*ks], "value": [float(c.mean()) for c in curves], "se": [mean_se(c) for c in curves]}


def pass_at_k_figure(evaluated: Mapping[str, EvalRecords]) -> "Figure | None":
    """Draw unbiased Pass@k up to a seed's samples, a line each, bands of one standard error. None without samples.

    It is drawn without pyplot, so that no global backend or style is touched.

    Args:
        evaluated: records by label.
    """
    from matplotlib.figure import Figure  # takes a second

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


def pass_curves(runs: Sequence[Evals]) -> Curves:
    """Make each row's and set's `pass_curve`; of several runs the mean, with its standard error over runs."""

    def over_runs(row: str, name: str) -> dict[str, Any]:
        curves = [pass_curve(run[row][name]) for run in runs]
        if len(curves) == 1 or not all(curves):
            return curves[0] if len(curves) == 1 else {}
        shortest = min((curve["k"] for curve in curves), key=len)
        values_RK = np.array([curve["value"][: len(shortest)] for curve in curves])
        return {"k": shortest, "value": values_RK.mean(axis=0).tolist(), "se": [mean_se(v) for v in values_RK.T]}

    curves = {row: {name: over_runs(row, name) for name in sets} for row, sets in runs[0].items()}
    return {row: {name: curve for name, curve in sets.items() if curve} for row, sets in curves.items()}


def stop_times(runs: Sequence[Evals]) -> Curves:
    """Count rollouts of 0, 1, 2, .. latents: the greedy ones, and those with noise where there are any."""

    def counts(parts: list[np.ndarray]) -> list[int]:
        return np.bincount(np.concatenate([part.ravel() for part in parts])).tolist()

    def of(evaluations: list[EvalRecords]) -> dict[str, Any]:
        sampled = [records.sample_latent_steps for records in evaluations]
        noisy = {"noisy": counts(sampled)} if all(part.size for part in sampled) else {}
        return {"greedy": counts([records.latent_steps for records in evaluations])} | noisy

    return {row: {name: of([run[row][name] for run in runs]) for name in sets} for row, sets in runs[0].items()}


def training_curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[list[float]]]]:
    """Make curves of what was logged.

    Args:
        metrics: rows {stage, step, scalars..} in order of step, see `read_metrics`.

    Returns:
        {stage: {scalar: [steps, values]}} of finite values; with `elapsed`, the seconds of its steps so far, where
        those of a step were logged.
    """
    series: dict[str, dict[str, list[list[float]]]] = {}
    for row in metrics:
        stage = series.setdefault(str(row["stage"]), {})
        for scalar, value in row.items():
            if scalar not in ("stage", "step") and isinstance(value, (int, float)) and np.isfinite(value):
                steps, values = stage.setdefault(scalar, [[], []])
                steps.append(row["step"])
                values.append(value)
    for stage in series.values():
        if "seconds" in stage:
            steps, of_a_step = stage["seconds"]
            # The first line is of as many steps as the second: a stage need not begin at step 0.
            steps_taken = np.diff(steps, prepend=2 * steps[0] - steps[min(1, len(steps) - 1)]) * of_a_step
            stage["elapsed"] = [steps, np.cumsum(steps_taken).round(3).tolist()]
    return {stage: scalars for stage, scalars in series.items() if scalars}


def read_metrics(path: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read `metrics.jsonl`, in order of step, and notes on what is wrong with it.

    Several rows of one (stage, step) are one, in which the last value of a scalar counts. A line torn by an
    interruption is left out and noted.
    """
    path = Path(path)
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    torn = 0
    for line in path.read_text("utf-8", "replace").split("\n") if path.exists() else ():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.setdefault((str(row["stage"]), int(row["step"])), {}).update(row)
        except (ValueError, TypeError, KeyError):
            torn += 1
    fate = "left out of the figures" if rows else "and no other, so the report has nothing of the training"
    notes = [f"{path.name}: {torn} unreadable line(s) {fate}."] if torn else []
    return sorted(rows.values(), key=lambda row: row["step"]), notes

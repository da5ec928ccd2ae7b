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
_COLOURS = (
    "#000000",
    "#56B4E9",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#0072B2",
    "#7F7F7F",
)
# Nine, so that a colour that comes again has another.
_MARKERS = ("o", "s", "^", "D", "o", "v", "P", "X", "*")

SHARED = {
    "loss": "The stage's or the objective's own loss.",
    "grad_norm": "Norm of the gradient before it is clipped.",
    "learning_rate": "The optimizer's rate.",
    "seconds": "Wall-clock seconds of a step, without compilation and validation.",
    "skipped_steps": "Steps so far whose loss or gradient was not finite; they change nothing.",
    "valid_accuracy": "Share of the validation split's problems that the greedy rollout gets right.",
    "accuracy": "Share of texts whose tokens are all the likeliest ones; with `config.imitate.gate_weight` the gate "
    "also has to stop where the steps end.",
    "valid_share": "Share of thoughts that are right at one or more candidate lengths.",
    "right_share": "Share of candidate lengths with a right answer.",
    "expected_length": "Mean number of latents under the gate's distribution.",
    "reward": "Mean reward of the rollouts.",
    "reward/NAME": "Mean of one of several rewards, without its weight, over the rollouts that it judged.",
    "unjudged": "Share of rollouts that were not judged on the host: truncated ones, and those without a verdict.",
    "reward_failed": "Share of rollouts on which a verifier failed.",
    "verifier_seconds": "Seconds of a step that verifiers on the host took.",
    "verifier_share": "Their share of the step's seconds.",
    "solved": "Share of prompts with a rollout that counts as right: its first reward with a verdict is 1 or more.",
    "mixed": "Share of prompts whose rewards differ: only these have a gradient.",
    "latent_steps": "Mean number of latents of the training rollouts.",
    "answer_tokens": "Mean number of tokens that the training rollouts write.",
    "cut": "Share of training rollouts without an end within the maximum number of new tokens.",
    "tokens_per_second": "Latents and answer tokens rolled out per second of training.",
    "groups_drawn": "Prompts that were rolled out for a step (`config.rl.dynamic_batches`).",
    "groups_kept": "Those among them whose rewards differ, which the step learned from.",
    "answer_log_likelihood": "Log-likelihood of the answers.",
    "stop_log_likelihood": "Log-likelihood of the stops, under the gate.",
    "answer_entropy": "Minus the answers' log-likelihood per token, in nats.",
    "latent_log_likelihood": "Log-likelihood of the thoughts; SLPO's is under its surrogate.",
    "chosen_share": "Share of right completions of the thoughts that LatentRM scores highest.",
    "thought_share": "The same share of all thoughts of these problems.",
}
"""What all methods log while training, by name."""


def scalars() -> dict[str, str]:
    """Return the meaning of what training logs, by name: what all methods share, and what they say of their own."""
    # With jax, for which a report without them need not wait.
    from slpo_jax.training.objectives import OBJECTIVES
    from slpo_jax.training.recipes import RECIPES

    methods: tuple[Any, ...] = (*OBJECTIVES.values(), *RECIPES.values())
    meanings = dict(SHARED)
    for method in methods:
        meanings |= method.metrics
    return meanings


Curves = dict[str, dict[str, dict[str, Any]]]
"""row -> set -> lists by name."""
TrainingCurves = dict[str, dict[str, list[list[float]]]]
"""stage -> scalar -> [steps, values]."""


def pass_curve(records: EvalRecords) -> dict[str, list[Any]]:
    """Return Pass@k as `statistics.problem_values` has it, for every k up to `most_k`.

    Returns:
        k, value and se, of equal length: the standard error over problems, None of one problem; {} without samples.
    """
    correct_SNM = records.sample_correct
    seeds, _, per_seed = correct_SNM.shape
    if not correct_SNM.size:
        return {}
    n = seeds * per_seed
    n_right = correct_SNM.sum(axis=(0, 2))
    most = most_k(records)
    ks = list(range(1, most + 1))
    values = []
    errors = []
    for k in ks:
        solved = solved_share(n, n_right, k)
        values.append(float(solved.mean()))
        errors.append(mean_se(solved))
    return {"k": ks, "value": values, "se": errors}


def pass_at_k_figure(evaluated: Mapping[str, EvalRecords]) -> "Figure | None":
    """Draw unbiased Pass@k up to a seed's samples, a line each, bands of one standard error. None without samples.

    It is drawn without pyplot, so that no global backend or style is touched.

    Args:
        evaluated: records by label.
    """
    from matplotlib.figure import Figure  # takes a second

    curves = {}
    for label, records in evaluated.items():
        curve = pass_curve(records)
        if curve:
            curves[label] = curve
    if not curves:
        return None

    # A line for each row, with a band of one standard error.
    figure = Figure(figsize=(4.1, 3.7), dpi=130, layout="constrained")
    axis = figure.subplots()
    for place, (label, curve) in enumerate(curves.items()):
        mean = 100 * np.array(curve["value"])
        errors = [error or 0.0 for error in curve["se"]]  # of one problem there is none
        se = 100 * np.array(errors)
        colour = _COLOURS[place % len(_COLOURS)]
        marker = _MARKERS[place % len(_MARKERS)]
        marked = [k - 1 for k in powers_of_two(len(mean))]
        axis.plot(
            curve["k"],
            mean,
            marker=marker,
            color=colour,
            label=label,
            markevery=marked,
        )
        ends = [mean - se, mean + se]
        low, high = np.clip(ends, 0, 100)
        axis.fill_between(
            curve["k"],
            low,
            high,
            color=colour,
            alpha=0.12,
            lw=0,
        )

    # k doubles from tick to tick.
    most = max(len(curve["k"]) for curve in curves.values())
    ticks = powers_of_two(most)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(k) for k in ticks])
    axis.set(xlabel="k (rollouts)", ylabel="Pass@k (%)")
    # It goes a little beyond the data, but not beyond what a share can be.
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, 0), min(high, 100))
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def pass_curves(runs: Sequence[Evals]) -> Curves:
    """Make each row's and set's `pass_curve`; of several runs the mean, with its standard error over runs."""
    curves: Curves = {}
    for row, sets in runs[0].items():
        curves[row] = {}
        for name in sets:
            of_runs = []
            for run in runs:
                records = run[row][name]
                of_runs.append(pass_curve(records))
            average = _average_curves(of_runs)
            if average:
                curves[row][name] = average
    return curves


def _average_curves(curves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Average the runs' curves up to where the shortest one ends; {} where a run has none."""
    if len(curves) == 1:
        return curves[0]
    if not all(curves):
        return {}
    ks_of_runs = [curve["k"] for curve in curves]
    ks = min(ks_of_runs, key=len)
    values = []
    for curve in curves:
        of_run = curve["value"]
        values.append(of_run[: len(ks)])
    values_RK = np.array(values)
    errors = [mean_se(values_R) for values_R in values_RK.T]
    return {
        "k": ks,
        "value": values_RK.mean(axis=0).tolist(),
        "se": errors,
    }


def stop_times(runs: Sequence[Evals]) -> Curves:
    """Count rollouts of 0, 1, 2, … latents: the greedy ones, and those with noise where there are any."""
    times: Curves = {}
    for row, sets in runs[0].items():
        times[row] = {}
        for name in sets:
            greedy = []
            sampled = []
            for run in runs:
                records = run[row][name]
                greedy.append(records.latent_steps)
                sampled.append(records.sample_latent_steps)
            times[row][name] = {"greedy": _count_lengths(greedy)}
            if all(lengths.size for lengths in sampled):
                times[row][name]["noisy"] = _count_lengths(sampled)
    return times


def _count_lengths(parts: Sequence[np.ndarray]) -> list[int]:
    lengths = np.concatenate([part.ravel() for part in parts])
    return np.bincount(lengths).tolist()


def training_curves(metrics: Sequence[Mapping[str, Any]]) -> TrainingCurves:
    """Make curves of what was logged.

    Args:
        metrics: rows {stage, step, scalars..} in order of step, see `read_metrics`.

    Returns:
        {stage: {scalar: [steps, values]}} of finite values; with `elapsed`, the seconds of its steps so far, where
        those of a step were logged.
    """
    # A curve for each stage and scalar.
    series: TrainingCurves = {}
    for row in metrics:
        stage = series.setdefault(str(row["stage"]), {})
        for scalar, value in row.items():
            is_number = isinstance(value, (int, float)) and np.isfinite(value)
            if is_number and scalar not in ("stage", "step"):
                steps, values = stage.setdefault(scalar, [[], []])
                steps.append(row["step"])
                values.append(value)

    # The clock, from the seconds of a step.
    for stage in series.values():
        if "seconds" in stage:
            steps, seconds_a_step = stage["seconds"]
            # The first line is of as many steps as the second: a stage need not begin at step 0.
            first = steps[0]
            second = steps[min(1, len(steps) - 1)]
            start = 2 * first - second
            n_steps = np.diff(steps, prepend=start)
            elapsed = np.cumsum(n_steps * seconds_a_step)
            rounded = elapsed.round(3).tolist()
            stage["elapsed"] = [steps, rounded]
    return {stage: scalars for stage, scalars in series.items() if scalars}


def read_metrics(path: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read `metrics.jsonl`, in order of step, and notes on what is wrong with it.

    Several rows of one (stage, step) are one, in which the last value of a scalar counts. A line torn by an
    interruption is left out and noted.
    """
    path = Path(path)
    if not path.exists():
        return [], []
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    torn = 0
    for line in path.read_text("utf-8", "replace").split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key = str(row["stage"]), int(row["step"])
            merged = rows.setdefault(key, {})
            merged.update(row)
        except (ValueError, TypeError, KeyError):
            torn += 1
    notes = []
    if torn:
        fate = "and no other, so the report has nothing of the training"
        if rows:
            fate = "left out of the figures"
        notes.append(f"{path.name}: {torn} unreadable line(s) {fate}.")
    in_order = sorted(rows.values(), key=lambda row: row["step"])
    return in_order, notes

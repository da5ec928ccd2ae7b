"""What the rows, metrics and differences of a report are, in a sentence each."""

import re
from collections.abc import Mapping
from typing import Any

from slpo_jax.evaluation.rows import BEST_FIXED
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.recipes import RECIPES

_METRICS = {
    "acc": ("Acc", "Share of problems that the greedy rollout, without noise, gets right."),
    r"pass@(\d+)": (
        "P@{0}",
        """Share of problems that at least one of {0} rollouts with noise (dropout's, the latent policy's, sampled
        answers') gets right: the mean of 1 - C(n-c, {0}) / C(n, {0}), of all n rollouts of a problem c right. In
        parentheses the standard error over the noise's seeds.""",
    ),
    r"maj@(\d+)": (
        "maj@{0}",
        """Share of problems whose commonest answer among {0} rollouts with noise is right; equal ones (1/2, 0.5)
        are one. Of a tie the first seen counts; rollouts without an answer don't vote.""",
    ),
    r"best@(\d+)_(\w+)": ("best@{0} by {1}", "Share of problems whose rollout of {0} with the best {1} is right."),
    r"vote@(\d+)_(\w+)": (
        "vote@{0} by {1}",
        "Share of problems whose answer with the largest sum of the score {1} among {0} rollouts is right.",
    ),
    "searched": (
        "beam search",
        "Share of problems that the rollout whose latents were searched for is right on; mean over the noise's seeds.",
    ),
    "latent_steps": ("#L", "Mean number of latents of the greedy rollout."),
    "sample_latent_steps": ("#L, with noise", "Mean number of latents of the rollouts with noise."),
    "distinct_answers": ("answers", "Different answers among a problem's rollouts of a seed; none counts as one."),
    "answer_tokens": ("tokens", "Mean number of tokens that the greedy rollout writes."),
    "cut": ("cut", "Share of greedy rollouts without an end within the budget of answer tokens: always wrong."),
    "sample_cut": ("cut, with noise", "The same share of the rollouts with noise."),
    "pearson_steps_r": (
        "r, steps",
        "Pearson's correlation of a problem's latents with the steps of its written solution; p is two-sided.",
    ),
    "pearson_difficulty_r": (
        "r, difficulty",
        """Pearson's correlation of a problem's latents with its difficulty, 1 - the share of its rollouts with noise
        that are right; p is two-sided.""",
    ),
}
"""Pattern of the name -> title and meaning, in which {0} and {1} are the name's own parts."""
_SHARED = {
    "loss": "The stage's or the objective's own loss.",
    "grad_norm": "Norm of the gradient before it is clipped.",
    "learning_rate": "The optimizer's.",
    "seconds": "Of a step by the clock, without compilation and validation.",
    "skipped_steps": "Steps so far whose loss or gradient was not finite: they change nothing.",
    "valid_accuracy": "Share of the validation split's problems that the greedy rollout gets right.",
    "accuracy": "Share of texts all of whose tokens are the likeliest ones.",
    "valid_share": "Share of thoughts that are right at one candidate length at least.",
    "right_share": "Share of candidate lengths with a right answer.",
    "expected_length": "Mean number of latents under the gate's distribution.",
    "reward": "Mean reward of the rollouts.",
    "solved": "Share of prompts with a rollout that counts as right: its reward is 1 or more.",
    "mixed": "Share of prompts whose rewards differ, which alone have a gradient.",
    "latent_steps": "Mean number of latents of the training rollouts.",
    "answer_tokens": "Mean number of tokens that the training rollouts write.",
    "cut": "Share of training rollouts without an end within the budget of answer tokens.",
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
_METHODS: tuple[Any, ...] = (*OBJECTIVES.values(), *RECIPES.values())
SCALARS = _SHARED | {name: about for method in _METHODS for name, about in method.metrics.items()}
"""Of what training logs, by name."""
_SCORED = re.compile(r"(best|vote)@\d+_\w+_se")


def defined(metric: str) -> tuple[str, str] | None:
    """The title and the meaning of a figure of `report.json`; None of what only belongs to one, as its errors."""
    for pattern, (title, about) in _METRICS.items():
        match = None if _SCORED.fullmatch(metric) else re.fullmatch(pattern, metric)
        if match:
            return title.format(*match.groups()), " ".join(about.format(*match.groups()).split())
    return None


def about_rows(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What each row is, and how its rollouts stop.

    Args:
        rows: what they say of themselves, see `rows.Row`.
    """
    fixed = [f'"{row["label"]}"' for row in rows.values() if row["fixed"]]
    best = f"The best of {', '.join(fixed)}, by the very metric on the very set: a choice made on the test set itself."
    return {name: " ".join(_about(row)) for name, row in rows.items()} | ({BEST_FIXED: best} if fixed else {})


def _about(row: Mapping[str, Any]) -> list[str]:
    chosen = ", chosen on the validation split" if len(row["rules"]) > 1 else ""
    gate = f"Stops when the gate's probability reaches {row['rule']}{chosen}."
    length = f"Stops after {row['rule']} latents{chosen}."
    said = [row["about"]] if row.get("about") else []
    said += [gate if row["stopping"] == "threshold" else length] if row["rule"] is not None else []
    return said + ([f"Taken from {row['source']}."] if row["source"] else [])


def about_differences(runs: int) -> str:
    """What the differences' intervals are.

    Args:
        runs: how many are compared; 0 or 1 is one.
    """
    of_runs = (
        " and, independently, of training runs, paired in both (with a few runs such intervals are somewhat too "
        "narrow: the bootstrap of R runs understates their variance by 1/R)"
    )
    return (
        "Points of percent, or latents, with 95 % percentile intervals of 10,000 bootstrap draws of problems"
        f"{of_runs if runs > 1 else ''}. ▲ and ▼ where they exclude 0; of twenty intervals for no difference, about "
        "one does. The mean of the sets weighs sets equally, and takes them as given."
    )

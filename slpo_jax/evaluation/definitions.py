"""What the rows and differences of a report and the figures of training are, in a sentence each."""

from collections.abc import Mapping
from typing import Any

from slpo_jax.evaluation.rows import BEST_FIXED

SHARED = {
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
"""What all methods log while training, by name."""


def scalars() -> dict[str, str]:
    """What training logs, by name: what all methods share, and what they say of their own."""
    from slpo_jax.training.objectives import OBJECTIVES  # with jax, for which a report without them need not wait
    from slpo_jax.training.recipes import RECIPES

    methods: tuple[Any, ...] = (*OBJECTIVES.values(), *RECIPES.values())
    return SHARED | {name: about for method in methods for name, about in method.metrics.items()}


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

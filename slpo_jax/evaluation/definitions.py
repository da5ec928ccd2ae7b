"""What the rows, metrics and differences of a report are, in a sentence each."""

import re
from collections.abc import Mapping
from typing import Any

from slpo_jax.evaluation.rows import BEST_FIXED

_METRICS = {
    "acc": ("Acc", "Share of problems that the greedy rollout, without noise, gets right."),
    r"pass@(\d+)": (
        "P@{0}",
        """Share of problems that at least one of {0} rollouts with noise (dropout's, the latent policy's, sampled
        answers') gets right; mean over the noise's seeds. In parentheses the standard error over these seeds.""",
    ),
    r"pass@(\d+)_unbiased": (
        "P@{0}, unbiased",
        "1 - C(n-c, {0}) / C(n, {0}) of all n rollouts with noise of a problem, c of them right; mean over problems.",
    ),
    r"maj@(\d+)": (
        "maj@{0}",
        """Share of problems whose commonest answer among {0} rollouts with noise is right. Of a tie the first seen
        counts; rollouts without an answer don't vote.""",
    ),
    r"best@(\d+)_(\w+)": ("best@{0} by {1}", "Share of problems whose rollout of {0} with the best {1} is right."),
    r"vote@(\d+)_(\w+)": (
        "vote@{0} by {1}",
        "Share of problems whose answer with the largest sum of the score {1} among {0} rollouts is right.",
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

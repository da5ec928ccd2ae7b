"""The price of a thought: right completions of a problem are compared by how many latents they took.

AdaLR's relative length reward (apning/adaptive-latent-reasoning at 4e7d7dd, arXiv 2511.21581): while some rollouts of a
problem are wrong, longer thoughts among its right ones earn more, and once all are right, shorter ones do.
"""

from collections.abc import Hashable, Sequence

import numpy as np

RELATIVE_LENGTH = "relative_length"
PENALTY = 1e-4  # where all are right; both as published
BONUS = 0.1  # where some are wrong


def relative_lengths(
    latents: Sequence[int],
    is_right: Sequence[bool],
    groups: Sequence[Hashable],
    penalty: float = PENALTY,
    bonus: float = BONUS,
) -> list[float]:
    """Return c (n - mean n) / (max n - min n) of N completions, over the right ones of each group.

    Args:
        latents: n, how many each took.
        is_right: whether each is right; others get 0.
        groups: what tells the completions of one problem from those of another.
        penalty: -c where all of a group are right.
        bonus: c where some are wrong.
    Returns:
        N numbers; 0 where all right ones of a group are equally long.
    """
    lengths_N = np.array(latents, np.float64)
    right_N = np.array(is_right, bool)

    # Number the groups.
    distinct = dict.fromkeys(groups)
    number_of = {group: number for number, group in enumerate(distinct)}
    numbers = [number_of[group] for group in groups]
    group_N = np.array(numbers, int)

    earned_N = np.zeros(len(groups))
    for number in range(len(number_of)):
        group = group_N == number
        compared = group & right_N
        if not compared.any():
            continue
        lengths = lengths_N[compared]
        spread = lengths.max() - lengths.min()
        all_right = right_N[group].all()
        factor = -penalty if all_right else bonus
        deviations = lengths - lengths.mean()
        earned_N[compared] = factor * deviations / max(spread, 1.0)
    return earned_N.tolist()


def relative_length(
    completions: Sequence[str],
    question: Sequence[str],
    latents: Sequence[int],
    is_right: Sequence[bool],
) -> list[float]:
    """Return what `relative_lengths` says of a batch, as published: the reward that stands behind one of right answers.

    Args:
        completions: N of them.
        question: of each, which tells its group.
        latents: how many each took.
        is_right: whether the rewards before this one count it as right.
    """
    assert len(completions) == len(question)
    return relative_lengths(latents, is_right, question)

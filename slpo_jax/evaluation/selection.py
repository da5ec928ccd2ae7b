"""One answer out of several samples, by scores (`policy.scorers`). Axes: S dropout seeds, N problems, M samples."""

import numpy as np


def best_of(sample_correct: np.ndarray, sample_scores: np.ndarray, k: int) -> np.ndarray:
    """Best-of-k: whether the sample with the largest score of the first k is right; the first of them on a tie.

    Args:
        sample_correct: [S, N, M] bool.
        sample_scores: [S, N, M] float.
    Returns:
        [S, N] bool.
    """
    chosen = np.argmax(sample_scores[:, :, :k], axis=2)
    return np.take_along_axis(sample_correct, chosen[:, :, None], axis=2)[:, :, 0]


def weighted_vote(
    sample_answers: np.ndarray, sample_correct: np.ndarray, k: int, sample_scores: np.ndarray | None = None
) -> np.ndarray:
    """The answer with the largest sum of scores over the first k samples, the one seen first on a tie.

    Samples without an answer (None) don't vote; if none votes, the problem counts as not solved. Whether the winner
    is right is read off the first sample that gave it, so references need no canonical form here.

    Args:
        sample_answers: [S, N, M], equal ones in one form (`answers.in_one_form`), or None.
        sample_correct: [S, N, M] bool.
        k: votes a problem and seed.
        sample_scores: [S, N, M] float, 0 or more; None: each vote counts the same (the majority).
    Returns:
        [S, N] bool.
    """
    if not 1 <= k <= sample_answers.shape[2]:
        raise ValueError(f"k={k} needs between 1 and {sample_answers.shape[2]} samples a seed")
    weights = np.ones(sample_answers.shape) if sample_scores is None else sample_scores
    out = np.zeros(sample_answers.shape[:2], bool)
    for s, i in np.ndindex(*out.shape):
        first: dict[str, int] = {}  # in the order first seen, which max() keeps on ties
        total: dict[str, float] = {}
        for m, answer in enumerate(sample_answers[s, i, :k]):
            if answer is not None:
                first.setdefault(answer, m)
                total[answer] = total.get(answer, 0.0) + float(weights[s, i, m])
        if total:
            out[s, i] = sample_correct[s, i, first[max(total, key=total.__getitem__)]]
    return out

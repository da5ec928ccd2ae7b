"""Best-of-k and score-weighted votes: what they are for scores of which it is known, and by a loop."""

import itertools
import math

import numpy as np
import pytest

from slpo_jax.evaluation.selection import best_of, weighted_vote

SHAPE, K = (3, 40, 5), (1, 2, 4, 5)
RNG = np.random.default_rng(0)
# Answer 0 is right, None is none; about a third of the problems have no right sample.
ANSWERS = RNG.choice(np.array(["0", "1", "2", None]), SHAPE, p=[0.2, 0.4, 0.3, 0.1])
CORRECT = ANSWERS == "0"
SCORES = RNG.random(SHAPE)


@pytest.mark.parametrize("k", K)
def test_scored_by_correctness_both_are_pass_at_k(k):
    solved = CORRECT[:, :, :k].any(axis=2)
    assert 0.1 < solved.mean() < 0.9
    np.testing.assert_array_equal(best_of(CORRECT, CORRECT.astype(float), k), solved)
    np.testing.assert_array_equal(weighted_vote(ANSWERS, CORRECT, k, CORRECT.astype(float)), solved)


@pytest.mark.parametrize("k", K)
def test_a_constant_is_pass_at_1_in_expectation_and_the_majority(k):
    """Over all orders of the samples."""
    orders = list(itertools.permutations(range(SHAPE[2])))
    best = np.mean([best_of(CORRECT[..., order], np.full(SHAPE, 0.3), k) for order in orders], axis=0)
    np.testing.assert_allclose(best, CORRECT.mean(axis=2), atol=1e-12)
    np.testing.assert_array_equal(
        weighted_vote(ANSWERS, CORRECT, k, np.full(SHAPE, 0.3)), weighted_vote(ANSWERS, CORRECT, k)
    )


def test_one_sample_is_that_sample():
    np.testing.assert_array_equal(best_of(CORRECT, SCORES, 1), CORRECT[..., 0])
    np.testing.assert_array_equal(weighted_vote(ANSWERS, CORRECT, 1, SCORES), CORRECT[..., 0])


@pytest.mark.parametrize("k", K)
def test_both_are_a_slow_loop_s(k):
    best, vote = best_of(CORRECT, SCORES, k), weighted_vote(ANSWERS, CORRECT, k, SCORES)
    for s, i in np.ndindex(SHAPE[:2]):
        answers, scores = ANSWERS[s, i, :k].tolist(), SCORES[s, i, :k].tolist()
        assert best[s, i] == (answers[scores.index(max(scores))] == "0")
        sums = {a: math.fsum(x for b, x in zip(answers, scores, strict=True) if b == a) for a in {*answers} - {None}}
        assert vote[s, i] == bool(sums and max(sums, key=sums.get) == "0")

"""The latent policy of additive noise: its draws, its density, and the deterministic run without it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import tiny
from slpo_jax.policy.rollout import sample
from slpo_jax.policy.score import score
from tiny import (
    CONFIG,
    REASONER,
    SlowReasoner,
    both_params,
    compiled,
    keys_of,
    policy_of,
    random_prompts,
    take_rows,
)

SIGMA = 0.4
T = tiny.ROLLOUT.max_latents
D = CONFIG.n_embd
CLEAN = dataclasses.replace(
    tiny.ROLLOUT, dropout_rate=0.0, stopping="length", answer_slots=2
)
POLICY = policy_of(CLEAN, REASONER, "additive", sigma=SIGMA)
ROWS = 500
PROMPTS = take_rows(random_prompts((5,), 5), [0] * ROWS)
LENGTHS = jnp.asarray(np.resize([T, 2, 3], ROWS))


@pytest.fixture(scope="module")
def rolled():
    """Rollouts of one prompt, and what a noiseless pass over them says."""

    @compiled
    def run(params, keys):
        trajectories = sample(POLICY, params, PROMPTS, keys, LENGTHS)
        return trajectories, score(POLICY, params, PROMPTS, trajectories, None)

    return run(both_params(), keys_of(ROWS))


@pytest.fixture(scope="module")
def means(rolled):
    """The latents [N, T, D] that the plain model makes of each prefix, up to tau."""
    slow = SlowReasoner()
    found = np.zeros((ROWS, T, D))
    prompt = slow.prompt(PROMPTS, 0)
    for row, tau in enumerate(LENGTHS.tolist()):
        fed = np.asarray(
            rolled[0].actions[row, : tau - 1],
            np.float64,
        )
        found[row, :tau] = slow.hidden(np.concatenate([prompt, fed]))[len(prompt) - 1 :]
    return found


TOOK = np.arange(T) < np.asarray(LENGTHS)[:, None]


@pytest.mark.slow
def test_draws_are_normal_around_the_transition(rolled, means):
    draws = ((np.asarray(rolled[0].actions, np.float64) - means) / SIGMA)[TOOK]
    count = draws.size
    assert abs(draws.mean()) < 5 / count**0.5
    assert abs(draws.var() - 1) < 5 * (2 / count) ** 0.5
    assert stats.kstest(draws.ravel(), "norm").pvalue > 1e-4
    # Units are independent of each other.
    off = np.corrcoef(draws.T)[~np.eye(D, dtype=bool)]
    assert np.abs(off).max() < 5 / len(draws) ** 0.5


def test_log_prob_is_the_density(rolled, means):
    trajectories, scores = rolled
    assert scores.action_log_probs.shape == (ROWS, T)
    for row in range(6):
        for step in range(int(LENGTHS[row])):
            law = stats.multivariate_normal(
                means[row, step],
                SIGMA**2 * np.eye(D),
            )
            expected = law.logpdf(
                np.asarray(trajectories.actions[row, step], np.float64)
            )
            assert scores.action_log_probs[row, step] == pytest.approx(
                expected, rel=1e-4
            )


def test_a_noiseless_pass_draws_the_means(rolled, means):
    np.testing.assert_allclose(
        np.asarray(rolled[1].actions)[TOOK], means[TOOK], rtol=0, atol=1e-4
    )

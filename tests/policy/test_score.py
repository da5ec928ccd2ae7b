"""One-pass scoring against a slow loop over steps and passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from slow_policy import factors_of, rollouts_of
from slpo_jax.policy import noise
from slpo_jax.policy.noise import PassKeys
from slpo_jax.policy.score import score
from tiny import (
    EOS,
    PAD,
    ROLLOUT,
    SlowReasoner,
    both_params,
    compiled,
    keys_of,
    policy_of,
)

GROUP = 2
T = ROLLOUT.max_latents
D = tiny.CONFIG.n_embd
BY_LENGTH = dataclasses.replace(ROLLOUT, stopping="length")
THOUGHTS = np.array([1, 5, 3, 2, 4, 5], np.int32)
ROWS = len(THOUGHTS)


PROMPTS = tiny.random_prompts((4, 7, 2), 7)


def _pass(params, trajectories, prompt_keys, keys, config):
    return score(
        policy_of(config), params, PROMPTS, trajectories, PassKeys(prompt_keys, keys)
    )


one_pass = compiled(_pass, static=("config",))


@pytest.fixture(scope="module")
def trajectories():
    """Of 3 prompts, 2 each, with all kinds of lengths and answers."""
    rows = tiny.take_rows(PROMPTS, np.repeat(np.arange(3), GROUP))
    result = tiny.run_rollout(
        both_params(), rows, keys_of(ROWS), config=BY_LENGTH, stop_rule=THOUGHTS
    )
    # One answer that ends at once and one that ends in the middle; the others use all slots.
    tokens = np.array(result.tokens)
    tokens[tokens == EOS] = 1
    tokens[1] = [EOS, *[PAD] * 5]
    tokens[4, 3:] = [EOS, PAD, PAD]
    return result.replace(tokens=jnp.asarray(tokens))


def _keys(pass_number):
    key = jax.random.fold_in(jax.random.key(7), pass_number)
    indices = jnp.arange(3)
    return noise.row_keys(key, indices), noise.row_keys(key, 100 + jnp.arange(ROWS))


@pytest.mark.parametrize(
    "where",
    [
        "thought",
        *(
            pytest.param(where, marks=pytest.mark.slow)
            for where in ("latents", "rollout", "all")
        ),
    ],
)
def test_one_pass_is_the_slow_loop_s(trajectories, where):
    """z_1 .. z_tau, each from a forward of its own, and the answer's log-probability."""
    slow = SlowReasoner()
    config = dataclasses.replace(ROLLOUT, dropout_where=where)
    rollouts = rollouts_of(PROMPTS, trajectories)
    for k in range(2):
        prompt_keys, keys = _keys(k)
        scores = one_pass(both_params(), trajectories, prompt_keys, keys, config=config)
        factors = factors_of(rollouts, jnp.repeat(prompt_keys, GROUP), keys, config)
        for row, rollout in enumerate(rollouts):
            slow.factors = factors[row]
            h = rollout.latents
            thoughts = [
                np.concatenate([slow.embed(rollout.prompt), h[:t]])
                for t in range(len(h) + 1)
            ]
            z = np.stack([slow.hidden(inputs)[-1] for inputs in thoughts[:-1]])
            log_prob = slow.log_probs(
                np.concatenate([thoughts[-1], slow.embed([tiny.END])]), rollout.spoken
            ).sum()
            np.testing.assert_allclose(
                scores.actions[row, : len(z)], z, rtol=0, atol=1e-4
            )
            np.testing.assert_allclose(
                scores.answer_log_prob[row], log_prob, rtol=1e-5, atol=2e-4
            )
            assert where in ("latents", "rollout") or np.abs(h - z).max() > 1e-2, (
                "the pass must have masks of its own"
            )


def test_what_lies_after_the_end_does_not_matter(trajectories):
    prompt_keys, keys = _keys(0)
    rng = np.random.default_rng(1)
    after = np.arange(T)[None] >= np.asarray(trajectories.lengths)[:, None]
    latents = np.where(
        after[..., None], rng.normal(size=(ROWS, T, D)), trajectories.actions
    ).astype(np.float32)
    tokens = np.array(trajectories.tokens)
    tokens[1, 1:] = 5
    tokens[4, 4:] = 9
    garbage = trajectories.replace(
        actions=jnp.asarray(latents), tokens=jnp.asarray(tokens)
    )
    ours, theirs = (
        one_pass(both_params(), x, prompt_keys, keys, config=ROLLOUT)
        for x in (trajectories, garbage)
    )
    np.testing.assert_allclose(ours.answer_log_prob, theirs.answer_log_prob, rtol=1e-6)
    np.testing.assert_allclose(
        ours.actions[~after], theirs.actions[~after], rtol=0, atol=1e-6
    )

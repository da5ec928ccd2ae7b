"""One-pass scoring against a slow loop over steps and passes, and the Gaussian against scipy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from slpo_jax.policy import noise
from slpo_jax.policy.score import PassKeys, pass_keys, score
from slpo_jax.policy.surrogate import gaussian_log_prob, moments
from slpo_jax.rewards.ending import answer_mask
from tiny import (
    CONFIG,
    END,
    EOS,
    PAD,
    REASONER,
    ROLLOUT,
    SlowReasoner,
    both_params,
    compiled,
    keys_of,
    policy_of,
    random_params,
    random_prompts,
    real_tokens,
    run_rollout,
    slow_factors,
    take_rows,
)

GROUP, PASSES, T, D = 2, 3, ROLLOUT.max_latents, CONFIG.n_embd
BY_LENGTH = dataclasses.replace(ROLLOUT, stopping="length")
THOUGHTS = np.array([1, 5, 3, 2, 4, 5], np.int32)
ROWS = len(THOUGHTS)


def _pass(reasoner, params, prompts, trajectories, prompt_keys, keys, config):
    policy = policy_of(config, reasoner)
    return score(policy, {"reasoner": params}, prompts, trajectories, PassKeys(prompt_keys, keys))


def _passes(params, prompts, index, trajectories, key, config, passes):
    keys_K = pass_keys(key, index, GROUP, passes)
    return score(policy_of(config), {"reasoner": params}, prompts, trajectories, keys_K)


one_pass = compiled(_pass, REASONER, static=("config",))
many_passes = compiled(_passes, static=("config", "passes"))


@pytest.fixture(scope="module")
def params():
    return random_params()


@pytest.fixture(scope="module")
def prompts():
    return random_prompts((4, 7, 2), 7)


@pytest.fixture(scope="module")
def trajectories(prompts):
    """Of 3 prompts, 2 each, with all kinds of lengths and answers."""
    rows = take_rows(prompts, np.repeat(np.arange(3), GROUP))
    result = run_rollout(both_params(), rows, keys_of(ROWS), config=BY_LENGTH, stop_rule=THOUGHTS)
    # One answer that ends at once and one that ends in the middle; the others use all slots.
    tokens = np.array(result.tokens)
    tokens[tokens == EOS] = 1
    tokens[1], tokens[4, 3:] = [EOS, *[PAD] * 5], [EOS, PAD, PAD]
    return result.replace(tokens=jnp.asarray(tokens))


def _keys(pass_number):
    key = jax.random.fold_in(jax.random.key(7), pass_number)
    indices = jnp.arange(3)
    return noise.row_keys(key, indices), noise.row_keys(key, 100 + jnp.arange(ROWS))


def _slow_pass(slow, config, prompts, trajectories, prompt_keys, keys, row):
    """z_1 .. z_tau, each from a forward of its own, and the answer's log-probability, of one trajectory."""
    prompt, tau = real_tokens(prompts, row // GROUP), int(trajectories.lengths[row])
    latents = np.asarray(trajectories.actions[row, :tau])
    slow.factors = slow_factors(prompt_keys[row // GROUP], keys[row], len(prompt), tau, config)
    prefixes = [np.concatenate([slow.embed(prompt), latents[:t]]) for t in range(tau)]
    z = np.stack([slow.hidden(prefix)[-1] for prefix in prefixes])
    tokens = np.asarray(trajectories.tokens[row])
    spoken = tokens[: (tokens == EOS).argmax() + 1] if EOS in tokens else tokens
    inputs = np.concatenate([slow.embed(prompt), latents, slow.embed([END, *spoken[:-1]])])
    logits = slow.logits(slow.hidden(inputs)[-len(spoken) :])
    return z, special.log_softmax(logits, axis=-1)[np.arange(len(spoken)), spoken].sum()


@pytest.mark.parametrize(
    "where", ["thought", *(pytest.param(where, marks=pytest.mark.slow) for where in ("latents", "rollout", "all"))]
)
def test_one_pass_is_the_slow_loop_s(params, prompts, trajectories, where):
    slow, config = SlowReasoner(params, CONFIG), dataclasses.replace(ROLLOUT, dropout_where=where)
    for k in range(2):
        prompt_keys, keys = _keys(k)
        scores = one_pass(params, prompts, trajectories, prompt_keys, keys, config=config)
        for row in range(ROWS):
            z, log_prob = _slow_pass(slow, config, prompts, trajectories, prompt_keys, keys, row)
            np.testing.assert_allclose(scores.actions[row, : len(z)], z, rtol=0, atol=1e-4)
            np.testing.assert_allclose(scores.answer_log_prob[row], log_prob, rtol=1e-5, atol=2e-4)
            h = np.asarray(trajectories.actions[row, : len(z)])
            assert where in ("latents", "rollout") or np.abs(h - z).max() > 1e-2, "the pass must have masks of its own"


def test_what_lies_after_the_end_does_not_matter(params, prompts, trajectories):
    prompt_keys, keys = _keys(0)
    rng = np.random.default_rng(1)
    after = np.arange(T)[None] >= np.asarray(trajectories.lengths)[:, None]
    latents = np.where(after[..., None], rng.normal(size=(ROWS, T, D)), trajectories.actions).astype(np.float32)
    tokens = np.array(trajectories.tokens)
    tokens[1, 1:], tokens[4, 4:] = 5, 9
    garbage = trajectories.replace(actions=jnp.asarray(latents), tokens=jnp.asarray(tokens))
    ours, theirs = (one_pass(params, prompts, x, prompt_keys, keys, config=ROLLOUT) for x in (trajectories, garbage))
    np.testing.assert_allclose(ours.answer_log_prob, theirs.answer_log_prob, rtol=1e-6)
    np.testing.assert_allclose(ours.actions[~after], theirs.actions[~after], rtol=0, atol=1e-6)


def test_scores_depend_on_the_example_s_index_and_not_on_its_place(params, prompts, trajectories):
    key, index = jax.random.key(3), jnp.array([4, 9, 2])
    scores = many_passes(params, prompts, index, trajectories, key, config=ROLLOUT, passes=PASSES)
    order = np.array([2, 0, 1])
    rows = (order[:, None] * GROUP + np.arange(GROUP)).ravel()
    moved = many_passes(
        params,
        take_rows(prompts, order),
        index[order],
        jax.tree.map(lambda x: x[rows], trajectories),
        key,
        config=ROLLOUT,
        passes=PASSES,
    )
    np.testing.assert_allclose(moved.answer_log_prob, scores.answer_log_prob[:, rows], rtol=1e-5, atol=1e-4)
    seen = np.arange(T)[None] < np.asarray(trajectories.lengths)[rows, None]
    np.testing.assert_allclose(moved.actions[:, seen], scores.actions[:, rows][:, seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("passes", range(1, 9))
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_equal_samples_give_the_floor_exactly(passes, scale):
    z = scale * jax.random.normal(jax.random.key(0), (D,))
    for function in (moments, jax.jit(moments)):
        mu, variance = function(jnp.broadcast_to(z, (passes, D)))
        np.testing.assert_allclose(mu, z, rtol=1e-6)
        assert variance == np.float32(1e-6)


@pytest.mark.parametrize(("passes", "width", "epsilon"), [(2, 3, 1e-6), (4, 16, 0.5), (7, 1, 0.0)])
def test_moments_and_log_density_against_scipy(passes, width, epsilon):
    rng = np.random.default_rng(passes)
    z, h = 3 + 2 * rng.normal(size=(passes, width)), rng.normal(size=width)
    mu, variance = moments(jnp.asarray(z, jnp.float32), epsilon)
    np.testing.assert_allclose(mu, z.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(variance, np.var(z, axis=0, ddof=0).mean() + epsilon, rtol=1e-5)
    law = stats.multivariate_normal(np.asarray(mu, np.float64), float(variance) * np.eye(width))
    ours = gaussian_log_prob(jnp.asarray(h, jnp.float32), mu, variance)
    np.testing.assert_allclose(ours, law.logpdf(h), rtol=1e-4)


def test_answer_mask_ends_with_the_first_eos():
    tokens = jnp.array([[1, 2, EOS, PAD], [EOS, EOS, 1, 2], [1, 2, 3, 4]])
    expected = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    np.testing.assert_array_equal(answer_mask(tokens, (EOS,)), np.array(expected, bool))
    padded_with_eos = jnp.array([[1, EOS, EOS, EOS]])
    np.testing.assert_array_equal(answer_mask(padded_with_eos, (EOS,)), [[True, True, False, False]])

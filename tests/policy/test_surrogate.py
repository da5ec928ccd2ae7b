"""One-pass scoring against a slow loop over steps and passes, and the Gaussian against scipy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_gpt2 import plain_hidden
from scipy import special, stats
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

from slpo_jax.policy import noise
from slpo_jax.policy.score import PassKeys, pass_keys, score
from slpo_jax.policy.surrogate import gaussian_log_prob, moments
from slpo_jax.rewards.ending import answer_mask

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


def _clean(params, prompts, trajectories, config):
    return score(policy_of(config), {"reasoner": params}, prompts, trajectories, None)


one_pass = compiled(_pass, REASONER, static=("config",))
many_passes = compiled(_passes, static=("config", "passes"))
clean_pass = compiled(_clean, static=("config",))


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


@pytest.mark.slow
def test_one_pass_s_gradient_is_the_slow_loop_s(params, prompts, trajectories):
    """jax.grad of the step-by-step loop on a plain GPT-2, masks included; the realised latents are constants."""
    row, (prompt_keys, keys) = 4, _keys(0)
    weights = np.random.default_rng(0).normal(size=(T, D)).astype(np.float32)

    def value(params, latents):
        realised = trajectories.replace(actions=latents)
        scores = _pass(REASONER, params, prompts, realised, prompt_keys, keys, ROLLOUT)
        seen = jnp.arange(T)[:, None] < trajectories.lengths[row]
        return jnp.sum(scores.actions[row] * weights * seen) + scores.answer_log_prob[row]

    gradient, to_latents = compiled(jax.grad(value, argnums=(0, 1)))(params, trajectories.actions)
    np.testing.assert_array_equal(to_latents, jnp.zeros_like(to_latents))

    prompt, tau = real_tokens(prompts, row // GROUP), int(trajectories.lengths[row])
    tokens = np.asarray(trajectories.tokens[row])
    spoken = tokens[: (tokens == EOS).argmax() + 1]
    factors = slow_factors(prompt_keys[row // GROUP], keys[row], len(prompt), tau, ROLLOUT)

    def slow_value(params):
        wte, latents = params["backbone"]["wte"], trajectories.actions[row, :tau]
        prefixes = [jnp.concatenate([wte[prompt], latents[:t]]) for t in range(tau)]
        z = jnp.stack([plain_hidden(params, prefix, factors)[-1] for prefix in prefixes])
        inputs = jnp.concatenate([wte[prompt], latents, wte[np.array([END, *spoken[:-1]])]])
        logits = plain_hidden(params, inputs, factors)[-len(spoken) :] @ wte.T
        answer = jax.nn.log_softmax(logits)[np.arange(len(spoken)), spoken].sum()
        return jnp.sum(z * weights[:tau]) + answer

    expected = compiled(jax.grad(slow_value))(params)

    def assert_close(path, mine, theirs):
        # A key's bias moves all scores of a query alike.
        if path[-2:] == (jax.tree_util.DictKey("c_attn"), jax.tree_util.DictKey("bias")):
            mine, theirs = (np.delete(x, np.s_[D : 2 * D]) for x in (mine, theirs))
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())

    jax.tree_util.tree_map_with_path(assert_close, gradient, expected)


@pytest.mark.slow
def test_shared_prompts_score_as_prompts_encoded_for_each(params, prompts, trajectories):
    prompt_keys, keys = _keys(0)
    shared = one_pass(params, prompts, trajectories, prompt_keys, keys, config=ROLLOUT)
    each = np.repeat(np.arange(3), GROUP)
    apart = one_pass(params, take_rows(prompts, each), trajectories, prompt_keys[each], keys, config=ROLLOUT)
    for row, length in enumerate(THOUGHTS):
        np.testing.assert_allclose(shared.actions[row, :length], apart.actions[row, :length], rtol=0, atol=1e-5)
    np.testing.assert_allclose(shared.answer_log_prob, apart.answer_log_prob, rtol=1e-5, atol=1e-4)


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


@pytest.mark.slow
def test_same_keys_score_the_rollout_s_own_latents(params, trajectories, prompts):
    """With the rollout's keys instead of fresh ones, z_t is h_t itself: the masks are mirrored position by position."""
    rows = take_rows(prompts, np.repeat(np.arange(3), GROUP))
    for where in ("thought", "latents", "rollout"):
        config = dataclasses.replace(BY_LENGTH, dropout_where=where)
        result = run_rollout(both_params(), rows, keys_of(ROWS), config=config, stop_rule=THOUGHTS)
        config = dataclasses.replace(ROLLOUT, dropout_where=where)
        scores = one_pass(params, rows, result, keys_of(ROWS), keys_of(ROWS), config=config)
        for row, length in enumerate(THOUGHTS):
            np.testing.assert_allclose(scores.actions[row, :length], result.actions[row, :length], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_passes_have_masks_of_their_own(params, prompts, trajectories):
    """Independent over passes and trajectories, shared by a prompt's trajectories in the prompt only."""
    same = jax.tree.map(lambda x: jnp.repeat(x[1:2], ROWS, axis=0), trajectories)  # tau = T
    twins = take_rows(prompts, [1, 1, 1])
    key, index = jax.random.key(3), jnp.array([4, 9, 2])
    z = np.asarray(many_passes(params, twins, index, same, key, config=ROLLOUT, passes=PASSES).actions)
    rows = np.arange(ROWS)
    for t in range(T):
        flat = z[:, :, t].reshape(PASSES * ROWS, D)
        distance = np.abs(flat[:, None] - flat[None]).max(axis=-1)
        pass_of, row_of = np.repeat(np.arange(PASSES), ROWS), np.tile(rows, PASSES)
        together = (pass_of[:, None] == pass_of) & (row_of[:, None] // GROUP == row_of // GROUP)
        equal = together if t == 0 else np.eye(PASSES * ROWS, dtype=bool)
        assert (distance[equal] < 1e-6).all()
        assert (distance[~equal] > 1e-3).all()
    first = np.asarray(same.actions[0, 0])
    assert np.abs(z[:, :, 0] - first).max(axis=-1).min() > 1e-3, "the realised latent is none of the K"


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


@pytest.mark.slow
def test_without_dropout_the_passes_are_the_clean_one(params, prompts, trajectories):
    config = dataclasses.replace(ROLLOUT, dropout_rate=0.0)
    index, key = jnp.arange(3), jax.random.key(0)
    scores = many_passes(params, prompts, index, trajectories, key, config=config, passes=PASSES)
    clean = clean_pass(params, prompts, trajectories, config=ROLLOUT)
    slow, (prompt_keys, keys) = SlowReasoner(params), _keys(0)
    for row, length in enumerate(THOUGHTS):
        z, log_prob = _slow_pass(slow, config, prompts, trajectories, prompt_keys, keys, row)
        np.testing.assert_allclose(clean.actions[row, :length], z, rtol=0, atol=1e-4)
        np.testing.assert_allclose(clean.answer_log_prob[row], log_prob, rtol=1e-5, atol=2e-4)
        for k in range(PASSES):
            np.testing.assert_allclose(scores.actions[k, row, :length], z, rtol=0, atol=1e-4)
    variance = compiled(jax.vmap(jax.vmap(moments, in_axes=1), in_axes=1))(scores.actions)[1]
    np.testing.assert_array_equal(variance, np.full((ROWS, T), np.float32(1e-6)))


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


def test_moments_by_hand_and_in_float32():
    z = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    mu, variance = moments(z, 0.25)  # squared distances 1 + 4 twice, over K d = 4
    np.testing.assert_allclose(mu, [2, 4])
    np.testing.assert_allclose(variance, 2.75)
    mu, variance = moments(z.astype(jnp.bfloat16))
    assert mu.dtype == variance.dtype == jnp.float32
    assert gaussian_log_prob(z[0].astype(jnp.bfloat16), mu, variance).dtype == jnp.float32


def test_answer_mask_ends_with_the_first_eos():
    tokens = jnp.array([[1, 2, EOS, PAD], [EOS, EOS, 1, 2], [1, 2, 3, 4]])
    expected = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    np.testing.assert_array_equal(answer_mask(tokens, (EOS,)), np.array(expected, bool))
    padded_with_eos = jnp.array([[1, EOS, EOS, EOS]])
    np.testing.assert_array_equal(answer_mask(padded_with_eos, (EOS,)), [[True, True, False, False]])

"""Beam search over latents: one beam of one candidate is a plain rollout; otherwise a slow search in numpy's order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, ROLLOUT, both_params, compiled, policy_of, random_params, random_prompts, take_rows

from slpo_jax.policy import noise
from slpo_jax.policy.beam import beam_search
from slpo_jax.policy.rollout import sample
from slpo_jax.policy.scorers.latent_rm import begun, latent_scores

T, KEY = ROLLOUT.max_latents, jax.random.key(3)
INDEX = jnp.arange(3)
BY_THRESHOLD = dataclasses.replace(ROLLOUT, stopping="threshold", dropout_rate=0.3)
BY_LENGTH = dataclasses.replace(BY_THRESHOLD, stopping="length")


@pytest.fixture(scope="module")
def params():
    kernel = np.random.default_rng(1).normal(size=(CONFIG.n_embd, 1)).astype(np.float32)
    model = begun({"reasoner": random_params(9)}, CONFIG.n_embd)
    return both_params() | {"latent_rm": model | {"classifier": {"kernel": kernel, "bias": np.zeros(1, np.float32)}}}


@pytest.fixture(scope="module")
def prompts():
    return random_prompts((4, 7, 3), 7)


def searched(params, prompts, config, rule, beams, candidates):
    def search(params):
        return beam_search(policy_of(config), params, prompts, KEY, INDEX, rule, beams, candidates)

    return compiled(search)(params)


@pytest.mark.parametrize(("config", "rule"), [(BY_THRESHOLD, 0.6), (BY_LENGTH, 3)])
def test_one_beam_of_one_candidate_is_a_plain_rollout(params, prompts, config, rule):
    rule = jnp.full(3, rule)
    found = searched(params, prompts, config, rule, 1, 1)
    keys = noise.row_keys(KEY, INDEX, jnp.zeros_like(INDEX))
    plain = compiled(lambda params: sample(policy_of(config), params, prompts, keys, rule))(params)
    assert found.lengths.tolist() == plain.lengths.tolist()
    assert found.tokens.tolist() == plain.tokens.tolist()
    np.testing.assert_allclose(found.actions, plain.actions, atol=1e-5)


def test_with_two_latents_the_search_is_an_enumeration(params, prompts):
    """Every candidate for h_1, of these the best two, every candidate for h_2 after each, of all the best."""
    config, beams, candidates = dataclasses.replace(BY_LENGTH, max_latents=2), 2, 3
    found = searched(params, prompts, config, jnp.full(3, 2), beams, candidates)
    policy, width, rule = policy_of(config), beams * candidates, jnp.full(beams * candidates, 2)
    roll_out = compiled(lambda params, prompt, keys, prefix: sample(policy, params, prompt, keys, rule, prefix=prefix))
    score = compiled(lambda params, prompt, *of: latent_scores(policy, params["latent_rm"], prompt, *of))
    for row in range(3):
        prompt = take_rows(prompts, [row])
        keys = noise.row_keys(KEY, jnp.full(width, row), jnp.arange(width))
        blank = dataclasses.replace(roll_out(params, prompt, keys, None), lengths=jnp.zeros(width, jnp.int32))
        first = roll_out(params, prompt, keys, blank)
        r1 = np.asarray(score(params, prompt, first.actions, first.lengths))[:, 0]
        kept = np.argsort(-r1, kind="stable")[:beams]
        given = jax.tree.map(lambda x, kept=kept: x[np.repeat(kept, candidates)], first.actions)
        second = roll_out(
            params, prompt, keys, dataclasses.replace(first, actions=given, lengths=jnp.ones(width, jnp.int32))
        )
        total = np.asarray(score(params, prompt, second.actions, second.lengths)).sum(axis=1)
        np.testing.assert_allclose(found.actions[row], second.actions[total.argmax()], atol=1e-5)

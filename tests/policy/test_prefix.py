"""Rollouts that go on from the first steps of others: with their own noise the same, without any as a slow loop's."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import EOS, ROLLOUT, SlowReasoner, both_params, compiled, keys_of, policy_of, random_prompts, real_tokens

from slpo_jax.policy.rollout import sample

LENGTHS = (4, 7, 2, 6)
T = ROLLOUT.max_latents


def _continued(params, prompts, keys, made, steps, rule, config=ROLLOUT):
    prefix = dataclasses.replace(made, lengths=jnp.minimum(made.lengths, steps))
    return sample(policy_of(config), params, prompts, keys, rule, prefix=prefix)


def _sampled(params, prompts, keys, rule, config=ROLLOUT):
    return sample(policy_of(config), params, prompts, keys, rule)


continued, sampled = (compiled(function, static=("config",)) for function in (_continued, _sampled))


@pytest.fixture(scope="module")
def params():
    return both_params()


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS, max(LENGTHS))


def test_with_its_own_noise_every_prefix_of_a_rollout_goes_on_as_it_did(params, prompts):
    keys = keys_of(len(LENGTHS))
    made = sampled(params, prompts, keys, None)
    assert len({*made.lengths.tolist()}) > 1
    for steps in range(T + 1):
        again = continued(params, prompts, keys, made, steps, None)
        assert again.lengths.tolist() == made.lengths.tolist()
        assert again.tokens.tolist() == made.tokens.tolist()
        np.testing.assert_allclose(again.actions, made.actions, atol=1e-5)
    other = continued(params, prompts, keys_of(len(LENGTHS), 1), made, 2, None)
    np.testing.assert_array_equal(other.actions[:, :1], made.actions[:, :1])
    eager = dataclasses.replace(ROLLOUT, stopping="threshold")  # at once, but not before the last given step
    assert continued(params, prompts, keys, made, 3, 0.0, config=eager).lengths.tolist() == [
        min(length, 3) for length in made.lengths.tolist()
    ]
    assert np.abs(other.actions[:, 2:] - made.actions[:, 2:]).max() > 0.01


def test_a_foreign_prefix_is_gone_on_from(params, prompts):
    """Any vectors are fed as they are, and thought about further, as in a slow loop."""
    config = dataclasses.replace(ROLLOUT, stopping="length", dropout_rate=0.0)
    slow, rng = SlowReasoner(params["reasoner"]), np.random.default_rng(0)
    steps = np.array([2, 0, 1, 3])
    made = sampled(params, prompts, keys_of(len(LENGTHS)), jnp.full(len(LENGTHS), 3), config=config)
    given = dataclasses.replace(made, actions=jnp.asarray(rng.normal(size=made.actions.shape), jnp.float32))
    ours = continued(params, prompts, keys_of(len(LENGTHS)), given, steps, jnp.full(len(LENGTHS), 3), config=config)
    for row, kept in enumerate(steps):
        prompt = real_tokens(prompts, row)
        inputs = np.concatenate([slow.embed(prompt), given.actions[row, :kept]])
        while len(inputs) < len(prompt) + 3:
            inputs = np.concatenate([inputs, slow.hidden(inputs)[-1:]])
        latents = inputs[len(prompt) :]
        np.testing.assert_allclose(ours.actions[row, :3], latents, atol=1e-5)
        assert ours.tokens[row].tolist() == slow.answer(prompt, latents, config)
    assert EOS in np.asarray(ours.tokens)

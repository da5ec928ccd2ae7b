"""The pathwise gradient through a projector and a Llama."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_policy import leave_one_out
from tiny import ROLLOUT, compiled, keys_of, policy_of, random_gate, random_prompts, random_tree
from tiny_llama import LLAMA

from slpo_jax.checkpoints.architectures.codi import Codi
from slpo_jax.policy import noise
from slpo_jax.policy.answer_score import fed_tokens
from slpo_jax.policy.prompted import PromptedBatch, repeat_rows
from slpo_jax.policy.rollout import sample
from slpo_jax.rewards.ending import answer_mask
from slpo_jax.training.objectives import OBJECTIVES

CODI = Codi(24).on(LLAMA)
CONFIG = dataclasses.replace(ROLLOUT, stopping="length", temperature=1.0, max_latents=3, answer_slots=3)
POLICY = policy_of(CONFIG, CODI)
LENGTHS = jnp.array([3, 1, 2, 3])
REWARDS = jnp.array([[1.0, 0.0], [0.0, 1.0]])
PROMPTS = random_prompts((4, 6), 6)
KEYS = keys_of(4)


def _weighted_answers(tokens, params):
    """sum_i A_i s_i(a_i): latents out of `sample`, then prompt, latents and answer in one pass without a cache."""
    thought = sample(POLICY, params, PROMPTS, KEYS, LENGTHS)
    reasoner, prompts = params["reasoner"], repeat_rows(PROMPTS, 2)
    steps, slots = jnp.arange(1, CONFIG.max_latents + 1), jnp.arange(CONFIG.answer_slots)
    inputs = jnp.concatenate(
        [
            CODI.embed(reasoner, prompts.tokens),
            thought.actions,
            CODI.embed(reasoner, fed_tokens(tokens, CONFIG.closing_ids)),
        ],
        axis=1,
    )
    spoken = answer_mask(tokens, CONFIG.eos_ids)
    valid = jnp.concatenate([prompts.valid, steps[None] <= LENGTHS[:, None], spoken], axis=1)
    dropout = noise.followed_by(
        noise.prompt_dropout(KEYS, prompts.valid, CONFIG.dropout_rate, "thought"),
        noise.latent_dropout(KEYS, steps, steps[None] >= LENGTHS[:, None], CONFIG.dropout_rate, "thought"),
    )
    hidden, _ = CODI.forward(reasoner, inputs, jnp.cumsum(valid, axis=1) - 1, valid, dropout=dropout)
    log_probs = jax.nn.log_softmax(CODI.logits(reasoner, hidden[:, -len(slots) :]))
    chosen = jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
    return leave_one_out(REWARDS) @ jnp.sum(chosen, axis=1, where=spoken)


@pytest.fixture(scope="module")
def params():
    return {"reasoner": random_tree(CODI), "gate": random_gate()}


@pytest.mark.slow
def test_gradient_is_the_finite_difference(params):
    trajectories = compiled(sample, POLICY)(params, PROMPTS, KEYS, LENGTHS)
    np.testing.assert_array_equal(trajectories.lengths, LENGTHS)
    batch = PromptedBatch(PROMPTS, None, jnp.arange(2))
    pathwise = OBJECTIVES["pathwise"](estimator="reward")

    def loss(params):
        return pathwise(POLICY, params, batch, trajectories, REWARDS, None)[0]

    value, gradient = compiled(jax.value_and_grad(loss))(params)
    slow = compiled(functools.partial(_weighted_answers, trajectories.tokens))
    assert value == pytest.approx(-float(slow(params)) / 2, rel=1e-4)
    gradient, rng = jax.tree.map(np.asarray, gradient["reasoner"]), np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(gradient)
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))
    own = [leaf / norm for leaf in leaves]
    projector = jax.tree.map(lambda leaf: 0 * leaf, gradient) | {"projector": gradient["projector"]}
    assert jnp.abs(gradient["projector"]["fc_in"]["kernel"]).max() > 1e-3 * norm
    of_projector = jax.tree.leaves(projector)
    size = np.sqrt(sum(np.sum(leaf**2) for leaf in of_projector))
    directions = [own, [leaf / size for leaf in of_projector]]
    # Halfway between the gradient and somewhere, or the slope would be lost in float32's rounding.
    for _ in range(3):
        directions.append([leaf + 0.03 * rng.normal(size=leaf.shape) for leaf in own])
    for direction in directions:
        moved = jax.tree.unflatten(tree, direction)
        up, down = (
            float(slow({**params, "reasoner": jax.tree.map(lambda p, d, s=s: p + s * d, params["reasoner"], moved)}))
            for s in (2e-4, -2e-4)
        )
        expected = -(up - down) / 4e-4 / 2
        found = sum(np.sum(leaf * part) for leaf, part in zip(leaves, direction, strict=True))
        assert found == pytest.approx(expected, rel=0.02)

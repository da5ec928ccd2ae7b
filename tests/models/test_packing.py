"""Used slots side by side: by hand, against numpy, and what it changes in a scoring pass, which is nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.models.packing import most_used, pack
from slpo_jax.policy.rollout import Trajectories
from slpo_jax.policy.score import Capacity, capacities, smallest_capacity
from slpo_jax.training.rollouts import roll_out
from small_steps import (
    GROUP,
    OBJECTIVE,
    POLICY,
    prompted_batch,
    rigged_reward,
    small_params,
)
from tiny import EOS, PAD, assert_close, compiled, keys_of

USED = np.array(
    [[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]], bool
)  # two prompts of two rollouts


def test_used_slots_come_first_in_their_order():
    packing = pack(jnp.asarray(USED), 2, capacity=4)
    assert packing.source_BS[0, :2].tolist() == [0, 1]
    assert packing.source_BS[1].tolist() == [0, 3, 4, 5]
    assert packing.used_BS.tolist() == [[True, True, False, False], [True] * 4]
    assert packing.owner_BS[1].tolist() == [0, 1, 1, 1]
    assert int(most_used(jnp.asarray(USED), 2)) == 4


@pytest.mark.parametrize("shape", [(), (3,)])
def test_packing_and_unpacking_gives_used_slots_back(shape):
    x = np.random.default_rng(0).normal(size=(4, 3, *shape))
    packing = pack(jnp.asarray(USED), 2, capacity=5)
    back = packing.unpack(packing.pack(jnp.asarray(x)))
    assert back.shape == x.shape
    np.testing.assert_array_equal(
        np.asarray(back)[USED],
        x.astype(np.float32)[USED],
    )


def test_a_move_has_the_gradient_of_the_gather_it_is():
    """Of used slots and packed slots, which are all that may have one."""
    rng = np.random.default_rng(1)
    packing = pack(jnp.asarray(USED), 2, capacity=5)
    x, back = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((4, 3, 2), (2, 5, 2))
    )
    rows = jnp.arange(2)[:, None]
    for ours, plain, given, used in (
        (
            packing.pack,
            lambda x: x.reshape(2, 6, 2)[rows, packing.source_BS],
            x,
            packing.used_BS,
        ),
        (
            packing.unpack,
            lambda x: x[rows, packing.packed_BM].reshape(4, 3, 2),
            back,
            jnp.asarray(USED),
        ),
    ):
        out, pull = jax.vjp(ours, given)
        expected, plain_pull = jax.vjp(plain, given)
        np.testing.assert_array_equal(out, expected)
        cotangent = jnp.where(
            used[..., None], jnp.asarray(rng.normal(size=out.shape), jnp.float32), 0
        )
        np.testing.assert_array_equal(
            pull(cotangent)[0],
            plain_pull(cotangent)[0],
        )


def _trajectories(lengths, answers, slots=(5, 4)) -> Trajectories:
    steps, width = slots
    tokens = np.where(
        np.arange(width) < np.array(answers)[:, None],
        1,
        PAD,
    )
    for row, answer in enumerate(answers):
        tokens[row, answer - 1] = EOS
    latents = jnp.zeros((len(lengths), steps, 2))
    return Trajectories(
        latents, jnp.array(lengths), jnp.asarray(tokens), keys_of(len(lengths))
    )


@pytest.mark.parametrize(
    ("lengths", "answers", "choice"),
    [
        ([2, 3, 1, 1], [1, 1, 1, 1], 0),
        ([2, 3, 1, 1], [2, 2, 1, 2], 0),  # both just fit
        ([3, 3, 1, 1], [1, 1, 1, 1], 1),  # the first prompt's latents don't
        ([1, 1, 1, 1], [1, 1, 4, 1], 1),  # the second prompt's answers don't
        ([1, 1, 5, 3], [1, 1, 1, 1], 2),
        ([5, 5, 5, 5], [4, 4, 4, 4], 2),
    ],
)
def test_smallest_capacity_that_is_enough(lengths, answers, choice):
    policy = POLICY.with_config(max_latents=5, answer_slots=4)
    choices = [
        Capacity(5, 4),
        Capacity(7, 6),
        Capacity(10, 8),
    ]
    trajectories = _trajectories(lengths, answers)
    assert int(smallest_capacity(policy, choices, trajectories, 2)) == choice
    assert int(smallest_capacity(policy, choices[-1:], trajectories, 2)) == 0


REWARDS = jnp.array(
    [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
)
KEY = jax.random.key(5)


@pytest.fixture(scope="module")
def batch():
    return jax.tree.map(jnp.asarray, prompted_batch())


def sampled(batch):
    return compiled(lambda p: roll_out(POLICY, p, batch, rigged_reward, GROUP, KEY))(
        small_params()
    )[0]


def grader(batch, *shares):
    """Trajectories -> the loss and the gradient in these capacities."""
    policy = dataclasses.replace(POLICY, capacities=shares)

    def loss(params, trajectories):
        loss, _, terms = OBJECTIVE(
            policy,
            params,
            batch,
            trajectories,
            REWARDS,
            KEY,
        )
        return loss, terms

    graded = compiled(jax.value_and_grad(loss, has_aux=True))
    return lambda trajectories: graded(small_params(), trajectories)


@pytest.fixture(scope="module")
def trajectories(batch):
    return sampled(batch)


@pytest.fixture(scope="module")
def plain(batch):
    """Everything in the one capacity that there is."""
    return grader(batch, (1.0, 1.0))


def check_same(ours, expected):
    """Losses, terms and gradients of two graders."""
    ((loss, terms), grads) = ours
    ((expected_loss, expected_terms), expected_grads) = expected
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_close(terms, expected_terms, rtol=1e-4, atol=1e-5)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected_grads))
    assert largest > 0
    assert_close(grads, expected_grads, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.slow
def test_prompts_end_to_end_change_neither_rollouts_nor_gradient(
    batch, trajectories, plain
):
    """All of a batch's prompts in one row, with slots to spare."""
    slots = int(batch.prompts.valid.sum()) + 2
    together = dataclasses.replace(
        batch, prompts=batch.prompts.replace(packed_slots=slots)
    )
    again = sampled(together)
    np.testing.assert_array_equal(again.tokens, trajectories.tokens)
    np.testing.assert_array_equal(again.lengths, trajectories.lengths)
    np.testing.assert_allclose(again.actions, trajectories.actions, atol=1e-5)
    assert len(set(trajectories.lengths.tolist())) > 1
    check_same(grader(together, (1.0, 1.0))(trajectories), plain(trajectories))


@pytest.mark.slow
def test_capacity_changes_neither_loss_nor_gradient(batch, trajectories, plain):
    """The same trajectories in the smallest capacity and in the one for everything."""
    lengths = jnp.minimum(
        trajectories.lengths,
        jnp.array([1, 3, 2] * 4),
    )
    tokens = trajectories.tokens.at[:, 2].set(EOS).at[:, 3:].set(PAD)
    trajectories = trajectories.replace(lengths=lengths, tokens=tokens)
    shares = ((0.5, 0.5), (1.0, 1.0))
    policy = dataclasses.replace(POLICY, capacities=shares)
    assert (
        int(smallest_capacity(policy, capacities(policy, GROUP), trajectories, GROUP))
        == 0
    )
    check_same(grader(batch, *shares)(trajectories), plain(trajectories))

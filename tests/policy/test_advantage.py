"""RLOO and GRPO against numbers worked out by hand, PKPO, of any rewards, against all subsets."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.evaluation.statistics import solved_share
from slpo_jax.policy.advantage import ADVANTAGES, grpo, pkpo, rloo
from slpo_jax.training.objectives.slpo import AnswerOnly


@pytest.mark.parametrize(
    ("advantage", "rewards", "centred", "deviation"),
    [
        # Of 1, 0, 0, 1 the others' means are 1/3, 2/3, 2/3, 1/3.
        (rloo, [1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3], 1),
        (rloo, [0, 0, 3, 5, 2], [-2.5, -2.5, 1.25, 3.75, 0], 1),
        # Mean 1/2, squared deviations sum to 1, over G - 1 = 3; mean 5, variance (9 + 1 + 16) / 2 = 13.
        (grpo, [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5], (1 / 3) ** 0.5 + 1e-4),
        (grpo, [2, 4, 9], [-3, -1, 4], 13**0.5 + 1e-4),
        # A tiny spread shows the floor, which is added to the deviation and not to the variance.
        (grpo, [1e-3, 0], [0.5e-3, -0.5e-3], 1e-3 * 0.5**0.5 + 1e-4),
    ],
)
def test_advantages_by_hand(advantage, rewards, centred, deviation):
    np.testing.assert_allclose(
        advantage(jnp.array(rewards, jnp.float32)),
        np.array(centred) / deviation,
        rtol=1e-4,
    )


@pytest.mark.parametrize("advantage", [rloo, grpo, functools.partial(pkpo, k=2)])
def test_no_gradient_and_nothing_where_all_are_equal(advantage):
    rewards = jnp.array([1.0, 0, 0, 1])
    np.testing.assert_array_equal(
        jax.jacobian(advantage)(rewards),
        np.zeros((4, 4)),
    )
    # Compiled as in a step, where a division becomes a product with the reciprocal; all count, or some.
    jitted = jax.jit(advantage)
    for group, value in itertools.product((4, 5, 6, 8), (0.0, 1.0, -1.0, 0.1, -1 / 3)):
        rewards_G = jnp.full(group, value, jnp.float32)
        counts_G = jnp.arange(group) > 0
        np.testing.assert_array_equal(jitted(rewards_G), np.zeros(group))
        of_some_G = jitted(rewards_G.at[0].set(7.0), counts_G)
        np.testing.assert_array_equal(of_some_G, np.zeros(group))


def _rewards(group):
    """All of 0 and 1, then of any kind: equal ones, negative ones, and some that are neither."""
    draw = np.random.default_rng(group)
    others = [
        np.full((1, group), -1.0),
        draw.integers(-2, 3, (20, group)),
        draw.normal(0, 3, (20, group)),
    ]
    binary = list(itertools.product((0.0, 1.0), repeat=group))
    return np.concatenate([binary, *others]).astype(np.float32)


@pytest.mark.parametrize(
    ("group", "k"), [(3, 2), (4, 2), (4, 3), (4, 4), (5, 2), (5, 3), (5, 4)]
)
def test_pkpo_is_what_a_rollout_adds_to_the_best_of_its_subsets(group, k):
    """Of all subsets of k: their best reward, less the best without it; nothing where none is better than another."""
    patterns = _rewards(group)
    everyone = range(group)
    subsets = list(itertools.combinations(everyone, k))

    def added(rewards, i):
        gain = 0
        for subset in subsets:
            if i not in subset:
                continue
            others = [j for j in subset if j != i]
            best = max(rewards[j] for j in subset)
            best_of_others = max(rewards[j] for j in others)
            gain += best - best_of_others
        return gain / len(subsets)

    found = jax.vmap(ADVANTAGES["pkpo"](k))(patterns)
    expected = []
    for rewards in patterns:
        expected.append([added(rewards, i) for i in everyone])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found).max() > 0.1


@pytest.mark.parametrize("n", range(6))
def test_solved_share_by_counting(n):
    for k in range(n + 1):
        subsets = list(itertools.combinations(range(n), k))
        for right in range(n + 1):
            solved = [any(i < right for i in subset) for subset in subsets]
            share = solved_share(n, jnp.float32(right), k)
            assert share == pytest.approx(np.mean(solved), abs=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_what_is_masked_is_out_of_its_group(name):
    """The others have the advantages of a group of their own, and alone none; of whole groups nothing is another."""
    objective = AnswerOnly(advantage=name, pass_k=2)
    advantage = ADVANTAGES[name](2)
    rewards_BG = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    masked_BG = (
        np.arange(5)[None] < np.arange(6)[:, None]
    )  # none of the first group, all of the last
    found_BG = objective.advantages(jnp.where(masked_BG, jnp.nan, rewards_BG))
    np.testing.assert_array_equal(found_BG[0], advantage(rewards_BG[0]))
    for rewards, masked, found in zip(rewards_BG, masked_BG, found_BG, strict=True):
        kept = rewards[~masked]
        expected = np.zeros(len(kept))
        if len(kept) > 1:
            expected = advantage(jnp.array(kept))
        np.testing.assert_allclose(found[~masked], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found[masked], 0)

"""RLOO and GRPO against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.policy.advantage import grpo, rloo


def test_rloo_by_hand():
    # Of 1, 0, 0, 1 the others' means are 1/3, 2/3, 2/3, 1/3.
    np.testing.assert_allclose(rloo(jnp.array([1.0, 0, 0, 1])), [2 / 3, -2 / 3, -2 / 3, 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(rloo(jnp.array([1.0, 0])), [1, -1])
    np.testing.assert_allclose(rloo(jnp.array([0.0, 0, 3, 5, 2])), [-2.5, -2.5, 1.25, 3.75, 0], rtol=1e-6)


def test_grpo_by_hand():
    # 1, 0, 0, 1: mean 1/2, squared deviations sum to 1, over G - 1 = 3.
    expected = np.array([0.5, -0.5, -0.5, 0.5]) / (np.sqrt(1 / 3) + 1e-4)
    np.testing.assert_allclose(grpo(jnp.array([1.0, 0, 0, 1])), expected, rtol=1e-6)
    # 1, 0: mean 1/2, variance (1/4 + 1/4) / 1.
    np.testing.assert_allclose(grpo(jnp.array([1.0, 0])), np.array([0.5, -0.5]) / (np.sqrt(0.5) + 1e-4), rtol=1e-6)
    # 2, 4, 9: mean 5, variance (9 + 1 + 16) / 2 = 13.
    expected = np.array([-3, -1, 4]) / (np.sqrt(13) + 1e-4)
    np.testing.assert_allclose(grpo(jnp.array([2.0, 4, 9])), expected, rtol=1e-6)
    # A tiny spread shows the floor, which is added to the deviation and not to the variance.
    expected = np.array([0.5e-3, -0.5e-3]) / (1e-3 * np.sqrt(0.5) + 1e-4)
    np.testing.assert_allclose(grpo(jnp.array([1e-3, 0])), expected, rtol=1e-4)


@pytest.mark.parametrize("advantage", [rloo, grpo])
def test_no_gradient_and_nothing_where_all_are_equal(advantage):
    rewards = jnp.array([1.0, 0, 0, 1])
    np.testing.assert_array_equal(jax.jacobian(advantage)(rewards), np.zeros((4, 4)))
    for value in (0.0, 1.0):
        np.testing.assert_array_equal(advantage(jnp.full(8, value)), np.zeros(8))


@pytest.mark.parametrize("advantage", [rloo, grpo])
def test_one_group_at_a_time(advantage):
    with pytest.raises(AssertionError):
        advantage(jnp.zeros((2, 4)))
    groups = jnp.array([[1.0, 0, 0, 1], [0, 0, 0, 1]])
    both = jax.vmap(advantage)(groups)
    np.testing.assert_allclose(both[1], advantage(groups[1]), rtol=1e-6)

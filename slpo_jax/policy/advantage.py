"""Group-relative advantages (paper appendix, reward and advantage). G is at least 2."""

import functools
import math
from collections.abc import Callable
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np

Advantage = Callable[[jax.Array], jax.Array]
"""Rewards float [G] of a group -> advantages [G], without gradient."""


def rloo(rewards_G: jax.Array) -> jax.Array:
    """Leave-one-out advantage: A_i = r_i - mean of the other rewards of the group.

    Args:
        rewards_G: float [G].
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    (group,) = rewards_G.shape
    sum_of_others_G = rewards_G.sum() - rewards_G
    others_G = sum_of_others_G / (group - 1)
    return jax.lax.stop_gradient(rewards_G - others_G)


def grpo(rewards_G: jax.Array) -> jax.Array:
    """Group-normalised advantage: (r_i - mean) / (std + 1e-4), std with Bessel's correction.

    Args:
        rewards_G: float [G].
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    offsets_G = rewards_G - rewards_G.mean()
    std = jnp.std(rewards_G, ddof=1)
    return jax.lax.stop_gradient(offsets_G / (std + 1e-4))


def best_positive(advantages_G: jax.Array, likelihoods_G: jax.Array) -> jax.Array:
    """Keep only the likeliest of a group's positive advantages, the others being 0; without one, keep them all.

    Latent-GRPO does so with the first choices: rollouts of a prompt draw these from one and the same distribution.

    Args:
        advantages_G: float [G].
        likelihoods_G: float [G], finite.
    """
    chex.assert_equal_shape([advantages_G, likelihoods_G])
    positive_G = advantages_G > 0
    candidates_G = jnp.where(positive_G, likelihoods_G, -jnp.inf)
    best = jnp.argmax(candidates_G)
    is_best_G = jnp.arange(advantages_G.size) == best
    kept_G = jnp.where(is_best_G, advantages_G, 0.0)
    return jnp.where(positive_G.any(), kept_G, advantages_G)


def pkpo(rewards_G: jax.Array, k: int) -> jax.Array:
    """Advantages whose policy gradient is that of the expected best of k rollouts; with rewards 0 and 1 that of Pass@k.

    By PKPO's eq. 33 (Walder and Karkhanis, 2025): the gain of a rollout over the best reward of k - 1 others, in the
    mean over all subsets; 0 for the worst ones and where all are equal. So a solved problem is left alone, with sampled
    answers as with greedy ones.

    Args:
        rewards_G: float [G].
        k: 2 <= k <= G.
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    (group,) = rewards_G.shape
    # The share of subsets in which the others' best is the reward of each rank, from the lowest.
    subsets = math.comb(group, k)
    shares_G = [math.comb(rank, k - 2) / subsets for rank in range(group)]
    best_G = np.array(shares_G, np.float32)

    # The gain of each rollout over the reward of each rank.
    ranked_G = jnp.sort(rewards_G)
    gains_GG = jnp.maximum(
        rewards_G[:, None] - ranked_G[None],
        0.0,
    )
    return jax.lax.stop_gradient(
        jnp.sum(
            gains_GG * best_G[None],
            axis=1,
        )
    )


AdvantageName = Literal["rloo", "grpo", "pkpo"]
ADVANTAGES: dict[AdvantageName, Callable[[int], Advantage]] = {
    "rloo": lambda k: rloo,
    "grpo": lambda k: grpo,
    "pkpo": lambda k: functools.partial(pkpo, k=k),
}
"""By name: k -> the advantage. Only PKPO's reads k."""

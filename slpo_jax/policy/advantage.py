"""Group-relative advantages (paper appendix, reward and advantage). G is at least 2.

Of a group, some may be masked: an advantage is then what it would be in the group of the others, and 0 of those.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np

Advantage = Callable[..., jax.Array]
"""(rewards float [G] of a group, bool [G] which of them count; None is all) -> advantages [G], without gradient."""


def rloo(rewards_G: jax.Array, counts_G: jax.Array | None = None) -> jax.Array:
    """Leave-one-out advantage: A_i = r_i - mean of the other rewards of the group.

    Args:
        rewards_G: float [G].
        counts_G: bool [G]; None is all.
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    # The mean of the others that count, of which there may be none.
    if counts_G is not None:
        count = counts_G.sum()
        sum_of_others_G = jnp.sum(rewards_G, where=counts_G) - rewards_G
        others_G = sum_of_others_G / jnp.maximum(count - 1, 1)
        has_advantage_G = counts_G & (count > 1)
        advantages_G = jnp.where(has_advantage_G, rewards_G - others_G, 0.0)
        return jax.lax.stop_gradient(advantages_G)

    (group,) = rewards_G.shape
    sum_of_others_G = rewards_G.sum() - rewards_G
    others_G = sum_of_others_G / (group - 1)
    return jax.lax.stop_gradient(rewards_G - others_G)


def grpo(rewards_G: jax.Array, counts_G: jax.Array | None = None) -> jax.Array:
    """Group-normalised advantage: (r_i - mean) / (std + 1e-4), std with Bessel's correction.

    Args:
        rewards_G: float [G].
        counts_G: bool [G]; None is all.
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    # The moments of those that count, of which there may be none.
    if counts_G is not None:
        count = counts_G.sum()
        mean = jnp.sum(rewards_G, where=counts_G) / jnp.maximum(count, 1)
        offsets_G = jnp.where(counts_G, rewards_G - mean, 0.0)
        variance = jnp.square(offsets_G).sum() / jnp.maximum(count - 1, 1)
        return jax.lax.stop_gradient(offsets_G / (jnp.sqrt(variance) + 1e-4))

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


def pkpo(
    rewards_G: jax.Array, counts_G: jax.Array | None = None, *, k: int
) -> jax.Array:
    """Advantages whose policy gradient is that of the expected best of k rollouts; with rewards 0 and 1 that of Pass@k.

    By PKPO's eq. 33 (Walder and Karkhanis, 2025): the gain of a rollout over the best reward of k - 1 others, in the
    mean over all subsets; 0 for the worst ones and where all are equal. So a solved problem is left alone, with sampled
    answers as with greedy ones.

    Args:
        rewards_G: float [G].
        counts_G: bool [G]; None is all. Of fewer than k no advantage is known: all are 0.
        k: 2 <= k <= G.
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    (group,) = rewards_G.shape
    ranked_G = jnp.sort(rewards_G)
    best_G = jnp.asarray(_best_of_others(group, group, k))

    # Those that don't count rank above all others, where nothing is gained over them.
    if counts_G is not None:
        ranked_G = jnp.sort(jnp.where(counts_G, rewards_G, jnp.inf))
        rows = [_best_of_others(count, group, k) for count in range(group + 1)]
        best_G = jnp.asarray(np.stack(rows))[counts_G.sum()]

    # The gain of each rollout over the reward of each rank.
    gains_GG = jnp.maximum(
        rewards_G[:, None] - ranked_G[None],
        0.0,
    )
    advantages_G = jnp.sum(
        gains_GG * best_G[None],
        axis=1,
    )
    if counts_G is not None:
        advantages_G = jnp.where(counts_G, advantages_G, 0.0)
    return jax.lax.stop_gradient(advantages_G)


def _best_of_others(count: int, group: int, k: int) -> np.ndarray:
    """Return float32 [G]: the share of k of `count` in which the others' best has each rank, from the lowest."""
    shares_G = np.zeros(group, np.float32)
    if count < k:
        return shares_G
    subsets = math.comb(count, k)
    for rank in range(group):
        shares_G[rank] = math.comb(rank, k - 2) / subsets
    return shares_G


AdvantageName = Literal["rloo", "grpo", "pkpo"]
ADVANTAGES: dict[AdvantageName, Callable[[int], Advantage]] = {
    "rloo": lambda k: rloo,
    "grpo": lambda k: grpo,
    "pkpo": lambda k: functools.partial(pkpo, k=k),
}
"""By name: k -> the advantage. Only PKPO's reads k."""

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
from jax import Array

Advantage = Callable[..., Array]
"""(rewards float [G] of a group, bool [G] which of them count; None is all) -> advantages [G], without gradient."""


def _zero_where_equal(
    advantages_G: Array, rewards_G: Array, counts_G: Array | None
) -> Array:
    """Make the advantages of equal rewards exactly 0.

    The mean of equal numbers may differ from them by rounding, and Adam makes full steps of however small a gradient.
    """
    least = jnp.min(rewards_G, where=counts_G, initial=jnp.inf)
    most = jnp.max(rewards_G, where=counts_G, initial=-jnp.inf)
    return jnp.where(least < most, advantages_G, 0.0)


def rloo(rewards_G: Array, counts_G: Array | None = None) -> Array:
    """Leave-one-out advantage: A_i = r_i - mean of the other rewards of the group.

    Args:
        rewards_G: float [G].
        counts_G: bool [G]; None is all.
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    if counts_G is None:
        (group,) = rewards_G.shape
        total = rewards_G.sum()
        others_G = (total - rewards_G) / (group - 1)
        advantages_G = rewards_G - others_G
    else:
        # The mean of the others that count, of which there may be none.
        count = counts_G.sum()
        total = jnp.sum(rewards_G, where=counts_G)
        n_others = jnp.maximum(count - 1, 1)
        others_G = (total - rewards_G) / n_others
        advantages_G = rewards_G - others_G
        has_advantage_G = counts_G & (count > 1)
        advantages_G = jnp.where(has_advantage_G, advantages_G, 0.0)
    advantages_G = _zero_where_equal(advantages_G, rewards_G, counts_G)
    return jax.lax.stop_gradient(advantages_G)


def grpo(rewards_G: Array, counts_G: Array | None = None) -> Array:
    """Group-normalised advantage: (r_i - mean) / (std + 1e-4), std with Bessel's correction.

    Args:
        rewards_G: float [G].
        counts_G: bool [G]; None is all.
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    if counts_G is None:
        mean = rewards_G.mean()
        offsets_G = rewards_G - mean
        std = jnp.std(rewards_G, ddof=1)
    else:
        # The moments of those that count, of which there may be none.
        count = counts_G.sum()
        total = jnp.sum(rewards_G, where=counts_G)
        mean = total / jnp.maximum(count, 1)
        offsets_G = jnp.where(counts_G, rewards_G - mean, 0.0)
        squares_G = jnp.square(offsets_G)
        variance = squares_G.sum() / jnp.maximum(count - 1, 1)
        std = jnp.sqrt(variance)
    advantages_G = offsets_G / (std + 1e-4)
    advantages_G = _zero_where_equal(advantages_G, rewards_G, counts_G)
    return jax.lax.stop_gradient(advantages_G)


def best_positive(advantages_G: Array, likelihoods_G: Array) -> Array:
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
    places_G = jnp.arange(advantages_G.size)
    kept_G = jnp.where(places_G == best, advantages_G, 0.0)
    has_positive = positive_G.any()
    return jnp.where(has_positive, kept_G, advantages_G)


def pkpo(rewards_G: Array, counts_G: Array | None = None, *, k: int) -> Array:
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
    if counts_G is None:
        ranked_G = jnp.sort(rewards_G)
        best_G = jnp.asarray(_best_of_others(group, group, k))
    else:
        # Those that don't count rank above all others, where nothing is gained over them.
        counted_G = jnp.where(counts_G, rewards_G, jnp.inf)
        ranked_G = jnp.sort(counted_G)
        rows: list[np.ndarray] = []
        for count in range(group + 1):
            rows.append(_best_of_others(count, group, k))
        best_NG = jnp.asarray(np.stack(rows))
        best_G = best_NG[counts_G.sum()]

    # The gain of each rollout over the reward of each rank.
    differences_GG = rewards_G[:, None] - ranked_G[None]
    gains_GG = jnp.maximum(differences_GG, 0.0)
    weighted_GG = gains_GG * best_G[None]
    advantages_G = weighted_GG.sum(axis=1)
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
        subsets_below = math.comb(rank, k - 2)
        shares_G[rank] = subsets_below / subsets
    return shares_G


AdvantageName = Literal["rloo", "grpo", "pkpo"]
ADVANTAGES: dict[AdvantageName, Callable[[int], Advantage]] = {
    "rloo": lambda k: rloo,
    "grpo": lambda k: grpo,
    "pkpo": lambda k: functools.partial(pkpo, k=k),
}
"""By name: k -> the advantage. Only PKPO's reads k."""

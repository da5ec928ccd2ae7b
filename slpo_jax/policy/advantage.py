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
    if counts_G is not None:
        count, total = counts_G.sum(), jnp.sum(rewards_G, where=counts_G)
        others_G = (total - rewards_G) / jnp.maximum(count - 1, 1)
        return jax.lax.stop_gradient(jnp.where(counts_G & (count > 1), rewards_G - others_G, 0.0))
    others_G = (rewards_G.sum() - rewards_G) / (rewards_G.shape[0] - 1)
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
    if counts_G is not None:
        count = counts_G.sum()
        away_G = jnp.where(counts_G, rewards_G - jnp.sum(rewards_G, where=counts_G) / jnp.maximum(count, 1), 0.0)
        deviation = jnp.sqrt(jnp.square(away_G).sum() / jnp.maximum(count - 1, 1))
        return jax.lax.stop_gradient(away_G / (deviation + 1e-4))
    return jax.lax.stop_gradient((rewards_G - rewards_G.mean()) / (jnp.std(rewards_G, ddof=1) + 1e-4))


def best_positive(advantages_G: jax.Array, likelihoods_G: jax.Array) -> jax.Array:
    """Of a group with positive advantages only the likeliest of them, the others 0; of one without as they are.

    Latent-GRPO's, of the first choices: rollouts of a prompt draw these from one and the same distribution.

    Args:
        advantages_G: float [G].
        likelihoods_G: float [G], finite.
    """
    chex.assert_equal_shape([advantages_G, likelihoods_G])
    positive_G = advantages_G > 0
    best = jnp.argmax(jnp.where(positive_G, likelihoods_G, -jnp.inf))
    kept_G = jnp.where(jnp.arange(advantages_G.size) == best, advantages_G, 0.0)
    return jnp.where(positive_G.any(), kept_G, advantages_G)


def pkpo(rewards_G: jax.Array, counts_G: jax.Array | None = None, *, k: int) -> jax.Array:
    """Advantages whose policy gradient is that of the expected best of k rollouts, by PKPO's eq. 33
    (Walder and Karkhanis, 2025); with rewards 0 and 1 that of Pass@k.

    What a rollout adds to the best reward of k - 1 others, in the mean over all subsets: 0 for the worst ones and where
    all are equal. So a solved problem is left alone, with sampled answers as with greedy ones.

    Args:
        rewards_G: float [G].
        counts_G: bool [G]; None is all. Of fewer than k no advantage is known: all are 0.
        k: 2 <= k <= G.
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    group = rewards_G.shape[0]
    best_G = np.array([math.comb(j, k - 2) / math.comb(group, k) for j in range(group)], np.float32)  # of k - 1 others
    if counts_G is not None:
        table = np.zeros((group + 1, group), np.float32)  # the same by how many count
        for count in range(k, group + 1):
            table[count] = [math.comb(j, k - 2) / math.comb(count, k) for j in range(group)]
        counted_G = jnp.asarray(table)[counts_G.sum()]
        above_GG = jnp.maximum(rewards_G[:, None] - jnp.sort(jnp.where(counts_G, rewards_G, jnp.inf))[None], 0.0)
        return jax.lax.stop_gradient(jnp.where(counts_G, jnp.sum(above_GG * counted_G[None], axis=1), 0.0))
    added_GG = jnp.maximum(rewards_G[:, None] - jnp.sort(rewards_G)[None], 0.0)
    return jax.lax.stop_gradient(jnp.sum(added_GG * best_G[None], axis=1))


AdvantageName = Literal["rloo", "grpo", "pkpo"]
ADVANTAGES: dict[AdvantageName, Callable[[int], Advantage]] = {
    "rloo": lambda k: rloo,
    "grpo": lambda k: grpo,
    "pkpo": lambda k: functools.partial(pkpo, k=k),
}
"""By name, how an advantage is made of k, which only PKPO's read."""

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
    others_G = (rewards_G.sum() - rewards_G) / (rewards_G.shape[0] - 1)
    return jax.lax.stop_gradient(rewards_G - others_G)


def grpo(rewards_G: jax.Array) -> jax.Array:
    """Group-normalised advantage: (r_i - mean) / (std + 1e-4), std with Bessel's correction.

    Args:
        rewards_G: float [G].
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
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


def subset_worth(rewards_G: jax.Array, k: int) -> jax.Array:
    """Of each rollout: the sum over the subsets of k rollouts that it is in of their best reward, by number of subsets.

    The sum over i of worth_i grad log pi is an unbiased estimate of the gradient of the expected best of k, with
    rewards 0 and 1 that of Pass@k (PKPO, Walder and Karkhanis, 2025), so the mean over i, which the loss has, is one of
    1/G of it.

    Args:
        rewards_G: float [G].
        k: 1 <= k <= G.
    """
    chex.assert_rank(rewards_G, 1)
    group, order_G = rewards_G.shape[0], jnp.argsort(rewards_G)
    best_G = np.array([math.comb(j, k - 1) / math.comb(group, k) for j in range(group)])  # the j-th from below is best
    with_GG = np.triu(np.tile(np.diff(best_G, prepend=0), (group, 1)), 1) + np.diag(best_G)  # and i is in it too
    worth_G = jnp.sum(with_GG.astype(np.float32) * rewards_G[order_G][None], axis=1)
    return jnp.zeros_like(worth_G).at[order_G].set(worth_G)


def pkpo(rewards_G: jax.Array, k: int) -> jax.Array:
    """Advantages whose policy gradient is that of the expected best of k rollouts, by PKPO's eq. 33.

    What a rollout adds to the best reward of k - 1 others, in the mean over all subsets: 0 for the worst ones and where
    all are equal. So a solved problem is left alone, with sampled answers as with greedy ones.

    Args:
        rewards_G: float [G].
        k: 2 <= k <= G.
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    group = rewards_G.shape[0]
    best_G = np.array([math.comb(j, k - 2) / math.comb(group, k) for j in range(group)], np.float32)  # of k - 1 others
    added_GG = jnp.maximum(rewards_G[:, None] - jnp.sort(rewards_G)[None], 0.0)
    return jax.lax.stop_gradient(jnp.sum(added_GG * best_G[None], axis=1))


def pkpo_sloo(rewards_G: jax.Array, k: int) -> jax.Array:
    """The same gradient with PKPO's baseline of eq. 29, what a rollout of the others is worth when i is left out.

    That is of fewer rollouts: where all have the reward r, each has -r k / (G (G - 1)). Only in the mean over sampled
    answers does that cancel; greedy ones are pushed down on every problem that is solved.

    Args:
        rewards_G: float [G].
        k: 1 <= k < G.
    Returns:
        [G], without gradient.
    """
    group, worth_G = rewards_G.shape[0], subset_worth(rewards_G, k)
    baseline_G = group / ((group - 1) * (group - k)) * (worth_G.sum() - k * worth_G)
    return jax.lax.stop_gradient(worth_G - baseline_G)


AdvantageName = Literal["rloo", "grpo", "pkpo", "pkpo_sloo"]
ADVANTAGES: dict[AdvantageName, Callable[[int], Advantage]] = {
    "rloo": lambda k: rloo,
    "grpo": lambda k: grpo,
    "pkpo": lambda k: functools.partial(pkpo, k=k),
    "pkpo_sloo": lambda k: functools.partial(pkpo_sloo, k=k),
}
"""By name, how an advantage is made of k, which only PKPO's read."""

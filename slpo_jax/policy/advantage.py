"""Group-relative advantages (paper appendix, reward and advantage). G is at least 2."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import chex
import jax
import jax.numpy as jnp

from slpo_jax.policy.subsets import solved_share

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
    """Of each rollout: the share, of all subsets of k rollouts, of those that it is in and that hold a right one.

    That is k/G of a right rollout and k/G rho(G - 1, c, k - 1) of a wrong one, with c right. The sum over i of
    worth_i grad log pi is an unbiased estimate of the gradient of Pass@k (PKPO, Walder and Karkhanis, 2025), so the
    mean over i, which the loss has, is one of 1/G of it.

    Args:
        rewards_G: float [G], of zeros and ones.
        k: 1 <= k <= G.
    """
    chex.assert_rank(rewards_G, 1)
    group = rewards_G.shape[0]
    return k / group * jnp.where(rewards_G > 0, 1.0, solved_share(group - 1, rewards_G.sum(), k - 1))


def pkpo(rewards_G: jax.Array, k: int) -> jax.Array:
    """Advantages whose policy gradient is that of Pass@k, by PKPO's eq. 33, rewards 0 or 1.

    A rollout's worth (`subset_worth`) less k/G rho(G - 1, c - r_i, k - 1), the worth that the others leave to a wrong
    one: 0 for a wrong rollout and, with k above 1, where all are right. So a solved problem is left alone, with sampled
    answers as with greedy ones. With k = 1 there is no baseline, and a right rollout has 1/G.

    Args:
        rewards_G: float [G], of zeros and ones.
        k: 1 <= k <= G.
    Returns:
        [G], without gradient.
    """
    group = rewards_G.shape[0]
    baseline_G = k / group * solved_share(group - 1, rewards_G.sum() - rewards_G, k - 1)
    return jax.lax.stop_gradient(subset_worth(rewards_G, k) - baseline_G)


def pkpo_sloo(rewards_G: jax.Array, k: int) -> jax.Array:
    """The same gradient with PKPO's baseline of eq. 29, what a rollout of the others is worth when i is left out.

    That is k/(G - 1) rho(G - 1, c - r_i, k), of fewer rollouts: where all are right, each has -k / (G (G - 1)). Only in
    the mean over sampled answers does that cancel; greedy ones are pushed down on every problem that is solved.

    Args:
        rewards_G: float [G], of zeros and ones.
        k: 1 <= k < G.
    Returns:
        [G], without gradient.
    """
    group = rewards_G.shape[0]
    baseline_G = k / (group - 1) * solved_share(group - 1, rewards_G.sum() - rewards_G, k)
    return jax.lax.stop_gradient(subset_worth(rewards_G, k) - baseline_G)


ADVANTAGES: dict[str, Callable[[int], Advantage]] = {
    "rloo": lambda k: rloo,
    "grpo": lambda k: grpo,
    "pkpo": lambda k: functools.partial(pkpo, k=k),
    "pkpo_sloo": lambda k: functools.partial(pkpo_sloo, k=k),
}
"""By name, how an advantage is made of k, which only PKPO's read."""
if TYPE_CHECKING:
    AdvantageName = str
else:
    AdvantageName = Literal[*ADVANTAGES]

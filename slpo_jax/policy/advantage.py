"""Group-relative advantages (paper appendix, reward and advantage). G is at least 2."""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

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


def solved_share(n: int, right: jax.Array, k: int) -> jax.Array:
    """rho(n, c, k) = 1 - C(n - c, k) / C(n, k): the share of the subsets of k of n that hold one of the c right.

    Args:
        n, k: 0 <= k <= n; an empty subset holds none.
        right: c, [..].
    """
    missed = jnp.ones_like(right, jnp.float32)
    for j in range(k):
        missed = missed * jnp.maximum(n - right - j, 0) / (n - j)
    return 1.0 - missed


def pkpo(rewards_G: jax.Array, k: int) -> jax.Array:
    """Advantages whose policy gradient is that of Pass@k (PKPO, Walder and Karkhanis, 2025), rewards 0 or 1.

    A rollout is worth the share, of all subsets of k rollouts, of those that it is in and that hold a right one: k/G if
    it is right, else k/G * rho(G - 1, c, k - 1). Its baseline is what a rollout of the others is worth in the mean when
    it is left out: k/(G - 1) * rho(G - 1, c - r_i, k). The sum over i of A_i grad log pi is an unbiased estimate of the
    gradient of Pass@k, so the mean over i, which the loss has, is one of 1/G of it. Where all are right no advantage is
    0, but -k / (G (G - 1)), as the baseline is of fewer rollouts.

    Args:
        rewards_G: float [G], of zeros and ones.
        k: 1 <= k < G.
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    group = rewards_G.shape[0]
    right = rewards_G.sum()
    worth_G = k / group * jnp.where(rewards_G > 0, 1.0, solved_share(group - 1, right, k - 1))
    baseline_G = k / (group - 1) * solved_share(group - 1, right - rewards_G, k)
    return jax.lax.stop_gradient(worth_G - baseline_G)


ADVANTAGES: dict[str, Callable[[int], Advantage]] = {
    "rloo": lambda k: rloo,
    "grpo": lambda k: grpo,
    "pkpo": lambda k: functools.partial(pkpo, k=k),
}
"""By name, how an advantage is made of k, which only "pkpo" reads."""

"""Additive Gaussian noise: its draws, and the latent policy of any mean."""

from collections.abc import Callable

import jax

from slpo_jax.models.gate import Gate
from slpo_jax.policy.latent_policies.latent_policy import LatentPolicy, Params
from slpo_jax.policy.surrogate import gaussian_log_prob


def standard_normal(keys_BL: jax.Array, like_BLD: jax.Array) -> jax.Array:
    """[B, L, D] of the type of `like_BLD`, a key a position."""
    draw = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, like_BLD.shape[-1:], like_BLD.dtype)))
    return draw(keys_BL)


def gaussian_latent_policy(
    mean: Callable[[Params, jax.Array], jax.Array], sigma: Callable[[Params], float | jax.Array], gate: Gate
) -> LatentPolicy:
    """mean + sigma n, n standard normal: the action is the noisy input, which the gate sees too.

    Args:
        mean: (params, hidden [B, L, D]) -> [B, L, D].
        sigma: params -> standard deviation of each coordinate.
    """

    def draw(params, hidden_BLD, keys_BL=None):
        mean_BLD = mean(params, hidden_BLD)
        if keys_BL is None:
            return mean_BLD
        return mean_BLD + (sigma(params) * standard_normal(keys_BL, mean_BLD)).astype(mean_BLD.dtype)

    def log_prob(params, hidden_BLD, x_BLD):
        return gaussian_log_prob(x_BLD, mean(params, hidden_BLD), sigma(params) ** 2)

    return LatentPolicy.seen_as_fed(gate, draw, log_prob=log_prob)

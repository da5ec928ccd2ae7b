"""Additive Gaussian noise: its draws, its density, and the thinker of any mean."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from slpo_jax.models.gate import Gate
from slpo_jax.policy.thinkers.thinker import Params, Thinker


def standard_normal(keys_BL: jax.Array, like_BLD: jax.Array) -> jax.Array:
    """[B, L, D] of the type of `like_BLD`, a key a position."""
    draw = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, like_BLD.shape[-1:], like_BLD.dtype)))
    return draw(keys_BL)


def gaussian_log_prob(x_BLD: jax.Array, mean_BLD: jax.Array, sigma: float | jax.Array) -> jax.Array:
    """log N(x; mean, sigma^2 I), summed over D: float32 [B, L]."""
    away_BLD = (x_BLD - mean_BLD).astype(jnp.float32)
    log: Callable[..., Any] = math.log if isinstance(sigma, float) else jnp.log
    constant = away_BLD.shape[-1] * log(2 * math.pi * sigma**2)
    return -0.5 * (constant + jnp.sum(jnp.square(away_BLD), axis=-1) / sigma**2)


def gaussian_thinker(
    mean: Callable[[Params, jax.Array], jax.Array], sigma: Callable[[Params], float | jax.Array], gate: Gate
) -> Thinker:
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

    return Thinker(
        init=lambda key: {},
        draw=draw,
        feed=lambda params, inputs_BLD: inputs_BLD,
        stop_logits=lambda params, inputs_BLD, dropout=None: gate.logits(params, inputs_BLD, dropout),
        log_prob=lambda params, hidden_BLD, x_BLD: gaussian_log_prob(x_BLD, mean(params, hidden_BLD), sigma(params)),
    )

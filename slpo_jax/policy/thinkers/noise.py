"""Additive Gaussian noise: its draws and its density."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


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

"""The surrogate policy: a Gaussian fitted to K stochastic passes over a realised trajectory (paper section 4.2)."""

import math
from collections.abc import Callable
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp

EPSILON = 1e-6


def moments(z_KD: jax.Array, epsilon: float = EPSILON) -> tuple[jax.Array, jax.Array]:
    """Mean and floored isotropic variance of K samples of one transition (paper section 4.2).

    mu = 1/K sum_k z^(k);  sigma^2 = 1/(K D) sum_k ||z^(k) - mu||^2 + epsilon.

    Args:
        z_KD: [K, D].
    Returns:
        mu float32 [D], sigma^2 float32 scalar.
    """
    chex.assert_rank(z_KD, 2)
    z_KD = z_KD.astype(jnp.float32)
    # Around the first sample: equal samples then have no variance at all, whatever their size and number.
    offsets_KD = z_KD - z_KD[:1]
    offset_D = offsets_KD.mean(axis=0)
    return z_KD[0] + offset_D, jnp.mean(jnp.square(offsets_KD - offset_D[None])) + epsilon


def gaussian_log_prob(h_D: jax.Array, mu_D: jax.Array, variance: float | jax.Array) -> jax.Array:
    """log N(h; mu, variance * I), summed over D (paper section 4.2).

    Args:
        h_D, mu_D: [.., D].
        variance: scalar.
    Returns:
        float32 [..]: -D/2 log(2 pi variance) - ||h - mu||^2 / (2 variance).
    """
    chex.assert_equal_shape([h_D, mu_D])
    log: Callable[..., Any] = math.log if isinstance(variance, float) else jnp.log
    away_D = (h_D - mu_D).astype(jnp.float32)
    constant = -0.5 * away_D.shape[-1] * log(2 * math.pi * variance)
    return constant - jnp.sum(jnp.square(away_D), axis=-1) / (2 * variance)


def latent_log_likelihood(
    h_TD,
    z_KTD,
    length,
    epsilon: float = EPSILON,
    reduction: Literal["sum", "mean"] = "sum",
    detach_variance: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Sum over t <= tau of log pi~(h_t | x, h_<t) for one trajectory (paper section 4.2).

    Args:
        h_TD: realised latents, taken as constants.
        z_KTD: the K passes' latents.
        length: tau.
        epsilon: floor of the variance.
        reduction: over D, "sum" as printed in the paper or "mean".
        detach_variance: keep the gradient from the variance path (Prop. 1's setting).
    Returns:
        the log-likelihood, and the mean of sigma^2 over t <= tau; 0 and 0 of no step.
    """
    h_TD = jax.lax.stop_gradient(h_TD)
    mu_TD, variance_T = jax.vmap(moments, in_axes=(1, None))(z_KTD, epsilon)
    scored_T = jax.lax.stop_gradient(variance_T) if detach_variance else variance_T
    log_probs_T = jax.vmap(gaussian_log_prob)(h_TD, mu_TD, scored_T)
    if reduction == "mean":
        log_probs_T = log_probs_T / h_TD.shape[-1]
    seen_T = jnp.arange(1, h_TD.shape[0] + 1) <= length
    return jnp.sum(log_probs_T, where=seen_T), jnp.sum(variance_T, where=seen_T) / jnp.maximum(seen_T.sum(), 1)

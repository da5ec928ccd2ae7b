"""The surrogate policy: K stochastic passes over realised trajectories, and a Gaussian (paper section 4.2)."""

import math

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
    offsets_KD = z_KD - z_KD[0]
    offset_D = offsets_KD.mean(axis=0)
    return z_KD[0] + offset_D, jnp.mean(jnp.square(offsets_KD - offset_D)) + epsilon


def gaussian_log_prob(h_D: jax.Array, mu_D: jax.Array, variance: jax.Array) -> jax.Array:
    """log N(h; mu, variance * I), summed over D (paper section 4.2).

    Args:
        h_D, mu_D: [D].
        variance: scalar.
    Returns:
        float32 scalar: -D/2 log(2 pi variance) - ||h - mu||^2 / (2 variance).
    """
    chex.assert_equal_shape([h_D, mu_D])
    h_D = h_D.astype(jnp.float32)
    width = h_D.shape[-1]
    return -0.5 * width * jnp.log(2 * math.pi * variance) - jnp.sum(jnp.square(h_D - mu_D)) / (2 * variance)

"""The SLPO objective (paper section 4.2, Prop. 2; SPEC section 2.5)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.gate import first_stop_log_probs
from slpo_jax.policy.surrogate import EPSILON, gaussian_log_prob, moments


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """What the score of a trajectory is made of.

    Attributes:
        latent_reduction: over D, "sum" as printed in the paper or "mean".
        latent_weight, answer_weight, stop_weight: factors of the three terms; 0 leaves one out.
        detach_variance: keep the gradient from the variance path (Prop. 1's setting).
        forced_stop: the law of a stop at T; True is the law that made the samples.
        epsilon: floor of the variance.
    """

    latent_reduction: Literal["sum", "mean"] = "sum"
    latent_weight: float = 1.0
    answer_weight: float = 1.0
    stop_weight: float = 1.0
    detach_variance: bool = False
    forced_stop: bool = True
    epsilon: float = EPSILON


@struct.dataclass
class ScoreTerms:
    """The three log-likelihoods of each trajectory and the mean surrogate variance over its steps, float32 [N]."""

    latent: jax.Array
    answer: jax.Array
    stop: jax.Array
    variance: jax.Array


def latent_log_likelihood(h_TD, z_KTD, length, config: ObjectiveConfig) -> tuple[jax.Array, jax.Array]:
    """Sum over t <= tau of log pi~(h_t | x, h_<t) for one trajectory (paper section 4.2).

    Args:
        h_TD: realised latents, taken as constants.
        z_KTD: the K passes' latents.
        length: tau.
    Returns:
        the log-likelihood, and the mean of sigma^2 over t <= tau.
    """
    h_TD = jax.lax.stop_gradient(h_TD)
    mu_TD, variance_T = jax.vmap(moments, in_axes=(1, None))(z_KTD, config.epsilon)
    scored_T = jax.lax.stop_gradient(variance_T) if config.detach_variance else variance_T
    log_probs_T = jax.vmap(gaussian_log_prob)(h_TD, mu_TD, scored_T)
    if config.latent_reduction == "mean":
        log_probs_T = log_probs_T / h_TD.shape[-1]
    seen_T = jnp.arange(1, h_TD.shape[0] + 1) <= length
    return jnp.sum(log_probs_T, where=seen_T), jnp.mean(variance_T, where=seen_T)


def stop_log_likelihood(gate_logits_T, length, forced: bool) -> jax.Array:
    """log P(tau = length) of one trajectory under the gate's logits (paper section 4.1)."""
    return first_stop_log_probs(gate_logits_T, forced)[length - 1]


def trajectory_scores(
    h_NTD, z_KNTD, lengths_N, answer_log_prob_N, gate_logits_NT, config: ObjectiveConfig
) -> ScoreTerms:
    """The terms of l~(xi | x) for N trajectories; arguments as in the functions above."""
    latent_N, variance_N = jax.vmap(latent_log_likelihood, in_axes=(0, 1, 0, None))(h_NTD, z_KNTD, lengths_N, config)
    stop_N = jax.vmap(stop_log_likelihood, in_axes=(0, 0, None))(gate_logits_NT, lengths_N, config.forced_stop)
    return ScoreTerms(latent_N, answer_log_prob_N, stop_N, variance_N)


def surrogate_loss(terms: ScoreTerms, advantages_BG: jax.Array, config: ObjectiveConfig) -> jax.Array:
    """Sum over prompts of -1/G sum_i A_i l~(xi_i | x) (paper Prop. 2); the caller divides by the number of prompts.

    Args:
        terms: of N = B*G trajectories.
        advantages_BG: stop-gradient advantages.
    Returns:
        float32 scalar.
    """
    parts = (
        (config.latent_weight, terms.latent),
        (config.answer_weight, terms.answer),
        (config.stop_weight, terms.stop),
    )
    # A term that is off is left out of the graph, so that it costs no backward pass and can spread no NaN.
    total_N = sum(weight * term for weight, term in parts if weight != 0.0)
    group = advantages_BG.shape[1]
    return -jnp.sum(advantages_BG.reshape(-1) * total_N) / group

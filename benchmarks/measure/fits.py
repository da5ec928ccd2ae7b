"""Other Gaussians than the paper's, fitted to K passes over realised thoughts: could one of them mend its latent term?

Each gives the log-likelihood of the step from what a pass would have drawn to what was drawn, up to what has no
gradient: its covariance is a constant, so that the gradient runs through the mean alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from slpo_jax.policy.advantage import rloo
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import repeat_rows
from slpo_jax.policy.score import PassKeys, pass_keys, score, used_slots
from slpo_jax.policy.surrogate import EPSILON
from slpo_jax.training.objectives.objective import policy_gradient_loss

PASSES = 4
Fit = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(residuals h - mu [N, T, D], constant deviations of the passes from mu [K, N, T, D], fed [N, T]) -> [N, T]."""


def isotropic(residual_NTD: jax.Array, spread_KNTD: jax.Array, fed_NT: jax.Array) -> jax.Array:
    """One variance a step, the paper's."""
    variance_NT = jnp.mean(jnp.square(spread_KNTD), axis=(0, 3)) + EPSILON
    return -jnp.sum(jnp.square(residual_NTD), axis=-1) / (2 * variance_NT)


def per_dimension(residual_NTD: jax.Array, spread_KNTD: jax.Array, fed_NT: jax.Array) -> jax.Array:
    """A variance of each coordinate of each step, of K - 1 degrees of freedom."""
    variance_NTD = jnp.sum(jnp.square(spread_KNTD), axis=0) / (len(spread_KNTD) - 1) + EPSILON
    return -jnp.sum(jnp.square(residual_NTD) / variance_NTD, axis=-1) / 2


def leading(count: int | None) -> Fit:
    """The covariance of all of the batch's steps together, along its first axes alone.

    Args:
        count: of axes, those of most variance first; None is all of them: whitening.
    """

    def fit(residual_NTD: jax.Array, spread_KNTD: jax.Array, fed_NT: jax.Array) -> jax.Array:
        fed_KNTD = jnp.where(fed_NT[None, :, :, None], spread_KNTD, 0.0)
        freedom = (len(spread_KNTD) - 1) * jnp.sum(fed_NT)
        variances_D, axes_DD = jnp.linalg.eigh(jnp.einsum("kntd,knte->de", fed_KNTD, fed_KNTD) / freedom)
        kept = slice(None) if count is None else slice(-count, None)
        along = residual_NTD @ axes_DD[:, kept]
        return -jnp.sum(jnp.square(along) / (jnp.maximum(variances_D[kept], 0.0) + EPSILON)[None, None], axis=-1) / 2

    return fit


def fitted(fit: Fit, own_prompts: bool = False) -> Callable[[Policy, Any, Any], Any]:
    """The gradient of SLPO's latent term under another Gaussian, of `PASSES` passes.

    Args:
        own_prompts: each pass keeps the masks that a rollout's own prompt had, instead of fresh ones that a prompt's
            rollouts share.
    Returns:
        (policy, params, drawn rollouts) -> gradient, of `benchmarks.gradients`.
    """

    def gradient(policy: Policy, params, drawn):
        trajectories, group = drawn.trajectories, drawn.rewards.shape[1]
        keys_K = pass_keys(jax.random.fold_in(drawn.key, 1), drawn.batch.index, group, PASSES)
        prompts, fed_NT = drawn.batch.prompts, used_slots(policy, trajectories)[0]
        if own_prompts:
            prompts = repeat_rows(prompts, group)
            own_KN = jnp.broadcast_to(trajectories.keys, keys_K.trajectories.shape)
            keys_K = PassKeys(own_KN, keys_K.trajectories)

        def loss(params):
            def drawn_again(keys):
                return policy.thinker.feed(params, score(policy, params, prompts, trajectories, keys).actions)

            h_NTD = jax.lax.stop_gradient(policy.thinker.feed(params, trajectories.actions))
            z_KNTD = jax.vmap(drawn_again)(keys_K)
            mean_NTD = z_KNTD.mean(axis=0)
            spread_KNTD = jax.lax.stop_gradient(z_KNTD - mean_NTD[None])
            # What no pass moves, the first latent under its own prompt's masks, was no choice either.
            moved_NT = fed_NT & (jnp.mean(jnp.square(spread_KNTD), axis=(0, 3)) > EPSILON)
            latent_N = jnp.sum(fit(h_NTD - mean_NTD, spread_KNTD, fed_NT), axis=1, where=moved_NT)
            return policy_gradient_loss(((1.0, latent_N),), jax.vmap(rloo)(drawn.rewards))

        return jax.grad(loss)(params)

    return gradient


FITTED = {
    "own prompt masks": fitted(isotropic, own_prompts=True),
    "a variance per dimension": fitted(per_dimension),
    "pooled covariance": fitted(leading(None)),
    "its first 4 axes": fitted(leading(4)),
    "its first axis": fitted(leading(1)),
}
"""By what is changed of the paper's."""

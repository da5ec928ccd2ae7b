"""How sure the gate is of where a thought stops."""

import jax
import jax.numpy as jnp

from slpo_jax.models.gate import first_stop_log_probs


def stop_log_prob(policy, params, prompts, trajectories):
    """log P(tau), of the gate's distribution of the first stop, in which a thought of T latents has to stop; [N]."""
    logits_NT = policy.latent_policy.stop_logits(params, trajectories.actions)
    log_probs_NT = jax.vmap(lambda logits_T: first_stop_log_probs(logits_T, forced=True))(logits_NT)
    return jnp.take_along_axis(log_probs_NT, jnp.maximum(trajectories.lengths[:, None] - 1, 0), axis=1)[:, 0]

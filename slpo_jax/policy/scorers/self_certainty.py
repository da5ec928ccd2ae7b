"""Self-certainty (Kang et al., 2025, arXiv 2502.18581): how far an answer's distributions are from uniform."""

import math

import jax
import jax.numpy as jnp

from slpo_jax.policy.score import score, used_slots


def self_certainty(policy, params, prompts, trajectories):
    """The mean of KL(uniform || p) over the answer's tokens, p without noise after its own thought.

    Returns:
        float32 [N], 0 or more; 0 for an answer without tokens.
    """
    spoken_NA = used_slots(policy, trajectories)[1]
    hidden_NAD = score(policy, params, prompts, trajectories, None).hidden

    def divergence(hidden_ND):  # of one slot at a time: the logits of all would take much memory
        log_probs_NV = jax.nn.log_softmax(policy.reasoner.logits(params, hidden_ND[:, None])[:, 0])
        return -math.log(log_probs_NV.shape[1]) - log_probs_NV.mean(axis=1)

    found_NA = jax.lax.map(divergence, hidden_NAD.swapaxes(0, 1)).T
    return jnp.sum(found_NA, axis=1, where=spoken_NA) / jnp.maximum(spoken_NA.sum(axis=1), 1)

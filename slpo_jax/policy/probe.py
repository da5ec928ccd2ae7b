"""What can be seen of a deterministic thought: when it would stop, and the tokens that its latents are nearest to."""

from typing import Any

import jax
import jax.numpy as jnp

from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import Prompts

NEAREST = 5  # tokens of a latent


def probe(
    policy: Policy, params: Any, prompts: Prompts, actions: Any, lengths_N: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Look at rollouts that were made without noise, one of each prompt.

    The hidden states that made the latents come out of one pass over prompt and latents: h_t is the transition of the
    state one position before it.

    Args:
        policy: without noise.
        params: all parts.
        prompts: of N rows.
        actions, lengths_N: of `rollout.sample`.

    Returns:
        rho_t [N, T], and the probabilities and ids [N, T, K] of the most probable tokens; from tau on they mean
        nothing.
    """
    reasoner, latents_NTD = policy.reasoner, policy.latent_policy.feed(params, actions)
    steps = latents_NTD.shape[1]
    inputs_NLD = jnp.concatenate([reasoner.embed(params, prompts.tokens), latents_NTD], axis=1)
    valid_NL = jnp.concatenate([prompts.valid, jnp.arange(steps)[None] < lengths_N[:, None]], axis=1)
    hidden_NLD, _ = reasoner.forward(params, inputs_NLD, jnp.cumsum(valid_NL, axis=1) - 1, valid_NL)
    logits_NTV = reasoner.logits(params, hidden_NLD[:, -steps - 1 : -1])
    probability_NTK, token_NTK = jax.lax.top_k(jax.nn.softmax(logits_NTV), NEAREST)
    return jax.nn.sigmoid(policy.latent_policy.stop_logits(params, actions)), probability_NTK, token_NTK

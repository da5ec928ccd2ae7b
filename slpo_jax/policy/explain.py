"""What can be seen of thoughts: when they would stop, what latents are near to, and what SIM-CoT's decoder says.

That decoder (Wei et al., 2025) says latents in words, where it was kept.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.models.attention import KVCache
from slpo_jax.models.parts import DECODER
from slpo_jax.models.reasoner import (
    BackboneConfig,
    LatentReasoner,
    Reasoner,
    as_functions,
    backbone,
    vocabulary_rows,
)
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import Prompts
from slpo_jax.rewards.ending import is_end

READS = "reads"
"""In a kept model's part, int [2]: the latents of one thought, and the position of the first of them."""
MOST = 64  # tokens of a thought's text
NEAREST = 5  # tokens of a latent

Reads = tuple[int, int]
"""`READS`, known to a program that is compiled."""


@struct.dataclass
class _Words:
    """The loop's state before a token is fed."""

    slot: jax.Array
    token_R: jax.Array
    ended_R: jax.Array
    tokens_RL: jax.Array
    cache: KVCache


def decoder_of(config: BackboneConfig, params: Any) -> Reasoner:
    """The functions of the decoder; its vocabulary need not be the reasoner's.

    Args:
        config: the reasoner's shapes.
        params: all parts.
    """
    rows = vocabulary_rows(params[DECODER]["backbone"])
    return as_functions(LatentReasoner(backbone(dataclasses.replace(config, vocab_size=rows))))


def reads_of(params: Any) -> Reads | None:
    """How a kept model reads; None where none was kept."""
    if READS not in params.get(DECODER, {}):
        return None
    latents, first = np.asarray(params[DECODER][READS]).tolist()
    return latents, first


def explain(policy: Policy, params: Any, latents_NTD: jax.Array, reads: Reads) -> jax.Array:
    """What the decoder writes of each thought, its likeliest token at every place.

    Args:
        params: all parts.
        latents_NTD: as they were fed.
        reads: of these parameters.
    Returns:
        int32 [N, S, L], of S = T // `latents` thoughts, texts up to and including eos, then pad; those of a thought
        after the last latent mean nothing.
    """
    (count, first), (rows, steps, width) = reads, latents_NTD.shape
    thoughts, config = steps // count, policy.config
    model, own = decoder_of(policy.reasoner.config, params), params[DECODER]
    slots = min(MOST, model.config.n_positions - first - count)
    z_RCD = latents_NTD[:, : thoughts * count].reshape(rows * thoughts, count, width)

    def read(inputs_RLD, start, cache):
        places_L = start + jnp.arange(inputs_RLD.shape[1])
        valid_RL = jnp.ones(inputs_RLD.shape[:2], bool)
        positions_RL = jnp.broadcast_to(first + places_L, valid_RL.shape)
        hidden_RLD, cache = model.forward(own, inputs_RLD, positions_RL, valid_RL, cache=cache, start=start)
        return jnp.argmax(model.logits(own, hidden_RLD[:, -1:])[:, 0], axis=-1).astype(jnp.int32), cache

    def body(state: _Words) -> _Words:
        token_R = jnp.where(state.ended_R, config.pad_id, state.token_R)
        tokens_RL = jax.lax.dynamic_update_slice_in_dim(state.tokens_RL, token_R[:, None], state.slot, axis=1)
        ended_R = state.ended_R | is_end(token_R, config.eos_ids)
        word_R1D = policy.reasoner.embed(params, token_R[:, None]).astype(z_RCD.dtype)
        token_R, cache = read(word_R1D, count + state.slot, state.cache)
        return _Words(state.slot + 1, token_R, ended_R, tokens_RL, cache)

    token_R, cache = read(z_RCD, 0, model.empty_cache(rows * thoughts, count + slots))
    tokens_RL = jnp.full((rows * thoughts, slots), config.pad_id, jnp.int32)
    state = _Words(jnp.int32(0), token_R, jnp.zeros(rows * thoughts, bool), tokens_RL, cache)
    state = jax.lax.while_loop(lambda state: (state.slot < slots) & ~state.ended_R.all(), body, state)
    return state.tokens_RL.reshape(rows, thoughts, slots)


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

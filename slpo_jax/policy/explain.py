"""Readings of thoughts: when they would stop, what latents are near to, and what SIM-CoT's decoder says.

That decoder (Wei et al., 2025) says latents in words, where it was kept.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.models.parts import DECODER
from slpo_jax.models.reasoner import (
    BackboneConfig,
    LatentReasoner,
    Reasoner,
    as_functions,
    backbone,
    vocabulary_rows,
)
from slpo_jax.policy.decoding import cache_sizes, decode_answers
from slpo_jax.policy.policy import Policy, Prompts

READS = "reads"
"""In a kept model's part, int [2]: the latents of one thought, and the position of the first of them."""
MOST = 64  # tokens of a thought's text
NEAREST = 5  # tokens of a latent

Reads = tuple[int, int]
"""`READS`, known to a program that is compiled."""


def decoder_of(config: BackboneConfig, params: Any) -> Reasoner:
    """Return the decoder `in_tree`; its vocabulary need not be the reasoner's.

    Args:
        config: the reasoner's shapes.
        params: all parts.
    """
    rows = vocabulary_rows(params[DECODER]["backbone"])
    return as_functions(
        LatentReasoner(backbone(dataclasses.replace(config, vocab_size=rows)))
    ).in_tree(DECODER)


def reads_of(params: Any) -> Reads | None:
    """Return how a kept decoder reads; None where none was kept."""
    if READS not in params.get(DECODER, {}):
        return None
    latents, first = np.asarray(params[DECODER][READS]).tolist()
    return latents, first


def explain(
    policy: Policy, params: Any, latents_NTD: jax.Array, reads: Reads
) -> jax.Array:
    """Decode each thought, the likeliest token at every place, in the reasoner's embeddings.

    Args:
        params: all parts.
        latents_NTD: as they were fed.
        reads: of these parameters.
    Returns:
        int32 [N, S, L], of S = T // `latents` thoughts, texts up to and including eos, then pad; those of a thought
        after the last latent mean nothing.
    """
    (count, first) = reads
    (rows, steps, width) = latents_NTD.shape
    thoughts = steps // count
    decoder = decoder_of(policy.reasoner.config, params)
    slots = min(MOST, decoder.config.n_positions - first - count)
    z_RCD = latents_NTD[:, : thoughts * count].reshape(rows * thoughts, count, width)
    places_RC = jnp.broadcast_to(first + jnp.arange(count), z_RCD.shape[:2])
    cache = decoder.empty_cache(rows * thoughts, count + cache_sizes(slots)[0])
    hidden_RCD, cache = decoder.forward(
        params, z_RCD, places_RC, jnp.ones(places_RC.shape, bool), cache=cache
    )
    speaker = dataclasses.replace(
        policy.without_noise().having(
            closing_ids=(), banned_ids=(), answer_slots=slots
        ),
        reasoner=dataclasses.replace(decoder, embed=policy.reasoner.embed),
    )
    before_R = places_RC[:, -1] + 1
    unused_R = jnp.broadcast_to(jax.random.key(0), rows * thoughts)
    tokens_RL = decode_answers(
        speaker,
        params,
        None,
        cache,
        count,
        before_R,
        unused_R,
        hidden_ND=hidden_RCD[:, -1],
    )
    return tokens_RL.reshape(rows, thoughts, slots)


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
    reasoner = policy.reasoner
    latents_NTD = policy.latent_policy.feed(params, actions)
    steps = latents_NTD.shape[1]
    inputs_NLD = jnp.concatenate(
        [reasoner.embed(params, prompts.tokens), latents_NTD], axis=1
    )
    valid_NL = jnp.concatenate(
        [prompts.valid, jnp.arange(steps)[None] < lengths_N[:, None]], axis=1
    )
    hidden_NLD, _ = reasoner.forward(
        params, inputs_NLD, jnp.cumsum(valid_NL, axis=1) - 1, valid_NL
    )
    logits_NTV = reasoner.logits(params, hidden_NLD[:, -steps - 1 : -1])
    probability_NTK, token_NTK = jax.lax.top_k(jax.nn.softmax(logits_NTV), NEAREST)
    return (
        jax.nn.sigmoid(policy.latent_policy.stop_logits(params, actions)),
        probability_NTK,
        token_NTK,
    )

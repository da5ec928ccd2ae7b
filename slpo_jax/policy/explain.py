"""Readings of thoughts: the chance to stop at each latent, the tokens near to it, and its text by SIM-CoT's decoder.

That decoder (Wei et al., 2025) puts latents into words, where it was kept.
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
# The most tokens of a thought's text.
MOST = 64
# The number of tokens that a latent is compared with.
NEAREST = 5

Reads = tuple[int, int]
"""`READS` as static numbers of a compiled program."""


def decoder_of(config: BackboneConfig, params: Any) -> Reasoner:
    """Return the decoder `in_tree`; its vocabulary need not be the reasoner's.

    Args:
        config: the reasoner's shapes.
        params: all parts.
    """
    rows = vocabulary_rows(params[DECODER]["backbone"])
    shapes = dataclasses.replace(config, vocab_size=rows)
    decoder = as_functions(LatentReasoner(backbone(shapes)))
    return decoder.in_tree(DECODER)


def reads_of(params: Any) -> Reads | None:
    """Return `READS` of a kept decoder; None where none was kept."""
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
    count, first = reads
    rows, steps, width = latents_NTD.shape
    thoughts = steps // count
    decoder = decoder_of(policy.reasoner.config, params)
    slots = min(MOST, decoder.config.n_positions - first - count)
    # With fewer latents than a thought has, as with --latents=0, there is nothing to decode.
    if thoughts == 0:
        return jnp.zeros((rows, 0, slots), jnp.int32)

    # Feed each thought's latents to the decoder, one thought a row.
    latents_RCD = latents_NTD[:, : thoughts * count]
    latents_RCD = latents_RCD.reshape(rows * thoughts, count, width)
    places_RC = jnp.broadcast_to(
        first + jnp.arange(count),
        latents_RCD.shape[:2],
    )
    cache = decoder.empty_cache(
        rows * thoughts,
        count + cache_sizes(slots)[0],
    )
    hidden_RCD, cache = decoder.forward(
        params,
        latents_RCD,
        places_RC,
        jnp.ones(places_RC.shape, bool),
        cache=cache,
    )

    # The decoder then answers as a policy without an end marker does, token by token.
    greedy = policy.without_noise().with_config(
        closing_ids=(),
        banned_ids=(),
        answer_slots=slots,
    )
    speaker = dataclasses.replace(
        greedy,
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
    """Read rollouts that were made without noise, one of each prompt.

    One pass over prompt and latents has the hidden states that the latents came from: h_t is the transition of the
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

    # Lay the fed latents behind the prompts, and run the model over both.
    words_NPD = reasoner.embed(params, prompts.tokens)
    inputs_NLD = jnp.concatenate([words_NPD, latents_NTD], axis=1)
    is_fed_NT = jnp.arange(steps)[None] < lengths_N[:, None]
    valid_NL = jnp.concatenate([prompts.valid, is_fed_NT], axis=1)
    positions_NL = jnp.cumsum(valid_NL, axis=1) - 1
    hidden_NLD, _ = reasoner.forward(params, inputs_NLD, positions_NL, valid_NL)

    # The state one position before a latent predicts the tokens in its place.
    before_NTD = hidden_NLD[:, -steps - 1 : -1]
    law_NTV = jax.nn.softmax(reasoner.logits(params, before_NTD))
    probability_NTK, token_NTK = jax.lax.top_k(law_NTV, NEAREST)
    stop_NT = jax.nn.sigmoid(policy.latent_policy.stop_logits(params, actions))
    return stop_NT, probability_NTK, token_NTK

"""Answers at every candidate length of a trajectory, for the gate's cold start (paper section 4.1)."""

import dataclasses

import jax
import jax.numpy as jnp

from slpo_jax.models.attention import KVCache, join
from slpo_jax.policy import noise
from slpo_jax.policy.decoding import cache_sizes, decode_answers
from slpo_jax.policy.latent_policies import Action
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import Prompts, repeat_to
from slpo_jax.policy.rollout import think


def _seen_before(prompt_cache: KVCache, latent_cache: KVCache, lengths_C: jax.Array) -> KVCache:
    """Prompt and latent slots as one prefix, of which the candidate of length t sees the latents before t."""
    rows, steps = latent_cache.valid.shape
    axes = jax.tree.broadcast(prompt_cache.rows_axes, prompt_cache)
    prompt_cache = jax.tree.map(lambda x, axis: jnp.repeat(x, rows // x.shape[axis], axis), prompt_cache, axes)
    candidates, slots = lengths_C.shape[0], prompt_cache.slots
    seen_CT = jnp.arange(1, steps + 1)[None, :] < lengths_C[:, None]
    valid = jnp.concatenate(
        [
            jnp.broadcast_to(prompt_cache.valid[:, None], (rows, candidates, slots)),
            jnp.broadcast_to(seen_CT, (rows, candidates, steps)),
        ],
        axis=2,
    )
    return dataclasses.replace(join(prompt_cache, latent_cache), valid=valid.reshape(rows * candidates, -1))


def decode_candidates(policy: Policy, params, prompts: Prompts, keys_N, min_latents: int) -> tuple[Action, jax.Array]:
    """Answers at every candidate length of full-length trajectories (paper section 4.1, the cold start).

    All C = T - T_min + 1 candidates of a trajectory share its one cache of prompt and latents and are decoded as one
    batch: candidate t sees the noisy slots before t, and feeds step t's action again as its last.

    Args:
        policy: its stopping rule is not used.
        prompts, keys_N: as in `rollout.sample`.
        min_latents: T_min.
    Returns:
        actions, leaves [N, T, ..], and answer tokens int32 [N, C, A].
    """
    full, config = policy.having(stopping="length", answer_slots=0), policy.config
    full = dataclasses.replace(full, latent_policy=policy.latent_policy.not_halting())
    params, steps = policy.reasoner.cast(params), config.max_latents
    thought, prompt_cache = think(full, params, prompts, keys_N, jnp.int32(steps))
    rows = keys_N.shape[0]
    lengths_C = jnp.arange(min_latents, steps + 1)
    candidates = lengths_C.shape[0]
    shared = _seen_before(prompt_cache, thought.cache, lengths_C)
    inputs_NCD = policy.latent_policy.feed(params, thought.actions)[:, min_latents - 1 :]
    before = (repeat_to(prompts.lengths, rows)[:, None] + lengths_C[None]).reshape(-1)
    last_NC = policy.latent_policy.known_last(jnp.ones((rows, candidates), bool))
    dropout = noise.latent_dropout(keys_N, lengths_C, last_NC, config.dropout_rate, config.dropout_where)
    _, cache = policy.reasoner.forward(
        params,
        inputs_NCD.reshape(rows * candidates, 1, -1),
        before[:, None] - 1,
        jnp.ones((rows * candidates, 1), bool),
        prefix=shared,
        cache=policy.reasoner.empty_cache(rows * candidates, 1 + cache_sizes(config.suffix_slots)[0]),
        start=0,
        dropout=jax.tree.map(lambda x: x.reshape(-1, 1), dropout),
    )
    keys = jnp.repeat(keys_N, candidates)
    tokens = decode_answers(policy, params, shared, cache, 1, before, keys)
    return thought.actions, tokens.reshape(rows, candidates, config.answer_slots)

"""Generating the tokens of an answer, one by one, until every row has ended."""

import jax
import jax.numpy as jnp

from slpo_jax.models.attention import KVCache
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.sampling import draw_tokens


def decode_answers(
    policy: Policy, params, prefix: KVCache, cache: KVCache, first_slot, before_N, keys_N, real_N=None, hidden_ND=None
) -> jax.Array:
    """Generate answers after the end marker, or after the thought where there is none.

    Args:
        prefix, cache: what the answers attend to; they are written into `cache` from slot `first_slot` on.
        before_N: int, real positions before the end marker.
        keys_N: the rows' keys (used when answers are sampled or dropout is on everywhere).
        real_N: bool, rows that speak at all; None is all.
        hidden_ND: of the last position before the answer, without an end marker.
    Returns:
        int32 [N, A]: tokens up to and including eos, then pad.
    """
    reasoner, config, params = policy.reasoner, policy.config, params["reasoner"]
    rows, first = before_N.shape[0], int(config.end_id is None)  # tokens that are there before any is fed

    def say(hidden_ND, slot, ended_N, tokens_NA):
        logits_NV = reasoner.logits(params, hidden_ND[:, None])[:, 0]
        if config.banned_ids:
            logits_NV = logits_NV.at[:, jnp.array(config.banned_ids)].set(-jnp.inf)
        drawing_N = noise.token_keys(keys_N, slot)
        token_N = draw_tokens(drawing_N, logits_NV, config.temperature, config.top_k, config.top_p)
        token_N = jnp.where(ended_N, config.pad_id, token_N)
        tokens_NA = jax.lax.dynamic_update_slice_in_dim(tokens_NA, token_N[:, None], slot, axis=1)
        return token_N, ended_N | (token_N == config.eos_id), tokens_NA

    def body(state):
        slot, token_N, ended_N, tokens_NA, cache = state
        hidden_N1D, cache = reasoner.forward(
            params,
            reasoner.embed(params, token_N[:, None]),
            (before_N + slot)[:, None],
            ~ended_N[:, None],
            prefix=prefix,
            cache=cache,
            start=first_slot + slot,
            dropout=noise.answer_dropout(keys_N, slot[None], config.dropout_rate, config.dropout_where),
        )
        return slot + 1, *say(hidden_N1D[:, 0], slot + first if first else slot, ended_N, tokens_NA), cache

    def goes_on(state):
        slot, _, ended_N, _, _ = state
        return (slot < config.answer_slots - first) & ~ended_N.all()

    ended_N = jnp.zeros(rows, bool) if real_N is None else ~real_N
    tokens_NA = jnp.full((rows, config.answer_slots), config.pad_id, jnp.int32)
    if config.end_id is None:
        token_N, ended_N, tokens_NA = say(hidden_ND, jnp.int32(0), ended_N, tokens_NA)
    else:
        token_N = jnp.full(rows, config.end_id, jnp.int32)
    return jax.lax.while_loop(goes_on, body, (jnp.int32(0), token_N, ended_N, tokens_NA, cache))[3]

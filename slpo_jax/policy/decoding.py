"""Generating the tokens of an answer, one by one, until every row has ended."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.attention import KVCache, grow
from slpo_jax.policy import noise
from slpo_jax.policy.noise import draw_tokens
from slpo_jax.policy.policy import Policy
from slpo_jax.rewards.verifier import is_end

FIRST_SLOTS = 64  # of a cache for answers, which is doubled when it is full


@struct.dataclass
class _Answers:
    """The loop's state before a token is fed.

    Attributes:
        slot: where it goes, counted from the first after the thought.
        token_N: what is fed.
    """

    slot: jax.Array
    token_N: jax.Array
    ended_N: jax.Array
    tokens_NA: jax.Array
    cache: KVCache


def cache_sizes(answer_slots: int) -> list[int]:
    """Answer slots that the cache has in turn, each 1.5 to 3 times as many as before; one program each."""
    sizes = [FIRST_SLOTS]
    while 3 * sizes[-1] <= 2 * answer_slots:
        sizes.append(2 * sizes[-1])
    return [*sizes[:-1], answer_slots]


def decode_answers(
    policy: Policy,
    params,
    prefix,
    cache: KVCache,
    first_slot,
    before_N,
    keys_N,
    *,
    real_N=None,
    hidden_ND=None,
) -> jax.Array:
    """Generate answers after the end marker, or after the thought where there is none.

    Args:
        prefix, cache: `KVCache`s that the answers attend to, the first may be None; they are written into `cache` from
            slot `first_slot` on, of which it has the first of `cache_sizes`.
        before_N: int, real positions before the end marker.
        keys_N: the rows' keys (used when answers are sampled or dropout is on everywhere).
        real_N: bool, rows that speak at all; None is all.
        hidden_ND: of the last position before the answer, without an end marker.
    Returns:
        int32 [N, A]: tokens up to and including the one that ended the answer, then pad.
    """
    reasoner = policy.reasoner
    config = policy.config
    rows = before_N.shape[0]
    marker = config.closing_ids
    behind = 1 - len(marker)  # of a slot, the answer's token that comes out of it

    def say(state: _Answers, hidden_ND, slot) -> _Answers:
        token_N = _next_token(policy, params, hidden_ND, noise.token_keys(keys_N, slot))
        token_N = jnp.where(state.ended_N, config.pad_id, token_N)
        tokens_NA = jax.lax.dynamic_update_slice_in_dim(
            state.tokens_NA, token_N[:, None], slot, axis=1
        )
        ended_N = state.ended_N | is_end(token_N, config.eos_ids)
        return dataclasses.replace(
            state, token_N=token_N, ended_N=ended_N, tokens_NA=tokens_NA
        )

    def feed(state: _Answers):
        slot = state.slot
        return reasoner.forward(
            params,
            reasoner.embed(params, state.token_N[:, None]),
            (before_N + slot)[:, None],
            ~state.ended_N[:, None],
            prefix=prefix,
            cache=state.cache,
            start=first_slot + slot,
            dropout=noise.answer_dropout(
                keys_N, slot[None], config.dropout_rate, config.dropout_where
            ),
        )

    def body(state: _Answers) -> _Answers:
        (hidden_N1D, cache) = feed(state)
        slot = state.slot
        state = say(state, hidden_N1D[:, 0], slot + behind)
        return dataclasses.replace(state, slot=slot + 1, cache=cache)

    state = _Answers(
        slot=jnp.int32(config.closing_slots),
        token_N=jnp.full(rows, marker[-1] if marker else config.pad_id, jnp.int32),
        ended_N=jnp.zeros(rows, bool) if real_N is None else ~real_N,
        tokens_NA=jnp.full((rows, config.answer_slots), config.pad_id, jnp.int32),
        cache=cache,
    )
    if not marker:
        state = say(state, hidden_ND, jnp.int32(0))
    for slot, token in enumerate(marker[:-1]):
        fed = dataclasses.replace(
            state, slot=jnp.int32(slot), token_N=jnp.full(rows, token, jnp.int32)
        )
        state = dataclasses.replace(state, cache=feed(fed)[1])
    return _fill(
        body,
        state,
        first_slot,
        config.answer_slots - behind,
        cache_sizes(config.suffix_slots),
    )


def _next_token(
    policy: Policy, params, hidden_ND: jax.Array, keys_N: jax.Array
) -> jax.Array:
    config = policy.config
    logits_NV = policy.reasoner.logits(params, hidden_ND[:, None])[:, 0]
    if config.banned_ids:
        logits_NV = logits_NV.at[:, jnp.array(config.banned_ids)].set(-jnp.inf)
    return draw_tokens(
        keys_N, logits_NV, config.temperature, config.top_k, config.top_p
    )


def _fill(
    body: Callable[[_Answers], _Answers],
    state: _Answers,
    first_slot,
    most: int,
    sizes: list[int],
) -> jax.Array:
    """Run body(state) with the cache's first size, then with the others while there is more to say; the tokens.

    Args:
        most: slots that may be fed.
    """
    size, *larger = sizes

    def within(slots):
        return lambda state: (state.slot < min(slots, most)) & ~state.ended_N.all()

    state = jax.lax.while_loop(within(size), body, state)
    if not larger:
        return state.tokens_NA

    def go_on(state):
        grown = grow(state.cache, first_slot + larger[0])
        return _fill(
            body, dataclasses.replace(state, cache=grown), first_slot, most, larger
        )

    return jax.lax.cond(
        within(most)(state), go_on, lambda state: state.tokens_NA, state
    )

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

# The first size of a cache for answers, which is doubled when it is full.
FIRST_SLOTS = 64


@struct.dataclass
class _Answers:
    """The loop's state before a token is fed.

    Attributes:
        slot: the token's slot, counted from the first after the thought.
        token_N: the tokens to feed.
    """

    slot: jax.Array
    token_N: jax.Array
    ended_N: jax.Array
    tokens_NA: jax.Array
    cache: KVCache


def cache_sizes(answer_slots: int) -> list[int]:
    """Return the numbers of answer slots that the cache grows through, each 1.5 to 3 times the one before.

    Each is a program of its own.
    """
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
        real_N: bool, the rows that answer at all; None is all.
        hidden_ND: of the last position before the answer, without an end marker.
    Returns:
        int32 [N, A]: tokens up to and including the one that ended the answer, then pad.
    """
    reasoner = policy.reasoner
    config = policy.config
    rows = before_N.shape[0]
    marker = config.closing_ids
    # The number, less that of the slot, of the answer token that a slot predicts.
    behind = 1 - len(marker)

    def say(state: _Answers, hidden_ND, slot) -> _Answers:
        """Draw the answer's token of a slot, and write it down."""
        keys_of_slot_N = noise.token_keys(keys_N, slot)
        token_N = _next_token(policy, params, hidden_ND, keys_of_slot_N)
        token_N = jnp.where(state.ended_N, config.pad_id, token_N)
        tokens_NA = jax.lax.dynamic_update_slice_in_dim(
            state.tokens_NA, token_N[:, None], slot, axis=1
        )
        return dataclasses.replace(
            state,
            token_N=token_N,
            ended_N=state.ended_N | is_end(token_N, config.eos_ids),
            tokens_NA=tokens_NA,
        )

    def feed(state: _Answers):
        """Feed the state's tokens at its slot: hidden states and the cache."""
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
        hidden_N1D, cache = feed(state)
        slot = state.slot
        state = say(
            state,
            hidden_N1D[:, 0],
            slot + behind,
        )
        return dataclasses.replace(state, slot=slot + 1, cache=cache)

    # Begin with the marker's last token, or with the first answer token, which the thought predicts.
    first_token = marker[-1] if marker else config.pad_id
    state = _Answers(
        slot=jnp.int32(config.closing_slots),
        token_N=jnp.full(rows, first_token, jnp.int32),
        ended_N=jnp.zeros(rows, bool) if real_N is None else ~real_N,
        tokens_NA=jnp.full((rows, config.answer_slots), config.pad_id, jnp.int32),
        cache=cache,
    )
    if not marker:
        state = say(state, hidden_ND, jnp.int32(0))

    # Feed the marker's other tokens, which predict nothing that is used.
    for slot, token in enumerate(marker[:-1]):
        marker_state = dataclasses.replace(
            state,
            slot=jnp.int32(slot),
            token_N=jnp.full(rows, token, jnp.int32),
        )
        _, cache = feed(marker_state)
        state = dataclasses.replace(state, cache=cache)

    # Speak until all rows have ended.
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
    logits_NV = policy.reasoner.logits(
        params,
        hidden_ND[:, None],
    )[:, 0]
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
    """Run body(state) with the cache's first size, then with the others while a row goes on, and return the tokens.

    Args:
        most: slots that may be fed.
    """
    size, *larger = sizes

    def goes_on(state, slots):
        return (state.slot < min(slots, most)) & ~state.ended_N.all()

    state = jax.lax.while_loop(
        lambda state: goes_on(state, size),
        body,
        state,
    )
    if not larger:
        return state.tokens_NA

    def fill_larger(state):
        cache = grow(state.cache, first_slot + larger[0])
        grown = dataclasses.replace(state, cache=cache)
        return _fill(body, grown, first_slot, most, larger)

    def finish(state):
        return state.tokens_NA

    return jax.lax.cond(goes_on(state, most), fill_larger, finish, state)

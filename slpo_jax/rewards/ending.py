"""Where an answer ends: with its first end token."""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def is_end(tokens: jax.Array, eos_ids: Sequence[int]) -> jax.Array:
    """bool, the tokens' shape: which are end tokens."""
    return functools.reduce(operator.or_, (tokens == eos_id for eos_id in eos_ids))


def said_eos(said_NT: jax.Array, lengths_N: jax.Array, eos_ids: Sequence[int]) -> jax.Array:
    """bool [N]: whether a thought's last step is written down as eos, so that no answer follows."""
    last_NT = jnp.arange(1, said_NT.shape[1] + 1)[None] == lengths_N[:, None]
    return jnp.any(last_NT & is_end(said_NT, eos_ids), axis=1)


def answer_mask(tokens_NA: jax.Array, eos_ids: Sequence[int]) -> jax.Array:
    """bool [N, A]: the generated tokens, up to and including the one that ended the answer."""
    ends_NA = is_end(tokens_NA, eos_ids)
    return jnp.cumsum(ends_NA, axis=1) - ends_NA == 0

"""Answers on the device, by style: what the host does as pure functions of arrays, for use inside jit.

Texts and letters are read here, numbers in `slpo_jax.rewards.verifier`.

Shape suffixes as in `slpo_jax.rewards.verifier`.
"""

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.rewards.answers import LETTERS, AnswerStyle
from slpo_jax.rewards.texts import MARKS, written
from slpo_jax.rewards.verifier import (
    before,
    byte_table,
    completed_text,
    is_after_mark,
    is_last_number,
    only,
    padded_table,
)


Judge = Callable[[jax.Array, jax.Array], jax.Array]
"""(the bytes of a completion, uint8 [N], 0 behind them; its encoded reference, uint8 [R]) -> bool, traceable."""


def judged(table_VL, tokens_BA: jax.Array, references_BR: jax.Array, eos_id: int | jax.Array, judge: Judge):
    """bool [B]: what `judge` says of completions, as `verify` does of those that give their reference."""

    def judge_row(tokens_A, reference_R):
        bytes_N, ended = completed_text(table_VL, tokens_A, eos_id)
        return ended & judge(bytes_N, reference_R)

    return jax.vmap(judge_row)(jnp.asarray(tokens_BA), jnp.asarray(references_BR))


def verify(
    table_VL, tokens_BA: jax.Array, references_BR: jax.Array, eos_id: int | jax.Array, style: AnswerStyle
) -> jax.Array:
    """Tell which completions give their reference, as `answers.parse_completion` and `answers.are_right` say it.

    Args:
        table_VL: the vocabulary's table, see `ON_DEVICE`. Ids outside it write nothing.
        tokens_BA: integer [B, A], generated answers. What follows the first `eos_id` is ignored.
        references_BR: uint8 [B, R] from `encode_references`; one without any byte is never given.
        eos_id: id of the end-of-text token; a row without it is wrong.
        style: how to read the completion. Static.
    Returns:
        bool [B].
    """
    return judged(table_VL, tokens_BA, references_BR, eos_id, ON_DEVICE[style][1])


def text_table(token_bytes: Sequence[bytes]) -> np.ndarray:
    """Build the table that `is_text` reads tokens with; as `byte_table`."""
    return padded_table(list(map(written, token_bytes)))


def is_text(bytes_N: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Whether a completion gives its reference: `compared(said_text(completion)) == compared(reference)`."""
    bytes_N, begin, end = said(bytes_N)
    length = (reference_R > 0).sum()
    indices_R = begin + jnp.arange(reference_R.size)
    same_R = bytes_N.at[indices_R].get(mode="fill", fill_value=0) == reference_R
    return (length > 0) & (end - begin == length) & (same_R | (reference_R == 0)).all()


def said(bytes_N: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The bytes [N] of a completion with single spaces, and where `said_text` of it begins and ends there."""
    blank_N = bytes_N == ord(" ")
    bytes_N = only(bytes_N, (bytes_N > 0) & ~(blank_N & (before(blank_N) | (jnp.arange(bytes_N.size) == 0))))
    begin = jnp.max(jnp.stack([_end_of_last(bytes_N, mark) for mark in MARKS]))
    begin += bytes_N.at[begin].get(mode="fill", fill_value=0) == ord(" ")
    indices_N = jnp.arange(bytes_N.size)
    written_N = (bytes_N > 0) & (bytes_N != ord(" ")) & (bytes_N != ord(".")) & (indices_N >= begin)
    return bytes_N, begin, jnp.where(written_N, indices_N + 1, begin).max()


def _end_of_last(bytes_N: jax.Array, mark: bytes) -> jax.Array:
    """Where the last of these texts ends; 0 where there is none."""
    padded, indices = jnp.pad(bytes_N, (0, len(mark))), jnp.arange(bytes_N.size)
    padded = jnp.where(padded == 0, ord(" "), padded)  # a # at the end is one too
    found_MN = jnp.stack([padded[place : place + indices.size] == byte for place, byte in enumerate(mark)])
    return jnp.where(found_MN.all(axis=0), indices + len(mark), 0).max()


def choice_table(token_bytes: Sequence[bytes]) -> np.ndarray:
    """The table that `is_choice` reads tokens with: a letter that may be one, others as `a`, signs as blanks."""
    return padded_table([
        re.sub(rb"[^\w']+", b" ", re.sub(rb"[\w']{2,}|[^%s\W]|'" % LETTERS.encode(), b"a", piece.replace(b"\0", b"")))
        for piece in token_bytes
    ])  # fmt: skip


def is_choice(bytes_N: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Whether the last letter that stands alone is the reference's first byte."""
    indices_N, within_N = jnp.arange(bytes_N.size), (bytes_N > 0) & (bytes_N != ord(" "))
    joined_N = before(within_N) | jnp.pad(within_N, (0, 1))[1:]
    last = jnp.where(within_N & (bytes_N != ord("a")) & ~joined_N, indices_N, -1).max()
    return (last >= 0) & (bytes_N[last] == reference_R[0])


ON_DEVICE: dict[AnswerStyle, tuple[Callable[[Sequence[bytes]], np.ndarray], Judge]] = {
    "after_mark": (byte_table, is_after_mark),
    "last_number": (byte_table, is_last_number),
    "texts": (text_table, is_text),
    "choice": (choice_table, is_choice),
}
"""Of a style: the table [V, ..] of the bytes of each token id, and whether a completion gives its reference."""

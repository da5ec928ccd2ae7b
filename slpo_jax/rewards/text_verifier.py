"""Answers that are texts or letters, on the device: what the host does as pure functions of arrays, for use inside jit.

`ON_DEVICE` has these and `verifier`'s by style.

Shape suffixes as in `slpo_jax.rewards.verifier`.
"""

import functools
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from slpo_jax.rewards.answers import LETTERS, AnswerStyle
from slpo_jax.rewards.texts import MARKS, written
from slpo_jax.rewards.verifier import ByteTable, before, byte_table, completed_text, only, padded_table, verify


def text_table(token_bytes: Sequence[bytes]) -> ByteTable:
    """Build the table that `verify_text` reads tokens with.

    Args:
        token_bytes: the bytes of each token id; b"" for special tokens.
    """
    return padded_table(list(map(written, token_bytes)))


def verify_text(table: ByteTable, tokens_BA: jax.Array, references_BR: jax.Array, eos_id: int | jax.Array) -> jax.Array:
    """Tell which completions give their reference: `compared(said_text(completion)) == compared(reference)`.

    Args:
        table: the vocabulary's `text_table`. Ids outside it write nothing.
        tokens_BA: integer [B, A], generated answers. What follows the first `eos_id` is ignored.
        references_BR: uint8 [B, R], `compared` references, 0 after their end; one without any byte is never given.
        eos_id: id of the end-of-text token; a row without it is wrong.
    Returns:
        bool [B].
    """

    def verify_row(tokens_A, reference_R):
        bytes_N, ended = completed_text(table, tokens_A, eos_id)
        blank_N = bytes_N == ord(" ")
        bytes_N = only(bytes_N, (bytes_N > 0) & ~(blank_N & (before(blank_N) | (jnp.arange(bytes_N.size) == 0))))
        begin = jnp.max(jnp.stack([_end_of_last(bytes_N, mark) for mark in MARKS]))
        begin += bytes_N.at[begin].get(mode="fill", fill_value=0) == ord(" ")

        indices_N = jnp.arange(bytes_N.size)
        written_N = (bytes_N > 0) & (bytes_N != ord(" ")) & (bytes_N != ord(".")) & (indices_N >= begin)
        end = jnp.where(written_N, indices_N + 1, begin).max()
        length = (reference_R > 0).sum()
        indices_R = begin + jnp.arange(reference_R.size)
        same_R = bytes_N.at[indices_R].get(mode="fill", fill_value=0) == reference_R
        return ended & (length > 0) & (end - begin == length) & (same_R | (reference_R == 0)).all()

    return jax.vmap(verify_row)(jnp.asarray(tokens_BA), jnp.asarray(references_BR))


def _end_of_last(bytes_N: jax.Array, mark: bytes) -> jax.Array:
    """Where the last of these texts ends; 0 where there is none."""
    padded, indices = jnp.pad(bytes_N, (0, len(mark))), jnp.arange(bytes_N.size)
    padded = jnp.where(padded == 0, ord(" "), padded)  # a # at the end is one too
    found_MN = jnp.stack([padded[place : place + indices.size] == byte for place, byte in enumerate(mark)])
    return jnp.where(found_MN.all(axis=0), indices + len(mark), 0).max()


def choice_table(token_bytes: Sequence[bytes]) -> ByteTable:
    """Build the table that `verify_choice` reads tokens with: a letter that may be one, others as `a`, signs as blanks.

    Args:
        token_bytes: the bytes of each token id; b"" for special tokens.
    """
    return padded_table([
        re.sub(rb"[^\w']+", b" ", re.sub(rb"[\w']{2,}|[^%s\W]|'" % LETTERS.encode(), b"a", piece.replace(b"\0", b"")))
        for piece in token_bytes
    ])  # fmt: skip


def verify_choice(table: ByteTable, tokens_BA: jax.Array, references_BR: jax.Array, eos_id: int | jax.Array):
    """Tell which completions give their reference, the last letter that stands alone; see `verify_text`.

    Args:
        references_BR: uint8 [B, R], the letter first.
    """

    def verify_row(tokens_A, reference_R):
        bytes_N, ended = completed_text(table, tokens_A, eos_id)
        indices_N, within_N = jnp.arange(bytes_N.size), (bytes_N > 0) & (bytes_N != ord(" "))
        joined_N = before(within_N) | jnp.pad(within_N, (0, 1))[1:]
        last = jnp.where(within_N & (bytes_N != ord("a")) & ~joined_N, indices_N, -1).max()
        return ended & (last >= 0) & (bytes_N[last] == reference_R[0])

    return jax.vmap(verify_row)(jnp.asarray(tokens_BA), jnp.asarray(references_BR))


ON_DEVICE: dict[AnswerStyle, tuple[Callable[[Sequence[bytes]], ByteTable], Callable[..., jax.Array]]] = {
    "after_mark": (byte_table, functools.partial(verify, style="after_mark")),
    "last_number": (byte_table, functools.partial(verify, style="last_number")),
    "texts": (text_table, verify_text),
    "choice": (choice_table, verify_choice),
}
"""Of a style: the table of the bytes of each token id, and (that table, tokens [B, A], encoded references [B, R],
eos_id) -> bool [B]."""

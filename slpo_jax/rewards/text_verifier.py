"""Answers on the device, by style: what the host does as pure functions of arrays, for use inside jit.

Texts and letters are read here, numbers in `slpo_jax.rewards.verifier`.

Shape suffixes as in `slpo_jax.rewards.verifier`.
"""

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.rewards.answers import AnswerStyle
from slpo_jax.rewards.texts import BESIDE, CHOICE_MARKS, FOLLOWING, LETTERS, MARKS, written
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


def judged(
    table_VL, tokens_BA: jax.Array, references_BR: jax.Array, eos_id: int | jax.Array, judge: Judge
) -> jax.Array:
    """Tell what a verifier says of completions.

    Args:
        table_VL: the vocabulary's table, see `ON_DEVICE`. Ids outside it write nothing.
        tokens_BA: integer [B, A], generated answers. What follows the first `eos_id` is ignored.
        references_BR: uint8 [B, R], 0 after a reference's end.
        eos_id: id of the end-of-text token; a row without it is wrong.
        judge: of a row. Static.
    Returns:
        bool [B].
    """

    def judge_row(tokens_A, reference_R):
        bytes_N, ended = completed_text(table_VL, tokens_A, eos_id)
        return ended & judge(bytes_N, reference_R)

    return jax.vmap(judge_row)(jnp.asarray(tokens_BA), jnp.asarray(references_BR))


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
    bytes_N = _with_single_spaces(bytes_N)
    indices_N, beside_N = jnp.arange(bytes_N.size), _in(bytes_N, BESIDE.encode() + b"\0")
    ends_MN = jnp.stack([jnp.where(_matches(bytes_N, mark), indices_N + len(mark), 0) for mark in MARKS])
    begin = jnp.where(~beside_N & (indices_N >= ends_MN.max()), indices_N, bytes_N.size).min()
    end = jnp.where(~beside_N & (bytes_N != ord(".")) & (indices_N >= begin), indices_N + 1, 0).max()
    return bytes_N, begin, end


def _with_single_spaces(bytes_N: jax.Array) -> jax.Array:
    """The bytes without those blanks that follow another one, none of them 0."""
    return only(bytes_N, (bytes_N > 0) & ~((bytes_N == ord(" ")) & (before(bytes_N) == ord(" "))))


def _matches(bytes_N: jax.Array, text: bytes) -> jax.Array:
    """Where a text begins. Behind the last byte is a blank: a # at the end is a mark too."""
    padded = jnp.pad(bytes_N, (0, len(text)))
    padded = jnp.where(padded == 0, ord(" "), padded)
    found_MN = jnp.stack([padded[place : place + bytes_N.size] == byte for place, byte in enumerate(text)])
    return found_MN.all(axis=0)


# The bytes of an apostrophe that isn't ASCII are told when all three have come; null bytes part them.
_QUOTE = b"\xe2\x80\x99"
_KINDS = bytes(
    byte if (chr(byte).isalpha() and byte < 128) or byte in b" ':=*" + _QUOTE else
    ord("0") if byte in b"0123456789_" else 1 if byte == 0 else ord(".")
    for byte in range(256)
)  # fmt: skip


def choice_table(token_bytes: Sequence[bytes]) -> np.ndarray:
    """The table that `is_choice` reads tokens with; signs that are alike are shortened, and so are long words."""
    pieces = [re.sub(rb"[ \t\n\r\v\f]+", b" ", piece).translate(_KINDS) for piece in token_bytes]
    return padded_table([re.sub(rb"\.+|([\w']{8})[\w']+([\w']{8})", _shortened, piece) for piece in pieces])


def _shortened(match: re.Match[bytes]) -> bytes:
    """A run with its ends, in which no mark and no word that follows a letter is lost."""
    return match[1] + match[2] if match[1] else b"."


def is_choice(bytes_N: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Whether the letter that a completion gives is the reference's first byte, see `texts.said_choice`."""
    quote_N = (bytes_N == _QUOTE[2]) & (before(bytes_N) == _QUOTE[1]) & (before(bytes_N, 2) == _QUOTE[0])
    bytes_N = jnp.where(quote_N, ord("'"), bytes_N)
    bytes_N = _with_single_spaces(only(bytes_N, (bytes_N > 1) & ~_after(quote_N) & ~_after(quote_N, 2)))
    lower_N = jnp.where((bytes_N >= ord("A")) & (bytes_N <= ord("Z")), bytes_N + 32, bytes_N)
    alpha_N = (lower_N >= ord("a")) & (lower_N <= ord("z"))
    within_N = alpha_N | (bytes_N == ord("0")) | (bytes_N == ord("'"))

    def whole(text: bytes) -> jax.Array:
        """Where a text begins that no word goes on from."""
        return _matches(lower_N, text) & ~_after(within_N, len(text))

    follows_N = (bytes_N == ord(" ")) & _after(alpha_N) & _after(within_N, 2)
    follows_N &= ~jnp.stack([whole(b" " + text) for text in FOLLOWING]).any(axis=0)
    word_N = _in(bytes_N, b"AI") & _after(follows_N)
    letter_N = _in(bytes_N, LETTERS.encode()) & ~before(within_N) & ~_after(within_N) & ~word_N
    marks = [whole(mark) if mark.endswith(b"s") else _matches(lower_N, mark) for mark in CHOICE_MARKS]
    mark_N = jnp.stack(marks).any(0)

    indices_N = jnp.arange(bytes_N.size)
    last_letter_N, last_mark_N = (jax.lax.cummax(jnp.where(at_N, indices_N, -1)) for at_N in (letter_N, mark_N))
    behind = jnp.where(letter_N & (last_mark_N > before(last_letter_N + 1) - 1), indices_N, -1).max()
    last = jnp.where(behind >= 0, behind, last_letter_N[-1])
    return (last >= 0) & (bytes_N[last] == reference_R[0])


def _after(found_N: jax.Array, count: int = 1) -> jax.Array:
    """Of each byte, what is `count` places behind it."""
    return jnp.pad(found_N, (0, count))[count:]


def _in(bytes_N: jax.Array, kinds: bytes) -> jax.Array:
    return jnp.isin(bytes_N, jnp.array([*kinds], jnp.uint8))


ON_DEVICE: dict[AnswerStyle, tuple[Callable[[Sequence[bytes]], np.ndarray], Judge]] = {
    "after_mark": (byte_table, is_after_mark),
    "last_number": (byte_table, is_last_number),
    "texts": (text_table, is_text),
    "choice": (choice_table, is_choice),
}
"""Of a style: the table [V, ..] of the bytes of each token id, and whether a completion gives its reference, as
`answers.parse_completion` and `answers.are_right` say it; one without any byte is never given."""

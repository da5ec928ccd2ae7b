"""Answers on the device: `slpo_jax.rewards.answers.is_correct` as a pure function of arrays, for use inside jit.

A table turns tokens into bytes; an automaton over the bytes (`slpo_jax.rewards.automaton`) finds where the last number
starts; its digits are then compared with the reference's place by place, so that no number is too long and nothing is
ever rounded.
Shape suffixes: B rows, A answer slots, V vocabulary, R reference width, N bytes of a row (A times the table's width).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.rewards import automaton
from slpo_jax.rewards.answers import STYLES, AnswerStyle, canonical_decimal
from slpo_jax.rewards.automaton import compress


class ByteTable(NamedTuple):
    """Bytes of each token, compressed (see `byte_table`); an argument of the jitted function that verifies.

    Attributes:
        bytes_VL: uint8 [V, longest token], 0 after a token's end.
    """

    bytes_VL: np.ndarray | jax.Array


def byte_table(token_bytes: Sequence[bytes]) -> ByteTable:
    """Build the table that `verify` reads tokens with.

    They are written as `automaton.compress` does, which changes no verdict and keeps the table narrow: GPT-2 has tokens
    of 128 bytes.

    Args:
        token_bytes: the bytes of each token id; b"" for special tokens.
    Returns:
        the table, of numpy arrays.
    Raises:
        UserError: no tokens.
    """
    if not token_bytes:
        raise UserError("byte_table: the vocabulary is empty; pass the bytes of every token")
    return padded_table([compress(piece) for piece in token_bytes])


def padded_table(pieces: Sequence[bytes]) -> ByteTable:
    """A row a piece, as wide as the longest."""
    width = max(1, max(map(len, pieces)))
    joined = b"".join(piece.ljust(width, b"\0") for piece in pieces)
    return ByteTable(np.frombuffer(joined, np.uint8).reshape(len(pieces), width))


def reference_width(references: Sequence[str], style: AnswerStyle = "after_mark") -> int:
    """Give the width that `encode_references` needs for these references (at least 1)."""
    return max((len(_compared(each, style)) for each in references), default=1)


def encode_references(references: Sequence[str], width: int, style: AnswerStyle = "after_mark") -> np.ndarray:
    """Write references as rows of bytes.

    Args:
        references: B of them: canonical decimals, as `canonical_decimal` writes them, or any that aren't numbers.
        width: bytes a row, the same for every batch so that shapes stay put.
        style: of the answers.
    Returns:
        uint8 [B, width], 0 after a reference's end. (A row of zeros, say for padding, is matched by no completion.)
    Raises:
        UserError: a reference is longer than `width` or not canonical.
    """
    rows = np.zeros((len(references), width), np.uint8)
    for index, reference in enumerate(references):
        written = _compared(reference, style)
        if len(written) > width:
            raise UserError(f"reference {index} has {len(written)} characters, more than {width}; raise the width")
        if STYLES[style].kind == "numbers" and canonical_decimal(reference) != reference:
            raise UserError(f"reference {index}, {reference!r}, is not canonical; pass it through canonical_decimal")
        rows[index, : len(written)] = np.frombuffer(written, np.uint8)
    return rows


def _compared(reference: str, style: AnswerStyle) -> bytes:
    compared = STYLES[style].compared
    assert compared is not None  # LaTeX is the host's
    return compared(reference)


def verify(
    table: ByteTable, tokens_BA: jax.Array, references_BR: jax.Array, eos_id: int | jax.Array, style: AnswerStyle
) -> jax.Array:
    """Tell which completions give their reference's number: `is_correct(read_completion(...).text, ...)`, row by row.

    Args:
        table: the vocabulary's `byte_table`. Ids outside it write nothing.
        tokens_BA: integer [B, A], generated answers. What follows the first `eos_id` is ignored.
        references_BR: uint8 [B, R] from `encode_references`.
        eos_id: id of the end-of-text token; a row without it is wrong.
        style: how to read the completion, see `answers.parse_completion`. Static.
    Returns:
        bool [B].
    Raises:
        UserError: unknown style (when traced).
    """
    if style not in ("after_mark", "last_number"):
        raise UserError(f"answer style {style!r} is unknown; use 'after_mark' or 'last_number'")

    def verify_row(tokens_A, reference_R):
        is_eos_A = tokens_A == eos_id
        ended_A = jnp.cumsum(is_eos_A) > 0
        bytes_AL = jnp.asarray(table.bytes_VL).at[tokens_A].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        bytes_N = jnp.where(ended_A[:, None], 0, bytes_AL).reshape(-1)
        start, is_number = _last_number(bytes_N)
        correct = is_eos_A.any() & is_number & _equals(bytes_N, start, reference_R)
        return correct & _stands_alone(bytes_N, start) if style == "after_mark" else correct

    return jax.vmap(verify_row)(jnp.asarray(tokens_BA), jnp.asarray(references_BR))


def _last_number(bytes_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Find the index of the last number's first byte, its sign or point included, and whether it is one.

    (Any index, and False, if there are no digits.)
    """

    def read(carry, inputs):
        row, mark, start, good = carry
        index, symbol = inputs
        action = jnp.asarray(automaton.TABLE)[row, symbol]
        place, says = action // 3 % 4, action % 3
        start = jnp.where(place == automaton.START, index, jnp.where(place == automaton.START_AT_MARK, mark, start))
        mark = jnp.where(place == automaton.MARK, index, mark)
        good = jnp.where(says == 0, good, says == automaton.GOOD)
        return (action // 12, mark, start, good), None

    symbols_N = jnp.asarray(automaton.SYMBOLS.astype(np.int32))[bytes_N]
    # Made from the data, so that it varies over a mesh as the data do: shard_map insists on that in a scan.
    zero = 0 * symbols_N[0]
    indices = jnp.arange(symbols_N.size, dtype=jnp.int32)
    (_, _, start, good), _ = jax.lax.scan(read, (zero, zero, zero, zero > 0), (indices, symbols_N))
    return start, good


def _stands_alone(bytes_N: jax.Array, start: jax.Array) -> jax.Array:
    """Tell whether there is nothing but blanks around the last number, back to the last # and up to the end.

    It begins with a digit, or a minus that touches one.
    """
    indices = jnp.arange(bytes_N.size)
    last_hash = jnp.where(bytes_N == ord("#"), indices, -1).max()
    last_digit = jnp.where(_is_digit(bytes_N), indices, -1).max()
    blank_N = (bytes_N == ord(" ")) | (bytes_N == ord("\n"))
    inked_N = ~blank_N & (bytes_N != automaton.PAD)
    around_N = ((indices > last_hash) & (indices < start)) | (indices > last_digit)
    within_N = (indices > start) & (indices <= last_digit)
    digit_N = _is_digit(bytes_N)
    point_N = (bytes_N == ord(".")) & (jnp.cumsum(digit_N & (indices >= start)) > 0)
    of_number_N = digit_N | (bytes_N == ord(",")) | point_N | (bytes_N == automaton.PAD)
    begins = _is_digit(bytes_N[start]) | (bytes_N[start] == ord("-"))
    return begins & ~((inked_N & around_N) | (~of_number_N & within_N)).any()


def _equals(bytes_N: jax.Array, start: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Tell whether the number from `start` to the text's last digit is the reference.

    A digit's place is its power of ten. The numbers are equal if each nonzero digit of the one is the other's digit
    at that place, both have as many of them, and the signs agree; zeros in front and behind need no thought.
    """
    indices = jnp.arange(bytes_N.size)
    digits_N = _is_digit(bytes_N) & (indices >= start)
    after_point_N = jnp.cumsum((bytes_N == ord(".")) & (indices >= start)) > 0
    places_N = (digits_N & ~after_point_N).sum() - jnp.cumsum(digits_N)
    nonzero_N = digits_N & (bytes_N != ord("0"))
    # What is neither a digit nor a point is a sign, or the last byte of one that is written in several.
    negative = ~(_is_digit(bytes_N[start]) | (bytes_N[start] == ord("."))) & nonzero_N.any()

    size = reference_R.size
    reference_digits_R = _is_digit(reference_R)
    is_end_R = (reference_R == ord(".")) | (reference_R == 0)
    point = jnp.where(is_end_R, jnp.arange(size), size).min()
    at_N = point - 1 - places_N + (places_N < 0)
    reference_N = reference_R.at[at_N].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    same_digits = (~nonzero_N | (bytes_N == reference_N)).all()
    same_count = nonzero_N.sum() == (reference_digits_R & (reference_R != ord("0"))).sum()
    same_sign = negative == (reference_R[0] == ord("-"))
    return _is_digit(bytes_N).any() & reference_digits_R.any() & same_digits & same_count & same_sign


def _is_digit(bytes_: jax.Array) -> jax.Array:
    """Mark the bytes `0` to `9`."""
    return (bytes_ >= ord("0")) & (bytes_ <= ord("9"))

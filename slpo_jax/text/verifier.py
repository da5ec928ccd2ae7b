"""Answers on the device: `slpo_jax.text.answers.is_correct` as a pure function of arrays, for use inside jit.

A table turns tokens into bytes; an automaton over the bytes finds where the last number starts; its digits are then
compared with the reference's place by place, so that no number is too long and nothing is ever rounded.
Shape suffixes: B rows, A answer slots, V vocabulary, R reference width, N bytes of a row (A times the table's width).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.text.answers import AnswerStyle, canonical_decimal

_DIGIT, _MINUS, _COMMA, _POINT, _OTHER, _PAD = range(6)
_STATES = ("idle", "minus", "int1", "int2", "int3", "int4+", "comma", "comma1", "comma2", "group", "point", "fraction")
_NO_START = 3


class ByteTable(NamedTuple):
    """Bytes of each token, compressed (see `byte_table`); an argument of the jitted function that verifies.

    Attributes:
        bytes_VL: uint8 [V, longest token], 0 after a token's end.
    """

    bytes_VL: np.ndarray | jax.Array


def byte_table(token_bytes: Sequence[bytes]) -> ByteTable:
    """Build the table that `verify` reads tokens with.

    Bytes that the grammar can't tell apart are written as one and runs of them are shortened, which changes no
    verdict and keeps the table narrow: GPT-2 has tokens of 128 bytes.

    Args:
        token_bytes: the bytes of each token id; b"" for special tokens.
    Returns:
        the table, of numpy arrays.
    Raises:
        UserError: no tokens.
    """
    if not token_bytes:
        raise UserError("byte_table: the vocabulary is empty; pass the bytes of every token")
    compressed = [_compress(piece) for piece in token_bytes]
    width = max(1, max(map(len, compressed)))
    joined = b"".join(piece.ljust(width, b"\0") for piece in compressed)
    return ByteTable(np.frombuffer(joined, np.uint8).reshape(len(compressed), width))


def _compress(piece: bytes) -> bytes:
    """Shorten a token's bytes to others over `0-9,.-# x` that lead to the same verdict in every context and style."""
    piece = re.sub(rb"[ \t\n\r\v\f]+", b" ", piece)
    piece = re.sub(rb"[^0-9,.\-# ]", b"x", piece)
    # A # ends a number as any junk does, and the coconut style reads nothing of what is before it.
    piece = re.sub(rb"[^0-9]*#", b"#", piece)
    return re.sub(rb"[^0-9#]+", _shorten_run, piece)


def _shorten_run(run: re.Match[bytes]) -> bytes:
    """Shorten a run without digits.

    No coconut answer has two such bytes in a row, but blanks and a blank before the minus. The codi scan is back at
    its start after two, and has only to know whether the last is a minus.
    """
    if len(run[0]) == 1 or run[0] == b" -":
        return run[0]
    return b"x-" if run[0].endswith(b"-") else b"x"


def reference_width(canonicals: Sequence[str]) -> int:
    """Give the width that `encode_references` needs for these canonical decimals (at least 1)."""
    return max(map(len, canonicals), default=1)


def encode_references(canonicals: Sequence[str], width: int) -> np.ndarray:
    """Write canonical decimals as rows of ASCII bytes.

    Args:
        canonicals: B references, as `canonical_decimal` writes them.
        width: bytes a row, the same for every batch so that shapes stay put.
    Returns:
        uint8 [B, width], 0 after a reference's end. (A row of zeros, say for padding, is matched by no completion.)
    Raises:
        UserError: a reference is longer than `width` or not canonical.
    """
    rows = np.zeros((len(canonicals), width), np.uint8)
    for index, canonical in enumerate(canonicals):
        if len(canonical) > width:
            raise UserError(f"reference {index} has {len(canonical)} characters, more than {width}; raise the width")
        if canonical_decimal(canonical) != canonical:
            raise UserError(f"reference {index}, {canonical!r}, is not canonical; pass it through canonical_decimal")
        rows[index, : len(canonical)] = np.frombuffer(canonical.encode("ascii"), np.uint8)
    return rows


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
    if style not in ("coconut", "codi"):
        raise UserError(f"answer style {style!r} is unknown; use 'coconut' or 'codi'")

    def verify_row(tokens_A, reference_R):
        is_eos_A = tokens_A == eos_id
        ended_A = jnp.cumsum(is_eos_A) > 0
        bytes_AL = jnp.asarray(table.bytes_VL).at[tokens_A].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        bytes_N = jnp.where(ended_A[:, None], 0, bytes_AL).reshape(-1)
        start = _last_number_start(bytes_N)
        correct = is_eos_A.any() & _equals(bytes_N, start, reference_R)
        return correct & _stands_alone(bytes_N, start) if style == "coconut" else correct

    return jax.vmap(verify_row)(jnp.asarray(tokens_BA), jnp.asarray(references_BR))


def _automaton() -> np.ndarray:
    """Tabulate the left-to-right scan for NUMBERs: [state, symbol] -> 4 * next state + where a number starts.

    The second part counts back from the byte just read: 0, 1 or 2 bytes before it; 3: no start is found here. Only a
    comma makes the scan look ahead: its group counts once there are three digits, and digits of a shorter one turn out
    to have been a number of their own ("1,45": 1, then 45) when the byte after them is read.
    """
    state = {name: index for index, name in enumerate(_STATES)}
    digit = {
        "idle": "int1", "minus": "int1", "int1": "int2", "int2": "int3", "int3": "int4+", "int4+": "int4+",
        "comma": "comma1", "comma1": "comma2", "comma2": "group", "group": "int1",
        "point": "fraction", "fraction": "fraction",
    }  # fmt: skip
    late = {"comma1": ("int1", 1), "comma2": ("int2", 2)}
    starts = {"idle": 0, "minus": 1, "group": 0}
    takes_comma = ("int1", "int2", "int3", "group")
    takes_point = (*takes_comma, "int4+")
    table = np.zeros((len(_STATES), 6), np.int32)
    for name, index in state.items():
        known, back = late.get(name, (name, _NO_START))
        table[index, _DIGIT] = 4 * state[digit[name]] + starts.get(name, _NO_START)
        table[index, _MINUS] = 4 * state["minus"] + back
        table[index, _COMMA] = 4 * state["comma" if known in takes_comma else "idle"] + back
        table[index, _POINT] = 4 * state["point" if known in takes_point else "idle"] + back
        table[index, _OTHER] = 4 * state["idle"] + back
        table[index, _PAD] = 4 * index + _NO_START
    return table


_AUTOMATON = _automaton()


def _last_number_start(bytes_N: jax.Array) -> jax.Array:
    """Find the index of the first byte of the last NUMBER (any index, if there is none)."""
    symbols_N = jnp.full(bytes_N.shape, _OTHER, jnp.int32)
    for symbol, byte in ((_MINUS, b"-"), (_COMMA, b","), (_POINT, b"."), (_PAD, b"\0")):
        symbols_N = jnp.where(bytes_N == byte[0], symbol, symbols_N)
    symbols_N = jnp.where(_is_digit(bytes_N), _DIGIT, symbols_N)
    # One byte more, for a number that the end of the text closes.
    symbols_N = jnp.concatenate([symbols_N, jnp.full((1,), _OTHER, jnp.int32)])

    def read(carry, inputs):
        state, start, previous, before_previous = carry
        index, symbol = inputs
        action = jnp.asarray(_AUTOMATON)[state, symbol]
        places = jnp.stack([index, previous, before_previous, start])
        # Pads lie between tokens, so "one byte before" isn't index - 1.
        pad = symbol == _PAD
        previous, before_previous = (
            jnp.where(pad, previous, index),
            jnp.where(pad, before_previous, previous),
        )
        return (action // 4, places[action % 4], previous, before_previous), None

    # Made from the data, so that it varies over a mesh as the data do: shard_map insists on that in a scan.
    zero = 0 * symbols_N[0]
    indices = jnp.arange(symbols_N.size, dtype=jnp.int32)
    (_, start, _, _), _ = jax.lax.scan(read, (zero, zero, zero, zero), (indices, symbols_N))
    return start


def _stands_alone(bytes_N: jax.Array, start: jax.Array) -> jax.Array:
    """Tell whether there is nothing but blanks around the last NUMBER, back to the last # and up to the end."""
    indices = jnp.arange(bytes_N.size)
    last_hash = jnp.where(bytes_N == ord("#"), indices, -1).max()
    last_digit = jnp.where(_is_digit(bytes_N), indices, -1).max()
    inked_N = (bytes_N != ord(" ")) & (bytes_N != 0)
    return ~(inked_N & (((indices > last_hash) & (indices < start)) | (indices > last_digit))).any()


def _equals(bytes_N: jax.Array, start: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Tell whether the NUMBER from `start` to the text's last digit is the reference.

    A digit's place is its power of ten. The numbers are equal if each nonzero digit of the one is the other's digit
    at that place, both have as many of them, and the signs agree; zeros in front and behind need no thought.
    """
    indices = jnp.arange(bytes_N.size)
    digits_N = _is_digit(bytes_N) & (indices >= start)
    after_point_N = jnp.cumsum((bytes_N == ord(".")) & (indices >= start)) > 0
    places_N = (digits_N & ~after_point_N).sum() - jnp.cumsum(digits_N)
    nonzero_N = digits_N & (bytes_N != ord("0"))
    negative = (bytes_N[start] == ord("-")) & nonzero_N.any()

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

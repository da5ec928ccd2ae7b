"""Numbers on the device: what `slpo_jax.rewards.answers` reads and compares as pure functions of arrays, inside jit.

A table turns tokens into bytes. The number's digits are compared with the reference's place by place, so that no number
is too long and nothing is ever rounded.
Shape suffixes: B rows, A answer slots, V vocabulary, R reference width, N bytes of a row (A times the table's width).
"""

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# What the table has for each byte. Beside a number, the bytes of one line are alike; see `answers.last_number`.
_ALIKE = {
    b"a": b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
    b"*": b"*_'",
    b"(": b"([{",
    b")": b")]}%^",
    b" ": b" \t",
    b"\n": b"\n\r\v\f",
    b"$": b"$\\\0",
    **{byte: byte for byte in (b"-", b"+", b"/", b",", b".", b":", b"#")},
    # The bytes of hyphens, of the en dash and of the minus, which are told when all three have come.
    **{bytes([byte]): bytes([byte]) for byte in (*b"0123456789", 0xE2, 0x80, 0x88, 0x90, 0x91, 0x92, 0x93)},
}
_KINDS = bytes(next((kind[0] for kind, alike in _ALIKE.items() if byte in alike), ord("!")) for byte in range(256))
_OTHER = re.compile(rb"\xe2(?!\x80[\x90-\x93]|\x88\x92)[\x80-\xbf]{2}")
_LONG = re.compile(rb"([a*()+/ \n$!#])\1+|(([-,.:])\3)\3+")


def byte_table(token_bytes: Sequence[bytes]) -> np.ndarray:
    """Build the table that numbers are read with, uint8 [V, longest token], 0 after a token's end.

    Runs of bytes that are alike are shortened, which changes no verdict and keeps the table narrow: GPT-2 has tokens of
    128 bytes.

    Args:
        token_bytes: the bytes of each token id; b"" for special tokens.
    """
    return padded_table([_LONG.sub(rb"\1\2", _OTHER.sub(b"!", piece).translate(_KINDS)) for piece in token_bytes])


def padded_table(pieces: Sequence[bytes], width: int = 0) -> np.ndarray:
    """uint8, a row a piece; as wide as the longest where no width is given."""
    width = width or max(1, max(map(len, pieces)))
    joined = b"".join(piece.ljust(width, b"\0") for piece in pieces)
    return np.frombuffer(joined, np.uint8).reshape(len(pieces), width)


def completed_text(table_VL, tokens_A: jax.Array, eos_id: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bytes [N] of the tokens before the first `eos_id`, 0 behind them, and whether there is one."""
    is_eos_A = tokens_A == eos_id
    bytes_AL = jnp.asarray(table_VL).at[tokens_A].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    bytes_N = jnp.where(jnp.cumsum(is_eos_A)[:, None] > 0, 0, bytes_AL).reshape(-1)
    return only(bytes_N, bytes_N > 0), is_eos_A.any()


def only(bytes_N: jax.Array, kept_N: jax.Array) -> jax.Array:
    """The bytes that are kept, one after the other, and 0 behind them."""
    places_N = jnp.where(kept_N, jnp.cumsum(kept_N) - 1, bytes_N.size)
    return jnp.zeros_like(bytes_N).at[places_N].set(bytes_N, mode="drop")


def before(bytes_N: jax.Array, count: int = 1) -> jax.Array:
    """Of each byte, the one that is `count` places before; 0 for none."""
    return jnp.pad(bytes_N, (count, 0))[: bytes_N.size]


def _with_minuses(text_N: jax.Array) -> jax.Array:
    """The text with ASCII's sign for hyphens, en dash and minus, and without currency signs."""
    one_N, two_N = before(text_N), before(text_N, 2)
    dash_N = (one_N == 0x80) & (text_N >= 0x90) & (text_N <= 0x93)
    minus_N = (two_N == 0xE2) & (dash_N | ((one_N == 0x88) & (text_N == 0x92)))
    first_N = jnp.pad(minus_N, (0, 2))[2:] | jnp.pad(minus_N, (0, 1))[1:]
    return only(jnp.where(minus_N, ord("-"), text_N), (text_N > 0) & ~first_N & (text_N != ord("$")))


def is_after_mark(text_N: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Whether what follows the last #, blanks aside, is the reference."""
    begin = _last(text_N == ord("#")) + 1
    inked_N = ~_in(text_N, b" \n\0")
    first = _first(inked_N & (jnp.arange(text_N.size) >= begin))
    return _is_number(text_N, first, _last(inked_N), reference_R)


def is_last_number(text_N: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Whether the number that the last digit is in is the reference, and no operator stands apart before it."""
    text_N = _with_minuses(text_N)
    indices, last, before_N = jnp.arange(text_N.size), _last(_is_digit(text_N)), before(text_N)
    apart_N = _in(text_N, b" \n!#") | (text_N >= 0x80)
    apart_N |= (text_N == ord(":")) & ~_is_digit(before_N) | (text_N == ord("(")) & (before_N != ord(")"))
    word = _last(apart_N & (indices < last)) + 1
    begin = _first((indices >= word) & ~_in(text_N, b"*+,"))
    joined = _at(text_N, _last((indices < word) & ~_in(text_N, b" (")))
    return ~_in(joined, b"-+/") & _is_number(text_N, begin, last, reference_R)


def _is_number(text_N: jax.Array, begin: jax.Array, last: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Tell whether what stands from `begin` to `last` is `-?NUMBER`, and the reference.

    A digit's place is its power of ten. The numbers are equal if each nonzero digit of the one is the other's digit
    at that place, both have as many of them, and the signs agree; zeros in front and behind need no thought.
    """
    indices, minus = jnp.arange(text_N.size), _at(text_N, begin) == ord("-")
    begin += minus
    within_N = (indices >= begin) & (indices <= last)
    digit_N, comma_N, point_N = (
        within_N & found_N for found_N in (_is_digit(text_N), text_N == ord(","), text_N == ord("."))
    )
    whole_N = jnp.cumsum(point_N) == 0
    size = (digit_N & whole_N).sum()
    place_N = size - jnp.cumsum(digit_N)  # of a sign between digits: that of the digit before it
    grouped_N = ~comma_N | (whole_N & (place_N > 0) & (place_N % 3 == 0))
    commas = comma_N.sum()
    well_formed = (
        _is_digit(_at(text_N, begin)) & _is_digit(_at(text_N, last)) & (point_N.sum() <= 1)
        & (~within_N | digit_N | ((comma_N | point_N) & _is_digit(before(text_N)))).all()
        & grouped_N.all() & ((commas == 0) | (commas == (size - 1) // 3))
    )  # fmt: skip

    nonzero_N = digit_N & (text_N != ord("0"))
    point = _first((reference_R == ord(".")) | (reference_R == 0))
    same_N = ~nonzero_N | (text_N == _at(reference_R, point - 1 - place_N + (place_N < 0)))
    same_count = nonzero_N.sum() == (_is_digit(reference_R) & (reference_R != ord("0"))).sum()
    same_sign = (minus & nonzero_N.any()) == (reference_R[0] == ord("-"))
    return well_formed & _is_digit(reference_R).any() & same_N.all() & same_count & same_sign


def _at(bytes_N: jax.Array, index: jax.Array) -> jax.Array:
    """The byte at a place, 0 outside."""
    return bytes_N.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _first(found_N: jax.Array) -> jax.Array:
    """The first place, N for none."""
    return jnp.where(found_N, jnp.arange(found_N.size), found_N.size).min()


def _last(found_N: jax.Array) -> jax.Array:
    """The last place, -1 for none."""
    return jnp.where(found_N, jnp.arange(found_N.size), -1).max()


def _in(bytes_: jax.Array, kinds: bytes) -> jax.Array:
    """Mark the bytes of some kinds."""
    return jnp.isin(bytes_, jnp.array([*kinds], jnp.uint8))


def _is_digit(bytes_: jax.Array) -> jax.Array:
    """Mark the bytes `0` to `9`."""
    return (bytes_ >= ord("0")) & (bytes_ <= ord("9"))

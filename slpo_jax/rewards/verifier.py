"""Verdicts on the device: what `slpo_jax.rewards.answers` reads and compares, pure functions of arrays in jit.

Here N is the bytes of one text, R those of one reference, and L the most bytes that a token has.
"""

import functools
import operator
import re
import string
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.rewards.answers import AnswerStyle
from slpo_jax.rewards.texts import (
    BESIDE,
    BOXES,
    CHOICE_MARKS,
    END_TAG,
    FOLLOWING,
    LETTERS,
    MARKS,
    normalise_bytes,
)

# The bytes that answers are told by.
_BLANK = ord(" ")
_HASH = ord("#")
_MINUS = ord("-")
_DOLLAR = ord("$")
_COLON = ord(":")
_OPENING = ord("(")
_CLOSING = ord(")")
_COMMA = ord(",")
_POINT = ord(".")
_ZERO = ord("0")
_NINE = ord("9")
_LEFT_BRACE = ord("{")
_RIGHT_BRACE = ord("}")
_CAPITAL_A = ord("A")
_CAPITAL_Z = ord("Z")
_SMALL_A = ord("a")
_SMALL_Z = ord("z")
_APOSTROPHE = ord("'")
_BACKSLASH = ord("\\")

# What the table has for each byte. Beside a number, the bytes of one line are alike; see `answers.last_number`.
_ALIKE = {
    b"a": b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
    b"*": b"*_'",
    b"(": b"([{",
    b")": b")]}%^",
    b" ": b" \t",
    b"\n": b"\n\r\v\f",
    b"$": b"$\\\0",
}
# These stay as they are. Behind the signs are the bytes of hyphens, of the en dash and of the minus, which are told
# when all three have come.
_THEMSELVES = b"-+/,.:#0123456789" + b"\xe2\x80\x88\x90\x91\x92\x93"


def _byte_kinds() -> bytes:
    """Return, for each of the 256 bytes, the one that stands for it."""
    kinds = bytearray(b"!" * 256)
    for byte in _THEMSELVES:
        kinds[byte] = byte
    for kind, alike in _ALIKE.items():
        for byte in alike:
            kinds[byte] = kind[0]
    return bytes(kinds)


_KINDS = _byte_kinds()
_OTHER = re.compile(rb"\xe2(?!\x80[\x90-\x93]|\x88\x92)[\x80-\xbf]{2}")
_LONG = re.compile(rb"([a*()+/ \n$!#])\1+|(([-,.:])\3)\3+")


def byte_table(token_bytes: Sequence[bytes]) -> np.ndarray:
    """Build the table that numbers are read with, uint8 [V, longest token], 0 after a token's end.

    Runs of bytes that are alike are shortened, which changes no verdict and keeps the table narrow: GPT-2 has tokens of
    128 bytes.

    Args:
        token_bytes: the bytes of each token id; b"" for special tokens.
    """
    pieces: list[bytes] = []
    for piece in token_bytes:
        kinds = _OTHER.sub(b"!", piece).translate(_KINDS)
        pieces.append(_LONG.sub(rb"\1\2", kinds))
    return padded_table(pieces)


def padded_table(pieces: Sequence[bytes], width: int = 0) -> np.ndarray:
    """Pad byte strings to uint8 rows; as wide as the longest where no width is given."""
    width = width or max(1, max(map(len, pieces)))
    joined = b"".join(piece.ljust(width, b"\0") for piece in pieces)
    return np.frombuffer(joined, np.uint8).reshape(len(pieces), width)


def completed_text(
    table_VL, tokens_A: jax.Array, eos_id: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the bytes [N] of the tokens before the first `eos_id`, 0 behind them, and whether there is an end."""
    is_eos_A = tokens_A == eos_id
    rows_A = jnp.asarray(table_VL).at[tokens_A]
    bytes_AL = rows_A.get(mode="fill", fill_value=0, wrap_negative_indices=False)
    is_behind_A = jnp.cumsum(is_eos_A) > 0
    bytes_N = jnp.where(is_behind_A[:, None], 0, bytes_AL).reshape(-1)
    return compact(bytes_N, bytes_N > 0), is_eos_A.any()


def compact(bytes_N: jax.Array, mask_N: jax.Array) -> jax.Array:
    """Move the bytes that are kept to the front, 0 behind them."""
    places_N = jnp.where(mask_N, jnp.cumsum(mask_N) - 1, bytes_N.size)
    return jnp.zeros_like(bytes_N).at[places_N].set(bytes_N, mode="drop")


def before(bytes_N: jax.Array, count: int = 1) -> jax.Array:
    """Shift bytes: each is the one `count` places before it; 0 for none."""
    return jnp.pad(bytes_N, (count, 0))[: bytes_N.size]


def _with_minuses(text_N: jax.Array) -> jax.Array:
    """Write hyphens, en dash and minus as ASCII's sign, and leave out currency signs."""
    before_N = before(text_N)
    before_2_N = before(text_N, 2)
    dash_N = (before_N == 0x80) & (text_N >= 0x90) & (text_N <= 0x93)
    minus_N = (before_2_N == 0xE2) & (dash_N | ((before_N == 0x88) & (text_N == 0x92)))
    # The last byte becomes the sign, the two before it go.
    first_N = _after(minus_N, 2) | _after(minus_N)
    signs_N = jnp.where(minus_N, _MINUS, text_N)
    return compact(signs_N, (text_N > 0) & ~first_N & (text_N != _DOLLAR))


def is_after_mark(text_N: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Tell whether what follows the last #, blanks aside, is the reference."""
    begin = _last(text_N == _HASH) + 1
    inked_N = ~_in(text_N, b" \n\0")
    first = _first(inked_N & (jnp.arange(text_N.size) >= begin))
    return _is_number(text_N, first, _last(inked_N), reference_R)


def is_last_number(text_N: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Tell whether the number with the last digit is the reference, and no operator stands apart before it."""
    text_N = _with_minuses(text_N)
    indices = jnp.arange(text_N.size)
    last = _last(_is_digit(text_N))
    before_N = before(text_N)
    apart_N = _in(text_N, b" \n!#") | (text_N >= 0x80)
    # A colon is apart behind anything but a digit, an opening bracket behind anything but a closing one.
    colon_N = (text_N == _COLON) & ~_is_digit(before_N)
    bracket_N = (text_N == _OPENING) & (before_N != _CLOSING)
    apart_N |= colon_N | bracket_N
    word = _last(apart_N & (indices < last)) + 1
    begin = _first((indices >= word) & ~_in(text_N, b"*+,"))
    joined = _at(text_N, _last((indices < word) & ~_in(text_N, b" (")))
    return ~_in(joined, b"-+/") & _is_number(text_N, begin, last, reference_R)


def _is_number(
    text_N: jax.Array, begin: jax.Array, last: jax.Array, reference_R: jax.Array
) -> jax.Array:
    """Tell whether what stands from `begin` to `last` is `-?NUMBER`, and the reference.

    A digit's place is its power of ten. The numbers are equal if each nonzero digit of the one is the other's digit
    at that place, both have as many of them, and the signs agree; zeros in front and behind need no thought.
    """
    indices = jnp.arange(text_N.size)
    minus = _at(text_N, begin) == _MINUS
    begin += minus
    within_N = (indices >= begin) & (indices <= last)
    digit_N = within_N & _is_digit(text_N)
    comma_N = within_N & (text_N == _COMMA)
    point_N = within_N & (text_N == _POINT)

    # A number begins and ends with a digit, and has one point at most. Commas part all of its thousands, or none.
    whole_N = jnp.cumsum(point_N) == 0
    size = (digit_N & whole_N).sum()
    # A sign between digits has the place of the digit before it.
    place_N = size - jnp.cumsum(digit_N)
    grouped_N = ~comma_N | (whole_N & (place_N > 0) & (place_N % 3 == 0))
    commas = comma_N.sum()
    well_formed = _is_digit(_at(text_N, begin)) & _is_digit(_at(text_N, last))
    well_formed &= point_N.sum() <= 1
    sign_N = (comma_N | point_N) & _is_digit(before(text_N))
    well_formed &= (~within_N | digit_N | sign_N).all()
    well_formed &= grouped_N.all()
    well_formed &= (commas == 0) | (commas == (size - 1) // 3)

    # It is the reference if each nonzero digit is the reference's at that place, and there are as many of them.
    nonzero_N = digit_N & (text_N != _ZERO)
    point = _first((reference_R == _POINT) | (reference_R == 0))
    expected_N = _at(reference_R, point - 1 - place_N + (place_N < 0))
    same_N = ~nonzero_N | (text_N == expected_N)
    expected_nonzero_R = _is_digit(reference_R) & (reference_R != _ZERO)
    same_count = nonzero_N.sum() == expected_nonzero_R.sum()
    same_sign = (minus & nonzero_N.any()) == (reference_R[0] == _MINUS)
    return (
        well_formed
        & _is_digit(reference_R).any()
        & same_N.all()
        & same_count
        & same_sign
    )


def _at(bytes_N: jax.Array, index: jax.Array) -> jax.Array:
    """Return the byte at a place, 0 outside."""
    return bytes_N.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _first(mask_N: jax.Array) -> jax.Array:
    """Return the first place, N for none."""
    return jnp.where(mask_N, jnp.arange(mask_N.size), mask_N.size).min()


def _last(mask_N: jax.Array) -> jax.Array:
    """Return the last place, -1 for none."""
    return jnp.where(mask_N, jnp.arange(mask_N.size), -1).max()


def _in(bytes_: jax.Array, kinds: bytes) -> jax.Array:
    """Mark the bytes of some kinds."""
    return jnp.isin(bytes_, jnp.array([*kinds], jnp.uint8))


def _is_digit(bytes_: jax.Array) -> jax.Array:
    """Mark the bytes `0` to `9`."""
    return (bytes_ >= _ZERO) & (bytes_ <= _NINE)


Judge = Callable[[jax.Array, jax.Array], jax.Array]
"""(the bytes of a completion, uint8 [N], 0 behind them; its encoded reference, uint8 [R]) -> bool, traceable."""


def judge_completions(
    table_VL,
    tokens_BA: jax.Array,
    references_BR: jax.Array,
    eos_id: int | jax.Array,
    judge: Judge,
) -> jax.Array:
    """Judge completions by their bytes.

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
    return padded_table(list(map(normalise_bytes, token_bytes)))


def is_text(bytes_N: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Tell whether a completion gives its reference: `compared(said_text(completion)) == compared(reference)`."""
    bytes_N, begin, end = answer_span(bytes_N)
    length = (reference_R > 0).sum()
    indices_R = begin + jnp.arange(reference_R.size)
    same_R = bytes_N.at[indices_R].get(mode="fill", fill_value=0) == reference_R
    return (length > 0) & (end - begin == length) & (same_R | (reference_R == 0)).all()


def answer_span(bytes_N: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a completion's bytes [N] with single spaces, and where `said_text` of it begins and ends there."""
    bytes_N = _with_single_spaces(bytes_N)
    indices_N = jnp.arange(bytes_N.size)
    # The answer stands behind the last mark.
    box_start = _last_end(bytes_N, BOXES)
    start = jnp.maximum(_last_end(bytes_N, MARKS), box_start)
    behind_N = indices_N >= start
    # It ends at a closing tag, and in a box at the first brace that nothing in the box has opened.
    is_box = (box_start == start) & (start > 0)
    counted_N = behind_N & is_box & (before(bytes_N) != _BACKSLASH)
    opens_N = counted_N & (bytes_N == _LEFT_BRACE)
    closes_N = counted_N & (bytes_N == _RIGHT_BRACE)
    depth_N = jnp.cumsum(opens_N.astype(jnp.int32) - closes_N)
    tag_N = behind_N & _matches(bytes_N, END_TAG)
    stop = jnp.minimum(_first(depth_N < 0), _first(tag_N))
    # What stands beside it at both ends is no part of it.
    inked_N = behind_N & (indices_N < stop) & ~_in(bytes_N, BESIDE.encode() + b"\0")
    begin = _first(inked_N)
    end = jnp.where(inked_N & (bytes_N != _POINT), indices_N + 1, 0).max()
    return bytes_N, begin, jnp.maximum(end, begin)


def _last_end(bytes_N: jax.Array, marks: Sequence[bytes]) -> jax.Array:
    """Return the place behind the last of some marks, 0 without any."""
    indices_N = jnp.arange(bytes_N.size)
    ends: list[jax.Array] = []
    for mark in marks:
        ends.append(jnp.where(_matches(bytes_N, mark), indices_N + len(mark), 0))
    return jnp.stack(ends).max()


def _with_single_spaces(bytes_N: jax.Array) -> jax.Array:
    """Remove blanks that follow another one; no byte is 0."""
    again_N = (bytes_N == _BLANK) & (before(bytes_N) == _BLANK)
    return compact(bytes_N, (bytes_N > 0) & ~again_N)


def _matches(bytes_N: jax.Array, text: bytes) -> jax.Array:
    """Mark where a text begins. Behind the last byte is a blank: a # at the end is a mark too."""
    padded = jnp.pad(bytes_N, (0, len(text)))
    padded = jnp.where(padded == 0, _BLANK, padded)
    same: list[jax.Array] = []
    for place, byte in enumerate(text):
        same.append(padded[place : place + bytes_N.size] == byte)
    return jnp.stack(same).all(axis=0)


# The bytes of an apostrophe that isn't ASCII are told when all three have come; null bytes part them.
_QUOTE = b"\xe2\x80\x99"
_THEMSELVES_IN_TEXTS = string.ascii_letters.encode() + b" ':=*" + _QUOTE


def _text_kinds() -> bytes:
    """Return, for each of the 256 bytes, the one that stands for it where choices are looked for."""
    kinds = bytearray(b"." * 256)
    kinds[0] = 1
    for byte in b"0123456789_":
        kinds[byte] = _ZERO
    for byte in _THEMSELVES_IN_TEXTS:
        kinds[byte] = byte
    return bytes(kinds)


_TEXT_KINDS = _text_kinds()


def choice_table(token_bytes: Sequence[bytes]) -> np.ndarray:
    """Build the table that `is_choice` reads tokens with; signs that are alike are shortened, and so are long words."""
    pieces: list[bytes] = []
    for piece in token_bytes:
        kinds = re.sub(rb"[ \t\n\r\v\f]+", b" ", piece).translate(_TEXT_KINDS)
        pieces.append(re.sub(rb"\.+|([\w']{8})[\w']+([\w']{8})", _shorten, kinds))
    return padded_table(pieces)


def _shorten(match: re.Match[bytes]) -> bytes:
    """Shorten a run to its ends, in which no mark and no word that follows a letter is lost."""
    return match[1] + match[2] if match[1] else b"."


def is_choice(bytes_N: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Tell whether the letter that a completion gives is the reference's first byte, see `texts.said_choice`."""
    # An apostrophe that isn't ASCII becomes one that is: its last byte the sign, the two before it go.
    quote_N = (
        (bytes_N == _QUOTE[2])
        & (before(bytes_N) == _QUOTE[1])
        & (before(bytes_N, 2) == _QUOTE[0])
    )
    bytes_N = jnp.where(quote_N, _APOSTROPHE, bytes_N)
    kept_N = (bytes_N > 1) & ~_after(quote_N) & ~_after(quote_N, 2)
    bytes_N = _with_single_spaces(compact(bytes_N, kept_N))

    # Find the letters that stand alone, but for A and I where they are words.
    capital_N = (bytes_N >= _CAPITAL_A) & (bytes_N <= _CAPITAL_Z)
    lower_N = jnp.where(capital_N, bytes_N + 32, bytes_N)
    alpha_N = (lower_N >= _SMALL_A) & (lower_N <= _SMALL_Z)
    within_N = alpha_N | (bytes_N == _ZERO) | (bytes_N == _APOSTROPHE)

    def whole(text: bytes) -> jax.Array:
        """Mark where a text begins that no word goes on from."""
        return _matches(lower_N, text) & ~_after(within_N, len(text))

    follows_N = (bytes_N == _BLANK) & _after(alpha_N) & _after(within_N, 2)
    follows_N &= ~jnp.stack([whole(b" " + text) for text in FOLLOWING]).any(axis=0)
    word_N = _in(bytes_N, b"AI") & _after(follows_N)
    alone_N = ~before(within_N) & ~_after(within_N)
    letter_N = _in(bytes_N, LETTERS.encode()) & alone_N & ~word_N

    # Find the marks.
    marks: list[jax.Array] = []
    for mark in CHOICE_MARKS:
        is_word = mark.endswith(b"s")
        marks.append(whole(mark) if is_word else _matches(lower_N, mark))
    mark_N = jnp.stack(marks).any(0)

    # Take the first letter behind the last mark that has one, else the last letter.
    indices_N = jnp.arange(bytes_N.size)
    last_letter_N = jax.lax.cummax(jnp.where(letter_N, indices_N, -1))
    last_mark_N = jax.lax.cummax(jnp.where(mark_N, indices_N, -1))
    first_N = letter_N & (last_mark_N > before(last_letter_N + 1) - 1)
    behind = jnp.where(first_N, indices_N, -1).max()
    last = jnp.where(behind >= 0, behind, last_letter_N[-1])
    return (last >= 0) & (bytes_N[last] == reference_R[0])


def _after(mask_N: jax.Array, count: int = 1) -> jax.Array:
    """Shift back: each is what is `count` places behind it."""
    return jnp.pad(mask_N, (0, count))[count:]


ON_DEVICE: dict[AnswerStyle, tuple[Callable[[Sequence[bytes]], np.ndarray], Judge]] = {
    "after_mark": (byte_table, is_after_mark),
    "last_number": (byte_table, is_last_number),
    "texts": (text_table, is_text),
    "choice": (choice_table, is_choice),
}
"""Of a style: the table [V, ..] of the bytes of each token id, and whether a completion gives its reference, as
`answers.parse_completion` and `answers.are_right` say it; one without any byte is never given."""


def is_end(tokens: jax.Array, eos_ids: Sequence[int]) -> jax.Array:
    """Mark end tokens: bool, the tokens' shape."""
    return functools.reduce(operator.or_, (tokens == eos_id for eos_id in eos_ids))


def said_eos(
    said_NT: jax.Array, lengths_N: jax.Array, eos_ids: Sequence[int]
) -> jax.Array:
    """Tell, bool [N], whether a thought's last step is written down as eos, so that no answer follows."""
    last_NT = jnp.arange(1, said_NT.shape[1] + 1)[None] == lengths_N[:, None]
    return jnp.any(last_NT & is_end(said_NT, eos_ids), axis=1)


def answer_mask(tokens_NA: jax.Array, eos_ids: Sequence[int]) -> jax.Array:
    """Mark, bool [N, A], the generated tokens, up to and including the one that ended the answer."""
    ends_NA = is_end(tokens_NA, eos_ids)
    return jnp.cumsum(ends_NA, axis=1) - ends_NA == 0

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
from jax import Array

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
        told = _OTHER.sub(b"!", piece)
        kinds = told.translate(_KINDS)
        shortened = _LONG.sub(rb"\1\2", kinds)
        pieces.append(shortened)
    return padded_table(pieces)


def padded_table(pieces: Sequence[bytes], width: int = 0) -> np.ndarray:
    """Pad byte strings to uint8 rows; as wide as the longest where no width is given."""
    if not width:
        longest = max(map(len, pieces))
        width = max(1, longest)
    padded = [piece.ljust(width, b"\0") for piece in pieces]
    flat = np.frombuffer(b"".join(padded), np.uint8)
    return flat.reshape(len(pieces), width)


def completed_text(
    table_VL, tokens_A: Array, eos_id: int | Array
) -> tuple[Array, Array]:
    """Return the bytes [N] of the tokens before the first `eos_id`, 0 behind them, and whether there is an end."""
    table_VL = jnp.asarray(table_VL)
    bytes_AL = _at(table_VL, tokens_A)
    # Leave out the first end and all behind it.
    is_eos_A = tokens_A == eos_id
    n_ends_A = jnp.cumsum(is_eos_A)
    is_behind_A = n_ends_A > 0
    bytes_AL = jnp.where(is_behind_A[:, None], 0, bytes_AL)
    # Close the gaps behind tokens shorter than the longest.
    bytes_N = bytes_AL.reshape(-1)
    text_N = compact(bytes_N, bytes_N > 0)
    has_end = is_eos_A.any()
    return text_N, has_end


def compact(bytes_N: Array, mask_N: Array) -> Array:
    """Move the bytes that are kept to the front, 0 behind them."""
    ranks_N = jnp.cumsum(mask_N) - 1
    places_N = jnp.where(mask_N, ranks_N, bytes_N.size)
    zeros_N = jnp.zeros_like(bytes_N)
    return zeros_N.at[places_N].set(bytes_N, mode="drop")


def before(bytes_N: Array, count: int = 1) -> Array:
    """Shift bytes: each is the one `count` places before it; 0 for none."""
    shifted = jnp.pad(bytes_N, (count, 0))
    return shifted[: bytes_N.size]


def _with_minuses(text_N: Array) -> Array:
    """Write hyphens, en dash and minus as ASCII's sign, and leave out currency signs."""
    before_N = before(text_N)
    begins_N = before(text_N, 2) == 0xE2
    # Hyphens and the en dash are E2 80 90 to E2 80 93, the minus is E2 88 92.
    is_dash_N = (text_N >= 0x90) & (text_N <= 0x93)
    dash_N = (before_N == 0x80) & is_dash_N
    minus_N = (before_N == 0x88) & (text_N == 0x92)
    sign_N = begins_N & (dash_N | minus_N)
    # The last byte becomes the sign, the two before it go.
    signs_N = jnp.where(sign_N, _MINUS, text_N)
    used_N = (text_N > 0) & (text_N != _DOLLAR)
    used_N &= ~_after(sign_N)
    used_N &= ~_after(sign_N, 2)
    return compact(signs_N, used_N)


def is_after_mark(text_N: Array, reference_R: Array) -> Array:
    """Tell whether what follows the last #, blanks aside, is the reference."""
    is_mark_N = text_N == _HASH
    begin = _last(is_mark_N) + 1
    indices_N = jnp.arange(text_N.size)
    behind_N = indices_N >= begin
    inked_N = ~is_in(text_N, b" \n\0")
    first = _first(inked_N & behind_N)
    last = _last(inked_N)
    return _is_number(text_N, first, last, reference_R)


def is_last_number(text_N: Array, reference_R: Array) -> Array:
    """Tell whether the number with the last digit is the reference, and no operator stands apart before it."""
    text_N = _with_minuses(text_N)
    indices = jnp.arange(text_N.size)
    # The number ends at the last digit.
    last = _last(is_digit(text_N))

    # Its word begins behind the last byte that stands apart: blanks, other signs, and all that isn't ASCII.
    apart_N = is_in(text_N, b" \n!#")
    apart_N |= text_N >= 0x80
    # A colon is apart behind anything but a digit, an opening bracket behind anything but a closing one.
    before_N = before(text_N)
    is_colon_N = text_N == _COLON
    apart_N |= is_colon_N & ~is_digit(before_N)
    is_bracket_N = text_N == _OPENING
    apart_N |= is_bracket_N & (before_N != _CLOSING)
    apart_N &= indices < last
    word = _last(apart_N) + 1

    # The number begins behind the marks that its word begins with.
    in_word_N = indices >= word
    is_mark_N = is_in(text_N, b"*+,")
    behind_marks_N = in_word_N & ~is_mark_N
    begin = _first(behind_marks_N)
    is_right = _is_number(text_N, begin, last, reference_R)

    # Where an operator comes before the word, the number is a part of a term.
    is_gap_N = is_in(text_N, b" (")
    before_word_N = ~in_word_N & ~is_gap_N
    place = _last(before_word_N)
    joined = _at(text_N, place)
    is_operator = is_in(joined, b"-+/")
    return is_right & ~is_operator


def _is_number(text_N: Array, begin: Array, last: Array, reference_R: Array) -> Array:
    """Tell whether what stands from `begin` to `last` is `-?NUMBER`, and the reference.

    A digit's place is its power of ten. The numbers are equal if each nonzero digit of the one is the other's digit
    at that place, both have as many of them, and the signs agree; zeros in front and behind need no thought.
    """
    indices = jnp.arange(text_N.size)
    first_byte = _at(text_N, begin)
    is_negative = first_byte == _MINUS
    begin += is_negative
    within_N = (indices >= begin) & (indices <= last)
    is_digit_N = is_digit(text_N)
    digit_N = within_N & is_digit_N
    comma_N = within_N & (text_N == _COMMA)
    point_N = within_N & (text_N == _POINT)

    # It begins and ends with a digit, and a digit is before each comma and point.
    well_formed = _at(is_digit_N, begin)
    well_formed &= _at(is_digit_N, last)
    sign_N = comma_N | point_N
    sign_N &= before(is_digit_N)
    allowed_N = digit_N | sign_N
    allowed_N |= ~within_N
    well_formed &= allowed_N.all()

    # It has one point at most.
    n_points = point_N.sum()
    well_formed &= n_points <= 1
    points_so_far_N = jnp.cumsum(point_N)
    whole_N = points_so_far_N == 0

    # A sign between digits has the place of the digit before it.
    whole_digit_N = digit_N & whole_N
    size = whole_digit_N.sum()
    place_N = size - jnp.cumsum(digit_N)

    # Commas part all of its thousands, or none.
    is_thousand_N = (place_N > 0) & (place_N % 3 == 0)
    grouped_N = whole_N & is_thousand_N
    in_place_N = grouped_N | ~comma_N
    well_formed &= in_place_N.all()
    n_commas = comma_N.sum()
    n_thousands = (size - 1) // 3
    well_formed &= (n_commas == 0) | (n_commas == n_thousands)

    # It is the reference if each nonzero digit is the reference's at that place, and there are as many of them.
    nonzero_N = digit_N & (text_N != _ZERO)
    is_end_R = reference_R == 0
    ends_whole_R = is_end_R | (reference_R == _POINT)
    point = _first(ends_whole_R)
    is_fraction_N = place_N < 0
    place_R_N = point - 1 - place_N + is_fraction_N
    reference_N = _at(reference_R, place_R_N)
    same_N = text_N == reference_N
    agrees_N = same_N | ~nonzero_N
    is_same = agrees_N.all()

    is_digit_R = is_digit(reference_R)
    nonzero_R = is_digit_R & (reference_R != _ZERO)
    n_nonzero = nonzero_N.sum()
    n_expected = nonzero_R.sum()
    is_same &= n_nonzero == n_expected
    is_same &= is_digit_R.any()

    # Zero has no sign.
    is_negative &= nonzero_N.any()
    is_same &= is_negative == (reference_R[0] == _MINUS)
    return well_formed & is_same


def _at(rows: Array, index: Array) -> Array:
    """Return the row at a place, 0 outside."""
    row = rows.at[index]
    return row.get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _first(mask_N: Array) -> Array:
    """Return the first place, N for none."""
    indices_N = jnp.arange(mask_N.size)
    places_N = jnp.where(mask_N, indices_N, mask_N.size)
    return places_N.min()


def _last(mask_N: Array) -> Array:
    """Return the last place, -1 for none."""
    indices_N = jnp.arange(mask_N.size)
    places_N = jnp.where(mask_N, indices_N, -1)
    return places_N.max()


def is_in(bytes_: Array, kinds: bytes) -> Array:
    """Mark the bytes of some kinds."""
    wanted = np.frombuffer(kinds, np.uint8)
    return jnp.isin(bytes_, wanted)


def is_digit(bytes_: Array) -> Array:
    """Mark the bytes `0` to `9`."""
    return (bytes_ >= _ZERO) & (bytes_ <= _NINE)


Judge = Callable[[Array, Array], Array]
"""(the bytes of a completion, uint8 [N], 0 behind them; its encoded reference, uint8 [R]) -> bool, traceable."""


def judge_completions(
    table_VL,
    tokens_BA: Array,
    references_BR: Array,
    eos_id: int | Array,
    judge: Judge,
) -> Array:
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

    tokens_BA = jnp.asarray(tokens_BA)
    references_BR = jnp.asarray(references_BR)

    def judge_row(tokens_A, reference_R):
        bytes_N, ended = completed_text(table_VL, tokens_A, eos_id)
        return ended & judge(bytes_N, reference_R)

    return jax.vmap(judge_row)(tokens_BA, references_BR)


def text_table(token_bytes: Sequence[bytes]) -> np.ndarray:
    """Build the table that `is_text` reads tokens with; as `byte_table`."""
    pieces = [normalise_bytes(piece) for piece in token_bytes]
    return padded_table(pieces)


def is_text(bytes_N: Array, reference_R: Array) -> Array:
    """Tell whether a completion gives its reference.

    That is `normalise_text(said_text(completion)) == normalise_text(reference)`.
    """
    bytes_N, begin, end = answer_span(bytes_N)
    used_R = reference_R > 0
    length = used_R.sum()
    has_same_length = end - begin == length
    # Compare byte by byte from where the answer begins.
    offsets_R = jnp.arange(reference_R.size)
    answer_R = _at(bytes_N, begin + offsets_R)
    same_R = answer_R == reference_R
    agrees_R = same_R | ~used_R
    is_same = agrees_R.all()
    return (length > 0) & has_same_length & is_same


def answer_span(bytes_N: Array) -> tuple[Array, Array, Array]:
    """Return a completion's bytes [N] with single spaces, and where `said_text` of it begins and ends there."""
    bytes_N = _with_single_spaces(bytes_N)
    indices_N = jnp.arange(bytes_N.size)

    # The answer stands behind the last mark.
    mark_end = _last_end(bytes_N, MARKS)
    box_start = _last_end(bytes_N, BOXES)
    start = jnp.maximum(mark_end, box_start)
    behind_N = indices_N >= start

    # In a box it ends at the first brace that nothing in the box has opened.
    is_box = (box_start == start) & (start > 0)
    escaped_N = before(bytes_N) == _BACKSLASH
    counted_N = behind_N & is_box & ~escaped_N
    opens_N = counted_N & (bytes_N == _LEFT_BRACE)
    closes_N = counted_N & (bytes_N == _RIGHT_BRACE)
    change_N = opens_N.astype(jnp.int32) - closes_N
    depth_N = jnp.cumsum(change_N)
    box_end = _first(depth_N < 0)

    # And it ends at a closing tag.
    tag_N = behind_N & _matches(bytes_N, END_TAG)
    tag_start = _first(tag_N)
    stop = jnp.minimum(box_end, tag_start)

    # What stands beside it at both ends isn't a part of it, nor is a point behind it.
    beside_N = is_in(bytes_N, BESIDE.encode() + b"\0")
    inked_N = behind_N & ~beside_N
    inked_N &= indices_N < stop
    begin = _first(inked_N)
    inked_N &= bytes_N != _POINT
    end = _last(inked_N) + 1
    end = jnp.maximum(end, begin)
    return bytes_N, begin, end


def _last_end(bytes_N: Array, marks: Sequence[bytes]) -> Array:
    """Return the place behind the last of some marks, 0 without any."""
    ends: list[Array] = []
    for mark in marks:
        begin = _last(_matches(bytes_N, mark))
        end = begin + len(mark)
        is_there = begin >= 0
        end = jnp.where(is_there, end, 0)
        ends.append(end)
    return jnp.stack(ends).max()


def _with_single_spaces(bytes_N: Array) -> Array:
    """Remove blanks that follow another one; no byte is 0."""
    blank_N = bytes_N == _BLANK
    again_N = blank_N & before(blank_N)
    used_N = (bytes_N > 0) & ~again_N
    return compact(bytes_N, used_N)


def _matches(bytes_N: Array, text: bytes) -> Array:
    """Mark where a text begins. Behind the last byte is a blank: a # at the end is a mark too."""
    padded = jnp.pad(bytes_N, (0, len(text)))
    padded = jnp.where(padded == 0, _BLANK, padded)
    same: list[Array] = []
    for place, byte in enumerate(text):
        shifted_N = padded[place : place + bytes_N.size]
        same.append(shifted_N == byte)
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
        spaced = re.sub(rb"[ \t\n\r\v\f]+", b" ", piece)
        kinds = spaced.translate(_TEXT_KINDS)
        shortened = re.sub(rb"\.+|([\w']{8})[\w']+([\w']{8})", _shorten, kinds)
        pieces.append(shortened)
    return padded_table(pieces)


def _shorten(match: re.Match[bytes]) -> bytes:
    """Shorten a run to its ends, in which no mark and no word that follows a letter is lost."""
    if match[1]:
        return match[1] + match[2]
    return b"."


def is_choice(bytes_N: Array, reference_R: Array) -> Array:
    """Tell whether the letter that a completion gives is the reference's first byte, see `texts.said_choice`."""
    # An apostrophe that isn't ASCII becomes one that is: its last byte the sign, the two before it go.
    quote_N = (
        (bytes_N == _QUOTE[2])
        & (before(bytes_N) == _QUOTE[1])
        & (before(bytes_N, 2) == _QUOTE[0])
    )
    bytes_N = jnp.where(quote_N, _APOSTROPHE, bytes_N)
    used_N = bytes_N > 1
    used_N &= ~_after(quote_N)
    used_N &= ~_after(quote_N, 2)
    bytes_N = compact(bytes_N, used_N)
    bytes_N = _with_single_spaces(bytes_N)

    # Find the letters of words.
    capital_N = (bytes_N >= _CAPITAL_A) & (bytes_N <= _CAPITAL_Z)
    lower_N = jnp.where(capital_N, bytes_N + 32, bytes_N)
    alpha_N = (lower_N >= _SMALL_A) & (lower_N <= _SMALL_Z)
    within_N = alpha_N | (bytes_N == _APOSTROPHE)
    within_N |= bytes_N == _ZERO

    def match_word(text: bytes) -> Array:
        """Mark where a text begins that no word goes on from."""
        goes_on_N = _after(within_N, len(text))
        return _matches(lower_N, text) & ~goes_on_N

    # A and I are words where another word follows, but for those of `FOLLOWING`.
    follows_N = bytes_N == _BLANK
    follows_N &= _after(alpha_N)
    follows_N &= _after(within_N, 2)
    for text in FOLLOWING:
        follows_N &= ~match_word(b" " + text)
    word_N = is_in(bytes_N, b"AI")
    word_N &= _after(follows_N)

    # Find the labels: letters that stand alone.
    touches_N = before(within_N) | _after(within_N)
    letter_N = is_in(bytes_N, LETTERS.encode())
    letter_N &= ~touches_N & ~word_N

    # Find the marks.
    marks: list[Array] = []
    for mark in CHOICE_MARKS:
        is_word = mark.endswith(b"s")
        found_N = match_word(mark) if is_word else _matches(lower_N, mark)
        marks.append(found_N)
    mark_N = jnp.stack(marks).any(axis=0)

    # A letter is the first behind a mark where that mark is behind the letter before.
    last_letter_N = _last_so_far(letter_N)
    last_mark_N = _last_so_far(mark_N)
    # `before` fills up with 0, which has to become -1, for none.
    letter_before_N = before(last_letter_N + 1) - 1
    first_N = letter_N & (last_mark_N > letter_before_N)

    # Take the last of these, else the last letter.
    behind = _last(first_N)
    is_behind = behind >= 0
    last_letter = last_letter_N[-1]
    last = jnp.where(is_behind, behind, last_letter)
    is_same = bytes_N[last] == reference_R[0]
    return (last >= 0) & is_same


def _last_so_far(mask_N: Array) -> Array:
    """Return at each place the last marked one up to there, -1 for none."""
    indices_N = jnp.arange(mask_N.size)
    places_N = jnp.where(mask_N, indices_N, -1)
    return jax.lax.cummax(places_N)


def _after(mask_N: Array, count: int = 1) -> Array:
    """Shift back: each is what is `count` places behind it."""
    padded = jnp.pad(mask_N, (0, count))
    return padded[count:]


ON_DEVICE: dict[AnswerStyle, tuple[Callable[[Sequence[bytes]], np.ndarray], Judge]] = {
    "after_mark": (byte_table, is_after_mark),
    "last_number": (byte_table, is_last_number),
    "texts": (text_table, is_text),
    "choice": (choice_table, is_choice),
}
"""Of a style: the table [V, ..] of the bytes of each token id, and whether a completion gives its reference, as
`answers.parse_completion` and `answers.are_right` say it; one without any byte is never given."""


def is_end(tokens: Array, eos_ids: Sequence[int]) -> Array:
    """Mark end tokens: bool, the tokens' shape."""
    is_each = [tokens == eos_id for eos_id in eos_ids]
    return functools.reduce(operator.or_, is_each)


def said_eos(said_NT: Array, lengths_N: Array, eos_ids: Sequence[int]) -> Array:
    """Tell, bool [N], whether a thought's last step is written down as eos, so that no answer follows."""
    _, steps = said_NT.shape
    numbers_T = jnp.arange(1, steps + 1)
    last_NT = numbers_T[None] == lengths_N[:, None]
    ends_NT = is_end(said_NT, eos_ids)
    last_ends_NT = last_NT & ends_NT
    return last_ends_NT.any(axis=1)


def answer_mask(tokens_NA: Array, eos_ids: Sequence[int]) -> Array:
    """Mark, bool [N, A], the generated tokens, up to and including the one that ended the answer."""
    ends_NA = is_end(tokens_NA, eos_ids)
    n_before_NA = jnp.cumsum(ends_NA, axis=1) - ends_NA
    return n_before_NA == 0

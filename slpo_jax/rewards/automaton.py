"""The grammar of `slpo_jax.rewards.numerals` as an automaton over bytes, and tokens' bytes made short for it.

What is read is kinds of characters (`numerals.KINDS`), each as its one byte; digits are themselves. A character whose
bytes lie in several tokens is still written out, and recognised when its last byte comes.
"""

import functools
import re

import numpy as np

from slpo_jax.rewards.numerals import KINDS, OTHER, kinds_of

PAD = 0
"""The byte of no character."""
MARK, START, START_AT_MARK = 1, 2, 3
"""What an action does with places: the byte read may be a number's sign or point; a number starts here, or there."""
GOOD, BAD = 1, 2
"""What an action says of the last digits: they are a number as far as they go, or part of something else."""

_DIGIT = "0"
_ALPHABET = _DIGIT + "".join(dict.fromkeys(KINDS.values())) + OTHER
# Where no number is under way: kind -> next state. A kind that isn't named leads to "free", as after a line break.
_FREE = {"-": "sign", "~": "sign", ".": "lead", "a": "word", ")": "close"}
_EXPRESSION = {**dict.fromkeys("-~*(", "expression"), "a": "word", ")": "close"}
_AFTER = {**_FREE, **dict.fromkeys(" _", "after"), **dict.fromkeys("-~*", "expression")}
_BETWEEN: dict[str, dict[str, str]] = {
    "free": _FREE,
    "word": {"a": "word", **dict.fromkeys("-~", "expression"), "*": "touching", ".": "stop", ")": "close"},
    "touching": {**_EXPRESSION, **dict.fromkeys("*($.", "touching")},  # a word and an operator
    "expression": {**_EXPRESSION, **dict.fromkeys(" _$.", "expression")},  # a number and an operator
    "sign": {**_EXPRESSION, **dict.fromkeys(" _$", "sign"), ".": "lead"},
    "close": {**_EXPRESSION, "$": "close", ".": "stop"},
    "lead": {**_FREE, ".": "stop"},  # a point that a fraction may begin with
    "stop": {**_FREE, ".": "stop"},  # a point that none does
    "quote": _FREE,  # an apostrophe that touches the digits before it
    "blank": _AFTER,  # one of them behind a number
    "after": _AFTER,
    # commas, points and a colon that touch the digits before them
    **{name: {**_FREE, **dict.fromkeys(".,", "part")} for name in ("comma", "point", "part")},
}
# What a digit leads to; in these the last digits are no number, or not yet.
_NEXT = {
    "free": "int1", "sign": "int1", "close": "int1", "stop": "int1", "after": "int1", "lead": "fraction",
    "int1": "int2", "int2": "int3", "int3": "int4+", "int4+": "int4+", "group": "not",
    "comma": "comma1", "comma1": "comma2", "comma2": "group", "point": "fraction", "fraction": "fraction",
    "blank": "blank1", "blank1": "blank2", "blank2": "blank3", "blank3": "int4+",
    "word": "not", "touching": "not", "expression": "not", "part": "not", "quote": "not", "not": "not",
}  # fmt: skip
_BAD = ("comma1", "comma2", "blank3", "not")
_TAKES_COMMA = ("int1", "int2", "int3", "group", "blank1", "blank2")
_TAKES_POINT = (*_TAKES_COMMA, "int4+")
_STATES = (*_BETWEEN, *(name for name in _NEXT if name not in _BETWEEN))


def _kinds_table() -> np.ndarray:
    """[state, kind of `_ALPHABET`] -> [next state, what of places, what of the last digits]."""
    table = np.zeros((len(_STATES), len(_ALPHABET), 3), np.int32)
    for row, name in enumerate(_STATES):
        ended = name not in _BETWEEN
        follows = dict(_BETWEEN.get(name, {}))
        if ended:
            follows = {**_EXPRESSION, **dict.fromkeys(" _", "blank"), "$": "close", ":": "part", "^": "not",
                       "'": "quote",
                       ",": "comma" if name in _TAKES_COMMA else "part",
                       ".": "point" if name in _TAKES_POINT else "part"}  # fmt: skip
        follows["&"] = "not"
        for column, kind in enumerate(_ALPHABET):
            to = _NEXT[name] if kind == _DIGIT else follows.get(kind, "free")
            place = says = 0
            if kind == _DIGIT:
                says = BAD if to in _BAD else GOOD
                begins = not ended and name not in ("comma", "point", "part")
                place = (START_AT_MARK if name in ("sign", "lead") else START) if begins else 0
            elif to == "not":
                says = BAD
            elif to in ("sign", "lead") and name != "sign":
                place = MARK
            table[row, column] = _STATES.index(to), place, says
    return table


_KINDS_TABLE = _kinds_table()
_WIDE = {member.encode(): kind for member, kind in KINDS.items() if len(member.encode()) > 1}
_BEGUN = (b"", *sorted({character[:size] for character in _WIDE for size in range(1, len(character))}))
_WIDE_BYTES = bytes(sorted(set(b"".join(_WIDE))))


def _symbols() -> np.ndarray:
    """uint8 [256]: the column of each byte in `TABLE`: kinds, then bytes of characters of several, then `PAD`."""
    symbols = np.full(256, _ALPHABET.index(OTHER), np.uint8)
    for byte in range(128):
        character = chr(byte)
        kind = _DIGIT if character.isdigit() else character
        symbols[byte] = _ALPHABET.index(kind if kind in _ALPHABET else OTHER)
    for index, byte in enumerate(_WIDE_BYTES):
        symbols[byte] = len(_ALPHABET) + index
    symbols[PAD] = len(_ALPHABET) + len(_WIDE_BYTES)
    return symbols


def _table() -> np.ndarray:
    """int32 [state and bytes of a character so far, column]: 12 * next row + 3 * what of places + what of digits."""
    other, rows = _ALPHABET.index(OTHER), len(_STATES)
    table = np.zeros((rows * len(_BEGUN), len(_ALPHABET) + len(_WIDE_BYTES) + 1), np.int32)

    def action(state: int, column: int) -> int:
        to, place, says = _KINDS_TABLE[state, column].tolist()
        return 12 * to + 3 * place + says

    for number, begun in enumerate(_BEGUN):
        for state in range(rows):
            row = number * rows + state
            # What has begun and doesn't go on was another character, after any of which nothing is under way.
            left = state if not begun else int(_KINDS_TABLE[state, other, 0])
            for column in range(len(_ALPHABET)):
                table[row, column] = action(left, column)
            for index, byte in enumerate(_WIDE_BYTES):
                come, fresh = begun + bytes([byte]), bytes([byte])
                if come in _WIDE:
                    found = action(state, _ALPHABET.index(_WIDE[come]))
                elif come in _BEGUN:
                    found = 12 * (_BEGUN.index(come) * rows + state)
                elif fresh in _BEGUN:
                    found = 12 * (_BEGUN.index(fresh) * rows + left)
                else:
                    found = action(left, other)
                table[row, len(_ALPHABET) + index] = found
            table[row, -1] = 12 * row
    return table


SYMBOLS = _symbols()
TABLE = _table()

_Effect = tuple[tuple[tuple[int, str, bool], ...], tuple[bool, str]]
"""Of a text without digits: by state before it (state after it, its kind that is marked, whether it spoils the number
before it); and for the style that reads what follows the last `#`: (whether one is there, how it goes on)."""


def _extended(effect: _Effect, kind: str) -> _Effect:
    """The effect of a text with one more character."""
    states, (hashed, shape) = effect
    column, under_way = _ALPHABET.index(kind), (_STATES.index("sign"), _STATES.index("lead"))
    after = []
    for state, marked, spoilt in states:
        to, place, says = _KINDS_TABLE[state, column].tolist()
        marked = kind.replace("~", "-") if place == MARK else marked
        after.append((to, marked if to in under_way else "", spoilt or says == BAD))
    if kind == "#":
        return tuple(after), (True, "")
    goes_on = {("", " "): " ", (" ", " "): " ", ("", "-"): "-", (" ", "-"): "-", ("", ","): ",", ("", "."): "."}
    return tuple(after), (hashed, goes_on.get((shape, " " if kind == "\n" else kind), "ink"))


@functools.cache
def _shortest() -> dict[_Effect, str]:
    """The shortest text of each effect."""
    nothing: _Effect = tuple((state, "", False) for state in range(len(_STATES))), (False, "")
    found, new = {nothing: ""}, [nothing]
    for effect in new:
        for kind in _ALPHABET.replace(_DIGIT, ""):
            longer = _extended(effect, kind)
            if longer not in found:
                found[longer] = found[effect] + kind
                new.append(longer)
    return found


@functools.cache
def _shortened(run: str) -> str:
    """A run of kinds without digits, in as few as have its effect."""
    nothing = next(iter(_shortest()))
    return _shortest()[functools.reduce(_extended, run, nothing)]


# Bytes of a character that another token begins; characters; the beginning of one that another token ends.
_PARTS = re.compile(rb"([\x80-\xbf]{0,2})(.*?)(%s)?" % b"|".join(map(re.escape, reversed(_BEGUN[1:]))), re.DOTALL)


def compress(piece: bytes) -> bytes:
    """Write a token's bytes as kinds, and as few of them as lead to the same verdict in every context and style."""
    parts = _PARTS.fullmatch(piece)
    assert parts is not None
    kinds = kinds_of(parts[2].decode("utf-8", "replace"))
    return parts[1] + re.sub("[^0-9]+", lambda run: _shortened(run[0]), kinds).encode() + (parts[3] or b"")

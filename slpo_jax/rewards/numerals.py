"""The last number of a text, on the host: what belongs to it, and what text has none.

`slpo_jax.rewards.automaton` reads the same grammar byte by byte. Both see a text as kinds of characters (`kinds_of`).
"""

import re

NUMBER = re.compile(r"([0-9]{1,3}(,[0-9]{3})+|[0-9]+)(\.[0-9]+)?")

MINUSES = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
"""What else is written for a minus. A dash (U+2014) is none."""

# Other scripts' digits and letters are no part of the grammar: they are "!", as quotes and equals signs are.
_MEMBERS = {
    "-": "-",
    "~": MINUSES,
    ".": ".",
    ",": ",",
    " ": " \t",
    "_": "\u00a0\u2007\u2009\u200a\u202f",  # blanks that stand between the groups of a number
    "\n": "\n\r\v\f",
    "a": "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "*": "*/+^_×÷·⁄∕∙⋅",
    ":": ":",
    "$": "$\\£¥€₩₹₽",  # the backslash as in \$
    "(": "([{",
    ")": ")]}%",
    "^": "²³¹⁰⁴⁵⁶⁷⁸⁹⁻",
    "&": "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞",
    "#": "#",
    "'": "'\u2019\u200b",  # between digits, a group separator that isn't read; a quote elsewhere
}
OTHER = "!"
KINDS: dict[str, str] = {member: kind for kind, members in _MEMBERS.items() for member in members}
"""character -> kind, of all that are neither digits nor `OTHER`."""


class _Kinds(dict[int, str]):
    def __missing__(self, code: int) -> str:
        return OTHER


_KINDS = _Kinds({ord(member): kind for member, kind in KINDS.items()} | {ord(digit): digit for digit in "0123456789"})
_NO_DIGIT = "".join(_MEMBERS) + OTHER
_RESET = re.compile(rf"[\n#'{OTHER}]")
_SEPARATED = re.compile(r"[0-9&]\^*'\Z")
_OPERAND = re.compile(r"[0-9&]\^*$")
_TAIL = "-~*($. _"
# From the last operand, word or bracket on: it and an operator are one expression with what follows.
_BINDS = re.compile(r"[0-9&](\$+[-~*(]|[ _]*[-~*]|\()|\)\$*[-~*(]|a($|[-~]|\*[*($.]*([-~]|$))")
_TWO_SIGNS = re.compile(r"[-~][ _$]*[-~*(]")


def kinds_of(text: str) -> str:
    """A character of `KINDS`, `OTHER` or a digit for each of the text's."""
    return text.translate(_KINDS)


def last_number(text: str) -> tuple[bool, str] | None:
    """The number that a text ends with, words and punctuation after it aside, see `answers.parse_completion`.

    Returns:
        whether it is negative, and its digits, commas and point; None where the text has no digits, or its last ones
        are a part of something else.
    """
    kinds = kinds_of(text)
    head = kinds.rstrip(_NO_DIGIT)
    after = kinds[len(head) :]
    if not head or after.startswith("^") or "&" in after:
        return None
    line = _RESET.split(head)[-1]
    before = line.rstrip("0123456789.,")
    run = line[len(before) :]
    number = run.lstrip(".,")
    before += run[: len(run) - len(number)]  # with the points and commas in front
    if not before and _SEPARATED.search(head[: len(head) - len(line)]):
        return None
    if not NUMBER.fullmatch(number) or _binds(before) or _is_group(before, number):
        return None
    point = before.endswith(".") and not before.endswith("..")
    left = before[:-1] if point else before
    if point and not _ends_sentence(left):
        if not number.isdigit():
            return None
        number = "." + number
    return left.rstrip(" _$").endswith(("-", "~")), number


def _binds(before: str) -> bool:
    """Whether what is before a number makes it a part of something: 1/2, 5-3, 10 - 3, cm^2, x-3, 10:30, 1e5, --3."""
    if _OPERAND.search(before.rstrip(".,").removesuffix(":")):
        return True
    head = before.rstrip(_TAIL)
    tail = before[len(head) :]
    last = "&" if _OPERAND.search(head) else head[-1:]
    return bool(_BINDS.match(last + tail) or _TWO_SIGNS.search(tail))


def _is_group(before: str, number: str) -> bool:
    """Whether a number is the last three digits of one that is written as 1 000 000."""
    return before.endswith((" ", "_")) and bool(_OPERAND.search(before[:-1]) and re.match("[0-9]{3}(?![0-9])", number))


def _ends_sentence(left: str) -> bool:
    """Whether the point after this is no decimal point: after a word or a closing bracket (`Rs.72`)."""
    bare = left.rstrip("$)")
    return left.endswith("a") or ")" in left[len(bare) :] or (bare != left and bool(_OPERAND.search(bare)))

"""Answers that are texts or letters of choices, on the host: what follows the last mark.

Texts are compared word by word: runs of ASCII white space count as one space, at both ends as none, as do asterisks and
backquotes there; periods at the end are no part of an answer, and the case of ASCII letters makes no difference.
`slpo_jax.rewards.text_verifier` does the same inside jit.
"""

import re

# Behind the last of these an answer stands: COCONUT's and GSM8K's (but not in C#), CODI's, and CoLaR's.
MARKS = (b"# ", b"answer is:", b"answer:", b"answer**:")
_MARK = re.compile(r"#(?=[ \t\n\r\v\f]|\Z)|answer(?:[ \t\n\r\v\f]+is:|(?:\*\*)?:)", re.IGNORECASE | re.ASCII)
_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
BESIDE = " *`"
"""What makes no difference at both ends of a text."""

LETTERS = "ABCDEFGHIJ"
# Behind these the letter of a choice stands, in a text whose white space is single spaces.
CHOICE_MARKS = tuple(f"answer{bold}{sign}".encode() for bold in ("", "**") for sign in (" is", ":", " :", "=", " ="))
_CHOICE_MARK = r"answer(?:\*\*)?(?: is(?![\w'])| ?[:=])"
# "A" and "I" are words where another one follows, but these.
FOLLOWING = (b"is", b"or", b"and", b"because", b"since", b"as", b"by", b"from")
_IS_WORD = rf"(?=(?-i:[AI]) [A-Z][\w'])(?!. (?:{b'|'.join(FOLLOWING).decode()})(?![\w']))"
# What isn't ASCII joins no words, so a letter among other scripts' signs stands alone.
_CHOICE = re.compile(
    rf"(?P<mark>{_CHOICE_MARK})|(?<![\w'])(?!{_IS_WORD})(?P<letter>(?-i:[{LETTERS}]))(?![\w'])",
    re.ASCII | re.IGNORECASE,
)


def normal_text(text: str) -> str:
    """An answer without what makes no difference at its ends and in its white space."""
    return _spaced(text).lstrip(BESIDE).rstrip(BESIDE + ".")


def said_text(text: str) -> str:
    """The answer that a completion gives, as `normal_text`: what follows its last mark, all of it without one."""
    text = text.replace("\0", "")
    ends = [match.end() for match in _MARK.finditer(text)]
    return normal_text(text[ends[-1] if ends else 0 :])


def said_choice(text: str) -> str | None:
    """The choice that a completion gives: the first letter behind the last mark that has one, or the last letter.

    A letter is a capital A to J that no ASCII letter, digit, `_` or apostrophe touches, and that is no word, as in
    "A cat" and "I think".
    """
    last, behind, is_behind = None, None, False
    for match in _CHOICE.finditer(_spaced(text.replace("\u2019", "'"))):
        if letter := match["letter"]:
            last, behind = letter, letter if is_behind else behind
        is_behind = not letter
    return behind or last


def compared(text: str) -> bytes:
    """The bytes of an answer that have to be equal."""
    return normal_text(text).encode(errors="replace").translate(_LOWER)


def written(piece: bytes) -> bytes:
    """Bytes of a text as they are compared: white space as one space, and ASCII letters in lower case."""
    return re.sub(rb"[ \t\n\r\v\f]+", b" ", piece.replace(b"\0", b"")).translate(_LOWER)


def _spaced(text: str) -> str:
    return re.sub(r"[ \t\n\r\v\f]+", " ", text.replace("\0", ""))

"""Answers that are texts, on the host: what follows the last mark, compared word by word.

Runs of ASCII white space count as one space, at both ends as none; periods at the end are no part of an answer, and the
case of ASCII letters makes no difference. `slpo_jax.rewards.text_verifier` does the same inside jit.
"""

import re

# Behind the last of these an answer stands: COCONUT's and GSM8K's (but not in C#), CODI's, and CoLaR's.
MARKS = (b"# ", b"answer is:", b"answer:", b"answer:**")
_MARK = re.compile(r"#(?=[ \t\n\r\v\f]|\Z)|answer(?:[ \t\n\r\v\f]+is:|:(?:\*\*)?)", re.IGNORECASE | re.ASCII)
_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")


def normal_text(text: str) -> str:
    """An answer without the white space that makes no difference, and without periods at its end."""
    words = " ".join(re.split(r"[ \t\n\r\v\f]+", text.replace("\0", ""))).strip(" ")
    return words.rstrip(" .")


def said_text(text: str) -> str:
    """The answer that a completion gives, as `normal_text`: what follows its last mark, all of it without one."""
    return normal_text(after_mark(text))


def after_mark(text: str) -> str:
    """What follows the last mark of a completion as it stands, but for white space at both ends."""
    text = text.replace("\0", "")
    ends = [match.end() for match in _MARK.finditer(text)]
    return text[ends[-1] if ends else 0 :].strip()


def compared(text: str) -> bytes:
    """The bytes of an answer that have to be equal."""
    return normal_text(text).encode(errors="replace").translate(_LOWER)


def written(piece: bytes) -> bytes:
    """Bytes of a text as they are compared: white space as one space, and ASCII letters in lower case."""
    return re.sub(rb"[ \t\n\r\v\f]+", b" ", piece.replace(b"\0", b"")).translate(_LOWER)

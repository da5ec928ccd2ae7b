"""Answers that are texts or letters of choices, on the host: what follows the last mark.

Texts are compared word by word: runs of ASCII white space count as one space, at both ends as none, as do asterisks and
backquotes there; periods at the end are no part of an answer, and the case of ASCII letters makes no difference.
`slpo_jax.rewards.verifier` does the same inside jit.
"""

import re
import string

# Behind the last of these an answer stands: COCONUT's and GSM8K's (but not in C#), CODI's, CoLaR's, those of sentences
# and tags.
MARKS = (
    b"# ",
    b"answer is:",
    b"answer:",
    b"answer**:",
    b"answer is ",
    b"<answer>",
    b"</think>",
)
# Behind these too, as far as the brace that closes them.
BOXES = (b"\\boxed{", b"\\boxed{\\text{")
END_TAG = b"</answer>"
"""Where an answer ends, whatever it stands behind."""
_MARK = re.compile(
    r"#(?=[ \t\n\r\v\f]|\Z)|answer(?:[ \t\n\r\v\f]+is(?::|(?=[ \t\n\r\v\f]|\Z))|(?:\*\*)?:)|<answer>|</think>"
    r"|(?P<box>\\boxed\{(?:\\text\{)?)",
    re.IGNORECASE | re.ASCII,
)
_END_TAG = re.compile(END_TAG.decode(), re.IGNORECASE | re.ASCII)
_OPEN_OR_CLOSE = re.compile(r"(?<!\\)[{}]")
_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
BESIDE = " *`"
"""What makes no difference at both ends of a text."""

LETTERS = string.ascii_uppercase
# Behind these the letter of a choice stands, in a text whose white space is single spaces.
CHOICE_MARKS = tuple(
    f"answer{bold}{sign}".encode()
    for bold in ("", "**")
    for sign in (" is", ":", " :", "=", " =")
)
_CHOICE_MARK = r"answer(?:\*\*)?(?: is(?![\w'])| ?[:=])"
# "A" and "I" are words where another one follows, but these.
FOLLOWING = (b"is", b"or", b"and", b"because", b"since", b"as", b"by", b"from")
_IS_WORD = (
    rf"(?=(?-i:[AI]) [A-Z][\w'])(?!. (?:{b'|'.join(FOLLOWING).decode()})(?![\w']))"
)
# What isn't ASCII joins no words, so a letter among other scripts' signs stands alone.
_CHOICE = re.compile(
    rf"(?P<mark>{_CHOICE_MARK})|(?<![\w'])(?!{_IS_WORD})(?P<letter>(?-i:[{LETTERS}]))(?![\w'])",
    re.ASCII | re.IGNORECASE,
)


def normal_text(text: str) -> str:
    """Remove what makes no difference at an answer's ends and in its white space."""
    return _with_spaces(text).lstrip(BESIDE).rstrip(BESIDE + ".")


def said_text(text: str) -> str:
    """Return a completion's answer, as `normal_text`: what follows its last mark, all of it without one.

    It ends at a closing tag, and in a box at the brace that closes it; a brace behind a backslash is a character.
    """
    text = text.replace("\0", "")
    marks = list(_MARK.finditer(text))
    mark = marks[-1] if marks else None
    answer = text[mark.end() :] if mark else text
    end = _END_TAG.search(answer)
    if end:
        answer = answer[: end.start()]
    if mark and mark["box"]:
        depth = 0
        for brace in _OPEN_OR_CLOSE.finditer(answer):
            depth += 1 if brace[0] == "{" else -1
            if depth < 0:
                answer = answer[: brace.start()]
                break
    return normal_text(answer)


def said_choice(text: str) -> str | None:
    """Return the choice of a completion: the first letter behind the last mark that has one, or the last letter.

    A letter is a capital A to Z that no ASCII letter, digit, `_` or apostrophe touches, and that is no word, as in
    "A cat" and "I think".
    """
    last = None
    behind = None
    is_behind = False
    plain = text.replace("\u2019", "'")
    spaced = _with_spaces(plain)
    for match in _CHOICE.finditer(spaced):
        letter = match["letter"]
        if letter:
            last = letter
            if is_behind:
                behind = letter
        is_behind = not letter
    return behind or last


def normalise_text(text: str) -> bytes:
    """Return an answer's bytes for comparison: equal bytes are equal answers."""
    return normal_text(text).encode(errors="replace").translate(_LOWER)


def normalise_bytes(piece: bytes) -> bytes:
    """Normalise bytes for comparison: white space as one space, and ASCII letters in lower case."""
    without_nulls = piece.replace(b"\0", b"")
    spaced = re.sub(rb"[ \t\n\r\v\f]+", b" ", without_nulls)
    return spaced.translate(_LOWER)


def _with_spaces(text: str) -> str:
    without_nulls = text.replace("\0", "")
    return re.sub(r"[ \t\n\r\v\f]+", " ", without_nulls)


_BOX = r"\\(?:boxed|fbox|framebox)"
# A box without braces holds what stands before a blank or a sign of LaTeX.
_BOXED = re.compile(_BOX + r"(?:\s*(\{)|(?:\s+(?=[\w.-])|(?=[0-9-]))([^\s{}$\\]+))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped one is a character of the text
_WHITESPACE = " \t\n\r\v\f"
_DELIMITED = re.compile(
    r"\$\$([^$]+)\$\$|\$((?:\\\$|[^$])+)\$|\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]|\*\*([^*]+)\*\*|`([^`]+)`",
    re.DOTALL,
)
_PREFIXED = (
    r"(?:[kcdmnMG]|\\mu\s*)?(?:m|g|s|L|l|N|J|W|V|A|Pa|Hz|Wh|mol|eV|bar|\\Omega)|\\Omega"
)
_WORDS = (
    r"(?:kilo|centi|milli)?(?:met(?:er|re)|gram|lit(?:er|re))s?|second|minute|hour|day|week|month|year|unit|mile|yard"
    r"|pound|gallon|degree|dollar|cent|newton|joule|watt|volt|ohm"
)
_UNIT = (
    rf"(?:(?:{_PREFIXED}|K|C|F|T|h|hr|min|sec|ft|in|mi|yd|lb|oz|mph|kph|inch(?:es)?|feet|foot"
    rf"|(?:(?:square|cubic)\s+)?(?:{_WORDS})s?|\\degree)(?![A-Za-z])(?:\s*\^\s*(?:\{{-?[1-9]\}}|-?[1-9]))?)"
)
_WITH_UNIT = re.compile(
    r"(?P<number>-?(?:[0-9][0-9.,]*(?:/[0-9]+)?|\\[dt]?frac\{?[0-9]+\}?\{?[0-9]+\}?))(?P<apart>\s*)"
    rf"(?P<unit>{_UNIT}(?:\s*(?:[/*\u00b7]|\\cdot|\bper\b|\s)\s*{_UNIT})*)"
)
_ROMAN = re.compile(
    r"\\(?:text|textbf|mathrm|textrm|mathbf|operatorname|rm|mbox)\s*\{([^{}]*)\}"
)
_SPACE = re.compile(r"\\[,;:! ]|~|\\quad")
# Three digits behind a thin space, a blank or `{,}` belong to the number before them.
_THOUSANDS = re.compile(
    r"(?<![0-9.,_^])[0-9]{1,3}(?:(?:\s*(?:\\[,;:! ]|~|\{,\})\s*|\s+)[0-9]{3})+(?![0-9])"
)
_FINAL_PERIOD = re.compile(r"(?<![.\\\s])\s*\.\s*\Z")
_BASE = re.compile(
    r"(?<![A-Za-z\\])[0-9A-F]*[0-9][0-9A-F]*\s*_\s*(?:\{\s*)?\(?([0-9]+)"
)
_LONGEST = 100  # characters of words
_WORD = re.compile(r"(?:[A-Za-z]{3,}|[Nn][Oo])(?: [A-Za-z]+)*")


def last_boxed(text: str) -> str:
    r"""Return what the last `\boxed{...}` (or `\boxed 6`, `\fbox{6}`) of a LaTeX text holds, stripped; "" for none.

    One that isn't closed holds nothing.
    """
    boxes = list(_BOXED.finditer(text))
    if not boxes:
        return ""
    box = boxes[-1]
    if not box[1]:  # without braces
        return box[2].rstrip(".,;:!?)*")

    # Find the brace that closes the box.
    begin = box.end()
    depth = 1
    for brace in _BRACE.finditer(text, begin):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0:
            content = text[begin : brace.start()]
            return content.strip(_WHITESPACE)
    return ""


def bare(text: str) -> str:
    r"""Remove the `$`, `\(`, `\[`, `**` or backquotes that are around all of an answer."""
    text = text.strip()
    match = _DELIMITED.fullmatch(text)
    if match:
        # Each kind of delimiter has a group, and one of them has matched.
        inner = next(filter(None, match.groups()))
        return bare(inner)
    # A dollar sign that is meant as one has a backslash.
    return text.removeprefix("\\") if "\\$" in text else text


def without_typography(latex: str) -> str:
    r"""Write LaTeX without a final period and with numbers in one piece: `1000` for `1\,000.`, `1 000`, `1{,}000`."""
    joined = _THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), latex)
    return _FINAL_PERIOD.sub("", joined)


def bases(latex: str) -> list[str]:
    """Return the bases that numbers are written in, sorted: `["8"]` for `2516_8` and `2516_{(8)}`."""
    return sorted(match[1] for match in _BASE.finditer(latex))


def letter(latex: str) -> str:
    r"""Return the capital letter that LaTeX is, such as "B" for `\text{(B).}`; "" for anything else."""
    upright = _ROMAN.sub(r"\1", latex)
    text = upright.strip(_WHITESPACE + "().:[]*$")
    return text if re.fullmatch("[A-Z]", text) else ""


def number_and_unit(latex: str) -> tuple[str, str]:
    r"""Return a number's digits and its unit, or other LaTeX and "": `45 m^3`, `5\ \text{km/h}`, `5 \Omega`."""
    # Write it as plain text with single spaces.
    upright = _ROMAN.sub(r" \1", latex)
    words = _SPACE.sub(" ", upright).split()
    match = _WITH_UNIT.fullmatch(" ".join(words))
    if match is None:
        return latex, ""
    unit = match["unit"]
    # A capital that touches a number may be a factor of it.
    if not match["apart"] and re.fullmatch("[A-Z]", unit):
        return latex, ""
    return match["number"], unit.replace(" ", "")


def word(latex: str) -> str:
    r"""Return the words that LaTeX writes, for comparison, such as "yes" for `\text{Yes.}`; "" for none."""
    upright = _ROMAN.sub(r"\1", latex)
    words = normal_text(upright)
    is_short = len(words) <= _LONGEST
    return words.lower() if is_short and _WORD.fullmatch(words) else ""

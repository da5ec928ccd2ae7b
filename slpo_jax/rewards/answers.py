r"""Answers on the host: what a completion says, and when it says the reference's number.

One grammar of numbers serves rewards, evaluation and reports. `slpo_jax.rewards.verifier` implements it a second time,
inside jit; the two agree on every input. Answers in LaTeX (`\boxed{...}`) are read on the host alone.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Literal, NamedTuple

from slpo_jax.rewards.equivalence import are_equivalent
from slpo_jax.rewards.texts import (
    LETTERS,
    bases,
    last_boxed,
    letter,
    normalise_text,
    number_and_unit,
    said_choice,
    said_text,
    without_typography,
    word,
)

AnswerStyle = Literal["after_mark", "last_number", "boxed", "texts", "choice"]
AskedStyle = Literal["auto", "last_number", "boxed", "texts", "choice"]
"""`config.prompt.answers`: "auto" is the reasoner's own style, of text "after_mark"."""
Kind = Literal["numbers", "latex", "texts"]
"""What the references of a data set are: canonical decimals, LaTeX, or any texts."""


@dataclasses.dataclass(frozen=True)
class Style:
    """A way to write, read and compare answers; those that the device judges too are in `verifier.ON_DEVICE`.

    Attributes:
        read: the answer that a completion gives; None for none.
        compared: the bytes of answers and of references that have to be equal, b"" of what can't be; None: they have
            to be equivalent LaTeX.
        about: answers in words.
        none: what a completion without an answer has.
        kind: what references are.
        around: what a text reasoner writes before and after an answer; None is the mark of its solutions.
        marked: whether reasoners that have a way of their own to ask and answer can take it.
    """

    read: Callable[[str], str | None]
    compared: Callable[[str], bytes] | None
    about: str
    none: str
    kind: Kind = "numbers"
    around: tuple[str, str] | None = None
    marked: bool = False


_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
# Hyphens, the en dash and the minus; currency signs and backslashes are as not there.
_SIGNS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-") | dict.fromkeys("$\\\0")
)
_APART = re.compile(r"[^A-Za-z0-9.,:/^*+_'%()\[\]{}-]|(?<![0-9]):|(?<![)\]}%^])[(\[{]")
_IN_MARKS = re.compile(rf"[*_'+,]*({_NUMBER.pattern})")
# An exponent is written out as zeros; float64 needs at most 324.
_REFERENCE = re.compile(
    r"([+-]?)[$€£]?((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?0*[0-9]{1,3})?)"
)
# str.strip() would also take U+00A0, U+0085 and the separators 0x1c..0x1f, which the device counts as junk.
_WHITESPACE = " \t\n\r\v\f"


def canonical_number(text: str) -> str | None:
    """Write a reference answer as its canonical decimal, exactly, whatever its length.

    The canonical decimal has no commas, no exponent, no `+`, no leading zeros but one before the point, no trailing
    zeros after it, and no sign on zero: two numbers are equal if and only if these strings are.

    Args:
        text: a number: optional sign, perhaps a currency's, digits with optional thousands commas, optional fraction,
            optional exponent of up to three digits; one of the parts before and after the point may be empty.
            Surrounding ASCII whitespace is ignored.
    Returns:
        the canonical decimal, such as "72" for "072.0" and "0.00000201" for "2.01e-06"; None for what is no number.
    """
    match = _REFERENCE.fullmatch(text.strip(_WHITESPACE))
    if match is None:
        return None
    sign, digits = match.groups()
    written = sign + digits.replace(",", "")
    try:
        number = Decimal(written)
    except InvalidOperation:  # without a digit
        return None
    return _canonical(f"{number:f}")


def _canonical(number: str) -> str:
    """Return the canonical decimal of a number whose digits are written out."""
    digits = number.replace(",", "").removeprefix("-")
    whole, _, fraction = digits.partition(".")
    whole = whole.lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    unsigned = f"{whole}.{fraction}" if fraction else whole
    is_negative = number.startswith("-") and unsigned != "0"
    return f"-{unsigned}" if is_negative else unsigned


def parse_completion(text: str, style: AnswerStyle) -> str | None:
    r"""Read the answer that a completion gives: a number, or for "boxed" an expression in LaTeX.

    NUMBER is `(\d{1,3}(,\d{3})+|\d+)(\.\d+)?` over ASCII.

    Args:
        text: the completion, without the end-of-text token.
        style: "after_mark": what follows the last `#` (all of it, if there is none), stripped of ASCII whitespace, has
            to be `-?NUMBER` from end to end. "last_number": the last number, which is never read in part, see
            `last_number`.
            "boxed": what the last `\boxed{...}` holds. "texts": what follows the last mark (`texts.said_text`).
            "choice": the letter A to Z behind the last mark, or the last one (`texts.said_choice`).
    Returns:
        the canonical decimal, the LaTeX as it stands, the text, or the letter; None where there is none.
    """
    return STYLES[style].read(text)


def _number_after_mark(text: str) -> str | None:
    _, _, behind_mark = text.rpartition("#")
    match = _NUMBER.fullmatch(behind_mark.strip(_WHITESPACE))
    return _canonical(match[0]) if match else None


def last_number(text: str) -> str | None:
    """Return the number that the last digit of a text is in: as its canonical decimal, None where that is no number.

    What touches it before is a part of it: in `1/2`, `10:30`, `1e5`, `x-3`, `5-3`, `m2`, `cm^2`, `1.2.3`, `1'000` and
    `\\frac{1}{2}` no number is last, nor in `10 - 3` and `1 / 2`. Blanks, quotes, brackets that open, `=` and what else
    `_APART` finds end it. What comes behind it isn't read.
    """
    plain = text.translate(_SIGNS)
    match = re.match(r".*[0-9]", plain, re.DOTALL)
    if match is None:
        return None
    # The last digit is in the last word up to there.
    beginning = match[0]
    words = _APART.split(beginning)
    word = words[-1]

    # Where an operator comes before the word, the number is a part of a term.
    before_word = beginning.removesuffix(word).rstrip(" \t([{")
    if before_word.endswith(("-", "+", "/")):
        return None
    number = _IN_MARKS.fullmatch(word)
    return _canonical(number[1]) if number else None


def _choice(text: str) -> bytes:
    """Return the letter of an answer or a reference that has no words beside it: `(B)`, `B.`."""
    bare_text = text.strip(_WHITESPACE + "().:[]")
    is_letter = len(bare_text) == 1 and bare_text in LETTERS
    return bare_text.encode() if is_letter else b""


def are_right(
    answers: Sequence[str | None], references: Sequence[str], style: AnswerStyle
) -> list[bool]:
    """Tell which answers are their references: the same decimal, text, or for "boxed" equivalent LaTeX.

    Args:
        answers: N answers as `parse_completion` reads them.
        references: N references: for numbers as `canonical_number` writes them.
        style: of the answers.
    Returns:
        N verdicts; None is never right.
    """
    pairs = list(zip(answers, references, strict=True))
    compared = STYLES[style].compared
    if compared is None:
        return _equivalent(pairs)
    verdicts: list[bool] = []
    for answer, reference in pairs:
        expected = compared(reference)
        is_right = False
        if answer is not None and expected:
            is_right = compared(answer) == expected
        verdicts.append(is_right)
    return verdicts


def in_one_form(
    answers: Sequence[str | None], style: AnswerStyle, forms: Sequence[str] = ()
) -> list[str | None]:
    """Write answers that are the same in one way, so that they can be counted: as the first of them is written.

    Args:
        answers: N as `parse_completion` reads them; None stays as it is.
        style: of the answers.
        forms: what they are compared with first, such as the reference, with which they have been compared already.
    Returns:
        N answers, equal where `are_right` says so.
    """
    # Where bytes are compared, the first answer of the same bytes is the form.
    compared = STYLES[style].compared
    if compared:
        first: dict[bytes, str] = {}
        in_form: list[str | None] = []
        for answer in answers:
            if answer is not None:
                answer = first.setdefault(compared(answer), answer)
            in_form.append(answer)
        return in_form

    # LaTeX is compared with one form after the other, until all have one.
    form: dict[str, str] = {}
    given = [answer for answer in answers if answer is not None]
    remaining = list(dict.fromkeys(given))
    references = list(forms)
    while remaining:
        reference = references.pop(0) if references else remaining[0]
        verdicts = are_right(remaining, [reference] * len(remaining), style)
        # What nobody can read is at least itself.
        same: list[str] = []
        for answer, is_same in zip(remaining, verdicts, strict=True):
            if is_same or answer == reference:
                same.append(answer)
        for answer in same:
            form[answer] = same[0]
        remaining = [answer for answer in remaining if answer not in form]
    return [None if answer is None else form[answer] for answer in answers]


def are_readable(references: Sequence[str]) -> list[bool]:
    r"""Tell which LaTeX references can be verified: in a `\boxed{}` of its own, each is read as what it is.

    Args:
        references: N expressions.
    Returns:
        N verdicts.
    """
    pairs: list[tuple[str | None, str]] = []
    for latex in references:
        boxed = last_boxed(rf"\boxed{{{latex}}}")
        is_whole = latex != "" and boxed == latex
        answer = latex if is_whole else None
        pairs.append((answer, latex))
    return _equivalent(pairs)


def _equivalent(pairs: Sequence[tuple[str | None, str]]) -> list[bool]:
    """Tell which answers are equivalent to their references, by this module's grammar as far as it decides."""
    unsettled: list[tuple[str, str]] = []
    verdicts: list[bool | None] = []
    for given, expected in pairs:
        if given is None:
            verdicts.append(False)
            continue
        answer = without_typography(given)
        reference = without_typography(expected)
        verdict = _equal_by_grammar(answer, reference)
        verdicts.append(verdict)
        if verdict is None:
            # Decimals may be rounded differently; only the grammar knows an exponent or a leading plus.
            value, target = _numbers(answer, reference)
            value = canonical_number(value) or value
            target = canonical_number(target) or target
            unsettled.append((value, target))
    # Put the verdicts of math_verify where the grammar has none.
    judged = iter(are_equivalent(unsettled))
    settled: list[bool] = []
    for verdict in verdicts:
        if verdict is None:
            verdict = next(judged)
        settled.append(verdict)
    return settled


def _equal_by_grammar(answer: str, reference: str) -> bool | None:
    """Tell whether two expressions in LaTeX are equal, None where only math_verify can decide."""
    # Another base is another answer; math_verify reads the digits alone.
    answer_bases = bases(answer)
    if answer_bases:
        reference_bases = bases(reference)
        if reference_bases and answer_bases != reference_bases:
            return False
    # Whole numbers are equal or not; decimals only settle the matter when they are the same.
    value, target = _numbers(answer, reference)
    left = canonical_number(value)
    right = canonical_number(target)
    if left and right:
        is_same = left == right
        are_whole = "." not in left + right
        if is_same or are_whole:
            return is_same
    if letter(answer) and letter(reference):
        return letter(answer) == letter(reference)
    if word(answer) and word(answer) == word(reference):
        return True
    return None


def _numbers(answer: str, reference: str) -> tuple[str, str]:
    """Return two expressions without their units, unless they have different ones, which math_verify compares."""
    value, unit = number_and_unit(answer)
    target, expected_unit = number_and_unit(reference)
    if unit and expected_unit and unit != expected_unit:
        return answer, reference
    return value, target


STYLES: dict[AnswerStyle, Style] = {
    "after_mark": Style(
        _number_after_mark,
        str.encode,
        "numbers, read after the last #",
        "no number after its last #",
    ),
    "last_number": Style(
        last_number,
        str.encode,
        "numbers, the last one is read",
        "no number, or its last is a part of something else",
    ),
    "boxed": Style(
        lambda text: last_boxed(text) or None,
        None,
        r"LaTeX, read from the last \boxed{}",
        r"nothing in a \boxed{}",
        kind="latex",
        around=(r"\boxed{", "}"),
    ),
    "texts": Style(
        lambda text: said_text(text) or None,
        normalise_text,
        "texts, read after the last mark",
        "nothing after its mark",
        kind="texts",
        marked=True,
    ),
    "choice": Style(
        said_choice,
        _choice,
        "letters of choices, read after the last mark, or the last one",
        f"no letter {LETTERS[0]} to {LETTERS[-1]} that stands alone",
        kind="texts",
        marked=True,
    ),
}


def style_of(style: AskedStyle, default: AnswerStyle) -> AnswerStyle:
    """Return how a reasoner's answers are read: by its `default` style, where nothing else is asked for."""
    return default if style == "auto" else style


class Completion(NamedTuple):
    """The text of generated tokens.

    Attributes:
        tokens: how many there are, the one that ended it included.
        text: as far as it came, with U+FFFD for bytes that aren't UTF-8, without an end token.
        ended: whether an end token came within the budget.
    """

    tokens: int
    text: str
    ended: bool


def read_completion(
    token_ids: Iterable[int], token_bytes: Sequence[bytes], eos_ids: Collection[int]
) -> Completion:
    """Write out the tokens before the first end token.

    Args:
        token_ids: generated ids. Ids outside the table, which a padded vocabulary can produce, write nothing.
        token_bytes: the bytes of each token; b"" for special tokens.
        eos_ids: ids of the end tokens.
    """
    written = b""
    count = 0
    for count, token_id in enumerate(token_ids, 1):
        if token_id in eos_ids:
            return Completion(count, written.decode("utf-8", "replace"), True)
        if 0 <= token_id < len(token_bytes):
            written += token_bytes[token_id]
    return Completion(count, written.decode("utf-8", "replace"), False)

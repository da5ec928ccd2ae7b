"""Questions with choices: they are written out below the question, and the answer is a letter or a choice's text."""

import re
import string
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from slpo_jax.data.record_texts import is_missing, is_number, written
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import canonical_number

CHOICE_FIELDS = ("choices", "options", "endings")
Counted = Literal["", "0", "1"]
"""`config.data.fields.first_choice`."""
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.):]?")
_OWN_LABEL = re.compile(r"\(?([A-Z])\s*[).:]\s*")
_COLUMN = re.compile(
    r"([A-Z])|(?:(?i:op|opt|option|choice|ending|sol)(?![sS]\Z)[ _-]?|answer(?=[A-Z]))(?:([A-Za-z])|(\d{1,2}))"
)
# The wrong answers of sets that have them in fields of their own: GPQA's, SciQ's and OpenTDB's, in lower case.
WRONG_ANSWERS = (
    ("incorrect answer 1", "incorrect answer 2", "incorrect answer 3"),
    ("distractor1", "distractor2", "distractor3"),
    ("incorrect_answers",),
)
RIGHT_ANSWERS = ("correct answer", "correct_answer")
"""Fields of the right answer, beside which the wrong ones may be."""


WAYS = ("0", "1", "written")
"""What a number may be that is an answer: an index from 0 or from 1, or a choice's text."""


class Choices(NamedTuple):
    """The choices of a question.

    Attributes:
        labels, texts: of each that there is.
        places: of each among all of the record's, from 0.
        has_labels: whether the record has labels, which are else letters.
        fields: of the record, that they are in.
        are_numbers: as the record has them, and not texts that may write some.
        first: the number in the first field's name, such as 1 of option1; "" for none.
    """

    labels: list[str]
    texts: list[str]
    places: list[int]
    has_labels: bool
    fields: Sequence[str]
    are_numbers: bool
    first: str = ""

    def below(self, question: str) -> str:
        """Return the question, and a line for each choice."""
        return "\n".join([question, *map("{}. {}".format, self.labels, self.texts)])

    def answer(self, where: str, answer: str, way: str) -> str:
        """Return the label where the record gives a label or an index, else the choice's text.

        Args:
            where: the record, for messages.
            answer: the record's answer.
            way: what it is where it is a number: `WAYS`, or "" for a choice's text or an index, whichever it can be.
        Raises:
            UserError: it is none of them, or both a choice's text and another one's label or index.
        """
        label, text = self._labelled(answer), self.read(answer, "written")
        if canonical_number(answer) is not None and not (label and self.has_labels):
            label = self.read(answer, way or self.first or "0") if way != "written" else None
            text = text if self.has_labels or way in ("", "written") else None
        elif self.has_labels:
            text = None if label else text
        if not (label or text) or (label and text and label != text):
            raise UserError(
                f"{where}: answer {answer[:40]!r} is none of the choices, or one's text and another's label or index; "
                f"give a label ({', '.join(self.labels)}), or the first one's index as config.data.fields.first_choice"
            )
        return label or self.texts[self.labels.index(text or "")]

    def read(self, number: str, way: str) -> str | None:
        """Return the label of the choice whose index a number is, from 0 or 1, or that any answer is written as."""
        canonical = canonical_number(number) or number.strip()
        if way == "written":
            forms = [canonical_number(text) or text for text in self.texts]
            return self.labels[forms.index(canonical)] if canonical in forms else None
        place = int(canonical) - int(way) if re.fullmatch("[0-9]{1,2}", canonical) and not self.has_labels else -1
        return self.labels[self.places.index(place)] if place in self.places else None

    def _labelled(self, answer: str) -> str | None:
        """Return the label that an answer is, or the name of whose column."""
        letter, number = _LETTER.fullmatch(answer.strip()), canonical_number(answer)
        form = letter[1].upper() if letter else number if number in self.labels else answer.strip()
        columns = [name.strip().lower() for name in self.fields] if len(self.fields) == len(self.labels) else []
        if form in self.labels or form.lower() not in columns:
            return form if form in self.labels else None
        return self.labels[columns.index(form.lower())]


def choices_of(where: str, record: Mapping[str, Any], field_name: str = "") -> Choices | None:
    """Return the choices of a record, None without any. Missing ones are left out, and the others keep their letters.

    Args:
        where: the record, for messages.
        record: with a list of texts, with {"label": [..], "text": [..]}, or with texts by label, as one of
            `CHOICE_FIELDS`, also written as texts; or with a column for each: A, B, C, ..; option_a, ..; opa, ..;
            option1, ...
        field_name: the field that has them.
    Raises:
        UserError: they are something else.
    """
    field = next((field for field in ([field_name] if field_name else CHOICE_FIELDS) if record.get(field)), None)
    if field is None:
        return None if field_name else _of_columns(where, record)
    value = written(record[field]) if isinstance(record[field], str) else record[field]
    if has_labels := isinstance(value, Mapping):
        table = {label: text for label, text in value.items() if not _is_nothing(text)}  # of other records, for arrow
        labels, texts = table.get("label", table), table.get("text", table.values())
    else:
        texts = value if isinstance(value, list | tuple) else []
        labels = string.ascii_uppercase[: len(texts)]
    labels, texts = [str(label) if is_number(label) else label for label in labels], list(texts)
    present = [place for place, text in enumerate(texts) if not _is_nothing(text)]
    is_list = len(labels) == len(texts) and all(isinstance(label, str) for label in labels)
    are_texts = all(isinstance(texts[place], str) or is_number(texts[place]) for place in present)
    if not (present and is_list and are_texts):
        raise UserError(f'{where}: field \'{field}\' is no list of up to 26 texts; write ["first", "second", ...]')
    strings, labels = [str(texts[place]) for place in present], [labels[place] for place in present]
    matches = [_OWN_LABEL.match(text) for text in strings]
    if [match and match[1] for match in matches] == labels:
        strings = [text[match.end() :] for text, match in zip(strings, matches, strict=True) if match]
    return Choices(labels, strings, present, has_labels, (field,), all(is_number(texts[place]) for place in present))


def is_column(name: Any) -> bool:
    """Tell whether a field may be one choice."""
    return _COLUMN.fullmatch(str(name).strip()) is not None


def choices_with_wrong(record: Mapping[str, Any], question: str, answer: str) -> tuple[Choices, str] | None:
    """Return the choices of a record whose wrong answers have fields of their own, and the right one's letter.

    Their order is drawn, but the same wherever the record is read.

    Args:
        record: with names in lower case.
        question: that is asked.
        answer: the right one.
    """
    fields = next((fields for fields in WRONG_ANSWERS if any(record.get(field) for field in fields)), None)
    if fields is None:
        return None
    wrong: list[str] = []
    for field in fields:
        value = record.get(field)
        texts = value if isinstance(value, list) else [value]
        wrong.extend(str(text).strip() for text in texts if not is_missing(text))
    texts = [answer.strip(), *wrong]
    rng = np.random.default_rng(zlib.crc32("\n".join([question, *sorted(texts)]).encode()))
    order = rng.permutation(len(texts)).tolist()
    labels = list(string.ascii_uppercase[: len(texts)])
    shuffled = [texts[place] for place in order]
    return Choices(labels, shuffled, list(range(len(texts))), True, fields, False), labels[order.index(0)]


def _of_columns(where: str, record: Mapping[str, Any]) -> Choices | None:
    """Return the choices of columns, some of which may be empty; a problem's numbers may be A and B too."""
    letters, numbers = dict[str, str](), dict[int, str]()
    for name in record:
        if match := _COLUMN.fullmatch(str(name).strip()):
            kind, key = (numbers, int(match[3])) if match[3] else (letters, (match[1] or match[2]).upper())
            kind[key] = name  # type: ignore[index]
    first = min(numbers, default=0)
    if max(numbers, default=0) - first >= len(string.ascii_uppercase):
        raise UserError(f"{where}: has {len(numbers)} columns of choices; give at most {len(string.ascii_uppercase)}")
    columns = letters or {string.ascii_uppercase[number - first]: numbers[number] for number in numbers if first < 2}
    names, labels = [columns[label] for label in sorted(columns)], list(string.ascii_uppercase[: len(columns)])
    if sorted(columns) != labels or len(names) < 2 + ("A" in map(str.strip, names)):
        return None
    # A dash stands for nothing, but among other signs.
    signs = any(isinstance(record[name], str) and re.fullmatch(r"[^\w-]+", record[name]) for name in names)
    places = [n for n, name in enumerate(names) if not is_missing(record[name]) or (signs and record[name] == "-")]
    if len(places) < 2:
        return None
    names, labels = [names[place] for place in places], [labels[place] for place in places]
    are_numbers = all(is_number(record[name]) for name in names)
    return Choices(
        labels, [str(record[name]) for name in names], places, False, names, are_numbers, "" if letters else str(first)
    )


def _is_nothing(text: Any) -> bool:
    """Tell whether a list has nothing at a place; what is written there may be any text, such as "N/A"."""
    return text is None or (isinstance(text, str) and text.strip() in ("", "nan", "<NA>"))


def way_of(answered: Iterable[tuple[str, Choices, str, bool]], first: Counted, strict: bool) -> str:
    """Tell what the numbers among the answers of a set are, by all of them: one of `WAYS`, "" where that isn't clear.

    Args:
        answered: where each problem is, its choices, its answer, and whether the record has a number as such.
        first: the index of the first choice where it is given, else "".
        strict: whether what is given holds where it doesn't fit.
    Raises:
        UserError: they are indices from 1, and nothing says so.
    """
    numeric = [row for row in answered if canonical_number(row[2]) is not None and not row[1].has_labels]
    ways = [way for way in WAYS if all(choices.read(answer, way) for _, choices, answer, _ in numeric)]
    if not numeric or (first and (strict or first in ways)):
        return first if numeric else ""
    if "written" in ways and len(ways) > 1:
        if "0" not in ways or not all(is_index and not choices.are_numbers for _, choices, _, is_index in numeric):
            return "" if "0" in ways else "written"
        ways.remove("written")
    firsts = {choices.first for _, choices, _, _ in numeric}
    if len(firsts) == 1 and firsts <= {*ways}:
        return firsts.pop()
    if ways == ["1"]:
        where, choices, answer, _ = next(row for row in numeric if not row[1].read(row[2], "0"))
        raise UserError(
            f"{where}: answer {answer!r} of {len(choices.labels)} choices can only be an index from 1; say so with "
            "config.data.fields.first_choice=1, or give labels"
        )
    return ways[0] if ways else ""

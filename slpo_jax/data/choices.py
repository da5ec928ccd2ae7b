"""Questions with choices: they are written out below the question, and the answer is a letter or a choice's text."""

import functools
import itertools
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from slpo_jax.data.cells import is_missing, written
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import canonical_number

FIELDS = ("choices", "options")
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.):]?")
_OWN_LABEL = re.compile(r"\(?([A-Z])\s*[).:]\s*")
_LABEL = re.compile(r"(?:^|[\s,;])\(?([A-Za-z])\s?[).:]\s")  # within a text that has all of them, as MathQA's
_COLUMN = re.compile(r"(?:(op|opt|option|choice)[ _-]?)?([a-z]|(?<=.)[0-9])", re.IGNORECASE)


class Choices(NamedTuple):
    """The choices of a question.

    Attributes:
        labels, texts: of each.
        own: whether the labels are the record's own.
        fields: of the record, that they are in.
    """

    labels: list[str]
    texts: list[str]
    own: bool = False
    fields: Sequence[str] = ()

    def below(self, question: str) -> str:
        """The question, and a line for each choice."""
        return "\n".join([question, *map("{}. {}".format, self.labels, self.texts)])

    def answer(self, where: str, said: str) -> str:
        """The label where the record gives a label or an index from 0, else the choice's text.

        Raises:
            UserError: it is none of them, or both a choice's text and another one's label or index.
        """
        said = said.strip()
        letter, number = _LETTER.fullmatch(said), canonical_number(said) or ""
        label = letter[1].upper() if letter else said
        by_label = self.labels.index(label) if label in self.labels else None
        if by_label is None and not self.own and number.isdecimal() and int(number) < len(self.labels):
            by_label = int(number)  # a table with a missing answer has 1.0 for 1
        by_text = self.texts.index(said) if said in self.texts else None
        if number and by_label is by_text is None:  # 72.0 for 72
            numbers = [canonical_number(text) for text in self.texts]
            by_text = numbers.index(number) if number in numbers else None
        if by_label is None and by_text is None:
            usual = f"a label ({', '.join(self.labels)})" if self.own else "a letter, an index from 0"
            raise UserError(f"{where}: answer {said!r} is none of the choices; give {usual} or a text")
        if None not in (by_label, by_text) and by_label != by_text:
            raise UserError(
                f"{where}: answer {said!r} is the text of choice {self.labels[by_text or 0]} and means choice "
                f"{self.labels[by_label or 0]} as a label or index; write that one's letter"
            )
        return self.texts[by_text or 0] if by_label is None else self.labels[by_label]


def choices_of(where: str, record: Mapping[str, Any], answer: str | None) -> Choices | None:
    """The choices of a record, None where it has none.

    Args:
        record: with a list of texts, with {"label": [..], "text": [..]}, or with texts by label, as `choices` or
            `options`, also written as texts; or with a column for each: A, B, ..; option_a, ..; opa, ..; option1, ...
        answer: of the record.
    Raises:
        UserError: they are something else.
    """
    field = next((field for field in FIELDS if record.get(field)), None)
    if field is None:
        columns = columns_of(tuple(record))
        # A problem's numbers are named by letters too, a and b or a, b and c.
        least = {"A": 3, "a": 4}.get(str(next(iter(columns.values()), "")).strip(), 2)
        if len(columns) < least and answer not in columns:
            return None
        return _from_columns(where, record, columns)
    value, texts = record[field], list[Any]()
    if isinstance(value, str):
        value = written(value) or _labelled(value)
    own = isinstance(value, Mapping)
    if own and all(isinstance(column, list) for column in value.values()) and "label" in value:
        labels, texts = value["label"], next((column for name, column in value.items() if name != "label"), [])
    elif own:
        value = {label: text for label, text in value.items() if text is not None}  # of other records, for arrow
        labels, texts = list(value), list(value.values())
    else:
        texts = value if isinstance(value, list) else [None]
        labels = list(string.ascii_uppercase[: len(texts)])
    texts = [str(text) if isinstance(text, int | Decimal) else text for text in texts]
    if not all(isinstance(text, str) for text in [*labels, *texts]) or len(labels) != len(texts):
        raise UserError(f'{where}: field \'{field}\' is no list of up to 26 texts; write ["first", "second", ...]')
    labelled = [_OWN_LABEL.match(text) for text in texts]
    if [match and match[1] for match in labelled] == labels:
        texts = [text[match.end() :] for text, match in zip(texts, labelled, strict=True) if match]
    return Choices(labels, texts, own, (field,))


@functools.lru_cache
def columns_of(names: tuple[str, ...]) -> dict[str, str]:
    """The fields that are named as those which hold a choice each, by label; none without two in a row."""
    kinds: dict[str, dict[str, str]] = {}
    for name in names:
        if match := _COLUMN.fullmatch(str(name).strip()):
            kind = match[1].lower() if match[1] else str(match[2].islower())
            kinds.setdefault(kind, {})[match[2].upper()] = name
    for found in kinds.values():
        labels = sorted(found)
        in_a_row = any("".join(labels) in row for row in (string.ascii_uppercase, string.digits))
        if len(labels) > 1 and in_a_row and labels[0] in "A01":
            return {label: found[label] for label in labels}
    return {}


def _from_columns(where: str, record: Mapping[str, Any], columns: Mapping[str, str]) -> Choices | None:
    """The choices of columns, of which the last ones may be empty."""
    texts = {label: record[field] for label, field in columns.items()}
    while texts and (is_missing(last := list(texts.values())[-1], words=False) or str(last).strip() in ("", "NULL")):
        texts.popitem()  # "None" may be a choice
    texts = {label: str(text) if isinstance(text, int | Decimal) else text for label, text in texts.items()}
    for label, text in texts.items():
        if not isinstance(text, str) or is_missing(text, words=False) or not text.strip():
            raise UserError(f"{where}: field '{columns[label]}' is no text of a choice; write it as a text")
    own = not {"A"} & columns.keys()
    return Choices(list(texts), list(texts.values()), own, list(columns.values())) if texts else None


def _labelled(text: str) -> list[str] | None:
    """The choices of a text that has them all behind their letters."""
    found: list[re.Match[str]] = []
    for match in _LABEL.finditer(text):
        if match[1].upper() == string.ascii_uppercase[len(found) % 26]:
            found.append(match)
    if len(found) < 2 or text[: found[0].start()].strip():
        return None
    ends = [match.start() for match in found[1:]] + [len(text)]
    return [text[match.end() : end].strip().rstrip(",;").rstrip() for match, end in zip(found, ends, strict=True)]


def with_labels(
    rows: Iterator[tuple[str, Any]], answer_field: Callable[[Mapping[str, Any]], str | None]
) -> Iterator[tuple[str, Any]]:
    """Rows with labels as answers where it takes all of them to say what their numbers mean.

    MedMCQA's `cop` counts from 0 on the hub and from 1 in the files of its authors. Of choices that are columns 1, 2,
    .., numbers count from 0, as COPA's `label` does, where one is 0, none is the last column's number, and none is the
    text of a choice.

    Args:
        rows: (where, record).
        answer_field: of a record.
    Raises:
        UserError: `cop` counts from neither.
    """
    first = next(rows, None)
    record = first[1] if first and isinstance(first[1], Mapping) else {}
    columns = columns_of(tuple(record))
    field = answer_field(record) if "1" in columns and "0" not in columns else None
    field = "cop" if {"cop", "opa"} <= record.keys() else field
    rows = itertools.chain([first] if first else [], rows)
    if field is None:
        yield from rows
        return
    found = [(where, record, _number(record, field)) for where, record in rows]
    numbers = {number for _, _, number in found if number}
    if field == "cop":
        bases = [base for base, others in ((0, "4"), (1, "0")) if others not in numbers]
        if numbers & set("01234") and len(bases) != 1:
            raise UserError(f"{found[0][0]}: field 'cop' counts from 0 or from 1, which no record says; write letters")
        letters = {str(bases[0] + place): letter for place, letter in enumerate("ABCD")}
        labels = {number: letters.get(number) for number in numbers}
    else:
        names = (field, *columns.values())
        texts = ([str(record.get(name)) for name in names] for _, record, number in found if number)
        from_zero = {"0", str(len(columns))} & numbers == {"0"} and not any(row[0] in row[1:] for row in texts)
        labels = {str(place): label for place, label in enumerate(columns)} | {"-1": None} if from_zero else {}
    for where, record, number in found:
        yield where, {**record, field: labels[number]} if number in labels else record


def _number(record: Any, field: str) -> str | None:
    return canonical_number(str(record.get(field))) if isinstance(record, Mapping) else None

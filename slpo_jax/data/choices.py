"""Questions with choices: they are written out below the question, and the answer is a letter or a choice's text."""

import re
import string
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from slpo_jax.data.cells import is_missing, written
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import canonical_number

FIELDS = ("choices", "options")
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.):]?")
_OWN_LABEL = re.compile(r"\(?([A-Z])\s*[).:]\s*")
_COLUMN = re.compile(r"([A-J])|(?:op|opt|option|choice)[ _-]?([A-Ja-j])")


class Choices(NamedTuple):
    """The choices of a question.

    Attributes:
        labels, texts: of each.
        own: whether the labels are the record's own.
        fields: of the record, that they are in.
    """

    labels: list[str]
    texts: list[str]
    own: bool
    fields: Sequence[str]

    def below(self, question: str) -> str:
        """The question, and a line for each choice."""
        return "\n".join([question, *map("{}. {}".format, self.labels, self.texts)])

    def answer(self, where: str, said: str) -> str:
        """The label where the record gives a label or an index from 0, else the choice's text.

        Raises:
            UserError: it is none of them, or both a choice's text and another one's label or index.
        """
        said = said.strip()
        letter, number = _LETTER.fullmatch(said), canonical_number(said) or ""  # a table has 1.0 for 1
        label = letter[1].upper() if letter else said
        index = int(number) if number.isdecimal() and not self.own else len(self.labels)
        by_label = label if label in self.labels else self.labels[index] if index < len(self.labels) else None
        forms = [canonical_number(text) or text for text in self.texts]
        place = forms.index(number or said) if (number or said) in forms else None
        by_text = None if place is None else self.labels[place]
        if (by_label is None and by_text is None) or (None not in (by_label, by_text) and by_label != by_text):
            raise UserError(
                f"{where}: answer {said!r} is none of the choices, or one's text and another's label or index from 0; "
                f"give a label ({', '.join(self.labels)})"
            )
        return by_label or self.texts[place or 0]


def choices_of(where: str, record: Mapping[str, Any]) -> Choices | None:
    """The choices of a record, None where it has none.

    Args:
        record: with a list of texts, with {"label": [..], "text": [..]}, or with texts by label, as `choices` or
            `options`, also written as texts; or with a column for each: A, B, C, ..; option_a, ..; opa, ...
    Raises:
        UserError: they are something else.
    """
    field = next((field for field in FIELDS if record.get(field)), None)
    if field is None:
        return _of_columns(record)
    value = written(record[field]) if isinstance(record[field], str) else record[field]
    if own := isinstance(value, Mapping):
        table = {label: text for label, text in value.items() if text is not None}  # of other records, for arrow
        labels, texts = table.get("label", table), table.get("text", table.values())
    else:
        texts = [None] if isinstance(value, int | float | Decimal) else value or [None]
        labels = string.ascii_uppercase[: len(texts)]
    labels, texts = list(labels), [str(each) if isinstance(each, int | float | Decimal) else each for each in texts]
    if not all(isinstance(text, str) for text in [*labels, *texts]) or len(labels) != len(texts):
        raise UserError(f'{where}: field \'{field}\' is no list of up to 26 texts; write ["first", "second", ...]')
    labelled = [_OWN_LABEL.match(text) for text in texts]
    if [match and match[1] for match in labelled] == labels:
        texts = [text[match.end() :] for text, match in zip(texts, labelled, strict=True) if match]
    return Choices(labels, texts, own, (field,))


def _of_columns(record: Mapping[str, Any]) -> Choices | None:
    """The choices of columns, of which the last ones may be empty; a problem's numbers may be A and B too."""
    found = {match[1] or match[2].upper(): name for name in record if (match := _COLUMN.fullmatch(str(name).strip()))}
    fields = [found[label] for label in sorted(found)]
    while fields and is_missing(record[fields[-1]]):
        fields.pop()
    labels = list(string.ascii_uppercase[: len(fields)])
    if len(fields) < 2 + ("A" in map(str.strip, fields)) or not found.keys() >= {*labels}:
        return None
    return Choices(labels, [str(record[field]) for field in fields], False, fields)

"""Questions with choices: they are written out below the question, and the answer is a letter or a choice's text."""

import re
import string
from collections.abc import Mapping
from typing import Any, NamedTuple

from slpo_jax.errors import UserError

FIELDS = ("choices", "options")
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.):]?")
_OWN_LABEL = re.compile(r"\(?([A-Z])\s*[).:]\s*")


class Choices(NamedTuple):
    """The choices of a question: labels and texts, and whether the labels are the record's own."""

    labels: list[str]
    texts: list[str]
    own: bool = False

    def below(self, question: str) -> str:
        """The question, and a line for each choice."""
        return "\n".join([question, *map("{}. {}".format, self.labels, self.texts)])

    def answer(self, where: str, said: str) -> str:
        """The label where the record gives a label or an index from 0, else the choice's text.

        Raises:
            UserError: it is none of them, or both a choice's text and another one's label or index.
        """
        letter = _LETTER.fullmatch(said.strip())
        label = letter[1].upper() if letter else said.strip()
        by_label = self.labels.index(label) if label in self.labels else None
        if by_label is None and not self.own and said.isdecimal() and int(said) < len(self.labels):
            by_label = int(said)
        by_text = self.texts.index(said.strip()) if said.strip() in self.texts else None
        if by_label is None and by_text is None:
            raise UserError(
                f"{where}: answer {said!r} is none of the choices; give a letter, an index from 0 or a text"
            )
        if None not in (by_label, by_text) and by_label != by_text:
            raise UserError(
                f"{where}: answer {said!r} is the text of choice {self.labels[by_text or 0]} and means choice "
                f"{self.labels[by_label or 0]} as a label or index; write that one's letter"
            )
        return said.strip() if by_label is None else self.labels[by_label]


def choices_of(where: str, record: Mapping[str, Any]) -> Choices | None:
    """The choices of a record, None where it has none.

    Args:
        record: with a list of texts, with {"label": [..], "text": [..]}, or with texts by label, as `choices` or
            `options`.
    Raises:
        UserError: they are something else.
    """
    field = next((field for field in FIELDS if record.get(field)), None)
    if field is None:
        return None
    value, texts = record[field], list[Any]()
    own = isinstance(value, Mapping)
    if own and all(isinstance(column, list) for column in value.values()) and "label" in value:
        labels, texts = value["label"], next((column for name, column in value.items() if name != "label"), [])
    elif own:
        labels, texts = list(value), list(value.values())
    else:
        texts = value if isinstance(value, list) else [None]
        labels = list(string.ascii_uppercase[: len(texts)])
    if not all(isinstance(text, str) for text in [*labels, *texts]) or len(labels) != len(texts):
        raise UserError(f'{where}: field \'{field}\' is no list of up to 26 texts; write ["first", "second", ...]')
    labelled = [_OWN_LABEL.match(text) for text in texts]
    if [match and match[1] for match in labelled] == labels:
        texts = [text[match.end() :] for text, match in zip(texts, labelled, strict=True) if match]
    return Choices(labels, texts, own)

"""Questions with choices: they are written out below the question, and the answer is a letter or a choice's text."""

import re
import string
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from slpo_jax.data.layouts import (
    CHOICE_COLUMNS,
    FIELD_NAMES,
    WRONG_ANSWERS,
    match_choice_column,
)
from slpo_jax.data.record_texts import is_missing, is_number, parse_written
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import canonical_number

FirstChoice = Literal["", "0", "1"]
"""`config.data.fields.first_choice`."""
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.):]?")
_OWN_LABEL = re.compile(r"\(?([A-Z])\s*[).:]\s*")
_SIGNS = re.compile(r"[^\w-]+")
_LETTERS = string.ascii_uppercase


class Choices(NamedTuple):
    """The choices of a question.

    Attributes:
        labels: of each choice that there is.
        texts: of each choice that there is.
        places: of each among all of the record's choices, from 0.
        has_labels: whether the record has labels of its own; they are letters otherwise.
        fields: of the record that the choices are in.
        are_numbers: whether the record has them as numbers, and not as texts that may write some.
        first: the index of the first choice in sets with these fields.
    """

    labels: list[str]
    texts: list[str]
    places: list[int]
    has_labels: bool
    fields: Sequence[str]
    are_numbers: bool
    first: int = 0

    def format_under(self, question: str) -> str:
        """Return the question and, below it, a line for each choice."""
        lines = [question]
        for label, text in zip(self.labels, self.texts, strict=True):
            lines.append(f"{label}. {text}")
        return "\n".join(lines)

    def answer_encoding(
        self, answer: str, is_number: bool, first_choice: FirstChoice
    ) -> Literal["label", "index", "text", "either"]:
        """Tell what an answer may be: a label, an index, a choice's text, or either of the last two.

        Args:
            answer: the record's answer.
            is_number: whether the record has it as a number, and not as a text.
            first_choice: the index of the first choice, where the user says that answers are indices.
        Returns:
            "label" for words and for records with labels, where a choice's text is taken too.
        """
        if self.has_labels or canonical_number(answer) is None:
            return "label"
        if first_choice:
            return "index"
        if not is_number:
            return "either"
        return "text" if self.are_numbers else "index"

    def stands_for(
        self, where: str, answer: str, is_number: bool, first_choice: FirstChoice
    ) -> tuple[str, int | None]:
        """Find the choice that an answer stands for.

        Args:
            where: the record, for messages.
            answer: the record's answer.
            is_number: whether the record has it as a number, and not as a text.
            first_choice: the index of the first choice, where the user says that answers are indices.
        Returns:
            the label where the record gives a label or an index, else the choice's text; and the index of the first
            choice, where the answer was read as an index.
        Raises:
            UserError: it is none of the choices, or both a choice's text and another one's label or index.
        """
        first = int(first_choice) if first_choice else self.first
        encoding = self.answer_encoding(answer, is_number, first_choice)

        # Look for the answer in every way that it may be meant.
        by_label = None
        by_index = None
        by_text = None
        if encoding == "label":
            by_label = self._with_label(answer)
        if encoding in ("index", "either"):
            by_index = self._with_index(answer, first)
        if encoding != "index":
            by_text = self._with_text(answer)
        if by_label and self.has_labels:
            by_text = None

        # Two ways that lead to two choices are an error, as is none.
        label = by_label or by_index
        found = {place for place in (label, by_text) if place}
        if len(found) != 1:
            fault = "is none of the choices, or one's text and another's label or index"
            if encoding == "index":
                fault = f"is a number beside texts, and no choice has this index, counted from {first}"
            raise UserError(
                f"{where}: answer {answer[:40]!r} {fault}; give a label ({', '.join(self.labels)}), or say with "
                "config.data.fields.first_choice=0 (or 1) where indices begin"
            )
        if label:
            return label, first if by_index else None
        place = self.labels.index(found.pop())
        return self.texts[place], None

    def _with_label(self, answer: str) -> str | None:
        """Return the label that an answer is, or the label of the column that it names."""
        answer = answer.strip()
        match = _LETTER.fullmatch(answer)
        if match:
            letter = match[1].upper()
            if letter in self.labels:
                return letter
        number = canonical_number(answer)
        if number in self.labels:
            return number
        if answer in self.labels:
            return answer
        if len(self.fields) != len(self.labels):
            return None
        column = answer.lower()
        columns = [name.strip().lower() for name in self.fields]
        if column not in columns:
            return None
        place = columns.index(column)
        return self.labels[place]

    def _with_index(self, number: str, first: int) -> str | None:
        """Return the label of the choice that has this index."""
        canonical = canonical_number(number) or ""
        if not re.fullmatch("[0-9]{1,2}", canonical):
            return None
        place = int(canonical) - first
        if place not in self.places:
            return None
        index = self.places.index(place)
        return self.labels[index]

    def _with_text(self, answer: str) -> str | None:
        """Return the label of the choice that has this text; numbers are compared as numbers."""
        canonical = canonical_number(answer) or answer.strip()
        for label, text in zip(self.labels, self.texts, strict=True):
            if (canonical_number(text) or text) == canonical:
                return label
        return None


def read_choices(
    where: str, record: Mapping[str, Any], field_name: str = ""
) -> Choices | None:
    """Read the choices of a record. Missing ones are left out, and the others keep their letters.

    Args:
        where: the record, for messages.
        record: with a list of texts, with {"label": [..], "text": [..]}, or with texts by label, in a field of
            `FIELD_NAMES["choices"]`, also written as texts; or with a column for each of them, see
            `match_choice_column`.
        field_name: the field that has them.
    Returns:
        the choices; None of a record without any.
    Raises:
        UserError: they are something else.
    """
    names = [field_name] if field_name else FIELD_NAMES["choices"]
    for name in names:
        if record.get(name):
            return _read_field(where, record, name)
    if field_name:
        return None
    return _read_columns(where, record)


def _read_field(where: str, record: Mapping[str, Any], field: str) -> Choices:
    """Read the choices that one field holds."""
    value = record[field]
    if isinstance(value, str):
        value = parse_written(value)

    # Get the texts, and their labels: the field's own, or letters.
    has_labels = isinstance(value, Mapping)
    labels: Any = []
    texts: list[Any] = []
    if isinstance(value, Mapping):
        # Arrow gives each record the labels of all others, with nothing as their texts.
        table = dict(value)
        for label, text in value.items():
            if _is_nothing(text):
                del table[label]
        labels = table.get("label", table)
        texts = list(table.get("text", table.values()))
    elif isinstance(value, list | tuple):
        labels = _LETTERS[: len(value)]
        texts = list(value)
    labels = [str(label) if is_number(label) else label for label in labels]

    # Every label must be a text, and every choice that is not missing a text or a number.
    places: list[int] = []
    present: list[str] = []
    is_readable = len(labels) == len(texts)
    are_numbers = True
    for place, text in enumerate(texts):
        if _is_nothing(text):
            continue
        is_readable &= is_number(text) or isinstance(text, str)
        are_numbers &= is_number(text)
        places.append(place)
        present.append(str(text))
    for label in labels:
        is_readable &= isinstance(label, str)
    if not present or not is_readable:
        raise UserError(
            f'{where}: field \'{field}\' is no list of up to 26 texts; write ["first", "second", …]'
        )
    labels = [labels[place] for place in places]
    return Choices(
        labels=labels,
        texts=_strip_labels(labels, present),
        places=places,
        has_labels=has_labels,
        fields=(field,),
        are_numbers=are_numbers,
    )


def _strip_labels(labels: list[str], texts: list[str]) -> list[str]:
    """Take their labels off the texts where each begins with its own, such as "B) 80 pens"."""
    stripped: list[str] = []
    for label, text in zip(labels, texts, strict=True):
        match = _OWN_LABEL.match(text)
        if match is None or match[1] != label:
            return texts
        stripped.append(text[match.end() :])
    return stripped


def choices_with_wrong(
    record: Mapping[str, Any], question: str, answer: str
) -> tuple[Choices, str] | None:
    """Make choices of a right answer and the wrong ones that have fields of their own.

    Their order is random, but the same wherever the record is read.

    Args:
        record: with names in lower case.
        question: the question's text, a seed of the order.
        answer: the right one.
    Returns:
        the choices and the letter of the right one; None of a record without such fields.
    """
    fields: tuple[str, ...] = ()
    for names in WRONG_ANSWERS:
        if any(record.get(name) for name in names):
            fields = names
            break
    if not fields:
        return None

    # The right one comes first.
    texts = [answer.strip()]
    for field in fields:
        value = record.get(field)
        wrong = value if isinstance(value, list) else [value]
        for text in wrong:
            if not is_missing(text):
                texts.append(str(text).strip())

    # Draw their order by a seed that depends on the question and on all of them.
    content = "\n".join([question, *sorted(texts)])
    seed = zlib.crc32(content.encode())
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(texts)).tolist()
    labels = list(_LETTERS[: len(texts)])
    choices = Choices(
        labels=labels,
        texts=[texts[place] for place in order],
        places=list(range(len(texts))),
        has_labels=True,
        fields=fields,
        are_numbers=False,
    )
    place_of_right = order.index(0)
    return choices, labels[place_of_right]


def _read_columns(where: str, record: Mapping[str, Any]) -> Choices | None:
    """Read choices that have a column each, some of which may be empty; a problem's numbers may be called A and B."""
    # Collect the columns by letter and by number, and the index that sets with such names count from.
    by_letter = dict[str, str]()
    by_number = dict[int, str]()
    first: int | None = 0
    for name in record:
        match = match_choice_column(name)
        if match is None:
            continue
        if match["number"]:
            number = int(match["number"])
            by_number[number] = name
        else:
            letter = match["letter"] or match["suffix"]
            by_letter[letter.upper()] = name
        kind = match["name"] or match["answer"]
        if kind:
            first = CHOICE_COLUMNS[kind.lower()]
    if not by_letter and not by_number:
        return None
    lowest = min(by_number, default=0)
    highest = max(by_number, default=0)
    if highest - lowest >= len(_LETTERS):
        raise UserError(
            f"{where}: has {len(by_number)} columns of choices; give at most {len(_LETTERS)}"
        )

    # Numbers become letters. They must begin with 0 or 1, and letters with A, and none may be left out.
    if by_letter:
        first = first or 0
    else:
        first = lowest if first is None else first
        for number, name in by_number.items():
            if lowest < 2:
                by_letter[_LETTERS[number - lowest]] = name
    labels = list(_LETTERS[: len(by_letter)])
    if sorted(by_letter) != labels:
        return None
    names = [by_letter[label] for label in labels]
    # Two columns A and B may be a problem's numbers.
    bare_names = [name.strip() for name in names]
    fewest = 3 if "A" in bare_names else 2
    if len(names) < fewest:
        return None

    # A dash stands for nothing, except among other signs.
    has_signs = False
    for name in names:
        text = record[name]
        if isinstance(text, str) and _SIGNS.fullmatch(text):
            has_signs = True
    places: list[int] = []
    for place, name in enumerate(names):
        is_sign = has_signs and record[name] == "-"
        if is_sign or not is_missing(record[name]):
            places.append(place)
    if len(places) < 2:
        return None
    names = [names[place] for place in places]
    return Choices(
        labels=[labels[place] for place in places],
        texts=[str(record[name]) for name in names],
        places=places,
        has_labels=False,
        fields=names,
        are_numbers=all(is_number(record[name]) for name in names),
        first=first,
    )


def _is_nothing(text: Any) -> bool:
    """Tell whether a list has nothing at a place; what is written there may be any text, such as "N/A"."""
    if text is None:
        return True
    return isinstance(text, str) and text.strip() in ("", "nan", "<NA>")

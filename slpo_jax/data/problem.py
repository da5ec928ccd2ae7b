"""One problem of a set, the problems of a source, and how they were read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from absl import logging

_SHOWN = 120  # characters of the names of fields
NO_COLUMNS: Mapping[str, Any] = {}  # one for all problems, of which there may be many


@dataclass(frozen=True)
class Problem:
    """A problem.

    Attributes:
        question: the text as it stands in the source, stray spaces included.
        steps: one text a reasoning step, e.g. "<<48/2=24>>" or a line; empty where the source has none.
        answer: canonical decimal (`answers.canonical_number`), or LaTeX or a text where answers are compared as such;
            "" of a problem without one.
        columns: of the record by name what a reward asks for.
    """

    question: str
    steps: tuple[str, ...]
    answer: str
    columns: Mapping[str, Any] = field(default_factory=lambda: NO_COLUMNS, hash=False)


@dataclass
class FieldUse:
    """The use of a source's fields: which of its records' are used, and as what.

    Attributes:
        used: fields by what they are: question, choices, answer, steps.
        details: how what they hold is read, by what they are, where that isn't plain from their names.
        filled: fields that have something in them.
    """

    used: dict[str, dict[str, None]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    filled: dict[str, None] = field(default_factory=dict)

    def note(self, role: str, fields: Iterable[str]) -> None:
        """Note that these fields of a record are used as `role`."""
        noted = self.used.setdefault(role, {})
        for name in fields:
            noted[name] = None

    def see(self, record: Mapping[Any, Any]) -> None:
        """Note what a record has, as it was given, what is missing being None."""
        for name, value in record.items():
            is_empty = isinstance(value, str | list) and not value
            if value is not None and not is_empty:
                self.filled[str(name)] = None

    @property
    def unused(self) -> str:
        """Fields that nothing was taken from, "" without any."""
        used = {""}
        for fields in self.used.values():
            for name in fields:
                used.add(_key(name))
        unused: list[str] = []
        for name in self.filled:
            if _key(name) not in used:
                unused.append(name)
        return list_fields(unused)

    def lines(self) -> list[str]:
        """Say what was made of the fields, and which are not used."""
        uses: list[str] = []
        for role, fields in self.used.items():
            label = role
            if role in self.details:
                detail = self.details[role]
                label = f"{role} ({detail})"
            names = ", ".join(fields)
            uses.append(f"{label} from {names}")

        lines: list[str] = []
        if uses:
            lines.append("; ".join(uses))
        unused = self.unused
        if unused:
            lines.append(f"not used: {unused}")
        return lines


class Problems(tuple[Problem, ...]):
    """The problems of a source in its order.

    Attributes:
        left_out: how many more it has, whose answers can't be compared.
        field_use: of the source's fields.
        warnings: lines on what is missing; see `warn`.
        summary: how `slpo_jax.read` understood the source, in lines, which `print` shows.
    """

    left_out: int = 0
    field_use: FieldUse = FieldUse()
    warnings: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()

    def __new__(cls, problems: Iterable[Problem] = (), **facts: Any) -> "Problems":
        instance = super().__new__(cls, problems)
        instance.__dict__.update(facts)
        return instance

    def __str__(self) -> str:
        return "\n".join(self.summary) or repr(self)

    def warn(self) -> None:
        """Log the warnings, where the problems are going to be used."""
        for line in self.warnings:
            logging.warning("%s", line)

    def with_only(self, problems: Iterable[Problem], **facts: Any) -> "Problems":
        """Return some of them, with what is known of their source, and other `facts`."""
        known = vars(self) | facts
        return Problems(problems, **known)


def list_fields(names: Iterable[Any]) -> str:
    """Return names of fields, as many as a line has room for."""
    line = ", ".join(map(str, names))
    if len(line) <= _SHOWN:
        return line
    beginning = line[: _SHOWN - 1]
    return f"{beginning}…"


def without(
    problems: Iterable[Problem], held_out: Iterable[Problem]
) -> tuple[Problem, ...]:
    """Drop the problems whose question is also in `held_out`, where runs of white space count as one space.

    GSM8K's training file holds all questions of the validation set: 7,473 problems become 6,973.
    """
    excluded: set[str] = set()
    for problem in held_out:
        excluded.add(normalise(problem.question))
    kept: list[Problem] = []
    for problem in problems:
        question = normalise(problem.question)
        if question not in excluded:
            kept.append(problem)
    return tuple(kept)


def normalise(question: str) -> str:
    """Return the question with outer white space removed and inner runs of it made one space; identifies a problem."""
    words = question.split()
    return " ".join(words)


def _key(name: str) -> str:
    """Return the name by which a field is looked up."""
    return name.strip().lower()

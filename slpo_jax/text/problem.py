"""One problem of a set."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        question: the text as it stands in the source, stray spaces included.
        steps: one text a reasoning step, e.g. "<<48/2=24>>" or a line; empty where the source has none.
        answer: canonical decimal (`answers.canonical_decimal`), or LaTeX or a text where answers are compared as such.
    """

    question: str
    steps: tuple[str, ...]
    answer: str


def shared(problems: Iterable[Problem], others: Iterable[Problem]) -> int:
    """How many of `problems` are also in `others`, by their questions as in `without`."""
    questions = {normalised(problem.question) for problem in others}
    return sum(normalised(problem.question) in questions for problem in problems)


def without(problems: Iterable[Problem], held_out: Iterable[Problem]) -> tuple[Problem, ...]:
    """Drop the problems whose question is also in `held_out`, where runs of white space count as one space.

    GSM8K's training file holds all questions of the validation set: 7,473 problems become 6,973.
    """
    held_out_questions = {normalised(problem.question) for problem in held_out}
    return tuple(problem for problem in problems if normalised(problem.question) not in held_out_questions)


def normalised(question: str) -> str:
    """The question with outer white space removed and inner runs of it made one space; identifies a problem."""
    return " ".join(question.split())

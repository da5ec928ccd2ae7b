"""Rewards that are functions of what they name: `question`, `answer`, `completion`, and any column of the record.

One that names `completions` (or `prompts`) is asked of many at once, with lists, and gives a list, as TRL's are.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from absl import logging

from slpo_jax.errors import UserError, in_a_line

Function = Callable[..., Any]

_LARGEST = float(np.finfo(np.float32).max)
_said = set[tuple[str, str]]()
_OF_COMPLETION = frozenset({"completion", "completions", "prompts"})


class Asked(Protocol):
    """A problem, as far as a reward sees it: `slpo_jax.data.problem.Problem`."""

    @property
    def question(self) -> str: ...

    @property
    def steps(self) -> tuple[str, ...]: ...

    @property
    def answer(self) -> str: ...

    @property
    def columns(self) -> Mapping[str, Any]: ...


class Names(NamedTuple):
    """What a function asks for.

    Attributes:
        needed: names without a default.
        optional: those with one.
        everything: whether it takes all columns (`**columns`).
        is_batched: whether it is asked of many completions at once.
    """

    needed: frozenset[str]
    optional: frozenset[str]
    everything: bool
    is_batched: bool

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns that it can use; None for all."""
        return None if self.everything else (self.needed | self.optional) - _OF_COMPLETION - {"question", "answer"}

    @property
    def needs_answer(self) -> bool:
        """Whether it can't be asked of a problem without an answer."""
        return "answer" in self.needed


def name_of(function: Function) -> str:
    """What a function is called."""
    return getattr(function, "__name__", type(function).__name__)


@functools.lru_cache(maxsize=64)
def names_of(function: Function) -> Names:
    """What a function names.

    Raises:
        UserError: that can't be told, or it takes arguments by their place.
    """
    name = name_of(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    everything = any(each.kind == each.VAR_KEYWORD for each in parameters)
    by_place = [each.name for each in parameters if each.kind == each.POSITIONAL_ONLY]
    if by_place or not (named or everything):
        raise UserError(
            f"reward: {name} names nothing that it is a function of; give it arguments such as question, answer and "
            "completion, which are given by name"
        )
    needed = frozenset(each.name for each in named if each.default is each.empty)
    optional = frozenset(each.name for each in named) - needed
    return Names(needed, optional, everything, bool((needed | optional) & {"completions", "prompts"}))


def calls_of(function: Function, problems: Sequence[Asked], texts: Sequence[str]) -> list[dict[str, Any]]:
    """The arguments by name of each call that asks for N verdicts: N, or one of lists for a function of many."""
    names = names_of(function)
    rows = [_arguments(names, each, text) for each, text in zip(problems, texts, strict=True)]
    if not names.is_batched:
        return rows
    return [{name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}]


def _arguments(names: Names, problem: Asked, text: str) -> dict[str, Any]:
    said = {"completions": text, "prompts": problem.question} if names.is_batched else {"completion": text}
    own = {"question": problem.question, "answer": problem.answer} | said
    known = {"steps": list(problem.steps), **problem.columns, **own}
    return known if names.everything else {name: known[name] for name in known if name in names.needed | names.optional}


def asked_of(function: Function, problems: Sequence[Asked], texts: Sequence[str]) -> list[float | None]:
    """What a function says of completions; the one way in which any is asked.

    Args:
        function: of what it names, see above.
        problems: N.
        texts: their completions.
    Returns:
        N finite numbers; None for a failed verdict, of which a line says why.
    Raises:
        UserError: it gives something else than a finite number, or another number of them.
    """
    found: list[Any] = []
    for arguments in calls_of(function, problems, texts):
        try:
            found.append(function(**arguments))
        except Exception as error:  # it is the user's code, and can raise anything
            say_failure(name_of(function), in_a_line(error))
            found.append(None)
    return verdicts_of(function, found, problems)


def verdicts_of(function: Function, found: Sequence[Any], problems: Sequence[Asked]) -> list[float | None]:
    """N verdicts of what the calls of `calls_of` gave, None where one failed; see `asked_of`."""
    values: Sequence[Any] = found
    if names_of(function).is_batched:
        values = [None] * len(problems) if found[0] is None else found[0]
        try:
            count = None if isinstance(values, str) else len(values)
        except TypeError:
            count = None
        if count != len(problems):
            shown = repr(values)[:60] if count is None else f"{count} values"
            raise UserError(f"config.reward: {name_of(function)} gives {shown} for {len(problems)} completions; return a "
                            "list with a number for each")  # fmt: skip
    return [_number(function, value, each) for value, each in zip(values, problems, strict=True)]


def _number(function: Function, value: Any, problem: Asked) -> float | None:
    if value is None:
        return None
    number = float(value) if isinstance(value, int | float | np.number | np.bool_) else math.nan
    if not abs(number) <= _LARGEST:
        shown = f"{name_of(function)} gives {str(value)[:40]!r} for {problem.question[:60]!r}"
        raise UserError(f"config.reward: {shown}; return a finite number")
    return number


def say_failure(name: str, reason: str) -> None:
    """A line on a verdict that failed, the first of its kind; it earns 0, and `reward_failed` counts it."""
    kind = name, reason.partition(":")[0]
    if kind not in _said:
        _said.add(kind)
        logging.warning("reward: %s failed on a completion, which earns 0: %s", name, reason)

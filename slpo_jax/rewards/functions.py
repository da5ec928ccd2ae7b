"""Rewards that are functions of what they name: `question`, `answer`, `completion`, and any column of the record.

One that names `completions` (or `prompts`, or `completion_ids`) is asked of many at once, with lists, and gives a list,
as TRL's are. It gets a chat, a list of messages, where TRL would give one.
"""

import contextlib
import copy
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from absl import logging

from slpo_jax.errors import UserError, in_a_line
from slpo_jax.rewards.processes import CantRun, Failed, Processes

Function = Callable[..., Any]

_LARGEST = float(np.finfo(np.float32).max)
_said = set[tuple[str, str]]()
_LISTS = frozenset({"completions", "prompts", "completion_ids"})
GIVEN = _LISTS | {
    "question",
    "answer",
    "steps",
    "completion",
    "latents",
    "truncated",
    "is_right",
}
"""What is known of any problem and its completion; other names are columns."""
_CHAT = "prompt"  # the column in which TRL's data sets have a chat


class ProblemLike(Protocol):
    """A problem, as far as a reward sees it: `slpo_jax.data.problem.Problem`."""

    @property
    def question(self) -> str: ...

    @property
    def steps(self) -> tuple[str, ...]: ...

    @property
    def answer(self) -> str: ...

    @property
    def columns(self) -> Mapping[str, Any]: ...


class Written(NamedTuple):
    """A completion, as far as a reward sees it.

    Attributes:
        text: without its end.
        ids: its tokens, up to and including the one that ended it.
        latents: how many its thought took.
        truncated: whether no end came within the budget.
        is_right: whether the rewards before this one count it as right.
    """

    text: str
    ids: Sequence[int] = ()
    latents: int = 0
    truncated: bool = False
    is_right: bool = False


class Names(NamedTuple):
    """The arguments of a function.

    Attributes:
        needed: names without a default.
        optional: those with one.
        everything: whether it takes all columns (`**columns`).
        is_batched: whether it is asked of many completions at once.
        of_chats: whether its annotations say that completions are lists of messages.
    """

    needed: frozenset[str]
    optional: frozenset[str]
    everything: bool
    is_batched: bool
    of_chats: bool

    @property
    def named(self) -> frozenset[str]:
        """All arguments that have a name."""
        return self.needed | self.optional

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns that it can use; None for all."""
        if self.everything:
            return None
        columns = self.named - (GIVEN - {"steps"})
        if self.is_batched:
            columns |= {_CHAT}
        return columns

    @property
    def needs_answer(self) -> bool:
        """Whether it can't be asked of a problem without an answer."""
        return "answer" in self.needed


def name_of(function: Function) -> str:
    """Return the name of a function."""
    return getattr(function, "__name__", type(function).__name__)


def code_of(function: Function) -> str:
    """Return a digest of a user's function's code, "" of our functions and of what has no text.

    Of a file that is registered it is the whole file, as functions call others; else the function's own text, that of a
    partial with its arguments, or that of an object's class.
    """
    function = inspect.unwrap(function)
    bound = ""
    while isinstance(function, functools.partial):
        bound += _describe_arguments(function)
        function = inspect.unwrap(function.func)
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = type(function)
    module = inspect.getmodule(function)
    name = module.__name__ if module else ""
    package, *_ = name.split(".")
    if package == "slpo_jax":
        return ""
    is_registered = name.startswith("slpo_jax_")
    try:
        text = inspect.getsource(module if module and is_registered else function)
    except (OSError, TypeError):
        return ""
    text += bound
    digest = hashlib.sha256(text.encode())
    return digest.hexdigest()[:16]


def _describe_arguments(function: functools.partial) -> str:
    """Write a partial's arguments as JSON; of what JSON lacks the type, which is the same in every process."""

    def describe(value: Any) -> Any:
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        return type(value).__name__

    arguments = [*function.args, function.keywords]
    return json.dumps(arguments, default=describe, skipkeys=True)


def names_of(function: Function) -> Names:
    """Return the arguments that a function names.

    Raises:
        UserError: that can't be told, it takes arguments by their place, or it has to be awaited.
    """
    name = name_of(function)
    # An object may have an async __call__.
    call = getattr(function, "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        raise UserError(
            f"reward: {name} is an async function; give a plain one, which may call asyncio.run(..)"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    needed: set[str] = set()
    optional: set[str] = set()
    everything = False
    of_chats = False
    fault = ""
    for param in parameters:
        if param.kind == param.POSITIONAL_ONLY:
            fault = fault or f"takes {param.name} by its place alone"
        elif param.kind == param.VAR_KEYWORD:
            everything = True
        elif param.kind != param.VAR_POSITIONAL:
            is_needed = param.default is param.empty
            names = needed if is_needed else optional
            names.add(param.name)
            if param.name == "completions":
                annotation = str(param.annotation).lower()
                of_chats = "dict" in annotation
    named = needed | optional
    if not named and not everything:
        fault = fault or "names nothing that it is a function of"
    if fault:
        raise UserError(
            f"reward: {name} {fault}; give it arguments such as question, answer and completion, which come by name"
        )
    return Names(
        needed=frozenset(needed),
        optional=frozenset(optional),
        everything=everything,
        is_batched=not named.isdisjoint(_LISTS),
        of_chats=of_chats,
    )


def calls_of(
    function: Function,
    problems: Sequence[ProblemLike],
    completions: Sequence[Written],
    apart: bool = False,
) -> list[dict[str, Any]]:
    """Return the arguments by name of each call for N verdicts: N calls, or one of lists for a function of many.

    Args:
        apart: of such a function too N, of lists with one.
    """
    names = names_of(function)
    rows = []
    for problem, written in zip(problems, completions, strict=True):
        rows.append(_arguments(names, problem, written))
    if not names.is_batched:
        return rows
    if apart:
        return [_columns_of([row]) for row in rows]
    return [_columns_of(rows)]


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each argument, None where a row hasn't it."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name in row:
            if name not in columns:
                columns[name] = [other.get(name) for other in rows]
    return columns


def _arguments(names: Names, problem: ProblemLike, written: Written) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in problem.columns.items():
        if names.everything or name in names.named:
            row[name] = _copy(value)
    row |= {
        "question": problem.question,
        "answer": problem.answer,
        "steps": list(problem.steps),
    }
    row |= {"latents": written.latents, "truncated": written.truncated}
    if "is_right" in names.named:
        row["is_right"] = written.is_right
    if not names.is_batched:
        row["completion"] = written.text
    else:
        prompt, completion = _turns(names, problem, written.text)
        row |= {
            "prompts": prompt,
            "completions": completion,
            "completion_ids": list(written.ids),
        }
    if names.everything:
        return row
    named = names.named
    return {name: row[name] for name in row if name in named}


def _copy(value: Any) -> Any:
    """Copy what a function could change, as one does that takes used numbers out of a list."""
    if isinstance(value, str | int | float | bool | None):
        return value
    return copy.deepcopy(value)


def _turns(names: Names, problem: ProblemLike, text: str) -> tuple[Any, Any]:
    """Return prompt and completion: chats where the record's prompt is one or the function asks for them."""
    prompt = problem.columns.get(_CHAT)
    said = [{"role": "assistant", "content": text}]
    if isinstance(prompt, list):
        is_message = [isinstance(message, Mapping) for message in prompt]
        if all(is_message):
            return _copy(prompt), said
    if names.of_chats:
        return [{"role": "user", "content": problem.question}], said
    return problem.question, text


def asked_of(
    function: Function,
    problems: Sequence[ProblemLike],
    completions: Sequence[Written],
    name: str = "",
    processes: Processes | None = None,
) -> list[float | Failed | None]:
    """Ask a function about completions; the one way in which any is asked.

    Args:
        function: of what it names, see above.
        problems: N.
        completions: of each.
        name: what it is registered under, for messages; "" is its own.
        processes: of the function, which then is asked for each completion by itself; None: it is asked here.
    Returns:
        N finite numbers; `Failed` where it failed or gave NaN or an infinity, of which a line says why; None where it
        gave no verdict.
    Raises:
        UserError: it gives something else than a number, or another number of them.
    """
    calls = calls_of(function, problems, completions, apart=processes is not None)
    name = name or name_of(function)
    if processes is None:
        values = [_call(function, arguments) for arguments in calls]
    else:
        try:
            values = processes.ask(calls)
        except CantRun as error:
            raise cant_run(name, error) from error
    verdicts = verdicts_of(function, values, problems, name)
    for verdict in verdicts:
        if isinstance(verdict, Failed):
            reason = verdict.reason
            kind, _, _ = reason.partition(":")
            _say_once(
                name,
                kind,
                f"reward: {name} failed on a completion, which isn't judged: {reason}",
            )
    if None in verdicts:
        _say_once(
            name,
            "",
            f"reward: {name} gave None on a completion, which counts as not applicable",
        )
    return verdicts


def _call(function: Function, arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        # It is the user's code, and can raise anything.
        return Failed(in_a_line(error))


def cant_run(name: str, error: CantRun) -> UserError:
    """Make the error for a function that can't be asked in a process."""
    return UserError(
        f"config.reward_processes: {name} can't be asked in a process of its own ({error}); set it and "
        "config.reward_seconds to 0, or have the function make what it needs itself"
    )


def verdicts_of(
    function: Function,
    results: Sequence[Any],
    problems: Sequence[ProblemLike],
    name: str,
) -> list[float | Failed | None]:
    """Return N verdicts from the results of `calls_of`'s calls; see `asked_of`."""
    values = list[Any]()
    size = len(problems) // max(len(results), 1)
    is_batched = names_of(function).is_batched
    for value in results:
        if isinstance(value, Failed):
            values += [value] * size
        elif is_batched:
            values += _check_verdicts(name, value, size)
        else:
            values.append(value)
    verdicts: list[float | Failed | None] = []
    for value, problem in zip(values, problems, strict=True):
        verdicts.append(_number(name, value, problem))
    return verdicts


def _check_verdicts(name: str, values: Any, expected: int) -> list[Any]:
    """Check the verdicts of a function of many completions, and list them."""
    try:
        count = None if isinstance(values, str | Mapping) else len(values)
    except TypeError:
        count = None
    if count != expected:
        shown = repr(values)[:60] if count is None else f"{count} values"
        remedy = "return a list with a number for each"
        raise UserError(
            f"config.reward: {name} gives {shown} for {expected} completions; {remedy}"
        )
    return list(values)


def _number(name: str, value: Any, problem: ProblemLike) -> float | Failed | None:
    """Read a verdict: a number, an array or tensor of one, or a dict with a `score`, as verl's functions give."""
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]
    if value is None or isinstance(value, Failed):
        return value
    number = value
    if callable(getattr(value, "item", None)):
        with contextlib.suppress(ValueError, RuntimeError):  # of several elements
            number = value.item()
    if isinstance(number, float) and not math.isfinite(number):
        return Failed(f"it gave {number}")
    is_number = isinstance(number, int | float)
    if not is_number or abs(number) > _LARGEST:
        words = repr(value).split()
        shown = " ".join(words)[:40]
        if isinstance(value, int):
            shown = "an integer beyond float32"
        raise UserError(
            f"config.reward: {name} gives {shown} for {problem.question[:60]!r}; return a finite number"
        )
    return float(number)


def _say_once(name: str, kind: str, line: str) -> None:
    """Log the first of its kind: of the verdicts that failed, or that weren't given."""
    if (name, kind) not in _said:
        _said.add((name, kind))
        logging.warning("%s", line)

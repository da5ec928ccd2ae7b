"""Rewards of generated tasks: Countdown's, on the host and inside jit, and those of reasoning-gym's tasks, on the host.

Countdown's is whether an answer reaches a goal with the numbers that are given. An answer stands where one that is a
text does (`texts.said_text`), and is an expression such as `3 + 4 * 6`, read from left to right: it has each of the
given numbers once, as it is given, and between them operations that are allowed. A division has to come out even, and
no value on the way may be beyond a billion.

reasoning-gym is an extra, `pip install 'slpo_jax[gym]'`. What a task needs beyond its name and its settings is refused.

Shape suffixes: N bytes of a completion, R of a reference, K numbers that there may be.
"""

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.errors import UserError, in_a_line
from slpo_jax.rewards.functions import ProblemLike, names_of
from slpo_jax.rewards.texts import said_text
from slpo_jax.rewards.verifier import answer_span, before, compact

COUNTDOWN = "countdown"
OPERATORS = "+-*/"
# The largest value. Numbers have a digit less, so that int32 holds whatever two of them make.
MOST = 10**9
_DIGITS = 9
_NUMBER = f"(?:0|[1-9][0-9]{{0,{_DIGITS - 1}}})"
_ANSWER = re.compile(rf"{_NUMBER}(?: ?[-+*/] ?{_NUMBER})*")
_WORD = 4  # bytes of a reference's number

GYM = "gym"
# Of templates. Fewer than three # are no mark, as they may be an answer's own.
_MARK = re.compile(r"#{3,}(?=\s|\Z)|answer(?:\s+is:|(?:\*\*)?:)", re.IGNORECASE)
_REFUSED = {"composite": "it is made of other tasks; name one of them"}


def countdown(
    numbers: Sequence[int], goal: int, completion: str, operations: str = OPERATORS
) -> float:
    """Return 1 where a completion reaches the goal, else 0.

    Args:
        numbers: 0 or larger, each to be used once.
        goal: what they have to make.
        completion: with the answer behind its last mark, if there is one.
        operations: those of `OPERATORS` that are allowed.
    """
    answer = said_text(completion)
    parts = re.findall(r"[0-9]+|[-+*/]", answer) if _ANSWER.fullmatch(answer) else []
    values = [int(part) for part in parts[::2]]
    signs = parts[1::2]
    if not values or sorted(values) != sorted(numbers) or not {*signs} <= {*operations}:
        return 0.0
    value = values[0]
    for sign, number in zip(signs, values[1:], strict=True):
        result = _result(value, sign, number)
        if result is None:
            return 0.0
        value = result
    return float(value == goal)


def _result(value: int, sign: str, number: int) -> int | None:
    """Compute an operation; None where it isn't even, or too large."""
    if sign == "/":
        return None if number == 0 or value % number else value // number
    result = {"+": value + number, "-": value - number, "*": value * number}[sign]
    return result if abs(result) <= MOST else None


def encode_countdown(
    numbers: Sequence[int], goal: int, operations: str = OPERATORS
) -> bytes:
    """Encode a reference of `reaches_goal`; b"", which nothing reaches, where a number or the goal is out of its range.

    Returns:
        words of four bytes, little-endian: 1 + the bits of the operations, the goal + 2 MOST, each number + 1. What
        follows is 0.
    """
    if abs(goal) > MOST or not all(0 <= number < 10**_DIGITS for number in numbers):
        return b""
    allowed = 0
    for place, sign in enumerate(OPERATORS):
        if sign in operations:
            allowed += 1 << place
    words = [1 + allowed, goal + 2 * MOST]
    words.extend(number + 1 for number in numbers)
    return np.array(words, "<u4").tobytes()


def countdown_reference(problem: ProblemLike) -> bytes:
    """Encode a problem's columns, see `encode_countdown`."""
    names = names_of(encode_countdown).columns or ()
    columns = {name: problem.columns[name] for name in names if name in problem.columns}
    return encode_countdown(**columns)


def reaches_goal(bytes_N: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Say what `countdown` does, of a completion's bytes by `text_table` and the problem's `encode_countdown`: bool."""
    allowed, goal, numbers_K = _reference(reference_R)
    parts = _parts(bytes_N, numbers_K.size)
    is_given = (jnp.sort(parts["values_K"]) == jnp.sort(numbers_K)).all()

    # Compute the value from left to right, all four operations at each place, of which the sign selects one.
    value = parts["values_K"][0]
    ok = parts["well_formed"] & is_given
    for number, sign in zip(parts["values_K"][1:], parts["signs_K"][1:], strict=True):
        is_sign = [sign == ord(operator) for operator in OPERATORS]
        divisor = jnp.maximum(number, 1)
        results = [value + number, value - number, value * number, value // divisor]
        fits = [
            True,
            True,
            jnp.abs(value) <= MOST // divisor,
            (number > 0) & (value % divisor == 0),
        ]
        result = jnp.select(is_sign, results, value)
        may: list[jax.Array] = []
        for place, fit in enumerate(fits):
            is_allowed = allowed >> place & 1 > 0
            may.append(is_sign[place] & is_allowed & fit)
        in_range = jnp.abs(result) <= MOST
        # A number below 0 stands for none: there are no more.
        ok &= (number < 0) | (functools.reduce(jnp.logical_or, may) & in_range)
        value = jnp.where(number < 0, value, result)
    return ok & (value == goal)


def _reference(reference_R: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decode the bits of the operations, the goal, and the numbers [K], -1 for none."""
    # Fill it up to whole words, of which there must be three.
    missing = -reference_R.size % _WORD
    if reference_R.size < 3 * _WORD:
        missing += 3 * _WORD
    padded = jnp.pad(reference_R, (0, missing))

    # Join each word's bytes, the lowest first.
    bytes_4W = padded.reshape(-1, _WORD).T.astype(jnp.uint32)
    shifted = [byte_W << 8 * place for place, byte_W in enumerate(bytes_4W)]
    words_W = functools.reduce(jnp.bitwise_or, shifted)
    numbers_W = words_W.astype(jnp.int32) - 1
    goal = (words_W[1] - np.uint32(2 * MOST)).astype(jnp.int32)
    return numbers_W[0], goal, numbers_W[2:]


def _parts(bytes_N: jax.Array, most: int) -> dict[str, Any]:
    """Return the answer's numbers [K], -1 for none, the sign [K] before each, and whether it is made of at most K."""
    bytes_N, begin, end = answer_span(bytes_N)
    indices_N = jnp.arange(bytes_N.size)
    bytes_N = jnp.where((indices_N >= begin) & (indices_N < end), bytes_N, 0)
    starts_N = _is_digit(bytes_N) & ~_is_digit(before(bytes_N))

    # Without blanks, which make no difference but between digits.
    inked_N = (bytes_N > 0) & (bytes_N != ord(" "))
    bytes_N = compact(bytes_N, inked_N)
    starts_N = compact(starts_N.astype(jnp.uint8), inked_N) > 0
    digit_N = _is_digit(bytes_N)
    sign_N = jnp.isin(bytes_N, jnp.array([*OPERATORS.encode()], jnp.uint8))
    before_N = before(bytes_N)
    place_N = jnp.cumsum(starts_N) - 1
    follows_N = jnp.where(
        starts_N, (indices_N == 0) | before(sign_N), _is_digit(before_N)
    )
    last = bytes_N[jnp.maximum((bytes_N > 0).sum() - 1, 0)]
    may_stand_N = (bytes_N == 0) | ((digit_N | sign_N) & follows_N)
    well_formed = may_stand_N.all() & _is_digit(last)

    def read_number(index):
        """Return the value of a number, the sign before it, and whether it is written as a number is."""
        within_N = digit_N & (place_N == index)
        size = within_N.sum()
        first_N = within_N & starts_N
        power_N = jnp.clip(size - jnp.cumsum(within_N), 0, _DIGITS - 1)
        tens_N = jnp.asarray([10**power for power in range(_DIGITS)])[power_N]
        digits_N = bytes_N.astype(jnp.int32) - ord("0")
        value = jnp.where(within_N, digits_N * tens_N, 0).sum()
        begins_with_0 = (first_N & (bytes_N == ord("0"))).any()
        is_written = (size <= _DIGITS) & ((size <= 1) | ~begins_with_0)
        sign = jnp.where(first_N, before_N, 0).sum()
        return jnp.where(size > 0, value, -1), sign, is_written

    values_K, signs_K, written_K = jax.vmap(read_number)(jnp.arange(most))
    well_formed &= (starts_N.sum() <= most) & written_K.all()
    return {"values_K": values_K, "signs_K": signs_K, "well_formed": well_formed}


def _is_digit(bytes_: jax.Array) -> jax.Array:
    return (bytes_ >= ord("0")) & (bytes_ <= ord("9"))


@functools.lru_cache(maxsize=128)
def gym_dataset(task: str, settings: str, seed: int = 0, size: int = 1) -> Any:
    """Make a data set of reasoning-gym.

    Args:
        task: its name.
        settings: its own, as JSON.
        seed: of its problems.
        size: how many there are.
    Raises:
        UserError: the package, the task or a setting is not there, or a setting can't be used.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError:
        raise UserError(
            f"gym:{task}: reasoning-gym is not installed; pip install 'slpo_jax[gym]'"
        ) from None
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, 3, 0.5) or sorted(DATASETS)[:3]
        raise UserError(
            f"gym:{task}: no such task; there are {', '.join(near)}, .. ({len(DATASETS)} in all)"
        )
    if task in _REFUSED:
        raise UserError(f"gym:{task}: {_REFUSED[task]}")
    values = json.loads(settings)
    key = f"config.data.gym.settings.{task}"
    fields = dataclasses.fields(DATASETS[task][1])
    names = [field.name for field in fields if field.name not in ("seed", "size")]
    unknown = sorted({*values} - {*names})
    if unknown:
        raise UserError(
            f"{key}.{unknown[0]}: the task has no such setting; it has {', '.join(names)}"
        )
    try:
        return reasoning_gym.create_dataset(task, **values, seed=seed, size=size)
    except Exception as error:  # each task checks in its own way
        raise UserError(
            f"{key}: {in_a_line(error)}; the task refuses {values or f'{size:,} problems'}"
        ) from error


def gym(completion: str, entry: dict[str, Any], task: str, settings: str) -> float:
    """Score, by a task's `score_answer`, what stands behind the last mark.

    Args:
        entry: the problem as the data set has it.
        task, settings: see `gym_dataset`.
    """
    try:
        dataset = gym_dataset(task, settings)
        return float(dataset.score_answer(_answer(completion), entry))
    except UserError:
        raise
    except Exception:
        # Some tasks fail on an answer that they can't read, such as prime_factorization on letters
        return 0.0


def _answer(completion: str) -> str:
    """Return what follows the last mark, or all of a text without one; line breaks stay."""
    return _MARK.split(completion)[-1].strip()

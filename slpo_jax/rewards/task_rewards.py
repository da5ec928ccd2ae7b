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
from slpo_jax.rewards.verifier import answer_span, before, compact, is_digit, is_in

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
    if not _ANSWER.fullmatch(answer):
        return 0.0
    parts = re.findall(r"[0-9]+|[-+*/]", answer)
    # Numbers and signs take turns.
    written = parts[::2]
    signs = parts[1::2]
    values = [int(number) for number in written]

    # It has the numbers that are given, and operations that are allowed.
    if sorted(values) != sorted(numbers):
        return 0.0
    if not {*signs} <= {*operations}:
        return 0.0

    # Compute it from left to right.
    value, *others = values
    for sign, number in zip(signs, others, strict=True):
        result = _result(value, sign, number)
        if result is None:
            return 0.0
        value = result
    return float(value == goal)


def _result(value: int, sign: str, number: int) -> int | None:
    """Compute an operation; None where it isn't even, or too large."""
    if sign == "/":
        if number == 0 or value % number:
            return None
        return value // number
    if sign == "+":
        result = value + number
    elif sign == "-":
        result = value - number
    else:
        result = value * number
    if abs(result) > MOST:
        return None
    return result


def encode_countdown(
    numbers: Sequence[int], goal: int, operations: str = OPERATORS
) -> bytes:
    """Encode a reference of `reaches_goal`; b"", which nothing reaches, where a number or the goal is out of its range.

    Returns:
        words of four bytes, little-endian: 1 + the bits of the operations, the goal + 2 MOST, each number + 1. What
        follows is 0.
    """
    if abs(goal) > MOST:
        return b""
    allowed = 0
    for place, sign in enumerate(OPERATORS):
        if sign in operations:
            allowed += 1 << place
    words = [1 + allowed, goal + 2 * MOST]
    for number in numbers:
        if not 0 <= number < 10**_DIGITS:
            return b""
        words.append(number + 1)
    return np.array(words, "<u4").tobytes()


def countdown_reference(problem: ProblemLike) -> bytes:
    """Encode a problem's columns, see `encode_countdown`."""
    names = names_of(encode_countdown).columns or ()
    columns: dict[str, Any] = {}
    for name in names:
        if name in problem.columns:
            columns[name] = problem.columns[name]
    return encode_countdown(**columns)


def reaches_goal(bytes_N: jax.Array, reference_R: jax.Array) -> jax.Array:
    """Say what `countdown` does, of a completion's bytes by `text_table` and the problem's `encode_countdown`: bool."""
    allowed, goal, numbers_K = _reference(reference_R)
    values_K, signs_K, is_ok = _parts(bytes_N, numbers_K.size)
    sorted_values_K = jnp.sort(values_K)
    sorted_numbers_K = jnp.sort(numbers_K)
    same_K = sorted_values_K == sorted_numbers_K
    is_ok &= same_K.all()

    # Compute the value from left to right.
    value = values_K[0]
    further_values = values_K[1:]
    further_signs = signs_K[1:]
    for number, sign in zip(further_values, further_signs, strict=True):
        # All four operations: the result, and whether it comes out even and fits.
        divisor = jnp.maximum(number, 1)
        is_positive = number > 0
        remainder = value % divisor
        is_even = is_positive & (remainder == 0)
        fits = jnp.abs(value) <= MOST // divisor
        operations = [
            (value + number, True),
            (value - number, True),
            (value * number, fits),
            (value // divisor, is_even),
        ]
        # The sign selects one.
        result = value
        is_possible = jnp.zeros((), bool)
        for place, (each, is_exact) in enumerate(operations):
            is_sign = sign == ord(OPERATORS[place])
            bit = allowed >> place & 1
            is_allowed = bit > 0
            result = jnp.where(is_sign, each, result)
            is_possible |= is_sign & is_allowed & is_exact
        is_possible &= jnp.abs(result) <= MOST
        # A number below 0 stands for none: there are no more.
        is_none = number < 0
        is_ok &= is_none | is_possible
        value = jnp.where(is_none, value, result)
    return is_ok & (value == goal)


def _reference(reference_R: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decode the bits of the operations, the goal, and the numbers [K], -1 for none."""
    # Fill it up to whole words, of which there must be three.
    missing = -reference_R.size % _WORD
    if reference_R.size < 3 * _WORD:
        missing += 3 * _WORD
    padded = jnp.pad(reference_R, (0, missing))

    # Join each word's bytes, the lowest first.
    padded_WB = padded.reshape(-1, _WORD)
    bytes_WB = padded_WB.astype(jnp.uint32)
    words_W = jnp.zeros_like(bytes_WB[:, 0])
    for place in range(_WORD):
        shift = 8 * place
        words_W |= bytes_WB[:, place] << shift

    # Undo the shifts of `encode_countdown`.
    numbers_W = words_W.astype(jnp.int32) - 1
    goal = words_W[1] - np.uint32(2 * MOST)
    allowed = numbers_W[0]
    goal = goal.astype(jnp.int32)
    numbers_K = numbers_W[2:]
    return allowed, goal, numbers_K


def _parts(bytes_N: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the answer's numbers [K], -1 for none, the sign [K] before each, and whether it is made of at most K."""
    bytes_N, begin, end = answer_span(bytes_N)
    indices_N = jnp.arange(bytes_N.size)
    is_answer_N = (indices_N >= begin) & (indices_N < end)
    bytes_N = jnp.where(is_answer_N, bytes_N, 0)

    # Numbers start at digits that follow none.
    digit_N = is_digit(bytes_N)
    starts_N = digit_N & ~before(digit_N)

    # Remove blanks, which make no difference but between digits.
    inked_N = (bytes_N > 0) & (bytes_N != ord(" "))
    bytes_N = compact(bytes_N, inked_N)
    starts_N = compact(starts_N, inked_N)
    digit_N = is_digit(bytes_N)
    sign_N = is_in(bytes_N, OPERATORS.encode())

    # A number starts the answer or follows a sign; its other digits and signs follow a digit.
    may_start_N = (indices_N == 0) | before(sign_N)
    follows_N = jnp.where(starts_N, may_start_N, before(digit_N))
    is_end_N = bytes_N == 0
    may_stand_N = is_end_N | ((digit_N | sign_N) & follows_N)
    well_formed = may_stand_N.all()

    # It ends with a digit.
    size = (~is_end_N).sum()
    last = jnp.maximum(size - 1, 0)
    well_formed &= digit_N[last]

    place_N = jnp.cumsum(starts_N) - 1
    digits_N = bytes_N.astype(jnp.int32) - ord("0")
    exponents = np.arange(_DIGITS, dtype=np.int32)
    powers_of_ten = 10**exponents

    def read_number(index):
        """Return the value of a number, the sign before it, and whether it is written as a number is."""
        within_N = digit_N & (place_N == index)
        size = within_N.sum()
        exponent_N = size - jnp.cumsum(within_N)
        powers = jnp.asarray(powers_of_ten)
        exponent_N = jnp.clip(exponent_N, 0, _DIGITS - 1)
        power_N = powers[exponent_N]
        summand_N = jnp.where(within_N, digits_N * power_N, 0)
        value = summand_N.sum()
        value = jnp.where(size > 0, value, -1)

        # It has no 0 in front.
        first_N = within_N & starts_N
        zero_N = first_N & (digits_N == 0)
        has_zero = zero_N.any()
        is_written = (size <= 1) | ~has_zero
        is_written &= size <= _DIGITS

        sign_N = jnp.where(first_N, before(bytes_N), 0)
        sign = sign_N.sum()
        return value, sign, is_written

    read_numbers = jax.vmap(read_number)
    indices_K = jnp.arange(most)
    values_K, signs_K, written_K = read_numbers(indices_K)
    well_formed &= written_K.all()
    well_formed &= starts_N.sum() <= most
    return values_K, signs_K, well_formed


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
        near = difflib.get_close_matches(task, DATASETS, 3, 0.5)
        near = near or sorted(DATASETS)[:3]
        raise UserError(
            f"gym:{task}: no such task; there are {', '.join(near)}, .. ({len(DATASETS)} in all)"
        )
    if task in _REFUSED:
        raise UserError(f"gym:{task}: {_REFUSED[task]}")

    # Refuse settings that the task doesn't have.
    values = json.loads(settings)
    key = f"config.data.gym.settings.{task}"
    _, config_class = DATASETS[task]
    names: list[str] = []
    for field in dataclasses.fields(config_class):
        if field.name not in ("seed", "size"):
            names.append(field.name)
    unknown = sorted({*values} - {*names})
    if unknown:
        raise UserError(
            f"{key}.{unknown[0]}: the task has no such setting; it has {', '.join(names)}"
        )
    try:
        return reasoning_gym.create_dataset(task, **values, seed=seed, size=size)
    except Exception as error:  # each task checks in its own way
        refused = values or f"{size:,} problems"
        raise UserError(
            f"{key}: {in_a_line(error)}; the task refuses {refused}"
        ) from error


def gym(completion: str, entry: dict[str, Any], task: str, settings: str) -> float:
    """Score, by a task's `score_answer`, what stands behind the last mark.

    Args:
        entry: the problem as the data set has it.
        task, settings: see `gym_dataset`.
    """
    try:
        dataset = gym_dataset(task, settings)
        score = dataset.score_answer(_answer(completion), entry)
        return float(score)
    except UserError:
        raise
    except Exception:
        # Some tasks fail on an answer that they can't read, such as prime_factorization on letters
        return 0.0


def _answer(completion: str) -> str:
    """Return what follows the last mark, or all of a text without one; line breaks stay."""
    parts = _MARK.split(completion)
    return parts[-1].strip()

"""Countdown: reach a goal with all of the given numbers, from left to right, where several answers are right.

`3 4 6 = 42` in the steps `3 + 4 = 7` and `7 * 6 = 42`, with the answer `3 + 4 * 6`. A problem is made from an answer,
so that each has one, and no value on the way is negative or above the largest goal. Its columns are what
`rewards.countdown_verifier` judges by, and how many answers are right.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from slpo_jax.data.generated_sets import SetsConfig, sets_apart
from slpo_jax.data.problem import Problem
from slpo_jax.rewards.countdown_verifier import MOST, OPERATORS
from slpo_jax.settings import FieldError, setting

_MOST_NUMBERS = 6  # which have 737,280 orders and operations
_TRIES = 1_000


@dataclass(frozen=True)
class CountdownConfig(SetsConfig):
    """What the problems look like: the section `config.data.countdown`.

    Attributes:
        numbers: the fewest and the most given numbers of a problem.
        demo_numbers: the same of `countdown:demos`; () is `numbers`.
        largest: numbers are 1 .. largest.
        goal: goals, and values on the way to them in demonstrations, are 0 .. goal.
        operations: any of +, -, * and /, of which the last has to come out even.
        solutions: the fewest and the most right answers of a problem, in whatever order; 0 for no limit.
        demos_size: number of problems of `countdown:demos`, which is apart from all other sets.
        train_size: number of problems of `countdown:train`.
    """

    numbers: tuple[int, int] = setting((3, 4), least=2, most=_MOST_NUMBERS)
    demo_numbers: tuple[int, ...] = setting((), least=2, most=_MOST_NUMBERS)
    largest: int = setting(25, least=1, most=999)
    goal: int = setting(99, least=1, most=9_999)
    operations: tuple[str, ...] = setting(("+", "-", "*"), fewest=1)
    solutions: tuple[int, int] = setting((0, 0), least=0)
    demos_size: int = setting(10_000, least=1)
    train_size: int = setting(20_000, least=1)

    unit = "numbers"
    of_ten = ("demos",) * 3 + ("train",) * 4 + ("valid", "test", "")

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := {*self.operations} - {*OPERATORS}:
            raise FieldError(self, "operations", f"{min(unknown)!r} is none of {', '.join(OPERATORS)}")
        for name in ("numbers", "demo_numbers"):
            ends = getattr(self, name)
            if len(ends) not in (2, 0) or list(ends) != sorted(ends):
                raise FieldError(self, name, "give the fewest and the most, e.g. (3, 4)")
        if 0 < self.solutions[1] < self.solutions[0]:
            raise FieldError(self, "solutions", "give the fewest and the most, e.g. (2, 8); 0 for no limit")

    def mixed(self, name: str) -> range:
        fewest, most = (self.demo_numbers if name == "demos" else ()) or self.numbers
        return range(fewest, most + 1)

    @property
    def alone(self) -> range:
        return range(2, _MOST_NUMBERS + 1)


def _make(config: CountdownConfig, count: int, rng: np.random.Generator) -> tuple[Problem, str] | None:
    """A problem with so many numbers, and its numbers in order with the goal; None where none is found."""
    # Again until no value is out of range, which would else make problems with many numbers few.
    return next(filter(None, (_drawn(config, count, rng) for _ in range(_TRIES))), None)


def _drawn(config: CountdownConfig, count: int, rng: np.random.Generator) -> tuple[Problem, str] | None:
    draws = rng.random(2 * count - 1).tolist()
    numbers = [1 + int(draw * config.largest) for draw in draws[:count]]
    value, answer, steps = numbers[0], str(numbers[0]), list[str]()
    for draw, number in zip(draws[count:], numbers[1:], strict=True):
        sign = config.operations[int(draw * len(config.operations))]
        if sign == "/" and value % number:
            return None
        made = {"+": value + number, "-": value - number, "*": value * number, "/": value // number}[sign]
        if not 0 <= made <= config.goal:
            return None
        steps.append(f"{value} {sign} {number} = {made}")
        answer += f" {sign} {number}"
        value = made
    told = [numbers[place] for place in rng.permutation(count)]
    question = f"{' '.join(map(str, told))} = {value}"
    columns = {"numbers": told, "goal": value, "operations": "".join(config.operations)}
    return Problem(question, tuple(steps), answer, columns), f"{' '.join(map(str, sorted(told)))} = {value}"


def _counted(config: CountdownConfig, problem: Problem) -> Problem | None:
    """The problem with the number of its right answers; None where the settings want others."""
    count = solutions(problem.columns["numbers"], problem.columns["goal"], problem.columns["operations"])
    fewest, most = config.solutions
    is_wanted = fewest <= count <= (most or count)
    return replace(problem, columns={**problem.columns, "solutions": count}) if is_wanted else None


def solutions(numbers: list[int], goal: int, operations: str) -> int:
    """How many answers `rewards.countdown_verifier` takes: expressions that differ, by enumeration."""
    numbers_OK = np.array(numbers, np.int64)[_orders(len(numbers))]
    values_OE = numbers_OK[:, :1]
    for place in range(1, len(numbers)):
        number_O1 = numbers_OK[:, place : place + 1]
        made = {"+": lambda v, n: v + n, "-": lambda v, n: v - n, "*": lambda v, n: v * n, "/": _divided}
        values_OE = np.concatenate([_kept(values_OE, made[sign](values_OE, number_O1)) for sign in operations], axis=1)
    same_orders = math.prod(map(math.factorial, Counter(numbers).values()))
    return int((values_OE == goal).sum()) // same_orders


_NONE = 2 * MOST  # in place of a value that there isn't


def _kept(before: np.ndarray, made: np.ndarray) -> np.ndarray:
    return np.where((before == _NONE) | (np.abs(made) > MOST), _NONE, made)


def _divided(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    divisors = np.maximum(numbers, 1)
    return np.where((numbers > 0) & (values % divisors == 0), values // divisors, _NONE)


@lru_cache
def _orders(count: int) -> np.ndarray:
    return np.array([*itertools.permutations(range(count))])


def countdown_words(largest: int) -> tuple[str, ...]:
    """Every word of problems whose goals, numbers and values on the way are at most this."""
    CountdownConfig(goal=largest)
    return (*map(str, range(largest + 1)), *OPERATORS, "=")


countdown_problems = sets_apart("countdown", _make, "largest or goal, or widen numbers or solutions", _counted)

"""The tasks of which problems are generated: chains, graphs and countdowns here, others in files of their own.

All are in `GENERATED`. `NAME:SET` is a source of its problems, `config.data.NAME` says what they are like, and
`NAME:NUMBER` is a tokenizer of its words.

A chain has operations on small numbers, left to right modulo m: `9 * 3 + 8` in the steps 9 * 3 = 7 and 7 + 8 = 5. Every
result depends on the one before it, so that an answer takes as many steps, one after the other, as there are
operations. Factors are coprime to m: no product forgets what came before.

A graph is searched: `n4>n2 n7>n1 n2>n5 n1>n3 ends n3 n5 from n4` asks which of two ends is reached from n4. Two chains
of edges have as many hops, so that neither an end's edges nor its depth say which it is:
the edges have to be followed, a hop a step.

A countdown reaches a goal with all of the given numbers, from left to right, where several answers are right:
`3 4 6 = 42` in the steps `3 + 4 = 7` and `7 * 6 = 42`, with the answer `3 + 4 * 6`. A problem is made from an answer,
so that each has one, and no value on the way is negative or above the largest goal. Its columns are what
`rewards.task_rewards` judges by, and how many answers are right.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from slpo_jax.data.generated_sets import DepthConfig, SetsConfig, is_gym, sets_apart
from slpo_jax.data.problem import Problem, Problems
from slpo_jax.data.synthetic import SyntheticConfig, synthetic_problems, synthetic_words
from slpo_jax.rewards.reward import CORRECT
from slpo_jax.rewards.task_rewards import COUNTDOWN, GYM, MOST, OPERATORS
from slpo_jax.settings import FieldError, setting

# `SetsConfig.of_ten` of tasks with demonstrations.
_WITH_DEMOS = ("demos",) * 3 + ("train",) * 4 + ("valid", "test", "")
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

    @property
    def of_ten(self) -> tuple[str, ...]:
        return _WITH_DEMOS

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = {*self.operations} - {*OPERATORS}
        if unknown:
            raise FieldError(
                self,
                "operations",
                f"{min(unknown)!r} is none of {', '.join(OPERATORS)}",
            )
        for name in ("numbers", "demo_numbers"):
            ends = getattr(self, name)
            is_sorted = list(ends) == sorted(ends)
            if len(ends) not in (2, 0) or not is_sorted:
                raise FieldError(
                    self, name, "give the fewest and the most, e.g. (3, 4)"
                )
        if 0 < self.solutions[1] < self.solutions[0]:
            raise FieldError(
                self,
                "solutions",
                "give the fewest and the most, e.g. (2, 8); 0 for no limit",
            )

    def mixed(self, name: str) -> range:
        numbers: Sequence[int] = self.numbers
        if name == "demos" and self.demo_numbers:
            numbers = self.demo_numbers
        fewest, most = numbers
        return range(fewest, most + 1)

    @property
    def alone(self) -> range:
        return range(2, _MOST_NUMBERS + 1)


def _make(
    config: CountdownConfig, count: int, rng: np.random.Generator
) -> tuple[Problem, str] | None:
    """Return a problem with so many numbers, and its numbers in order with the goal; None where none is found."""
    # Try again until no value is out of range, or problems with many numbers would be few.
    for _ in range(_TRIES):
        made = _draw(config, count, rng)
        if made:
            return made
    return None


def _draw(
    config: CountdownConfig, count: int, rng: np.random.Generator
) -> tuple[Problem, str] | None:
    # Draw the numbers and the signs between them, and compute from left to right.
    draws = rng.random(2 * count - 1).tolist()
    number_draws = draws[:count]
    sign_draws = draws[count:]
    numbers = [1 + int(draw * config.largest) for draw in number_draws]
    value, *others = numbers
    answer = str(value)
    steps = list[str]()
    for draw, number in zip(sign_draws, others, strict=True):
        place = int(draw * len(config.operations))
        sign = config.operations[place]
        if sign == "/" and value % number:
            return None
        results = {
            "+": value + number,
            "-": value - number,
            "*": value * number,
            "/": value // number,
        }
        result = results[sign]
        if not 0 <= result <= config.goal:
            return None
        steps.append(f"{value} {sign} {number} = {result}")
        answer += f" {sign} {number}"
        value = result

    # The question has the numbers in another order, its content has them sorted.
    order = rng.permutation(count)
    shuffled = [numbers[place] for place in order]
    asked = " ".join(map(str, shuffled))
    sorted_numbers = sorted(shuffled)
    in_order = " ".join(map(str, sorted_numbers))
    question = f"{asked} = {value}"
    content = f"{in_order} = {value}"
    columns = {
        "numbers": shuffled,
        "goal": value,
        "operations": "".join(config.operations),
    }
    problem = Problem(question, tuple(steps), answer, columns)
    return problem, content


def _count_solutions(config: CountdownConfig, problem: Problem) -> Problem | None:
    """Return the problem with the number of its right answers; None where the settings want others."""
    count = solutions(**problem.columns)
    fewest, most = config.solutions
    if count < fewest or 0 < most < count:
        return None
    columns = {**problem.columns, "solutions": count}
    return replace(problem, columns=columns)


def solutions(numbers: list[int], goal: int, operations: str) -> int:
    """Count the answers that `rewards.task_rewards` takes: expressions that differ, by enumeration."""
    orders_OK = _orders(len(numbers))
    numbers_K = np.array(numbers, np.int64)
    numbers_OK = numbers_K[orders_OK]
    values_OE = numbers_OK[:, :1]
    for place in range(1, len(numbers)):
        number_O1 = numbers_OK[:, place : place + 1]
        # No value on the way may be missing or too large.
        is_missing_OE = values_OE == _NONE
        results: list[np.ndarray] = []
        for sign in operations:
            result_OE = _compute(values_OE, sign, number_O1)
            is_large_OE = np.abs(result_OE) > MOST
            is_lost_OE = is_missing_OE | is_large_OE
            result_OE = np.where(is_lost_OE, _NONE, result_OE)
            results.append(result_OE)
        values_OE = np.concatenate(results, axis=1)
    is_goal_OE = values_OE == goal
    found = int(np.count_nonzero(is_goal_OE))

    # Equal numbers change places without making another expression.
    times_of_each = Counter(numbers).values()
    orders_of_each = map(math.factorial, times_of_each)
    same_orders = math.prod(orders_of_each)
    return found // same_orders


_NONE = 2 * MOST  # in place of a value that there isn't


def _compute(values: np.ndarray, sign: str, numbers: np.ndarray) -> np.ndarray:
    if sign == "+":
        return values + numbers
    if sign == "-":
        return values - numbers
    if sign == "*":
        return values * numbers
    divisors = np.maximum(numbers, 1)
    is_positive = numbers > 0
    remainders = values % divisors
    is_even = is_positive & (remainders == 0)
    return np.where(is_even, values // divisors, _NONE)


@lru_cache
def _orders(count: int) -> np.ndarray:
    orders = itertools.permutations(range(count))
    return np.array(list(orders))


def countdown_words(largest: int) -> tuple[str, ...]:
    """Return every word of problems whose goals, numbers and values on the way are at most this."""
    CountdownConfig(goal=largest)
    numbers = map(str, range(largest + 1))
    return (*numbers, *OPERATORS, "=")


countdown_problems = sets_apart(
    task="countdown",
    make=_make,
    more="largest or goal, or widen numbers or solutions",
    complete=_count_solutions,
)


_CHAIN_OPERATORS = ("+", "-", "*")


@dataclass(frozen=True)
class ChainConfig(DepthConfig):
    """What the chains look like: the section `config.data.chain`. An operation is a step.

    Attributes:
        modulus: results are in 0 .. modulus - 1.
        operations: any of +, - and *.
        demos_size: number of problems of `chain:demos`, which is apart from all other sets and mixes problems of 1 ..
            depth steps whatever `least_depth` is; 0 leaves what would be theirs to `chain:train`.
    """

    modulus: int = setting(10, least=3, most=1_000)
    operations: tuple[str, ...] = setting(("+", "*"), fewest=1)
    demos_size: int = setting(0, least=0, note="0 is no such set")

    @property
    def of_ten(self) -> tuple[str, ...]:
        if self.demos_size:
            return _WITH_DEMOS
        return super().of_ten

    def mixed(self, name: str) -> range:
        # Short demonstrations teach single steps, of which long problems are made.
        if name == "demos":
            return range(1, self.depth + 1)
        return super().mixed(name)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = {*self.operations} - {*_CHAIN_OPERATORS}
        if unknown:
            raise FieldError(
                self,
                "operations",
                f"{min(unknown)!r} is none of {', '.join(_CHAIN_OPERATORS)}",
            )


@lru_cache
def _factors(modulus: int) -> list[int]:
    factors: list[int] = []
    for number in range(2, modulus):
        if math.gcd(number, modulus) == 1:
            factors.append(number)
    return factors


def _chain(
    config: ChainConfig, depth: int, rng: np.random.Generator
) -> tuple[Problem, str]:
    modulus = config.modulus
    draws = rng.random(1 + 2 * depth).tolist()
    first_draw, *further_draws = draws
    operator_draws = further_draws[::2]
    operand_draws = further_draws[1::2]
    value = int(first_draw * modulus)
    question = str(value)
    steps = list[str]()
    for operator_draw, operand_draw in zip(operator_draws, operand_draws, strict=True):
        place = int(operator_draw * len(config.operations))
        operator = config.operations[place]
        operands: Sequence[int] = range(1, modulus)
        if operator == "*":
            operands = _factors(modulus)
        place = int(operand_draw * len(operands))
        operand = operands[place]
        results = {
            "+": value + operand,
            "-": value - operand,
            "*": value * operand,
        }
        result = results[operator] % modulus
        question += f" {operator} {operand}"
        steps.append(f"{value} {operator} {operand} = {result}")
        value = result
    problem = Problem(question, tuple(steps), str(value))
    return problem, question


def chain_words(modulus: int) -> tuple[str, ...]:
    """Return every word of problems with this modulus."""
    config = ChainConfig(modulus=modulus)
    numbers = map(str, range(config.modulus))
    return (*numbers, *_CHAIN_OPERATORS, "=")


@dataclass(frozen=True)
class GraphConfig(DepthConfig):
    """What the graphs look like: the section `config.data.graph`. A hop towards the end is a step.

    Attributes:
        nodes: names that there are, n0, n1, ..; a problem has 2 (hops + 1).
    """

    nodes: int = setting(10, least=4, most=200)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_depth < self.depth:
            needed = 2 * (self.depth + 1)
            remedy = "raise it, or lower config.data.graph.depth"
            raise FieldError(
                self, "nodes", f"{self.depth} hops need {needed}: {remedy}"
            )

    @property
    def most_depth(self) -> int:
        """The largest DEPTH of `graph:DEPTH`: as many hops as there are nodes for."""
        return self.nodes // 2 - 1


def _graph(
    config: GraphConfig, depth: int, rng: np.random.Generator
) -> tuple[Problem, str]:
    # Two chains of as many hops; the first leads to the answer.
    length = depth + 1
    order = rng.permutation(config.nodes)
    chosen = order[: 2 * length]
    names = [f"n{number}" for number in chosen]
    chain = names[:length]
    other_chain = names[length:]

    # The question tells their edges in any order, and their ends in either.
    edges = [*pairwise(chain), *pairwise(other_chain)]
    texts: list[str] = []
    for place in rng.permutation(len(edges)):
        begin, end = edges[place]
        texts.append(f"{begin}>{end}")
    answer = chain[-1]
    ends = sorted([answer, other_chain[-1]])
    told_ends = " ".join(ends)
    if rng.random() >= 0.5:
        told_ends = " ".join(reversed(ends))
    root, *steps = chain
    told = " ".join(texts)
    question = f"{told} ends {told_ends} from {root}"
    content = " ".join([*sorted(texts), *ends, root])
    problem = Problem(question, tuple(steps), answer)
    return problem, content


def graph_words(nodes: int) -> tuple[str, ...]:
    """Return every word of problems with so many nodes: an edge is one."""
    config = GraphConfig(depth=1, nodes=nodes)
    names = [f"n{number}" for number in range(config.nodes)]
    edges: list[str] = []
    for begin, end in itertools.permutations(names, 2):
        edges.append(f"{begin}>{end}")
    return ("ends", "from", *names, *edges)


class Task(NamedTuple):
    """A task of which problems are generated.

    Attributes:
        settings: dataclass of the section `config.data.NAME`.
        problems: (name of a set, settings) -> its problems.
        words: (the number in `config.tokenizer`: the largest one, the modulus, or that of nodes) -> the words of its
            questions, steps and answers.
        reward: what judges its answers unless another is named, see `config.reward`.
    """

    settings: Any
    problems: Callable[[str, Any], Problems]
    words: Callable[[int], Iterable[str]]
    reward: str = CORRECT


GENERATED: dict[str, Task] = {
    "synthetic": Task(
        settings=SyntheticConfig,
        problems=lambda *settings: Problems(synthetic_problems(*settings)),
        words=synthetic_words,
    ),
    "chain": Task(
        settings=ChainConfig,
        problems=sets_apart("chain", _chain, "modulus, or add operations"),
        words=chain_words,
    ),
    "graph": Task(
        settings=GraphConfig,
        problems=sets_apart("graph", _graph, "nodes"),
        words=graph_words,
    ),
    "countdown": Task(
        settings=CountdownConfig,
        problems=countdown_problems,
        words=countdown_words,
        reward=COUNTDOWN,
    ),
}


def task_of(source: Any) -> str:
    """Return the task of a source (or a tokenizer) "NAME:..", "" where it is none's."""
    if not isinstance(source, str):
        return ""
    name, colon, _ = source.partition(":")
    return name if colon and name in GENERATED else ""


def task_reward(source: Any) -> str:
    """Return the reward of a source's problems where no other is named (`config.reward`)."""
    if is_gym(source):
        return GYM
    task = task_of(source)
    return GENERATED[task].reward if task else CORRECT

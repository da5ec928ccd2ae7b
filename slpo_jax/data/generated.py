"""The tasks of which problems are generated: chains and graphs here, others in files of their own, all in `GENERATED`.

`NAME:SET` is a source of its problems, `config.data.NAME` says what they are like, and `NAME:NUMBER` is a tokenizer of
its words.

A chain has operations on small numbers, left to right modulo m: `9 * 3 + 8` in the steps 9 * 3 = 7 and 7 + 8 = 5. Every
result depends on the one before it, so that an answer takes as many steps, one after the other, as there are
operations. Factors are coprime to m: no product forgets what came before.

A graph is searched: `n4>n2 n7>n1 n2>n5 n1>n3 ends n3 n5 from n4` asks which of two ends is reached from n4. Two chains
of edges have as many hops, so that neither an end's edges nor its depth say which it is:
the edges have to be followed, a hop a step.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from slpo_jax.data.countdown import CountdownConfig, countdown_problems, countdown_words
from slpo_jax.data.generated_sets import DepthConfig, sets_apart
from slpo_jax.data.gym import is_gym
from slpo_jax.data.problem import Problem, Problems
from slpo_jax.data.synthetic import SyntheticConfig, synthetic_problems, synthetic_words
from slpo_jax.rewards.countdown_verifier import COUNTDOWN
from slpo_jax.rewards.gym_tasks import GYM
from slpo_jax.rewards.reward import CORRECT
from slpo_jax.settings import FieldError, setting

_CHAIN_OPERATORS = ("+", "-", "*")


@dataclass(frozen=True)
class ChainConfig(DepthConfig):
    """What the chains look like: the section `config.data.chain`. An operation is a step.

    Attributes:
        modulus: results are in 0 .. modulus - 1.
        operations: any of +, - and *.
    """

    modulus: int = setting(10, least=3, most=1_000)
    operations: tuple[str, ...] = setting(("+", "*"), fewest=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := {*self.operations} - {*_CHAIN_OPERATORS}:
            raise FieldError(self, "operations", f"{min(unknown)!r} is none of {', '.join(_CHAIN_OPERATORS)}")


@lru_cache
def _factors(modulus: int) -> list[int]:
    return [number for number in range(2, modulus) if math.gcd(number, modulus) == 1]


def _chain(config: ChainConfig, depth: int, rng: np.random.Generator) -> tuple[Problem, str]:
    modulus, draws = config.modulus, rng.random(1 + 2 * depth).tolist()
    value = int(draws[0] * modulus)
    question, steps = str(value), list[str]()
    for which, size in zip(draws[1::2], draws[2::2], strict=True):
        operator = config.operations[int(which * len(config.operations))]
        operands: Sequence[int] = _factors(modulus) if operator == "*" else range(1, modulus)
        operand = operands[int(size * len(operands))]
        result = {"+": value + operand, "-": value - operand, "*": value * operand}[operator] % modulus
        question += f" {operator} {operand}"
        steps.append(f"{value} {operator} {operand} = {result}")
        value = result
    return Problem(question, tuple(steps), str(value)), question


def chain_words(modulus: int) -> tuple[str, ...]:
    """Return every word of problems with this modulus."""
    return (*map(str, range(ChainConfig(modulus=modulus).modulus)), *_CHAIN_OPERATORS, "=")


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
            raise FieldError(self, "nodes", f"{self.depth} hops need {needed}: {remedy}")

    @property
    def most_depth(self) -> int:
        """Of `graph:DEPTH`: as many hops as there are nodes for."""
        return self.nodes // 2 - 1


def _graph(config: GraphConfig, depth: int, rng: np.random.Generator) -> tuple[Problem, str]:
    names = [f"n{number}" for number in rng.permutation(config.nodes)[: 2 * (depth + 1)]]
    chains = names[: depth + 1], names[depth + 1 :]
    edges = [pair for chain in chains for pair in pairwise(chain)]
    ends = sorted(chain[-1] for chain in chains)
    told = [f"{edges[place][0]}>{edges[place][1]}" for place in rng.permutation(len(edges))]
    first, second = ends if rng.random() < 0.5 else ends[::-1]
    begin, *steps = chains[0]
    question = f"{' '.join(told)} ends {first} {second} from {begin}"
    return Problem(question, tuple(steps), steps[-1]), " ".join([*sorted(told), *ends, begin])


def graph_words(nodes: int) -> tuple[str, ...]:
    """Return every word of problems with so many nodes: an edge is one."""
    names = [f"n{number}" for number in range(GraphConfig(depth=1, nodes=nodes).nodes)]
    return ("ends", "from", *names, *(f"{one}>{other}" for one in names for other in names if one != other))


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
    "synthetic": Task(SyntheticConfig, lambda *asked: Problems(synthetic_problems(*asked)), synthetic_words),
    "chain": Task(ChainConfig, sets_apart("chain", _chain, "modulus, or add operations"), chain_words),
    "graph": Task(GraphConfig, sets_apart("graph", _graph, "nodes"), graph_words),
    "countdown": Task(CountdownConfig, countdown_problems, countdown_words, COUNTDOWN),
}


def task_of(source: Any) -> str:
    """Return the task of a source (or a tokenizer) "NAME:..", "" where it is none's."""
    name, colon, _ = source.partition(":") if isinstance(source, str) else ("", "", "")
    return name if colon and name in GENERATED else ""


def task_reward(source: Any) -> str:
    """Return the reward of a source's problems where no other is named (`config.reward`)."""
    if is_gym(source):
        return GYM
    return GENERATED[task].reward if (task := task_of(source)) else CORRECT

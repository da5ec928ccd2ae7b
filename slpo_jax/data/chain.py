"""Chains of operations on small numbers, left to right modulo m: `9 * 3 + 8` in the steps 9 * 3 = 7 and 7 + 8 = 5.

Every result depends on the one before it, so that an answer takes as many steps, one after the other, as there are
operations. Factors are coprime to m: no product forgets what came before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from slpo_jax.data.depths import DepthConfig, sets_apart
from slpo_jax.data.problem import Problem
from slpo_jax.settings import FieldError, setting

OPERATORS = ("+", "-", "*")


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
        if unknown := {*self.operations} - {*OPERATORS}:
            raise FieldError(self, "operations", f"{min(unknown)!r} is none of {', '.join(OPERATORS)}")


@lru_cache
def _factors(modulus: int) -> list[int]:
    return [number for number in range(2, modulus) if math.gcd(number, modulus) == 1]


def _make(config: ChainConfig, depth: int, rng: np.random.Generator) -> tuple[Problem, str]:
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
    """Every word of problems with this modulus."""
    return (*map(str, range(ChainConfig(modulus=modulus).modulus)), *OPERATORS, "=")


chain_problems = sets_apart("chain", _make, "modulus, or add operations")

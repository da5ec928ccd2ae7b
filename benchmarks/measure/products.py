"""Floating-point operations of a program's products, from what jax traces, and so the same on every device."""

import math
from typing import Any

import jax
from jax.extend import core


def products(program: Any, trips: int) -> float:
    """FLOPs of a device in a run of a traced program: its matrix products, loops at their full length.

    Args:
        program: what `jitted.trace` returns.
        trips: of loops whose bound is not a constant.
    """
    return _of(program.jaxpr.jaxpr, trips)


def _of(jaxpr: core.Jaxpr, trips: int) -> float:
    return sum(_of_equation(equation, trips) for equation in jaxpr.eqns)


def _of_equation(equation: core.JaxprEqn, trips: int) -> float:
    name = equation.primitive.name
    given = equation.params
    if name == "dot_general":
        (contracted, _), _ = given["dimension_numbers"]
        first = equation.invars[0].aval.shape
        return (
            2.0
            * math.prod(equation.outvars[0].aval.shape)
            * math.prod(first[axis] for axis in contracted)
        )
    if name == "scan":
        return given["length"] * _of(given["jaxpr"].jaxpr, trips)
    if name == "while":
        return _bound(given["cond_jaxpr"].jaxpr, trips) * _of(
            given["body_jaxpr"].jaxpr, trips
        )
    if name == "cond":
        return max(_of(branch.jaxpr, trips) for branch in given["branches"])
    return sum(_of(inner, trips) for inner in _inner(given))


def _inner(given: dict[str, Any]) -> list[core.Jaxpr]:
    leaves = jax.tree.leaves(
        given, is_leaf=lambda x: isinstance(x, (core.Jaxpr, core.ClosedJaxpr))
    )
    found = [
        leaf.jaxpr if isinstance(leaf, core.ClosedJaxpr) else leaf for leaf in leaves
    ]
    return [each for each in found if isinstance(each, core.Jaxpr)]


def _bound(condition: core.Jaxpr, otherwise: int) -> int:
    """The largest whole number that a loop's condition compares with."""
    compared = []
    for equation in condition.eqns:
        if equation.primitive.name == "lt":
            compared += equation.invars
    return max(
        (int(each.val) for each in compared if isinstance(each, core.Literal)),
        default=otherwise,
    )

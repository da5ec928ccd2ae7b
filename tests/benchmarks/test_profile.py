"""Where a program's time goes: a trace written by hand, and one of the profiler's own."""

import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks.measure import profile as profiles


def event(op, start, end):
    return types.SimpleNamespace(
        start_ns=start * 1e9, duration_ns=(end - start) * 1e9, stats=[("hlo_op", op)] * bool(op)
    )


def plane(name, **lines):
    lines = [types.SimpleNamespace(name=line.replace("_", " "), events=events) for line, events in lines.items()]
    return types.SimpleNamespace(name=name, lines=lines)


def test_an_op_s_seconds_are_without_those_inside_of_it():
    host = [event("while", 0, 10), event("", 0, 9), event("dot", 1, 4), event("dot", 5, 6), event("add", 6, 7)]
    found = profiles.own_seconds([plane("/host:CPU", one=host, other=[event("dot", 2, 4)])])
    assert found == ({"while": 5, "dot": 3 + 1 + 2, "add": 1}, {"while": 1, "dot": 3, "add": 1})


@pytest.mark.parametrize(("name", "line"), [("/device:GPU:0", "Stream_#1"), ("/device:TPU:0", "XLA_Ops")])
def test_a_device_s_time_counts_once(name, line):
    ops = [event("dot", 1, 4)]
    planes = [plane("/host:CPU", thread=[event("copy", 0, 9)]), plane(name, **{line: ops, "Steps": ops})]
    assert profiles.own_seconds(planes) == ({"dot": 3}, {"dot": 1})


def test_profile_of_a_big_product_is_the_product_s():
    def function(x, scale):
        return jax.lax.fori_loop(0, 3, lambda _, x: x @ x * scale, x).sum(axis=1)

    x = jnp.full((700, 700), 0.01)
    program = jax.jit(function).lower(x, 0.5).compile()
    program(x, 0.5).block_until_ready()
    found = profiles.profile(program, [(x, 0.5)] * 2)
    _, times, name = next(iter(found.values()))  # the one that takes longest comes first
    assert times == 3
    assert name.endswith("dot_general")

"""Where a program's time goes: a trace written by hand, and one of the profiler's own."""

import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks.measure import profile as profiles
from benchmarks.measure.compiled import Text
from benchmarks.measure.products import products


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_profile_of_a_big_product_is_the_product_s(dtype):
    def function(x, scale):
        return jax.lax.fori_loop(0, 3, lambda _, x: (x @ x * scale).astype(x.dtype), x).sum(axis=1)

    x = jnp.full((700, 700), 0.01, dtype)
    program = jax.jit(function).lower(x, 0.5).compile()
    program(x, 0.5).block_until_ready()
    found = profiles.profile(program, [(x, 0.5)] * 2)
    heaviest = next(iter(found.values()))
    assert (heaviest.times, heaviest.flops) == (3, 3 * 2 * 700**3)
    assert heaviest.name.endswith("dot_general")
    assert heaviest.bytes >= 3 * 2 * x.nbytes  # x is read once


def test_flops_of_operations_are_those_that_were_traced():
    """Of a gradient through a loop, by the profiler's own count of each operation; a product in a fusion is one."""

    def step(w_3KK, x_BK):
        def loss(w_3KK):
            y_BK, _ = jax.lax.scan(lambda h_BK, w_KK: (jnp.tanh(h_BK @ w_KK), None), x_BK, w_3KK)
            return (y_BK**2).sum()

        return jax.grad(loss)(w_3KK)

    traced = jax.jit(step).trace(jnp.full((3, 90, 90), 0.01), jnp.ones((16, 90)))
    program = traced.lower().compile()
    found = profiles.profile(program, [(jnp.full((3, 90, 90), 0.01), jnp.ones((16, 90)))])
    assert sum(op.flops for op in found.values()) == products(traced, 1) == 3 * 3 * 2 * 16 * 90 * 90


LIBRARY = """
ENTRY %main (a: bf16[4,8,2], b: bf16[4,2,6]) -> bf16[4,8,6] {
  %a = bf16[4,8,2]{2,1,0} parameter(0)
  %b = bf16[4,2,6]{2,1,0} parameter(1)
  %gemm.1 = (bf16[4,8,6]{2,1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],\
"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}}}
  ROOT %out = bf16[4,8,6]{2,1,0} get-tuple-element(%gemm.1), index=0
}
"""


def test_a_library_s_product_is_counted_as_a_dot_is():
    moved = 2 * (4 * 8 * 2 + 4 * 2 * 6 + 4 * 8 * 6) + 64
    assert Text(LIBRARY).costs() == {"gemm.1": (2 * 4 * 8 * 6 * 2, moved)}


def test_what_of_the_roofline_an_operation_gets():
    """By what holds it up, products or memory, both from a device's own best."""
    device = profiles.Peaks(flops=100.0, bytes=10.0)
    by_products, by_memory = (profiles.Op(4.0, 1, "", 200.0, 5.0), profiles.Op(4.0, 1, "", 100.0, 30.0))
    assert (device.share(by_products), device.share(by_memory)) == (0.5, 0.75)
    assert min(profiles.peaks("float32", 64, tries=1)) > 0

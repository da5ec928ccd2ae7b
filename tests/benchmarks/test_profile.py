"""Where a program's time goes: kinds of ops read from HLO text, and traces written by hand and by the profiler."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import floor
from benchmarks.measure import profile as profiles

SMALL_TRACE = [
    {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "/host:CPU"}},
    {"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "/device:GPU:0"}},
    {"name": "thread_name", "ph": "M", "pid": 2, "tid": 1, "args": {"name": "Stream #13(Compute)"}},
    {"name": "thread_name", "ph": "M", "pid": 2, "tid": 2, "args": {"name": "XLA Ops"}},
    {},
]
HLO = """HloModule jit_f, is_scheduled=true

%fused_computation (param_0: f32[8,8]) -> f32[8] {
  %param_0 = f32[8,8]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %reduce.1 = f32[8]{0} reduce(%param_0, %zero), dimensions={1}, to_apply=%sum
}

%wrapped (param_0.1: (f32[8], /*index=1*/f32[8])) -> f32[8] {
  %param_0.1 = (f32[8]{0}, f32[8]{0}) parameter(0)
  ROOT %inner = f32[8]{0} fusion(%param_0.1), kind=kLoop, calls=%fused_computation
}

ENTRY %main (x: f32[8,8]) -> f32[8] {
  %x = f32[8,8]{1,0} parameter(0)
  %dot.1 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="jit(f)/mlp/dot_general"}
  %copy.1 = f32[8,8]{0,1} copy(%dot.1)
  %tuple.1 = (f32[8]{0}, /*index=1*/f32[8]{0}) tuple(%x, %x)
  %cublas-gemm.1 = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"
  %while.1 = f32[8,8]{1,0} while(%copy.1), condition=%c, body=%b
  ROOT %add_reduce_fusion = f32[8]{0} fusion(%tuple.1), kind=kInput, calls=%wrapped, metadata={op_name="jit(f)/ln/sum"}
}
"""


def event(name, start, end, *, pid=1, tid=7, op=True):
    args = {"args": {"hlo_op": name, "device_ordinal": "0"}} if op else {}
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": start * 1e6, "dur": (end - start) * 1e6} | args


def test_kinds_of_a_modules_ops():
    ops = profiles.read_hlo(HLO)
    kinds = {name: ops[name].kind for name in ("dot.1", "cublas-gemm.1", "copy.1", "while.1", "add_reduce_fusion")}
    assert kinds == {
        "dot.1": profiles.MATMUL,
        "cublas-gemm.1": profiles.MATMUL,
        "copy.1": profiles.COPY,
        "while.1": profiles.CONTROL,
        "add_reduce_fusion": profiles.SOFTMAX,
    }
    assert ops["dot.1"].source == "jit(f)/mlp/dot_general"
    names = {"nvjet_sst_128x64": profiles.MATMUL, "MemcpyD2D": profiles.COPY,
             "loop_transpose_fusion.2": profiles.COPY, "wrapped_reduce-window.9": profiles.SOFTMAX,
             "ncclDevKernel_AllReduce": profiles.COLLECTIVE, "some_kernel": profiles.OTHER}  # fmt: skip
    assert {name: profiles.kind_of(name, ops) for name in names} == names


def test_no_time_of_a_cpu_trace_counts_twice():
    events = [
        *SMALL_TRACE,
        event("ThunkExecutor::Execute", 0, 20, op=False),
        event("while.1", 0, 10),
        event("dot.1", 1, 4),
        event("end: dot.1", 3.9, 4, op=False),
        event("dot.1", 5, 6),  # handed on to another thread, where it is ready at 9
        event("end: dot.1", 9, 9.1, tid=8, op=False),
        event("copy.1", 8, 10, tid=8),
    ]
    ops = profiles.read_hlo(HLO)
    own = profiles.own_seconds(profiles.spans(events, ops), ops)
    assert own == pytest.approx({"dot.1": 3 + (3 + 0.5), "copy.1": 0.5 + 1, "while.1": 1 + 1})
    found = profiles.summary(events, 12.0, 1, ops, heaviest=1)
    assert found["kinds"][profiles.IDLE] == pytest.approx(2)
    assert next(iter(found["kinds"])) == profiles.MATMUL
    assert found["heaviest"][0] == {"op": "dot.1", "kind": "matmul", "seconds": pytest.approx(6.5), "count": 2,
                                    "source": "jit(f)/mlp/dot_general"}  # fmt: skip


def test_an_op_ended_before_what_waited_for_it():
    """dot.1 is ready at 3; the thread that finds it so runs copy.1 until 8, and then reports dot.1's end."""
    events = [
        *SMALL_TRACE,
        event("dot.1", 0, 0.5),
        event("ThunkExecutor::Execute", 3, 8, tid=8, op=False),
        event("copy.1", 3, 7.9, tid=8),
        event("end: dot.1", 8.1, 8.2, tid=8, op=False),
        event("dot.1", 8.5, 9),  # nothing waits for this one
        event("end: dot.1", 11, 11.1, tid=8, op=False),
    ]
    ops = profiles.read_hlo(HLO)
    own = profiles.own_seconds(profiles.spans(events, ops), ops)
    assert own == pytest.approx({"dot.1": 3 + 2.5, "copy.1": 4.9})


def test_a_gpu_trace_is_read_from_its_streams():
    events = [
        *SMALL_TRACE,
        event("copy.1", 0, 9),  # the host's launch of it
        event("cublas-gemm.1", 1, 4, pid=2, tid=1),
        event("cublas-gemm.1", 1, 4, pid=2, tid=2),
        event("nvjet_tst", 4, 5, pid=2, tid=1) | {"args": {"hlo_op": "command_buffer"}},
        event("MemcpyD2D", 6, 7, pid=2, tid=1, op=False),
    ]
    found = profiles.summary(events, 10.0, 2, profiles.read_hlo(HLO), heaviest=9)
    assert found["kinds"] == {"matmul": 2, profiles.COPY: 0.5, profiles.IDLE: 2.5}
    assert {row["op"]: row["seconds"] for row in found["heaviest"]} == {
        "cublas-gemm.1": 1.5,
        "nvjet_tst": 0.5,
        "MemcpyD2D": 0.5,
    }


def test_trace_without_ops_says_so():
    found = profiles.summary(SMALL_TRACE, 1.0, 1, {}, heaviest=1)
    assert floor._profile_lines(found) == ["Not known: the trace has no ops of the program."]


def test_profile_of_a_big_product_says_matmul():
    def function(x, scale):
        return jnp.tanh(x @ x * scale).sum(axis=1)

    x = jnp.full((700, 700), 0.01)
    program = jax.jit(function).lower(x, 0.5).compile()
    program(x, 0.5).block_until_ready()
    found = profiles.profile(program, [(x, 0.5)] * 2)
    kinds = found["kinds"]
    assert kinds["matmul"] > 0.5 * (found["seconds"] - kinds[profiles.IDLE])
    assert "dot_general" in found["heaviest"][0]["source"]
    assert sum(kinds.values()) == pytest.approx(found["seconds"])

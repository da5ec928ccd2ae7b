"""Where a compiled program's time goes, by kind of op: jax's profiler trace, read with the program's HLO at hand."""

import collections
import dataclasses
import gzip
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

MATMUL, RANDOM, SOFTMAX, GATHER, COPY, COLLECTIVE, CONTROL, OTHER = KINDS = (
    "matmul",
    "random bits, dropout",
    "softmax, norms, sums",
    "gather, scatter",
    "copy, transpose, cast",
    "collective",
    "loop control",
    "other elementwise",
)
IDLE = "no op under way"
LIMIT = 1_000_000  # jax cuts longer traces

_MATMUL = re.compile(r"gemm|matmul|cublas|nvjet|cutlass|xmma|onednn|^dot|^convolution|^ynn_dot", re.IGNORECASE)
_MOVES = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert", "broadcast", "iota", "copy",
    "copy-start", "copy-done", "transpose", "reshape", "slice", "concatenate", "pad", "reverse", "dynamic-slice",
    "dynamic-update-slice", "convert",
}  # fmt: skip
_COLLECTIVE = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "partition-id")
_CONTROL = {"while", "call", "conditional"}
_WAITED = "ThunkExecutor::Execute"
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = .*?\s([a-z][\w-]*)\(")


@dataclasses.dataclass(frozen=True)
class Op:
    """An instruction of the program.

    Attributes:
        kind: in `KINDS`.
        source: its op_name metadata, that of the product in a fusion that holds one; "" without.
    """

    kind: str
    source: str


@dataclasses.dataclass(frozen=True)
class Span:
    """An op under way on a device, from `start` to `end` seconds of the trace's clock."""

    device: str
    op: str
    start: float
    end: float


def read_hlo(text: str) -> dict[str, Op]:
    """Every instruction of an optimised HLO module by name; a fusion is of the kind of what it holds.

    A fusion that holds several kinds counts as the first of: matmul, random bits, gather and scatter, what reduces or
    has an exponential, other, copy.
    """
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    body: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            body = bodies.setdefault(start[1], [])
        elif found := _INSTRUCTION.match(line):
            body.append((found[1], found[2], line))

    def held(opcode: str, line: str) -> list[tuple[str, str]]:
        called = re.search(r"calls=%?([\w.-]+)", line) if opcode == "fusion" else None
        if called is None:
            return [(_target(line) if opcode == "custom-call" else opcode, line)]
        return [inside for _, inner, text in bodies.get(called[1], []) for inside in held(inner, text)]

    def op(opcode: str, line: str) -> Op:
        inside = held(opcode, line)
        products = [text for inner, text in inside if _MATMUL.search(inner)]
        source = re.search(r'op_name="([^"]*)"', products[0] if products else line)
        return Op(_kind({inner for inner, _ in inside}), source[1] if source else "")

    return {name: op(opcode, line) for body in bodies.values() for name, opcode, line in body}


def _target(line: str) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', line)
    return found[1] if found else "custom-call"


def _kind(opcodes: set[str]) -> str:
    """The kind of something that holds these opcodes and targets of custom calls."""

    def any_starts(*prefixes: str) -> bool:
        return any(opcode.startswith(prefixes) for opcode in opcodes)

    if any(_MATMUL.search(opcode) for opcode in opcodes):
        return MATMUL
    if any_starts(*_COLLECTIVE):
        return COLLECTIVE
    if opcodes & _CONTROL:
        return CONTROL
    # Nothing else in these programs hashes: threefry's keys and the masks of `models.dropout`.
    if any_starts("rng") or {"xor", "shift-right-logical"} <= opcodes:
        return RANDOM
    if opcodes & {"gather", "scatter"}:
        return GATHER
    if any_starts("reduce") or "exponential" in opcodes:
        return SOFTMAX
    return COPY if opcodes <= _MOVES else OTHER


def kind_of(op: str, ops: dict[str, Op]) -> str:
    """The kind of an op of the trace; one that the HLO lacks (a kernel of a library) is judged by its name."""
    if op in ops:
        return ops[op].kind
    if re.match(r"mem(cpy|set)", op, re.IGNORECASE):
        return COPY
    if "nccl" in op.lower():
        return COLLECTIVE
    # Only the beginning, which says what XLA made it of: "wrapped_reduce", "loop_transpose_fusion".
    words = re.sub(r"^(wrapped|loop|input)_", "", op)
    return _kind({re.sub(r"[._].*", "", words) if not _MATMUL.search(op) else op})


def trace(program, inputs: Sequence[tuple]) -> tuple[list[dict[str, Any]], float]:
    """A call for each tuple of arguments, under the profiler: the trace's events, and the seconds of all calls."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            start = time.perf_counter()
            for args in inputs:
                jax.block_until_ready(program(*args))
            seconds = time.perf_counter() - start
        events: list[dict[str, Any]] = []
        for path in Path(folder).rglob("*.trace.json.gz"):
            with gzip.open(path, "rt") as file:
                events += json.load(file)["traceEvents"]
    return events, seconds


def spans(events: Sequence[dict[str, Any]], ops: dict[str, Op]) -> list[Span]:
    """The ops in a trace's events: of a GPU's streams, or else of the CPU's threads."""
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    pids = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    complete = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"]))
    found, host = [], []
    for pid, name in pids.items():
        lines = {tid: line for (owner, tid), line in names.items() if owner == pid}
        if name.startswith("/device:"):
            # A stream's kernels are also shown as lines of ops and modules: those would count twice.
            streams = {tid for tid, line in lines.items() if line.startswith("Stream")}
            for event in (e for e in complete if e["pid"] == pid and e["tid"] in (streams or lines)):
                op = _argument(event, "hlo_op")  # of a graph of kernels, the graph's
                found.append(_span(name, op if op in ops else event["name"], event))
        elif name.startswith("/host:"):
            host += _host_spans([e for e in complete if e["pid"] == pid])
    return found or host


def _host_spans(complete: list[dict[str, Any]]) -> list[Span]:
    """XLA:CPU's ops. One that went on elsewhere ends with an event "end: NAME" that is not inside its own.

    The thread that finishes an op first runs what waited for it, in an event of its own (`_WAITED`), and reports the
    op's end after that: the op ended when that event began.
    """
    found: list[Span] = []
    running: dict[str, collections.deque[int]] = collections.defaultdict(collections.deque)
    nested: dict[Any, list[dict[str, Any]]] = collections.defaultdict(list)  # of each thread: events under way
    over: dict[Any, dict[str, Any]] = {}  # of each thread: the last event to be over, an outer one after those in it
    for event in complete:
        stack = nested[event["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            over[event["tid"]] = stack.pop()
        name = event["name"].removeprefix("end: ")
        if name == event["name"]:
            stack.append(event)
            if _argument(event, "hlo_op"):
                running[name].append(len(found))
                found.append(_span(_argument(event, "device_ordinal") or "0", _argument(event, "hlo_op"), event))
        elif running[name]:
            inside = any(outer["name"] == name for outer in stack)
            # Where several devices run it at once, the first to begin is taken to be the first to end.
            index = running[name].pop() if inside else running[name].popleft()
            if not inside:
                last = over.pop(event["tid"], event)
                waited = last["name"] == _WAITED and last["ts"] / 1e6 >= found[index].start
                end = (last if waited else event)["ts"] / 1e6
                found[index] = dataclasses.replace(found[index], end=max(found[index].end, end))
    return found


def _argument(event: dict[str, Any], name: str) -> str:
    return str((event.get("args") or {}).get(name, ""))


def _span(device: str, op: str, event: dict[str, Any]) -> Span:
    return Span(device, op, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)


def own_seconds(found: Iterable[Span], ops: dict[str, Op]) -> dict[str, float]:
    """Seconds of each op, summed over devices, no instant of a device counted twice.

    Ops that are under way at once on one device share the time; loops and calls have what none of their ops has.
    """
    edges = [(at, opens, span) for span in found for at, opens in ((span.start, True), (span.end, False))]
    edges.sort(key=lambda edge: (edge[0], edge[1]))
    active: dict[str, dict[Span, int]] = collections.defaultdict(dict)
    since: dict[str, float] = {}
    seconds: dict[str, float] = collections.defaultdict(float)
    for at, opens, span in edges:
        on_device = active[span.device]
        if on_device:
            at_work = [each for each in on_device if kind_of(each.op, ops) != CONTROL] or list(on_device)
            for each in at_work:
                seconds[each.op] += (at - since[span.device]) / len(at_work)
        since[span.device] = at
        if opens:
            on_device[span] = on_device.get(span, 0) + 1
        elif on_device.get(span, 0) > 1:
            on_device[span] -= 1
        else:
            on_device.pop(span, None)
    return dict(seconds)


def profile(program, inputs: Sequence[tuple], heaviest: int = 10) -> dict[str, Any]:
    """Runs a compiled program under the profiler, once for each tuple of arguments.

    Returns:
        See `summary`.
    """
    ops = read_hlo(program.as_text())
    events, seconds = trace(program, inputs)
    return summary(events, seconds, len(inputs), ops, heaviest)


def profile_call(owner: Any, maker: str, run: Callable[[], Any]) -> dict[str, Any]:
    """`profile` of the last call, while `run` runs, of a jitted program that `owner.maker(..)` returns."""
    calls: list[tuple[Any, tuple]] = []
    make = getattr(owner, maker)

    def recording(*mode):
        program = make(*mode)
        return lambda *args: (calls.append((program, args)), program(*args))[1]

    with mock.patch.object(owner, maker, recording):
        run()
    program, args = calls[-1]
    return profile(program.lower(*args).compile(), [args])


def summary(events, seconds: float, runs: int, ops: dict[str, Op], heaviest: int) -> dict[str, Any]:
    """Seconds of a device, the mean over devices and runs, by kind and of the heaviest ops.

    Args:
        events, seconds: from `trace`.
        ops: from `read_hlo`.
    Returns:
        "seconds": of a run; "runs"; "devices": with ops in the trace; "ops": of a run on all devices; "note": "" or
        what is wrong with the trace; "kinds": the largest first, `IDLE` last; "heaviest": {"op", "kind", "seconds",
        "count", "source"}.
    """
    found = spans(events, ops)
    devices = len({span.device for span in found})
    note = "the trace was cut: it has too many events" if len(events) >= LIMIT else ""
    note = note if found else "the trace has no ops of the program"
    own = {op: spent / devices / runs for op, spent in own_seconds(found, ops).items()}
    kinds: dict[str, float] = collections.defaultdict(float)
    for op, spent in own.items():
        kinds[kind_of(op, ops)] += spent
    ranked = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    counts = collections.Counter(span.op for span in found)
    rows = [
        {"op": op, "kind": kind_of(op, ops), "seconds": own[op], "count": counts[op] / devices / runs,
         "source": ops[op].source if op in ops else ""}
        for op in sorted(own, key=lambda op: -own[op])[:heaviest]
    ]  # fmt: skip
    return {
        "seconds": seconds / runs,
        "runs": runs,
        "devices": devices,
        "ops": len(found) / runs,
        "note": note,
        "kinds": ranked | {IDLE: seconds / runs - sum(own.values())} if found else {},
        "heaviest": rows,
    }

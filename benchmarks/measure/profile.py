"""Which ops a compiled program's time goes to, by jax's own profiler, and what a device could do in that time."""

import collections
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.measure.compiled import Text

_DEVICE_LINES = ("Stream", "XLA Ops")  # of a GPU and of a TPU; the others show the same time again


class Op(NamedTuple):
    """An operation of a compiled program, in a run of it.

    Attributes:
        seconds: of its own, without what runs inside of it; summed over devices.
        times: that it was run.
        name: its op_name in the HLO, or "".
        flops: of the products in it.
        bytes: that it reads and writes, each operand whole.
    """

    seconds: float
    times: float
    name: str
    flops: float
    bytes: float


class Peaks(NamedTuple):
    """What a device was seen to do: FLOP/s of a large product, and bytes/s of a large copy."""

    flops: float
    bytes: float

    def share(self, op: Op) -> float:
        """Part of the roofline: the least seconds that an operation could take, over those that it took."""
        return max(op.flops / self.flops, op.bytes / self.bytes) / op.seconds


def profile(program: Any, inputs: Sequence[tuple]) -> dict[str, Op]:
    """Runs a compiled program once for each tuple of arguments, under the profiler.

    Returns:
        its operations by name, those with the most seconds first.
    """
    jax.block_until_ready(inputs)  # what makes them is not theirs
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for args in inputs:
                jax.block_until_ready(program(*args))
        files = [str(path) for path in Path(folder).rglob("*.xplane.pb")]
        planes = [plane for file in files for plane in jax.profiler.ProfileData.from_file(file).planes]
        seconds, times = own_seconds(planes)
    text, runs = program.as_text(), len(inputs)
    names = dict(re.findall(r'^\s+(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"', text, re.MULTILINE))
    costs = Text(text).costs()

    def of(op: str, spent: float) -> Op:
        flops, moved = costs.get(op, (0.0, 0))
        often = times[op] / runs
        return Op(spent / runs, often, names.get(op, ""), often * flops, often * moved)

    return {op: of(op, spent) for op, spent in seconds.most_common()}


def peaks(dtype: str, width: int, tries: int = 5) -> Peaks:
    """The device's, at their best of some tries.

    Args:
        dtype: of the product.
        width: of its square operands; the copy is of as many numbers.
    """
    x = jnp.ones((width, width), dtype)

    def best(function: Any) -> float:
        program, taken = jax.jit(function).lower(x).compile(), []
        for _ in range(tries + 1):  # the first is not counted
            begin = time.perf_counter()
            jax.block_until_ready(program(x))
            taken.append(time.perf_counter() - begin)
        return min(taken[1:])

    return Peaks(2.0 * width**3 / best(lambda x: x @ x), 2 * x.nbytes / best(lambda x: x + 1))


def own_seconds(planes: Iterable[Any]) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Seconds and number of each HLO op: of the devices' lines, or of the host's threads where no device has one."""
    planes = list(planes)
    lines = [
        line
        for plane in planes if plane.name.startswith("/device:")
        for line in plane.lines if line.name.startswith(_DEVICE_LINES)
    ] or [line for plane in planes if plane.name.startswith("/host:") for line in plane.lines]  # fmt: skip
    seconds, times = collections.Counter[str](), collections.Counter[str]()
    for line in lines:
        under_way: list[tuple[str, float]] = []  # ops around the next one, and their ends
        for op, start, spent in sorted(_ops(line), key=lambda found: (found[1], -found[2])):
            while under_way and under_way[-1][1] <= start:
                under_way.pop()
            if under_way:
                seconds[under_way[-1][0]] -= spent
            seconds[op] += spent
            times[op] += 1
            under_way.append((op, start + spent))
    return seconds, times


def _ops(line: Any) -> Iterator[tuple[str, float, float]]:
    """(op, start, duration) of a line's events that are of a program, in seconds."""
    for event in line.events:
        if op := dict(event.stats).get("hlo_op"):
            yield str(op), event.start_ns / 1e9, event.duration_ns / 1e9

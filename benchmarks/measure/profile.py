"""Which ops a compiled program's time goes to, by jax's own profiler."""

import collections
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

_DEVICE_LINES = ("Stream", "XLA Ops")  # of a GPU and of a TPU; the others show the same time again


def profile(program: Any, inputs: Sequence[tuple]) -> dict[str, tuple[float, float, str]]:
    """Runs a compiled program once for each tuple of arguments, under the profiler.

    Returns:
        op -> (seconds of its own a run, times a run, its op_name in the HLO or ""), the heaviest first; summed over
        devices, and without what runs inside of it.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for args in inputs:
                jax.block_until_ready(program(*args))
        files = [str(path) for path in Path(folder).rglob("*.xplane.pb")]
        planes = [plane for file in files for plane in jax.profiler.ProfileData.from_file(file).planes]
        seconds, times = own_seconds(planes)
    names = dict(re.findall(r'^\s+(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"', program.as_text(), re.MULTILINE))
    runs = len(inputs)
    return {op: (spent / runs, times[op] / runs, names.get(op, "")) for op, spent in seconds.most_common()}


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

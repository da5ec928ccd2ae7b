"""A step on the devices that are here: what its compiled program says that it needs, beside what it needs."""

import dataclasses
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax

from benchmarks.measure.profile import profile
from benchmarks.measure.programs import Program, filled, programs
from benchmarks.measure.targets import Target
from benchmarks.memory import Point, compiled, setup_of
from slpo_jax.errors import UserError
from slpo_jax.run.setup import Setup
from slpo_jax.stages import RL

STEPS = 4  # the first of which is not timed
HEAVIEST = 20  # ops that are told


def here() -> Target:
    """The devices that there are."""
    devices = jax.devices()
    return Target("here", jax.default_backend(), devices, int((devices[0].memory_stats() or {}).get("bytes_limit", 0)))


def predicted_and_measured(
    model: str, changes: Mapping[str, Any]
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str, str]]]:
    """The rl step of a model of `memory.MODELS`, of one program.

    Returns:
        (what, predicted, measured), and of the `HEAVIEST` ops (op, milliseconds a step, times, source).
    Raises:
        UserError: it doesn't compile, or does not fit; the message has the prediction.
    """
    where = here()
    setup = setup_of(Point(model, changes=tuple(changes.items())))
    (program,) = programs(setup, RL)
    numbers, step = compiled(program, where, setup.config.max_latents)
    if step is None:
        raise UserError(f"{model}: the step does not compile here ({numbers['failed']}); take rl.micro_batches")
    if numbers["fits"] is False:
        needed, there = numbers["total"] / 1e9, where.memory / 1e9
        raise UserError(f"{model}: the step needs {needed:.1f} GB of {there:.1f}; take rl.micro_batches")
    seconds, peak, heaviest = _run(step, setup, program)
    flops, moved = numbers["flops"] / 1e12, numbers["bytes"] / 1e9
    rows = [
        ("memory of a device (GB)", f"{numbers['total'] / 1e9:.2f}", f"{peak / 1e9:.2f}" if peak else "not told"),
        ("compiling (s)", "", f"{numbers['compile_seconds']:.1f}"),
        ("a step (s)", "", f"{seconds:.3f}"),
        ("products of a device", f"{flops:.3f} TFLOP", f"{flops / seconds:.2f} TFLOP/s"),
        ("moved by a device's kernels, at most", f"{moved:.1f} GB", f"{moved / seconds:.0f} GB/s"),
    ]
    return rows, [(name, f"{1e3 * op.seconds:.1f}", f"{op.times:g}", op.name) for name, op in heaviest]


def _run(step: Any, setup: Setup, program: Program) -> tuple[float, int, list[Any]]:
    """The median seconds of a step from random weights on prompts of one token, a device's peak of memory, the ops."""
    state, batch = jax.tree.map(filled, program.arguments)
    state = dataclasses.replace(state, params=setup.initial_params())
    taken = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        taken.append(time.perf_counter() - begin)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return statistics.median(taken[1:]), peak, list(profile(step, [(state, batch)]).items())[:HEAVIEST]

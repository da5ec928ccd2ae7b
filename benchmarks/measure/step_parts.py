"""The parts of an SLPO step as they were run, and their table: counts, floors and measured times."""

import dataclasses
from typing import Any

import jax
import numpy as np

from benchmarks.measure import counts
from benchmarks.measure.counts import Layout, Sizes
from benchmarks.measure.ours import PROGRAMS, Ours, step_key, timed
from benchmarks.measure.profile import profile
from benchmarks.measure.report import summary
from benchmarks.measure.workload import Workload
from slpo_jax.policy.score import used_slots


@dataclasses.dataclass
class Measured:
    """A step as it was run: the trajectories behind the counts, and seconds and XLA's figures by program."""

    lengths: np.ndarray
    answers: np.ndarray
    prompts: np.ndarray
    seconds: dict[str, dict[str, Any]]
    xla: dict[str, dict[str, float]]
    profile: dict[str, Any]


def measure(work: Workload, candidate: Ours, runs: int) -> Measured:
    """Runs each program of the candidate on step 0's prompts, and the step as often again under the profiler."""
    batch, key, params = work.batch(0), step_key(work, 0), work.state.params

    def state():  # the step donates it
        return jax.block_until_ready(jax.tree.map(lambda x: x.copy(), work.state))

    trajectories, rewards = candidate.rollout(params, batch, key)
    inputs = {
        "rollout": lambda: (params, batch, key),
        "surrogate": lambda: (params, batch, trajectories, rewards, key),
        "gradient": lambda: (params, batch, trajectories, rewards, key),
        "step": lambda: (state(), batch),
    }
    seconds = {name: _seconds(getattr(candidate, name), inputs[name], runs) for name in PROGRAMS}
    spoken = used_slots(work.parts.policy, trajectories)[1].sum(axis=1)
    return Measured(
        lengths=np.asarray(trajectories.lengths),
        answers=np.asarray(spoken),
        prompts=np.asarray(batch.prompts.lengths),
        seconds=seconds,
        xla={name: xla_figures(getattr(candidate, name)) for name in PROGRAMS},
        profile=profile(candidate.step, [inputs["step"]() for _ in range(runs)]),
    )


def _seconds(program, inputs, runs: int) -> dict[str, Any]:
    spent: dict[str, float] = {}
    values = []
    for _ in range(1 + runs):
        timed(spent, "program", program, *inputs())
        values.append(spent["program"])
    return summary(values[1:])


def xla_figures(program) -> dict[str, float]:
    """What XLA says of a compiled program on one device: FLOPs, and bytes of scratch memory."""
    flops = program.cost_analysis().get("flops", 0.0)
    return {"flops": flops, "temp_bytes": program.memory_analysis().temp_size_in_bytes}


def parts_table(sizes: Sizes, layout: Layout, found: Measured, flop_rate: float, bandwidth: float):
    """Rows by part, in the order of the step: FLOPs, bytes, floor and what was measured.

    Args:
        flop_rate, bandwidth: of all devices together, FLOP/s and bytes/s.
    Returns:
        part -> {"useful", "slots" (FLOPs), "bytes", "floor" (seconds), "binds"} and, where there is a program,
        {"seconds", "over_floor", "rate" (FLOP/s of slots)}.
    """
    both = counts.position_counts(found.lengths, found.answers, found.prompts, layout)
    useful, slots = both["useful"], both["slots"]

    def leaf(real, made, moved):
        times = {"matmul": real / flop_rate, "memory": moved / bandwidth}
        binds = max(times, key=lambda name: times[name])
        return {"useful": real, "slots": made, "bytes": moved, "floor": times[binds], "binds": binds}

    def added(*names):
        numbers = {name: sum(rows[part][name] for part in names) for name in ("useful", "slots", "bytes", "floor")}
        kinds = {rows[part]["binds"] for part in names}
        return numbers | {"binds": kinds.pop() if len(kinds) == 1 else "both"}

    rows: dict[str, dict[str, Any]] = {}
    for whole, names in (("rollout", counts.ROLLOUT), ("surrogate", counts.SURROGATE)):
        for part in names:
            rows[part] = leaf(sizes.flops(useful[part]), sizes.flops(slots[part]), sizes.bytes(useful[part]))
        rows[whole] = added(*names)
    back = counts.backward(useful)
    rows["backward"] = leaf(sizes.flops(back), sizes.flops(counts.backward(slots, layout)), sizes.bytes(back))
    rows["gradient"] = added("surrogate", "backward")
    rows["optimizer"] = leaf(0.0, 0.0, layout.shards * sizes.optimizer_bytes)
    rows["step"] = added("rollout", "gradient", "optimizer")
    seconds = {name: found.seconds[name]["median"] for name in PROGRAMS}
    for name, spent in (seconds | {"backward": seconds["gradient"] - seconds["surrogate"]}).items():
        row = rows[name]
        row |= {"seconds": spent, "over_floor": spent / row["floor"], "rate": row["slots"] / spent}
    return rows

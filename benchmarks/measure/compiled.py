"""What a compiled step says of itself before it ever runs: a device's memory, and what devices send each other."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from slpo_jax.io.mesh import EVERYWHERE, ROWS
from slpo_jax.policy.prompted import PromptedBatch, Prompts
from slpo_jax.training.sharding import Layout
from slpo_jax.training.state import Params, TrainState

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4,
          "s64": 8, "u64": 8, "f64": 8}  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """One operation in which devices wait for each other.

    Attributes:
        kind: one of `KINDS`.
        bytes: of its result on a device.
        in_loop: whether it is in a loop's body, and so is done again and again.
    """

    kind: str
    bytes: int
    in_loop: bool


def abstract_state(params: Any, trained: tuple[str, ...], optimizer: Any, layout: Layout) -> TrainState:
    """Shapes, types and places of a stage's state; nothing is allocated.

    Args:
        params: shapes of all parameters.
        trained: see `make_train_step`.
    """
    part = {name: params[name] for name in trained}
    opt_state = jax.eval_shape(optimizer.init, part)
    opt_specs = layout.state_specs(optimizer, part, opt_state)

    def placed(shapes, specs):
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(layout.mesh, spec)),
            shapes, specs,
        )  # fmt: skip

    def whole(make):
        return placed(jax.eval_shape(make), EVERYWHERE)

    return TrainState(
        step=whole(lambda: jnp.int32(0)),
        params=placed(params, layout.specs(params)),
        opt_state=placed(opt_state, opt_specs),
        key=whole(lambda: jax.random.key(0)),
        skipped=whole(lambda: jnp.zeros(2, jnp.int32)),
    )


def abstract_batch(mesh: jax.sharding.Mesh, prompts: int, slots: int, reference: int) -> PromptedBatch:
    """Shapes of a batch of the stages that roll out, its prompts padded.

    Args:
        prompts: B, over all devices.
        slots: P.
        reference: bytes of an encoded reference answer; 0 where the host reads answers.
    """

    def rows(dtype, *shape):
        return jax.ShapeDtypeStruct((prompts, *shape), dtype, sharding=NamedSharding(mesh, ROWS))

    return PromptedBatch(
        Prompts(rows(jnp.int32, slots), rows(jnp.bool_, slots)), rows(jnp.uint8, reference), rows(jnp.int32)
    )


def abstract_rollouts(
    rollout: Any, state: TrainState, batch: PromptedBatch, reference: Params, layout: Layout, group: int
) -> Any:
    """Shapes of what the second half of a step is given: (batch, trajectories, rewards [B, G]).

    Args:
        rollout: the first half, `halves.make_rollout`.
        reference: the parameters that the stage started from, or {}, as the first half is given them.
    """
    _, trajectories, _ = jax.eval_shape(rollout, state, batch, reference)
    rewards = jax.ShapeDtypeStruct((len(batch.index), group), jnp.float32)
    placed = NamedSharding(layout.mesh, ROWS)
    return batch, *jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), (trajectories, rewards)
    )


def device_memory(program: Any) -> dict[str, int]:
    """Bytes of one device while a compiled program runs: what it is given, what it needs beside, and both.

    Results that take the place of arguments, as a donated state's do, are not counted twice.
    """
    found = program.memory_analysis()
    arguments = found.argument_size_in_bytes
    beside = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return {"arguments": arguments, "scratch": beside, "total": arguments + beside}


def collectives(program: Any) -> list[Collective]:
    """What a compiled program's devices send each other, in the order of its text."""
    bodies = dict(_computations(program.as_text()))
    loops = {
        name
        for lines in bodies.values()
        for line in lines
        for name in re.findall(r"(?:body|condition)=%?([\w.-]+)", line)
    }
    while True:  # what a loop calls is in the loop too
        called = {
            name for loop in loops for line in bodies.get(loop, ()) for name in re.findall(r"%([\w.-]+)", line)
            if name in bodies
        }  # fmt: skip
        if called <= loops:
            break
        loops |= called
    kinds = "|".join(KINDS)
    found = []
    for name, lines in bodies.items():
        for line in lines:
            # An asynchronous operation counts where it is done.
            if match := re.search(rf"= (.*?) ({kinds})(?:-done)?\(", line):
                found.append(Collective(match[2], _size(match[1]), name in loops))
    return found


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of each computation of a program in XLA's text form."""
    name, lines = "", list[str]()
    for line in text.splitlines():
        if line and not line[0].isspace() and line.endswith("{"):
            match = re.match(r"(?:ENTRY )?%?([\w.-]+)", line)
            name, lines = (match[1] if match else ""), []
        elif line.startswith("}"):
            yield name, lines
        else:
            lines.append(line)


def _size(types: str) -> int:
    """Bytes of a result's type, or of all types of a tuple."""
    total = 0
    for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", types):
        count = 1
        for size in filter(None, shape.split(",")):
            count *= int(size)
        total += _BYTES.get(kind, 0) * count
    return total

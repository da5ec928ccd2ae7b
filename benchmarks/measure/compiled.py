"""What a compiled step says of itself before it ever runs: a device's memory, and what devices send each other."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from slpo_jax.policy.policy import PromptedBatch, Prompts
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, Layout
from slpo_jax.training.state import Params, TrainState

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "copy-done",
    "async-done",
    "after-all",
)
_IN_PART = ("dynamic-slice", "dynamic-update-slice", "slice", "gather")
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


def abstract_state(
    params: Any, trained: tuple[str, ...], optimizer: Any, layout: Layout
) -> TrainState:
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


def abstract_batch(
    mesh: jax.sharding.Mesh, prompts: int, slots: int, reference: int
) -> PromptedBatch:
    """Shapes of a batch of the stages that roll out, its prompts padded.

    Args:
        prompts: B, over all devices.
        slots: P.
        reference: bytes of an encoded reference answer; 0 where the host reads answers.
    """

    def rows(dtype, *shape):
        return jax.ShapeDtypeStruct(
            (prompts, *shape), dtype, sharding=NamedSharding(mesh, ROWS)
        )

    return PromptedBatch(
        Prompts(rows(jnp.int32, slots), rows(jnp.bool_, slots)),
        rows(jnp.uint8, reference),
        rows(jnp.int32),
    )


def abstract_rollouts(
    rollout: Any,
    state: TrainState,
    batch: PromptedBatch,
    ref_params: Params,
    layout: Layout,
    group: int,
) -> Any:
    """Shapes of what the second half of a step is given: (batch, trajectories, rewards [B, G]).

    Args:
        rollout: the first half, `rl_step.make_rollout`.
        ref_params: the parameters that the stage started from, or {}, as the first half is given them.
    """
    _, trajectories, _ = jax.eval_shape(rollout, state, batch, ref_params)
    rewards = jax.ShapeDtypeStruct((len(batch.draw_ids), group), jnp.float32)
    placed = NamedSharding(layout.mesh, ROWS)
    return batch, *jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
        (trajectories, rewards),
    )


def device_memory(program: Any) -> dict[str, int]:
    """Bytes of one device while a compiled program runs: what it is given, what it needs beside, and both.

    Results that take the place of arguments, as a donated state's do, are not counted twice; "donated" is their size.
    """
    found = program.memory_analysis()
    arguments = found.argument_size_in_bytes
    beside = (
        found.temp_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
    )
    return {"arguments": arguments, "scratch": beside, "total": arguments + beside,
            "donated": found.alias_size_in_bytes}  # fmt: skip


def collectives(program: Any) -> list[Collective]:
    """What a compiled program's devices send each other, in the order of its text."""
    text = Text(program.as_text())
    found = []
    for name, instructions in text.bodies.items():
        for each in instructions:
            # An asynchronous operation counts where it is done.
            kind = each.operation.removesuffix("-done")
            if kind in KINDS:
                found.append(Collective(kind, _size(each.type), name in text.in_loops))
    return found


def traffic(program: Any, trips: int) -> int:
    """Bytes that a device's kernels read and write in a run of a compiled program, each operand and result whole.

    Caches that hold some of it, and kernels that read a part of an operand alone, make it less.

    Args:
        trips: of loops whose number the text doesn't have.
    """
    return Text(program.as_text()).traffic(trips)


def largest(program: Any) -> tuple[str, int]:
    """The largest array of a compiled program: its type and shape, and its bytes on a device."""
    found = {
        array: _size(array)
        for array in re.findall(r"\b\w+\[[\d,]+\]", program.as_text())
    }
    array = max(found, key=lambda name: found[name])
    return array, found[array]


@dataclass(frozen=True)
class _Instruction:
    """A line of a compiled program."""

    name: str
    type: str
    operation: str
    operands: list[str]
    line: str


class Text:
    """A compiled program in XLA's text form.

    Attributes:
        bodies: by name the instructions of each computation.
        entry: the name of the one that is run.
        in_loops: those in a loop's body, or called from there.
    """

    def __init__(self, text: str):
        self.bodies: dict[str, list[_Instruction]] = {}
        self.entry = ""
        name = ""
        for line in text.splitlines():
            if line and not line[0].isspace() and line.endswith("{"):
                match = re.match(r"(ENTRY )?%?([\w.-]+)", line)
                name = match[2] if match else ""
                self.entry = name if match and match[1] else self.entry
                self.bodies[name] = []
            elif match := re.match(
                r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\(([^)]*)", line
            ):
                operands = re.findall(r"%([\w.-]+)", match[4])
                self.bodies[name].append(
                    _Instruction(match[1], match[2], match[3], operands, line)
                )
        self.in_loops = self._in_loops()

    def _in_loops(self) -> set[str]:
        def called(lines):
            names = set[str]()
            for line in lines:
                names.update(re.findall(r"%([\w.-]+)", line.line))
            return names & self.bodies.keys()

        loops = []
        for body in self.bodies.values():
            loops += [each for each in body if each.operation == "while"]
        found = set[str]()
        new = called(loops)
        while new:
            found |= new
            reached = set[str]()
            for name in new:
                reached |= called(self.bodies[name])
            new = reached - found
        return found

    def traffic(self, trips: int, name: str = "") -> int:
        """See `traffic`; of one computation."""
        body = self.bodies[name or self.entry]
        total = 0
        by_name = {each.name: each for each in body}
        for each in body:
            called = self._called(each)
            if each.operation == "while":
                total += self._trips(each, trips) * sum(
                    self.traffic(trips, name) for name in called
                )
            elif each.operation == "conditional":
                total += max(self.traffic(trips, name) for name in called)
            elif each.operation in ("call", "async-start"):
                total += sum(self.traffic(trips, name) for name in called)
            else:
                total += self._bytes(each, by_name)
        return total

    def _called(self, each: _Instruction) -> list[str]:
        return [
            name for name in re.findall(r"%([\w.-]+)", each.line) if name in self.bodies
        ]

    def _bytes(self, each: _Instruction, by_name: dict[str, _Instruction]) -> int:
        """That an operation reads and writes, loops and conditionals aside."""
        if each.operation == "fusion":
            return self._of_fusion(each, self.bodies[self._called(each)[-1]])
        if each.operation in ("call", "async-start"):
            return sum(self.traffic(1, name) for name in self._called(each))
        return 0 if each.operation in _FREE else _moved(each, by_name)

    def _of_fusion(self, fusion: _Instruction, body: list[_Instruction]) -> int:
        """Of a parameter read in slices alone, these; of a result that is written into another array, the part."""
        by_name = {each.name: each for each in body}
        total = 0
        for parameter in (each for each in body if each.operation == "parameter"):
            users = [each for each in body if parameter.name in each.operands]
            if all(
                each.operation in _IN_PART and each.operands[0] == parameter.name
                for each in users
            ):
                total += sum(_moved(each, by_name) // 2 for each in users)
            else:
                total += _size(parameter.type)
        written = [
            each
            for each in body
            if "ROOT " in each.line and each.operation == "dynamic-update-slice"
        ]
        return total + (
            sum(_moved(each, by_name) // 2 for each in written) or _size(fusion.type)
        )

    def _trips(self, loop: _Instruction, otherwise: int) -> int:
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
            return int(known[1])
        condition = re.search(r"condition=%?([\w.-]+)", loop.line)
        lines = [each.line for each in self.bodies[condition[1]]] if condition else []
        bounds = []
        for line in lines:
            numbers = re.findall(r"= s32\[\]\S* constant\((\d+)\)", line)
            bounds += map(int, numbers)
        return max(bounds, default=otherwise)


def _moved(each: _Instruction, by_name: dict[str, _Instruction]) -> int:
    """Bytes that a single operation reads and writes.

    Args:
        by_name: the operations of its computation.
    """
    sizes = [
        _size(by_name[name].type) if name in by_name else 0 for name in each.operands
    ]
    if each.operation == "dynamic-update-slice":
        return 2 * sizes[1]
    return (
        2 * _size(each.type)
        if each.operation in _IN_PART
        else _size(each.type) + sum(sizes)
    )


def _size(types: str) -> int:
    """Bytes of a result's type, or of all types of a tuple."""
    total = 0
    for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", types):
        count = 1
        for size in filter(None, shape.split(",")):
            count *= int(size)
        total += _BYTES.get(kind, 0) * count
    return total

"""`python -m benchmarks.predicted [--model gpt2] [--tiny] [--json FILE]`; see `--help`.

What the compiler predicts of SLPO's step at the paper's batch, beside what the step needs of the devices that are here:
memory, and the rates of its products and of the memory's traffic. Prints Markdown; `--json` writes the rows.
"""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax

from benchmarks.measure.programs import Program, fill, programs
from benchmarks.measure.report import (
    Parser,
    check_flags,
    format_facts,
    machine,
    page,
    run_command,
)
from benchmarks.measure.targets import Target
from benchmarks.memory import Point, compiled, setup_of
from slpo_jax.errors import UserError
from slpo_jax.run.setup import Setup
from slpo_jax.runtime.backend import set_up_jax
from slpo_jax.stages import RL

MODELS = ("gpt2", "smollm2", "qwen05b")  # of `memory.MODELS`
STEPS = 4  # the first of which is not timed


def here() -> Target:
    """The devices that there are."""
    devices = jax.devices()
    return Target(
        "here",
        jax.default_backend(),
        devices,
        int((devices[0].memory_stats() or {}).get("bytes_limit", 0)),
    )


def predicted_and_measured(
    model: str, changes: dict[str, Any]
) -> list[tuple[str, str, str]]:
    """Compile and run the rl step of a model.

    Args:
        model: one of `MODELS`.
        changes: further config keys, by dotted name.
    Returns:
        rows of (what, predicted, measured).
    Raises:
        UserError: the step doesn't compile, or doesn't fit; the message has the prediction.
    """
    where = here()
    setup = setup_of(Point(model, changes=tuple(changes.items())))
    (program,) = programs(setup, RL)
    numbers, step = compiled(program, where, setup.config.max_latents)
    if step is None:
        raise UserError(
            f"{model}: the step does not compile here ({numbers['failed']}); give --tiny"
        )
    if numbers["fits"] is False:
        needed = numbers["total"] / 1e9
        raise UserError(
            f"{model}: the step needs {needed:.1f} GB of {where.memory / 1e9:.1f}; give --tiny"
        )
    seconds, peak = run_step(step, setup, program)
    tflop = numbers["flops"] / 1e12
    moved = numbers["bytes"] / 1e9
    return [
        (
            "memory of a device (GB)",
            f"{numbers['total'] / 1e9:.2f}",
            f"{peak / 1e9:.2f}" if peak else "not told",
        ),
        ("compiling (s)", "", f"{numbers['compile_seconds']:.1f}"),
        ("a step (s)", "", f"{seconds:.3f}"),
        (
            "products of a device",
            f"{tflop:.3f} TFLOP",
            f"{tflop / seconds:.2f} TFLOP/s",
        ),
        (
            "moved by a device's kernels, at most",
            f"{moved:.1f} GB",
            f"{moved / seconds:.0f} GB/s",
        ),
    ]


def run_step(step: Any, setup: Setup, program: Program) -> tuple[float, int]:
    """Run the compiled step from random weights, on prompts of one token.

    Returns:
        the median seconds, and the peak of a device's memory in bytes (0 where the device doesn't tell).
    """
    state, batch = jax.tree.map(fill, program.arguments)
    state = dataclasses.replace(state, params=setup.initial_params())
    taken = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        taken.append(time.perf_counter() - begin)
    memory = jax.devices()[0].memory_stats() or {}
    return statistics.median(taken[1:]), memory.get("peak_bytes_in_use", 0)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("predicted", "What a step is predicted to need, and needs.")
    parser.add_argument("--model", choices=MODELS, default="gpt2", help="default: gpt2")
    parser.add_argument(
        "--tiny", action="store_true", help="one layer, and a few prompts a device"
    )
    flags = parser.parse_args(argv)
    check_flags(flags)
    return flags


def benchmark(flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    set_up_jax()
    changes: dict[str, Any] = {}
    if flags.tiny:
        prompts = 4 * len(jax.devices())
        changes = {
            "tokenizer": "synthetic:199",
            "model.n_layer": 1,
            "rl.batch_size": prompts,
            "prompt_slots": (16,),
        }
    rows = predicted_and_measured(flags.model, changes)
    return {
        "machine": machine(),
        "model": flags.model,
        "tiny": flags.tiny,
        "rows": rows,
    }


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the table."""
    size = (
        f"one layer of {result['model']}"
        if result["tiny"]
        else f"{result['model']} at the paper's batch"
    )
    facts = (
        f"machine: {format_facts(result['machine'])}",
        f"SLPO's step of {size} on {len(jax.devices())} devices",
    )
    return page(
        "Predicted and measured",
        facts,
        (),
        ("", "predicted", "measured"),
        result["rows"],
    )


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.growth [--shapes gpt2|quickstart] [--axes NAME ...] [--runs 2] [--json FILE]`.

How time and memory of our SLPO step grow with K, G, T, the prompts' length and the batch, one at a time. Prints a
Markdown table.
"""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.candidates import compiled, timed, with_sizes
from benchmarks.report import (
    Parser,
    check_flags,
    listed,
    machine,
    page,
    page_faults,
    run_command,
    spread,
    summary,
)
from benchmarks.slpo_step import BASE
from benchmarks.workload import SHAPES, TRAINED, Shapes, load_config, make_workload
from slpo_jax.training import slpo
from slpo_jax.training.state import make_train_step

AXES = {
    "gpt2": {"K": (1, 4, 8), "G": (4, 8, 16), "T": (6, 12, 24), "prompt tokens": (36, 72, 144), "prompts": (1, 2, 4)},
    "quickstart": {"K": (1, 4, 16), "G": (4, 8, 32), "T": (3, 6, 12), "prompt tokens": (24, 32, 48),
                   "prompts": (8, 32, 128)},
}  # fmt: skip
FLAGS = {name.replace(" ", "_").lower(): name for name in AXES["gpt2"]}
DEFINITIONS = """
seconds: median (least-most) of the whole jitted step on the same prompts; each axis alone, the others at K, G = 4, 8 \
and the shapes' own T, prompt length and batch
temp: scratch memory of the step's program on one device, beside parameters, optimizer state and gradients; it has \
scoring's largest room, whichever is used
relative: to the row of the axis that is the shapes' own
page faults: minor ones of the process in a step, median; mostly pages that were handed back and are cleared anew
prompts are random, as long as their slots but for 4 tokens at most; half of T is thought on average
""".strip().splitlines()


def base_sizes(shapes: Shapes, config) -> dict[str, int]:
    """The shapes' own value on every axis."""
    return {"K": BASE[0], "G": BASE[1], "T": config.max_latents, "prompt tokens": config.prompt_slots[0],
            "prompts": shapes.prompts}  # fmt: skip


def measure(shapes: Shapes, sizes: dict[str, int], runs: int) -> dict[str, Any]:
    """Seconds, page faults and scratch memory of one point."""
    longest = sizes["prompt tokens"]
    changes = shapes.changes | {"max_latents": sizes["T"], "prompt_slots": (longest,)}
    point = dataclasses.replace(shapes, changes=changes, prompt_tokens=(longest - 4, longest))
    with tempfile.TemporaryDirectory() as workdir:
        work = make_workload(point, load_config(point), sizes["prompts"], Path(workdir))
        parts = with_sizes(work.parts, sizes["K"], sizes["G"])
        step = make_train_step(slpo.make_loss(parts), work.optimizer, TRAINED, work.mesh, "slpo")
        program, _ = compiled(step, work.state, work.batch(0))
        seconds: dict[str, float] = {}
        spent, faults = [], []
        for number in range(1 + runs):
            batch, before = work.batch(number), page_faults()
            work.state, _ = timed(seconds, "step", program, work.state, batch)
            spent.append(seconds["step"])
            faults.append(page_faults() - before)
    return {"seconds": summary(spent[1:]), "page_faults": summary(faults[1:]),
            "temp_bytes": program.memory_analysis().temp_size_in_bytes}  # fmt: skip


def benchmark(shapes: Shapes, config, flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    base = base_sizes(shapes, config)
    points = [(axis, value) for axis in map(FLAGS.get, flags.axes) for value in AXES[flags.shapes][axis]]
    found: dict[tuple[int, ...], Any] = {}
    rows = []
    for axis, value in tqdm(points, "points", disable=not sys.stderr.isatty()):
        sizes = base | {axis: value}
        point = tuple(sizes.values())
        if point not in found:
            found[point] = measure(shapes, sizes, flags.runs)
        rows.append({"axis": axis, "value": value, **found[point]})
    for row in rows:
        (own,) = (other for other in rows if other["axis"] == row["axis"] and other["value"] == base[row["axis"]])
        row["relative"] = row["seconds"]["median"] / own["seconds"]["median"]
        row["relative_temp"] = row["temp_bytes"] / own["temp_bytes"]
    return {"shapes": flags.shapes, "runs": flags.runs, "machine": machine(), "base": base, "rows": rows}


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the table."""
    head = ("Axis", "Value", "Step (s)", "Relative", "Temp (MB)", "Relative", "Page faults")
    lines = [
        [row["axis"], str(row["value"]), spread(row["seconds"]), f"{row['relative']:.2f}x",
         f"{row['temp_bytes'] / 1e6:.0f}", f"{row['relative_temp']:.2f}x", f"{row['page_faults']['median']:.0f}"]
        for row in result["rows"]
    ]  # fmt: skip
    facts = (
        f"machine: {listed(result['machine'])}",
        f"base: {listed(result['base'])}; {result['runs']} steps after one",
    )
    return page(f"Growth of the SLPO step, {result['shapes']} shapes", facts, DEFINITIONS, head, lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("growth", "Growth of an SLPO step.", SHAPES)
    parser.add_argument("--axes", nargs="+", choices=sorted(FLAGS), default=list(FLAGS), help="default: all")
    parser.add_argument("--runs", type=int, default=2, help="measured steps of each point; default: 2")
    flags = parser.parse_args(argv)
    check_flags(flags, runs=1)
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, SHAPES, benchmark, markdown)


if __name__ == "__main__":
    main()

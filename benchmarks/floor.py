"""`python -m benchmarks.floor [--shapes gpt2|llama|quickstart] [--prompts N] [--json FILE]`.

How far the SLPO step is from what the machine can do: what the machine does at its best, what a step has to compute and
to move, what XLA makes of it, and which ops take the time. Prints Markdown tables; `--json` writes every number.
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from benchmarks.measure.counts import Layout, sizes_of
from benchmarks.measure.ours import Ours
from benchmarks.measure.rates import DTYPES, chip_count, feed_forward_rate, machine_rates
from benchmarks.measure.report import Parser, check_flags, listed, machine, markdown_table, on_shapes, run_command
from benchmarks.measure.step_parts import measure, parts_table
from benchmarks.measure.workload import SHAPES, Shapes, make_workload
from benchmarks.step import BASE
from slpo_jax.policy.noise import reaches_prompts

RUNS = 5
DEFINITIONS = """
useful: FLOPs of real positions only (prompt tokens, tau latents, end marker and answer tokens that are fed, steps of \
rows that are active, keys that a query sees); slots: what static shapes make the program do
counted: 2 a weight and position, 4 H Dh a layer, query and key, 2 D V a position with logits, backward twice the \
surrogate's forward; norms, GELU, softmax, dropout and the optimizer's arithmetic are left out
GB: least traffic of the useful count: weights once a forward pass and once a decode step (on each shard), keys and \
values written once and read by later steps and passes, backward twice the surrogate's; optimizer: gradients read \
twice, parameters and moments read and written; all other activations and logits are left out
not taken off either count, though our program does without: the first layer's attention in all passes but one (noise \
comes after it), and what the last layer makes of a prompt beyond keys, values and its last position
floor: the larger of useful FLOPs over the machine's matmul rate (the best product below in the activations' dtype) \
and GB over its bandwidth; a sum's floor is the sum, as its parts wait for one another
seconds: median of {runs} runs after one, each program alone, all on the same prompts, keys and weights; \
backward: gradient less surrogate
GFLOP/s: the slots count over the seconds
XLA: cost_analysis of the compiled program times the shards; it has the body of a loop once, so that of the rollout's \
latent and answer steps it sees one each, and of scoring's capacities the dearest, whichever runs; it cannot see into \
calls of libraries; elementwise work is in it
temp: scratch memory of the program on one device, from memory_analysis; MB and GB are powers of 10
rates: best of the runs (median in brackets); on the CPU one device is measured, whose rate all shards share; model \
shapes: [rows x D] @ [D x 4D] and back over the layers' weights, rows of one shard
weights: random, as in benchmarks.step; K, G = {base}
""".strip()


def benchmark(name: str, shapes: Shapes, config, prompts: int, runs: int = RUNS, rates=None) -> dict[str, Any]:
    """Every number of the report, ready for JSON.

    Args:
        rates: from `machine_rates`, which is called without.
    """
    with tempfile.TemporaryDirectory() as workdir:
        work = make_workload(shapes, config, prompts, Path(workdir))
        candidate = Ours(work, *BASE, {})
        model, passes, group = work.parts.policy.reasoner.config, *BASE
        sizes = sizes_of(model, work.state.params, work.state.opt_state)
        layout = Layout(
            config.prompt_slots[0], config.max_latents, config.max_answer_tokens, group, passes, work.mesh.size,
            noisy_prompts=reaches_prompts(config.dropout.rate, config.dropout.where), remat=model.remat,
            capacities=work.parts.policy.capacities, prompt_capacity=work.batch(0).prompts.capacity,
        )  # fmt: skip
        found = measure(work, candidate, runs)
    rates = machine_rates() if rates is None else rates
    chips = chip_count(layout.shards)
    dtype = str(jnp.dtype(model.dtype))
    trajectories = prompts * group // layout.shards
    per_pass = {"scoring pass": passes * trajectories * (layout.latent_slots + layout.answer_slots),
                "decode step": trajectories}  # fmt: skip
    model_shapes = [
        {"what": what, "rows": n, "width": sizes.width, "dtype": each,
         **feed_forward_rate(n, sizes.width, sizes.layers, each)}
        for what, n in per_pass.items() for each in DTYPES
    ]  # fmt: skip
    products = [rates["matmul"][dtype], *(row for row in model_shapes if row["dtype"] == dtype)]
    flop_rate = chips * max(rate["best"] for rate in products)
    byte_rate = chips * rates["bandwidth"]["best"]
    rows = parts_table(sizes, layout, found, flop_rate, byte_rate)
    return {
        "shapes": name, "runs": runs, "base": list(BASE), "machine": machine(), "work": work.facts, "dtype": dtype,
        "lengths": {"mean_latents": float(found.lengths.mean()), "longest_latents": int(found.lengths.max()),
                    "mean_answer_tokens": float(found.answers.mean())},
        "rates": rates | {"model_shapes": model_shapes, "chips": chips,
                          "flop_rate": flop_rate, "byte_rate": byte_rate}, "sizes": dataclasses.asdict(sizes),
        "layout": dataclasses.asdict(layout) | {"capacities": [list(pair) for pair in layout.capacities]},
        "seconds": found.seconds, "parts": rows, "xla": found.xla, "profile": found.profile,
        "definitions": DEFINITIONS.format(runs=runs, base=BASE).splitlines(),
    }  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("floor", "The SLPO step's floor.", SHAPES)
    parser.add_argument("--prompts", type=int, help="prompts a step; default: 32 (quickstart), 2 (gpt2)")
    flags = parser.parse_args(argv)
    if flags.prompts is None:
        flags.prompts = SHAPES[flags.shapes].prompts
    check_flags(flags, prompts=1)
    return flags


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the tables."""

    sections = {
        "The machine": _machine_table(result["rates"]),
        "The parts of a step": _parts_lines(result),
        "Where the step's time goes": _profile_lines(result["profile"]),
    }
    return "\n".join([
        f"# The floor of an SLPO step, {result['shapes']} shapes",
        f"- machine: {listed(result['machine'])}",
        f"- work: {listed(result['work'])}; rollouts: {listed(result['lengths'])}",
        *(f"- {line}" for line in result["definitions"]),
        *(line for title, lines in sections.items() for line in ("", f"## {title}", "", *lines)),
    ])  # fmt: skip


def _machine_table(rates: dict[str, Any]) -> list[str]:
    def cell(rate):
        return f"{_number(rate['best'] / 1e9)} ({_number(rate['median'] / 1e9)})"

    rows = [
        [f"[{size} x {size}] @ [{size} x {size}], {dtype}, GFLOP/s", cell(rate)]
        for dtype, found in rates["squares"].items() for size, rate in found.items()
    ]  # fmt: skip
    for rate in rates["model_shapes"]:
        d, rows_ = rate["width"], rate["rows"]
        rows.append([f"{rate['what']}: [{rows_} x {d}] @ [{d} x {4 * d}], {rate['dtype']}, GFLOP/s", cell(rate)])
    rows.append(["memory (a <- a + s b), GB/s", cell(rates["bandwidth"])])
    return markdown_table(["What", "Best (median)"], rows)


def _parts_lines(result: dict[str, Any]) -> list[str]:
    head = ("Part", "Useful GFLOP", "Slots GFLOP", "XLA GFLOP", "GB", "Floor (s)", "Binds", "Measured (s)",
            "Measured/floor", "GFLOP/s", "Temp (MB)")  # fmt: skip
    lines = []
    for part, row in result["parts"].items():
        xla, measured = result["xla"].get(part), "seconds" in row
        lines.append([
            part, _number(row["useful"] / 1e9), _number(row["slots"] / 1e9),
            _number(xla["flops"] * result["layout"]["shards"] / 1e9) if xla else "",
            _number(row["bytes"] / 1e9), _number(row["floor"]), row["binds"],
            _number(row["seconds"]) if measured else "", f"{row['over_floor']:.1f}x" if measured else "",
            _number(row["rate"] / 1e9) if measured else "", _number(xla["temp_bytes"] / 1e6) if xla else "",
        ])  # fmt: skip
    return markdown_table(head, lines)


def _profile_lines(found: dict[str, Any]) -> list[str]:
    if not found["kinds"]:
        return [f"Not known: {found['note']}."]
    about = (
        f"Mean of {found['runs']} steps under the profiler, {found['seconds']:.4f} s and {found['ops']:.0f} ops each, "
        f"on {found['devices']} devices; seconds of a device. Ops that run at once on a device share its time. A "
        "fusion counts as the first that it holds of: matmul, random bits, gather or scatter, a reduction or "
        "exponential."
    )
    kinds = [
        [kind, _number(spent), f"{spent / found['seconds']:.1%}"] for kind, spent in found["kinds"].items()
    ]  # fmt: skip
    ops = [
        [row["op"], row["kind"], _number(row["seconds"]), f"{row['count']:g}",
         row["source"].removeprefix("jit(train_step)/shard_map/") or "-"]
        for row in found["heaviest"]
    ]  # fmt: skip
    return [
        *([f"{found['note']}.", ""] if found["note"] else []), about, "",
        *markdown_table(["Kind", "Seconds", "Share"], kinds), "",
        *markdown_table(["Heaviest ops", "Kind", "Seconds", "Times", "Source"], ops),
    ]  # fmt: skip


def _number(value: float) -> str:
    """Three digits that matter, never an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}'):.10f}".rstrip("0").rstrip(".")


def main(argv: list[str] | None = None) -> None:
    """The command."""

    def found(shapes, config, flags):
        return benchmark(flags.shapes, shapes, config, flags.prompts)

    run_command(argv, parse, on_shapes(SHAPES, found), markdown)


if __name__ == "__main__":
    main()

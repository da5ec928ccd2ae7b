"""`python -m benchmarks.step [--shapes gpt2|llama|quickstart] [--prompts N] [--growth AXIS ..] [--json FILE]`.

The paper's table of computational cost (appendix, "Computational Cost Analysis"): seconds of an SLPO step for several
(K, G), split into rollout, surrogate and backward, for slpo_jax and for the PyTorch witness (`benchmarks.witness`) on
the same work. With `--growth` instead: how time and memory of slpo_jax's step grow with K, G, T, the prompts' length
and the batch, one at a time. Prints Markdown; `--json` writes every number behind it.
"""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure.ours import PROGRAMS, Ours
from benchmarks.measure.report import (
    Parser,
    check_flags,
    check_torch,
    listed,
    machine,
    markdown_table,
    on_shapes,
    page,
    run_command,
    spread,
    summary,
)
from benchmarks.measure.theirs import Torch, fastest_witness
from benchmarks.measure.workload import SHAPES, Shapes, Workload, load_config, make_workload
from slpo_jax.errors import UserError

CONFIGURATIONS = ((1, 8), (4, 8), (8, 8), (4, 4))  # (K, G), the paper's
BASE = (4, 8)  # what relative times refer to
PARTS = ("rollout", "surrogate", "backward", "other")
PAPER = {  # seconds of the step, rollout, surrogate and backward; 2 prompts, RTX 5880 Ada
    (1, 8): (0.624, 0.321, 0.108, 0.177),
    (4, 8): (1.130, 0.294, 0.274, 0.545),
    (8, 8): (2.021, 0.319, 0.585, 1.101),
    (4, 4): (0.676, 0.243, 0.146, 0.272),
}
_SMALL = {"K": (1, 4, 16), "G": (4, 8, 32), "T": (3, 6, 12), "prompt_tokens": (24, 32, 48), "prompts": (8, 32, 128)}
AXES = {
    "gpt2": {"K": (1, 4, 8), "G": (4, 8, 16), "T": (6, 12, 24), "prompt_tokens": (36, 72, 144), "prompts": (1, 2, 4)},
    "llama": _SMALL | {"prompt_tokens": (28, 40, 56)},
    "quickstart": _SMALL,
}
DEFINITIONS = """
rollout: sample and verify G trajectories a prompt
surrogate: forward pass of the loss on those trajectories (K scoring passes, moments, log-likelihoods)
backward: of that loss; for slpo_jax the seconds of value and gradient, less the surrogate
step: the whole train step; other: step less the three parts (optimizer; for torch also verification and clipping)
seconds: median (least-most) over the measured steps; slpo_jax's parts are timed as programs of their own, its step as \
the one jitted step; configurations and implementations take turns, on the same prompts
torch: benchmarks/witness, one process on the same device with the threads named above, on trajectories of \
the same lengths; nothing shared between a prompt's trajectories, sequences trimmed to the longest; of its variants \
the fastest in one step at K, G = 4, 8
ratio: torch's step over slpo_jax's, median (least-most) over the steps
rel.: median step over that of K, G = 4, 8 of the same implementation; sur./step: median surrogate over median step
scored: the trajectories' latent and answer slots that the scoring passes had capacity for, over all of them; the \
smallest of `rl.capacities` that holds every prompt's, on the device with most
traj./s: prompts x G over the step's seconds
tokens/s: (generated + scored) over the step's seconds; generated: latents and answer tokens of the rollouts, scored: \
K x generated; prompt tokens and unused slots are not counted
compile seconds: tracing, lowering and XLA, without a persistent cache; rollouts of one G share a program
weights: random; the gate's are 0, with a bias that makes the mean trajectory T/2 latents long (the paper's stop at \
about 6 of 12; the longest of a batch ends the loop); eos is forced where a trained reasoner's answer ends, as random \
weights never say it; every second reward is set to 1, as otherwise all gradients would be 0
""".strip().splitlines()
GROWTH_DEFINITIONS = """
step: median (least-most) of the whole jitted step on the same prompts; each axis alone, the others at K, G = 4, 8 and \
the shapes' own T, prompt length and batch
temp: scratch memory of the step's program on one device, beside parameters, optimizer state and gradients; it has \
scoring's largest capacity, whichever is used
relative: to the row of the axis that is the shapes' own
page faults: minor ones of the process in a step, median; mostly pages that were handed back and are cleared anew
prompts are random, as long as their slots but for 4 tokens at most; half of T is thought on average
""".strip().splitlines()


def measure(work: Workload, flags: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row of numbers a configuration and implementation, and what torch variants were tried."""
    quiet, rollouts = not sys.stderr.isatty(), {}
    ours = [Ours(work, *pair, rollouts, flags.micro_batches) for pair in tqdm(flags.only, "compile", disable=quiet)]
    candidates: list[Ours | Torch] = list(ours)
    tried: dict[str, Any] = {}
    if flags.torch != "none":
        typical = ours[flags.only.index(BASE) if BASE in flags.only else 0]
        witness, parts, tried = fastest_witness(work, typical, flags.torch, flags.torch_micro_batches)
        theirs = [Torch(witness, work, *pair, parts) for pair in flags.only]
        candidates = [candidate for pair in zip(ours, theirs, strict=True) for candidate in pair]
    measured: list[list[dict[str, float]]] = [[] for _ in candidates]
    for step in tqdm(range(flags.warmup + flags.steps), "measure", disable=quiet):
        for before, rows, candidate in zip([None, *candidates], measured, candidates, strict=False):
            if isinstance(candidate, Torch):
                candidate.lengths = before.lengths
            rows.append(candidate.measure(work, step))
    return [_row(candidate, rows[flags.warmup :]) for candidate, rows in zip(candidates, measured, strict=True)], tried


def _row(candidate: Any, measured: list[dict[str, float]]) -> dict[str, Any]:
    row = {name: getattr(candidate, name) for name in ("implementation", "passes", "group", "compile_seconds")}
    for name in measured[0]:
        row[name] = summary([step[name] for step in measured])
    if "surrogate" in row:
        row["surrogate_share"] = row["surrogate"]["median"] / row["step"]["median"]
    return row


def _row_of_the_paper(pair: tuple[int, int]) -> dict[str, Any]:
    step, *parts = PAPER[pair]
    seconds = dict(zip(PARTS, [*parts, step - sum(parts)], strict=True))
    return {"passes": pair[0], "group": pair[1], "step": step, "relative": step / PAPER[BASE][0], **seconds}


def add_relative(rows: list[dict[str, Any]]) -> None:
    """`relative`, the median step over that of `BASE`, and for torch `ratio_vs_torch`, its step over ours."""

    def of(pair, implementation):
        found = [row for row in rows if (row["passes"], row["group"], row["implementation"]) == (*pair, implementation)]
        return found[0]["step"] if found else None

    for row in rows:
        base = of(BASE, row["implementation"])
        row["relative"] = row["step"]["median"] / base["median"] if base else None
        ours, theirs = (of((row["passes"], row["group"]), name) for name in (Ours.implementation, Torch.implementation))
        if ours and theirs:
            row["ratio_vs_torch"] = summary([b / a for a, b in zip(ours["values"], theirs["values"], strict=True)])


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the tables."""
    if "base" in result:
        return growth_markdown(result)
    head = ["", "K", "G", "Step (s)", "Rel.", *(f"{name.capitalize()} (s)" for name in PARTS), "Sur./step", "Ratio"]
    timings, compiles = [], []
    for row in result["rows"]:
        pair = [str(row["passes"]), str(row["group"])]
        cells = [spread(row[name]) if name in row else "" for name in ("step", *PARTS)]
        relative = f"{row['relative']:.2f}x" if row["relative"] else ""
        share = f"{row['surrogate_share']:.0%}" if "surrogate_share" in row else ""
        ours = row["implementation"] == Ours.implementation
        ratio = spread(row["ratio_vs_torch"], digits=2) if ours and "ratio_vs_torch" in row else ""
        rates = [
            f"{row[name]['median']:.3g}" if ours else "" for name in ("trajectories_per_second", "tokens_per_second")
        ]
        scored = spread(row["scored_share"], digits=2) if "scored_share" in row else ""
        timings.append([row["implementation"], *pair, cells[0], relative, *cells[1:], share, ratio, scored, *rates])
        if ours:
            seconds = row["compile_seconds"]
            compiles.append([*pair, *(f"{seconds[name]:.1f}" if name in seconds else "" for name in PROGRAMS)])
    for row in result["paper"]:
        cells = [f"{row[name]:.3f}" for name in ("step", *PARTS)]
        rest = [*cells[1:], f"{row['surrogate'] / row['step']:.0%}", *[""] * 4]
        timings.append(["paper, RTX 5880 Ada", str(row["passes"]), str(row["group"]), cells[0],
                        f"{row['relative']:.2f}x", *rest])  # fmt: skip
    found = result["rows"][0]
    lengths = {
        name: round(found[name]["median"], 2) for name in ("mean_latents", "longest_latents", "mean_answer_tokens")
    }
    tried = {name: f"{x:.2f} s" if isinstance(x, float) else x for name, x in result["torch_tried"].items()}
    return "\n".join([
        f"# One SLPO step, {result['shapes']} shapes",
        f"- machine: {listed(result['machine'])}",
        f"- work: {listed(result['work'])}; {result['warmup']} warm-up and {result['steps']} measured steps",
        f"- rollouts at K, G = {found['passes']}, {found['group']} (medians over steps): {listed(lengths)}",
        *([f"- torch variants, seconds of one step; the fastest was kept: {listed(tried)}"] if tried else []),
        *(f"- {line}" for line in result["definitions"]),
        "", *markdown_table([*head, "Scored", "Traj./s", "Tokens/s"], timings),
        "", *markdown_table(["K", "G", *(f"Compile {name} (s)" for name in PROGRAMS)], compiles),
    ])  # fmt: skip


def base_sizes(shapes: Shapes, config) -> dict[str, int]:
    """The shapes' own value on every axis of growth."""
    return {"K": BASE[0], "G": BASE[1], "T": config.max_latents, "prompt_tokens": config.prompt_slots[0],
            "prompts": shapes.prompts}  # fmt: skip


def measure_point(shapes: Shapes, sizes: dict[str, int], warmup: int, steps: int) -> dict[str, Any]:
    """Seconds, page faults and scratch memory of our step at one point of growth."""
    longest = sizes["prompt_tokens"]
    changes = shapes.changes | {"max_latents": sizes["T"], "prompt_slots": (longest,)}
    point = dataclasses.replace(shapes, changes=changes, prompt_tokens=(longest - 4, longest))
    with tempfile.TemporaryDirectory() as workdir:
        work = make_workload(point, load_config(point), sizes["prompts"], Path(workdir))
        ours = Ours(work, sizes["K"], sizes["G"], {}, in_parts=False)
        measured = [ours.measure(work, step) for step in range(warmup + steps)][warmup:]
    found = {name: summary([step[name] for step in measured]) for name in ("step", "page_faults")}
    return found | {"temp_bytes": ours.temp_bytes}


def growth(shapes: Shapes, config, flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report of growth, ready for JSON."""
    base = base_sizes(shapes, config)
    points = [(axis, value) for axis in flags.growth for value in AXES[flags.shapes][axis]]
    found: dict[tuple[int, ...], Any] = {}
    rows = []
    for axis, value in tqdm(points, "points", disable=not sys.stderr.isatty()):
        sizes = base | {axis: value}
        point = tuple(sizes.values())
        if point not in found:
            found[point] = measure_point(shapes, sizes, flags.warmup, flags.steps)
        rows.append({"axis": axis, "value": value, **found[point]})
    for row in rows:
        (own,) = (other for other in rows if other["axis"] == row["axis"] and other["value"] == base[row["axis"]])
        row["relative"] = row["step"]["median"] / own["step"]["median"]
        row["relative_temp"] = row["temp_bytes"] / own["temp_bytes"]
    return {"shapes": flags.shapes, "warmup": flags.warmup, "steps": flags.steps, "machine": machine(), "base": base,
            "rows": rows}  # fmt: skip


def growth_markdown(result: dict[str, Any]) -> str:
    """The header lines and the table of growth."""
    head = ("Axis", "Value", "Step (s)", "Relative", "Temp (MB)", "Relative", "Page faults")
    lines = [
        [row["axis"].replace("_", " "), str(row["value"]), spread(row["step"]), f"{row['relative']:.2f}x",
         f"{row['temp_bytes'] / 1e6:.0f}", f"{row['relative_temp']:.2f}x", f"{row['page_faults']['median']:.0f}"]
        for row in result["rows"]
    ]  # fmt: skip
    facts = (
        f"machine: {listed(result['machine'])}",
        f"base: {listed(result['base'])}; {result['warmup']} warm-up and {result['steps']} measured steps",
    )
    return page(f"Growth of the SLPO step, {result['shapes']} shapes", facts, GROWTH_DEFINITIONS, head, lines)


def _pair(text: str) -> tuple[int, int]:
    try:
        passes, group = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not two numbers; give K,G, e.g. 4,8") from None
    return passes, group


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("step", "Time of an SLPO step.", SHAPES)
    parser.add_argument("--prompts", type=int, help="prompts a step; default: 32, or 2 of gpt2")
    parser.add_argument("--steps", type=int, default=8, help="measured steps; default: 8")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them; default: 2; the first is slow")
    parser.add_argument("--only", type=_pair, nargs="+", metavar="K,G", default=list(CONFIGURATIONS),
                        help="configurations; default: the paper's four")  # fmt: skip
    parser.add_argument("--torch", choices=("fastest", "eager", "prompt by prompt", "compiled", "none"),
                        default="fastest", help="variant of the PyTorch reference; default: the fastest")  # fmt: skip
    parser.add_argument(
        "--micro_batches", type=int, default=1, help="of slpo_jax's step; above 1 only rollout and step are timed"
    )
    parser.add_argument("--torch_micro_batches", type=int, default=1, help="of torch's step")
    parser.add_argument("--growth", nargs="+", choices=AXES["gpt2"], metavar="AXIS",
                        help=f"slpo_jax's step along axes instead, of {', '.join(AXES['gpt2'])}")  # fmt: skip
    flags = parser.parse_args(argv)
    tables = ("prompts", "only", "torch", "micro_batches", "torch_micro_batches")
    unused = [name for name in tables if getattr(flags, name) != parser.get_default(name)]
    if flags.growth and unused:
        raise UserError(f"--growth: it has no --{unused[0]}; leave one of the two out")
    if flags.prompts is None:
        flags.prompts = SHAPES[flags.shapes].prompts
    check_flags(flags, prompts=1, steps=1, warmup=0, micro_batches=1, torch_micro_batches=1)
    if not flags.growth:
        check_torch(flags)
    if any(passes < 1 or group < 2 for passes, group in flags.only):
        raise UserError("--only: K must be 1 or more and G 2 or more, e.g. --only 4,8 8,8")
    return flags


def check_parts(flags: argparse.Namespace, devices: int) -> None:
    """Raises a UserError if the prompts can't be cut into the micro-batches that were asked for."""
    parts = {"micro_batches": devices * flags.micro_batches, "torch_micro_batches": flags.torch_micro_batches}
    for name, count in parts.items():
        if flags.prompts % count:
            raise UserError(f"--{name}: {flags.prompts} prompts don't make {count} equal parts; give another number")


def benchmark(shapes: Shapes, config, flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    if flags.growth:
        return growth(shapes, config, flags)
    with tempfile.TemporaryDirectory() as workdir:
        work = make_workload(shapes, config, flags.prompts, Path(workdir))
        check_parts(flags, work.mesh.size)
        rows, tried = measure(work, flags)
    add_relative(rows)
    paper = [_row_of_the_paper(pair) for pair in flags.only if flags.shapes == "gpt2" and pair in PAPER]
    facts = {"micro_batches": flags.micro_batches, "torch_micro_batches": flags.torch_micro_batches}
    return {"shapes": flags.shapes, "warmup": flags.warmup, "steps": flags.steps, "machine": machine(),
            "work": work.facts | facts, "definitions": DEFINITIONS, "torch_tried": tried, "rows": rows,
            "paper": paper}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, on_shapes(SHAPES, benchmark), markdown)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.step [--shapes gpt2|graph] [--prompts N] [--json FILE]`.

The paper's table of computational cost (table 5): seconds of an SLPO step for several (K, G), split into rollout,
surrogate and backward, for slpo_jax and for a program in PyTorch (`benchmarks.witness`) on the same work. Prints
Markdown; `--json` writes every number behind it.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure.ours import PROGRAMS, Ours
from benchmarks.measure.report import (
    Parser,
    check_flags,
    format_facts,
    machine,
    markdown_table,
    on_shapes,
    run_command,
    spread,
    summary,
)
from benchmarks.measure.theirs import Torch, make_witness
from benchmarks.measure.workload import SHAPES, Workload, make_workload
from slpo_jax.errors import UserError

CONFIGURATIONS = ((1, 8), (4, 8), (8, 8), (4, 4))  # (K, G), the paper's
BASE = (4, 8)  # what relative times refer to
PARTS = ("rollout", "surrogate", "backward", "other")
DEFINITIONS = """
rollout: sample and verify G trajectories a prompt
surrogate: forward pass of the loss on those trajectories (K scoring passes, moments, log-likelihoods)
backward: of that loss; for slpo_jax the seconds of value and gradient, less the surrogate
step: the whole train step; other: step less the three parts (optimizer; for torch also verification and clipping)
seconds: median (least-most) over the measured steps; slpo_jax's parts are timed as programs of their own, its step as \
the one jitted step; configurations and implementations take turns, on the same prompts
torch: benchmarks/witness, one process on the same device with the threads named above, on trajectories of \
the same lengths; nothing shared between a prompt's trajectories, sequences trimmed to the longest
ratio: torch's step over slpo_jax's, median (least-most) over the steps
rel.: median step over that of K, G = 4, 8 of the same implementation; sur./step: median surrogate over median step
traj./s: prompts x G over the step's seconds
tokens/s: (generated + scored) over the step's seconds; generated: latents and answer tokens of the rollouts, scored: \
K x generated; prompt tokens and unused slots are not counted
compile seconds: tracing, lowering and XLA, without a persistent cache; rollouts of one G share a program
weights: random; the gate's are 0, with a bias that makes the mean trajectory T/2 latents long (the paper's stop at \
about 6 of 12; the longest of a batch ends the loop); eos is forced where a trained reasoner's answer ends, as random \
weights never say it; every second reward is set to 1, as otherwise all gradients would be 0
""".strip().splitlines()


def measure(work: Workload, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of numbers a configuration and implementation."""
    quiet = not sys.stderr.isatty()
    rollouts = {}
    ours = [
        Ours(work, *pair, rollouts)
        for pair in tqdm(flags.only, "compile", disable=quiet)
    ]
    candidates: list[Ours | Torch] = list(ours)
    if flags.torch != "none":
        witness = make_witness(work, flags.torch == "compiled")
        theirs = [Torch(witness, work, *pair) for pair in flags.only]
        candidates = []
        for pair in zip(ours, theirs, strict=True):
            candidates += pair
    measured: list[list[dict[str, float]]] = [[] for _ in candidates]
    for step in tqdm(range(flags.warmup + flags.steps), "measure", disable=quiet):
        for before, rows, candidate in zip(
            [None, *candidates], measured, candidates, strict=False
        ):
            if isinstance(candidate, Torch):
                candidate.lengths = before.lengths
            rows.append(candidate.measure(work, step))
    return [
        _row(*found, flags.warmup) for found in zip(candidates, measured, strict=True)
    ]


def _row(
    candidate: Any, measured: list[dict[str, float]], warmup: int
) -> dict[str, Any]:
    row = {
        name: getattr(candidate, name)
        for name in ("implementation", "passes", "group", "compile_seconds")
    }
    for name in measured[0]:
        row[name] = summary([step[name] for step in measured[warmup:]])
    row["surrogate_share"] = row["surrogate"]["median"] / row["step"]["median"]
    return row


def add_relative(rows: list[dict[str, Any]]) -> None:
    """`relative`, the median step over that of `BASE`, and for torch `ratio_vs_torch`, its step over ours."""

    def of(pair, implementation):
        found = [
            row
            for row in rows
            if (row["passes"], row["group"], row["implementation"])
            == (*pair, implementation)
        ]
        return found[0]["step"] if found else None

    for row in rows:
        base = of(BASE, row["implementation"])
        row["relative"] = row["step"]["median"] / base["median"] if base else None
        ours, theirs = (
            of((row["passes"], row["group"]), name)
            for name in (Ours.implementation, Torch.implementation)
        )
        if ours and theirs:
            row["ratio_vs_torch"] = summary(
                [b / a for a, b in zip(ours["values"], theirs["values"], strict=True)]
            )


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the tables."""
    head = [
        "",
        "K",
        "G",
        "Step (s)",
        "Rel.",
        *(f"{name.capitalize()} (s)" for name in PARTS),
        "Sur./step",
        "Ratio",
    ]
    timings = []
    compiles = []
    for row in result["rows"]:
        pair = [str(row["passes"]), str(row["group"])]
        step, *parts = (spread(row[name]) for name in ("step", *PARTS))
        relative = f"{row['relative']:.2f}x" if row["relative"] else ""
        more = ["", "", ""]
        if row["implementation"] == Ours.implementation:
            ratio = (
                spread(row["ratio_vs_torch"], digits=2)
                if "ratio_vs_torch" in row
                else ""
            )
            more = [
                ratio,
                *(
                    f"{row[f'{name}_per_second']['median']:.3g}"
                    for name in ("trajectories", "tokens")
                ),
            ]
            compiles.append(
                [*pair, *(f"{row['compile_seconds'][name]:.1f}" for name in PROGRAMS)]
            )
        timings.append(
            [
                row["implementation"],
                *pair,
                step,
                relative,
                *parts,
                f"{row['surrogate_share']:.0%}",
                *more,
            ]
        )
    found = result["rows"][0]
    means = ("mean_latents", "longest_latents", "mean_answer_tokens")
    lengths = {name: round(found[name]["median"], 2) for name in means}
    return "\n".join([
        f"# One SLPO step, {result['shapes']} shapes",
        f"- machine: {format_facts(result['machine'])}",
        f"- work: {format_facts(result['work'])}; {result['warmup']} warm-up and {result['steps']} measured steps",
        f"- rollouts at K, G = {found['passes']}, {found['group']} (medians over steps): {format_facts(lengths)}",
        *(f"- {line}" for line in DEFINITIONS),
        "", *markdown_table([*head, "Traj./s", "Tokens/s"], timings),
        "", *markdown_table(["K", "G", *(f"Compile {name} (s)" for name in PROGRAMS)], compiles),
    ])  # fmt: skip


def _pair(text: str) -> tuple[int, int]:
    try:
        passes, group = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is not two numbers; give K,G, e.g. 4,8"
        ) from None
    return passes, group


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("step", "Time of an SLPO step.", SHAPES)
    parser.add_argument(
        "--prompts", type=int, help="prompts a step; default: 32, or 2 of gpt2"
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="measured steps; default: 8"
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=2,
        help="steps before them; default: 2; the first is slow",
    )
    parser.add_argument("--only", type=_pair, nargs="+", metavar="K,G", default=list(CONFIGURATIONS),
                        help="configurations; default: the paper's four")  # fmt: skip
    parser.add_argument("--torch", choices=("eager", "compiled", "none"), default="eager",
                        help="the program in PyTorch; default: eager")  # fmt: skip
    flags = parser.parse_args(argv)
    if flags.prompts is None:
        flags.prompts = SHAPES[flags.shapes].prompts
    check_flags(flags, prompts=1, steps=1, warmup=0)
    if any(passes < 1 or group < 2 for passes, group in flags.only):
        raise UserError(
            "--only: K must be 1 or more and G 2 or more, e.g. --only 4,8 8,8"
        )
    return flags


def benchmark(shapes: Any, config: Any, flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    with tempfile.TemporaryDirectory() as workdir:
        work = make_workload(shapes, config, flags.prompts, Path(workdir))
        rows = measure(work, flags)
    add_relative(rows)
    return {"shapes": flags.shapes, "warmup": flags.warmup, "steps": flags.steps, "machine": machine(),
            "work": work.facts, "rows": rows}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, on_shapes(SHAPES, benchmark), markdown)


if __name__ == "__main__":
    main()

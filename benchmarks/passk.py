"""`python -m benchmarks.passk [--shapes gpt2|graph] [--problems N] [--json FILE]`; more flags with `--help`.

Batched Pass@k evaluation: problems a second with k rollouts each under MC-dropout, for slpo_jax's `Evaluator` and for
the PyTorch reference (`benchmarks.witness`) on the same work. Prints Markdown; `--json` writes every number behind it.
"""

import argparse
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.measure.passk_work import SHAPES, PasskShapes, Work, facts_of, make_work
from benchmarks.measure.report import (
    Parser,
    check_flags,
    format_facts,
    machine,
    on_shapes,
    page,
    run_command,
    spread,
    summary,
)
from benchmarks.measure.theirs import witness_of
from benchmarks.measure.workload import make_parts
from slpo_jax.errors import UserError

OURS = "slpo_jax"
TORCH = {  # name -> sorted, compiled
    "torch, file's order": (False, False),
    "torch, sorted by length": (True, False),
    "torch, sorted and compiled": (True, True),
}
THRESHOLD = 2.0  # no probability of a stop reaches it
DEFINITIONS = f"""
seconds: wall time of one evaluation of all problems, from lists of token ids to arrays of answers on the host, median \
(least-most) over the measured rounds; in a round the implementations take turns, after one warm-up round
slpo_jax: Evaluator.run, as training's own evaluation calls it; torch: Witness.passk of benchmarks/witness, \
eager or under torch.compile, one process on the same device with the threads named above, every batch padded to its \
longest prompt, in the file's order and sorted by length
ratio: seconds over slpo_jax's of the same round, median (least-most)
compile: slpo_jax's first evaluation less the median later one, all its programs, without a persistent cache
latents: of each rollout, least-most; the gate is evaluated, against a threshold of {THRESHOLD:g} that no probability \
reaches
answer tokens: of each rollout, eos included, least-most; eos is forced where a trained reasoner's answer ends, as \
random weights never say it
""".strip().splitlines()


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What one run over all problems took and produced, in the order problem 0 sample 0, problem 0 sample 1, ...

    Attributes:
        tokens: int [N, A], up to and including eos, then pad.
        latent_steps: int [N].
    """

    seconds: float
    tokens: np.ndarray
    latent_steps: np.ndarray


Run = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""Dropout seed -> (tokens, latent_steps) of an `Evaluation`."""


def make_runs(work: Work, torch: str) -> dict[str, Run]:
    """What takes turns, by the implementation's name.

    Args:
        torch: "eager", "compiled" (eager too) or "none".
    Raises:
        UserError: there is no torch, or no compiler for it.
    """
    experiment = work.experiment
    samples = work.samples
    evaluator = experiment.evaluator

    def ours(seed):
        done = evaluator.run(
            work.params,
            work.problems,
            "threshold",
            THRESHOLD,
            seed=seed,
            samples=samples,
            label=OURS,
        )
        return done["tokens"], done["latent_steps"]

    runs = {OURS: ours}
    if torch == "none":
        return runs
    parts = dataclasses.replace(make_parts(experiment), policy=evaluator.policy)
    prompt_rows = [np.array(prompt) for prompt in work.problems.prompts]
    batch_size = experiment.config.evaluate.batch_size

    @functools.cache
    def witness(is_compiled):
        learning = experiment.optimizer_config("rl", experiment.config.rl.steps)
        made = witness_of(parts, work.params, learning, work.answer_tokens - 1)
        if is_compiled:
            try:
                made.compile_rollouts()
                made.passk(prompt_rows[:1], 1, 1, THRESHOLD)
            except Exception as error:  # it fails in its own ways
                reason = str(error).strip().partition("\n")[0]
                raise UserError(
                    f"--torch compiled: {reason}; give --torch eager"
                ) from error
        return made

    def theirs(is_sorted, is_compiled, _seed):
        tokens_PKA, latents_PK = witness(is_compiled).passk(
            prompt_rows, samples, batch_size, THRESHOLD, sort_by_length=is_sorted
        )
        return tokens_PKA.reshape(-1, tokens_PKA.shape[-1]), latents_PK.reshape(-1)

    variants = {
        name: flags
        for name, flags in TORCH.items()
        if torch == "compiled" or not flags[1]
    }
    for _, is_compiled in variants.values():
        witness(is_compiled)
    return runs | {
        name: functools.partial(theirs, *flags) for name, flags in variants.items()
    }


def measure(runs: dict[str, Run], rounds: int) -> dict[str, list[Evaluation]]:
    """Evaluations of each run, one a round, the warm-up round first."""
    measured: dict[str, list[Evaluation]] = {name: [] for name in runs}
    for seed in tqdm(range(1 + rounds), "rounds", disable=not sys.stderr.isatty()):
        for name, run in runs.items():
            start = time.perf_counter()
            tokens, latent_steps = run(seed)
            measured[name].append(
                Evaluation(time.perf_counter() - start, tokens, latent_steps)
            )
    return measured


def make_rows(
    measured: dict[str, list[Evaluation]], problems: int, samples: int, eos_id: int
) -> list[dict[str, Any]]:
    """Numbers of each implementation, from `measure`; the others' ratio is to ours."""
    rows = []
    ours = [each.seconds for each in measured[OURS][1:]]
    for name, (first, *later) in measured.items():
        seconds = [each.seconds for each in later]
        row: dict[str, Any] = {
            "implementation": name,
            "seconds": summary(seconds),
            "problems_per_second": summary([problems / spent for spent in seconds]),
            "rollouts_per_second": summary(
                [problems * samples / spent for spent in seconds]
            ),
            "latents": _ends([each.latent_steps for each in later]),
            "answer_tokens": _ends(
                [answer_lengths(each.tokens, eos_id) for each in later]
            ),
            "first_seconds": first.seconds,
        }
        if name == OURS:
            row["compile_seconds"] = first.seconds - row["seconds"]["median"]
        else:
            row["ratio_vs_torch"] = summary(
                [b / a for a, b in zip(ours, seconds, strict=True)]
            )
        rows.append(row)
    return rows


def answer_lengths(tokens_NA: np.ndarray, eos_id: int) -> np.ndarray:
    """Tokens up to and including eos, int [N]; A without one."""
    ends_NA = tokens_NA == eos_id
    return np.where(ends_NA.any(1), ends_NA.argmax(1) + 1, tokens_NA.shape[1])


def _ends(arrays: list[np.ndarray]) -> list[int]:
    return [int(np.min(arrays)), int(np.max(arrays))]


def benchmark(shapes: PasskShapes, config, flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    if flags.batch_size is not None:
        config.evaluate.batch_size = flags.batch_size
    with tempfile.TemporaryDirectory() as workdir:
        work = make_work(shapes, config, flags.problems, flags.samples, Path(workdir))
        runs = make_runs(work, flags.torch)
        measured = measure(runs, flags.rounds)
    rows = make_rows(
        measured, flags.problems, flags.samples, work.experiment.template.eos_id
    )
    return {"shapes": flags.shapes, "rounds": flags.rounds, "machine": machine(), "work": facts_of(work),
            "rows": rows}  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the table."""
    head = (
        "",
        "Problems/s",
        "Rollouts/s",
        "Seconds",
        "Ratio",
        "Compile (s)",
        "Latents",
        "Answer tokens",
    )
    lines = [
        [row["implementation"], *(spread(row[name], 2) for name in ("problems_per_second", "rollouts_per_second")),
         spread(row["seconds"]), spread(row["ratio_vs_torch"], 2) if "ratio_vs_torch" in row else "",
         f"{row['compile_seconds']:.1f}" if "compile_seconds" in row else "",
         *("{}-{}".format(*row[name]) for name in ("latents", "answer_tokens"))]
        for row in result["rows"]
    ]  # fmt: skip
    facts = (
        f"machine: {format_facts(result['machine'])}",
        f"work: {format_facts(result['work'])}; 1 warm-up and {result['rounds']} measured rounds",
    )
    title = f"Pass@{result['work']['k']} evaluation, {result['shapes']} shapes"
    return page(title, facts, DEFINITIONS, head, lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("passk", "Speed of Pass@k evaluation.", SHAPES)
    parser.add_argument("--problems", type=int, help="default: 1000, or 16 of gpt2")
    parser.add_argument(
        "--samples", type=int, default=16, help="k, rollouts a problem; default: 16"
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        help="rollouts at a time; default: 1024, or 128 of gpt2",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="measured rounds, after one of warm-up; default: 3",
    )
    parser.add_argument("--torch", choices=("eager", "compiled", "none"), default="eager",
                        help="compiled: torch.compile too; default: eager")  # fmt: skip
    flags = parser.parse_args(argv)
    if flags.problems is None:
        flags.problems = SHAPES[flags.shapes].prompts
    check_flags(flags, problems=1, samples=1, rounds=1, batch_size=1)
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, on_shapes(SHAPES, benchmark), markdown)


if __name__ == "__main__":
    main()

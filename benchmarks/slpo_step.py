"""`python -m benchmarks.slpo_step [--shapes quickstart|gpt2] [--prompts N] [--steps 8] [--warmup 2] [--json FILE]`.

The paper's table of computational cost (appendix, "Computational Cost Analysis") for our SLPO step: seconds of rollout,
surrogate and backward for several (K, G). Prints a Markdown table; `--json` writes every number behind it.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from tqdm import tqdm

from benchmarks.report import Parser, machine, markdown_table
from benchmarks.workload import SHAPES, TRAINED, Shapes, Workload, load_config, make_workload
from slpo_jax.errors import UserError
from slpo_jax.evaluation.records import write_text
from slpo_jax.policy import noise
from slpo_jax.policy.surrogate import answer_mask
from slpo_jax.training import slpo
from slpo_jax.training.state import AXIS, make_train_step, replicate

CONFIGURATIONS = ((1, 8), (4, 8), (8, 8), (4, 4))  # (K, G), the paper's
BASE = (4, 8)  # what relative times refer to
PAPER = "paper, 2 prompts, RTX 5880 Ada: step 0.624, 1.130, 2.021, 0.676 s (relative 0.55, 1.00, 1.79, 0.60)"
PROGRAMS = ("rollout", "surrogate", "gradient", "step")
DEFINITIONS = """
rollout: sample and verify G trajectories a prompt
surrogate: forward pass of the loss on those trajectories (K scoring passes, moments, log-likelihoods)
backward: value and gradient of that loss, less the surrogate
step: the whole jitted train step; other: step less the three parts (optimizer update; what one program saves)
seconds: median (least-most) over the measured steps; each program alone, until its outputs are ready; the K, G take \
turns, on the same prompts and keys
rel.: median step over that of K, G = 4, 8; sur./step: median surrogate over median step
traj./s: prompts x G over the step's seconds
tokens/s: (generated + scored) over the step's seconds; generated: latents and answer tokens of the rollouts, scored: \
K x generated; prompt tokens and unused slots are not counted
compile seconds: tracing, lowering and XLA, without a persistent cache; rollouts of one G share a program
weights: random; the gate's are 0, with a bias that makes the mean trajectory T/2 latents long (the paper's stop at \
about 6 of 12; the longest of a batch ends the loop); eos is forced where a trained reasoner's answer ends, as random \
weights never say it; every second reward is set to 1, as otherwise all gradients would be 0
""".strip().splitlines()


class Candidate:
    """Our step at one (K, G): its four programs, compiled, and how long that took.

    Attributes:
        compile_seconds: by name in `PROGRAMS`.
    """

    implementation = "slpo_jax"

    def __init__(self, work: Workload, passes: int, group: int, rollouts: dict[int, tuple[Any, float]]):
        """Compiles; `rollouts` keeps the rollout program of each G and its seconds, as it does not depend on K."""
        self.passes, self.group, seconds = passes, group, {}
        parts = dataclasses.replace(
            work.parts, config=dataclasses.replace(work.parts.config, passes=passes, group=group)
        )
        rollout, surrogate, gradient = _part_programs(parts, work.mesh)
        step = make_train_step(slpo.make_loss(parts), work.optimizer, TRAINED, work.mesh, "slpo")
        params, batch, key = work.state.params, work.batch(0), step_key(work, 0)
        if group not in rollouts:
            rollouts[group] = _compiled(rollout, params, batch, key)
        self.rollout, seconds["rollout"] = rollouts[group]
        sampled = self.rollout(params, batch, key)
        self.surrogate, seconds["surrogate"] = _compiled(surrogate, params, batch, *sampled, key)
        self.gradient, seconds["gradient"] = _compiled(gradient, params, batch, *sampled, key)
        self.step, seconds["step"] = _compiled(step, work.state, batch)
        self.compile_seconds: dict[str, float] = seconds

    def measure(self, work: Workload, step: int) -> dict[str, float]:
        """Seconds of each program in one step, which advances work.state, and what its rollouts were like."""
        batch, key, params = work.batch(step), step_key(work, step), work.state.params
        seconds: dict[str, float] = {}
        sampled = _timed(seconds, "rollout", self.rollout, params, batch, key)
        _timed(seconds, "surrogate", self.surrogate, params, batch, *sampled, key)
        _timed(seconds, "gradient", self.gradient, params, batch, *sampled, key)
        del params  # the step donates them
        state = work.state.replace(step=replicate(jnp.int32(step), work.mesh))
        work.state, _ = _timed(seconds, "step", self.step, state, batch)
        seconds["backward"] = seconds.pop("gradient") - seconds["surrogate"]
        seconds["other"] = seconds["step"] - seconds["rollout"] - seconds["surrogate"] - seconds["backward"]
        lengths = np.asarray(sampled[0].lengths)
        answers = np.asarray(answer_mask(sampled[0].tokens, work.parts.rollout_config.eos_id).sum(axis=1))
        tokens = (1 + self.passes) * int(lengths.sum() + answers.sum())
        return seconds | {
            "trajectories_per_second": len(lengths) / seconds["step"],
            "tokens_per_second": tokens / seconds["step"],
            "mean_latents": float(lengths.mean()),
            "longest_latents": float(lengths.max()),
            "mean_answer_tokens": float(answers.mean()),
        }


def _compiled(function, *args) -> tuple[Any, float]:
    """The program for these arguments, and the seconds that it took to make."""
    start = time.perf_counter()
    program = function.lower(*args).compile()
    return program, time.perf_counter() - start


def _part_programs(parts: slpo.Slpo, mesh):
    """(rollout, surrogate, gradient), sharded as the train step is."""
    rows, same = PartitionSpec(AXIS), PartitionSpec()

    def sharded(function, ins, outs):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))

    def loss(params, batch, trajectories, rewards, key):
        return slpo.loss_of_trajectories(parts, params, batch, trajectories, rewards, key)[0]

    fixed = (same, rows, rows, rows, same)
    return (
        sharded(lambda params, batch, key: slpo.sample(parts, params, batch, key), (same, rows, same), rows),
        sharded(lambda *args: jax.lax.psum(loss(*args), AXIS), fixed, same),
        sharded(lambda *args: jax.lax.psum(jax.value_and_grad(loss)(*args), AXIS), fixed, same),
    )


def step_key(work: Workload, step: int):
    """The key that the train step makes for itself."""
    return replicate(noise.stream_key(work.state.key, "slpo", step), work.mesh)


def _timed(seconds: dict[str, float], name: str, function, *args):
    start = time.perf_counter()
    out = jax.block_until_ready(function(*args))
    seconds[name] = time.perf_counter() - start
    return out


def measure(work: Workload, warmup: int, steps: int) -> list[dict[str, Any]]:
    """A row of numbers a configuration: medians, least, most and all values of what `Candidate.measure` gives."""
    quiet = not sys.stderr.isatty()
    pairs = tqdm(CONFIGURATIONS, "compile", disable=quiet)
    rollouts: dict[int, tuple[Any, float]] = {}
    candidates = [Candidate(work, passes, group, rollouts) for passes, group in pairs]
    measured: list[list[dict[str, float]]] = [[] for _ in candidates]
    for step in tqdm(range(warmup + steps), "measure", disable=quiet):
        for rows, candidate in zip(measured, candidates, strict=True):
            rows.append(candidate.measure(work, step))
    return [_row(candidate, rows[warmup:]) for candidate, rows in zip(candidates, measured, strict=True)]


def _row(candidate: Candidate, measured: list[dict[str, float]]) -> dict[str, Any]:
    row = {name: getattr(candidate, name) for name in ("implementation", "passes", "group", "compile_seconds")}
    for name in measured[0]:
        values = [step[name] for step in measured]
        row[name] = {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}
    row["surrogate_share"] = row["surrogate"]["median"] / row["step"]["median"]
    return row


def add_relative(rows: list[dict[str, Any]]) -> None:
    """Each row's median step over that of `BASE` of the same implementation, as `relative`."""
    base = {row["implementation"]: row["step"]["median"] for row in rows if (row["passes"], row["group"]) == BASE}
    for row in rows:
        row["relative"] = row["step"]["median"] / base[row["implementation"]]


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the tables."""

    def listed(facts):
        return "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())

    def spread(cell):
        return f"{cell['median']:.3f} ({cell['min']:.3f}-{cell['max']:.3f})"

    parts = ("step", "rollout", "surrogate", "backward", "other")
    head = ["K", "G", "Step (s)", "Rel.", *(f"{name.capitalize()} (s)" for name in parts[1:]), "Sur./step"]
    timings, compiles = [], []
    for row in result["rows"]:
        pair = [str(row["passes"]), str(row["group"])]
        cells = [spread(row[name]) for name in parts]
        rates = [f"{row[name]['median']:.0f}" for name in ("trajectories_per_second", "tokens_per_second")]
        relative, share = f"{row['relative']:.2f}x", f"{row['surrogate_share']:.0%}"
        timings.append([*pair, cells[0], relative, *cells[1:], share, *rates])
        compiles.append([*pair, *(f"{row['compile_seconds'][name]:.1f}" for name in PROGRAMS)])
    found = result["rows"][0]
    lengths = {
        name: round(found[name]["median"], 2) for name in ("mean_latents", "longest_latents", "mean_answer_tokens")
    }
    return "\n".join([
        f"# One SLPO step, {result['shapes']} shapes",
        f"- machine: {listed(result['machine'])}",
        f"- work: {listed(result['work'])}; {result['warmup']} warm-up and {result['steps']} measured steps",
        f"- rollouts at K, G = {found['passes']}, {found['group']} (medians over steps): {listed(lengths)}",
        *(f"- {line}" for line in result["definitions"]),
        "", *markdown_table([*head, "Traj./s", "Tokens/s"], timings),
        "", *markdown_table(["K", "G", *(f"Compile {name} (s)" for name in PROGRAMS)], compiles),
    ])  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser(prog="python -m benchmarks.slpo_step", description="Time of an SLPO step.", allow_abbrev=False)
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="quickstart", help="default: quickstart")
    parser.add_argument("--prompts", type=int, help="prompts a step; default: 16 (quickstart), 2 (gpt2)")
    parser.add_argument("--steps", type=int, default=8, help="measured steps; default: 8")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them; default: 2")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    flags = parser.parse_args(argv)
    if flags.prompts is None:
        flags.prompts = SHAPES[flags.shapes].prompts
    for name, least in (("prompts", 1), ("steps", 1), ("warmup", 0)):
        if getattr(flags, name) < least:
            raise UserError(f"--{name}: {getattr(flags, name)} is too few; give at least {least}")
    if flags.json and (flags.json.is_dir() or not flags.json.parent.is_dir()):
        raise UserError(f"--json: {flags.json} can't be written; give a file in a folder that exists")
    return flags


def benchmark(name: str, shapes: Shapes, config, prompts: int, warmup: int, steps: int) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    with tempfile.TemporaryDirectory() as workdir:
        work = make_workload(shapes, config, prompts, Path(workdir))
        rows = measure(work, warmup, steps)
    add_relative(rows)
    definitions = [*DEFINITIONS, *([PAPER] if name == "gpt2" else [])]
    return {"shapes": name, "warmup": warmup, "steps": steps, "machine": machine(), "work": work.facts,
            "definitions": definitions, "rows": rows}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """The command: one line and status 2 for what the user can mend."""
    try:
        flags = parse(argv)
        shapes = SHAPES[flags.shapes]
        config = load_config(shapes)
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
        jax.config.update("jax_enable_compilation_cache", False)
        result = benchmark(flags.shapes, shapes, config, flags.prompts, flags.warmup, flags.steps)
        if flags.json:
            write_text(flags.json, json.dumps(result, indent=1) + "\n")
        print(markdown(result))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

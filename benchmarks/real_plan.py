"""What `benchmarks/real.py` runs: CODI on SmolLM2-135M and GSM8K's own training set, in few programs, all counted.

There is one bucket of prompts, one capacity and one set to evaluate, which is three published ones end to end.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measure.compiled import device_memory
from benchmarks.measure.products import products
from benchmarks.measure.programs import Program, cold_starts, imitation, objectives, rollouts
from benchmarks.measure.workload import ROOT
from slpo_jax.config import default_config, objective_variant
from slpo_jax.data.problems import load_problems
from slpo_jax.errors import UserError
from slpo_jax.io import artifact
from slpo_jax.io.files import read_json, write_text
from slpo_jax.io.workdir import Workdir
from slpo_jax.policy.policy import Stopping
from slpo_jax.run import imitate
from slpo_jax.run.setup import Setup

TRAIN, VALID = "gsm8k_train.jsonl", "gsm_valid.json"
SETS = {"gsm8k": "gsm_test.json", "multiarith": "multiarith.json", "svamp": "svamp.json"}
TESTS = "tests"  # the three, end to end
OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "control": ("pathwise", {"estimator": "mixture", "mixture_weight": 0.0}),  # the answers' likelihood, no reward
    "slpo": ("slpo", {"latent_reduction": "mean"}),
    "answer_only": ("answer_only", {}),
    "pathwise": ("pathwise", {}),
}
COUNTED = ROOT / "results/real_budget.json"
PEAK, SHARE = 790.0, 0.3  # TFLOP/s of an H100 in bfloat16, and how much of that is counted on
TINY: dict[str, Any] = {
    "max_latents": 2, "max_answer_tokens": 32, "model.dtype": "float32", "model.scan_layers": True,
    "imitate.batch_size": 4, "imitate.c_thought": 1, "imitate.max_latent_stage": 2, "imitate.max_tokens": 400,
    "imitate.cot_steps": 4, "imitate.final_steps": 4, "imitate.optimizer.warmup_steps": 1,
    "cold_start.batch_size": 4, "cold_start.steps": 2, "cold_start.evaluate_every": 2, "rl.batch_size": 4,
    "rl.group": 2, "rl.steps": 3, "rl.optimizer.warmup_steps": 1, "objective.slpo.passes": 2,
    "evaluate.batch_size": 32, "evaluate.limit": 12, "log_every": 1, "checkpoint_every": 2,
}  # fmt: skip
RANDOM: dict[str, Any] = {  # where there are no weights to be tiny with
    "tokenizer": "bytes", "model.n_layer": 1, "model.n_head": 2, "model.n_embd": 16, "model.n_positions": 1536,
    "prompt_slots": (1024,), "evaluate.prompt_multiple": 1024,
}  # fmt: skip


def get_config(given: str):
    """The run's config.

    Args:
        given: JSON of init (SmolLM2's file, or "" for random weights), train, valid and tests (files), tiny, and
            micro_batches, which cut every program's batch.
    """
    asked = json.loads(given)
    config = default_config()
    config.reasoner, config.init = "codi_llama", asked["init"]
    config.update(max_latents=6, min_latents=1, prompt_slots=(224,), max_answer_tokens=24)
    config.data.train, config.data.valid, config.data.eval[TESTS] = asked["train"], asked["valid"], asked["tests"]
    config.imitate.update(
        batch_size=128, c_thought=2, max_latent_stage=3, final_latents="published", max_tokens=256, cot_steps=110,
        final_steps=220,
    )  # fmt: skip
    config.imitate.optimizer.update(learning_rate=3e-4, warmup_steps=20, schedule="cosine", final_fraction=0.1)
    config.cold_start.update(batch_size=64, steps=60, evaluate_every=30, patience=2)
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-3)
    config.rl.update(batch_size=32, steps=150, capacities=((1.0, 1.0),), objectives=tuple(OBJECTIVES))
    config.rl.optimizer.update(name="adafactor", learning_rate=1e-5, warmup_steps=10)
    for name, (kind, settings) in OBJECTIVES.items():
        objective_variant(config, name, kind, **settings)
    config.evaluate.update(batch_size=1024, prompt_multiple=224, samples=16, seeds=1, thresholds=(0.5,), probed=0)
    config.update(trackers=(), log_every=10, checkpoint_every=50)
    if asked["tiny"]:
        config.update_from_flattened_dict(TINY | ({} if asked["init"] else RANDOM))
    for stage in ("imitate", "cold_start", "rl"):
        config[stage].micro_batches = asked["micro_batches"]
    config.evaluate.batch_size //= asked["micro_batches"]
    return config


# --- The three sets as one, and apart again.


def check_data(train: Path) -> list[Path]:
    """The data files: the training set, and the others beside it.

    Raises:
        UserError: one is missing.
    """
    files = [train, *(train.parent / name for name in (VALID, *SETS.values()))]
    for path in files:
        if not path.is_file():
            raise UserError(f"--train: {path}: no such file; give GSM8K's {TRAIN}, and put the other sets beside it")
    return files


def check_memory(here: int, micro_batches: int) -> None:
    """Refuse a card that the counted programs don't fit in, before anything is compiled.

    Args:
        here: bytes of it that programs can use; 0: not known.
    Raises:
        UserError: with what would fit.
    """
    rows = read_json(COUNTED)["tables"]["one H100"]["rows"]
    sizes = [row[5:7] for row in rows if row[6]]

    def needed(parts: int) -> float:
        return max(state + (memory - state) / parts for state, memory in sizes)

    if here and needed(micro_batches) * 1e9 > here:
        fits = [parts for parts in (2, 4, 8, 16, 32) if parts > micro_batches and needed(parts) * 1e9 <= here]
        remedy = f"give --micro_batches={fits[0]}" if fits else f"take a card of {needed(32) / 0.9:.0f} GB or more"
        raise UserError(f"--micro_batches: {micro_batches} needs {needed(micro_batches):.1f} GB of a card, of which "
                        f"programs can use {here / 1e9:.1f} here; {remedy}")  # fmt: skip


def join_sets(folder: Path, target: Path, most: int = 0) -> dict[str, tuple[int, int]]:
    """Write the test sets one after the other.

    Args:
        most: problems of each; 0 is all.
    Returns:
        first problem, and the one after the last, by set.
    Raises:
        UserError: one is missing, or can't be read.
    """
    lines: list[str] = []
    spans = {}
    for name, file in SETS.items():
        problems = load_problems(str(folder / file), default_config().data.synthetic, "test")
        first = len(lines)
        for problem in problems[: most or None]:
            known = {"question": problem.question, "answer": problem.answer}
            lines.append(json.dumps(known | ({"steps": list(problem.steps)} if problem.steps else {})))
        spans[name] = (first, len(lines))
    text = "".join(f"{line}\n" for line in lines)
    if not target.exists() or target.read_text(encoding="utf-8") != text:
        write_text(target, text)
    return spans


def part_sets(workdir: Workdir, apart: Workdir, spans: Mapping[str, tuple[int, int]]) -> int:
    """Write the whole evaluations that a workdir has, set by set, where a report can be made of them; their number."""
    found = 0
    for row, name in workdir.evaluated():
        files, manifest = workdir.set_files(name, row), artifact.read(workdir.set_files(name, row).manifest)
        if manifest is None or artifact.changed(files.folder, manifest.files):
            continue
        found += 1
        lines = files.records.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(apart.row_facts(row), workdir.row_facts(row).read_text(encoding="utf-8"))
        for each, (first, end) in spans.items():
            part = lines[first:end]
            if part:  # tiny ones may be cut
                write_text(apart.set_files(each, row).records, "".join(part))
                of_part = manifest.facts | {"set": each, "problems": len(part)}
                parted = apart.set_files(each, row)
                artifact.write(parted.manifest, of_part, files=[parted.records])
    if workdir.metrics.exists():
        write_text(apart.metrics, workdir.metrics.read_text(encoding="utf-8"))
    return found


# --- Every program, and how often it is run.


@dataclasses.dataclass(frozen=True)
class Work:
    """A program of the run.

    Attributes:
        name: what it does.
        stage, until: whose rows of metrics.jsonl are of it, up to that step; "" for an evaluation's, which has none.
        times: steps, or batches.
        tokens: that a run of it reads and writes, at most.
    """

    name: str
    stage: str
    until: int
    program: Program
    times: int
    tokens: int


def works(setup: Setup) -> Iterator[Work]:
    """All programs of the run that take more than a moment, with the shapes of its own batches, as they come.

    Args:
        setup: assembled on the devices, and inside `xla_cpu.made_for` their platform.
    """
    config = setup.config
    _, plan, _ = imitate.planned(setup)
    for number, phase in enumerate(plan):
        (program,) = imitation(setup, number)
        batch = program.arguments[1]
        tokens = batch.text.tokens.size
        if batch.student is not None:
            student = batch.student
            tokens += student.prompts.tokens.size + student.suffix.tokens.size + len(batch.index) * phase.latent_slots
        name = {"cot": "CoT-SFT", "codi": "CODI"}[phase.name]
        yield Work(name, "imitate", phase.end, program, phase.end - phase.start, tokens)
    T, A = config.max_latents, config.max_answer_tokens
    (program,) = cold_starts(setup, own=True)
    rows = config.cold_start.batch_size * config.cold_start.trajectories
    tokens = _prompt_tokens(program.arguments[1].prompts) + rows * (T + T * A)  # an answer after each length
    yield Work("cold gate", "cold_start", config.cold_start.steps, program, config.cold_start.steps, tokens)
    validations = -(-config.cold_start.steps // config.cold_start.evaluate_every)
    yield from _evaluations(setup, "validation", setup.valid, (1,), "threshold", validations)
    for name, program in zip(config.rl.objectives, objectives(setup, own=True), strict=True):
        prompts = program.arguments[1].prompts
        tokens = _prompt_tokens(prompts) + len(prompts.tokens) * config.rl.group * (T + A)
        yield Work(name, name, config.rl.steps, program, config.rl.steps, tokens)
    tests, counts = setup.test_set(TESTS), (1, config.evaluate.samples)
    yield from _evaluations(setup, "evaluation by length", tests, counts, "length", 1)
    yield from _evaluations(setup, "evaluation by the gate", tests, counts, "threshold", 1 + len(config.rl.objectives))


def _evaluations(
    setup: Setup, name: str, problems: Any, samples: tuple[int, ...], stopping: Stopping, rows: int
) -> Iterator[Work]:
    """Of one set: greedy for one sample, under noise for more; one program of each, whose shapes its batches share."""
    config = setup.config
    count = min(config.evaluate.limit or len(problems), len(problems))
    for each in samples:
        batches = list(setup.evaluator.batches(problems, count, each))
        shapes = {(batch.prompts.tokens.shape, batch.prompts.capacity) for batch in batches}
        if len(shapes) > 1:
            raise UserError(f"config.prompt_slots: {name} has {len(shapes)} shapes to compile; give one bucket")
        size = len(batches[0].index_N)
        tokens = _prompt_tokens(batches[0].prompts) + size * (config.max_latents + config.max_answer_tokens)
        program = Program("", *rollouts(setup, batches[0].prompts, size, each > 1, stopping))
        called = f"{name}, {'samples' if each > 1 else 'greedy'}"
        yield Work(called, "", 0, program, rows * len(batches), tokens)


def _prompt_tokens(prompts: Any) -> int:
    return prompts.capacity or prompts.tokens.size


def compile_all(
    setup: Setup, threads: int, tell: Callable[[list[dict[str, Any]]], None] = lambda rows: None
) -> list[dict[str, Any]]:
    """Compile every program, after which all are in jax's cache. Returns the numbers of each.

    Args:
        threads: that compile at once; 0: programs are counted, and not compiled.
        tell: is given the numbers that there are after each.
    """
    rows: list[dict[str, Any]] = []

    def compiled(facts: dict[str, Any], lowered: Any) -> None:
        begin = time.perf_counter()
        memory = device_memory(lowered.compile())
        sizes = {"memory": memory["total"], "state": memory["arguments"]}
        rows.append(facts | sizes | {"compile_seconds": time.perf_counter() - begin})
        tell(list(rows))

    with ThreadPoolExecutor(max(threads, 1)) as pool:
        jobs = []
        for work in works(setup):
            facts = {name: getattr(work, name) for name in ("name", "stage", "until", "times", "tokens")}
            traced = work.program.function.trace(*work.program.arguments)
            facts["flops"] = products(traced, setup.config.max_latents)
            if threads:
                jobs.append(pool.submit(compiled, facts, traced.lower()))
            else:
                rows.append(facts)
        for job in jobs:
            job.result()
    return rows


def budget(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of what the parts take, as results/ has it.

    Args:
        rows: of `count` or `compile_all`.
    """
    columns = ["", "times", "million tokens", "TFLOP", "seconds", "state (GB)", "memory (GB)", "compile (s)"]
    lines = []
    for row in rows:
        tflop, sizes = row["times"] * row["flops"] / 1e12, (row.get("state"), row.get("memory"))
        lines.append([row["name"], row["times"], row["times"] * row["tokens"] / 1e6, tflop, tflop / (PEAK * SHARE),
                      *(size and size / 1e9 for size in sizes), row.get("compile_seconds")])  # fmt: skip
    sums = [math.fsum(line[place] or 0.0 for line in lines) for place in (2, 3, 4, 7)]
    lines.append(["in all", None, *sums[:3], None, None, sums[3] or None])
    return {"columns": columns, "digits": 1, "rows": lines}

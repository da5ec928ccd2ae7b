"""Every program of `benchmarks/real.py`'s runs, how often each is run, and what that takes of a card."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from benchmarks.measure.compiled import device_memory
from benchmarks.measure.products import products
from benchmarks.measure.programs import Program, cold_starts, imitation, objectives, rollouts
from benchmarks.measure.workload import ROOT
from slpo_jax.config.config import rl_of
from slpo_jax.errors import UserError
from slpo_jax.io.files import digest, read_json
from slpo_jax.policy.policy import Stopping
from slpo_jax.run import imitate
from slpo_jax.run.setup import Setup
from slpo_jax.stages import COLD_START, CONTROL, EVALUATE, IMITATE, RL
from slpo_jax.training.objectives.pathwise import Pathwise

COUNTED = {"gsm8k": ROOT / "results/real_budget.json", "countdown": ROOT / "results/real_budget_countdown.json"}
PEAK, SHARE = 790.0, 0.3  # TFLOP/s of an H100 in bfloat16, and how much of that is counted on
TURN = 0.005  # seconds of a pass of few tokens after another; results/real_gpu.json's steps are these two, to 15 %


def check_memory(here: int, micro_batches: int, task: str) -> None:
    """Refuse a card that the counted programs don't fit in, before anything is compiled.

    Args:
        here: bytes of it that programs can use; 0: not known.
        task: one of `COUNTED`.
    Raises:
        UserError: with what would fit.
    """
    table = read_json(COUNTED[task])["tables"]["one H100"]
    rows = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    sizes = [(row["state (GB)"], row["memory (GB)"]) for row in rows if row["memory (GB)"]]

    def needed(parts: int) -> float:
        return max(state + (memory - state) / parts for state, memory in sizes)

    if here and needed(micro_batches) * 1e9 > here:
        fits = [parts for parts in (2, 4, 8, 16, 32) if parts > micro_batches and needed(parts) * 1e9 <= here]
        remedy = f"give --micro_batches={fits[0]}" if fits else f"take a card of {needed(32) / 0.9:.0f} GB or more"
        raise UserError(f"--micro_batches: {micro_batches} needs {needed(micro_batches):.1f} GB of a card, of which "
                        f"programs can use {here / 1e9:.1f} here; {remedy}")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Work:
    """A program of the run.

    Attributes:
        name: what it does.
        stage, until: whose rows of metrics.jsonl are of it, up to that step; "" for an evaluation's, which has none.
        times: steps, or batches.
        tokens: that a run of it reads and writes, at most.
        turns: passes of few tokens in it, each after the one before it; a gradient's counts three times.
    """

    name: str
    stage: str
    until: int
    program: Program
    times: int
    tokens: int
    turns: int


def works(setup: Setup, stages: Iterable[str]) -> Iterator[Work]:
    """All programs of these stages that take more than a moment, with the shapes of the config's own batches.

    Args:
        setup: assembled on the devices, and inside `xla_cpu.made_for` their platform.
    """
    made = {IMITATE: _imitation, COLD_START: _cold_start, RL: _objectives, EVALUATE: _tests}
    for stage in stages:
        yield from made[stage](setup)


def _imitation(setup: Setup) -> Iterator[Work]:
    config, (_, plan, _) = setup.config, imitate.planned(setup)
    for number, phase in enumerate(plan):
        (program,) = imitation(setup, number)
        batch = program.arguments[1]
        tokens = batch.text.tokens.size
        if batch.student is not None:
            student = batch.student
            latents = len(batch.draws) * phase.latent_slots
            tokens += student.prompts.tokens.size + student.suffix.tokens.size + latents
        name, turns = {"cot": "CoT-SFT", "codi": "CODI"}[phase.name], 3 * phase.latent_slots
        yield Work(name, IMITATE, phase.end, program, phase.end - phase.start, tokens, turns)
    if config.imitate.control:  # the last phase goes on
        yield Work(CONTROL, CONTROL, plan[-1].end + config.rl.steps, program, config.rl.steps, tokens, turns)


def _cold_start(setup: Setup) -> Iterator[Work]:
    config, T, A = setup.config.cold_start, setup.config.max_latents, setup.config.max_answer_tokens
    (program,) = cold_starts(setup, own=True)
    rows = config.batch_size * config.trajectories
    tokens = _prompt_tokens(program.arguments[1].prompts) + rows * (T + T * A)  # an answer after each length
    yield Work("cold gate", COLD_START, config.steps, program, config.steps, tokens, T + A)
    validations = -(-config.steps // config.evaluate_every)
    yield from _evaluations(setup, "validation", setup.valid, (1,), "threshold", validations)


def _objectives(setup: Setup) -> Iterator[Work]:
    config, T, A = setup.config, setup.config.max_latents, setup.config.max_answer_tokens
    for name, program in zip(config.rl.objectives, objectives(setup, own=True), strict=True):
        prompts, objective = program.arguments[1].prompts, config.objective[name]
        tokens = _prompt_tokens(prompts) + len(prompts.tokens) * config.rl.group * (T + A)
        steps, turns = rl_of(config.rl, objective).steps, T + A + 3 * T * isinstance(objective, Pathwise)
        yield Work(name, name, steps, program, steps, tokens, turns)


def _tests(setup: Setup) -> Iterator[Work]:
    config, counts = setup.config, (1, setup.config.evaluate.samples)
    imitated, trained = 1 + config.imitate.control, len(config.rl.objectives)
    for name in config.data.eval:
        which, tests = f" of {name}" * (len(config.data.eval) > 1), setup.test_set(name)
        by_length = imitated + (0 if config.gate.enabled else trained)
        yield from _evaluations(setup, f"evaluation{which} by length", tests, counts, "length", by_length)
        if config.gate.enabled:
            yield from _evaluations(setup, f"evaluation{which} by the gate", tests, counts, "threshold", 1 + trained)


def _evaluations(
    setup: Setup, name: str, problems: Any, samples: tuple[int, ...], stopping: Stopping, rows: int
) -> Iterator[Work]:
    """Of one set: greedy for one sample, under noise for more; one program of each, whose shapes its batches share."""
    config = setup.config
    count = min(config.evaluate.limit or len(problems), len(problems))
    for each in samples:
        batches = list(setup.evaluator.batches(problems, count, each))
        shapes = {(batch.prompts.tokens.shape, batch.prompts.packed_slots) for batch in batches}
        if len(shapes) > 1:
            raise UserError(f"config.prompt_slots: {name} has {len(shapes)} shapes to compile; give one bucket")
        size = len(batches[0].index_N)
        turns = config.max_latents + config.max_answer_tokens
        tokens = _prompt_tokens(batches[0].prompts) + size * turns
        program = Program("", *rollouts(setup, batches[0].prompts, size, each > 1, stopping))
        called = f"{name}, {'samples' if each > 1 else 'greedy'}"
        yield Work(called, "", 0, program, rows * len(batches), tokens, turns)


def _prompt_tokens(prompts: Any) -> int:
    return prompts.packed_slots or prompts.tokens.size


def compile_all(
    parts: Iterable[tuple[Setup, Iterable[str]]],
    threads: int,
    tell: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Compile every program, after which all are in jax's cache. Returns the numbers of each.

    Args:
        parts: of a run, and the stages of each.
        threads: that compile at once; 0: programs are counted, and not compiled.
        tell: is given the numbers that there are after each.
    """
    rows: list[dict[str, Any]] = []

    def compiled(lowered: Any) -> dict[str, Any]:
        begin = time.perf_counter()
        memory = device_memory(lowered.compile())
        seconds = time.perf_counter() - begin
        return {"memory": memory["total"], "state": memory["arguments"], "compile_seconds": seconds}

    with ThreadPoolExecutor(max(threads, 1)) as pool:
        made: dict[str, Future] = {}  # several works may have the same program
        jobs = []
        for setup, work in ((each, work) for each, stages in parts for work in works(each, stages)):
            facts = {name: getattr(work, name) for name in ("name", "stage", "until", "times", "tokens", "turns")}
            traced = work.program.function.trace(*work.program.arguments)
            facts["flops"] = products(traced, setup.config.max_latents)
            if not threads:
                rows.append(facts)
                continue
            lowered = traced.lower()
            text = digest(lowered.as_text())
            known = {"compile_seconds": 0.0} if text in made else {}
            if not known:
                made[text] = pool.submit(compiled, lowered)
            jobs.append((facts | known, made[text]))
        for facts, job in jobs:
            rows.append(job.result() | facts)
            tell(list(rows))
    return rows


def budget(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of what the parts take, as results/ has it.

    Args:
        rows: of `compile_all`.
    """
    columns = ["", "times", "million tokens", "TFLOP", "in turn", "seconds", "state (GB)", "memory (GB)", "compile (s)"]
    lines, summed = [], [columns.index(name) for name in ("million tokens", "TFLOP", "seconds", "compile (s)")]
    for row in rows:
        times, tflop, sizes = row["times"], row["times"] * row["flops"] / 1e12, (row.get("state"), row.get("memory"))
        seconds = tflop / (PEAK * SHARE) + TURN * times * row["turns"]
        lines.append([row["name"], times, times * row["tokens"] / 1e6, tflop, row["turns"], seconds,
                      *(size and size / 1e9 for size in sizes), row.get("compile_seconds")])  # fmt: skip
    total: list[Any] = ["in all", *[None] * (len(columns) - 1)]
    for place in summed:
        total[place] = math.fsum(line[place] or 0.0 for line in lines) or None
    return {"columns": columns, "digits": 1, "rows": [*lines, total]}

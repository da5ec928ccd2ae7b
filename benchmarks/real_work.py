"""Every program of `benchmarks/real.py`'s runs, and how often each is run."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from benchmarks.measure.compiled import device_memory
from benchmarks.measure.products import products
from benchmarks.measure.programs import (
    Program,
    cold_starts,
    imitation,
    objectives,
    rollouts,
)
from slpo_jax.config.config import rl_of
from slpo_jax.errors import UserError
from slpo_jax.io.files import digest
from slpo_jax.policy.policy import Stopping
from slpo_jax.run.imitation_plan import plan_phases
from slpo_jax.run.setup import Setup
from slpo_jax.stages import COLD_START, CONTROL, EVALUATE, IMITATE, RL

PEAK = 989.0  # TFLOP/s of dense products in bfloat16, of an H100 (SXM) and an H200 alike, by their data sheets


@dataclasses.dataclass(frozen=True)
class Work:
    """A program of the run.

    Attributes:
        name: what it does.
        stage, until: whose rows of metrics.jsonl are of it, up to that step; "" for an evaluation's, which has none.
        times: steps, or batches.
    """

    name: str
    stage: str
    until: int
    program: Program
    times: int


def works(setup: Setup, stages: Iterable[str]) -> Iterator[Work]:
    """All programs of these stages that take more than a moment, with the shapes of the config's own batches.

    Args:
        setup: assembled on the devices, and inside `xla_cpu.made_for` their platform.
    """
    made = {
        IMITATE: _imitation,
        COLD_START: _cold_start,
        RL: _objectives,
        EVALUATE: _tests,
    }
    for stage in stages:
        yield from made[stage](setup)


def _imitation(setup: Setup) -> Iterator[Work]:
    config = setup.config
    _, plan, _ = plan_phases(setup)
    for number, phase in enumerate(plan):
        (program,) = imitation(setup, number)
        name = {"cot": "CoT-SFT", "codi": "CODI"}[phase.name]
        yield Work(name, IMITATE, phase.end, program, phase.end - phase.start)
    if config.imitate.control:  # the last phase goes on
        yield Work(
            CONTROL, CONTROL, plan[-1].end + config.rl.steps, program, config.rl.steps
        )


def _cold_start(setup: Setup) -> Iterator[Work]:
    config = setup.config.cold_start
    (program,) = cold_starts(setup, own=True)
    yield Work("cold gate", COLD_START, config.steps, program, config.steps)
    validations = -(-config.steps // config.evaluate_every)
    yield from _evaluations(
        setup, "validation", setup.valid, (1,), "threshold", validations
    )


def _objectives(setup: Setup) -> Iterator[Work]:
    config = setup.config
    for name, program in zip(
        config.rl.objectives, objectives(setup, own=True), strict=True
    ):
        steps = rl_of(config.rl, config.objective[name]).steps
        yield Work(name, name, steps, program, steps)


def _tests(setup: Setup) -> Iterator[Work]:
    config = setup.config
    counts = (1, config.evaluate.samples)
    imitated = 1 + config.imitate.control
    trained = len(config.rl.objectives)
    for name in config.data.eval:
        which = f" of {name}" * (len(config.data.eval) > 1)
        tests = setup.test_set(name)
        by_length = imitated + (0 if config.gate.enabled else trained)
        yield from _evaluations(
            setup, f"evaluation{which} by length", tests, counts, "length", by_length
        )
        if config.gate.enabled:
            yield from _evaluations(
                setup,
                f"evaluation{which} by the gate",
                tests,
                counts,
                "threshold",
                1 + trained,
            )


def _evaluations(
    setup: Setup,
    name: str,
    problems: Any,
    samples: tuple[int, ...],
    stopping: Stopping,
    rows: int,
) -> Iterator[Work]:
    """Of one set: greedy for one sample, under noise for more; one program of each, whose shapes its batches share."""
    config = setup.config
    count = min(config.evaluate.limit or len(problems), len(problems))
    for each in samples:
        batches = list(setup.evaluator.batches(problems, count, each))
        shapes = {
            (batch.prompts.tokens.shape, batch.prompts.packed_slots)
            for batch in batches
        }
        if len(shapes) > 1:
            raise UserError(
                f"config.prompt_slots: {name} has {len(shapes)} shapes to compile; give one bucket"
            )
        size = len(batches[0].index_N)
        program = Program(
            "", *rollouts(setup, batches[0].prompts, size, each > 1, stopping)
        )
        called = f"{name}, {'samples' if each > 1 else 'greedy'}"
        yield Work(called, "", 0, program, rows * len(batches))


def compile_all(
    parts: Iterable[tuple[Setup, Iterable[str]]],
    threads: int,
    tell: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Compile every program, after which all are in jax's cache. Returns the numbers of each.

    Args:
        parts: of a run, and the stages of each.
        threads: that compile at once.
        tell: is given the numbers that there are after each.
    """
    rows: list[dict[str, Any]] = []

    def compiled(lowered: Any) -> dict[str, Any]:
        begin = time.perf_counter()
        memory = device_memory(lowered.compile())
        seconds = time.perf_counter() - begin
        return {"memory": memory["total"], "compile_seconds": seconds}

    with ThreadPoolExecutor(threads) as pool:
        made: dict[str, Future] = {}  # several works may have the same program
        jobs = []
        asked = []
        for setup, stages in parts:
            asked += [(setup, work) for work in works(setup, stages)]
        for setup, work in asked:
            facts = {
                name: getattr(work, name)
                for name in ("name", "stage", "until", "times")
            }
            traced = work.program.function.trace(*work.program.arguments)
            facts["flops"] = products(traced, setup.config.max_latents)
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

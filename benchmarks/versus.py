"""`python -m benchmarks.versus OTHER [--what step|passk] [--shapes gpt2|graph]`; see `--help`.

Is this checkout slower than another one of this repository? A process of each does the same work, step by step in
turns, so that a noisy machine is noisy for both; and then another pair of processes does. Several pairs are needed, as
now and then a process of either is a fifth slower than others for as long as it lives. Prints Markdown; `--json` writes
every number behind it.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure.passk_work import SHAPES as PASSK_SHAPES
from benchmarks.measure.report import (
    Parser,
    check_flags,
    format_facts,
    machine,
    page,
    run_command,
    spread,
    summary,
)
from benchmarks.measure.workload import SHAPES as STEP_SHAPES
from slpo_jax.errors import UserError

SIDES = ("other", "this")
PROGRAMS = {"step": ("rollout", "surrogate", "step"), "passk": ("passk",)}
DEFINITIONS = """
other: the checkout that was given; this: the one that measured
ratio: of a pair of processes: median over the rounds of this one's seconds over the other's of the same round
all pairs: geometric mean of the pairs' ratios, and the interval of 95 % around it, from Student's t over the pairs
a round: one of each, the order turned around every time; step: K, G = 4, 8; passk: 16 samples of every problem
compile: making all the programs, one side after the other
""".strip().splitlines()

# Runs in either checkout, of which it needs benchmarks.measure alone: says what compiling took, then a line of JSON
# for every number on its standard input.
WORKER = """
import json, sys, tempfile, time
from pathlib import Path
import jax
what, shapes_name, prompts, cache, out = *sys.argv[1:5], sys.stdout
prompts = int(prompts)
sys.stdout = sys.stderr
from benchmarks import passk
from benchmarks.measure import passk_work, workload
from benchmarks.measure.ours import Ours
from slpo_jax.runtime.backend import set_up_jax

def say(found):
    print(json.dumps(found), file=out, flush=True)

shapes = (passk_work if what == "passk" else workload).SHAPES[shapes_name]
config = workload.load_config(shapes)
set_up_jax(config.cpu_devices)
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

with tempfile.TemporaryDirectory() as folder:
    if what == "step":
        work = workload.make_workload(shapes, config, prompts, Path(folder))
        ours = Ours(work, 4, 8, {})
        measure, compiling = lambda i: ours.measure(work, i), ours.compile_seconds
    else:
        work = passk_work.make_work(shapes, config, prompts, 16, Path(folder))
        run = passk.make_runs(work, "none")["slpo_jax"]
        def measure(i):
            start = time.perf_counter()
            run(i)
            return {"passk": time.perf_counter() - start}
        compiling = measure(0)
    say({"compile": sum(compiling.values())})
    for line in sys.stdin:
        say(measure(int(line)))
"""


class Worker:
    """A checkout's process that measures when it is told to."""

    def __init__(self, checkout: Path, flags: argparse.Namespace, cache: Path):
        """Starts it; returns when it has compiled, or taken its programs from the cache."""
        self.checkout = checkout
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        command = [
            sys.executable,
            "-c",
            WORKER,
            *map(str, (flags.what, flags.shapes, flags.prompts, cache)),
        ]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        self.process = subprocess.Popen(command, cwd=checkout, env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.log, text=True)  # fmt: skip
        self.compile_seconds = self._answer()["compile"]

    def measure(self, index: int) -> dict[str, float]:
        """Seconds of its programs in round `index`."""
        print(index, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """Ends it."""
        self.process.stdin.close()
        self.process.wait()
        self.log.close()

    def _answer(self) -> dict[str, float]:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.log.seek(0)
        said = self.log.read().strip().splitlines() or ["it said nothing"]
        remedy = "give a checkout that has benchmarks/measure and these --shapes"
        raise UserError(f"{self.checkout}: its benchmark ended: {said[-1]}; {remedy}")


def measure_pair(
    flags: argparse.Namespace, order: tuple[str, str], caches: Path, compiles: bool
) -> dict[str, Any]:
    """{program: {side: a summary, "ratio": of the rounds}} of two processes.

    Args:
        order: which side begins.
        caches: folder of their compiled programs.
        compiles: whether there are none yet; then there is a "compile" among the programs.
    """
    checkouts = {"other": flags.other, "this": Path(__file__).resolve().parents[1]}
    workers: dict[str, Worker] = {}
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    try:
        for side in order:
            workers[side] = Worker(checkouts[side], flags, caches / side)
        for index in range(flags.warmup + flags.rounds):
            for side in order if index % 2 else order[::-1]:
                rounds[side].append(workers[side].measure(index))
    finally:
        for worker in workers.values():
            worker.close()
    found: dict[str, Any] = {}
    if compiles:
        compiling = {side: workers[side].compile_seconds for side in SIDES}
        found["compile"] = {side: summary([spent]) for side, spent in compiling.items()}
        found["compile"]["ratio"] = compiling["this"] / compiling["other"]
    for name in PROGRAMS[flags.what]:
        values = {}
        for side in SIDES:
            measured = rounds[side][flags.warmup :]
            values[side] = [row[name] for row in measured]
        found[name] = {side: summary(values[side]) for side in SIDES}
        found[name]["ratio"] = statistics.median(
            b / a for a, b in zip(values["other"], values["this"], strict=True)
        )
    return found


def over_pairs(ratios: list[float]) -> dict[str, float]:
    """Geometric mean of the ratios and the ends of its interval of 95 %; the ends are nan for one ratio."""
    from scipy import stats

    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    half = math.nan
    if len(logs) > 1:
        half = (
            stats.t.ppf(0.975, len(logs) - 1)
            * statistics.stdev(logs)
            / math.sqrt(len(logs))
        )
    return {
        "mean": math.exp(mean),
        "low": math.exp(mean - half),
        "high": math.exp(mean + half),
    }


def benchmark(flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    orders = [SIDES, SIDES[::-1]]
    quiet = not sys.stderr.isatty()
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for index in tqdm(range(flags.pairs), "pairs", disable=quiet):
            compiled = min(
                index, flags.compiled - 1
            )  # the last that began without programs
            pairs.append(
                measure_pair(
                    flags,
                    orders[index % 2],
                    Path(folder) / str(compiled),
                    index == compiled,
                )
            )
    work = {"what": flags.what, "shapes": flags.shapes, "prompts": flags.prompts, "warmup": flags.warmup,
            "rounds": flags.rounds, "pairs": flags.pairs}  # fmt: skip
    return {"machine": machine(), "work": work, "pairs": pairs}


def _medians(cells: list[Any], side: str) -> Any:
    return summary([cell[side]["median"] for cell in cells])


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the table."""
    head = ("", "Other (s)", "This (s)", "Ratio of each pair", "All pairs", "95 %")
    lines = []
    for name in result["pairs"][0]:
        cells = [pair[name] for pair in result["pairs"] if name in pair]
        total = over_pairs([cell["ratio"] for cell in cells])
        seconds = [spread(_medians(cells, side)) for side in SIDES]
        ratios = ", ".join(f"{cell['ratio']:.2f}" for cell in cells)
        lines.append(
            [
                name,
                *seconds,
                ratios,
                f"{total['mean']:.3f}",
                f"{total['low']:.3f}-{total['high']:.3f}",
            ]
        )
    facts = (
        f"machine: {format_facts(result['machine'])}",
        f"work: {format_facts(result['work'])}",
    )
    return page("This checkout against another", facts, DEFINITIONS, head, lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("versus", "Speed of this checkout against another's.", STEP_SHAPES)
    parser.add_argument("other", type=Path, help="the other checkout's folder")
    parser.add_argument(
        "--what", choices=tuple(PROGRAMS), default="step", help="default: step"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        help="prompts a step, problems of an evaluation; default: the shapes'",
    )
    parser.add_argument(
        "--pairs", type=int, default=6, help="pairs of processes; default: 6"
    )
    parser.add_argument("--compiled", type=int, default=2, help="pairs whose compilation is timed; the others take "
                        "the last one's programs; default: 2")  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=40, help="measured rounds of a pair; default: 40"
    )
    parser.add_argument(
        "--warmup", type=int, default=4, help="rounds before them; default: 4"
    )
    flags = parser.parse_args(argv)
    if flags.prompts is None:
        flags.prompts = (PASSK_SHAPES if flags.what == "passk" else STEP_SHAPES)[
            flags.shapes
        ].prompts
    check_flags(flags, prompts=1, pairs=1, compiled=1, rounds=1, warmup=0)
    flags.other = flags.other.resolve()
    if not (flags.other / "benchmarks").is_dir():
        raise UserError(
            f"{flags.other}: no checkout with a folder benchmarks/; give one of this repository"
        )
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()

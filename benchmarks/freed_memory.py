"""`python -m benchmarks.freed_memory [--shapes gpt2|quickstart] [--work NAME ...] [--rounds 2] [--json FILE]`.

What it costs that freed memory goes back to the system: our step and evaluation under several settings of glibc's
allocator, each in a process of its own, the settings in turns. For Linux with glibc. Prints a Markdown table.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tqdm import tqdm

from benchmarks import growth, passk, passk_work
from benchmarks.report import (
    Parser,
    check_flags,
    listed,
    machine,
    page,
    page_faults,
    prepare,
    run_command,
    spread,
    summary,
)
from benchmarks.workload import SHAPES, load_config
from slpo_jax.errors import UserError
from slpo_jax.run import command

SETTINGS = {  # name -> (whether freed blocks are kept, GLIBC_TUNABLES)
    "glibc's own": (False, ""),
    "freed blocks are kept (slpo_jax's)": (True, ""),
    "kept, in one heap for all threads": (True, "glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0"),
    "kept, and huge pages asked for": (True, "glibc.malloc.hugetlb=1"),
}
DEFINITIONS = """
step: the whole jitted step at this K and G = 8; evaluation: Pass@16 as `benchmarks.passk` has it
seconds, page faults: of one of them, median (least-most), after one of warm-up
peak memory: of the whole process, compilation included; the largest of the rounds
the last two settings are made through GLIBC_TUNABLES; huge pages need glibc 2.35 and the mode madvise or always
""".strip().splitlines()

Measure = Callable[[str, int], dict[str, Any]]
"""(shapes, runs) -> the `summary` of seconds and of page faults, one of each a run."""


def step(passes: int, name: str, runs: int) -> dict[str, Any]:
    """The SLPO step at K = `passes`."""
    shapes = SHAPES[name]
    return growth.measure(shapes, growth.base_sizes(shapes, load_config(shapes)) | {"K": passes}, runs)


def evaluation(name: str, runs: int) -> dict[str, Any]:
    """Pass@16 of the problems that `benchmarks.passk` has."""
    shapes = passk_work.SHAPES[name]
    with tempfile.TemporaryDirectory() as workdir:
        work = passk_work.make_work(shapes, load_config(shapes), shapes.prompts, 16, Path(workdir))
        made = passk.make_runs(work, "none")
        spent, faults = [], []
        for _ in range(1 + runs):
            before = page_faults()
            spent.append(passk.measure(made, 0)[passk.OURS][0].seconds)
            faults.append(page_faults() - before)
    return {"seconds": summary(spent[1:]), "page_faults": summary(faults[1:])}


WORK: dict[str, Measure] = {
    "step_4": functools.partial(step, 4),
    "step_8": functools.partial(step, 8),
    "evaluation": evaluation,
}


def measure_here(keeps: bool, measure: Measure, shapes: str, runs: int) -> dict[str, Any]:
    """One work's numbers, in a process that has just begun."""
    with contextlib.nullcontext() if keeps else mock.patch.object(command, "keep_freed_memory"):
        prepare(load_config(SHAPES[shapes]))
    found = measure(shapes, runs)
    return found | {"peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """The most memory that this process has held. (`getrusage` would count what it was started from.)"""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def system() -> dict[str, str]:
    """What page faults depend on."""
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    modes = huge.read_text() if huge.exists() else ""
    return {
        "glibc": platform.libc_ver()[1],
        "page size": str(resource.getpagesize()),
        "huge pages": modes.partition("[")[2].partition("]")[0] or "none",
    }


def measure_apart(setting: str, measure: Measure, shapes: str, runs: int) -> dict[str, Any]:
    """`measure_here` in a process of its own, under the setting."""
    keeps, tunables = SETTINGS[setting]
    others = {name: "" for name in os.environ if name.startswith("MALLOC_")}  # older names of the same settings
    with (
        mock.patch.dict(os.environ, others | {"GLIBC_TUNABLES": tunables}),
        concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        return pool.submit(measure_here, keeps, measure, shapes, runs).result()


def benchmark(shapes: Any, config: Any, flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON.

    Raises:
        UserError: this is not Linux with glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        raise UserError("freed_memory: its settings are glibc's, and this system has none; run it on Linux with glibc")
    cases = [(work, setting) for work in flags.work for setting in SETTINGS]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in cases}
    for case in tqdm(cases * flags.rounds, "processes", disable=not sys.stderr.isatty()):
        work, setting = case
        found[case].append(measure_apart(setting, WORK[work], flags.shapes, flags.runs))
    rows = [
        {"work": work, "setting": setting, "peak_bytes": max(each["peak_bytes"] for each in rounds)}
        | {name: summary([x for each in rounds for x in each[name]["values"]]) for name in ("seconds", "page_faults")}
        for (work, setting), rounds in found.items()
    ]
    return {"shapes": flags.shapes, "rounds": flags.rounds, "runs": flags.runs, "machine": machine() | system(),
            "rows": rows}  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the table."""
    head = ("Work", "Setting", "Seconds", "Page faults", "Peak memory (MB)")
    lines = [
        [row["work"], row["setting"], spread(row["seconds"]), spread(row["page_faults"], 0),
         f"{row['peak_bytes'] / 1e6:.0f}"]
        for row in result["rows"]
    ]  # fmt: skip
    facts = (
        f"machine: {listed(result['machine'])}",
        f"work: {result['rounds']} processes, {result['runs']} runs in each after one",
    )
    return page(f"Freed memory, {result['shapes']} shapes", facts, DEFINITIONS, head, lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("freed_memory", "What it costs to hand freed memory back.", SHAPES)
    parser.add_argument("--work", nargs="+", choices=sorted(WORK), default=list(WORK), help="default: all")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each work and setting; default: 2")
    parser.add_argument("--runs", type=int, default=4, help="measured runs in each of them; default: 4")
    flags = parser.parse_args(argv)
    check_flags(flags, rounds=1, runs=1)
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, SHAPES, benchmark, markdown)


if __name__ == "__main__":
    main()

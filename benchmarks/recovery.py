"""`python -m benchmarks.recovery [--shapes gpt2|llama|quickstart] [--json FILE]`; see `--help`.

What a long run pays for being stopped and for growing over devices and processes, through the real command: steps a
second on 1, 2 and 4 devices of one process and of two, time and size of a checkpoint, what a save costs the steps
beside it, seconds from a restart to the next step, and what a preemption loses. Prints Markdown; `--json` writes every
number behind it.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from benchmarks.measure.report import Parser, check_flags, listed, machine, markdown_table, run_command, set_up
from benchmarks.measure.workload import ROOT, SHAPES, load_config, make_workload
from slpo_jax.errors import UserError
from slpo_jax.io.hosts import local_flags
from slpo_jax.training.checkpoint import StageCheckpoints

LAYOUTS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))  # processes, devices of each
DEFINITIONS = """
steps a second: median of the logged ones of the stage rl from random weights, after the first few; relative to the \
same batch on one device of one process
save: seconds until the step after a checkpoint may go on, and until the checkpoint is whole on the disk, for which a \
save that is not asynchronous would keep it waiting; median (least-most); size: of one checkpoint on the disk
restart: from the command to the first step's row, programs compiled before (in jax's cache) or not; stop: from a \
SIGTERM to the end of the process, its checkpoint written
lost: to a preemption with a warning, stop and restart; without one (kill -9), restart and the steps since the last \
checkpoint, on average half of those between two
""".strip().splitlines()


def start(flags: argparse.Namespace, workdir: Path, processes: int, devices: int, **changes: Any) -> list[Any]:
    """The command's processes, their output thrown away."""
    shapes = SHAPES[flags.shapes]
    settings = shapes.changes | {
        "stages": "('rl',)", "cpu_devices": devices, "rl.batch_size": flags.prompts, "rl.steps": 100_000,
        "rl.optimizer.warmup_steps": 0, "log_every": 1,
    } | changes  # fmt: skip
    command = [sys.executable, "-m", "slpo_jax.main", f"--config={ROOT / 'configs' / shapes.config}"]
    command += [f"--config.{key}={value}" for key, value in settings.items()] + [f"--workdir={workdir}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return [subprocess.Popen(command + more, cwd=ROOT, **quiet) for more in local_flags(processes)]


def rows(workdir: Path) -> list[dict[str, Any]]:
    """The logged steps so far."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait(processes: list[Any], until: Callable[[], bool]) -> None:
    """Until something holds.

    Raises:
        UserError: a process ended before.
    """
    while not until():
        if any(process.poll() is not None for process in processes):
            end(processes, signal.SIGKILL)  # one that is left would wait for the others
            raise UserError("--shapes: a run ended by itself; run slpo_jax.main with these shapes to see why")
        time.sleep(0.01)


def end(processes: list[Any], how: int) -> float:
    """Seconds from a signal to the end of all."""
    begin = time.perf_counter()
    for process in processes:
        process.send_signal(how)
    for process in processes:
        process.wait()
    return time.perf_counter() - begin


def measure_layout(flags: argparse.Namespace, processes: int, devices: int, folder: Path) -> dict[str, Any]:
    """Steps a second of a run."""
    workdir = folder / f"{processes}x{devices}"
    run = start(flags, workdir, processes, devices, checkpoint_every=100_000)
    wait(run, lambda: len(rows(workdir)) >= flags.warmup + flags.steps)
    end(run, signal.SIGKILL)
    found = [row["steps_per_second"] for row in rows(workdir)[flags.warmup :]]
    return {"processes": processes, "devices": devices, "steps_per_second": statistics.median(found)}


def measure_stops(flags: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds of a cold start, a warm restart and a stop."""
    workdir, found = folder / "stopped", {}
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
    for name in ("cold", "warm"):
        before, begin = len(rows(workdir)), time.perf_counter()
        run = start(flags, workdir, 1, 1, checkpoint_every=100_000)
        wait(run, lambda before=before: len(rows(workdir)) > before)
        found[f"{name}_restart"] = time.perf_counter() - begin
        found["stop"] = end(run, signal.SIGTERM)
    assert any(Path(cache).iterdir())
    return found


def measure_saves(flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of saves of the stage's state, its size, and of reading it back."""
    config = load_config(SHAPES[flags.shapes])
    work = make_workload(SHAPES[flags.shapes], config, flags.prompts, folder / "saves")
    checkpoints, found = StageCheckpoints(folder / "saves" / "stage"), {"blocked": [], "whole": []}
    for step in range(1 + flags.saves):
        state, begin = work.state.replace(step=jax.numpy.int32(step)), time.perf_counter()
        checkpoints.save(state)
        found["blocked"].append(time.perf_counter() - begin)
        checkpoints.wait()
        found["whole"].append(time.perf_counter() - begin)
    begin = time.perf_counter()
    checkpoints.restore(work.state)
    read = time.perf_counter() - begin
    last = folder / "saves" / "stage" / str(flags.saves)
    size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
    checkpoints.close()
    return {name: values[1:] for name, values in found.items()} | {"bytes": size, "restore": read}


def benchmark(flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    set_up(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saves = measure_saves(flags, folder)
        stops = measure_stops(flags, folder)
        layouts = [
            measure_layout(flags, *layout, folder)
            for layout in tqdm(flags.layouts, "layouts", disable=not sys.stderr.isatty())
        ]
    work = {"shapes": flags.shapes, "prompts": flags.prompts, "warmup": flags.warmup, "steps": flags.steps}
    return {"machine": machine(), "work": work, "definitions": DEFINITIONS, "layouts": layouts, "saves": saves,
            "stops": stops}  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the tables."""
    first, saves, stops = result["layouts"][0]["steps_per_second"], result["saves"], result["stops"]
    layouts = [
        [str(row["processes"]), str(row["devices"]), f"{row['steps_per_second']:.2f}",
         f"{row['steps_per_second'] / first:.2f}x"]
        for row in result["layouts"]
    ]  # fmt: skip

    def seconds(values):
        return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"

    costs = [
        ["a save keeps the next step waiting", seconds(saves["blocked"])],
        ["a save until it is whole", seconds(saves["whole"])],
        ["a checkpoint's size (MB)", f"{saves['bytes'] / 1e6:.1f}"],
        ["reading it back", f"{saves['restore']:.2f}"],
        ["restart, programs to be compiled", f"{stops['cold_restart']:.1f}"],
        ["restart, programs in the cache", f"{stops['warm_restart']:.1f}"],
        ["stop after SIGTERM", f"{stops['stop']:.1f}"],
        ["lost to a preemption with a warning", f"{stops['stop'] + stops['warm_restart']:.1f}"],
    ]
    return "\n".join([
        f"# Recovery and scale, {result['work']['shapes']} shapes",
        *(f"- {line}" for line in (f"machine: {listed(result['machine'])}", f"work: {listed(result['work'])}")),
        *(f"- {line}" for line in result["definitions"]),
        "", *markdown_table(("Processes", "Devices of each", "Steps a second", "Relative"), layouts),
        "", *markdown_table(("", "Seconds"), costs),
    ])  # fmt: skip


def _layout(text: str) -> tuple[int, int]:
    processes, _, devices = text.partition("x")
    if not (processes.isdigit() and devices.isdigit() and int(processes) * int(devices)):
        raise argparse.ArgumentTypeError(f"{text} is not PROCESSESxDEVICES; give e.g. 1x4")
    return int(processes), int(devices)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("recovery", "What stopping, saving and growing cost.", SHAPES)
    parser.add_argument("--prompts", type=int, help="a step; default: the shapes'")
    parser.add_argument("--layouts", type=_layout, nargs="+", metavar="PxD", default=list(LAYOUTS),
                        help="processes x devices of each; default: 1x1 1x2 1x4 2x1 2x2")  # fmt: skip
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each layout; default: 30")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them; default: 5")
    parser.add_argument("--saves", type=int, default=5, help="measured saves, after one; default: 5")
    flags = parser.parse_args(argv)
    if flags.prompts is None:
        flags.prompts = SHAPES[flags.shapes].prompts
    check_flags(flags, prompts=1, steps=1, warmup=1, saves=1)
    for processes, devices in flags.layouts:
        if flags.prompts % (processes * devices):
            raise UserError(
                f"--layouts: {flags.prompts} prompts don't make {processes}x{devices} equal parts; give others"
            )
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()

"""What the benchmarks print: the machine, medians and spreads, tables; and what their commands share."""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from benchmarks.measure.workload import Shapes, load_config
from slpo_jax.errors import FlagParser, UserError, silent_when_unread
from slpo_jax.io.files import write_text
from slpo_jax.runtime.backend import set_up_jax


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    used = sys.modules.get("torch")
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    usable = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **(
            {"torch": version("torch"), "torch_threads": used.get_num_threads()}
            if used
            else {}
        ),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def format_facts(facts: dict[str, Any]) -> str:
    """Facts on one line."""
    return "; ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in facts.items()
    )


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and most of the values, and they themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def spread(cell: dict[str, Any], digits: int = 3) -> str:
    """Median (least-most) of a `summary`."""
    return f"{cell['median']:.{digits}f} ({cell['min']:.{digits}f}-{cell['max']:.{digits}f})"


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table whose columns are aligned to the right."""
    head = list(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---:"] * len(head), *rows)]


def page(
    title: str,
    facts: Iterable[str],
    definitions: Iterable[str],
    head: Iterable[str],
    rows: Iterable[Iterable[str]],
) -> str:
    """A report of one table: title, facts and definitions as a list, then the table."""
    return "\n".join(
        [
            f"# {title}",
            *(f"- {line}" for line in (*facts, *definitions)),
            "",
            *markdown_table(head, rows),
        ]
    )


class Parser(FlagParser):
    """Flags of a benchmark, --json among them.

    Args:
        module: of the benchmark.
        shapes: what --shapes may name; without any there is no such flag.
    """

    def __init__(self, module: str, description: str, shapes: Iterable[str] = ()):
        super().__init__(prog=f"python -m benchmarks.{module}", description=description)
        if shapes:
            self.add_argument(
                "--shapes",
                choices=sorted(shapes),
                default="gpt2",
                help="default: gpt2, the 124M model",
            )
        self.add_argument("--json", type=Path, help="file for all numbers")


def check_flags(flags: argparse.Namespace, **least: int) -> None:
    """Numbers, where given, must be `least` or more, and --json a file that can be written.

    Raises:
        UserError: one can't be used.
    """
    for name, bound in least.items():
        value = getattr(flags, name)
        if value is not None and value < bound:
            raise UserError(f"--{name}: {value} is too few; give at least {bound}")
    if flags.json:
        try:
            with tempfile.TemporaryFile(dir=flags.json.parent):
                writable = not flags.json.is_dir()
        except OSError:
            writable = False
        if not writable:
            raise UserError(
                f"--json: {flags.json} can't be written; give a file in a folder that exists"
            )


@silent_when_unread()
def run_command(
    argv: list[str] | None,
    parse: Callable[[list[str] | None], argparse.Namespace],
    benchmark: Callable[[argparse.Namespace], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
) -> None:
    """A benchmark's command: one line and status 2 for what the user can mend.

    Args:
        parse: command line -> flags, `json` among them.
        benchmark: flags -> every number, ready for JSON.
        markdown: what is printed of them.
    """
    try:
        flags = parse(argv)
        result = benchmark(flags)
        if flags.json:
            write_text(flags.json, json.dumps(result, indent=1) + "\n")
        print(markdown(result))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def on_shapes(
    shapes: Mapping[str, Shapes],
    benchmark: Callable[[Any, Any, argparse.Namespace], dict[str, Any]],
) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """A benchmark of the shapes that --shapes names, with jax set up for their config.

    Args:
        shapes: by the name that --shapes gives.
        benchmark: (shapes, config, flags) -> every number.
    """

    def run(flags: argparse.Namespace) -> dict[str, Any]:
        chosen = shapes[flags.shapes]
        config = load_config(chosen)
        set_up(config.cpu_devices)
        return benchmark(chosen, config, flags)

    return run


def set_up(devices: int) -> None:
    """jax as training sets it up, but without a cache of programs, whose compilation is timed."""
    set_up_jax(devices)
    jax.config.update("jax_enable_compilation_cache", False)

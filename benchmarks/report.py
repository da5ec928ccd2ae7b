"""What the benchmarks print: the machine, medians and spreads, tables; and how they read flags."""

import argparse
import os
import platform
import time
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import jax

from slpo_jax.errors import UserError


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **({"torch": version("torch")} if find_spec("torch") else {}),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def listed(facts: dict[str, Any]) -> str:
    """Facts on one line."""
    return "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())


def spread(cell: dict[str, Any], digits: int = 3) -> str:
    """Median (least-most)."""
    return f"{cell['median']:.{digits}f} ({cell['min']:.{digits}f}-{cell['max']:.{digits}f})"


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table whose columns are aligned to the right."""
    head = list(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---:"] * len(head), *rows)]


class Parser(argparse.ArgumentParser):
    """Flags, with what is wrong in them as a `UserError`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")

"""What came out of `benchmarks/real.py`'s runs, in tables as results/ has them."""

import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.measure.workload import ROOT
from benchmarks.real_work import PEAK
from slpo_jax.evaluation.curves import training_curves

sys.path.append(str(ROOT / "launch"))  # whose scripts see each other so
from carry import commit
from comparison import display_name, scale

METRICS = ("acc", "pass@1", "pass@8", "pass@16", "latent_steps")
TITLES = {"gsm8k": "GSM8K", "multiarith": "MultiArith", "svamp": "SVAMP", "average": "mean",
          "numbers_3": "three numbers", "numbers_4": "four numbers"}  # fmt: skip


def result_file(
    given: str, facts: dict[str, Any], tables: dict[str, Any]
) -> dict[str, Any]:
    """A file as results/ has them."""
    told = "; ".join(
        f"{name.replace('_', ' ')} {value}"
        for name, value in facts.items()
        if name != "date"
    )
    return {"command": f"python -m benchmarks.real {given}".strip(), "commit": commit(), "machine": told,
            "date": time.strftime("%Y-%m-%d"), "seeds": [0], "tables": tables}  # fmt: skip


def programs_table(
    rows: list[dict[str, Any]], metrics: list[dict[str, Any]]
) -> dict[str, Any]:
    """What each program took to compile, takes of the memory, and how fast its steps were."""
    columns = [
        "",
        "compile (s)",
        "memory (GB)",
        "TFLOP",
        "steps/s",
        "TFLOP/s",
        "of the peak (%)",
    ]
    lines: list[list[Any]] = []
    for row in rows:
        first = row["until"] - row["times"]
        taken = [each["seconds"] for each in metrics if each["stage"] == row["stage"] and "seconds" in each
                 and first < each["step"] <= row["until"]]  # fmt: skip
        tflop = row["flops"] / 1e12
        seconds = statistics.median(taken) if taken else None
        speed = (
            [1 / seconds, tflop / seconds, 100 * tflop / seconds / PEAK]
            if seconds
            else [None] * 3
        )
        lines.append(
            [
                display_name(row["name"]),
                row["compile_seconds"],
                row["memory"] / 1e9,
                tflop,
                *speed,
            ]
        )
    return {"columns": columns, "digits": 2, "rows": lines}


def quality_tables(report: dict[str, Any], baselines: Iterable[str]) -> dict[str, Any]:
    """Every row on every set with its error, and the objectives' differences with their intervals, in percent.

    Args:
        baselines: rows that the differences are from.
    """
    columns = ["", *map(display_name, METRICS)]
    rows = []
    for row, sets in report["eval"].items():
        for name, figures in sets.items():
            cells = [_cell(figures, metric) for metric in METRICS]
            rows.append([_named(row, name), *cells])
    tables = {"right answers": {"columns": columns, "digits": 1, "rows": rows}}
    for b in baselines:
        found: dict[str, dict[str, Any]] = {}
        for each in report["differences"]:
            if each["b"] == b:
                metric = each["metric"]
                by = scale(metric)
                line = _named(each["a"], each["set"])
                found.setdefault(line, {})[metric] = {
                    "value": by * each["difference"],
                    "low": by * each["low"],
                    "high": by * each["high"],
                }
        lines = []
        for line, differences in found.items():
            cells = [differences.get(metric) for metric in METRICS]
            lines.append([line, *cells])
        if lines:
            title = f"minus {display_name(b)}"
            tables[title] = {"columns": columns, "digits": 1, "rows": lines}
    return tables


def _named(row: str, name: str) -> str:
    return f"{display_name(row)}, {TITLES.get(name, name)}"


def minutes_table(
    report: dict[str, Any], metrics: list[dict[str, Any]], starts: Mapping[str, str]
) -> dict[str, Any]:
    """Every row's Acc and Pass@16 beside the minutes of training that led to it, compilation and validation aside.

    Args:
        starts: row -> the one that it began from; of another it is nothing.
    """
    clocks = training_curves(metrics)

    def minutes(row: str) -> float:
        before = minutes(starts[row]) if row in starts else 0.0
        return before + clocks.get(row, {}).get("elapsed", [[], [0.0]])[1][-1] / 60

    shown = ("acc", "pass@16")
    rows = []
    for row, sets in report["eval"].items():
        if row not in clocks:
            continue
        for name, figures in sets.items():
            cells = [_cell(figures, metric) for metric in shown]
            rows.append([_named(row, name), minutes(row), *cells])
    columns = ["", "minutes", *map(display_name, shown)]
    return {"columns": columns, "digits": 1, "rows": rows}


def _cell(figures: dict[str, Any], metric: str) -> Any:
    value = figures.get(metric)
    if value is None:
        return None
    by = scale(metric)
    error = figures.get(f"{metric}_se")
    if error is None:
        return by * value
    return {"value": by * value, "se": by * error}

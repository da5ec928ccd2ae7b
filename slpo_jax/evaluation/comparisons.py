"""Differences between rows of an evaluation, paired by problem, and their bootstrap intervals.

Pure functions of numpy arrays. Axes: N problems, R training runs, Q metrics. All rates are fractions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from slpo_jax.evaluation.records import Evals
from slpo_jax.evaluation.report_rows import BEST_FIXED, Rows, baselines_of
from slpo_jax.evaluation.statistics import COUNTS, problem_values

AVERAGE = "average"
"""Stands for the mean of the sets, where an entry names its set."""


def bootstrap_draws(
    differences: np.ndarray, n_boot: int = 10_000, seed: int = 0, stream: int = 0
) -> np.ndarray:
    """Draw bootstrap means of paired differences that share their problems.

    Problems are drawn with replacement, the same draw for every run and metric (so pairs stay pairs). With R > 1,
    runs are drawn with replacement too, independently of the problems: runs and problems are crossed, and the
    interval covers both another training seed and another test set. Beware of few runs: the bootstrap of R runs
    understates their variance by the factor (R - 1) / R.

    Args:
        differences: [R, N, Q] float.
        n_boot: draws.
        seed: the result is a pure function of it and the arguments.
        stream: problems of different sets must not share their draw, runs must: give each set its own stream.

    Returns:
        [n_boot, Q] means.
    """
    runs, n, q = differences.shape
    run_rng = np.random.default_rng([seed, 0])
    problem_rng = np.random.default_rng([seed, 1, stream])
    run_weights = (
        run_rng.multinomial(runs, np.full(runs, 1.0 / runs), size=n_boot) / runs
    )
    flat = differences.transpose(1, 0, 2).reshape(n, runs * q)
    out = np.empty((n_boot, q))
    chunk = max(1, 2_000_000 // n)  # bounds memory, not the result's law
    for start in range(0, n_boot, chunk):
        size = min(chunk, n_boot - start)
        picks = problem_rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        counts = np.bincount(picks.ravel(), minlength=size * n).reshape(size, n)
        means = (counts @ flat / n).reshape(size, runs, q)
        out[start : start + size] = np.einsum(
            "br,brq->bq", run_weights[start : start + size], means
        )
    return out


def interval(draws: np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile interval of draws [n_boot]."""
    low, high = np.quantile(draws, [(1 - 0.95) / 2, (1 + 0.95) / 2])
    return float(low), float(high)


def compare_rows(
    runs: Sequence[Evals], rows: Rows
) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare each row, the last first, with its baselines, paired, on every set and on the mean of several.

    Args:
        runs: one entry a training run, all with the same rows and sets.
        rows: what the rows say of themselves.

    Returns:
        Entries {set, a, b, b_row, metric, n, runs, difference, low, high, excludes_zero, per_run} with 95%
        intervals, and notes on pairs that can't be compared.
    """
    values = [
        {
            row: {s: problem_values(rec) for s, rec in sets.items()}
            for row, sets in run.items()
        }
        for run in runs
    ]
    entries = []
    notes = []
    names = list(dict.fromkeys(name for sets in runs[0].values() for name in sets))
    pairs = [
        (row.name, *pair)
        for row in reversed(rows.values())
        for pair in baselines_of(row, rows).items()
    ]
    for a, b, members in pairs:
        over_sets: dict[str, list[tuple[dict[str, Any], np.ndarray]]] = {}
        for stream, name in enumerate(names):
            present = [row for row in (a, *members) if name in runs[0].get(row, {})]
            if len(present) < 2 or present[0] != a:
                continue
            first = runs[0][a][name]
            if not all(
                run[row][name].same_problems(first) for run in runs for row in present
            ):
                notes.append(
                    f"{a} minus {b} on {name}: left out, the problems differ; evaluate both again."
                )
                continue
            for entry, draws in _differences(
                [{r: run[r][name] for r in present} for run in values], b, stream
            ):
                entry = {
                    "set": name,
                    "a": a,
                    "b": b,
                    **entry,
                    "n": len(first.references),
                    "runs": len(runs),
                }
                entries.append(entry)
                over_sets.setdefault(entry["metric"], []).append((entry, draws))
        entries += [
            _average(parts)
            for parts in over_sets.values()
            if 1 < len(parts) == len(names)
        ]
    return entries, notes


def _differences(
    values: list[dict[str, dict[str, np.ndarray]]], b: str, stream: int
) -> list[tuple[dict[str, Any], np.ndarray]]:
    """Return, of one set, row -> metric -> [N] a run, the first row minus the others' best by mean; entries, draws."""
    rows = list(values[0])
    metrics = [
        key
        for key in values[0][rows[0]]
        if all(key in run[row] for run in values for row in rows)
    ]
    if b == BEST_FIXED:  # "best" has no meaning for a length or a variety
        metrics = [key for key in metrics if key not in COUNTS]
    best = {
        m: max(rows[1:], key=lambda row: np.mean([run[row][m] for run in values]))
        for m in metrics
    }
    diff = np.stack(
        [
            np.stack([run[rows[0]][m] - run[best[m]][m] for run in values])
            for m in metrics
        ],
        axis=-1,
    )
    draws = bootstrap_draws(diff, stream=stream)
    return [
        (
            _entry(draws[:, q], diff[:, :, q].mean(axis=1), m) | {"b_row": best[m]},
            draws[:, q],
        )
        for q, m in enumerate(metrics)
    ]


def _entry(draws: np.ndarray, per_run: np.ndarray, metric: str) -> dict[str, Any]:
    low, high = interval(draws)
    return {
        "metric": metric,
        "difference": float(per_run.mean()),
        "low": low,
        "high": high,
        "excludes_zero": low > 0 or high < 0,
        "per_run": per_run.tolist(),
    }


def _average(parts: list[tuple[dict[str, Any], np.ndarray]]) -> dict[str, Any]:
    """Average one metric's difference over sets: sets are fixed, their problems (and the runs) resampled."""
    first = parts[0][0]
    per_run = np.mean([entry["per_run"] for entry, _ in parts], axis=0)
    rows = dict.fromkeys(entry["b_row"] for entry, _ in parts)
    return {
        **first,
        **_entry(
            np.mean([draws for _, draws in parts], axis=0), per_run, first["metric"]
        ),
        "set": AVERAGE,
        "n": sum(entry["n"] for entry, _ in parts),
        "b_row": "/".join(rows),
    }

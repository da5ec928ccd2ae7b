"""Differences between rows of an evaluation, paired by problem, and their bootstrap intervals.

Pure functions of numpy arrays. Axes: N problems, R training runs, Q metrics. All rates are fractions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slpo_jax.evaluation.records import EvalRecords, Evals
from slpo_jax.evaluation.report_rows import BEST_FIXED, Rows, baselines_of
from slpo_jax.evaluation.statistics import COUNTS, Values, problem_values

AVERAGE = "average"
"""Stands for the mean of the sets, where an entry names its set."""

Entry = dict[str, Any]
"""A difference of two rows in a metric, as `compare_rows` returns it."""
EntryDraws = tuple[Entry, np.ndarray]
"""An entry, and the bootstrap draws [n_boot] of its interval."""


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

    # The share of each run in a draw.
    equal = np.full(runs, 1.0 / runs)
    times = run_rng.multinomial(runs, equal, size=n_boot)
    run_weights = times / runs

    by_problem = differences.transpose(1, 0, 2)
    flat = by_problem.reshape(n, runs * q)
    out = np.empty((n_boot, q))
    chunk = max(1, 2_000_000 // n)  # bounds memory, not the result's law
    for start in range(0, n_boot, chunk):
        end = min(start + chunk, n_boot)
        size = end - start
        # How often each problem is drawn: draws are counted at once, each with n numbers of its own.
        picks = problem_rng.integers(n, size=(size, n))
        first_numbers = n * np.arange(size)
        picks += first_numbers[:, None]
        counts = np.bincount(picks.ravel(), minlength=size * n)
        counts = counts.reshape(size, n)

        # The runs' means, and their mean.
        sums = counts @ flat
        means = sums / n
        means = means.reshape(size, runs, q)
        weights = run_weights[start:end]
        out[start:end] = np.einsum("br,brq->bq", weights, means)
    return out


def interval(draws: np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile interval of draws [n_boot]."""
    level = 0.95
    ends = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(draws, ends)
    return float(low), float(high)


def compare_rows(runs: Sequence[Evals], rows: Rows) -> tuple[list[Entry], list[str]]:
    """Compare each row, the last first, with its baselines, paired, on every set and on the mean of several.

    Args:
        runs: one entry a training run, all with the same rows and sets.
        rows: what the rows say of themselves.

    Returns:
        Entries {set, a, b, b_row, metric, n, runs, difference, low, high, excludes_zero, per_run} with 95%
        intervals, and notes on pairs that can't be compared.
    """
    # Each problem's value of each metric, by run, row and set.
    values = []
    for run in runs:
        of_run = {row: _values_of_sets(sets) for row, sets in run.items()}
        values.append(of_run)
    first_run = runs[0]
    names: dict[str, None] = {}  # of the sets, in order
    for sets in first_run.values():
        names |= dict.fromkeys(sets)

    entries = []
    notes = []
    for last in reversed(rows.values()):
        a = last.name
        for b, members in baselines_of(last, rows).items():
            over_sets: dict[str, list[EntryDraws]] = {}  # by metric
            for stream, name in enumerate(names):
                # The row, and those of the others that were evaluated on this set.
                others = []
                for other in members:
                    if name in first_run.get(other, {}):
                        others.append(other)
                if not others or name not in first_run.get(a, {}):
                    continue
                compared = (a, *others)
                if not _have_same_problems(runs, compared, name):
                    notes.append(
                        f"{a} minus {b} on {name}: left out, the problems differ; evaluate both again."
                    )
                    continue

                # An entry for each metric.
                of_set = []
                for of_run in values:
                    of_rows = {row: of_run[row][name] for row in compared}
                    of_set.append(of_rows)
                records = first_run[a][name]
                facts = {"set": name, "a": a, "b": b}
                counts = {
                    "n": len(records.references),
                    "runs": len(runs),
                }
                for entry, draws in _differences(of_set, b, stream):
                    entry = facts | entry | counts
                    entries.append(entry)
                    of_metric = over_sets.setdefault(entry["metric"], [])
                    of_metric.append((entry, draws))

            # The mean of the sets, where all of them can be compared.
            for parts in over_sets.values():
                if 1 < len(parts) == len(names):
                    entries.append(_average(parts))
    return entries, notes


def _values_of_sets(sets: Mapping[str, EvalRecords]) -> dict[str, Values]:
    return {name: problem_values(records) for name, records in sets.items()}


def _have_same_problems(
    runs: Sequence[Evals],
    rows: Sequence[str],
    name: str,
) -> bool:
    """Return whether the rows have the same problems on a set in all runs."""
    first = runs[0][rows[0]][name]
    for run in runs:
        for row in rows:
            if not run[row][name].same_problems(first):
                return False
    return True


def _differences(
    values: list[dict[str, Values]], b: str, stream: int
) -> list[EntryDraws]:
    """Subtract the best of the other rows by mean from the first row, on one set.

    Args:
        values: of each run, row -> metric -> [N].

    Returns:
        An entry and its draws for each metric.
    """
    first, *others = values[0]
    metrics = []
    for metric in values[0][first]:
        # "Best" has no meaning for a length or a variety.
        is_comparable = b != BEST_FIXED or metric not in COUNTS
        rows_have_it = True
        for run in values:
            for of_row in run.values():
                rows_have_it &= metric in of_row
        if is_comparable and rows_have_it:
            metrics.append(metric)

    # Of several others the one with the best mean stands, chosen for each metric by itself.
    best = {}
    differences_Q = []
    for metric in metrics:

        def mean_of(row: str, metric: str = metric) -> np.floating:
            of_runs = [run[row][metric] for run in values]
            return np.mean(of_runs)

        other = max(others, key=mean_of)
        best[metric] = other
        differences_R = []
        for run in values:
            difference_N = run[first][metric] - run[other][metric]
            differences_R.append(difference_N)
        differences_Q.append(np.stack(differences_R))
    differences_RNQ = np.stack(differences_Q, axis=-1)
    draws = bootstrap_draws(differences_RNQ, stream=stream)

    # An interval of each metric, all of the same draws of problems.
    entries = []
    for q, metric in enumerate(metrics):
        of_metric = draws[:, q]
        differences_RN = differences_RNQ[:, :, q]
        per_run = differences_RN.mean(axis=1)
        entry = _entry(of_metric, per_run, metric)
        entry["b_row"] = best[metric]
        entries.append((entry, of_metric))
    return entries


def _entry(
    draws: np.ndarray,
    per_run: np.ndarray,
    metric: str,
) -> Entry:
    low, high = interval(draws)
    return {
        "metric": metric,
        "difference": float(per_run.mean()),
        "low": low,
        "high": high,
        "excludes_zero": low > 0 or high < 0,
        "per_run": per_run.tolist(),
    }


def _average(parts: list[EntryDraws]) -> Entry:
    """Average one metric's difference over sets: sets are fixed, their problems (and the runs) resampled."""
    draws_of_sets = []
    per_run_of_sets = []
    rows: dict[str, None] = {}
    n = 0
    for entry, draws in parts:
        draws_of_sets.append(draws)
        per_run_of_sets.append(entry["per_run"])
        rows[entry["b_row"]] = None
        n += entry["n"]
    first, _ = parts[0]
    mean_draws = np.mean(draws_of_sets, axis=0)
    mean_per_run = np.mean(per_run_of_sets, axis=0)
    average = dict(first)
    average |= _entry(mean_draws, mean_per_run, first["metric"])
    average["set"] = AVERAGE
    average["n"] = n
    average["b_row"] = "/".join(rows)
    return average

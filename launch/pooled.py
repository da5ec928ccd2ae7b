"""A table's runs in groups: several runs as one line, and groups beside each other.

A group is one reasoner on several backbones. A problem's value is its mean over the group's runs, so that differences
are paired by problem and seed, and their intervals cover both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from comparison import Figures, called, finished, made, scale
from jobs import Job, Table
from slpo_jax.evaluation.comparisons import bootstrap_draws, interval
from slpo_jax.evaluation.curves import read_metrics, training_curves
from slpo_jax.evaluation.records import EvalRecords, read_evals
from slpo_jax.evaluation.report_rows import read_rows
from slpo_jax.evaluation.statistics import mean_se, problem_values
from slpo_jax.io.workdir import Workdir

Seeds = list[dict[str, np.ndarray]]
"""Of each seed set -> [N, Q], a problem's value of each metric."""
EVERY = "all"
_SECONDS = "seconds"
_LEARNED = "learned"


def pool(table: Table, root: Path, limit: int | None = None) -> dict[str, Any]:
    """Tables of groups; arguments as of `comparison.compare`.

    Returns:
        Name -> table: the rows of each group, with `_training`; their differences from each baseline, `EVERY` being the
        mean of the groups that have both; the first row of each group, by set, with `_training`, and its differences
        from the same of the group `table.beside`; and runs that aren't finished with every seed, whose groups are left
        out. Of rows of all runs the differences from each of `table.across`.
    """
    groups, lacking = _finished_groups(table, root.resolve(), limit)
    values = {group: _values(table, runs) for group, runs in groups.items()}
    columns = ["", *(called(metric) for metric in table.metrics)]
    metrics = table.metrics
    tables = dict[str, Any]()
    if values:
        means = {
            _line(group, row): _means(seeds, metrics) | _training(groups[group], row)
            for group, rows in values.items() for row, seeds in rows.items()
        }  # fmt: skip
        tables["groups"] = made(
            [*columns, _SECONDS, _LEARNED], means, [*metrics, _SECONDS, _LEARNED]
        )
        for metric in table.by_set:
            lines = {
                _line(group, row): {name: _means(_only(seeds, name), metrics)[metric] for name in seeds[0]}
                for group, rows in values.items() for row, seeds in rows.items()
            }  # fmt: skip
            sets = list(next(iter(lines.values())))
            tables[f"groups, {called(metric)} by set"] = made(
                ["", *map(called, sets)], lines, sets
            )
    for b in table.minus if values else ():
        both = {
            (group, row): (rows[row], rows[b])
            for group, rows in values.items()
            if b in rows
            for row in rows
        }
        both = {key: pair for key, pair in both.items() if key[1] != b}
        lines = {
            _line(*key): _difference([pair], metrics) for key, pair in both.items()
        }
        for row in dict.fromkeys(row for _, row in both):
            pairs = [pair for key, pair in both.items() if key[1] == row]
            lines[_line(EVERY, row)] = _difference(pairs, metrics)
        tables[f"groups, minus {called(b)}"] = made(columns, lines, metrics)
        for metric in table.by_set if both else ():
            each = {
                _line(*key): _by_set(*pair, metrics, metric)
                for key, pair in both.items()
            }
            sets = list(next(iter(each.values())))
            tables[f"groups, minus {called(b)}, {called(metric)} by set"] = made(
                ["", *map(called, sets)], each, sets
            )
    if table.beside in values:
        tables |= _beside(table, groups, values)
    if lacking:
        tables["left out"] = {"columns": ["", "seeds"], "rows": lacking}
    return tables | _across(table, root.resolve(), limit)


def _across(table: Table, root: Path, limit: int | None) -> dict[str, Any]:
    """The rows of all runs minus a row of one of them, over the seeds that both have finished."""
    if not table.across:
        return {}
    runs = {
        run.name: {job.seed: job for job in finished(table, run, root, limit)}
        for run in table.runs
    }
    tables = {}
    for base_run, base_row in table.across:
        lines: dict[str, Figures] = {}
        for name, jobs in runs.items():
            seeds = sorted(jobs.keys() & runs[base_run].keys())
            if not seeds:
                continue
            rows = _values(table, [[jobs[seed] for seed in seeds]])
            base = _values(table, [[runs[base_run][seed] for seed in seeds]])[base_row]
            others = {
                row: values
                for row, values in rows.items()
                if (name, row) != (base_run, base_row)
            }
            lines |= {
                _line(name, row): _difference([(values, base)], table.metrics)
                for row, values in others.items()
            }
        if lines:
            columns = ["", *(called(metric) for metric in table.metrics)]
            tables[f"minus {_line(base_run, base_row)}"] = made(
                columns, lines, table.metrics
            )
    return tables


def _beside(
    table: Table,
    groups: dict[str, list[list[Job]]],
    values: dict[str, dict[str, Seeds]],
) -> dict[str, Any]:
    """The first row of each group: its first metric in each set, with `_training`, and its differences."""
    first = table.rows[0]
    metrics = table.metrics
    title = called(first)
    base = values[table.beside][first]
    minus = f"{title}, minus {called(table.beside)}"
    sets = list(base[0])
    others = {
        called(group): (rows[first], base)
        for group, rows in values.items()
        if group != table.beside
    }
    lines = {line: _difference([pair], metrics) for line, pair in others.items()}
    tables = {minus: made(["", *map(called, metrics)], lines, metrics)}
    for metric in table.by_set:
        lines = {
            line: _by_set(a, b, metrics, metric) for line, (a, b) in others.items()
        }
        tables[f"{minus}, {called(metric)} by set"] = made(
            ["", *map(called, sets)], lines, sets
        )
    for metric in table.by_set[:1]:
        lines = {
            called(group): {
                name: _means(_only(rows[first], name), metrics)[metric] for name in sets
            }
            | _training(groups[group], first)
            for group, rows in values.items()
        }
        columns = [*sets, _SECONDS, _LEARNED]
        tables[title] = made(["", *map(called, columns)], lines, columns)
    return tables


def _line(group: str, row: str) -> str:
    return f"{called(group)}: {called(row)}"


def _finished_groups(
    table: Table, root: Path, limit: int | None
) -> tuple[dict[str, list[list[Job]]], list[list[str]]]:
    """Those of which every run is finished with every seed: their jobs, by run and seed; and the runs that aren't."""
    groups: dict[str, list[list[Job]]] = {}
    lacking = []
    for run in (run for run in table.runs if run.group):
        jobs = {job.seed: job for job in finished(table, run, root, limit)}
        missing = [seed for seed in run.seeds or table.seeds if seed not in jobs]
        if missing:
            lacking.append([called(run.name), ", ".join(map(str, missing))])
        groups.setdefault(run.group, []).append(
            [] if missing else [jobs[seed] for seed in run.seeds or table.seeds]
        )
    return {group: runs for group, runs in groups.items() if all(runs)}, lacking


def _values(table: Table, runs: list[list[Job]]) -> dict[str, Seeds]:
    """Row -> the values of those rows that all runs have, in mean over the runs."""

    def of(records: EvalRecords) -> np.ndarray:
        values = problem_values(records, paired=False)
        return np.stack([values[metric] for metric in table.metrics], axis=-1)

    evals = [
        [read_evals(job.workdir, read_rows(job.workdir))[0] for job in jobs]
        for jobs in runs
    ]
    rows = [
        row for row in table.rows if all(row in seed for run in evals for seed in run)
    ]
    return {
        row: [
            {name: np.mean([of(run[row][name]) for run in seed], axis=0) for name in seed[0][row]}
            for seed in zip(*evals, strict=True)
        ]
        for row in rows
    }  # fmt: skip


def _training(runs: list[list[Job]], row: str) -> Figures:
    """Seconds of training the row's checkpoint from what it starts from, without compilation; and the share of training
    rows that were right in its last steps, where that was logged, of CoLaR's sort after the true thought."""
    curves = [
        [
            training_curves(read_metrics(Workdir(job.workdir).metrics)[0])[row]
            for job in run
        ]
        for run in runs
    ]
    found = {
        _SECONDS: _with_error(
            np.mean(
                [[seed["elapsed"][1][-1] for seed in run] for run in curves], axis=0
            )
        )
    }
    for right in (
        "accuracy",
        "answered",
    ):  # CoLaR's words have the first, its thoughts after them the second
        if all(right in seed for run in curves for seed in run):
            last = np.mean(
                [[seed[right][1][-1] for seed in run] for run in curves], axis=0
            )
            found[_LEARNED] = _with_error(100 * last)
    return found


def _with_error(values_S: np.ndarray) -> dict[str, float]:
    return {"value": float(np.mean(values_S)), "se": mean_se(values_S) or 0.0}


def _means(seeds: Seeds, metrics: Sequence[str]) -> dict[str, dict[str, float]]:
    """Mean of the sets."""
    means_SQ = np.array(
        [
            np.mean([x_NQ.mean(axis=0) for x_NQ in sets.values()], axis=0)
            for sets in seeds
        ]
    )
    return {
        metric: _with_error(scale(metric) * means_SQ[:, q])
        for q, metric in enumerate(metrics)
    }


def _only(seeds: Seeds, name: str) -> Seeds:
    return [{name: sets[name]} for sets in seeds]


def _by_set(a: Seeds, b: Seeds, metrics: Sequence[str], metric: str) -> Figures:
    """One metric's difference in each set."""
    return {
        name: _difference([(_only(a, name), _only(b, name))], metrics)[metric]
        for name in a[0]
    }


def _difference(
    pairs: Sequence[tuple[Seeds, Seeds]], metrics: Sequence[str]
) -> Figures:
    """a minus b, mean of the pairs and of the sets."""
    values = []
    draws = []
    for stream, name in enumerate(pairs[0][0][0]):
        each = [
            np.stack([x[name] - y[name] for x, y in zip(a, b, strict=True)])
            for a, b in pairs
        ]
        mean_SNQ = np.mean(each, axis=0)
        values.append(mean_SNQ.mean(axis=(0, 1)))
        draws.append(bootstrap_draws(mean_SNQ, stream=stream))
    value_Q = np.mean(values, axis=0)
    draws_BQ = np.mean(draws, axis=0)
    found = Figures()
    for q, metric in enumerate(metrics):
        figure = dict(
            zip(
                ("value", "low", "high"),
                (value_Q[q], *interval(draws_BQ[:, q])),
                strict=True,
            )
        )
        found[metric] = {key: float(scale(metric) * x) for key, x in figure.items()}
    return found

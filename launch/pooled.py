"""A table's runs in groups: several runs as one line, and groups beside each other.

A group is one reasoner on several backbones. A problem's value is its mean over the group's runs, so that differences
are paired by problem and seed, and their intervals cover both.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from comparison import Figures, display_name, find_finished, make_table, scale
from jobs import Job, Table
from slpo_jax.evaluation.comparisons import bootstrap_draws, interval
from slpo_jax.evaluation.curves import read_metrics, training_curves
from slpo_jax.evaluation.records import EvalRecords, read_evals
from slpo_jax.evaluation.report_rows import read_rows
from slpo_jax.evaluation.statistics import mean_se, problem_values
from slpo_jax.io.workdir import Workdir

Seeds = list[dict[str, np.ndarray]]
"""Of each seed set -> [N, Q], a problem's value of each metric."""
Values = dict[str, dict[str, Seeds]]
"""Group -> row -> its values."""
Groups = dict[str, list[list[Job]]]
"""Group -> the jobs of each of its runs, one a seed."""
Pair = tuple[Seeds, Seeds]
EVERY = "all"
_SECONDS = "seconds"
_LEARNED = "learned"


def pool(
    table: Table,
    root: Path,
    limit: int | None = None,
) -> dict[str, Any]:
    """Tables of groups; arguments as of `comparison.compare`.

    Returns:
        Name -> table: the rows of each group, with `_training`; their differences from each baseline, `EVERY` being the
        mean of the groups that have both; the first row of each group, by set, with `_training`, and its differences
        from the same of the group `table.beside`; and runs that aren't finished with every seed, whose groups are left
        out. Of rows of all runs the differences from each of `table.across`.
    """
    groups, lacking = _finished_groups(table, root.resolve(), limit)
    values = {group: _values(table, runs) for group, runs in groups.items()}
    tables = dict[str, Any]()
    if values:
        tables |= _means_of_groups(table, groups, values)
        for b in table.minus:
            tables |= _minus(table, values, b)
    if table.beside in values:
        tables |= _beside(table, groups, values)
    if lacking:
        tables["left out"] = {
            "columns": ["", "seeds"],
            "rows": lacking,
        }
    return tables | _across(table, root.resolve(), limit)


def _means_of_groups(
    table: Table,
    groups: Groups,
    values: Values,
) -> dict[str, Any]:
    """The rows of each group, with `_training`, and their means in each set."""
    metrics = table.metrics
    more = [*metrics, _SECONDS, _LEARNED]
    means = {}
    for group, rows in values.items():
        for row, seeds in rows.items():
            figures = _means(seeds, metrics)
            figures |= _training(groups[group], row)
            means[_line(group, row)] = figures
    header = ["", *map(display_name, more)]
    tables = {"groups": make_table(header, means, more)}
    for metric in table.by_set:
        lines = {}
        for group, rows in values.items():
            for row, seeds in rows.items():
                lines[_line(group, row)] = _means_by_set(seeds, metrics, metric)
        title = f"groups, {display_name(metric)} by set"
        tables[title] = _made_by_set(lines)
    return tables


def _minus(
    table: Table,
    values: Values,
    b: str,
) -> dict[str, Any]:
    """The rows of each group that has the baseline, minus that; `EVERY` is the mean of those groups."""
    metrics = table.metrics
    pairs_of_row: dict[str, list[Pair]] = {}
    lines = {}
    for group, rows in values.items():
        for row, seeds in rows.items():
            if b in rows and row != b:
                pair = (seeds, rows[b])
                pairs_of_row.setdefault(row, []).append(pair)
                lines[_line(group, row)] = _difference([pair], metrics)
    for row, pairs in pairs_of_row.items():
        lines[_line(EVERY, row)] = _difference(pairs, metrics)
    title = f"groups, minus {display_name(b)}"
    tables = {
        title: make_table(
            [
                "",
                *map(display_name, metrics),
            ],
            lines,
            metrics,
        )
    }
    for metric in table.by_set if lines else ():
        each = {}
        for group, rows in values.items():
            for row, seeds in rows.items():
                if b in rows and row != b:
                    line = _line(group, row)
                    each[line] = _by_set(
                        seeds,
                        rows[b],
                        metrics,
                        metric,
                    )
        tables[f"{title}, {display_name(metric)} by set"] = _made_by_set(each)
    return tables


def _made_by_set(lines: Mapping[str, Figures]) -> dict[str, Any]:
    """A table whose columns are the sets."""
    sets = list(next(iter(lines.values())))
    return make_table(
        [
            "",
            *map(display_name, sets),
        ],
        lines,
        sets,
    )


def _across(
    table: Table,
    root: Path,
    limit: int | None,
) -> dict[str, Any]:
    """The rows of all runs minus a row of one of them, over the seeds that both have finished."""
    if not table.across:
        return {}
    runs = {}
    for run in table.runs:
        jobs = find_finished(table, run, root, limit)
        runs[run.name] = {job.seed: job for job in jobs}
    metrics = table.metrics
    tables = {}
    for base_run, base_row in table.across:
        lines: dict[str, Figures] = {}
        for name, jobs in runs.items():
            seeds = sorted(jobs.keys() & runs[base_run].keys())
            if not seeds:
                continue
            rows = _values(table, [[jobs[seed] for seed in seeds]])
            base = _values(table, [[runs[base_run][seed] for seed in seeds]])[base_row]
            for row, values in rows.items():
                if (name, row) != (base_run, base_row):
                    lines[_line(name, row)] = _difference([(values, base)], metrics)
        if lines:
            title = f"minus {_line(base_run, base_row)}"
            tables[title] = make_table(
                [
                    "",
                    *map(display_name, metrics),
                ],
                lines,
                metrics,
            )
    return tables


def _beside(
    table: Table,
    groups: Groups,
    values: Values,
) -> dict[str, Any]:
    """The first row of each group: its first metric in each set, with `_training`, and its differences."""
    first = table.rows[0]
    metrics = table.metrics
    title = display_name(first)
    minus = f"{title}, minus {display_name(table.beside)}"
    base = values[table.beside][first]
    others = {}
    for group, rows in values.items():
        if group != table.beside:
            others[display_name(group)] = rows[first]

    # Their differences, mean of the sets and by set.
    lines = {}
    for line, seeds in others.items():
        lines[line] = _difference([(seeds, base)], metrics)
    tables = {
        minus: make_table(
            [
                "",
                *map(display_name, metrics),
            ],
            lines,
            metrics,
        )
    }
    for metric in table.by_set:
        lines = {}
        for line, seeds in others.items():
            lines[line] = _by_set(seeds, base, metrics, metric)
        columns = list(base[0])
        header = ["", *map(display_name, columns)]
        tables[f"{minus}, {display_name(metric)} by set"] = make_table(
            header, lines, columns
        )

    # The figures themselves.
    for metric in table.by_set[:1]:
        lines = {}
        for group, rows in values.items():
            figures = _means_by_set(rows[first], metrics, metric)
            figures |= _training(groups[group], first)
            lines[display_name(group)] = figures
        columns = [*base[0], _SECONDS, _LEARNED]
        tables[title] = make_table(
            [
                "",
                *map(display_name, columns),
            ],
            lines,
            columns,
        )
    return tables


def _line(group: str, row: str) -> str:
    return f"{display_name(group)}: {display_name(row)}"


def _finished_groups(
    table: Table,
    root: Path,
    limit: int | None,
) -> tuple[Groups, list[list[str]]]:
    """Those of which every run is finished with every seed: their jobs, by run and seed; and the runs that aren't."""
    groups: Groups = {}
    lacking = []
    for run in table.runs:
        if not run.group:
            continue
        jobs = {
            job.seed: job
            for job in find_finished(
                table,
                run,
                root,
                limit,
            )
        }
        seeds = run.seeds or table.seeds
        missing = [seed for seed in seeds if seed not in jobs]
        of_run = []
        if missing:
            lacking.append(
                [
                    display_name(run.name),
                    ", ".join(map(str, missing)),
                ]
            )
        else:
            of_run = [jobs[seed] for seed in seeds]
        groups.setdefault(run.group, []).append(of_run)
    whole = {group: runs for group, runs in groups.items() if all(runs)}
    return whole, lacking


def _values(table: Table, runs: Sequence[Sequence[Job]]) -> dict[str, Seeds]:
    """Row -> the values of those rows that all runs have, in mean over the runs."""
    # Read the evaluations of every run and seed.
    evals = []
    for jobs in runs:
        of_run = []
        for job in jobs:
            found, _ = read_evals(job.workdir, read_rows(job.workdir))
            of_run.append(found)
        evals.append(of_run)

    # A problem's value is its mean over the runs.
    values: dict[str, Seeds] = {}
    for row in table.rows:
        if not _all_have(evals, row):
            continue
        values[row] = []
        for seed in zip(*evals, strict=True):
            sets = {}
            for name in seed[0][row]:
                each = [_stack(run[row][name], table.metrics) for run in seed]
                sets[name] = np.mean(each, axis=0)
            values[row].append(sets)
    return values


def _all_have(runs: Sequence[Sequence[Any]], key: str) -> bool:
    """Whether every seed of every run has it."""
    every = itertools.chain.from_iterable(runs)
    return all(key in seed for seed in every)


def _stack(records: EvalRecords, metrics: Sequence[str]) -> np.ndarray:
    """[N, Q], a problem's value of each metric."""
    values = problem_values(records, paired=False)
    return np.stack([values[metric] for metric in metrics], axis=-1)


def _training(runs: Sequence[Sequence[Job]], row: str) -> Figures:
    """Seconds of training the row's checkpoint from what it starts from, without compilation; and the share of training
    rows that were right in its last steps, where that was logged, of CoLaR's sort after the true thought."""
    curves = []
    for jobs in runs:
        of_run = []
        for job in jobs:
            metrics, _ = read_metrics(Workdir(job.workdir).metrics)
            of_run.append(training_curves(metrics)[row])
        curves.append(of_run)
    found = {_SECONDS: _with_error(_last_values(curves, "elapsed"))}
    # CoLaR's words have the first, its thoughts after them the second.
    for right in ("accuracy", "answered"):
        if _all_have(curves, right):
            found[_LEARNED] = _with_error(100 * _last_values(curves, right))
    return found


def _last_values(curves: Sequence[Sequence[Any]], scalar: str) -> np.ndarray:
    """[S], the last value of each seed's curve, in mean over the runs."""
    last = []
    for seeds in curves:
        last.append([seed[scalar][1][-1] for seed in seeds])
    return np.mean(last, axis=0)


def _with_error(values_S: np.ndarray) -> dict[str, float]:
    return {
        "value": float(np.mean(values_S)),
        "se": mean_se(values_S) or 0.0,
    }


def _means(seeds: Seeds, metrics: Sequence[str]) -> Figures:
    """Mean of the sets."""
    # Sets weigh the same, however many problems they have.
    means = []
    for sets in seeds:
        of_sets = [values_NQ.mean(axis=0) for values_NQ in sets.values()]
        means.append(np.mean(of_sets, axis=0))
    means_SQ = np.array(means)
    figures = {}
    for q, metric in enumerate(metrics):
        figures[metric] = _with_error(scale(metric) * means_SQ[:, q])
    return figures


def _only(seeds: Seeds, name: str) -> Seeds:
    return [{name: sets[name]} for sets in seeds]


def _means_by_set(seeds: Seeds, metrics: Sequence[str], metric: str) -> Any:
    """One metric's mean in each set."""
    means = {}
    for name in seeds[0]:
        means[name] = _means(_only(seeds, name), metrics)[metric]
    return means


def _by_set(
    a: Seeds,
    b: Seeds,
    metrics: Sequence[str],
    metric: str,
) -> Any:
    """One metric's difference in each set."""
    differences = {}
    for name in a[0]:
        pair = (_only(a, name), _only(b, name))
        differences[name] = _difference([pair], metrics)[metric]
    return differences


def _difference(pairs: Sequence[Pair], metrics: Sequence[str]) -> Figures:
    """a minus b, mean of the pairs and of the sets."""
    values = []
    draws = []
    first, _ = pairs[0]
    # Problems are drawn again for each set, seeds are the same in all of them.
    for stream, name in enumerate(first[0]):
        each = []
        for a, b in pairs:
            of_seeds = [x[name] - y[name] for x, y in zip(a, b, strict=True)]
            each.append(np.stack(of_seeds))
        mean_SNQ = np.mean(each, axis=0)
        values.append(mean_SNQ.mean(axis=(0, 1)))
        draws.append(bootstrap_draws(mean_SNQ, stream=stream))
    value_Q = np.mean(values, axis=0)
    draws_BQ = np.mean(draws, axis=0)
    found = Figures()
    for q, metric in enumerate(metrics):
        low, high = interval(draws_BQ[:, q])
        times = scale(metric)
        found[metric] = {
            "value": float(times * value_Q[q]),
            "low": float(times * low),
            "high": float(times * high),
        }
    return found

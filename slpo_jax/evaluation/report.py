"""The report: `report.json`, `report.html` and `report.md`, a pure function of the files in a workdir.

`write_report` reports one training run, `compare_runs` several training seeds of the same configuration.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.evaluation.chance import chance_level
from slpo_jax.evaluation.comparisons import AVERAGE, compare_rows
from slpo_jax.evaluation.curves import (
    pass_curves,
    read_metrics,
    stop_times,
    training_curves,
)
from slpo_jax.evaluation.headline import make_headline
from slpo_jax.evaluation.records import EvalRecords, Evals, Pair, read_evals
from slpo_jax.evaluation.render import (
    Thoughts,
    read_thoughts,
    render_markdown,
    render_page,
)
from slpo_jax.evaluation.report_rows import (
    Rows,
    differing_settings,
    read_rows,
    reported_settings,
    sweeps_of,
)
from slpo_jax.evaluation.statistics import mean_se, summarise
from slpo_jax.io import artifact
from slpo_jax.io.files import flatten, read_json, to_json, write_text
from slpo_jax.io.workdir import Workdir

_MILLISECONDS = "milliseconds"


def write_report(workdir: str | Path) -> dict[str, Any]:
    """Write `report.json`, `report.html` and `report.md` of one workdir.

    Reads `eval/ROW/row.json` and `eval/ROW/NAME.jsonl`, and where they exist `NAME.thoughts.json`, `metrics.jsonl`
    and, for the order of the sets, `config.json`. Any subset of rows, sets and samples will do.

    Returns:
        What `report.json` holds: headline, eval {row: {set: figures}}, average, chance, differences, rows, settings,
        notes, thresholds, curves, stop_times, training.

    Raises:
        UserError: there are no eval files, or a file is malformed.
    """
    folder = Workdir(Path(workdir))
    rows, evals, left_out = _read(folder)
    times = _read_times(folder, rows)
    metrics, notes = read_metrics(folder.metrics)
    notes += left_out
    names_of: dict[str, list[str]] = {}
    for row in rows.values():
        if row.source:
            names = names_of.setdefault(row.source, [])
            names.append(row.name)
    for source, names in names_of.items():
        taken = ", ".join(names)
        notes.append(f"Taken from {source}: {taken}.")
    more = {
        "thresholds": sweeps_of(rows),
        "training": training_curves(metrics),
    }
    thoughts = read_thoughts(folder.root, evals)
    return _write(
        folder,
        [evals],
        [rows],
        [times],
        notes,
        more,
        thoughts,
    )


def compare_runs(workdirs: Sequence[str | Path], out: str | Path) -> dict[str, Any]:
    """Write `report.json`, `report.html` and `report.md` over several training runs (seeds) of one configuration.

    Figures are means over runs with their standard error over runs; differences resample runs and problems. Rows and
    sets that not every run has are left out and noted, and so are settings, other than the seed, in which runs differ.
    What rows say of themselves is the first run's.

    Returns:
        What `report.json` holds, as `write_report`, with `runs` and, in each figure set, `per_run`.

    Raises:
        UserError: a folder without eval files, or named twice.
    """
    paths = [Path(workdir) for workdir in workdirs]
    out = Path(out)
    folders = {path.resolve() for path in (*paths, out)}
    are_different = len(folders) == len(paths) + 1
    if not are_different or out.is_file():
        raise UserError(
            f"compare: --out ({out}) and the runs have to be different folders; name each of them once"
        )

    # Read the runs.
    rows_of_runs: list[Rows] = []
    evals_of_runs: list[Evals] = []
    notes: list[str] = []
    for path in paths:
        rows, evals, left_out = _read(Workdir(path))
        rows_of_runs.append(rows)
        evals_of_runs.append(evals)
        for note in left_out:
            notes.append(f"{path.name}: {note}")

    # Keep the rows and sets that all of them have, of the same problems.
    common, why_not = _common_pairs(evals_of_runs)
    if not common:
        raise UserError(
            "compare: no row and set that all runs have of the same problems; evaluate the same in each"
        )
    notes += why_not
    runs: list[Evals] = []
    for evals in evals_of_runs:
        kept: Evals = {}
        for row, sets in evals.items():
            for name, records in sets.items():
                if (row, name) in common:
                    of_row = kept.setdefault(row, {})
                    of_row[name] = records
        runs.append(kept)
    for place, rows in enumerate(rows_of_runs):
        rows_of_runs[place] = {name: rows[name] for name in runs[0]}

    # Note in which settings the runs differ, and where their seeds don't.
    keys = differing_settings(rows_of_runs)
    if keys:
        differ = ", ".join(keys)
        notes.append(f"The runs' settings differ in: {differ}.")
    seeds: list[int] = []
    for rows in rows_of_runs:
        *_, last = rows.values()
        seed = last.settings.get("seed")
        if seed is not None:
            seeds.append(seed)
    if len(set(seeds)) < len(seeds):
        notes.append(
            "Some runs share config.seed: they are not independent training seeds."
        )

    times = []
    names: list[str] = []
    thresholds = {}
    for path, rows in zip(paths, rows_of_runs, strict=True):
        times.append(_read_times(Workdir(path), rows))
        names.append(path.name or str(path))
        thresholds[path.name] = sweeps_of(rows)
    more = {
        "runs": names,
        "thresholds": thresholds,
    }
    return _write(
        Workdir(out),
        runs,
        rows_of_runs,
        times,
        notes,
        more,
    )


def _common_pairs(runs: Sequence[Evals]) -> tuple[set[Pair], list[str]]:
    """Return the pairs of row and set that all runs have of the same problems, and notes on the others."""
    pairs_of_runs: list[set[Pair]] = []
    for evals in runs:
        pairs: set[Pair] = set()
        for row, sets in evals.items():
            for name in sets:
                pairs.add((row, name))
        pairs_of_runs.append(pairs)
    everywhere = set.intersection(*pairs_of_runs)
    common = set()
    for row, name in everywhere:
        first, *others = [evals[row][name] for evals in runs]
        if all(records.same_problems(first) for records in others):
            common.add((row, name))

    # Why each of the others is left out.
    notes = []
    all_pairs = set.union(*pairs_of_runs)
    for row, name in sorted(all_pairs - common):
        why = "not every run has it"
        if (row, name) in everywhere:
            why = "its problems differ from run to run"
        notes.append(f"{row} on {name}: left out, {why}.")
    return common, notes


def _read(workdir: Workdir) -> tuple[Rows, Evals, list[str]]:
    """Read the rows that have records, the records, with the sets in config's order, and notes.

    Left out are rows of stages whose checkpoint is gone from beside those of others, which are not of one run any more.
    """
    rows = read_rows(workdir.root)
    evals, notes = read_evals(workdir.root, rows)

    # Leave out the rows whose checkpoint is gone.
    finished = workdir.finished_stages()
    for row in rows.values():
        is_own = row.stage and not row.source
        if finished and is_own and row.stage not in finished:
            folder = workdir.eval / row.name
            notes.append(
                f"{row.name}: left out, its checkpoint is gone; delete {folder}."
            )
            evals.pop(row.name, None)
    if not evals:
        raise UserError(
            f"{workdir.eval}: holds no whole evaluation ({notes[0]}); run the evaluate stage again"
        )

    # Put the sets in config's order, then any others by name.
    settings = flatten(read_json(workdir.config, default={}))
    names = list(settings.get("evaluate.datasets") or ())

    def place(name: str) -> int:
        return names.index(name) if name in names else len(names)

    for evaluated, sets in evals.items():
        in_order = sorted(sets, key=place)
        evals[evaluated] = {name: sets[name] for name in in_order}
    evaluated_rows = {name: rows[name] for name in evals}
    return evaluated_rows, evals, notes


def _read_times(workdir: Workdir, rows: Rows) -> dict[str, Any]:
    """Read how long an answer of the rows takes: set, batch and device, and milliseconds by row.

    Those of rows whose checkpoint is another one by now are left out, and {} is what a workdir without any has.
    """
    measured = artifact.read(workdir.times)
    if measured is None:
        return {}
    known = measured.facts["rows"]
    current = {}
    for name, milliseconds in measured.value["rows"].items():
        row = rows.get(name)
        if row is None or row.source:
            continue
        if known[name] == [row.checkpoint, row.evaluation]:
            current[name] = milliseconds
    return {**measured.value, "rows": current}


def _write(
    workdir: Workdir,
    runs: Sequence[Evals],
    rows: Sequence[Rows],
    times: Sequence[Mapping[str, Any]],
    notes: list[str],
    more: Mapping[str, Any],
    thoughts: Thoughts | None = None,
) -> dict[str, Any]:
    """Make the report of several runs, or of one, whose page has its problems and `thoughts`, and write it."""
    # Each run's figures, with the milliseconds on the set that they were measured on.
    figures = []
    for run, measured in zip(runs, times, strict=True):
        of_run = {row: _summarise_sets(sets) for row, sets in run.items()}
        name = measured.get("set", "")
        for row, milliseconds in measured.get("rows", {}).items():
            of_row = of_run.get(row, {})
            if name in of_row:
                of_row[name][_MILLISECONDS] = milliseconds
        figures.append(of_run)
    first_times = times[0]
    if first_times:
        notes.append(
            f"Milliseconds per answer: {first_times['batch']:,} answers together on {first_times['set']}, "
            f"all rows in one run, on {first_times['device']}."
        )

    # Their means over runs, and what guessing gets right.
    evaluated: dict[str, dict[str, Any]] = {}
    chances = {}
    for row, sets in runs[0].items():
        evaluated[row] = {}
        for name, records in sets.items():
            summaries = [of_run[row][name] for of_run in figures]
            evaluated[row][name] = _average_runs(summaries)
            chances[name] = chance_level(records, name)

    first_rows = rows[0]
    differences, left_out = compare_rows(runs, first_rows)
    report: dict[str, Any] = {
        "eval": evaluated,
        AVERAGE: _average_sets(figures),
        "chance": chances,
        "differences": differences,
        "rows": {name: row.facts for name, row in first_rows.items()},
        "settings": reported_settings(rows),
        "notes": notes + left_out,
        "curves": pass_curves(runs),
        "stop_times": stop_times(runs),
        **more,
    }
    headline = make_headline(report)
    report = {"headline": headline, **report}

    # A list of numbers stands in a line of its own; a line's end stands in no string.
    text = to_json(report, indent=1)
    text = re.sub(
        r"\[\n[^\[\]{}\"]*\]",
        lambda match: " ".join(match[0].split()),
        text,
    )
    write_text(workdir.report_json, f"{text}\n")
    folder = workdir.root.resolve()
    title = f"Evaluation report: {folder.name}"
    evals = {} if thoughts is None else runs[0]
    page = render_page(title, report, evals, thoughts or {})
    write_text(workdir.report_html, page)
    markdown = render_markdown(report)
    write_text(workdir.report_md, markdown)
    return report


def _summarise_sets(sets: Mapping[str, EvalRecords]) -> dict[str, dict[str, Any]]:
    return {name: summarise(records) for name, records in sets.items()}


def _average_runs(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return figures: one run's, or means, `_se` over runs, `per_run`; single runs' errors and p don't average."""
    first = summaries[0]
    if len(summaries) == 1:
        return first
    out: dict[str, Any] = {
        "n": first["n"],
        "runs": len(summaries),
    }
    per_run: dict[str, list[float]] = {}
    for key in first:
        if key.endswith(("_se", "_p")):
            continue
        values: list[Any] = [summary.get(key) for summary in summaries]
        if all(isinstance(value, float) for value in values):
            per_run[key] = values
            out[key] = float(np.mean(values))
            out[f"{key}_se"] = mean_se(np.array(values))

    # An interval stands where the figure is the same in all runs.
    intervals = {}
    for key, ends in first.get("intervals", {}).items():
        values_of_runs = per_run.get(key, ())
        if set(values_of_runs) == {first[key]}:
            intervals[key] = ends
    if intervals:
        out["intervals"] = intervals
    out["per_run"] = per_run
    return out


def _average_sets(summaries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Average each row over the sets, if it has them all: {row: {metric, metric_se}}, errors combined over sets."""
    names = set().union(*summaries[0].values())
    if len(names) == 1:
        return {}
    averages = {}
    for row, sets in summaries[0].items():
        if sets.keys() == names:
            of_runs = []
            for summary in summaries:
                parts = [*summary[row].values()]
                of_runs.append(_mean(parts))
            averages[row] = _average_runs(of_runs)
    return averages


def _mean(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Average independent figures; an error is None where one of them has none, as of a set of one problem."""
    n = sum(part["n"] for part in parts)
    out: dict[str, Any] = {"n": n}

    # The figures that have an error in all parts.
    keys = []
    for key in parts[0]:
        error_key = f"{key}_se"
        if all(error_key in part for part in parts):
            keys.append(key)
    for key in keys:
        values = [part[key] for part in parts]
        out[key] = float(np.mean(values))

    # Time is measured on one of the sets, and stands for all.
    for part in parts:
        if _MILLISECONDS in part:
            out[_MILLISECONDS] = part[_MILLISECONDS]

    # The errors of the means, and the intervals of means that are 0 or 1.
    bounds = {}
    for key in keys:
        errors = []
        intervals = []
        for part in parts:
            errors.append(part[f"{key}_se"])
            intervals_of_part = part.get("intervals", {})
            intervals.append(intervals_of_part.get(key))
        of_mean = None
        if None not in errors:
            of_mean = math.hypot(*errors) / len(errors)
        out[f"{key}_se"] = of_mean
        if out[key] in (0, 1) and None not in intervals:
            bounds[key] = _interval_of_mean(intervals, out[key])
    if bounds:
        out["intervals"] = bounds
    return out


def _interval_of_mean(
    intervals: Sequence[Sequence[float]], value: float
) -> list[float]:
    """Return Wilson's interval of a mean over sets that are all 0, or all 1.

    Of n problems its width is w = z^2 / (n + z^2), and w / (1 - w) is z^2 / n. Over k sets, the variance of the mean is
    a k-th of the mean variance, and so is this ratio.
    """
    ratios = []
    for low, high in intervals:
        width = high - low
        ratios.append(width / (1 - width))

    count = len(ratios)
    ratio = sum(ratios) / count**2
    width = ratio / (1 + ratio)
    if value == 0:
        return [0.0, width]
    return [1 - width, 1.0]

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
from slpo_jax.evaluation.comparisons import AVERAGE, compare_rows
from slpo_jax.evaluation.curves import (
    pass_curves,
    read_metrics,
    stop_times,
    training_curves,
)
from slpo_jax.evaluation.records import Evals, read_evals
from slpo_jax.evaluation.render import (
    Thoughts,
    render_markdown,
    render_page,
    thoughts_of,
)
from slpo_jax.evaluation.report_rows import (
    Rows,
    differing_settings,
    read_rows,
    reported_settings,
    sweeps_of,
)
from slpo_jax.evaluation.statistics import mean_se, summarise
from slpo_jax.evaluation.verdict import chance, verdict
from slpo_jax.io import artifact
from slpo_jax.io.files import flatten, read_json, to_json, write_text
from slpo_jax.io.workdir import Workdir

_MILLISECONDS = "milliseconds"


def write_report(workdir: str | Path) -> dict[str, Any]:
    """Write `report.json`, `report.html` and `report.md` of one workdir.

    Reads `eval/ROW/row.json` and `eval/ROW/NAME.jsonl`, and where they exist `NAME.thoughts.json`, `metrics.jsonl`
    and, for the order of the sets, `config.json`. Any subset of rows, sets and samples will do.

    Returns:
        What `report.json` holds: verdict, eval {row: {set: figures}}, average, chance, differences, rows, settings,
        notes, thresholds, curves, stop_times, training.

    Raises:
        UserError: there are no eval files, or a file is malformed.
    """
    folder = Workdir(Path(workdir))
    rows, evals, left_out = _read(folder)
    times = _times(folder, rows)
    metrics, notes = read_metrics(folder.metrics)
    pairs: dict[str, list[str]] = {}
    for row in rows.values():
        pairs.setdefault(row.source, []).append(row.name)
    notes += left_out + [
        f"Taken from {source}: {', '.join(names)}."
        for source, names in pairs.items()
        if source
    ]
    more = {"thresholds": sweeps_of(rows), "training": training_curves(metrics)}
    return _write(
        folder, [evals], [rows], [times], notes, more, thoughts_of(folder.root, evals)
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
    folders = [path.resolve() for path in (*paths, Path(out))]
    if len(set(folders)) < len(folders) or folders[-1].is_file():
        raise UserError(
            f"compare: --out ({out}) and the runs have to be different folders; name each of them once"
        )
    parts = [_read(Workdir(path)) for path in paths]
    notes = [
        f"{path.name}: {note}"
        for path, (*_, left_out) in zip(paths, parts, strict=True)
        for note in left_out
    ]
    pairs = [
        {(row, name) for row, sets in evals.items() for name in sets}
        for _, evals, _ in parts
    ]
    everywhere = set.intersection(*pairs)
    (_, first, _) = parts[0]
    common = {
        (row, name) for row, name in everywhere
        if all(evals[row][name].same_problems(first[row][name]) for _, evals, _ in parts)
    }  # fmt: skip
    if not common:
        raise UserError(
            "compare: no row and set that all runs have of the same problems; evaluate the same in each"
        )
    for row, name in sorted(set.union(*pairs) - common):
        why = (
            "its problems differ from run to run"
            if (row, name) in everywhere
            else "not every run has it"
        )
        notes.append(f"{row} on {name}: left out, {why}.")
    runs: list[Evals] = [{} for _ in parts]
    for run, (_, evals, _) in zip(runs, parts, strict=True):
        for row, name in [
            (row, name)
            for row, sets in evals.items()
            for name in sets
            if (row, name) in common
        ]:
            run.setdefault(row, {})[name] = evals[row][name]
    rows = [{name: rows_of[name] for name in runs[0]} for rows_of, *_ in parts]
    if differ := differing_settings(rows):
        notes.append(f"The runs' settings differ in: {', '.join(differ)}.")
    seeds = [
        seed
        for rows_of in rows
        if (seed := [*rows_of.values()][-1].settings.get("seed")) is not None
    ]
    if len(set(seeds)) < len(seeds):
        notes.append(
            "Some runs share config.seed: they are no independent training seeds."
        )
    thresholds = {
        path.name: sweeps_of(rows_of) for path, rows_of in zip(paths, rows, strict=True)
    }
    times = [
        _times(Workdir(path), rows_of)
        for path, rows_of in zip(paths, rows, strict=True)
    ]
    more = {
        "runs": [path.name or str(path) for path in paths],
        "thresholds": thresholds,
    }
    return _write(Workdir(Path(out)), runs, rows, times, notes, more)


def _read(workdir: Workdir) -> tuple[Rows, Evals, list[str]]:
    """Read the rows that have records, the records, with the sets in config's order, and notes.

    Left out are rows of stages whose checkpoint is gone from beside those of others, which are not of one run any more.
    """
    rows = read_rows(workdir.root)
    finished = workdir.finished_stages()
    gone = [
        row.name
        for row in rows.values()
        if finished and row.stage and not row.source and row.stage not in finished
    ]
    evals, notes = read_evals(workdir.root, rows)
    notes += [
        f"{name}: left out, its checkpoint is gone; delete {workdir.eval / name}."
        for name in gone
    ]
    names = (
        flatten(read_json(workdir.config, default={})).get("evaluate.datasets") or ()
    )
    order = {name: place for place, name in enumerate(names)}
    evals = {
        row: dict(sorted(sets.items(), key=lambda item: order.get(item[0], len(order))))
        for row, sets in evals.items() if row not in gone
    }  # fmt: skip
    if not evals:
        raise UserError(
            f"{workdir.eval}: holds no whole evaluation ({notes[0]}); run the evaluate stage again"
        )
    return {name: rows[name] for name in evals}, evals, notes


def _times(workdir: Workdir, rows: Rows) -> dict[str, Any]:
    """Read how long an answer of the rows takes: set, batch and device, and milliseconds by row.

    Those of rows whose checkpoint is another one by now are left out, and {} is what a workdir without any has.
    """
    measured = artifact.read(workdir.times)
    if measured is None:
        return {}
    known = measured.facts["rows"]
    current = {
        name: value
        for name, value in measured.value["rows"].items()
        if name in rows
        and not rows[name].source
        and known[name] == [rows[name].checkpoint, rows[name].evaluation]
    }
    return {**measured.value, "rows": current}


def _timed(figures: dict[str, Any], times: Mapping[str, Any]) -> None:
    """Add the milliseconds to the figures of the set that they were measured on."""
    for row, milliseconds in times.get("rows", {}).items():
        if times["set"] in figures.get(row, {}):
            figures[row][times["set"]][_MILLISECONDS] = milliseconds


def _write(
    workdir: Workdir, runs: Sequence[Evals], rows: Sequence[Rows], times: Sequence[Mapping[str, Any]],
    notes: list[str], more: Mapping[str, Any], thoughts: Thoughts | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Make the report of several runs, or of one, whose page has its problems and `thoughts`, and write it."""
    figures = [
        {
            row: {name: summarise(rec) for name, rec in sets.items()}
            for row, sets in run.items()
        }
        for run in runs
    ]
    for of_run, measured in zip(figures, times, strict=True):
        _timed(of_run, measured)
    if times[0]:
        batch, name, device = (times[0][key] for key in ("batch", "set", "device"))
        notes.append(
            f"Milliseconds an answer: {batch:,} together on {name}, all rows in one run, on {device}."
        )
    differences, left_out = compare_rows(runs, rows[0])
    report: dict[str, Any] = {
        "eval": {
            row: {
                name: _over_runs([summary[row][name] for summary in figures])
                for name in sets
            }
            for row, sets in figures[0].items()
        },
        AVERAGE: _averages(figures),
        "chance": {
            name: chance(records, name)
            for sets in runs[0].values()
            for name, records in sets.items()
        },
        "differences": differences,
        "rows": {name: row.facts for name, row in rows[0].items()},
        "settings": reported_settings(rows),
        "notes": notes + left_out,
        "curves": pass_curves(runs),
        "stop_times": stop_times(runs),
        **more,
    }
    report = {"verdict": verdict(report), **report}
    # Lists of numbers in a line each; a line's end stands in no string.
    text = re.sub(
        r"\[\n[^\[\]{}\"]*\]",
        lambda match: " ".join(match[0].split()),
        to_json(report, indent=1),
    )
    write_text(workdir.report_json, text + "\n")
    title = f"Evaluation report: {workdir.root.resolve().name}"
    write_text(
        workdir.report_html,
        render_page(title, report, {} if thoughts is None else runs[0], thoughts or {}),
    )
    write_text(workdir.report_md, render_markdown(report))
    return report


def _over_runs(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return figures: one run's, or means, `_se` over runs, `per_run`; single runs' errors and p don't average."""
    first = summaries[0]
    if len(summaries) == 1:
        return first
    out: dict[str, Any] = {"n": first["n"], "runs": len(summaries)}
    keys = [
        key
        for key in first
        if all(isinstance(summary.get(key), float) for summary in summaries)
    ]
    per_run = {
        key: [summary[key] for summary in summaries]
        for key in keys
        if not key.endswith(("_se", "_p"))
    }
    for key, values in per_run.items():
        out |= {key: float(np.mean(values)), f"{key}_se": mean_se(np.array(values))}
    same = {
        key: ends
        for key, ends in first.get("intervals", {}).items()
        if set(per_run.get(key, ())) == {first[key]}
    }
    return out | ({"intervals": same} if same else {}) | {"per_run": per_run}


def _averages(summaries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Average each row over the sets, if it has them all: {row: {metric, metric_se}}, errors combined over sets."""
    names = {name for sets in summaries[0].values() for name in sets}
    whole = (
        [row for row, sets in summaries[0].items() if sets.keys() == names]
        if len(names) > 1
        else []
    )
    return {
        row: _over_runs([_mean([*summary[row].values()]) for summary in summaries])
        for row in whole
    }


def _mean(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Average independent figures; an error is None where one of them has none, as of a set of one problem."""
    keys = [key for key in parts[0] if all(f"{key}_se" in part for part in parts)]
    means = {key: float(np.mean([part[key] for part in parts])) for key in keys}
    errors = {f"{key}_se": [part[f"{key}_se"] for part in parts] for key in keys}
    bounds = {
        key: np.mean([part["intervals"][key] for part in parts], axis=0).tolist() for key in keys
        if means[key] in (0, 1) and all(key in part.get("intervals", {}) for part in parts)
    }  # fmt: skip
    of_mean = {
        key: None if None in part else math.hypot(*part) / len(part)
        for key, part in errors.items()
    }
    n = sum(part["n"] for part in parts)
    # Time is measured on one of the sets, and stands for all.
    for part in parts:
        if _MILLISECONDS in part:
            means[_MILLISECONDS] = part[_MILLISECONDS]
    return {"n": n} | means | of_mean | ({"intervals": bounds} if bounds else {})

"""The report: `report.json`, `report.html` and `report.md`, a pure function of the files in a workdir.

`write_report` reports one training run, `compare_runs` several training seeds of the same configuration;
`python -m slpo_jax.evaluation.report DIR [DIR...] [--out DIR]` does either.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slpo_jax.errors import FlagParser, UserError, silent_when_unread
from slpo_jax.evaluation.chance import chance_levels
from slpo_jax.evaluation.comparisons import AVERAGE, compare_rows
from slpo_jax.evaluation.curves import pass_curves, stop_times, training_curves
from slpo_jax.evaluation.markdown import render
from slpo_jax.evaluation.page.problems import Thoughts, thoughts_of
from slpo_jax.evaluation.page.render import render_page
from slpo_jax.evaluation.records import Evals, read_evals, read_metrics
from slpo_jax.evaluation.rows import Rows, read_rows, sweeps_of
from slpo_jax.evaluation.statistics import mean_se, summarise
from slpo_jax.evaluation.trained_settings import differing_settings, reported_settings
from slpo_jax.evaluation.verdict import verdict
from slpo_jax.io.files import flatten, read_json, to_json, write_text
from slpo_jax.io.workdir import Workdir


def write_report(workdir: str | Path) -> dict[str, Any]:
    """Writes `report.json`, `report.html` and `report.md` of one workdir.

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
    metrics, notes = read_metrics(folder.metrics)
    taken: dict[str, list[str]] = {}
    for row in rows.values():
        taken.setdefault(row.source, []).append(row.name)
    notes += left_out + [f"Taken from {source}: {', '.join(names)}." for source, names in taken.items() if source]
    report = _build([evals], [rows], notes)
    report["thresholds"] = sweeps_of(rows)
    report["training"] = training_curves(metrics)
    report = {"verdict": verdict(report), **report}
    _write(folder, report, evals, thoughts_of(folder.root, evals))
    return report


def compare_runs(workdirs: Sequence[str | Path], out: str | Path) -> dict[str, Any]:
    """Writes `report.json`, `report.html` and `report.md` over several training runs (seeds) of one configuration.

    Figures are means over runs with their standard error over runs; differences resample runs and problems. Rows and
    sets that not every run has are left out and noted, and so are settings, other than the seed, in which runs differ.
    What rows say of themselves is the first run's.

    Returns:
        What `report.json` holds, as `write_report`, with `runs` and, in each figure set, `per_run`.

    Raises:
        UserError: a folder without eval files, or named twice.
    """
    paths = [Path(workdir) for workdir in workdirs]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("compare: the same folder is given twice; name each run once")
    if Path(out).resolve() in {path.resolve() for path in paths}:
        raise UserError(f"{out}: --out is one of the runs, whose own report it would replace; name another folder")
    if Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"--out: {out} is a file; name a folder")
    every_row, runs, notes = [], [], []
    for path in paths:
        rows, evals, left_out = _read(Workdir(path))
        every_row.append(rows)
        runs.append(evals)
        notes += [f"{path.name}: {note}" for note in left_out]
    pairs = [{(row, name) for row, sets in run.items() for name in sets} for run in runs]
    common = set.intersection(*pairs)
    if not common:
        raise UserError("compare: no row and set that all runs have; evaluate the same sets in each")
    runs = [
        {row: {name: rec for name, rec in sets.items() if (row, name) in common} for row, sets in run.items()}
        for run in runs
    ]
    runs = [{row: sets for row, sets in run.items() if sets} for run in runs]
    notes += [f"{row} on {name}: left out, not every run has it." for row, name in sorted(set.union(*pairs) - common)]
    every_row = [{name: rows[name] for name in runs[0]} for rows in every_row]
    report = _build(runs, every_row, notes + _settings_notes(every_row))
    report["runs"] = [path.name or str(path) for path in paths]
    report["thresholds"] = {path.name: sweeps_of(own) for path, own in zip(paths, every_row, strict=True)}
    report = {"verdict": verdict(report), **report}
    _write(Workdir(Path(out)), report, {}, {})
    return report


def _read(workdir: Workdir) -> tuple[Rows, Evals, list[str]]:
    """Rows that there are records of, the records, with the sets in config's order, and notes.

    Left out are rows of stages whose checkpoint is gone from beside those of others, which are not of one run any more.
    """
    rows, finished = read_rows(workdir.root), workdir.finished_stages()
    gone = [
        row.name for row in rows.values() if finished and row.stage and not row.source and row.stage not in finished
    ]
    evals, notes = read_evals(workdir.root, rows)
    notes += [f"{name}: left out, its checkpoint is gone; delete {workdir.eval / name}." for name in gone]
    evals = {name: sets for name, sets in evals.items() if name not in gone}
    if not evals:
        raise UserError(f"{workdir.eval}: holds no whole evaluation ({notes[0]}); run the evaluate stage again")
    return {name: rows[name] for name in evals}, _order_sets(evals, read_json(workdir.config, default={})), notes


def _build(runs: Sequence[Evals], rows: Sequence[Rows], notes: list[str]) -> dict[str, Any]:
    summaries = [
        {row: {name: summarise(rec) for name, rec in sets.items()} for row, sets in run.items()} for run in runs
    ]
    eval_ = {
        row: {name: _over_runs([summary[row][name] for summary in summaries]) for name in sets}
        for row, sets in summaries[0].items()
    }
    differences, left_out = compare_rows(runs, rows[0])
    return {
        "eval": eval_,
        AVERAGE: _averages(summaries),
        "chance": chance_levels(runs[0]),
        "differences": differences,
        "rows": {name: row.facts for name, row in rows[0].items()},
        "settings": reported_settings(rows),
        "notes": notes + left_out,
        "curves": pass_curves(runs),
        "stop_times": stop_times(runs),
    }


def _over_runs(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """One run: its figures. Several: means, `_se` over runs, `per_run`; errors and p of single runs don't average."""
    first = summaries[0]
    if len(summaries) == 1:
        return first
    out: dict[str, Any] = {"n": first["n"], "runs": len(summaries)}
    keys = [key for key in first if all(isinstance(s.get(key), float) for s in summaries)]
    keys = [key for key in keys if not key.endswith(("_se", "_p"))]
    per_run = {key: [s[key] for s in summaries] for key in keys}
    for key, values in per_run.items():
        out |= {key: float(np.mean(values)), f"{key}_se": mean_se(np.array(values))}
    same = {
        key: of for key, of in first.get("intervals", {}).items() if all(s.get(key) == first[key] for s in summaries)
    }
    return out | ({"intervals": same} if same else {}) | {"per_run": per_run}


def _averages(summaries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean over the sets of each row that has them all: {row: {metric, metric_se}}, errors combined over sets."""
    out = {}
    names = {name for sets in summaries[0].values() for name in sets}
    for row, sets in summaries[0].items():
        if len(names) < 2 or set(sets) != names:
            continue
        keys = [key for key in next(iter(sets.values())) if all(f"{key}_se" in s for s in sets.values())]
        per_run = []
        for parts in (list(summary[row].values()) for summary in summaries):
            means = {key: float(np.mean([s[key] for s in parts])) for key in keys}
            errors = {f"{key}_se": _se_of_mean([s[f"{key}_se"] for s in parts]) for key in keys}
            per_run.append({"n": sum(s["n"] for s in parts)} | means | errors)
            bounds = [s.get("intervals", {}) for s in parts]
            certain = [key for key in keys if all(key in each for each in bounds) and means[key] in (0, 1)]
            if certain:
                per_run[-1]["intervals"] = {
                    key: np.mean([each[key] for each in bounds], axis=0).tolist() for key in certain
                }
        out[row] = _over_runs(per_run)
    return out


def _se_of_mean(errors: list[float | None]) -> float | None:
    """Of the mean of independent figures; None where one of them has none, as of a set of one problem."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) / len(known) if len(known) == len(errors) else None


def _order_sets(evals: Evals, config: Mapping[str, Any]) -> Evals:
    wanted = flatten(config).get("evaluate.datasets") or ()
    order = {name: place for place, name in enumerate(wanted)}
    return {row: dict(sorted(s.items(), key=lambda kv: order.get(kv[0], len(order)))) for row, s in evals.items()}


def _settings_notes(runs: Sequence[Rows]) -> list[str]:
    differ = differing_settings(runs)
    notes = [f"The runs' settings differ in: {', '.join(differ)}."] if differ else []
    seeds = [list(rows.values())[-1].settings.get("seed") for rows in runs]
    known = [seed for seed in seeds if seed is not None]
    if len(set(known)) < len(known):
        notes.append("Some runs share config.seed: they are no independent training seeds.")
    return notes


def _write(workdir: Workdir, report: Mapping[str, Any], evals: Evals, thoughts: Thoughts) -> None:
    text = to_json(report, indent=1)
    # Lists of numbers in a line each; a line's end stands in no string.
    text = re.sub(r"\[\n[^\[\]{}\"]*\]", lambda match: " ".join(match[0].split()), text)
    write_text(workdir.report_json, text + "\n")
    name = workdir.root.resolve().name
    write_text(workdir.report_html, render_page(f"Evaluation report: {name}", report, evals, thoughts))
    write_text(workdir.report_md, render(report))


@silent_when_unread()
def main(argv: Sequence[str] | None = None) -> int:
    """Command line: one folder is reported in place, or with --out several are compared. Returns the exit status."""
    parser = FlagParser(prog="slpo report", description="Report evaluated runs.")
    parser.add_argument("workdirs", nargs="+", metavar="DIR", help="workdir of a run that was evaluated")
    parser.add_argument("--out", help="folder for the report over several runs (one DIR alone is reported in place)")
    try:
        args = parser.parse_args(argv)
        if args.out is None and len(args.workdirs) > 1:
            raise UserError("--out: missing; name the folder for the report over several runs")
        found = write_report(args.workdirs[0]) if args.out is None else compare_runs(args.workdirs, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("".join(f"{note}\n" for note in found["notes"]), end="", file=sys.stderr)
    print(Path(args.out or args.workdirs[0]) / "report.html")
    return 0


run = main  # of `slpo report`

if __name__ == "__main__":
    sys.exit(main())

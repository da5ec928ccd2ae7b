"""The report: `report.json` and `report.md`, a pure function of the files in a workdir.

`write_report` reports one training run, `compare_runs` several training seeds of the same configuration;
`python -m slpo_jax.evaluation.report DIR [DIR...] [--out DIR]` does either.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.evaluation.comparisons import AVERAGE, compare_rows
from slpo_jax.evaluation.figures import draw_figures
from slpo_jax.evaluation.markdown import render
from slpo_jax.evaluation.records import Evals, pool_runs, read_evals, read_metrics
from slpo_jax.evaluation.statistics import mean_se, summarise
from slpo_jax.io.files import read_json, write_text


def write_report(workdir: str | Path) -> dict[str, Any]:
    """Writes `report.json`, `report.md` and `figures/*.png` of one workdir.

    Reads `eval/ROW/NAME.jsonl`, and where they exist `config.json`, `metrics.jsonl` and `thresholds.json`. Any subset
    of rows, sets and samples will do.

    Returns:
        What `report.json` holds: eval {row: {set: figures}}, average, differences, thresholds, notes, figures.

    Raises:
        UserError: there are no eval files, or a file is malformed.
    """
    workdir = Path(workdir)
    config = read_json(workdir / "config.json", default={})
    thresholds = read_json(workdir / "thresholds.json", default={})
    evals = _order_sets(read_evals(workdir), config)
    metrics, notes = read_metrics(workdir / "metrics.jsonl")
    report = _build([evals], notes)
    report["thresholds"] = thresholds
    report["figures"] = [f"figures/{name}" for name in draw_figures(evals, metrics, workdir / "figures")]
    _write(workdir, report, config)
    return report


def compare_runs(workdirs: Sequence[str | Path], out: str | Path) -> dict[str, Any]:
    """Writes `report.json`, `report.md` and `figures/*.png` over several training runs (seeds) of one configuration.

    Figures are means over runs with their standard error over runs; differences resample runs and problems; drawings
    pool the runs. Rows and sets that not every run has are left out and noted, and so are settings, other than the
    seed, in which runs differ.

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
    configs = [read_json(path / "config.json", default={}) for path in paths]
    runs = [_order_sets(read_evals(path), config) for path, config in zip(paths, configs, strict=True)]
    pairs = [{(row, name) for row, sets in run.items() for name in sets} for run in runs]
    common = set.intersection(*pairs)
    if not common:
        raise UserError("compare: no row and set that all runs have; evaluate the same sets in each")
    runs = [
        {row: {name: rec for name, rec in sets.items() if (row, name) in common} for row, sets in run.items()}
        for run in runs
    ]
    runs = [{row: sets for row, sets in run.items() if sets} for run in runs]
    notes = [f"{row} on {name}: left out, not every run has it." for row, name in sorted(set.union(*pairs) - common)]
    report = _build(runs, notes + _config_notes(configs))
    report["runs"] = [path.name or str(path) for path in paths]
    report["thresholds"] = {path.name: read_json(path / "thresholds.json", default={}) for path in paths}
    report["figures"] = [f"figures/{name}" for name in draw_figures(pool_runs(runs), (), Path(out) / "figures")]
    _write(Path(out), report, configs[0] if len(paths) == 1 else {})
    return report


def _build(runs: Sequence[Evals], notes: list[str]) -> dict[str, Any]:
    summaries = [
        {row: {name: summarise(rec) for name, rec in sets.items()} for row, sets in run.items()} for run in runs
    ]
    eval_ = {
        row: {name: _over_runs([summary[row][name] for summary in summaries]) for name in sets}
        for row, sets in summaries[0].items()
    }
    differences, left_out = compare_rows(runs)
    return {"eval": eval_, AVERAGE: _averages(summaries), "differences": differences, "notes": notes + left_out}


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
    return out | {"per_run": per_run}


def _averages(summaries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean over the sets of each row that has them all: {row: {metric, metric_se}}, errors combined over sets."""
    out = {}
    names = {name for sets in summaries[0].values() for name in sets}
    for row, sets in summaries[0].items():
        if len(names) < 2 or set(sets) != names:
            continue
        keys = [key for key in next(iter(sets.values())) if all(s.get(f"{key}_se") is not None for s in sets.values())]
        per_run = []
        for parts in (list(summary[row].values()) for summary in summaries):
            means = {key: float(np.mean([s[key] for s in parts])) for key in keys}
            errors = {f"{key}_se": math.hypot(*(s[f"{key}_se"] for s in parts)) / len(parts) for key in keys}
            per_run.append({"n": sum(s["n"] for s in parts)} | means | errors)
        out[row] = _over_runs(per_run)
    return out


def _order_sets(evals: Evals, config: Mapping[str, Any]) -> Evals:
    wanted = _flatten(config).get("evaluate.datasets") or ()
    order = {name: place for place, name in enumerate(wanted)}
    return {row: dict(sorted(s.items(), key=lambda kv: order.get(kv[0], len(order)))) for row, s in evals.items()}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def _config_notes(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    flat = [_flatten(config) for config in configs]
    keys = sorted({key for config in flat for key in config} - {"seed", "workdir"})
    differ = [key for key in keys if len({json.dumps(config.get(key), sort_keys=True) for config in flat}) > 1]
    seeds = [config["seed"] for config in flat if "seed" in config]
    notes = [f"The runs' configurations differ in: {', '.join(differ)}."] if differ else []
    if len(set(seeds)) < len(seeds):
        notes.append("Some runs share config.seed: they are no independent training seeds.")
    return notes


def _write(folder: Path, report: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    write_text(folder / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_text(folder / "report.md", render(report, _flatten(config)))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: one folder is reported in place, or with --out several are compared. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m slpo_jax.evaluation.report", description="Report evaluated runs.")
    parser.add_argument("workdirs", nargs="+", metavar="DIR", help="workdir of a run that was evaluated")
    parser.add_argument("--out", help="folder for the report over several runs (one DIR alone is reported in place)")
    args = parser.parse_args(argv)
    try:
        if args.out is None and len(args.workdirs) > 1:
            raise UserError("--out: missing; name the folder for the report over several runs")
        if args.out is None:
            write_report(args.workdirs[0])
        else:
            compare_runs(args.workdirs, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(Path(args.out or args.workdirs[0]) / "report.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())

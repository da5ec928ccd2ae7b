"""`python launch/reproduce.py NAME [--workdir=DIR] [--seeds=0,1,2] [--only=LABEL,..] [--limit=N]`.

Every run of a grid in `launch/grids.py`, in `DIR/LABEL/seed_S`, and their comparison: `DIR/LABEL/report.md` over the
seeds, and `DIR/comparison.md`, `.json` and `.png` over the labels, from whatever runs are finished. Run again, it goes
on where it was; a run that is finished is not run again. Others of its runs (--seeds, --only) may go on beside it.
"""

import argparse
import dataclasses
import functools
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from grids import GRIDS, Grid, Run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from slpo_jax.errors import UserError
from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.evaluation.report import compare_runs
from slpo_jax.io.files import digest, files_digest, read_json, write_text
from slpo_jax.text.dataset_rows import source_path

ROOT = Path(__file__).resolve().parents[1]
DONE, LOG = "reproduced.json", "run.log"


@dataclasses.dataclass(frozen=True)
class Job:
    """One run with one seed.

    Attributes:
        arguments: of slpo_jax.main.
        config: digest of what the config file in them says.
        data: digests of the data's local files, by key.
    """

    label: str
    seed: int
    workdir: Path
    arguments: tuple[str, ...]
    config: str
    data: tuple[tuple[str, str], ...]

    @property
    def facts(self) -> dict[str, Any]:
        """What its result depends on, beside the code."""
        return {"arguments": list(self.arguments), "config": self.config, "data": dict(self.data)}

    @property
    def is_finished(self) -> bool:
        """Whether it ran to its end with these arguments."""
        return read_json(self.workdir / DONE, default={}) == self.facts


def plan(grid: Grid, root: Path, seeds: Sequence[int], only: Sequence[str], limit: int | None) -> list[Job]:
    """The grid's jobs in their order.

    Args:
        root: the grid's folder.
        seeds: instead of all runs' own; empty: their own.
        only: labels, beside those that they come after; empty: all.
        limit: problems of each test set; None: the config's own.
    Raises:
        UserError: a label that the grid lacks.
    """
    runs = {run.label: run for run in grid.runs}
    if unknown := [label for label in only if label not in runs]:
        raise UserError(f"--only: no run {unknown[0]}; give some of {', '.join(runs)}")
    wanted = set(only or runs)
    for run in reversed(grid.runs):
        if run.label in wanted and run.after:
            wanted.add(run.after)
    return [
        _job(grid, run, root.resolve(), seed, limit)
        for run in grid.runs
        if run.label in wanted
        for seed in (seeds or run.seeds or grid.seeds)
    ]


def _job(grid: Grid, run: Run, root: Path, seed: int, limit: int | None) -> Job:
    workdir, lender = (root / label / f"seed_{seed}" for label in (run.label, run.after))
    overrides = {"seed": seed, **({} if limit is None else {"evaluate.limit": limit}), **run.overrides}
    if run.after:
        overrides["evaluate.rows_from"] = lender
    values = (f"--config.{key}={value}".replace("{after}", str(lender)) for key, value in overrides.items())
    config = run.config or grid.config
    arguments = (f"--config={ROOT / config}", f"--workdir={workdir}", *values)
    sources = _sources(config) | {key: str(value) for key, value in overrides.items() if key.startswith("data.")}
    data = tuple((key, _files_digest(Path(source_path(source)))) for key, source in sorted(sources.items()))
    return Job(run.label, seed, workdir, arguments, _config_digest(config), data)


def load_config(name: str) -> ConfigDict:
    """What a grid's config file says.

    Args:
        name: PATH or PATH:ARGUMENT.
    """
    path, _, argument = name.partition(":")
    return runpy.run_path(str(ROOT / path))["get_config"](*filter(None, [argument]))


@functools.cache
def _config_digest(name: str) -> str:
    return digest(json.loads(load_config(name).to_json_best_effort()))


@functools.cache
def _sources(name: str) -> dict[str, str]:
    """The data that a config file names, by key."""
    data = load_config(name).data
    found = {"data.train": data.train, "data.valid": data.valid}
    return found | {f"data.eval.{key}": source for key, source in data.eval.items()}


_files_digest = functools.cache(files_digest)


def run_job(job: Job) -> None:
    """The main command, its output in the workdir's `run.log`.

    Raises:
        UserError: the command failed.
    """
    job.workdir.mkdir(parents=True, exist_ok=True)
    log = job.workdir / LOG
    with log.open("a") as file:
        command = [sys.executable, "-m", "slpo_jax.main", *job.arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        status = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False).returncode
    if status:
        last = (log.read_text().strip().splitlines() or ["no output"])[-1]
        raise UserError(f"{job.workdir}: its run ended with status {status} ({last}); mend it, all output is in {log}")
    write_text(job.workdir / DONE, json.dumps(job.facts, indent=1) + "\n")


def run_all(jobs: Sequence[Job]) -> None:
    """The jobs that are not finished, one line on each."""
    for number, job in enumerate(jobs, 1):
        about = f"[{number}/{len(jobs)}] {job.label}, seed {job.seed}"
        if job.is_finished:
            print(f"{about}: finished before", flush=True)
            continue
        print(f"{about}: runs; tail -f {job.workdir / LOG}", flush=True)
        start = time.monotonic()
        run_job(job)
        print(f"{about}: {(time.monotonic() - start) / 60:.1f} minutes", flush=True)


def compare(grid: Grid, root: Path, limit: int | None = None) -> dict[str, Any]:
    """Figures of every label with a finished run, over its seeds; writes the labels' own reports.

    Runs that were finished with other settings or data than the grid's now are left out, saying so.

    Args:
        limit: problems of each test set; None: the config's own.
    Returns:
        line -> {"seeds": how many, "means" and "differences": metric -> {"value", "low", "high"}}, of the mean of the
        sets: a row with one standard error on each side, and the row minus `grid.minus` with its interval. There is a
        line for each label and row.
    """
    found: dict[str, Any] = {}
    for run in grid.runs:
        folders = []
        for folder in sorted(path.parent for path in (root / run.label).glob(f"seed_*/{DONE}")):
            if _job(grid, run, root.resolve(), int(folder.name.removeprefix("seed_")), limit).is_finished:
                folders.append(folder)
            else:
                print(f"{folder}: left out, it was run with other settings or data; run it again", flush=True)
        if not folders:
            continue
        report = compare_runs(folders, root / run.label)
        for row in grid.rows:
            line = run.label if len(grid.rows) == 1 else f"{run.label}, {row}"
            found[line] = {
                "seeds": len(folders),
                "means": _means(report, row, grid),
                "differences": _differences(report, row, grid),
            }
    return found


def _means(report: dict[str, Any], name: str, grid: Grid) -> dict[str, dict[str, float]]:
    """Of the mean of the sets, or of the only one."""
    row = report[AVERAGE].get(name) or next(iter(report["eval"].get(name, {}).values()), {})
    known = {metric: (row[metric], row.get(f"{metric}_se") or 0.0) for metric in grid.metrics if metric in row}
    return {metric: {"value": x, "low": x - se, "high": x + se} for metric, (x, se) in known.items()}


def _differences(report: dict[str, Any], name: str, grid: Grid) -> dict[str, dict[str, float]]:
    entries = [entry for entry in report["differences"] if (entry["a"], entry["b"]) == (name, grid.minus)]
    # The mean of the sets comes after them; where there is one set alone, its entry stands.
    last = {entry["metric"]: entry for entry in entries}
    return {
        metric: {"value": last[metric]["difference"], "low": last[metric]["low"], "high": last[metric]["high"]}
        for metric in grid.metrics
        if metric in last
    }


def markdown(grid: Grid, found: dict[str, Any]) -> str:
    """The tables: the rows themselves, and their differences."""
    head = ["run", "seeds", *grid.metrics]
    rows = _named(grid)
    about = {"means": f"{rows}, mean of the sets; ± one standard error"}
    if grid.minus:
        about["differences"] = f"{rows} minus {grid.minus}, mean of the sets; 95 % intervals, bold without 0"
    lines = ["Percent or percentage points; latent_steps: latents."]
    for kind, title in about.items():
        lines += ["", f"{title}:", "", f"| {' | '.join(head)} |", f"| --- | {' | '.join(['---:'] * len(head[1:]))} |"]
        for label, figures in found.items():
            cells = [_cell(kind, metric, figures[kind].get(metric)) for metric in grid.metrics]
            lines.append(f"| {label} | {figures['seeds']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _named(grid: Grid) -> str:
    """What stands in the lines: their rows, where they are few."""
    return ", ".join(grid.rows) if len(grid.rows) < 4 else "each row"


def _scale(metric: str) -> int:
    return 1 if metric == "latent_steps" else 100


def _cell(kind: str, metric: str, figure: dict[str, float] | None) -> str:
    if figure is None:
        return ""
    value, low, high = (_scale(metric) * figure[key] for key in ("value", "low", "high"))
    if kind == "means":
        return f"{value:.2f} ± {high - value:.2f}"
    text = f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def draw(grid: Grid, found: dict[str, Any], path: Path) -> None:
    """A panel a metric, lines as in the tables: value and interval of the differences, or else of the means."""
    kind = "differences" if grid.minus else "means"
    figure = Figure(figsize=(2.6 * len(grid.metrics) + 2, 0.3 * len(found) + 1.3), dpi=130, layout="constrained")
    for axis, metric in zip(figure.subplots(1, len(grid.metrics), squeeze=False)[0], grid.metrics, strict=True):
        for place, label in enumerate(found):
            if point := found[label][kind].get(metric):
                value, low, high = (_scale(metric) * point[key] for key in ("value", "low", "high"))
                axis.errorbar(value, place, xerr=[[value - low], [high - value]], fmt="o", ms=4, color="#0072B2")
        if grid.minus:
            axis.axvline(0, color="#7F7F7F", lw=1)
        axis.set(title=metric, ylim=(len(found) - 0.5, -0.5))
        axis.set_yticks(range(len(found)), list(found) if metric == grid.metrics[0] else [])
        axis.spines[["top", "right"]].set_visible(False)
    rows = _named(grid)
    figure.supxlabel(f"{rows} minus {grid.minus}, percentage points" if grid.minus else f"{rows}, percent")
    FigureCanvasAgg(figure).print_png(path)


class Parser(argparse.ArgumentParser):
    """What is wrong in the flags as a `UserError`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser(prog="python launch/reproduce.py", description="Runs of a grid, and their comparison.")
    parser.add_argument("name", choices=sorted(GRIDS), help="of the grid, in launch/grids.py")
    parser.add_argument("--workdir", type=Path, help="default: runs/NAME")
    parser.add_argument("--seeds", default="", help="e.g. 0,1; default: the grid's")
    parser.add_argument("--only", default="", help="labels, e.g. main,grpo; default: all")
    parser.add_argument("--limit", type=int, help="problems of each test set; default: the config's")
    flags = parser.parse_args(argv)
    if flags.seeds and not flags.seeds.replace(",", "").isdecimal():
        raise UserError(f"--seeds: {flags.seeds} is no list of numbers; give e.g. 0,1,2")
    if flags.limit is not None and flags.limit < 1:
        raise UserError(f"--limit: {flags.limit} is too few; give at least 1")
    return flags


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    try:
        flags = parse(argv)
        grid, root = GRIDS[flags.name], (flags.workdir or Path("runs") / flags.name).expanduser()
        seeds = [int(seed) for seed in flags.seeds.split(",") if seed]
        run_all(plan(grid, root, seeds, [label for label in flags.only.split(",") if label], flags.limit))
        found = compare(grid, root, flags.limit)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = markdown(grid, found)
    write_text(root / "comparison.json", json.dumps(found, indent=1) + "\n")
    write_text(root / "comparison.md", text)
    draw(grid, found, root / "comparison.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A grid's runs as jobs: what each depends on, whether it is finished, and running it."""

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
from typing import Any

from grid import Grid, Run
from ml_collections import ConfigDict

from slpo_jax.errors import UserError
from slpo_jax.io.files import digest, files_digest, read_json, write_text
from slpo_jax.io.workdir import Workdir
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
        after: digest of what the run that it comes after depends on; "": it comes after none.
    """

    label: str
    seed: int
    workdir: Path
    arguments: tuple[str, ...]
    config: str
    data: tuple[tuple[str, str], ...]
    after: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """What its result depends on, beside the code; not where the grid and the checkout lie."""
        facts = {"config": self.config, "data": dict(self.data), "after": self.after}
        return {"arguments": self.wherever(self.arguments)} | facts

    @property
    def is_finished(self) -> bool:
        """Whether it ran to its end with these arguments, and its evaluation is to the byte what it was then."""
        return read_json(self.workdir / DONE, default={}) == self.finished_facts()

    def wherever(self, arguments: Sequence[str]) -> list[str]:
        """Without the paths of the grid's folder and of the checkout, which may be moved."""
        places = {f"{self.workdir.parents[1]}/": "{grid}/", f"{ROOT}/": "{checkout}/"}
        for path, name in places.items():
            arguments = [argument.replace(path, name) for argument in arguments]
        return list(arguments)

    def finished_facts(self) -> dict[str, Any]:
        """What is written down of a run that is finished."""
        return self.facts | {"evaluation": files_digest(Workdir(self.workdir).eval)}


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
        make_job(grid, run, root.resolve(), seed, limit)
        for run in grid.runs
        if run.label in wanted
        for seed in (seeds or run.seeds or grid.seeds)
    ]


def make_job(grid: Grid, run: Run, root: Path, seed: int, limit: int | None) -> Job:
    workdir, lender = (root / label / f"seed_{seed}" for label in (run.label, run.after))
    overrides = {"seed": seed, **({} if limit is None else {"evaluate.limit": limit}), **run.overrides}
    if run.after and not run.alone:
        overrides["evaluate.rows_from"] = lender
    values = (f"--config.{key}={value}".replace("{after}", str(lender)) for key, value in overrides.items())
    config = run.config or grid.config
    arguments = (f"--config={ROOT / config}", f"--workdir={workdir}", *values)
    sources = _sources(config) | {key: str(value) for key, value in overrides.items() if key.startswith("data.")}
    data = tuple((key, _files_digest(Path(source_path(source)))) for key, source in sorted(sources.items()))
    before = next((other for other in grid.runs if other.label == run.after), None)
    after = digest(make_job(grid, before, root, seed, limit).facts) if before else ""
    return Job(run.label, seed, workdir, arguments, _config_digest(config), data, after)


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
    write_text(job.workdir / DONE, json.dumps(job.finished_facts(), indent=1) + "\n")


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

"""A table's runs as jobs: what each depends on, whether it is finished, and running it."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.config.registry import read_config_file
from slpo_jax.data.dataset_rows import place_of
from slpo_jax.errors import UserError
from slpo_jax.evaluation.report import write_report
from slpo_jax.evaluation.report_rows import read_row, read_rows, write_row
from slpo_jax.io.files import digest, files_digest, read_json, write_text
from slpo_jax.io.workdir import Workdir

ROOT = Path(__file__).resolve().parents[1]
DONE = "reproduced.json"
LOG = "run.log"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run, trained once for each seed.

    Attributes:
        name: of its folder and its lines.
        config: FILE or FILE:ARGUMENT, as --config of slpo_jax.main takes it; relative to the checkout.
        overrides: value by config key; "{after}" in one stands for the workdir of `after` with the same seed.
        after: the name of a run that comes first, whose report's rows this one takes where it has none of its own
            (`jobs.take_rows`); "": none.
        rows: that are compared of it, instead of the table's.
        alone: it takes no rows of `after`, being evaluated in another way.
        seeds: instead of the table's.
        kind: what its settings are counted as; "": as its rows.
        group: those of one group are a line together (`pooled.pool`); "": none.
    """

    name: str
    config: str
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    after: str = ""
    rows: tuple[str, ...] = ()
    alone: bool = False
    seeds: tuple[int, ...] = ()
    kind: str = ""
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """Runs and how they are compared.

    Attributes:
        runs: no two with one name; those named in `after` before those that name them.
        rows: of the reports.
        minus: baselines of theirs, which they are set beside within each run; without any they stand alone.
        metrics: of the reports.
        by_set: of the metrics, those that are also shown for each test set by itself.
        samples: numbers of them, by which the selectors of each row are compared.
        folder: under runs/, shared with tables that have some of the same runs; "": the table's name.
        beside: the group whose first row the other groups' first rows are set beside; "": none.
        across: (run, row) each: baselines of one run that the rows of all runs are set beside, seed by seed.
    """

    runs: tuple[Run, ...]
    rows: tuple[str, ...] = ("slpo",)
    minus: tuple[str, ...] = ("cold_start", "imitate_control")
    seeds: tuple[int, ...] = (0, 1, 2)
    metrics: tuple[str, ...] = ("acc", "pass@1", "pass@8", "pass@16")
    by_set: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()
    folder: str = ""
    beside: str = ""
    across: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Job:
    """One run with one seed.

    Attributes:
        arguments: of slpo_jax.main.
        facts: what its result depends on, beside the code; not where the table's folder and the checkout lie.
        lender: the workdir whose rows its report has too.
    """

    run: Run
    seed: int
    workdir: Path
    arguments: tuple[str, ...]
    facts: dict[str, Any]
    lender: Path | None = None

    @property
    def is_finished(self) -> bool:
        """Whether it ran to its end with these arguments, and its evaluation is to the byte what it was then."""
        return read_json(self.workdir / DONE, default={}) == self.finished_facts()

    def finished_facts(self) -> dict[str, Any]:
        """What is written down of a run that is finished."""
        return self.facts | {"evaluation": files_digest(Workdir(self.workdir).eval)}


def plan(
    table: Table,
    root: Path,
    seeds: Sequence[int],
    only: Sequence[str],
    limit: int | None,
) -> list[Job]:
    """The table's jobs in their order.

    Args:
        root: the table's folder.
        seeds: instead of all runs' own; empty: their own.
        only: names of runs, beside those that they come after; empty: all.
        limit: problems of each test set; None: the config's own.
    Raises:
        UserError: a run that the table lacks.
    """
    names = [run.name for run in table.runs]
    if unknown := [name for name in only if name not in names]:
        raise UserError(f"--only: no run {unknown[0]}; give some of {', '.join(names)}")
    wanted = set(only or names)
    for run in reversed(table.runs):
        if run.name in wanted and run.after:
            wanted.add(run.after)
    jobs = []
    for run in table.runs:
        if run.name in wanted:
            for seed in seeds or run.seeds or table.seeds:
                jobs.append(
                    make_job(
                        table,
                        run,
                        root.resolve(),
                        seed,
                        limit,
                    )
                )
    return jobs


def make_job(
    table: Table,
    run: Run,
    root: Path,
    seed: int,
    limit: int | None,
) -> Job:
    """One of them; `root` and the others as of `plan`."""
    workdir = root / run.name / f"seed_{seed}"
    lender = root / run.after / f"seed_{seed}"

    # The command.
    overrides: dict[str, Any] = {"seed": seed}
    if limit is not None:
        overrides["evaluate.limit"] = limit
    overrides |= run.overrides
    arguments = [
        f"--config={ROOT / run.config}",
        f"--workdir={workdir}",
    ]
    for key, value in overrides.items():
        text = f"--config.{key}={value}"
        arguments.append(text.replace("{after}", str(lender)))

    # What the result depends on: not on where the table's folder and the checkout lie.
    portable = []
    for word in arguments:
        word = word.replace(f"{root}/", "{table}/")
        portable.append(word.replace(f"{ROOT}/", "{checkout}/"))
    sources = dict(_sources(run.config))
    for key, value in overrides.items():
        if key.startswith("data."):
            sources[key] = str(value)
    data = {}
    for key, source in sorted(sources.items()):
        path, *_ = place_of(source, "train")
        data[key] = _files_digest(path)
    before = ""
    for other in table.runs:
        if other.name == run.after:
            before = digest(
                make_job(
                    table,
                    other,
                    root,
                    seed,
                    limit,
                ).facts
            )
    facts = {
        "arguments": portable,
        "config": _config_digest(run.config),
        "data": data,
        "after": before,
    }
    takes_rows = run.after and not run.alone
    return Job(
        run,
        seed,
        workdir,
        tuple(arguments),
        facts,
        lender if takes_rows else None,
    )


def load_config(name: str) -> ConfigDict:
    """What a run's config says: PATH or PATH:ARGUMENT."""
    return read_config_file(str(ROOT / name))


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
        done = subprocess.run(
            command,
            stdout=file,
            stderr=file,
            env=environment,
            check=False,
        )
    status = done.returncode
    if status:
        last = (log.read_text().strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"{job.workdir}: its run ended with status {status} ({last}); mend it, all output is in {log}"
        )
    if job.lender:
        take_rows(job.lender, job.workdir)
        write_report(job.workdir)
    write_text(job.workdir / DONE, json.dumps(job.finished_facts(), indent=1) + "\n")


def take_rows(lender: Path, workdir: Path) -> None:
    """Copy another run's rows, on the sets of this one's, where this one has none of that name.

    Runs that differ in their last stage alone need not evaluate the first ones again.
    """
    theirs = Workdir(lender)
    ours = Workdir(workdir)
    sets = {name for _, name in ours.list_evaluated()}
    for row in read_rows(lender).values():
        mine = read_row(workdir, row.name)
        if mine is not None and not mine.source:
            continue
        source = row.source or str(lender)
        write_row(workdir, dataclasses.replace(row, source=source))
        for path in theirs.row(row.name).iterdir():
            name, *_ = path.name.split(".")
            if name in sets:
                shutil.copyfile(path, ours.row(row.name) / path.name)


def run_all(jobs: Sequence[Job]) -> None:
    """The jobs that are not finished, one line on each."""
    for number, job in enumerate(jobs, 1):
        about = f"[{number}/{len(jobs)}] {job.run.name}, seed {job.seed}"
        if job.is_finished:
            print(f"{about}: finished before", flush=True)
            continue
        print(f"{about}: runs; tail -f {job.workdir / LOG}", flush=True)
        start = time.monotonic()
        run_job(job)
        print(f"{about}: {(time.monotonic() - start) / 60:.1f} minutes", flush=True)

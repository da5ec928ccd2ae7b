"""Benchmarks of the checkpoints that a grid's runs left, and the means of their figures over the seeds."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from grid import Study
from jobs import ROOT, Job

from slpo_jax.errors import UserError
from slpo_jax.io.files import file_digest, files_digest, read_json, write_text
from slpo_jax.io.workdir import Workdir


def run_study(name: str, study: Study, jobs: Sequence[Job]) -> None:
    """The benchmark on each finished run's checkpoints: `NAME.json` and `NAME.md` in its workdir.

    It is not run where both are there, of these very checkpoints.

    Raises:
        UserError: it failed.
    """
    for number, job in enumerate(jobs, 1):
        about, page = f"[{number}/{len(jobs)}] {name} of {job.label}, seed {job.seed}", job.workdir / f"{name}.md"
        command, facts = _command(name, study, job)
        done, result = job.workdir / f"{name}_done.json", job.workdir / f"{name}.json"
        if page.exists() and read_json(done, default={}) == facts | {"result": file_digest(result)}:
            print(f"{about}: done before", flush=True)
            continue
        print(f"{about}: runs", flush=True)
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
            raise UserError(f"{job.workdir}: benchmarks.{study.module} ended with status {ended.returncode} ({last})")
        write_text(page, ended.stdout)
        write_text(done, json.dumps(facts | {"result": file_digest(result)}, indent=1) + "\n")


def _command(name: str, study: Study, job: Job) -> tuple[list[str], dict[str, Any]]:
    """The benchmark's command, and what its result depends on, beside the code."""
    config = next(flag.partition("=")[2] for flag in job.arguments if flag.startswith("--config="))
    checkpoints = [Workdir(job.workdir).stage(stage).path for stage in study.checkpoints]
    arguments = [*map(str, checkpoints), f"--config={Path(config).relative_to(ROOT)}", *study.flags]
    command = [sys.executable, "-m", f"benchmarks.{study.module}", *arguments]
    facts = job.facts | {"study": job.wherever(arguments), "checkpoints": [files_digest(path) for path in checkpoints]}
    return [*command, f"--json={job.workdir / name}.json"], facts


def collect(name: str, study: Study, jobs: Sequence[Job]) -> dict[str, Any]:
    """Means over the seeds, as `comparison.markdown` and `draw` take them: a line for each label, table and row."""
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for job in jobs:
        tables = read_json(job.workdir / f"{name}.json", "run the study again")["tables"]
        for table, rows in tables.items():
            for row in rows:
                line = (f"{job.label}, {Path(table).name}", Path(row[study.key]).name)
                for metric in study.metrics:
                    value = row[metric][0] if isinstance(row[metric], list) else row[metric]
                    values.setdefault(line, {}).setdefault(metric, []).append(value)
    found = {}
    for (label, row), metrics in values.items():
        means = {metric: _figure(np.array(seeds)) for metric, seeds in metrics.items()}
        found[f"{label}, {row}"] = {"row": row, "seeds": len(metrics[study.metrics[0]]), "means": means}
    return found


def _figure(seeds: np.ndarray) -> dict[str, float]:
    """The mean with one standard error over the seeds on each side."""
    mean = float(seeds.mean())
    error = float(seeds.std(ddof=1) / np.sqrt(len(seeds))) if len(seeds) > 1 else 0.0
    return {"value": mean, "low": mean - error, "high": mean + error}

"""The evaluate stage: every row of the report on every data set, then the report itself."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

from slpo_jax.config import own_latents
from slpo_jax.errors import UserError
from slpo_jax.evaluation.evaluate import record_rows
from slpo_jax.evaluation.records import write_records
from slpo_jax.evaluation.report import write_report
from slpo_jax.io.files import write_text
from slpo_jax.io.workdir import SetFiles
from slpo_jax.policy.policy import Stopping
from slpo_jax.run.claims import SHARED_KEYS
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.select import choose
from slpo_jax.run.stage import stage_params, starting_params


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the report: a checkpoint and how its rollouts end.

    Attributes:
        name: of the row and of its folder in eval/.
        stage: whose checkpoint, "" for `config.init`.
        stopping: "threshold" or "length".
        rules: to choose from on the validation split.
    """

    name: str
    stage: str
    stopping: Stopping
    rules: tuple


def rows(experiment: Experiment) -> list[Row]:
    """The rows that the finished stages of this workdir allow, in the report's order."""
    config, workdir = experiment.config, experiment.workdir
    total = config.max_latents
    own = own_latents(config)
    gated: tuple[Stopping, tuple] = ("length", (total,))
    if config.gate.enabled:
        gated = ("threshold", tuple(config.evaluate.thresholds))
    found = []
    if workdir.stage("imitate").is_finished:
        found += [Row("imitate", "imitate", "length", (own,))]
        found += [Row("imitate_fixed_tmax", "imitate", "length", (total,))]
    if workdir.stage("imitate_control").is_finished:
        found += [Row("imitate_control", "imitate_control", "length", (own, total))]
    found += [Row(stage, stage, *gated) for stage in ("cold_start", "slpo") if workdir.stage(stage).is_finished]
    if not found and not config.init:
        raise UserError(f"config.init: {workdir} holds no finished stage to evaluate; give a checkpoint")
    if not found:
        found = [Row("slpo" if config.gate.enabled else "imitate", "", *gated)]
    return found


def run_evaluate(experiment: Experiment) -> None:
    """Evaluate all rows and write eval/, report.json, report.md and figures/. What is there already is kept."""
    config = experiment.config
    names = config.evaluate.datasets or tuple(config.data.eval)
    table = rows(experiment)
    done: dict[tuple, SetFiles] = {}
    for row in table:
        params = stage_params(experiment, row.stage) if row.stage else starting_params(experiment, ())
        rule = None
        for name in names:
            files = experiment.workdir.set_files(name, row.name)
            stamp = _stamp(experiment, row, name)
            if not _is_current(files.stamp, stamp):
                if rule is None:
                    rule = row.rules[0]
                    if len(row.rules) > 1:
                        rule = choose(experiment, row.name, params, row.stopping, list(row.rules))
                same = done.get((row.stage, row.stopping, rule, name))
                if same is None:
                    _evaluate_set(experiment, row, rule, params, files)
                else:
                    _copy_results(same, files)
                done[row.stage, row.stopping, rule, name] = files
                write_text(files.stamp, stamp)
            if row is table[-1]:
                _copy_results(files, experiment.workdir.set_files(name))
    write_report(experiment.workdir.root)


def _copy_results(source: SetFiles, target: SetFiles) -> None:
    target.folder.mkdir(parents=True, exist_ok=True)
    for old, new in ((source.records, target.records), (source.latents, target.latents)):
        if old.exists():
            shutil.copyfile(old, new)


def _evaluate_set(experiment: Experiment, row: Row, rule, params, files: SetFiles) -> None:
    config, problems = experiment.config.evaluate, experiment.test_set(files.name)
    label = f"{row.name} on {files.name}"
    evaluate, limit = experiment.evaluator.run, config.limit
    greedy = evaluate(params, problems, row.stopping, rule, limit=limit, keep_latents=config.save_latents, label=label)
    sampled = {}
    if config.samples:
        for seed in range(config.seeds):
            sampled[seed] = evaluate(
                params, problems, row.stopping, rule, seed, config.samples, limit, label=f"{label}, seed {seed}"
            )
    write_records(files.records, record_rows(experiment.reader, problems, greedy, sampled, config.samples))
    if greedy.latents is not None:
        np.savez_compressed(files.latents, latents=greedy.latents, latent_steps=greedy.latent_steps)


def _stamp(experiment: Experiment, row: Row, name: str) -> str:
    """What the results of a row on a set depend on, as a digest."""
    config = experiment.config
    finished = experiment.workdir.stage(row.stage or "-").finished
    facts = [
        dataclasses.asdict(row),
        config.evaluate.to_dict() | {"datasets": None},
        config.data.eval[name],
        config.data.synthetic.to_dict(),
        config.data.valid,
        {key: config[key] for key in SHARED_KEYS},
        finished.read_text() if finished.exists() else "",
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest() + "\n"


def _is_current(path: Path, stamp: str) -> bool:
    return path.exists() and path.read_text() == stamp

"""`config.evaluate.rows_from=DIR`: the rows that a run shares with another, taken from there as they are.

Runs that differ in their last stage alone (an ablation, another objective) need not evaluate the first stages again. A
row of DIR is taken if this run has none of its name. Its checkpoint may be whatever it is, as its `row.json` says; what
must agree is what makes its figures comparable: the problems, to the byte, how many rollouts of how many tokens, how
those are sampled, and under which dropout.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from slpo_jax.config.config import Config
from slpo_jax.errors import UserError
from slpo_jax.evaluation.manifest import is_whole, problems_digest, read_manifest
from slpo_jax.evaluation.rows import Row, read_row, read_rows, write_row
from slpo_jax.io.workdir import SetFiles, Workdir
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.provenance import evaluated_settings

_KEY = "config.evaluate.rows_from"


def check_rows(experiment: Experiment, own: list[Row], sets: tuple[str, ...]) -> list[Row]:
    """The rows that are to be taken.

    Args:
        experiment: the run.
        own: its own rows, which are not taken.
        sets: names of the data sets that every row must have.

    Raises:
        UserError: there is no such run, or a row of it can't be compared with this run's.
    """
    if not experiment.config.evaluate.rows_from:
        return []
    source = Workdir(Path(experiment.config.evaluate.rows_from).expanduser())
    if source.root.resolve() == experiment.workdir.root.resolve():
        raise UserError(f"{_KEY}: {source} is this run itself; give another run's workdir, or ''")
    found = read_rows(source.root)
    if not found:
        raise UserError(f"{_KEY}: {source} has no eval/ROW/row.json; give the workdir of a run that was evaluated")
    taken = [row for row in found.values() if row.name not in {mine.name for mine in own}]
    for row in taken:
        for name in sets:
            _check(experiment, row, source.set_files(name, row.name))
    return taken


def _check(experiment: Experiment, row: Row, files: SetFiles) -> None:
    """Whether a set of a row can be compared with this run's own."""
    config, where = experiment.config, f"{files.folder.parent.parent}'s row {row.name}"
    manifest = read_manifest(files)
    if manifest is None or not files.records.exists():
        raise UserError(
            f"{_KEY}: {where} was not evaluated on {files.name}; do so there, or change config.evaluate.datasets"
        )
    if not is_whole(files, manifest) or (manifest.checkpoint, manifest.settings) != (row.checkpoint, row.evaluation):
        raise UserError(f"{_KEY}: {files.records} is not what {where} is now; run the evaluate stage there again")
    data, _, count = problems_digest(experiment.test_set(files.name), config.evaluate.limit)
    if manifest.data != data:
        raise UserError(
            f"config.data.eval.{files.name}: these {count:,} problems are not the {manifest.problems:,} that {where} "
            f"was evaluated on; give the same data and config.evaluate.limit, or another {_KEY}"
        )
    then = {**manifest.settings, "evaluate.samples": manifest.samples, "evaluate.seeds": manifest.seeds}
    for key, now in comparable(config).items():
        if now != then.get(key):
            raise UserError(
                f"config.{key}: is {now}, but {then.get(key)} in {where}; set it to that, or give another {_KEY}"
            )


def comparable(config: Config) -> dict[str, Any]:
    """The settings in which rows that are compared have to agree, by key."""
    evaluate, every = config.evaluate, evaluated_settings(config)
    found = {key: value for key, value in every.items() if key.startswith(("evaluate.", "dropout."))}
    return found | {"evaluate.samples": evaluate.samples, "evaluate.seeds": evaluate.used_seeds}


def take_rows(experiment: Experiment, taken: list[Row], sets: tuple[str, ...]) -> None:
    """Copy the rows' records, and remove those that an earlier command took and this one does not.

    Args:
        experiment: the run.
        taken: what `check_rows` gave.
        sets: names of the data sets.
    """
    workdir = experiment.workdir
    for folder in sorted(path for path in workdir.eval.glob("*") if path.is_dir() and not path.is_symlink()):
        row = read_row(workdir.root, folder.name)
        if row is not None and row.source:
            shutil.rmtree(folder)
    source = Workdir(Path(experiment.config.evaluate.rows_from).expanduser())
    for row in taken:
        for name in sets:
            old, new = source.set_files(name, row.name), workdir.set_files(name, row.name)
            new.folder.mkdir(parents=True, exist_ok=True)
            for kind in ("records", "latents", "thoughts", "manifest"):
                if getattr(old, kind).exists():
                    shutil.copyfile(getattr(old, kind), getattr(new, kind))
        write_row(workdir.root, dataclasses.replace(row, source=row.source or str(source)))

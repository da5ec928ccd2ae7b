"""The stages of a run: what is checked before the first, and one after the other."""

import contextlib
import importlib
import json
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from absl import logging

from slpo_jax.config.config import Config
from slpo_jax.config.sections import values
from slpo_jax.data.problem import shared
from slpo_jax.errors import UserError
from slpo_jax.io import hosts
from slpo_jax.io.files import write_text
from slpo_jax.io.watchdog import watched
from slpo_jax.run.data_summary import data_summary
from slpo_jax.run.evaluate import check_evaluation, run_evaluate
from slpo_jax.run.experiment import Experiment, build
from slpo_jax.run.header import say_run
from slpo_jax.run.provenance import check_models, ensure_manifest, starting_stage
from slpo_jax.run.rows import rows
from slpo_jax.run.sources import sets_to_evaluate
from slpo_jax.run.stage import check_batch
from slpo_jax.run.validate import check_sizes
from slpo_jax.stages import EVALUATE, IMITATE, UNFINISHED, Section, Stage, wanted


def run_stages(config: Config, workdir: Path, given: Collection[str] = ()) -> Experiment:
    """Run `config.stages`.

    Args:
        config: checked.
        workdir: where checkpoints and reports go.
        given: keys of it that were set, where that can't be told from their values.
    Returns:
        what was run.
    Raises:
        UserError: something in the config or the workdir can't be used.
    """
    experiment = build(config, workdir, given)
    say_run(experiment)
    with experiment.workdir.in_use(), watched(config.stuck_after):
        try:
            check_stages(experiment)
            resolved = values(experiment.config)
            write_text(experiment.workdir.config, json.dumps(resolved, indent=1) + "\n")
            if wanted(config, experiment.workdir.finished_stages()):
                _say_summary(experiment)
                experiment.log.start(config.trackers, resolved)
            for stage in wanted(experiment.config):
                run_stage(experiment, stage)
            if EVALUATE in config.stages:
                run_evaluate(experiment)
        except BaseException:
            with contextlib.suppress(OSError):  # of a disk that is full; what went wrong first is said
                experiment.log.close()
            raise
        experiment.log.close()
    return experiment


def _say_summary(experiment: Experiment) -> None:
    sets = experiment.sets.items() if hosts.is_first() else ()
    lines = [line for key, problems in sets for line in data_summary(experiment.config, key, problems)]
    for line in dict.fromkeys(lines):  # parts of one source have the same fields
        print(line, file=sys.stderr, flush=True)


def _how(section: Section) -> Any:
    """The file that has `check` and `train` of a section's stages, and `validates`."""
    return importlib.import_module(f"slpo_jax.run.{section}")


def run_stage(experiment: Experiment, stage: Stage) -> None:
    """Train a stage, if it isn't finished."""
    ensure_manifest(experiment, stage.name)
    if not experiment.workdir.stage(stage.name).is_finished:
        _how(stage.section).train(experiment, stage.name)
    if stage.name == IMITATE and hosts.is_first():  # also what a run left that was killed as soon as it was finished
        shutil.rmtree(experiment.workdir.stage(UNFINISHED).path, ignore_errors=True)


def check_stages(experiment: Experiment) -> None:
    """Fail before the first stage, not hours later, on what a later one could not use.

    Raises:
        UserError: a setting of a stage or a data set can't be used, or the workdir holds the stage of another config.
    """
    check_sizes(experiment.config, experiment.policy.latent_policy)
    wrong = dict[str, None]()
    for stage in wanted(experiment.config):
        check_batch(experiment, stage.section)
        ensure_manifest(experiment, stage.name, write=False)
        try:
            _how(stage.section).check(experiment, stage.name)
        except UserError as error:
            wrong[str(error)] = None
    if wrong:  # of every stage at once, so that one correction is enough
        raise UserError("; and ".join(wrong))
    if EVALUATE in experiment.config.stages:
        check_evaluation(experiment)
    _check_starts(experiment)
    _open_data(experiment)


def _check_starts(experiment: Experiment) -> None:
    """Make sure that the parameters that are going to be read are of the model that the config describes.

    Raises:
        UserError: they are of another model.
    """
    config, workdir = experiment.config, experiment.workdir
    left = wanted(config, workdir.finished_stages())
    starts = {starting_stage(experiment, stage.name) for stage in left}
    check_models(experiment, [name for name in sorted(starts) if workdir.stage(name).is_finished])
    asked = rows(experiment, planned=True) if EVALUATE in config.stages else []
    if "" in starts or any(not row.stage for row in asked):
        experiment.stored_params()


def _open_data(experiment: Experiment) -> None:
    """Read every data set that a stage is going to ask for, in the order in which they do.

    Raises:
        UserError: one is missing, malformed, or has a prompt that is too long.
    """
    config = experiment.config
    to_train = {stage.section for stage in wanted(config, experiment.workdir.finished_stages())}
    if to_train:
        _ = experiment.train
    if EVALUATE in config.stages:
        for name in sets_to_evaluate(config):
            experiment.test_set(name)
    asked = rows(experiment, planned=True) if EVALUATE in config.stages else []
    choosing = [row for row in asked if len(row.rules) > 1]
    if choosing and not config.data.valid:
        what, way = "number of latents", ""
        if choosing[0].gated:
            what, way = "gate's threshold", ", or one threshold, e.g. --config.evaluate.thresholds='(0.5,)'"
        raise UserError(
            f"config.data.valid: not set, and {choosing[0].label}'s {what} is chosen on it; give a file or a synthetic "
            f"set{way}"
        )
    if choosing or any(_how(section).validates(config) for section in to_train):
        _ = experiment.valid
    if EVALUATE in config.stages:
        say_shared(experiment)


def say_shared(experiment: Experiment) -> None:
    """Warn of problems of an evaluated set that are trained on, chosen by, or in another evaluated set as well."""
    known = {key: experiment.problems(key) for key in ("config.data.train", "config.data.valid")}
    for name in sets_to_evaluate(experiment.config):
        problems, own = experiment.test_set(name).problems, f"config.data.eval.{name}"
        for key, others in known.items():
            if count := shared(problems, others):
                logging.warning("%s: %d of %d problems are also in %s", own, count, len(problems), key)
        known[own] = problems

"""The stages of a run: what is checked before the first, and one after the other."""

import contextlib
import json
from collections.abc import Collection
from pathlib import Path

from absl import logging

from slpo_jax.config import Config
from slpo_jax.errors import UserError
from slpo_jax.io.files import write_text
from slpo_jax.io.watchdog import watched
from slpo_jax.run.cold_start import run_cold_start
from slpo_jax.run.evaluate import check_evaluation, run_evaluate
from slpo_jax.run.experiment import Experiment, build
from slpo_jax.run.imitate import imitated, planned, run_imitate
from slpo_jax.run.provenance import check_models, claim, starting_stage
from slpo_jax.run.rl import make_objective, optimizer_config, run_rl
from slpo_jax.run.rows import rows
from slpo_jax.run.sources import sets_to_evaluate, stages_to_train
from slpo_jax.run.stage import check_batch
from slpo_jax.sections import values
from slpo_jax.text.problem import shared

RUN = {"imitate": run_imitate, "cold_start": run_cold_start, "rl": run_rl, "evaluate": run_evaluate}


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
    with experiment.workdir.in_use(), watched(config.stuck_after):
        try:
            check_stages(experiment)
            write_text(experiment.workdir.config, json.dumps(values(experiment.config), indent=1) + "\n")
            for stage in config.stages:
                RUN[stage](experiment)
        except BaseException:
            with contextlib.suppress(OSError):  # of a disk that is full; what went wrong first is said
                experiment.log.close()
            raise
        experiment.log.close()
    return experiment


def check_stages(experiment: Experiment) -> None:
    """Fail before the first stage, not hours later, on what a later one could not use.

    Raises:
        UserError: a setting of a stage or a data set can't be used, or the workdir holds the stage of another config.
    """
    config = experiment.config
    for stage in config.stages:
        if stage == "evaluate":
            check_evaluation(experiment)
            continue
        check_batch(experiment, stage)
        if stage == "rl":
            for name in config.rl.objectives:
                claim(experiment, name, write=False)
                optimizer_config(experiment, make_objective(experiment, name))
            continue
        claim(experiment, stage, write=False)
        if stage == "cold_start":
            experiment.optimizer_config(stage, config.cold_start.steps)
        else:
            if stage in stages_to_train(config, experiment.workdir):
                imitation, plan, _ = planned(experiment)
                imitated(experiment, imitation, plan)
            if config.imitate.control:
                claim(experiment, "imitate_control", write=False)
    _check_starts(experiment)
    _open_data(experiment)


def _check_starts(experiment: Experiment) -> None:
    """Make sure that the parameters that are going to be read are of the model that the config describes.

    Raises:
        UserError: they are of another model.
    """
    config, workdir = experiment.config, experiment.workdir
    wanted = {"imitate", "cold_start"}.intersection(config.stages)
    wanted |= set(config.rl.objectives if "rl" in config.stages else ())
    starts = {starting_stage(experiment, name) for name in wanted if not workdir.stage(name).is_finished}
    check_models(experiment, [name for name in sorted(starts) if workdir.stage(name).is_finished])
    asked = rows(experiment, planned=True) if "evaluate" in config.stages else []
    if "" in starts or any(not row.stage for row in asked):
        experiment.stored_params()


def _open_data(experiment: Experiment) -> None:
    """Read every data set that a stage is going to ask for, in the order in which they do.

    Raises:
        UserError: one is missing, malformed, or has a prompt that is too long.
    """
    config = experiment.config
    to_train = stages_to_train(config, experiment.workdir)
    if to_train:
        _ = experiment.train
    if "evaluate" in config.stages:
        for name in sets_to_evaluate(config):
            experiment.test_set(name)
    asked = rows(experiment, planned=True) if "evaluate" in config.stages else []
    choosing = [row for row in asked if len(row.rules) > 1]
    if choosing and not config.data.valid:
        what, way = "number of latents", ""
        if choosing[0].gated:
            what, way = "gate's threshold", ", or one threshold, e.g. --config.evaluate.thresholds='(0.5,)'"
        raise UserError(
            f"config.data.valid: not set, and {choosing[0].label}'s {what} is chosen on it; give a file or a synthetic "
            f"set{way}"
        )
    if choosing or "cold_start" in to_train or ("rl" in to_train and config.rl.evaluate_every):
        _ = experiment.valid
    if "evaluate" in config.stages:
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

"""The stages of a run: what is said and checked before the first, and one after the other."""

import contextlib
import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

from slpo_jax.config.config import Config
from slpo_jax.config.overrides import values
from slpo_jax.data.problem import without
from slpo_jax.errors import UserError
from slpo_jax.io.files import write_text
from slpo_jax.run import (
    best_of_n,
    evaluate,
    latent_rm,
    train_gate,
    train_imitation,
    train_rl,
)
from slpo_jax.run.experiment import Experiment, Stage, build
from slpo_jax.run.provenance import check_models, ensure_manifest
from slpo_jax.run.sources import EVAL, LEARNED, VALID, data_summary
from slpo_jax.runtime import hosts
from slpo_jax.runtime.progress import say_start
from slpo_jax.stages import (
    BEST_OF_N,
    COLD_START,
    CONTROL,
    EVALUATE,
    IMITATE,
    IMITATE_SCRATCH,
    LATENT_RM,
    RL,
)

_SCRIPTS: dict[str, Any] = {
    IMITATE: train_imitation,
    COLD_START: train_gate,
    BEST_OF_N: best_of_n,
    RL: train_rl,
    LATENT_RM: latent_rm,
}
"""The file of a section's stages: `prepare` refuses, or returns what `train` needs."""


def run_stages(
    config: Config, workdir: Path, uncut: Config | None = None
) -> Experiment:
    """Run `config.stages`.

    Args:
        config: checked.
        workdir: where checkpoints and reports go.
        uncut: the whole config that --smoke has cut down to `config`; its settings are checked too.
    Returns:
        what was run.
    Raises:
        UserError: something in the config or the workdir can't be used.
    """
    experiment = build(config, workdir)
    if hosts.is_first():
        _say_run(experiment)
    with experiment.workdir.in_use(), hosts.watch_processes(config.stuck_after):
        try:
            plans = check_stages(experiment, uncut)
            resolved = values(experiment.config)
            write_text(experiment.workdir.config, json.dumps(resolved, indent=1) + "\n")
            if experiment.left:
                if hosts.is_first():
                    sets = experiment.sets.items()
                    lines = [
                        line
                        for item in sets
                        for line in data_summary(*item, config.weighted)
                    ]
                    print(
                        "\n".join(dict.fromkeys(lines)), file=sys.stderr, flush=True
                    )  # parts of a source share some
                experiment.log.start(config.trackers, resolved)
            for stage in experiment.wanted:
                run_stage(stage, plans[stage.name])
            if EVALUATE in config.stages:
                evaluate.evaluate(experiment, plans[EVALUATE])
        except BaseException:
            with contextlib.suppress(
                OSError
            ):  # of a disk that is full; what went wrong first is said
                experiment.log.close()
            raise
        experiment.log.close()
    return experiment


def _say_run(experiment: Experiment) -> None:
    """Print the lines on workdir, devices, model and stages, on standard error."""
    config = experiment.config
    devices = experiment.mesh.devices
    stages = []
    sizes = [
        math.prod(leaf.shape) for leaf in jax.tree.leaves(experiment.abstract_params())
    ]
    for stage in experiment.wanted:
        at = f" (at step {max(stage.folder.steps)})" if stage.folder.steps else ""
        stages.append(stage.name + (" (finished)" if stage.is_done else at))
    stages += [EVALUATE] * (EVALUATE in config.stages)
    together = "" if hosts.count() == 1 else f" of {hosts.count()} processes"
    say_start(experiment.workdir.root)
    print(
        f"devices: {devices.size} x {devices.flat[0].device_kind}{together}",
        file=sys.stderr,
    )
    print(f"model: {config.reasoner}, {sum(sizes):,} parameters", file=sys.stderr)
    print(f"stages: {', '.join(stages)}", file=sys.stderr, flush=True)


def prepare(stage: Stage) -> Any:
    """Return what `run_stage` needs.

    Raises:
        UserError: the stage could not be trained.
    """
    return _SCRIPTS[stage.section].prepare(stage)


def run_stage(stage: Stage, plan: Any) -> None:
    """Train a stage, if it isn't finished.

    Args:
        plan: of `prepare`.
    """
    ensure_manifest(stage)
    if not stage.is_done:
        _SCRIPTS[stage.section].train(plan)
    if stage.name in IMITATE_SCRATCH and hosts.is_first():
        _remove_scratch(stage.experiment)


def _remove_scratch(experiment: Experiment) -> None:
    """Remove the checkpoints that imitation and its control leave while they run, unless the control starts from them.

    Called for finished stages too: a run may have been killed before it came to this.
    """
    control = experiment.stage(CONTROL)
    if control.is_wanted and not control.folder.is_finished:
        return
    for scratch in IMITATE_SCRATCH.values():
        folder = experiment.stage(scratch).folder
        shutil.rmtree(folder.path, ignore_errors=True)


def check_stages(experiment: Experiment, uncut: Config | None = None) -> dict[str, Any]:
    """Fail before the first stage, not hours later, on what a later one could not use.

    Args:
        uncut: see `run_stages`; such settings as batch sizes and warm-ups.
    Returns:
        of each stage, by name, what `prepare` returned; under `EVALUATE` the rows.
    Raises:
        UserError: a setting of a stage or a data set can't be used, or the workdir holds the stage of another config;
            parameters that are going to be read are of another model.
    """
    for stage in experiment.wanted:
        ensure_manifest(stage, write=False)
    if uncut:
        # Of the stages that are left: a finished one has taken the smoke test's steps, not those of the whole config.
        left = [stage.name for stage in experiment.left]
        whole = dataclasses.replace(experiment, config=uncut)
        _prepare_all([whole.stage(name) for name in left])
    plans = _prepare_all(experiment.wanted)
    choosing = False
    if EVALUATE in experiment.config.stages:
        report_rows = evaluate.prepare(experiment)
        plans[EVALUATE] = report_rows
        choosing = any(len(row.rules) > 1 for row in report_rows)
    starts = {stage.start.name: stage.start for stage in experiment.left}
    check_models(
        [
            stage
            for name, stage in sorted(starts.items())
            if name and stage.folder.is_finished
        ]
    )
    if "" in starts:
        experiment.stored_shapes()
    _open_data(experiment, choosing)
    return plans


def _prepare_all(stages: Sequence[Stage]) -> dict[str, Any]:
    """Prepare stages, and refuse what is wrong with any of them at once, so that one correction is enough."""
    plans: dict[str, Any] = {}
    wrong = dict[str, None]()
    for stage in stages:
        try:
            plans[stage.name] = prepare(stage)
        except UserError as error:
            wrong[str(error)] = None
    if wrong:
        raise UserError("; and ".join(wrong))
    return plans


def _open_data(experiment: Experiment, choosing: bool) -> None:
    """Read every data set that a stage is going to ask for.

    Args:
        choosing: whether a row's rule is chosen on the validation split.
    Raises:
        UserError: one is missing, malformed, or has a prompt that is too long.
    """
    config = experiment.config
    unfinished = experiment.left
    if unfinished:
        _ = experiment.train, experiment.demos  # asking reads them
    if EVALUATE in config.stages:
        for name in experiment.tests:
            experiment.test_set(name)
    if choosing or any(stage.validated_every for stage in unfinished):
        _ = experiment.valid
    if EVALUATE in config.stages:
        say_shared(experiment)


def say_shared(experiment: Experiment) -> None:
    """Warn of problems of an evaluated set that are trained on, chosen by, or in another evaluated set as well."""
    problems_by_key = {
        key: experiment.sets[key].problems
        for key in (*LEARNED, VALID)
        if key in experiment.sets
    }
    for name in experiment.tests:
        problems = experiment.test_set(name).problems
        key_of_set = EVAL + name
        for key, others in problems_by_key.items():
            if count := len(problems) - len(without(problems, others)):
                logging.warning(
                    "%s: %d of %d problems are also in %s",
                    key_of_set,
                    count,
                    len(problems),
                    key,
                )
        problems_by_key[key_of_set] = problems

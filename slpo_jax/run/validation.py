"""Validation while a stage is trained: the best parameters are kept beside the newest, and the stage leaves those."""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slpo_jax.io import hosts
from slpo_jax.io.orbax import load_params
from slpo_jax.run.adapters import merged
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.select import validation_accuracy
from slpo_jax.run.stage import close_stage, open_stage
from slpo_jax.training.checkpoint import StageCheckpoints
from slpo_jax.training.loop import StepFn
from slpo_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Validation:
    """When a stage is validated, and by what.

    Attributes:
        steps: of the stage, at most.
        every: steps between validations; there is one after the last step too. 0: none, and the last step's parameters
            are kept.
        patience: validations without a better one before the stage ends; None: it takes all its steps.
        accuracy: parameters -> the share of validation problems that they are right on; None is the reasoner's.
    """

    steps: int
    every: int
    patience: int | None = None
    accuracy: Callable[[Any], float] | None = None


def train_stage(
    experiment: Experiment,
    stage: str,
    state: TrainState,
    step_fn: StepFn,
    batch: Callable[[int], Any],
    validation: Validation,
) -> None:
    """Train a stage, and leave it with the parameters of its best validation, if any, the earlier ones on a tie.

    Args:
        stage: its name; the best parameters lie in `STAGE_best`.
        state: before its first step.
        batch: step -> batch.
    """
    run, state, best = open_stage(experiment, stage, state, validation.steps)
    if not validation.every:
        close_stage(experiment, stage, run, run.advance(state, step_fn, batch, validation.steps))
        return
    folder = experiment.workdir.best(stage).path
    if not best:  # a first step: what another try left there is not this one's
        if hosts.is_first():
            shutil.rmtree(folder, ignore_errors=True)
        hosts.barrier(f"{stage} begins")
        best = {"accuracy": -1.0, "step": 0, "evaluated": 0}
    experiment.log.rewind(stage, best["evaluated"], "valid_accuracy")
    accuracy = validation.accuracy or functools.partial(_accuracy, experiment)
    longest = validation.steps if validation.patience is None else validation.patience * validation.every

    def known() -> dict:
        return best

    while True:
        step = int(state.step)
        if best["evaluated"] < step and (step % validation.every == 0 or step == validation.steps):
            best = _keep_if_better(experiment, stage, state, best, folder, accuracy(state.params))
        if step >= validation.steps or step - best["step"] >= longest:
            break
        until = min(validation.steps, (step // validation.every + 1) * validation.every)
        state = run.advance(state, step_fn, batch, until, known)
    state = dataclasses.replace(state, params=load_params(folder, state.params))
    run.checkpoints.save(state, best, replace=True)  # the last step's may be there already, with the last parameters
    close_stage(experiment, stage, run, state, best)


def _accuracy(experiment: Experiment, params: Any) -> float:
    """The reasoner's."""
    params = merged(experiment, params)
    if experiment.config.gate.enabled:
        return validation_accuracy(experiment, params, "threshold", 0.5)
    return validation_accuracy(experiment, params, "length", experiment.config.max_latents)


def _keep_if_better(
    experiment: Experiment, stage: str, state: TrainState, best: dict, folder: Path, found: float
) -> dict:
    """Keep a checkpoint if no validation has found more, and return what is known of the best now."""
    step = int(state.step)
    experiment.log.write(stage, step, {"valid_accuracy": found})
    if found <= best["accuracy"]:
        return best | {"evaluated": step}
    keeper = StageCheckpoints(folder, keep=1)
    keeper.save(state)
    keeper.close()
    return {"accuracy": found, "step": step, "evaluated": step}

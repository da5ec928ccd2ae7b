"""The stage cold_start: the stopping gate."""

import dataclasses

from slpo_jax.config.config import Config
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.stage import prompted_batches, starting_params, state_and_step
from slpo_jax.run.validation import Validation, train_stage
from slpo_jax.training import cold_start


def validates(config: Config) -> bool:
    """Whether validation problems are asked for."""
    return True


def check(experiment: Experiment, stage: str) -> None:
    """Fail before the first stage on what it could not use."""
    experiment.optimizer_config(stage, experiment.config.cold_start.steps)


def train(experiment: Experiment, stage: str) -> None:
    """Train the gate, and keep the one with the best validation accuracy."""
    config = experiment.config.cold_start
    every = experiment.config
    settings = dataclasses.replace(config, min_latents=every.min_latents, gate_dropout=every.gate.dropout)
    assert experiment.reward.on_device is not None
    loss_fn = cold_start.make_loss(experiment.policy, experiment.reward.on_device, settings)
    params = starting_params(experiment, stage)
    state, step_fn = state_and_step(experiment, stage, params, experiment.trained_by(stage, params), loss_fn)
    del params  # the state has its own
    validation = Validation(config.steps, config.evaluate_every, config.patience)
    train_stage(experiment, stage, state, step_fn, prompted_batches(experiment, config, config.steps), validation)

"""The stage cold_start: the stopping gate."""

import dataclasses
import functools

from slpo_jax.run.experiment import Stage
from slpo_jax.run.train_stage import host_rightness, prompted_batches, stage_params, state_and_step, train_stage
from slpo_jax.training.gate_training import make_improvement, make_loss, with_lengths
from slpo_jax.training.host_rewards import make_host_step


def check(stage: Stage) -> None:
    """Fail before the first stage on what it could not use."""
    stage.experiment.optimizer_config(stage.section, stage.settings.steps)


def train(stage: Stage) -> None:
    """Train the gate, and keep the one with the best validation accuracy."""
    experiment, params = stage.experiment, stage_params(stage.start)
    config_fields = {"min_latents": experiment.config.min_latents, "gate_dropout": experiment.config.gate.dropout}
    config, policy = dataclasses.replace(stage.settings, **config_fields), experiment.policy
    if experiment.reward.on_device is not None:
        loss_fn, make = make_loss(policy, experiment.reward.on_device, config), None
    else:
        loss_fn = make_improvement(policy, config)
        sample = functools.partial(with_lengths, policy, config)
        make = functools.partial(make_host_step, sample=sample, host_reward=host_rightness(experiment))
    state, step_fn = state_and_step(stage, params, experiment.trained_by(stage.section, params), loss_fn, make)
    del params  # the state has its own
    train_stage(stage, state, step_fn, prompted_batches(stage), patience=stage.settings.patience)

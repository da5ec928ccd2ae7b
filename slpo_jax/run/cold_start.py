"""The stage cold_start: the stopping gate."""

import dataclasses

from slpo_jax.run.stage import Stage, prompted_batches, stage_params, state_and_step, train_stage
from slpo_jax.training import cold_start


def check(stage: Stage) -> None:
    """Fail before the first stage on what it could not use."""
    stage.run.optimizer_config(stage.section, stage.settings.steps)


def train(stage: Stage) -> None:
    """Train the gate, and keep the one with the best validation accuracy."""
    run, params = stage.run, stage_params(stage.start)
    own = {"min_latents": run.config.min_latents, "gate_dropout": run.config.gate.dropout}
    assert run.reward.on_device is not None
    loss_fn = cold_start.make_loss(run.policy, run.reward.on_device, dataclasses.replace(stage.settings, **own))
    state, step_fn = state_and_step(stage, params, run.trained_by(stage.section, params), loss_fn)
    del params  # the state has its own
    train_stage(stage, state, step_fn, prompted_batches(stage), patience=stage.settings.patience)

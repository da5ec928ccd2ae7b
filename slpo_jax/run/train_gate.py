"""The stage cold_start: trains the gate that stops a thought, before training on rewards."""

import dataclasses
import functools

import jax
from absl import logging

from slpo_jax.run.experiment import Stage
from slpo_jax.run.run_checks import check_batch
from slpo_jax.run.train_stage import (
    Validation,
    close_stage,
    make_batch_reader,
    make_host_rightness,
    open_stage,
    read_stage_params,
    state_and_step,
)
from slpo_jax.runtime import hosts
from slpo_jax.training.gate_training import (
    candidates_with_lengths,
    make_candidates_loss,
    make_host_step,
    make_loss,
)


def prepare(stage: Stage) -> Stage:
    """Return what the loop needs, which is the stage alone.

    Raises:
        UserError: a setting can't be used.
    """
    check_batch(stage.experiment.config, stage.section, stage.experiment.mesh.size)
    stage.experiment.optimizer_config(stage.section, stage.settings.steps)
    return stage


def train(stage: Stage) -> None:
    """Train the gate, and keep the one with the best validation accuracy."""
    experiment = stage.experiment
    policy = experiment.policy
    settings = stage.settings
    loss_settings = dataclasses.replace(
        settings,
        min_latents=experiment.config.min_latents,
        gate_dropout=experiment.config.gate.dropout,
    )

    # The step answers at every candidate length, asks which answers are right, and improves the gate. Where the device
    # judges it is one program; where the host does there is one before the verdicts and one after.
    params = read_stage_params(stage.start)
    trained = experiment.trained_by(stage.section, params)
    if experiment.reward.on_device is not None:
        loss_fn = make_loss(policy, experiment.reward.on_device, loss_settings)
        make_step = None
    else:
        loss_fn = make_candidates_loss(policy, loss_settings)
        sample = functools.partial(candidates_with_lengths, policy, loss_settings)
        make_step = functools.partial(
            make_host_step, sample=sample, host_reward=make_host_rightness(experiment)
        )
    state, step_fn = state_and_step(stage, params, trained, loss_fn, make_step)
    del params  # the state has its own
    batch_at = make_batch_reader(stage)

    # The same command goes on from the newest checkpoint, and computes the same to the bit.
    loop, state, saved = open_stage(stage, state, settings.steps)
    with loop:
        validation = Validation(stage, loop, saved)
        patience = settings.patience * stage.validated_every
        step = int(state.step)
        batch = batch_at(step)
        while True:
            if validation.is_due(step):
                validation.run(state)
            if step >= settings.steps:
                break

            # It ends early where many consecutive validations were no better.
            best_step = validation.facts["step"]
            if step - best_step >= patience:
                if hosts.is_first():
                    logging.warning(
                        "%s: ends after step %d of %d: no validation was better than at step %d (config.%s.patience)",
                        stage.name,
                        step,
                        settings.steps,
                        best_step,
                        stage.section,
                    )
                loop.end_at(step)
                break

            # Everything that a step reads is on the devices already, but what the host judges between its programs.
            with jax.transfer_guard("disallow"):
                state, metrics = step_fn(state, batch)
            step += 1

            # While the devices compute, the host makes the next batch and logs the step before.
            last_batch = batch
            batch = batch_at(step)
            loop.log(step, metrics, last_batch)
            if loop.should_save(step):
                loop.save(state, validation.facts)
        state = validation.choose_best(state)
        close_stage(stage, loop, state, validation.facts)

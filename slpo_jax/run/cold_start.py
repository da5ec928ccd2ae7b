"""The stage cold_start: the stopping gate."""

import dataclasses
import shutil
from pathlib import Path

from slpo_jax.checked import fill
from slpo_jax.io.orbax import load_params
from slpo_jax.run.claims import claim
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.select import validation_accuracy
from slpo_jax.run.stage import check_batch, close_stage, open_stage, prompted_batches, starting_params
from slpo_jax.training import cold_start
from slpo_jax.training.checkpoint import StageCheckpoints
from slpo_jax.training.optimizer import make_optimizer
from slpo_jax.training.state import TrainState, init_state, make_train_step


def run_cold_start(experiment: Experiment) -> None:
    """Train the gate; keep the one with the best validation accuracy, then sweep its threshold."""
    claim(experiment, "cold_start")
    if experiment.workdir.stage("cold_start").is_finished:
        return
    config, stage = experiment.config.cold_start, "cold_start"
    check_batch(experiment, stage)
    trained = ("reasoner", "gate") if config.train_backbone else ("gate",)
    optimizer = make_optimizer(experiment.optimizer_config(stage, config.steps))
    state = init_state(starting_params(experiment, stage), trained, optimizer, experiment.key, experiment.mesh)
    settings = fill(
        cold_start.ColdStartConfig,
        config,
        "config.cold_start",
        min_latents=experiment.config.min_latents,
        gate_dropout=experiment.config.gate.dropout,
    )
    loss_fn = cold_start.make_loss(experiment.policy, experiment.reward, settings)
    step_fn = make_train_step(loss_fn, optimizer, trained, experiment.mesh, stage, config.micro_batches)
    run, state, best = open_stage(experiment, stage, state, config.steps)
    batch, best_dir = prompted_batches(experiment, config), experiment.workdir.stage("cold_start_best").path
    if not best:  # a first step: what another try left there is not this one's
        shutil.rmtree(best_dir, ignore_errors=True)
        best = {"accuracy": -1.0, "step": 0, "evaluated": 0}
    experiment.log.rewind(stage, best["evaluated"], "valid_accuracy")

    def known() -> dict:
        return best

    while True:
        step = int(state.step)
        if best["evaluated"] < step and (step % config.evaluate_every == 0 or step == config.steps):
            best = _keep_if_better(experiment, state, best, best_dir)
        if step >= config.steps or step - best["step"] >= config.patience * config.evaluate_every:
            break
        until = min(config.steps, (step // config.evaluate_every + 1) * config.evaluate_every)
        state = run.advance(state, step_fn, batch, until, known)
    state = dataclasses.replace(state, params=load_params(best_dir, state.params))
    run.checkpoints.save(state, best, replace=True)  # the last step's may be there already, with the last gate
    close_stage(experiment, stage, run, state, best)


def _keep_if_better(experiment: Experiment, state: TrainState, best: dict, directory: Path) -> dict:
    """Validate the gate, keep its checkpoint if none was better, and return what is known of the best now."""
    step = int(state.step)
    found = validation_accuracy(experiment, state.params, "threshold", 0.5)
    experiment.log.write("cold_start", step, {"valid_accuracy": found})
    if found <= best["accuracy"]:
        return best | {"evaluated": step}
    keeper = StageCheckpoints(directory, keep=1)
    keeper.save(state)
    keeper.close()
    return {"accuracy": found, "step": step, "evaluated": step}

"""The stage rl."""

import dataclasses

from slpo_jax.errors import UserError
from slpo_jax.policy.objective import ObjectiveConfig
from slpo_jax.policy.rollout import Stopping
from slpo_jax.run.claims import claim
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.stage import check_batch, close_stage, open_stage, prompted_batches, starting_params
from slpo_jax.training import slpo
from slpo_jax.training.optimizer import make_optimizer
from slpo_jax.training.state import init_state, make_train_step


def run_slpo(experiment: Experiment) -> None:
    """Surrogate latent policy optimization of reasoner, answers and gate."""
    claim(experiment, "slpo")
    if experiment.workdir.stage("slpo").is_finished:
        return
    config, stage = experiment.config.slpo, "slpo"
    check_batch(experiment, stage)
    gated = experiment.config.gate.enabled
    trained = ("reasoner", "gate") if gated else ("reasoner",)
    optimizer = make_optimizer(experiment.optimizer_config(stage, config.steps))
    state = init_state(
        starting_params(experiment, ("imitate", "cold_start")), trained, optimizer, experiment.key, experiment.mesh
    )
    step_fn = make_train_step(
        slpo.make_loss(make_slpo(experiment)), optimizer, trained, experiment.mesh, stage, config.micro_batches
    )
    run, state, _ = open_stage(experiment, stage, state, config.steps)
    state = run.advance(state, step_fn, prompted_batches(experiment, config), config.steps)
    close_stage(experiment, stage, run, state)


def make_slpo(experiment: Experiment) -> slpo.Slpo:
    """The parts of the SLPO step that the config describes."""
    config, gated = experiment.config.slpo, experiment.config.gate.enabled
    objective = ObjectiveConfig(**config.objective.to_dict())
    if not gated:
        objective = dataclasses.replace(objective, stop_weight=0.0)
    if objective.latent_weight == objective.answer_weight == objective.stop_weight == 0.0:
        raise UserError("config.slpo.objective: all three weights are 0, so there is nothing to train; set one")
    stopping: Stopping = config.stopping if gated else "length"
    # Without a gate all latents are used; rooms that differ in those alone are one.
    rooms = config.rooms if gated else dict.fromkeys((1.0, said) for _, said in config.rooms)
    return slpo.Slpo(
        experiment.reasoner,
        experiment.gate,
        experiment.reward,
        dataclasses.replace(experiment.rollout, stopping=stopping, temperature=config.temperature),
        objective,
        slpo.SlpoConfig(config.group, config.passes, config.advantage, config.answer_passes, tuple(map(tuple, rooms))),
    )

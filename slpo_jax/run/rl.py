"""The stage rl: every objective of `config.rl.objectives`, trained from the same start or after another."""

import dataclasses
import functools
from typing import Any

import jax
import optax
from absl import logging

from slpo_jax.config.config import Config, objective_of, rl_of
from slpo_jax.config.sections import changed
from slpo_jax.errors import UserError
from slpo_jax.models.lora import merging
from slpo_jax.models.parts import ADAPTER, LATENT_POLICY
from slpo_jax.policy.policy import Policy, Stopping
from slpo_jax.rewards.reward import CORRECT
from slpo_jax.run import adapters
from slpo_jax.run.experiment import Experiment, Setup
from slpo_jax.run.stage import note_finished, prompted_batches, starting_params
from slpo_jax.run.validation import Validation, train_stage
from slpo_jax.stages import RL
from slpo_jax.training.objectives import Objective
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule, scaled
from slpo_jax.training.rollout_update import Drawing, make_rl_step
from slpo_jax.training.state import copied, init_state

STAGE = RL


def validates(config: Config) -> bool:
    """Whether validation problems are asked for."""
    return config.rl.evaluate_every > 0


def check(experiment: Experiment, name: str) -> None:
    """Fail before the first stage on an objective that could not be used."""
    objective = make_objective(experiment, name)
    optimizer_config(experiment, objective)
    if experiment.config.rl.lora.rank:
        jax.eval_shape(functools.partial(adapters.fresh, experiment), experiment.abstract_params())
    config, devices, parts = experiment.config.rl, experiment.mesh.size, objective.rollout_parts
    if config.batch_size % (devices * config.micro_batches * parts):
        raise UserError(
            f"config.objective.{name}.minibatches: {parts} do not cut config.rl.batch_size={config.batch_size} into "
            f"equal parts for {devices} devices x {config.micro_batches} micro-batches; change one of them"
        )
    if objective.needs_answers and experiment.config.reward != CORRECT:
        logging.warning(
            "config.objective.%s: learns the reference answers, whatever config.reward=%s says, which only a gate's "
            "stop goes by; to learn what is rewarded set its estimator to reward",
            name,
            experiment.config.reward,
        )


def train(experiment: Experiment, name: str) -> None:
    """Train one objective from its start (`provenance.starting_stage`), with the same batches and keys as the others.

    Args:
        name: a name under `config.objective`.
    """
    if (last := adapters.left_merged(experiment, name)) is not None:
        note_finished(experiment, name, last)
        return
    config = experiment.config.rl
    objective = make_objective(experiment, name)
    policy = training_policy(experiment, objective)
    params = starting_params(experiment, name)
    params |= adapters.fresh(experiment, params)
    trained = adapters.trained(experiment, params)
    optimizer = optimizer_of(experiment, objective, {part: params[part] for part in trained})
    # Also of a run that goes on: its start is bound to be what it was.
    moved = {part: params[part] for part in trained if part != ADAPTER}
    reference = copied(moved, experiment.layout) if objective.needs_reference else None
    state = init_state(params, trained, optimizer, experiment.key, experiment.layout)
    del params, moved  # the state has its own
    on_device, problems = experiment.reward.on_device, experiment.train.problems

    def on_host(tokens_NA, index_N):
        return experiment.reward.on_host(tokens_NA, [problems[index % len(problems)] for index in index_N.tolist()])

    how = (optimizer, trained, experiment.layout, STAGE, config.micro_batches, on_host, reference)
    schedule = make_schedule(optimizer_config(experiment, objective))
    steps = rl_of(config, objective).steps
    batch = prompted_batches(experiment, config, steps, objective.needs_answers)
    drawing = Drawing(config.dynamic_batches, batch) if config.dynamic_batches else None
    step_fn = make_rl_step(policy, objective, on_device, config.group, *how, schedule, drawing)
    train_stage(experiment, name, state, step_fn, batch, Validation(steps, config.evaluate_every))


def make_objective(experiment: Setup, name: str) -> Objective:
    """The objective that `config.objective.NAME` describes, fit for the policy it is to train.

    Raises:
        UserError: unknown, a setting out of range, or not usable on this policy or these problems.
    """
    config, key = experiment.config, f"config.objective.{name}"
    objective = objective_of(config, name)
    objective.check(key, training_policy(experiment, objective), config.rl.group)
    return objective


def training_policy(experiment: Setup, objective: Objective) -> Policy:
    """The policy as an objective's rollouts use it."""
    config, gated = experiment.config.rl, experiment.config.gate.enabled
    stopping: Stopping = config.stopping if gated else "length"
    temperature = config.temperature if objective.temperature is None else objective.temperature
    # Where thoughts don't end by themselves all latents are used; capacities that differ in those alone are one.
    latent_policy = experiment.policy.latent_policy
    by_itself = gated or any(end is not None for end in (latent_policy.ends, latent_policy.halts, latent_policy.says))
    shares = config.capacities if by_itself else dict.fromkeys((1.0, answers) for _, answers in config.capacities)
    policy = experiment.policy.having(
        stopping=stopping, temperature=temperature, top_k=config.top_k, top_p=config.top_p
    )
    reasoner = merging(policy.reasoner, config.lora.scale) if config.lora.rank else policy.reasoner
    return dataclasses.replace(policy, reasoner=reasoner, capacities=tuple(shares))


def optimizer_of(experiment: Setup, objective: Objective, trained: dict[str, Any]) -> optax.GradientTransformation:
    """The objective's optimizer, in which the latent policy's own parameters have rates of their own.

    Args:
        trained: the parameters that it changes, by their top-level names.
    """
    config, rates = optimizer_config(experiment, objective), dict(experiment.policy.latent_policy.rates)
    optimizer, rate = make_optimizer(config), objective.latent_policy_learning_rate
    if LATENT_POLICY not in trained or (rate is None and not rates):
        return optimizer
    own = 1.0 if rate is None else rate / config.learning_rate
    factors: dict[str, Any] = dict.fromkeys(trained, 1.0)
    factors[LATENT_POLICY] = {name: own * rates.get(name, 1.0) for name in trained[LATENT_POLICY]}
    return scaled(optimizer, factors)


def optimizer_config(experiment: Setup, objective: Objective) -> OptimizerConfig:
    """`config.rl.optimizer`, with what the objective has of its own instead."""
    rl = rl_of(experiment.config.rl, objective)
    return changed(rl.optimizer, {"total_steps": rl.steps * objective.updates_per_step}, "config.rl.optimizer")

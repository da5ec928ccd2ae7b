"""The stage rl: every objective of `config.rl.objectives`, trained from the same start or after another.

With `config.rl.lora` adapters are trained, and a checkpoint has them merged and keeps them apart.
"""

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import optax
from absl import logging

from slpo_jax.checkpoints.adapters import write_adapters
from slpo_jax.config.config import rl_of
from slpo_jax.config.overrides import changed
from slpo_jax.errors import UserError
from slpo_jax.io.files import whole_folder
from slpo_jax.io.orbax import stored_params
from slpo_jax.models import lora
from slpo_jax.models.parts import ADAPTER, LATENT_POLICY, REASONER, Params
from slpo_jax.policy.noise import Stream
from slpo_jax.policy.policy import Policy, Stopping
from slpo_jax.rewards.reward import CORRECT
from slpo_jax.run.experiment import Stage
from slpo_jax.run.setup import Setup
from slpo_jax.run.train_stage import (
    host_reward,
    note_finished,
    prompted_batches,
    reasoner_accuracy,
    stage_params,
    train_stage,
)
from slpo_jax.runtime import hosts
from slpo_jax.stages import RL
from slpo_jax.training.objectives import Objective
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule, scaled
from slpo_jax.training.rl_step import Drawing, make_rl_step
from slpo_jax.training.stage_checkpoints import StageCheckpoints
from slpo_jax.training.state import TrainState, copied, init_state


def check(stage: Stage) -> None:
    """Fail before the first stage on an objective that could not be used."""
    experiment, rl = stage.experiment, stage.settings
    objective = make_objective(experiment, stage.name)
    optimizer_config(experiment, objective)
    if rl.lora.rank:
        jax.eval_shape(functools.partial(fresh_adapters, experiment), experiment.abstract_params())
    devices, parts = experiment.mesh.size, objective.rollout_parts
    if rl.batch_size % (devices * rl.micro_batches * parts):
        raise UserError(
            f"config.objective.{stage.name}.minibatches: {parts} do not cut config.rl.batch_size={rl.batch_size} "
            f"into equal parts for {devices} devices x {rl.micro_batches} micro-batches; change one of them"
        )
    others = [name for name in experiment.reward.entries if name != CORRECT]
    if objective.needs_answers and (count := sum(not problem.answer for problem in experiment.train.problems)):
        raise UserError(
            f"config.objective.{stage.name}: learns the reference answers, and {count} of {len(experiment.train)} "
            "problems of config.data.train have none; set its estimator to reward, or give answers"
        )
    if objective.needs_answers and others:
        logging.warning(
            "config.objective.%s: learns the reference answers, whatever config.reward=%s says, which only a gate's "
            "stop goes by; to learn what is rewarded set its estimator to reward", stage.name, ", ".join(others),
        )  # fmt: skip


def train(stage: Stage) -> None:
    """Train one objective from its start, with the same batches and keys as the others."""
    if (last := merged_step(stage)) is not None:
        note_finished(stage, last)
        return
    experiment, rl, objective = stage.experiment, stage.settings, make_objective(stage.experiment, stage.name)
    policy, params = training_policy(experiment, objective), stage_params(stage.start)
    params |= fresh_adapters(experiment, params)
    trained = trained_parts(experiment, params)
    optimizer = optimizer_of(experiment, objective, {part: params[part] for part in trained})
    # Also of a run that goes on: its start is bound to be what it was.
    moved = {part: params[part] for part in trained if part != ADAPTER}
    reference = copied(moved, experiment.layout) if objective.needs_reference else None
    state = init_state(params, trained, optimizer, experiment.key, experiment.layout)
    del params, moved  # the state has its own
    batch = prompted_batches(stage, objective.needs_answers)
    judges_truncated = rl.truncated == "judged"  # on the host, as on the device a text without its end is wrong
    on_device = None if judges_truncated else experiment.reward.on_device
    step_fn = make_rl_step(
        policy, objective, on_device, rl.group, optimizer, trained, experiment.layout, RL,
        micro_batches=rl.micro_batches, host_reward=host_reward(experiment, judges_truncated), reference=reference,
        schedule=make_schedule(optimizer_config(experiment, objective)),
        drawing=Drawing(rl.dynamic_batches, batch) if rl.dynamic_batches else None, unjudged=rl.unjudged,
    )  # fmt: skip

    def accuracy(params):
        return reasoner_accuracy(experiment, merged(experiment, params))

    train_stage(stage, state, step_fn, batch, accuracy, leave_merged)


def make_objective(setup: Setup, name: str) -> Objective:
    """Make the objective that `config.objective.NAME` describes, fit for the policy it is to train.

    Raises:
        UserError: unknown, a setting out of range, or not usable on this policy or these problems.
    """
    objective = setup.config.objective[name]
    objective.check(f"config.objective.{name}", training_policy(setup, objective), setup.config.rl.group)
    return objective


def training_policy(setup: Setup, objective: Objective) -> Policy:
    """Return the policy as an objective's rollouts use it."""
    config, gated = rl_of(setup.config.rl, objective), setup.config.gate.enabled
    stopping: Stopping = config.stopping if gated else "length"
    # Where thoughts don't end by themselves all latents are used; capacities that differ in those alone are one.
    latent_policy = setup.policy.latent_policy
    by_itself = gated or any(end is not None for end in (latent_policy.ends, latent_policy.halts, latent_policy.says))
    shares = config.capacities if by_itself else dict.fromkeys((1.0, answers) for _, answers in config.capacities)
    sampling = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    policy = setup.policy.having(stopping=stopping, **sampling)
    reasoner = lora.merging(policy.reasoner, config.lora.scale) if config.lora.rank else policy.reasoner
    return dataclasses.replace(policy, reasoner=reasoner, capacities=tuple(shares))


def optimizer_of(setup: Setup, objective: Objective, trained: dict[str, Any]) -> optax.GradientTransformation:
    """Make the objective's optimizer, in which the latent policy's own parameters have rates of their own.

    Args:
        trained: the parameters that it changes, by their top-level names.
    """
    config, rates = optimizer_config(setup, objective), dict(setup.policy.latent_policy.rates)
    optimizer, rate = make_optimizer(config), objective.latent_policy_learning_rate
    if LATENT_POLICY not in trained or (rate is None and not rates):
        return optimizer
    factor = 1.0 if rate is None else rate / config.learning_rate
    factors: dict[str, Any] = dict.fromkeys(trained, 1.0)
    factors[LATENT_POLICY] = {name: factor * rates.get(name, 1.0) for name in trained[LATENT_POLICY]}
    return scaled(optimizer, factors)


def optimizer_config(setup: Setup, objective: Objective) -> OptimizerConfig:
    """Return `config.rl.optimizer`, with what the objective has of its own instead."""
    rl = rl_of(setup.config.rl, objective)
    steps = rl.steps * objective.updates_per_step
    return changed(rl.optimizer, key="config.rl.optimizer", total_steps=steps)


def fresh_adapters(setup: Setup, params: Params) -> Params:
    """Make the part ADAPTER, which changes nothing yet; {} where the whole reasoner is trained.

    Raises:
        UserError: a kernel that the reasoner doesn't have.
    """
    config, key = setup.config.rl.lora, jax.random.fold_in(setup.key, Stream.ADAPTERS)
    if not config.rank:
        return {}
    return {ADAPTER: lora.adapter(key, params, config.rank, config.kernels, "config.rl.lora")}


def trained_parts(setup: Setup, params: Params) -> tuple[str, ...]:
    """Return the parts of these parameters that the stage changes: a reasoner's adapters in its place, if any."""
    names = setup.trained_by(RL, params)
    return (ADAPTER, *(name for name in names if name != REASONER)) if ADAPTER in params else names


def merged(setup: Setup, params: Params) -> Params:
    """Return all parts but ADAPTER, if there is one, with that merged, laid out as a state's."""
    if ADAPTER not in params:
        return params
    merge = functools.partial(lora.without_adapter, scale=setup.config.rl.lora.scale)
    layout = setup.layout
    return jax.jit(merge, out_shardings=layout.shardings(layout.specs(jax.eval_shape(merge, params))))(params)


def leave_merged(stage: Stage, state: TrainState) -> None:
    """Put merged parameters in the place of a stage's last checkpoint, and adapters, if any, beside as PEFT does."""
    experiment, start, init = stage.experiment, stage.start, stage.experiment.config.init
    if ADAPTER not in state.params:
        return
    adapters = jax.tree.map(hosts.whole, state.params[ADAPTER]["lora"])
    base = start.folder.path if start.name else Path(init).expanduser()
    base_name = str(base.absolute()) if start.name or (init and base.exists()) else init
    if hosts.is_first():
        shutil.rmtree(stage.folder.adapters, ignore_errors=True)
        with whole_folder(stage.folder.adapters) as folder:
            write_adapters(folder, adapters, experiment.reasoner.config, experiment.config.rl.lora.alpha, base_name)
    checkpoints = StageCheckpoints(stage.folder.path)
    checkpoints.save(dataclasses.replace(state, params=merged(experiment, state.params), opt_state=()), replace=True)
    checkpoints.close()


def merged_step(stage: Stage) -> int | None:
    """Return the step of the checkpoint that `leave_merged` left before the program was killed; None without one."""
    if not stage.settings.lora.rank:
        return None
    checkpoints = StageCheckpoints(stage.folder.path)  # which puts what was being replaced back
    step = checkpoints.latest_step
    checkpoints.close()
    try:
        return None if step is None or ADAPTER in stored_params(stage.folder.path).shapes else step
    except UserError:  # it is damaged, and the one before it has not merged them yet
        return None

"""Reinforcement learning with verifiable rewards: trains one objective of `config.rl.objectives`.

The file reads from top to bottom, as the stage runs:

1. `prepare` refuses what could not be trained, before any stage begins.
2. The policy of the rollouts, and the optimizer of what the stage trains.
3. The step: roll out G completions of each prompt, ask for their rewards, improve by the objective.
4. `train`, the loop: steps, metrics, checkpoints, validations.

The algorithm is in other files:

    batch              training/rollouts.py: make_batch
    rollout            training/rollouts.py: roll_out; its loops policy/rollout.py: sample
    reward             rewards/reward.py: Reward.on_device; training/host_rewards.py: HostVerdicts.ask on the host
    advantage          training/objectives/objective.py: Objective.advantages; formulas policy/advantage.py
    log-probabilities  policy/score.py: score
    loss               training/objectives/: an objective's __call__; training/rl_loss.py: make_rollout_loss
    old and reference  training/rl_step.py: make_rollout
    update             training/state.py: make_train_step
    dynamic sampling   training/rl_step.py: make_filtered_step

With `config.rl.lora` adapters are trained instead of the whole reasoner (`run/rl_adapters.py`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from absl import logging
from jax.sharding import NamedSharding

from slpo_jax.config.overrides import merge_settings
from slpo_jax.errors import UserError
from slpo_jax.models import lora
from slpo_jax.models.parts import ADAPTER, LATENT_POLICY, Params
from slpo_jax.policy.policy import Policy, Stopping
from slpo_jax.rewards.reward import CORRECT, RewardFn
from slpo_jax.run.experiment import Stage
from slpo_jax.run.rl_adapters import (
    find_merged_step,
    init_adapters,
    list_trained_parts,
    merge_adapter,
    save_merged,
)
from slpo_jax.run.run_checks import check_batch
from slpo_jax.run.setup import Setup
from slpo_jax.run.train_stage import (
    Validation,
    close_stage,
    evaluate_reasoner,
    make_batch_reader,
    make_host_reward,
    note_finished,
    open_stage,
    read_stage_params,
)
from slpo_jax.runtime.mesh import ROWS, Layout
from slpo_jax.stages import RL
from slpo_jax.training.host_rewards import HostRewardFn, HostVerdicts
from slpo_jax.training.loop import StepFn
from slpo_jax.training.objectives import Objective
from slpo_jax.training.optimizer import (
    OptimizerConfig,
    make_optimizer,
    make_schedule,
    scale_rates,
)
from slpo_jax.training.rl_config import RlConfig
from slpo_jax.training.rl_loss import make_rollout_and_loss, make_rollout_loss
from slpo_jax.training.rl_step import make_filtered_step, make_rollout
from slpo_jax.training.state import TrainState, copy_params, init_state, make_train_step

# ---------------------------------------------------------------------------
# 1. Prepare: every refusal, before any stage begins
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `train` needs for one objective.

    Attributes:
        stage: bears the objective's name.
        policy: of the rollouts.
        optimizer_config: of the objective's updates.
    """

    stage: Stage
    objective: Objective
    policy: Policy
    optimizer_config: OptimizerConfig


def prepare(stage: Stage) -> Plan:
    """Return what the loop needs.

    Raises:
        UserError: a setting can't be used, with this policy, on these devices or on these problems.
    """
    experiment = stage.experiment
    rl: RlConfig = stage.settings
    devices = experiment.mesh.size
    check_batch(experiment.config, stage.section, devices)

    # Check that the objective fits the policy, and that the adapters' kernels are the reasoner's. config.objective has
    # the settings of every objective by name; config.rl.objectives lists those that are trained.
    objective = experiment.config.objective[stage.name]
    policy = make_training_policy(experiment, rl)
    objective.check(f"config.objective.{stage.name}", policy, rl.group)
    optimizer_config = make_optimizer_config(rl, objective)
    if rl.lora.rank:
        params = experiment.abstract_params()
        # eval_shape only to raise; it allocates nothing.
        jax.eval_shape(functools.partial(init_adapters, experiment), params)

    # A step's prompts are cut into equal parts, for devices, micro-batches and the objective's minibatches.
    minibatches = objective.minibatches
    if rl.batch_size % (devices * rl.micro_batches * minibatches):
        raise UserError(
            f"config.objective.{stage.name}.minibatches: {minibatches} do not cut config.rl.batch_size={rl.batch_size} "
            f"into equal parts for {devices} devices x {rl.micro_batches} micro-batches; change one of them"
        )

    # Some objectives learn the reference answers instead of what is rewarded.
    if objective.needs_answers:
        unanswered = sum(not problem.answer for problem in experiment.train.problems)
        if unanswered:
            raise UserError(
                f"config.objective.{stage.name}: learns the reference answers, and {unanswered} of "
                f"{len(experiment.train)} problems of config.data.train have none; set its estimator to reward, or "
                "give answers"
            )
        other_rewards = [name for name in experiment.reward.entries if name != CORRECT]
        if other_rewards:
            logging.warning(
                "config.objective.%s: learns the reference answers, whatever config.reward=%s says, which only a "
                "gate's stop goes by; to learn what is rewarded set its estimator to reward",
                stage.name,
                ", ".join(other_rewards),
            )
    return Plan(stage, objective, policy, optimizer_config)


# ---------------------------------------------------------------------------
# 2. The policy of the rollouts, and the optimizer
# ---------------------------------------------------------------------------


def make_training_policy(setup: Setup, rl: RlConfig) -> Policy:
    """Return the policy as an objective's rollouts use it.

    Args:
        rl: with the objective's own settings, as `Stage.settings`.
    """
    gated = setup.config.gate.enabled
    stopping: Stopping = rl.stopping if gated else "length"
    policy = setup.policy.with_config(
        stopping=stopping,
        temperature=rl.temperature,
        top_k=rl.top_k,
        top_p=rl.top_p,
    )

    # With adapters `Reasoner.stack`, which runs once in each program, merges them first.
    reasoner = policy.reasoner
    if rl.lora.rank:
        reasoner = lora.make_merging(reasoner, rl.lora.scale)

    # A capacity is a share of the latent slots and one of the answer slots; scoring is compiled for each. Thoughts that
    # can't end early fill all latent slots, so capacities that differ only in that share are the same one. A thought
    # ends early by the gate, by an action that ends or halts it, or where it says eos, if it is written down.
    capacities = rl.capacities
    latent_policy = policy.latent_policy
    ways_to_end = (latent_policy.ends, latent_policy.halts, latent_policy.says)
    if not gated and all(way is None for way in ways_to_end):
        capacities = tuple(dict.fromkeys((1.0, answers) for _, answers in capacities))
    return dataclasses.replace(policy, reasoner=reasoner, capacities=capacities)


def make_optimizer_config(rl: RlConfig, objective: Objective) -> OptimizerConfig:
    """Return the settings of the objective's optimizer, whose schedule counts updates.

    Args:
        rl: with the objective's own settings, as `Stage.settings`.
    """
    updates = rl.steps * objective.updates_per_step
    return merge_settings(rl.optimizer, key="config.rl.optimizer", total_steps=updates)


def make_objective_optimizer(
    config: OptimizerConfig, policy: Policy, objective: Objective, trained: Params
) -> optax.GradientTransformation:
    """Make the objective's optimizer, in which the latent policy's own parameters have rates of their own.

    Args:
        trained: the parameters that it changes, by their top-level names.
    """
    optimizer = make_optimizer(config)
    # By parameter, what the latent policy multiplies the learning rate by.
    multipliers = dict(policy.latent_policy.rates)
    rate = objective.latent_policy_learning_rate
    if LATENT_POLICY not in trained or (rate is None and not multipliers):
        return optimizer

    # All its parameters share the objective's own rate for them, if it has one.
    factor = 1.0 if rate is None else rate / config.learning_rate
    own_factors = {}
    for name in trained[LATENT_POLICY]:
        own_factors[name] = factor * multipliers.get(name, 1.0)
    factors: dict[str, Any] = dict.fromkeys(trained, 1.0)
    factors[LATENT_POLICY] = own_factors
    return scale_rates(optimizer, factors)


# ---------------------------------------------------------------------------
# 3. The step: roll out, ask for rewards, improve
# ---------------------------------------------------------------------------


def make_rl_step(
    policy: Policy,
    objective: Objective,
    rl: RlConfig,
    optimizer: optax.GradientTransformation,
    trained: tuple[str, ...],
    layout: Layout,
    *,
    reward: RewardFn | None = None,
    host_reward: HostRewardFn | None = None,
    ref_params: Params | None = None,
    schedule: optax.Schedule | None = None,
    batch_at: Callable[[int, int], Any] | None = None,
) -> StepFn:
    """Make `(state, batch) -> (state, metrics)`.

    Args:
        optimizer, trained, layout, schedule: see `make_train_step`.
        reward: judges on the device, inside the program that rolls out.
        host_reward: judges on the host where there is no `reward`; each process asks for its own rows.
        ref_params: the parameters that the stage changes, as they were at its start, for objectives that ask for them.
            They are laid out as the state's, in buffers of their own, since a step gives away the state's. Adapters
            have none: the reasoner without them is the reference.
        batch_at: (step, number) -> a further batch of a step, for dynamic sampling.
    """
    options = (optimizer, trained, layout, RL, rl.micro_batches)

    # Log-probabilities of the policy that rolls out, or of the stage's start, are taken before the update.
    needs_log_probs = objective.needs_old_log_probs or objective.needs_ref_log_probs
    learns_once = objective.updates_per_step == 1 and not needs_log_probs

    # One program rolls out, judges and improves, where the device judges and each rollout is learned from once.
    if reward and not rl.dynamic_batches and learns_once:
        loss = make_rollout_and_loss(policy, objective, reward, rl.group, rl.unjudged)
        return make_train_step(loss, *options, schedule=schedule)

    # Else one program rolls out, and another one improves, several times if the objective says so.
    rollout_program = make_rollout(
        policy, objective, reward, rl.group, layout, RL, rl.micro_batches, rl.unjudged
    )
    update = make_train_step(
        make_rollout_loss(policy, objective),
        *options,
        updates=objective.updates_per_step,
        minibatches=objective.minibatches,
        schedule=schedule,
    )

    # The rewards come with the rollouts from the device, or after them from the host.
    verdicts = None
    if reward is None and host_reward is not None:
        verdicts = HostVerdicts(host_reward, layout.mesh, rl.unjudged)

    # Completions are gathered from the trajectories by an index. Jitted, since the loop lets a step move no constants
    # to the devices.
    row_sharding = NamedSharding(layout.mesh, ROWS)
    take_completions = jax.jit(
        lambda trajectories: trajectories.completions, out_shardings=row_sharding
    )

    def roll_out_and_judge(state: TrainState, batch):
        batch, trajectories, rewards_BG = rollout_program(
            state, batch, ref_params or {}
        )
        if verdicts:
            completions = take_completions(trajectories)
            # `ask` also adds to the step's account, which `with_metrics` reads.
            rewards_BG = verdicts.ask(completions, batch.draw_ids, trajectories.lengths)
        # With its batch, since dynamic sampling takes groups from several.
        return batch, trajectories, rewards_BG

    def step(state: TrainState, batch):
        return update(state, roll_out_and_judge(state, batch))

    # Dynamic sampling (DAPO) rolls out further batches until enough groups have rewards that differ.
    if rl.dynamic_batches:
        assert batch_at is not None, "dynamic sampling needs further batches"
        step = make_filtered_step(
            roll_out_and_judge, update, rl.dynamic_batches, batch_at, policy, layout
        )
    return verdicts.with_metrics(step) if verdicts else step


# ---------------------------------------------------------------------------
# 4. The loop
# ---------------------------------------------------------------------------


def train(plan: Plan) -> None:
    """Train one objective from its start, with the same batches and random keys as the others."""
    stage = plan.stage
    experiment = stage.experiment
    rl: RlConfig = stage.settings
    objective = plan.objective

    # A run that was killed between merging its adapters and saying so has nothing left to train.
    step_of_merged = find_merged_step(stage)
    if step_of_merged is not None:
        note_finished(stage, step_of_merged)
        return

    # Parameters, the optimizer's state, and for a penalty on the distance a copy of where the stage starts. A run that
    # goes on needs that copy too, and the run's manifest has made sure that its start is the same.
    params = read_stage_params(stage.start)
    params = params | init_adapters(experiment, params)
    trained = list_trained_parts(experiment, params)
    trained_params = {part: params[part] for part in trained}
    optimizer = make_objective_optimizer(
        plan.optimizer_config, plan.policy, objective, trained_params
    )
    ref_params = None
    if objective.needs_ref_log_probs:
        # Adapters have no reference of their own: it is the reasoner without them.
        ref_parts = {part: params[part] for part in trained if part != ADAPTER}
        ref_params = copy_params(ref_parts, experiment.layout)
        del ref_parts
    state = init_state(params, trained, optimizer, experiment.key, experiment.layout)
    # The state has copies of its own, so the memory of these is free for the steps.
    del params, trained_params

    # The device judges where it can. The host is asked where it can't (`on_device` is None), and for the text of a
    # completion without its end, which only the host can judge.
    judges_truncated = rl.truncated == "judged"
    batch_at = make_batch_reader(stage, objective.needs_answers)
    step_fn = make_rl_step(
        plan.policy,
        objective,
        rl,
        optimizer,
        trained,
        experiment.layout,
        reward=None if judges_truncated else experiment.reward.on_device,
        host_reward=make_host_reward(experiment, judges_truncated),
        ref_params=ref_params,
        schedule=make_schedule(plan.optimizer_config),
        batch_at=batch_at,
    )

    def measure_accuracy(params: Params) -> float:
        return evaluate_reasoner(experiment, merge_adapter(experiment, params))

    # The same command goes on from the newest checkpoint, and computes the same to the bit.
    loop, state, saved = open_stage(stage, state, rl.steps)
    with loop:
        validation = Validation(stage, loop, saved, measure_accuracy)
        step = int(state.step)
        batch = batch_at(step)
        while True:
            # First, so that a validation which a kill has cut short is made up for.
            if validation.is_due(step):
                validation.run(state)
            if step >= rl.steps:
                break

            # Everything that a step reads is on the devices already.
            with jax.transfer_guard("disallow"):
                state, metrics = step_fn(state, batch)
            step += 1

            # While the devices compute, the host makes the next batch, which is None after the last step. `log` queues
            # these metrics and reads those of the step before. It writes a batch down if steps stop being finite.
            last_batch = batch
            batch = batch_at(step)
            loop.log(step, metrics, last_batch)
            if loop.should_save(step):
                loop.save(state, validation.facts)

        # What others find is the best validation's parameters, or the last step's if there were none, with adapters
        # merged.
        state = validation.choose_best(state)
        close_stage(stage, loop, state, validation.facts, save_merged)

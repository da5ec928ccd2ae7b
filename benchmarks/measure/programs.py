"""Every program of a config: jitted, with the shapes of its largest arguments, for devices that need not be there."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.measure.compiled import (
    abstract_batch,
    abstract_rollouts,
    abstract_state,
)
from slpo_jax.config.config import rl_of
from slpo_jax.models.parts import ADAPTER
from slpo_jax.policy.policy import Prompts, Stopping
from slpo_jax.run.imitation_plan import choose_problems, plan_phases
from slpo_jax.run.rl_adapters import init_adapters, list_trained_parts
from slpo_jax.run.setup import Setup
from slpo_jax.run.train_rl import (
    make_objective_optimizer,
    make_optimizer_config,
    make_training_policy,
)
from slpo_jax.run.train_stage import host_batches
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS
from slpo_jax.stages import COLD_START, EVALUATE, IMITATE, RL
from slpo_jax.training import gate_training, rl_loss
from slpo_jax.training.optimizer import make_optimizer, make_schedule
from slpo_jax.training.rl_step import make_rollout
from slpo_jax.training.state import make_train_step

REFERENCE = 16  # bytes of an encoded reference answer
STAGES = (IMITATE, COLD_START, RL, EVALUATE)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that a stage runs.

    Attributes:
        name: what it does, of several in a stage; "" of a single one.
        function: jitted.
        arguments: shapes, types and places.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]


def programs(setup: Setup, stage: str) -> list[Program]:
    """The stage's programs in their order: of each objective of the stage rl, and of the last phase of imitation.

    Args:
        setup: assembled on the devices, and inside `xla_cpu.made_for` their platform.
        stage: one of `STAGES`.
    """
    made = {
        IMITATE: imitation,
        COLD_START: cold_starts,
        RL: objectives,
        EVALUATE: _evaluate,
    }
    return made[stage](setup)  # type: ignore[operator]


def imitation(setup: Setup, number: int = -1) -> list[Program]:
    """A phase's step; the others of its recipe by their number."""
    config = setup.config.imitate
    recipe, plan, optimizers = plan_phases(setup)
    phase = plan[number]
    optimizer = make_optimizer(optimizers[number])
    params = setup.abstract_params()
    policy = setup.policy.with_config(
        max_latents=phase.latent_slots, dropout_rate=config.dropout
    )
    trained = () if recipe.trains_only_these else setup.trained_by(IMITATE, params)
    if recipe.init:
        own = jax.eval_shape(
            lambda params: recipe.init(jax.random.key(0), policy, params), params
        )
        params = params | place(setup, own, EVERYWHERE)
        trained = (*trained, *own)
    trained = phase.trains or trained
    problems = choose_problems(setup, recipe, plan)
    slots = recipe.slots(problems, phase, config.suffix_slots)
    batch = recipe.batch(
        problems, phase, 0, 0, config.batch_size, (max(setup.prompt_slots),), slots
    )
    how = (optimizer, trained, setup.layout, IMITATE, config.micro_batches)
    step = make_train_step(
        recipe.loss_of(policy), *how, schedule=make_schedule(optimizers[number])
    )
    state = abstract_state(params, trained, optimizer, setup.layout)
    return [Program(phase.name, step, (state, place(setup, batch, ROWS)))]


def cold_starts(setup: Setup, own: bool = False) -> list[Program]:
    """The gate's step; `own` is as of `objectives`."""
    config = setup.config.cold_start
    params = setup.abstract_params()
    settings = dataclasses.replace(
        config,
        min_latents=setup.config.min_latents,
        gate_dropout=setup.config.gate.dropout,
    )
    loss = gate_training.make_loss(setup.policy, setup.reward.on_device, settings)
    trained = setup.trained_by(COLD_START, params)
    rates = setup.optimizer_config(COLD_START, config.steps)
    optimizer = make_optimizer(rates)
    schedule = make_schedule(rates)
    step = make_train_step(
        loss,
        optimizer,
        trained,
        setup.layout,
        COLD_START,
        config.micro_batches,
        schedule=schedule,
    )
    batch = abstract_batch(
        setup.mesh, config.batch_size, max(setup.prompt_slots), REFERENCE
    )
    if own:
        batch = place(setup, host_batches(setup, config, config.steps)(0), ROWS)
    return [
        Program(
            "", step, (abstract_state(params, trained, optimizer, setup.layout), batch)
        )
    ]


def objectives(setup: Setup, own: bool = False) -> list[Program]:
    """The programs of each objective.

    Args:
        own: with the shapes of the run's own batches, whose prompts lie end to end, instead of the largest ones.
    """
    names = setup.config.rl.objectives
    found = []
    for name in names:
        for program in _objective(setup, name, own):
            found.append((name, program))
    if len(names) == 1:
        return [program for _, program in found]
    return [
        dataclasses.replace(each, name=f"{name} {each.name}".strip())
        for name, each in found
    ]


def _objective(setup: Setup, name: str, own: bool) -> list[Program]:
    """One step, or where answers are read on the host, or used again, its two halves."""
    reward = setup.reward.on_device
    objective = setup.config.objective[name]
    config = rl_of(setup.config.rl, objective)
    policy = make_training_policy(setup, config)
    params = setup.abstract_params()
    params |= place(
        setup,
        jax.eval_shape(functools.partial(init_adapters, setup), params),
        EVERYWHERE,
    )
    trained = list_trained_parts(setup, params)
    trained_params = {part: params[part] for part in trained}
    rates = make_optimizer_config(config, objective)
    optimizer = make_objective_optimizer(rates, policy, objective, trained_params)
    how = (optimizer, trained, setup.layout, RL, config.micro_batches)
    schedule = make_schedule(rates)
    state = abstract_state(params, trained, optimizer, setup.layout)
    batch = abstract_batch(
        setup.mesh,
        config.batch_size,
        max(setup.prompt_slots),
        REFERENCE if reward else 0,
    )
    if own:
        made = host_batches(setup, config, config.steps, objective.needs_answers)(0)
        batch = place(setup, made, ROWS)
    elif objective.needs_answers:
        rows = place(
            setup,
            jax.ShapeDtypeStruct(
                (config.batch_size, policy.config.answer_slots), jnp.int32
            ),
            ROWS,
        )
        batch = dataclasses.replace(batch, answers=rows)
    if (
        reward
        and not objective.needs_ref_log_probs
        and not objective.needs_old_log_probs
    ):
        step = make_train_step(
            rl_loss.make_rollout_and_loss(policy, objective, reward, config.group),
            *how,
            schedule=schedule,
        )
        return [Program("", step, (state, batch))]
    rollout = make_rollout(
        policy, objective, reward, config.group, setup.layout, RL, config.micro_batches
    )
    updates = objective.updates_per_step
    minibatches = objective.minibatches
    rollout_loss = rl_loss.make_rollout_loss(policy, objective)
    improvement = make_train_step(
        rollout_loss, *how, updates=updates, minibatches=minibatches, schedule=schedule
    )
    changed = {part: state.params[part] for part in trained if part != ADAPTER}
    ref_params = changed if objective.needs_ref_log_probs else {}
    rolled = abstract_rollouts(
        rollout, state, batch, ref_params, setup.layout, config.group
    )
    return [
        Program("rollout", rollout, (state, batch, ref_params)),
        Program("policy update", improvement, (state, rolled)),
    ]


def _evaluate(setup: Setup) -> list[Program]:
    """The deterministic pass and the samples, of a full batch, which end as the config's thoughts do."""
    rows = setup.evaluator.batch_size
    slots = max(setup.evaluator.prompt_slots)
    stopping: Stopping = "threshold" if setup.config.gate.enabled else "length"
    prompts = Prompts(
        jax.ShapeDtypeStruct((rows, slots), jnp.int32),
        jax.ShapeDtypeStruct((rows, slots), jnp.bool_),
    )
    return [
        Program(name, *rollouts(setup, prompts, rows, noisy, stopping))
        for name, noisy in (("greedy", False), ("samples", True))
    ]


def rollouts(
    setup: Setup, prompts: Prompts, rows: int, noisy: bool, stopping: Stopping
) -> tuple[Any, tuple]:
    """A program of the evaluator, and its arguments.

    Args:
        prompts: shapes and types.
        rows: rollouts at a time.
    """
    ruled = jnp.float32 if stopping == "threshold" else jnp.int32

    def of_rows(dtype):
        return jax.ShapeDtypeStruct((rows,), dtype)

    of = place(setup, (prompts, *map(of_rows, (jnp.int32, jnp.int32, jnp.bool_))), ROWS)
    key = jax.eval_shape(
        lambda: jax.random.key(0)
    )  # which a run leaves where jax puts it
    rule = place(setup, of_rows(ruled), ROWS)
    return setup.evaluator.program(noisy, stopping, False), (
        setup.abstract_params(),
        *of,
        key,
        rule,
    )


def place(setup: Setup, tree: Any, spec: PartitionSpec) -> Any:
    """Shapes and types of arrays, laid out so on the mesh."""
    where = NamedSharding(setup.mesh, spec)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
    )


def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of this shape, type and place: a key, True, or 0."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.device_put(jnp.broadcast_to(jax.random.key(0), x.shape), x.sharding)
    return jax.device_put(jnp.full(x.shape, x.dtype == jnp.bool_, x.dtype), x.sharding)

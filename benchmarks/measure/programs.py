"""Every program of a config: jitted, with the shapes of its largest arguments, for devices that need not be there."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.measure.compiled import abstract_batch, abstract_rollouts, abstract_state
from slpo_jax.io.mesh import EVERYWHERE, ROWS
from slpo_jax.models.parts import ADAPTER
from slpo_jax.policy.policy import Stopping
from slpo_jax.policy.prompted import Prompts
from slpo_jax.run import adapters, imitate
from slpo_jax.run.experiment import Setup
from slpo_jax.run.rl import make_objective, optimizer_of, training_policy
from slpo_jax.stages import COLD_START, EVALUATE, IMITATE, RL
from slpo_jax.training import cold_start, rl
from slpo_jax.training.halves import make_rollout
from slpo_jax.training.optimizer import make_optimizer
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
    return {IMITATE: _imitate, COLD_START: _cold_start, RL: _rl, EVALUATE: _evaluate}[stage](setup)


def _imitate(setup: Setup) -> list[Program]:
    config = setup.config.imitate
    recipe, plan, optimizers = imitate.planned(setup)
    phase, optimizer, params = plan[-1], make_optimizer(optimizers[-1]), setup.abstract_params()
    policy = setup.policy.having(max_latents=phase.latent_slots, dropout_rate=config.dropout)
    trained = () if recipe.alone else setup.trained_by(IMITATE, params)
    if recipe.init:
        own = jax.eval_shape(lambda params: recipe.init(jax.random.key(0), policy, params), params)
        params, trained = params | _placed(setup, own, EVERYWHERE), (*trained, *own)
    trained = phase.trains or trained
    problems = imitate.imitated(setup, recipe, plan)
    slots = recipe.slots(problems, phase, config.suffix_slots)
    batch = recipe.batch(problems, phase, 0, 0, config.batch_size, (max(setup.prompt_slots),), slots)
    step = make_train_step(recipe.loss_of(policy), optimizer, trained, setup.layout, IMITATE, config.micro_batches)
    state = abstract_state(params, trained, optimizer, setup.layout)
    return [Program(phase.name, step, (state, _placed(setup, batch, ROWS)))]


def _cold_start(setup: Setup) -> list[Program]:
    config, params = setup.config.cold_start, setup.abstract_params()
    settings = dataclasses.replace(config, min_latents=setup.config.min_latents, gate_dropout=setup.config.gate.dropout)
    loss = cold_start.make_loss(setup.policy, setup.reward.on_device, settings)
    trained = setup.trained_by(COLD_START, params)
    optimizer = make_optimizer(setup.optimizer_config(COLD_START, config.steps))
    step = make_train_step(loss, optimizer, trained, setup.layout, COLD_START, config.micro_batches)
    batch = abstract_batch(setup.mesh, config.batch_size, max(setup.prompt_slots), REFERENCE)
    return [Program("", step, (abstract_state(params, trained, optimizer, setup.layout), batch))]


def _rl(setup: Setup) -> list[Program]:
    names = setup.config.rl.objectives
    found = [(name, program) for name in names for program in _objective(setup, name)]
    if len(names) == 1:
        return [program for _, program in found]
    return [dataclasses.replace(each, name=f"{name} {each.name}".strip()) for name, each in found]


def _objective(setup: Setup, name: str) -> list[Program]:
    """One step, or where answers are read on the host, or used again, its two halves."""
    config, reward = setup.config.rl, setup.reward.on_device
    objective = make_objective(setup, name)
    policy, params = training_policy(setup, objective), setup.abstract_params()
    params |= _placed(setup, jax.eval_shape(functools.partial(adapters.fresh, setup), params), EVERYWHERE)
    trained = adapters.trained(setup, params)
    optimizer = optimizer_of(setup, objective, {part: params[part] for part in trained})
    how = (optimizer, trained, setup.layout, RL, config.micro_batches)
    state = abstract_state(params, trained, optimizer, setup.layout)
    batch = abstract_batch(setup.mesh, config.batch_size, max(setup.prompt_slots), REFERENCE if reward else 0)
    if objective.needs_answers:
        rows = _placed(setup, jax.ShapeDtypeStruct((config.batch_size, policy.config.answer_slots), jnp.int32), ROWS)
        batch = dataclasses.replace(batch, answers=rows)
    if reward and not objective.needs_reference and not objective.needs_behaviour:
        step = make_train_step(rl.make_loss(policy, objective, reward, config.group), *how)
        return [Program("", step, (state, batch))]
    rollout = make_rollout(policy, objective, reward, config.group, setup.layout, RL, config.micro_batches)
    updates, parts = objective.updates_per_step, objective.rollout_parts
    improvement = make_train_step(rl.make_improvement(policy, objective), *how, updates=updates, parts=parts)
    changed = {part: state.params[part] for part in trained if part != ADAPTER}
    reference = changed if objective.needs_reference else {}
    rolled = abstract_rollouts(rollout, state, batch, reference, setup.layout, config.group)
    return [
        Program("rollout", rollout, (state, batch, reference)),
        Program("improvement", improvement, (state, rolled)),
    ]


def _evaluate(setup: Setup) -> list[Program]:
    """The deterministic pass and the samples, of a full batch, which end as the config's thoughts do."""
    evaluator, by_gate = setup.evaluator, setup.config.gate.enabled
    rows, slots = evaluator.batch_size, max(evaluator.prompt_slots)
    stopping: Stopping = "threshold" if by_gate else "length"

    def of_rows(dtype, *shape):
        return _placed(setup, jax.ShapeDtypeStruct((rows, *shape), dtype), ROWS)

    prompts = Prompts(of_rows(jnp.int32, slots), of_rows(jnp.bool_, slots))
    index, number, real, rule = map(of_rows, (jnp.int32, jnp.int32, jnp.bool_, jnp.float32 if by_gate else jnp.int32))
    key = _placed(setup, jax.eval_shape(lambda: jax.random.key(0)), EVERYWHERE)
    arguments = (setup.abstract_params(), prompts, index, number, real, key, rule)
    return [
        Program(name, evaluator.program(noisy, stopping, False), arguments)
        for name, noisy in (("greedy", False), ("samples", True))
    ]


def _placed(setup: Setup, tree: Any, spec: PartitionSpec) -> Any:
    """Shapes and types of arrays, laid out so on the mesh."""
    where = NamedSharding(setup.mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)

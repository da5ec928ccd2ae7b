"""A step of the stage `rl` in two halves: roll out; then improve, several times where the objective can.

What stands between them is made once, whatever many updates follow: rewards, and what the objective has to know of the
policy that rolled out. Both halves draw as the one step of `rl.make_loss` does.
"""

import dataclasses

import jax
import optax

from slpo_jax.io.mesh import EVERYWHERE, ROWS
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import RewardFn
from slpo_jax.training.objectives import Objective
from slpo_jax.training.rl import make_improvement, make_loss, roll_out
from slpo_jax.training.sharding import Layout, gathered
from slpo_jax.training.state import TrainState, make_train_step


def make_rl_step(
    policy: Policy,
    objective: Objective,
    reward: RewardFn,
    group: int,
    optimizer: optax.GradientTransformation,
    trained: tuple[str, ...],
    layout: Layout,
    stream: str,
    micro_batches: int = 1,
):
    """`(state, batch) -> (state, metrics)`: one program where it can be one.

    Args:
        group: G.
        optimizer, trained, layout, stream, micro_batches: see `make_train_step`.
    """
    how = (optimizer, trained, layout, stream, micro_batches)
    if objective.updates_per_step == 1:
        return make_train_step(make_loss(policy, objective, reward, group), *how)
    roll = make_rollout(policy, objective, reward, group, layout, stream, micro_batches)
    improve = make_train_step(make_improvement(policy, objective), *how, updates=objective.updates_per_step)

    def step(state: TrainState, batch):
        return improve(state, roll(state, batch))

    return step


def make_rollout(
    policy: Policy, objective: Objective, reward: RewardFn, group: int, layout: Layout, stream: str, micro_batches: int
):
    """The first half, jitted: (state, batch) -> (batch, trajectories, rewards [B, G]), of B*G rows.

    Args:
        group: G.
        layout, stream, micro_batches: see `make_train_step`.
    """

    def one(params, batch, key):
        trajectories, rewards_BG = roll_out(policy, params, batch, reward, group, key)
        kept = objective.behaviour(policy, params, batch, trajectories) if objective.updates_per_step > 1 else None
        return dataclasses.replace(trajectories, behaviour=kept), rewards_BG

    def rolled(state: TrainState, batch):
        specs = layout.specs(state.params)

        def local(params, batch, key):
            params = gathered(params, specs)
            if micro_batches == 1:
                return one(params, batch, key)
            parts = jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), batch)
            done = jax.lax.map(lambda part: one(params, part, key), parts)
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), done)

        key = noise.stream_key(state.key, stream, state.step)
        everywhere = jax.shard_map(
            local, mesh=layout.mesh, in_specs=(specs, ROWS, EVERYWHERE), out_specs=ROWS, check_vma=False
        )
        return batch, *everywhere(state.params, batch, key)

    return jax.jit(rolled)

"""A step of the stage `rl` in two halves: roll out; then improve, several times where the objective can.

What stands between them is made once, whatever many updates follow: what the objective has to know of the policy that
rolled out, and rewards, which may come from the host. Both halves draw as the one step of `rl.make_loss` does.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from slpo_jax.io.mesh import EVERYWHERE, ROWS
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.rewards.reward import RewardFn
from slpo_jax.training.dynamic import Drawing, make_filtered_step
from slpo_jax.training.objectives import Objective
from slpo_jax.training.rl import make_improvement, make_loss, roll_out
from slpo_jax.training.sharding import Layout, gathered
from slpo_jax.training.state import Params, TrainState, in_parts, make_train_step

HostRewardFn = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(`Trajectories.completions` int [N, A], `PromptedBatch.index` of their prompts [N]) -> float32 [N], in numpy."""


def make_rl_step(
    policy: Policy,
    objective: Objective,
    reward: RewardFn | None,
    group: int,
    optimizer: optax.GradientTransformation,
    trained: tuple[str, ...],
    layout: Layout,
    stream: str,
    micro_batches: int = 1,
    host_reward: HostRewardFn | None = None,
    reference: Params | None = None,
    schedule: optax.Schedule | None = None,
    drawing: Drawing | None = None,
):
    """`(state, batch) -> (state, metrics)`: one program where it can be one.

    Args:
        reward: None where only `host_reward` can say.
        group: G.
        optimizer, trained, layout, stream, micro_batches, schedule: see `make_train_step`.
        host_reward: asked without `reward`; each process asks for its own rows.
        reference: of the parameters that the stage started from those that it changes, laid out as the state's, for
            objectives that ask for them; they have buffers of their own, as a step gives away the state's. Adapters
            are none of them: the reasoner without them is what it started from.
        drawing: of groups whose rewards differ, `batch` being the first that is rolled out; None: every group it is.
    """
    how = (optimizer, trained, layout, stream, micro_batches)
    asks = objective.needs_behaviour or objective.needs_reference
    if reward is not None and drawing is None and not asks:
        return make_train_step(make_loss(policy, objective, reward, group), *how, schedule=schedule)
    roll = make_rollout(policy, objective, reward, group, layout, stream, micro_batches)
    updates, parts = objective.updates_per_step, objective.rollout_parts
    loss = make_improvement(policy, objective)
    improve = make_train_step(loss, *how, updates=updates, parts=parts, schedule=schedule)
    written = jax.jit(lambda trajectories: trajectories.completions, out_shardings=NamedSharding(layout.mesh, ROWS))

    def rolled(state: TrainState, batch):
        batch, trajectories, rewards_BG = roll(state, batch, reference if objective.needs_reference else {})
        if reward is None:
            assert host_reward is not None
            rewards_BG = rewards_from_host(host_reward, written(trajectories), batch.index, layout)
        return batch, trajectories, rewards_BG

    if drawing is not None:
        return make_filtered_step(rolled, improve, drawing, policy, layout)
    return lambda state, batch: improve(state, rolled(state, batch))


def make_rollout(
    policy: Policy,
    objective: Objective,
    reward: RewardFn | None,
    group: int,
    layout: Layout,
    stream: str,
    micro_batches: int,
):
    """The first half, jitted: (state, batch, reference) -> (batch, trajectories, rewards [B, G] or None) of B*G rows.

    `reference` is {} for an objective that doesn't ask for it.

    Args:
        reward: None leaves them to the host.
        group: G.
        layout, stream, micro_batches: see `make_train_step`.
    """

    def one(params, reference, batch, key):
        before = {**params, **reference}
        params = policy.reasoner.stacked(params)
        trajectories, rewards_BG = roll_out(policy, params, batch, reward, group, key)
        kept = objective.behaviour(policy, params, batch, trajectories) if objective.needs_behaviour else None
        start = objective.reference(policy, before, batch, trajectories) if objective.needs_reference else None
        return dataclasses.replace(trajectories, behaviour=kept, reference=start), rewards_BG

    def rolled(state: TrainState, batch, reference):
        specs = layout.specs(state.params), layout.specs(reference)

        def local(params, reference, batch, key):
            params, reference = gathered((params, reference), specs)
            if micro_batches == 1:
                return one(params, reference, batch, key)
            parts = in_parts(batch, micro_batches)
            done = jax.lax.map(lambda part: one(params, reference, part, key), parts)
            return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), done)

        key = noise.stream_key(state.key, stream, state.step)
        everywhere = jax.shard_map(
            local, mesh=layout.mesh, in_specs=(*specs, ROWS, EVERYWHERE), out_specs=ROWS, check_vma=False
        )
        return batch, *everywhere(state.params, reference, batch, key)

    return jax.jit(rolled)


def rewards_from_host(host_reward: HostRewardFn, tokens_NA: jax.Array, index_B: jax.Array, layout: Layout) -> jax.Array:
    """float32 [B, G] where the rows are: each process verifies what its own devices have rolled out."""
    own = {shard.device: jax.device_get(shard.data) for shard in index_B.addressable_shards}
    parts = []
    for shard in tokens_NA.addressable_shards:
        index, tokens = own[shard.device], jax.device_get(shard.data)
        rewards = host_reward(tokens, np.repeat(index, len(tokens) // len(index)))
        parts.append(jax.device_put(rewards.reshape(len(index), -1).astype(np.float32), shard.device))
    shape = (len(index_B), len(tokens_NA) // len(index_B))
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(layout.mesh, ROWS), parts)

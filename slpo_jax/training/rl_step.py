"""A step of the stage `rl` in two halves: roll out; then improve, several times where the objective can.

What stands between them is made once, whatever many updates follow: what the objective has to know of the policy that
rolled out, and rewards, which may come from the host. Both halves draw as the one step of `rl_loss.make_loss` does.

Dynamic sampling (DAPO, Yu et al., 2025) improves on groups whose rewards differ, out of as many batches as these take:
one of equal rewards says nothing about which of its rollouts is better. Which batches a step draws is a function of its
number and of the policy, so that a run that goes on draws the same.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from slpo_jax.policy.policy import Policy, PromptedBatch
from slpo_jax.policy.rollout import Trajectories
from slpo_jax.rewards.reward import RewardFn
from slpo_jax.rewards.unjudged import Unjudged
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, Layout
from slpo_jax.training.host_rewards import LOWEST, HostRewardFn, HostVerdicts, make_sampling
from slpo_jax.training.objectives import Objective
from slpo_jax.training.rl_loss import extremes, make_improvement, make_loss, roll_out, rollout_sums
from slpo_jax.training.state import Params, TrainState, make_train_step

Rolled = tuple[PromptedBatch, Trajectories, jax.Array]
"""Prompts [B], rollouts [B*G], a prompt's in a row, and rewards [B, G]."""


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The source of a step's batches.

    Attributes:
        most: batches of it.
        batch: (step, number) -> the batch, of the second and later numbers (1, 2, ..), on the devices.
    """

    most: int
    batch: Callable[[int, int], Any]


def make_rl_step(
    policy: Policy,
    objective: Objective,
    reward: RewardFn | None,
    group: int,
    optimizer: optax.GradientTransformation,
    trained: tuple[str, ...],
    layout: Layout,
    stream: str,
    *,
    micro_batches: int = 1,
    host_reward: HostRewardFn | None = None,
    reference: Params | None = None,
    schedule: optax.Schedule | None = None,
    drawing: Drawing | None = None,
    unjudged: Unjudged = LOWEST,
):
    """Make `(state, batch) -> (state, metrics)`: one program where it can be one.

    Args:
        reward: None where only `host_reward` can say.
        group: G.
        optimizer, trained, layout, stream, micro_batches, schedule: see `make_train_step`.
        host_reward: asked without `reward`; each process asks for its own rows.
        reference: the parameters that the stage changes, as they were at its start, for objectives that ask for them.
            They are laid out as the state's, in buffers of their own, since a step gives away the state's. Adapters
            have none: the reasoner without them is the start.
        drawing: how groups whose rewards differ are drawn; None learns from every group.
        unjudged: what truncated and other unjudged completions earn.
    """
    options = (optimizer, trained, layout, stream, micro_batches)
    asks = objective.needs_behaviour or objective.needs_reference
    if reward is not None and drawing is None and not asks:
        return make_train_step(make_loss(policy, objective, reward, group, unjudged), *options, schedule=schedule)
    on_device = make_rollout(policy, objective, reward, group, layout, stream, micro_batches, unjudged)
    updates, slices = objective.updates_per_step, objective.rollout_parts
    loss = make_improvement(policy, objective)
    improve = make_train_step(loss, *options, updates=updates, slices=slices, schedule=schedule)
    written = jax.jit(lambda trajectories: trajectories.completions, out_shardings=NamedSharding(layout.mesh, ROWS))
    verdicts = None if host_reward is None else HostVerdicts(host_reward, layout.mesh, unjudged)

    def roll_out(state: TrainState, batch):
        batch, trajectories, rewards_BG = on_device(state, batch, reference if objective.needs_reference else {})
        if reward is None:
            assert verdicts is not None
            rewards_BG = verdicts.rewards(written(trajectories), batch.draws, trajectories.lengths)
        return batch, trajectories, rewards_BG

    def step(state: TrainState, batch):
        return improve(state, roll_out(state, batch))

    if drawing is not None:
        step = make_filtered_step(roll_out, improve, drawing, policy, layout)
    return step if reward is not None or verdicts is None else verdicts.with_metrics(step)


def make_rollout(
    policy: Policy,
    objective: Objective,
    reward: RewardFn | None,
    group: int,
    layout: Layout,
    stream: str,
    micro_batches: int,
    unjudged: Unjudged = LOWEST,
):
    """Make the first half, jitted: (state, batch, reference) -> (batch, trajectories, rewards [B, G] or None).

    `reference` is {} for an objective that doesn't ask for it.

    Args:
        reward: None leaves them to the host.
        group: G.
        layout, stream, micro_batches: see `make_train_step`.
        unjudged: what a truncated completion earns, by a reward on the device.
    """

    def one(params, reference, batch, key):
        before = {**params, **reference}
        params = policy.reasoner.stacked(params)
        trajectories, rewards_BG = roll_out(policy, params, batch, reward, group, key, unjudged)
        behaviour = objective.behaviour(policy, params, batch, trajectories) if objective.needs_behaviour else None
        start = objective.reference(policy, before, batch, trajectories) if objective.needs_reference else None
        return dataclasses.replace(trajectories, behaviour=behaviour, reference=start), rewards_BG

    return make_sampling(one, layout, stream, micro_batches)


def are_mixed(rewards_BG: jax.Array) -> jax.Array:
    """Tell, bool [B], groups whose rewards differ."""
    low_B, high_B = extremes(rewards_BG)
    return high_B > low_B


def first_mixed(*rolled: Rolled) -> Rolled:
    """Return the first B groups of rollouts of B prompts each, mixed ones before the others, each kind in order."""
    slots = max(batch.prompts.tokens.shape[1] for batch, *_ in rolled)
    padded = [_padded(rollout, slots) for rollout in rolled]
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *padded)
    return _groups(whole, jnp.argsort(~are_mixed(whole[2]), stable=True)[: len(rolled[0][2])])


def in_turn(rolled: Rolled) -> Rolled:
    """Fill B groups with those that are mixed, of which there is one at least, over and over."""
    mixed_B = are_mixed(rolled[2])
    return _groups(rolled, jnp.argsort(~mixed_B, stable=True)[jnp.arange(mixed_B.size) % mixed_B.sum()])


def _groups(rolled: Rolled, places: jax.Array) -> Rolled:
    rows = rolled[2].shape[0]

    def taken(x):
        copies = x.shape[0] // rows
        return x.reshape(rows, copies, *x.shape[1:])[places].reshape(len(places) * copies, *x.shape[1:])

    return jax.tree.map(taken, _padded(rolled, 0))


def _padded(rolled: Rolled, slots: int) -> Rolled:
    """Pad prompts to so many slots at least, not end to end: others would not fit their place."""
    batch, trajectories, rewards_BG = rolled
    more = max(slots - batch.prompts.tokens.shape[1], 0)
    wide = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (more, 0))), dataclasses.replace(batch.prompts, packed_slots=0))
    return dataclasses.replace(batch, prompts=wide), trajectories, rewards_BG


def make_filtered_step(
    roll_out: Callable[..., Rolled], improve: Callable, drawing: Drawing, policy: Policy, layout: Layout
):
    """Make `(state, batch) -> (state, metrics)` that improves on B groups whose rewards differ.

    Batches are rolled out until there are so many, `drawing.most` at most; where these have fewer, those that there are
    fill the step's batch in turn, and where they have none, the step changes nothing. Metrics of rollouts are of all
    that were drawn; `groups_drawn` and `groups_kept` are a step's.

    Args:
        roll_out: (state, batch) -> `Rolled`.
        improve: (state, `Rolled`) -> (state, metrics).
    """
    rows, everywhere = NamedSharding(layout.mesh, ROWS), NamedSharding(layout.mesh, EVERYWHERE)
    sums_of = jax.jit(lambda rolled: rollout_sums(policy, *rolled[1:]), out_shardings=everywhere)
    gather, fill_up = (jax.jit(function, out_shardings=rows) for function in (first_mixed, in_turn))
    skip = jax.jit(lambda state: dataclasses.replace(state, step=state.step + 1), donate_argnums=0)

    def step(state: TrainState, batch):
        number, size = int(jax.device_get(state.step)), len(batch.draws)
        rolled = roll_out(state, batch)
        totals, batches = jax.device_get(sums_of(rolled)), 1
        while totals["mixed"][0] < size and batches < drawing.most:
            with jax.transfer_guard("allow"):  # a batch is made on the host, which steps are otherwise not to wait for
                batch = drawing.batch(number, batches)
            further = roll_out(state, batch)
            totals = jax.tree.map(lambda a, b: a + b, totals, jax.device_get(sums_of(further)))
            rolled, batches = gather(rolled, further), batches + 1
        mixed = min(int(totals["mixed"][0]), size)
        metrics: dict[str, Any] = {"counts": {}}
        if mixed:
            state, metrics = improve(state, rolled if mixed == size else fill_up(rolled))
        else:
            state = skip(state)
        means = {name: float(total / count) for name, (total, count) in totals.items()}
        counts = metrics["counts"] | {name: float(count) for name, (_, count) in totals.items()}
        groups = {"groups_drawn": float(batches * size), "groups_kept": float(mixed)}
        return state, metrics | means | groups | {"counts": counts}

    return step

"""Parts of a step of the stage `rl` that is more than one program, which `run/train_rl.py` puts together.

The first half rolls out, and finds out once what the objective has to know of the policy that rolled out, however many
updates follow. It draws as the one program of `rl_loss.make_rollout_and_loss` does.

Dynamic sampling (DAPO, Yu et al., 2025) improves on groups whose rewards differ, out of as many batches as these take:
one of equal rewards says nothing about which of its rollouts is better. Which batches a step draws is a function of its
number and of the policy, so that a run that goes on draws the same.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from slpo_jax.policy.policy import Policy
from slpo_jax.rewards.reward import RewardFn
from slpo_jax.rewards.unjudged import LOWEST, Unjudged
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, Layout
from slpo_jax.training.objectives import Objective
from slpo_jax.training.rollouts import (
    RolledBatch,
    extremes,
    make_draw_program,
    roll_out,
    rollout_sums,
)
from slpo_jax.training.state import TrainState


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
    """Make the first half, jitted: (state, batch, ref_params) -> (batch, trajectories, rewards [B, G] or None).

    `ref_params` is {} for an objective that doesn't ask for it.

    Args:
        reward: None leaves them to the host.
        group: G.
        layout, stream, micro_batches: see `make_train_step`.
        unjudged: what a truncated completion earns, by a reward on the device.
    """

    def draw_rows(params, ref_params, batch, key):
        # `stack` merges the adapters, if there are any, and scoring alone ignores them. So the reference, which is not
        # stacked, is the reasoner without them.
        initial_params = {**params, **ref_params}
        params = policy.reasoner.stack(params)
        trajectories, rewards_BG = roll_out(
            policy, params, batch, reward, group, key, unjudged
        )
        old_log_probs = None
        if objective.needs_old_log_probs:
            old_log_probs = objective.compute_old_log_probs(
                policy, params, batch, trajectories
            )
        ref_log_probs = None
        if objective.needs_ref_log_probs:
            ref_log_probs = objective.compute_ref_log_probs(
                policy, initial_params, batch, trajectories
            )
        trajectories = dataclasses.replace(
            trajectories, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs
        )
        return trajectories, rewards_BG

    return make_draw_program(draw_rows, layout, stream, micro_batches)


def are_mixed(rewards_BG: jax.Array) -> jax.Array:
    """Tell, bool [B], groups whose rewards differ."""
    low_B, high_B = extremes(rewards_BG)
    return high_B > low_B


def select_informative(*rolled: RolledBatch) -> RolledBatch:
    """Return the first B groups of rollouts of B prompts each, mixed ones before the others, each kind in order."""

    def join(*arrays):
        return jnp.concatenate(arrays)

    # Pad the prompts of all batches to the widest, and make one batch of them.
    widest = 0
    for batch, _, _ in rolled:
        _, slots = batch.prompts.tokens.shape
        widest = max(widest, slots)
    padded = [_pad_prompts(_unpack_prompts(rollout), widest) for rollout in rolled]
    whole = jax.tree.map(join, *padded)

    # As many groups as the first batch has.
    _, _, rewards_BG = whole
    mixed_B = are_mixed(rewards_BG)
    mixed_first = jnp.argsort(~mixed_B, stable=True)
    batch, _, _ = rolled[0]
    size = len(batch.draw_ids)
    return _take_groups(whole, mixed_first[:size])


def cycle_informative(rolled: RolledBatch) -> RolledBatch:
    """Fill B groups with those that are mixed, of which there is one at least, over and over."""
    _, _, rewards_BG = rolled
    mixed_B = are_mixed(rewards_BG)
    mixed_first = jnp.argsort(~mixed_B, stable=True)
    numbers = jnp.arange(mixed_B.size) % mixed_B.sum()
    return _take_groups(rolled, mixed_first[numbers])


def _take_groups(rolled: RolledBatch, places: jax.Array) -> RolledBatch:
    """Take the prompts at these places, each with all of its rollouts."""
    _, _, rewards_BG = rolled
    prompts = len(rewards_BG)

    def take(x):
        rows, *shape = x.shape
        copies = rows // prompts
        groups = x.reshape(prompts, copies, *shape)
        taken = groups[places]
        return taken.reshape(len(places) * copies, *shape)

    return jax.tree.map(take, _unpack_prompts(rolled))


def _unpack_prompts(rolled: RolledBatch) -> RolledBatch:
    """Mark prompts as not packed end to end: the room that was counted for them is not that of other prompts."""
    batch, trajectories, rewards_BG = rolled
    prompts = dataclasses.replace(batch.prompts, packed_slots=0)
    batch = dataclasses.replace(batch, prompts=prompts)
    return batch, trajectories, rewards_BG


def _pad_prompts(rolled: RolledBatch, slots: int) -> RolledBatch:
    """Pad prompts on the left, to at least this number of slots."""
    batch, trajectories, rewards_BG = rolled
    _, own_slots = batch.prompts.tokens.shape
    more = max(slots - own_slots, 0)

    def pad(x):
        return jnp.pad(x, ((0, 0), (more, 0)))

    prompts = jax.tree.map(pad, batch.prompts)
    batch = dataclasses.replace(batch, prompts=prompts)
    return batch, trajectories, rewards_BG


def make_filtered_step(
    roll_out_and_judge: Callable[..., RolledBatch],
    update: Callable,
    max_batches: int,
    batch_at: Callable[[int, int], Any],
    policy: Policy,
    layout: Layout,
):
    """Make `(state, batch) -> (state, metrics)` that improves on B groups whose rewards differ.

    Batches are rolled out until there are B such groups. If the last batch still leaves too few, those that there are
    fill the step's batch in turn; if it leaves none, the step changes nothing. Metrics of rollouts are of all that
    were drawn; `groups_drawn` and `groups_kept` are a step's.

    Args:
        roll_out_and_judge: (state, batch) -> `RolledBatch`.
        update: (state, `RolledBatch`) -> (state, metrics).
        max_batches: of a step.
        batch_at: (step, number of the batch) -> the step's second and later batches (1, 2, …), on the devices.
    """
    rows = NamedSharding(layout.mesh, ROWS)
    everywhere = NamedSharding(layout.mesh, EVERYWHERE)

    def sums_of(rolled: RolledBatch):
        _, trajectories, rewards_BG = rolled
        return rollout_sums(policy, trajectories, rewards_BG)

    def count_step(state: TrainState):
        return dataclasses.replace(state, step=state.step + 1)

    sum_metrics = jax.jit(sums_of, out_shardings=everywhere)
    select = jax.jit(select_informative, out_shardings=rows)
    cycle = jax.jit(cycle_informative, out_shardings=rows)
    skip_update = jax.jit(count_step, donate_argnums=0)

    def step(state: TrainState, batch):
        # Roll out until the step's batch is full of mixed groups, or no further batch may be drawn.
        step_number = int(jax.device_get(state.step))
        size = len(batch.draw_ids)
        rolled = roll_out_and_judge(state, batch)
        totals = jax.device_get(sum_metrics(rolled))
        batches = 1
        while totals["mixed"][0] < size and batches < max_batches:
            # A batch is made on the host, which steps are otherwise not to wait for.
            with jax.transfer_guard("allow"):
                batch = batch_at(step_number, batches)
            further = roll_out_and_judge(state, batch)
            sums = jax.device_get(sum_metrics(further))
            totals = jax.tree.map(lambda a, b: a + b, totals, sums)
            rolled = select(rolled, further)
            batches += 1

        # Improve on mixed groups alone.
        mixed_groups, _ = totals["mixed"]
        mixed = min(int(mixed_groups), size)
        metrics: dict[str, Any] = {"counts": {}}
        if mixed == size:
            state, metrics = update(state, rolled)
        elif mixed:
            cycled = cycle(rolled)
            state, metrics = update(state, cycled)
        else:
            state = skip_update(state)

        # Metrics of rollouts are over all of them, not over those that were kept.
        for name, (total, count) in totals.items():
            number = float(count)  # 0 where all rewards are masked
            metrics[name] = float(total) / max(number, 1.0)
            metrics["counts"][name] = number
        metrics["groups_drawn"] = float(batches * size)
        metrics["groups_kept"] = float(mixed)
        return state, metrics

    return step

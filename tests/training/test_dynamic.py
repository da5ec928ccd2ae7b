"""Dynamic sampling, of rollouts without a model: which groups reach an objective, and what is left of the others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from frozen import POLICY
from slpo_jax.policy.policy import PromptedBatch, Prompts
from slpo_jax.policy.rollout import Trajectories
from slpo_jax.run.train_rl import make_rl_step
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.training import rl_loss, rl_step
from slpo_jax.training.objectives import Objective
from slpo_jax.training.rl_config import RlConfig
from slpo_jax.training.state import init_state
from small_steps import layout_of
from tiny import verdicts

B = 4
G = 3


@dataclasses.dataclass(frozen=True)
class Reader(Objective):
    """Its gradient counts the prompts that it sees, by index; what it is given of a prompt has to belong together."""

    def __call__(self, policy, params, batch, trajectories, rewards_BG, key):
        seen_M = jax.nn.one_hot(batch.draw_ids, params["w"].size).sum(axis=0)
        uniform = jnp.sum(rewards_BG.max(axis=1) == rewards_BG.min(axis=1))
        # Prompts are their index over and over, left-padded, and rollouts their index and number.
        strange = jnp.sum(
            batch.prompts.valid & (batch.prompts.tokens != batch.draw_ids[:, None])
        )
        strange += jnp.sum(batch.prompts.lengths != 1 + batch.draw_ids % 3)
        own_N = 10 * jnp.repeat(batch.draw_ids, G) + jnp.tile(
            jnp.arange(G), len(batch.draw_ids)
        )
        strange += jnp.sum(trajectories.tokens[:, 0] != own_N)
        return (
            -jnp.sum(seen_M * params["w"]),
            len(rewards_BG),
            {"uniform": (uniform, 1.0), "strange": (strange, 1.0)},
        )


def _roll_out(policy, params, batch, reward, group, key, _unjudged=None):
    index_N = jnp.repeat(batch.draw_ids, group)
    rollout_N = jnp.tile(jnp.arange(group), len(batch.draw_ids))
    tokens_NA = jnp.pad(
        (10 * index_N + rollout_N)[:, None],
        ((0, 0), (0, 2)),
        constant_values=POLICY.config.pad_id,
    )
    lengths_N = jnp.ones_like(index_N)
    keys_N = jax.vmap(lambda i: jax.random.fold_in(key, i))(index_N)
    trajectories = Trajectories(
        jnp.zeros((len(index_N), 0, 2)), lengths_N, tokens_NA, keys_N
    )
    references_N = jnp.repeat(batch.references, group, axis=0)
    return trajectories, None if reward is None else reward(
        tokens_NA, references_N
    ).reshape(-1, group)


def _batch(index, mixed, slots, layout):
    """Of these prompts; a reference says whether its group is mixed."""
    index = np.asarray(index, np.int32)
    valid = np.arange(slots)[None, ::-1] < 1 + index[:, None] % 3
    prompts = Prompts(np.where(valid, index[:, None], -1), valid, packed_slots=0)
    return shard_rows(
        PromptedBatch(prompts, np.array(mixed, np.uint8)[:, None], index), layout.mesh
    )


def _reward(tokens_NA, references_N):
    return jnp.where(references_N[:, 0] > 0, (tokens_NA[:, 0] % 10) != 1, 0).astype(
        jnp.float32
    )


def _run(draws, most, devices=1, on_host=False, steps=1):
    """(state, the metrics of each step, the (step, number) asked for) of draws (indices, mixed, slots)."""
    layout = layout_of(devices)
    asked = []
    mixed = {i: m for index, are, _ in draws for i, m in zip(index, are, strict=True)}

    def batch(step, number):
        asked.append((step, number))
        return _batch(*draws[number], layout)

    def host_reward(tokens_NA, index_N, latents_N):
        assert (latents_N == 1).all()
        assert (tokens_NA[:, 0] // 10 == index_N).all()
        found = [
            mixed[i] and row[0] % 10 != 1
            for i, row in zip(index_N.tolist(), tokens_NA, strict=True)
        ]
        return verdicts(found)

    optimizer = optax.sgd(1.0)
    rl = RlConfig(group=G, dynamic_batches=most)
    reward, host_reward = (None, host_reward) if on_host else (_reward, None)
    how = dict(reward=reward, host_reward=host_reward, batch_at=batch)
    step = make_rl_step(POLICY, Reader(), rl, optimizer, ("w",), layout, **how)
    params = {"w": jnp.zeros(20), "reasoner": {}}
    state = init_state(params, ("w",), optimizer, jax.random.key(5), layout)
    rows = []
    for _ in range(steps):
        first = _batch(*draws[0], layout)
        with jax.transfer_guard("disallow"):  # as the loop of all stages has it
            state, row = step(state, first)
        rows.append(jax.device_get(row))
    return state, rows, asked


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    for module in (rl_step, rl_loss):
        monkeypatch.setattr(module, "roll_out", _roll_out)


DRAWS = [
    ((0, 1, 2, 3), (0, 1, 0, 0), 4),
    ((4, 5, 6, 7), (1, 0, 0, 1), 7),
    ((8, 9, 10, 11), (1, 1, 1, 0), 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "on_host"), [(1, False), (2, True)])
def test_only_mixed_groups_reach_the_objective(devices, on_host):
    """The first four of three batches, in the order they were drawn in, of prompts of any width."""
    state, (row,), asked = _run(DRAWS, 9, devices, on_host)
    assert np.flatnonzero(state.params["w"]).tolist() == [1, 4, 7, 8]
    np.testing.assert_allclose(state.params["w"][np.array([1, 4, 7, 8])], 1 / B)
    assert asked == [(0, 1), (0, 2)]
    assert (
        row["uniform"],
        row["strange"],
        row["groups_drawn"],
        row["groups_kept"],
    ) == (0, 0, 12, 4)
    # Of all that was drawn: six of twelve groups are mixed, with two right rollouts of three.
    assert (row["mixed"], row["reward"], row["solved"]) == pytest.approx(
        (0.5, 6 * 2 / 36, 0.5)
    )
    assert (row["counts"]["mixed"], row["counts"]["reward"], row["counts"]["loss"]) == (
        12,
        36,
        B,
    )


def test_where_none_is_uniform_it_is_the_step_without():
    draws = [((3, 1, 2, 0), (1, 1, 1, 1), 4)]
    filtered, rows, asked = _run(draws, 3, on_host=True, steps=2)
    plain, plain_rows, _ = _run(draws, 0, on_host=True, steps=2)
    assert asked == []
    np.testing.assert_array_equal(filtered.params["w"], plain.params["w"])
    groups = {"groups_drawn": B, "groups_kept": B}
    for row in (*rows, *plain_rows):
        row.pop("verifier_seconds")
    assert rows == [row | groups | {"counts": row["counts"]} for row in plain_rows]


@pytest.mark.parametrize(("most", "seen"), [(1, {1: 4}), (2, {1: 2, 4: 1, 7: 1})])
def test_where_there_are_too_few_they_come_in_turn(most, seen):
    state, (row,), _ = _run(DRAWS, most)
    assert {
        int(i): float(state.params["w"][i]) * B
        for i in np.flatnonzero(state.params["w"])
    } == seen
    assert (row["uniform"], row["groups_drawn"], row["groups_kept"]) == (
        0,
        4 * most,
        len(seen),
    )


def test_a_step_without_a_mixed_group_changes_nothing():
    draws = [((0, 1, 2, 3), (0, 0, 0, 0), 4), ((4, 5, 6, 7), (0, 0, 0, 0), 4)]
    state, rows, asked = _run(draws, 2, steps=2)
    assert int(state.step) == 2
    assert not np.any(state.params["w"])
    assert asked == [(0, 1), (1, 1)]
    assert all(
        (row["groups_kept"], row["groups_drawn"], row["mixed"]) == (0, 8, 0)
        for row in rows
    )
    assert not any("loss" in row for row in rows)

"""The stage best_of_n against rollouts taken one by one in numpy."""

import dataclasses

import jax
import numpy as np
import pytest

from slow_policy import rollouts_of
from slpo_jax.runtime.mesh import device_mesh, replicate, shard_rows
from slpo_jax.training.host_rewards import HostVerdicts
from slpo_jax.training.rejection_sampling import (
    BestOfNConfig,
    best_right,
    make_choice,
    make_loss,
)
from slpo_jax.training.rollouts import roll_out
from small_steps import (
    NEVER,
    host_reward_of,
    layout_of,
    prompted_batch,
    rigged_reward,
    small_params,
)
from tiny import END, ROLLOUT, SlowReasoner, policy_of

CONFIG = BestOfNConfig(samples=6)
POLICY = policy_of(
    dataclasses.replace(ROLLOUT, temperature=1.0, dropout_rate=0.0, stopping="length")
)
KEY = jax.random.key(7)


@pytest.mark.parametrize(
    ("scores", "rewards", "best"),
    [
        ([0.1, 0.9, 0.5], [1, 0, 1], 2),
        ([-3.0, -5.0, -4.0], [1, 1, 1], 0),
        ([2.0, 2.0, 1.0], [0, 1, 1], 1),
    ],
)
def test_the_best_is_right(scores, rewards, best):
    assert best_right(np.array([scores]), np.array([rewards], np.float32)).tolist() == [
        best
    ]


@pytest.mark.slow
def test_the_best_right_sample_is_imitated():
    """One problem has no right sample, and is left out of the mean."""
    params = small_params()
    batch = prompted_batch(references=(0, 0, NEVER, 1))
    samples, rewards_BN = jax.jit(
        lambda params, batch: roll_out(
            POLICY, params, batch, rigged_reward, CONFIG.samples, KEY
        )
    )(params, batch)
    slow = SlowReasoner()
    rollouts = rollouts_of(batch.prompts, samples)
    log_probs = []
    for row in rollouts:
        thought = slow.think(row.prompt, len(row.latents))
        before = np.concatenate([slow.embed(row.prompt), thought, slow.embed([END])])
        log_probs.append(slow.log_probs(before, row.spoken))
    wanted = []
    firsts = []
    for problem, rewards in enumerate(np.asarray(rewards_BN)):
        right = [problem * CONFIG.samples + n for n in np.flatnonzero(rewards)]
        wanted.append(max(right, key=lambda row: log_probs[row].mean(), default=None))
        firsts.append(right[0] if right else None)
    assert wanted[2] is None
    assert None not in (wanted[0], wanted[1], wanted[3])
    assert wanted != firsts
    best = [
        np.argmax([each.mean() for each in log_probs[start : start + 6]]) + start
        for start in range(0, 24, 6)
    ]
    assert wanted != best  # the best of all would be another
    choose = make_choice(
        POLICY, rigged_reward, CONFIG, device_mesh(jax.devices("cpu")[:1])
    )
    chosen = choose(params, batch, KEY)
    assert chosen.right_B.tolist() == [row is not None for row in wanted]
    for problem, row in enumerate(wanted):
        if row is not None:
            assert (
                chosen.trajectories.tokens[problem].tolist()
                == samples.tokens[row].tolist()
            )
            np.testing.assert_array_equal(
                chosen.trajectories.actions[problem], samples.actions[row]
            )
    loss, metrics = jax.jit(make_loss(POLICY))(params, chosen, KEY)
    total = sum(log_probs[row].sum() for row in wanted if row is not None)
    assert float(loss) == pytest.approx(-total, rel=1e-4)
    assert [tuple(map(float, metrics[name])) for name in ("loss", "answer_log_likelihood", "solved")] == [
        (pytest.approx(-total, rel=1e-4), 3), (pytest.approx(total, rel=1e-4), 3), (3, 4)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "micro_batches"), [(1, 1), (2, 2)])
def test_verdicts_of_the_host_choose_as_those_of_the_device(devices, micro_batches):
    batch = prompted_batch(references=(0, 0, NEVER, 1))
    config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
    mesh = layout_of(devices).mesh
    (params, key), rows = (
        replicate((small_params(), KEY), mesh),
        shard_rows(batch, mesh),
    )
    with jax.transfer_guard("disallow"):
        chosen = make_choice(
            POLICY, None, config, mesh, HostVerdicts(host_reward_of(batch), mesh)
        )(params, rows, key)
    on_device = make_choice(POLICY, rigged_reward, config, mesh)(params, rows, key)
    assert chosen.right_B.tolist() == [True, True, False, True]
    for one, other in zip(*map(jax.tree.leaves, (chosen, on_device)), strict=True):
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one = jax.random.key_data(one)
            other = jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)

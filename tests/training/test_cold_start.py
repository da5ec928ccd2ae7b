"""The gate's cold start against separately decoded candidates and an enumeration of stop times."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import small_steps
from slow_policy import (
    as_float64,
    assert_is_gradient,
    factors_of,
    rollouts_of,
    teacher_forced,
    think,
)
from slpo_jax.models.layers import Dropout, drop
from slpo_jax.policy import noise
from slpo_jax.policy.policy import repeat_rows
from slpo_jax.policy.rollout import sample
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.training import gate_training
from slpo_jax.training.gate_training import make_host_step
from slpo_jax.training.state import init_state, make_train_step
from small_steps import (
    BATCH,
    COLD,
    MIN_LATENTS,
    NEVER,
    OPTIMIZER,
    POLICY,
    ROLLOUT,
    host_reward_of,
    layout_of,
    prompted_batch,
    rigged_reward,
    small_params,
)
from tiny import CONFIG, SlowReasoner, compiled, policy_of

T = ROLLOUT.max_latents
N = COLD.trajectories
CANDIDATES = range(MIN_LATENTS, T + 1)
# One prompt has no right answer of any length, so that its trajectories are left out.
PROBLEMS = prompted_batch(references=(0, 0, NEVER, 1))


@pytest.fixture(scope="module")
def keys():
    """Key 0 of the run, stream 1, step 0; then the example and the trajectory."""
    fold = jax.random.fold_in
    step_key = fold(fold(jax.random.key(0), 1), 0)
    return jnp.stack(
        [
            fold(fold(step_key, index), n)
            for index in PROBLEMS.draw_ids
            for n in range(N)
        ]
    )


@pytest.fixture(scope="module")
def decoded(keys):
    """Latents [B*N, T, D] of the full trajectories, rewards [B*N, C] of each length decoded on its own, and these."""
    prompts, references = repeat_rows((PROBLEMS.prompts, PROBLEMS.references), N)
    run = compiled(sample, policy_of(dataclasses.replace(ROLLOUT, stopping="length")))
    results = [
        run(small_params(), prompts, keys, jnp.full(BATCH * N, length))
        for length in CANDIDATES
    ]
    rewards = [rigged_reward(result.tokens, references) for result in results]
    return np.array(results[-1].actions), np.stack(rewards, axis=1), results


@pytest.fixture(scope="module")
def gate_inputs(keys, decoded):
    """The latents [B*N, T, D] under the head's own dropout."""
    kind = 5 << 20  # apart from the noise of the forwards
    steps = kind + jnp.arange(1, T + 1)
    position_keys = jax.vmap(
        lambda key: jax.vmap(lambda step: jax.random.fold_in(key, step))(steps)
    )(keys)
    on = jnp.ones(decoded[0].shape[:2], bool)
    dropped = drop(
        jnp.asarray(decoded[0]), Dropout(position_keys, on, COLD.gate_dropout), 0
    )
    return np.asarray(dropped, np.float64)


def _enumerated(gate, inputs, right):
    """-log of the probability of a right stop, of each trajectory that has one, and the expected lengths of all."""
    rho = special.expit(inputs @ gate["out"]["kernel"][:, 0] + gate["out"]["bias"][0])
    losses = []
    expected_lengths = []
    for row in range(BATCH * N):
        stops = [
            np.prod(1 - rho[row, : t - 1]) * rho[row, t - 1] for t in range(1, T + 1)
        ]  # as printed
        good = [stops[t - 1] for c, t in enumerate(CANDIDATES) if right[row, c]]
        if good:
            losses.append(-np.log(sum(good)))
        forced = [*stops[:-1], np.prod(1 - rho[row, : T - 1])]
        assert sum(forced) == pytest.approx(1)
        expected_lengths.append(sum(t * p for t, p in enumerate(forced, 1)))
    return losses, expected_lengths


@pytest.mark.slow
def test_loss_is_the_enumeration_over_separately_decoded_lengths(gate_inputs, decoded):
    """Its mean, and its gradient, are over the trajectories that have a right length."""
    right = decoded[1]
    losses, expected_lengths = _enumerated(
        as_float64(small_params()["gate"]), gate_inputs, right
    )
    assert 0 < len(losses) < BATCH * N
    assert not right.any(axis=1).all()
    assert (right.any(axis=1) & ~right.all(axis=1)).any(), (
        "some lengths of a trajectory must be wrong, others right"
    )
    taken = small_steps.take_steps("cold_start", [PROBLEMS])
    assert set(taken.gradient) == {"gate"}
    metrics = taken.metrics[0]
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["valid_share"] == pytest.approx(len(losses) / (BATCH * N))
    assert metrics["expected_length"] == pytest.approx(
        np.mean(expected_lengths), rel=1e-4
    )
    assert metrics["right_share"] == pytest.approx(right.mean())

    def value(gate):
        return float(np.mean(_enumerated(gate, gate_inputs, right)[0]))

    assert_is_gradient(taken.gradient["gate"], value, small_params()["gate"])


@pytest.mark.slow
def test_a_trained_reasoner_keeps_its_right_answers(keys, decoded):
    """-log of each trajectory's own answer at one of its right lengths, through its thought; 0 where none is right."""
    _, right, results = decoded
    weights = {
        weight: jax.value_and_grad(
            gate_training.make_loss(
                POLICY,
                rigged_reward,
                dataclasses.replace(COLD, train_backbone=True, answer_weight=weight),
            ),
            has_aux=True,
        )
        for weight in (0.0, 0.5)
    }
    step_key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), 0)
    found = {
        weight: compiled(loss)(small_params(), PROBLEMS, step_key)
        for weight, loss in weights.items()
    }
    of_both = [
        ((loss, sums["loss"][0]), gradient)
        for (loss, sums), gradient in (found[0.5], found[0.0])
    ]
    (loss, logged), gradient = jax.tree.map(
        lambda a, b: np.asarray(a) - np.asarray(b), *of_both
    )
    rows = []
    for row in np.flatnonzero(right.any(axis=1)):
        places = np.flatnonzero(right[row])
        uniform = float(noise.stop_uniforms(keys[row : row + 1], jnp.int32(1))[0])
        result = results[places[int(uniform * len(places))]]
        assert (
            rigged_reward(result.tokens, repeat_rows(PROBLEMS.references, N))[row] == 1
        )
        rows.append((row, rollouts_of(PROBLEMS.prompts, result)[row]))
    assert len({len(rollout.latents) for _, rollout in rows}) > 1
    rollouts = [rollout for _, rollout in rows]
    own = keys[np.array([row for row, _ in rows])]
    factors = factors_of(rollouts, own, own, ROLLOUT)

    def value(params):
        reasoner = SlowReasoner(params["reasoner"])
        return -0.5 * sum(
            teacher_forced(
                reasoner, row, think(reasoner, row, noise), row.spoken, noise
            )[1]
            for row, noise in zip(rollouts, factors, strict=True)
        )

    assert loss == pytest.approx(value(as_float64(small_params())), rel=1e-3)
    assert logged == pytest.approx(loss, rel=1e-5)
    (_, sums) = found[0.5][0]
    (_, without) = found[0.0][0]
    assert sums["answer_log_likelihood"] == pytest.approx(
        (-2 * loss, len(rows)), rel=1e-3
    )
    assert "answer_log_likelihood" not in without
    assert_is_gradient(gradient, value, small_params())


def test_each_candidate_is_judged_by_its_own_problem(monkeypatch):
    """Whatever is answered to the i-th problem is i, which is right at every length."""

    def decode(policy, params, prompts, keys_N, min_latents):
        said_N11 = jnp.repeat(jnp.arange(BATCH), N)[:, None, None]
        return jnp.zeros((BATCH * N, T, CONFIG.n_embd)), jnp.broadcast_to(
            said_N11, (BATCH * N, len(CANDIDATES), 1)
        )

    monkeypatch.setattr(gate_training, "decode_candidates", decode)
    loss = gate_training.make_loss(
        POLICY, lambda tokens, references: tokens[:, 0] == references[:, 0], COLD
    )
    _, sums = compiled(loss)(
        small_params(), prompted_batch(references=range(BATCH)), jax.random.key(0)
    )
    assert sums["right_share"] == (BATCH * N * len(CANDIDATES),) * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "micro_batches", "fsdp", "train_backbone"),
    [(1, 1, 1, True), (2, 2, 2, False)],
)
def test_verdicts_of_the_host_are_those_of_the_device(
    devices, micro_batches, fsdp, train_backbone
):
    """To the bit in all metrics, parameters and the optimizer's state, over two steps."""
    config = dataclasses.replace(COLD, train_backbone=train_backbone)
    asked = []

    def host_reward(tokens_NA, index_N, latents_N):
        asked.append(len(index_N))
        assert latents_N.tolist() == [*CANDIDATES] * (len(index_N) // len(CANDIDATES))
        return host_reward_of(PROBLEMS)(tokens_NA, index_N, latents_N)

    def taken(make, loss):
        how = (
            OPTIMIZER,
            ("reasoner", "gate") if train_backbone else ("gate",),
            layout_of(devices, fsdp),
            "cold_start",
        )
        step = make(loss, *how, micro_batches)
        state = init_state(small_params(), how[1], OPTIMIZER, jax.random.key(0), how[2])
        rows = []
        for _ in range(2):
            batch = shard_rows(PROBLEMS, how[2].mesh)
            with jax.transfer_guard("disallow"):  # as the loop of all stages has it
                state, row = step(state, batch)
            rows.append(jax.device_get(row))
            row.pop("verifier_seconds", None)
            for name in ("unjudged", "reward_failed"):
                own = row.pop(name, 0), row["counts"].pop(name, 0)
                assert own in ((0, 0), (0, BATCH * N * len(CANDIDATES)))
            rows[-1] = {name: row[name] for name in sorted(row)}
        return jax.tree.map(np.asarray, (state.params, state.opt_state, rows))

    sample = functools.partial(gate_training.candidates_with_lengths, POLICY, config)
    halves = functools.partial(make_host_step, sample=sample, host_reward=host_reward)
    jax.tree.map(
        np.testing.assert_array_equal,
        taken(halves, gate_training.make_candidates_loss(POLICY, config)),
        taken(make_train_step, gate_training.make_loss(POLICY, rigged_reward, config)),
    )
    assert asked == [BATCH * N * len(CANDIDATES)] * 2

"""Token-level GRPO against a loop over rollouts and choices; steps in two halves, with updates and rewards between."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from frozen import ADDITIVE, BATCH, KEY, POLICY, SIGMA, Frozen
from slow_policy import as_float64, assert_is_gradient, normal_log_prob, token_by_token
from slpo_jax.errors import UserError
from slpo_jax.policy import noise
from slpo_jax.policy.policy import PromptedBatch, repeat_rows
from slpo_jax.policy.rollout import Trajectories, sample
from slpo_jax.run.train_rl import make_rl_step
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.training import rl_loss, rl_step
from slpo_jax.training.objectives import OBJECTIVES, Objective
from slpo_jax.training.objectives.grpo import Choices, clipped_gains
from slpo_jax.training.rl_config import RlConfig
from slpo_jax.training.state import copy_params, init_state
from small_steps import GROUP, ROLLOUT, difference, layout_of, small_params
from tiny import (
    EOS,
    PAD,
    SlowReasoner,
    compiled,
    keys_of,
    policy_of,
    real_tokens,
    verdicts,
)

T = ROLLOUT.max_latents
A = ROLLOUT.answer_slots
GRPO = OBJECTIVES["grpo"]


@pytest.fixture(scope="module")
def frozen():
    """Rollouts whose latents have a density."""
    return Frozen(ADDITIVE)


def _choices(frozen, params, temperature=1.0) -> list[list[tuple[str, int, float]]]:
    """Of each rollout (kind, place, log-probability) of all that it chose."""
    reasoner = SlowReasoner(params["reasoner"])
    found = []
    for row, stop in zip(frozen.rollouts, frozen.stops(params), strict=True):
        means, answer = token_by_token(
            reasoner, row, row.latents, row.spoken, {}, temperature
        )
        latents = [
            normal_log_prob(h, mean, SIGMA**2)
            for h, mean in zip(row.latents, means, strict=True)
        ]
        found.append([("latent", t, x) for t, x in enumerate(latents)] + [("token", a, x) for a, x in enumerate(answer)]
                     + [("stop", 0, stop)])  # fmt: skip
    return found


def _group_relative(rewards_BG) -> np.ndarray:
    rewards_BG = np.asarray(rewards_BG, np.float64)
    centred = rewards_BG - rewards_BG.mean(axis=1, keepdims=True)
    return (centred / (rewards_BG.std(axis=1, ddof=1, keepdims=True) + 1e-4)).ravel()


def test_clips_are_those_of_a_loop():
    """For A < 0 no less than 1.5 A (Ye et al., 2020), which also the minimum of PPO has none of."""
    rng = np.random.default_rng(0)
    ratio = np.exp(rng.normal(size=200)).astype(np.float32)
    advantages = rng.normal(size=200).astype(np.float32)
    expected = []
    cut = set()
    for rho, a in zip(ratio, advantages, strict=True):
        gain = min(rho * a, min(max(rho, 0.8), 1.2) * a)
        held = max(gain, 1.5 * a) if a < 0 else gain
        cut.add((a < 0, held != rho * a, held != gain))
        expected.append(held)
    assert len(cut) == 5
    np.testing.assert_allclose(
        clipped_gains(ratio, advantages, 0.2, 1.5), expected, rtol=1e-5
    )
    np.testing.assert_allclose(
        clipped_gains(ratio, advantages, None, None), ratio * advantages, rtol=1e-6
    )


@pytest.mark.slow
def test_latent_grpo_s_advantages_are_a_loop_s():
    """The first choice is the right rollout's of the best mean; one that was cut off has none, best or not."""
    rng = np.random.default_rng(0)
    group = 4
    rows = 40
    lengths = rng.integers(1, T + 1, rows)
    words = rng.integers(0, A + 1, rows)  # words before the end, if it is there
    tokens = np.full((rows, A), PAD)
    for row, count in enumerate(words):
        tokens[row, : count + 1] = [*[42] * count, EOS][:A]
    advantages = rng.normal(size=(rows // group, group)).astype(np.float32)
    advantages[0] = -np.abs(advantages[0])
    before_NC = rng.normal(-2, 1, (rows, T + A + 1)).astype(np.float32)
    thoughts = Trajectories(
        np.zeros((rows, T, 1)), lengths, tokens, keys=None, old_log_probs=before_NC
    )
    found = GRPO(first_choice="best").keep_best_first(ADDITIVE, thoughts, advantages)

    flat = advantages.ravel()
    chosen = []
    firsts = {np.mean: [], np.sum: []}
    for row in range(rows):
        spoken = min(words[row] + 1, A)
        chosen.append(
            before_NC[row, [*range(lengths[row]), *range(T, T + spoken), T + A]]
        )
    for how, best in firsts.items():
        for start in range(0, rows, group):
            right = [row for row in range(start, start + group) if flat[row] > 0]
            best += (
                [max(right, key=lambda row, how=how: how(chosen[row]))]
                if right
                else range(start, start + group)
            )
    assert firsts[np.mean] != firsts[np.sum]
    assert any(words[row] == A for row in firsts[np.mean])
    for row in range(rows):
        a = 0.0 if words[row] == A else flat[row]
        assert found[row, 0] == (a if row in firsts[np.mean] else 0.0)
        made = [*range(1, lengths[row]), *range(T, T + min(words[row] + 1, A)), T + A]
        np.testing.assert_array_equal(found[row, made], a)


BETA = 0.4
REWARDS = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
REDUCTIONS = ("token_mean", "sequence_mean", "sum")
WEIGHTS = {"latent": 0.3, "token": 1.0, "stop": 0.7}
PLACES = {"latent": 0, "token": T, "stop": T + A}


def _elsewhere(frozen, apart, seed) -> np.ndarray:
    """Log-probabilities of another policy, [N, C]; what was not chosen has any."""
    found_NC = np.full((len(frozen.rollouts), T + A + 1), 7.0, np.float32)
    rng = np.random.default_rng(seed)
    for row, choices in enumerate(_choices(frozen, as_float64(frozen.params))):
        for kind, place, log_prob in choices:
            found_NC[row, PLACES[kind] + place] = log_prob + rng.choice(apart)
    return found_NC


@pytest.fixture(scope="module")
def before(frozen) -> np.ndarray:
    """Some ratios are clipped and some are not, all of them clear of the kinks."""
    return _elsewhere(frozen, [-0.4, -0.1, 0.1, 0.4], 0)


@pytest.fixture(scope="module")
def start(frozen) -> np.ndarray:
    return _elsewhere(frozen, [-1.5, -0.2, 0.3, 1.0], 1)


@pytest.fixture(scope="module")
def found(frozen, before, start):
    """(mean loss, metrics) and gradient by what is asked, one program for all."""
    weights = dict(latent_weight=WEIGHTS["latent"], stop_weight=WEIGHTS["stop"])
    asked = {
        name: (GRPO(reduction=name, clip=0.2, **weights), before) for name in REDUCTIONS
    }
    asked["kl"] = (GRPO(clip=0.2, kl_weight=BETA, **weights), before, start)
    asked["first"] = (GRPO(reduction="sum", **weights), None)
    asked["exact"] = (OBJECTIVES["exact"](advantage="grpo", **weights), None)
    options = {"dual_clip": 1.3, "first_choice": "best", "tempered": True}
    asked["latent_grpo"] = (GRPO(reduction="sum", **options, **weights), before)

    def loss(params, objective, old_log_probs, ref_log_probs=None):
        trajectories = frozen.trajectories.replace(
            old_log_probs=old_log_probs, ref_log_probs=ref_log_probs
        )
        policy = ADDITIVE.with_config(temperature=0.6)
        total, count, metrics = objective(
            policy, params, BATCH, trajectories, frozen.rewards, KEY
        )
        return total / count, metrics

    graded = jax.value_and_grad(loss, has_aux=True)
    return compiled(
        lambda params: {name: graded(params, *how) for name, how in asked.items()}
    )(frozen.params)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "kl"])
def test_loss_and_gradient_are_those_of_a_loop_over_choices(
    frozen, before, start, found, reduction
):
    advantages = _group_relative(frozen.rewards)
    cut = []
    apart = []

    def value(params):
        losses = []
        cut.clear()
        apart.clear()
        for row, choices in enumerate(_choices(frozen, params)):
            losses.append([])
            for kind, place, log_prob in choices:
                ratio = np.exp(log_prob - before[row, PLACES[kind] + place])
                plain = ratio * advantages[row]
                held = np.clip(ratio, 0.8, 1.2) * advantages[row]
                cut.append((ratio, held < plain))
                away = start[row, PLACES[kind] + place] - log_prob
                apart.append(np.exp(away) - away - 1)
                beta = BETA if reduction == "kl" else 0.0
                losses[-1].append(WEIGHTS[kind] * (beta * apart[-1] - min(plain, held)))
        if reduction in ("token_mean", "kl"):
            return np.mean(np.concatenate(losses))
        return np.mean(
            [
                (np.mean if reduction == "sequence_mean" else np.sum)(row)
                for row in losses
            ]
        )

    (loss, metrics), gradient = found[reduction]
    assert loss == pytest.approx(value(as_float64(frozen.params)), rel=1e-3)
    clipped, made = metrics["clipped"]
    assert clipped / made == pytest.approx(np.mean([was for _, was in cut]))
    assert {bool(ratio > 1) for ratio, was in cut if was} == {True, False}
    total, made = metrics["ratio"]
    assert total / made == pytest.approx(np.mean([ratio for ratio, _ in cut]), rel=1e-3)
    answers = [
        x
        for row in _choices(frozen, as_float64(frozen.params))
        for kind, _, x in row
        if kind == "token"
    ]
    assert metrics["answer_log_likelihood"][0] == pytest.approx(sum(answers), rel=1e-3)
    if reduction == "kl":
        total, made = metrics["kl"]
        assert total / made == pytest.approx(np.mean(apart), rel=1e-3)
        assert np.mean(apart) > 0.1
    assert ("kl" in metrics) == (reduction == "kl")
    if reduction in ("token_mean", "kl"):
        # r - 1, the weight of k3's gradient, is as inexact as float32's densities.
        assert_is_gradient(
            gradient, value, frozen.params, rel=5e-3 if reduction == "kl" else 2e-3
        )


@pytest.mark.slow
def test_options_of_latent_grpo_are_a_loop_s(frozen, before, found):
    """The likelihood of tokens at their temperature, the dual clip, and advantages of each choice."""
    params = as_float64(frozen.params)
    advantages = _group_relative(frozen.rewards)
    losses = []
    first = set()
    choices = _choices(frozen, params, 0.6)
    means = []
    for row, made in enumerate(choices):
        means.append(
            np.mean([before[row, PLACES[kind] + place] for kind, place, _ in made])
        )
    for row, made in enumerate(choices):
        group = range(row - row % GROUP, row - row % GROUP + GROUP)
        best = max(
            (i for i in group if advantages[i] > 0), key=means.__getitem__, default=row
        )
        first.add((best == row, bool(advantages[row] > 0)))
        for number, (kind, place, log_prob) in enumerate(made):
            a = (
                advantages[row]
                * (number > 0 or best == row)
                * (EOS in frozen.rollouts[row].spoken)
            )
            ratio = np.exp(log_prob - before[row, PLACES[kind] + place])
            held = min(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
            losses.append(-WEIGHTS[kind] * (max(held, 1.3 * a) if a < 0 else held))
    assert first == {(True, True), (False, True), (False, False)}
    assert found["latent_grpo"][0][0] == pytest.approx(
        sum(losses) / len(choices), rel=1e-3
    )


@pytest.mark.slow
def test_the_first_update_is_reinforce(frozen, found):
    """Without other likelihoods rho is 1: `exact`'s gradient, with the same advantages."""
    (loss, metrics), gradient = found["first"]
    expected = found["exact"][1]
    assert difference(gradient, expected) < 2e-5 * max(
        float(abs(leaf).max()) for leaf in jax.tree.leaves(expected)
    )
    counts = [
        sum(WEIGHTS[kind] for kind, _, _ in row)
        for row in _choices(frozen, as_float64(frozen.params))
    ]
    assert loss == pytest.approx(
        -_group_relative(frozen.rewards) @ np.array(counts) / len(counts), abs=1e-5
    )
    assert metrics["clipped"][0] == 0
    assert "ratio" not in metrics


@pytest.mark.slow
def test_detached_inputs_leave_a_tied_table_the_head_s_gradient():
    """LEPO's loss of soft tokens and words whose inputs are stored: of a slow loop over them, by differences."""
    ends = {"closing_ids": (), "eos_ids": tuple(range(0, 60, 4))}  # often one of them
    config = dataclasses.replace(
        ROLLOUT, max_latents=2, stopping="length", dropout_rate=0.0, **ends
    )
    policy = policy_of(config, latent_policy="gumbel", top_k=4, top_p=1.0)
    params = {**small_params(), "latent_policy": {}}
    objective = GRPO(reduction="sequence_mean", detach_inputs=True)

    @compiled
    def run(params):
        made = sample(
            policy,
            params,
            repeat_rows(BATCH.prompts, 2),
            keys_of(2 * len(BATCH.draw_ids)),
            2,
        )

        def loss(params):
            total, count, _ = objective(policy, params, BATCH, made, REWARDS, KEY)
            return total / count

        return made.replace(keys=None), jax.value_and_grad(loss)(params)

    made, (loss, gradient) = jax.tree.map(np.asarray, run(params))
    stored = SlowReasoner(params["reasoner"])
    advantages = _group_relative(REWARDS)
    ended_NA = np.isin(made.tokens, ends["eos_ids"])
    spoken_N = np.where(
        ended_NA.any(axis=1), ended_NA.argmax(axis=1) + 1, config.answer_slots
    )
    assert len(set(spoken_N)) > 2

    def value(params):
        slow = SlowReasoner(params["reasoner"])
        losses = []
        for row, advantage in enumerate(advantages):
            prompt = real_tokens(BATCH.prompts, row // 2)
            words = made.tokens[row, : spoken_N[row]]
            ids = made.actions["ids"][row]
            weights = made.actions["weights"][row]
            soft = [y @ stored.embed(k) for k, y in zip(ids, weights, strict=True)]
            inputs = np.concatenate(
                [stored.embed(prompt), soft, stored.embed(words[:-1])]
            )
            log_p = special.log_softmax(
                slow.logits(slow.hidden(inputs)[len(prompt) - 1 :]), axis=-1
            )
            chosen = [
                y @ log_p[step][k]
                for step, (k, y) in enumerate(zip(ids, weights, strict=True))
            ]
            chosen += [log_p[2 + slot, word] for slot, word in enumerate(words)]
            # The ratio is 1; its gradient is that of the log-likelihood.
            losses.append(-advantage * np.mean(chosen))
        return np.mean(losses)

    assert_is_gradient(
        gradient["reasoner"], lambda tree: value({"reasoner": tree}), params["reasoner"]
    )
    assert loss == pytest.approx(-advantages.mean(), abs=1e-6)


# The step in two halves, of rollouts without a model: w is all there is of the parameters.


@dataclasses.dataclass(frozen=True)
class Toy(Objective):
    """-sum_i r_i (w - w of the rollout - 1)^2 x_i + (w - w of the start)^2 x_i, times a number that the key draws."""

    updates_per_step: int = 1
    minibatches: int = 1
    needs_ref_log_probs: bool = False

    def compute_old_log_probs(self, policy, params, batch, trajectories):
        return jnp.broadcast_to(params["w"], trajectories.lengths.shape)

    compute_ref_log_probs = compute_old_log_probs

    def __call__(self, policy, params, batch, trajectories, rewards_BG, key):
        before_N = (
            0.0 if trajectories.old_log_probs is None else trajectories.old_log_probs
        )
        losses_N = (
            rewards_BG.reshape(-1)
            * trajectories.lengths
            * (params["w"] - before_N - 1.0) ** 2
        )
        if trajectories.ref_log_probs is not None:
            losses_N += (
                trajectories.lengths * (params["w"] - trajectories.ref_log_probs) ** 2
            )
        losses_N *= jax.random.uniform(key)
        width = params["w"] * rewards_BG.size, jnp.float32(rewards_BG.size)
        return losses_N.sum(), len(rewards_BG), {"width": width}


def _toy_rollout(policy, params, batch, reward, group, key, _unjudged=None):
    """Lengths by key and index, which are in the tokens."""
    index_N = jnp.repeat(batch.draw_ids, group)
    draw = jax.vmap(
        lambda index: jax.random.randint(jax.random.fold_in(key, index), (), 1, 9)
    )
    lengths_N = (
        draw(index_N) + jnp.tile(jnp.arange(group), len(batch.draw_ids))
    ).astype(jnp.float32)
    keys_N = jnp.broadcast_to(key, index_N.shape)
    tokens_N1 = (lengths_N.astype(jnp.int32) + 100 * index_N)[:, None]
    trajectories = Trajectories(
        jnp.zeros((len(index_N), 0, 2)), lengths_N, tokens_N1, keys_N
    )  # words alone
    return trajectories, None if reward is None else reward(tokens_N1, index_N).reshape(
        -1, group
    )


def _toy_reward(tokens_N1, index_N):
    """By length; the index, which the tokens have too, has to be that of their row."""
    return (tokens_N1[:, 0] - 100 * index_N) / 8.0


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_a_masked_rollout_is_out_of_the_loss(monkeypatch, reduction):
    """The loss, with the divergence's term, is that of the group without it."""
    draw = np.random.default_rng(1)
    log_probs = jnp.array(draw.normal(size=(3, 4)), jnp.float32)
    made = jnp.arange(4)[None] < jnp.array([2, 3, 4])[:, None]
    grpo = OBJECTIVES["grpo"](reduction=reduction, kl_weight=0.5)

    def loss(rows, rewards):
        chosen = Choices(
            log_probs[rows], made[rows] * 1.0, made[rows], log_probs[rows].sum(axis=1)
        )
        monkeypatch.setattr(type(grpo), "_choices", lambda *_: chosen)
        start = log_probs[rows] - jnp.array([0.1, 0.9, 0.4])[rows][:, None]
        before = Trajectories(
            None,
            None,
            None,
            None,
            old_log_probs=log_probs[rows] + 0.1,
            ref_log_probs=start,
        )
        total, (count, _) = grpo._loss(
            None, None, None, None, before, jnp.array([rewards])
        )
        return float(total / count)

    rows = np.array([0, 1, 2])
    assert loss(rows, [1.0, jnp.nan, 0.0]) == pytest.approx(
        loss(rows[[0, 2]], [1.0, 0.0]), rel=1e-5
    )
    assert loss(rows, [1.0, 0.0, 0.0]) != pytest.approx(
        loss(rows, [1.0, jnp.nan, 0.0]), rel=1e-2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "micro_batches"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_updates_on_one_rollout(monkeypatch, devices, micro_batches):
    for module in (rl_step, rl_loss):
        monkeypatch.setattr(module, "roll_out", _toy_rollout)
    layout = layout_of(devices)
    optimizer = optax.sgd(0.01)
    references = np.zeros((8, 0), np.uint8)  # as where answers are read on the host
    batch = shard_rows(
        PromptedBatch({}, references, np.arange(8, dtype=np.int32)), layout.mesh
    )

    def steps(updates, count, host_reward, compares, minibatches):
        reward = None if host_reward else _toy_reward
        params = {"w": jnp.float32(0.3), "reasoner": {}}
        start = copy_params(params, layout) if compares else None
        host = host_reward and (
            lambda tokens, index, _: verdicts(host_reward(tokens, index))
        )
        rl = RlConfig(group=GROUP, micro_batches=micro_batches)
        how = dict(reward=reward, host_reward=host, ref_params=start)
        toy = Toy(
            updates_per_step=updates,
            minibatches=minibatches,
            needs_ref_log_probs=compares,
        )
        step = make_rl_step(POLICY, toy, rl, optimizer, ("w",), layout, **how)
        rows = []
        state = init_state(params, ("w",), optimizer, jax.random.key(5), layout)
        for _ in range(count):
            state, row = step(state, batch)
            rows.append({name: float(row[name]) for name in ("width", "reward")})
        return state, rows

    def expected(w, step, updates, compares, minibatches):
        key = noise.stream_key(jax.random.key(5), "rl", step)
        trajectories, rewards = _toy_rollout(
            None, {"w": w}, batch, _toy_reward, GROUP, key
        )
        lengths_BG = np.asarray(trajectories.lengths).reshape(8, GROUP)
        before = w
        widths = []
        for number in range(updates):
            widths.append(w)
            drawn = float(
                jax.random.uniform(
                    jax.random.fold_in(key, number) if updates > 1 else key
                )
            )
            own_BG = lengths_BG[number % minibatches :: minibatches]
            size = float(
                np.sum(
                    np.asarray(rewards)[number % minibatches :: minibatches] * own_BG
                )
            )
            slope = size * (
                w - (before if updates > 1 else 0.0) - 1
            ) + own_BG.sum() * compares * (w - 0.3)
            w = w - 0.01 * 2 * drawn * slope / len(own_BG)
        return w, np.mean(widths), float(np.mean(rewards))

    cases = (
        (1, _toy_reward, False, 1),
        (2, None, False, 1),
        (3, _toy_reward, True, 1),
        (1, None, True, 1),
    )
    for case in (*cases, (4, None, True, 2)):
        updates, host_reward, compares, minibatches = case
        state, rows = steps(updates, 2, host_reward, compares, minibatches)
        w = 0.3
        for number, row in enumerate(rows):
            w, width, reward = expected(w, number, updates, compares, minibatches)
            assert row["width"] == pytest.approx(width, rel=1e-5)
            if updates % minibatches == 0:  # each group counts as often
                assert row["reward"] == pytest.approx(reward, rel=1e-5)
        assert float(state.params["w"]) == pytest.approx(w, rel=1e-5)
        assert int(state.step) == 2


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (POLICY, r"config.dropout.rate: 0.1 makes every pass another policy"),
        (
            POLICY.with_config(dropout_rate=0.0, temperature=0.0, stopping="length"),
            r"KEY.temperature: 0 makes all rollouts",
        ),
    ],
)
def test_policies_that_it_can_t_be_used_on(policy, message):
    with pytest.raises(UserError, match=message):
        GRPO().check("KEY", policy, GROUP)
    GRPO().check("KEY", ADDITIVE.with_config(temperature=0.0), GROUP)

"""Steps: no key is used twice, as jax's own checker counts; layers may be a loop; the optimizer's part is optax's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import small_steps
import tiny
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.architectures.colar import Colar
from slpo_jax.policy import noise
from slpo_jax.policy.rollout import sample
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from slpo_jax.training.rl_loss import make_rollout_and_loss
from slpo_jax.training.state import init_state, make_train_step
from small_steps import (
    POLICY,
    ROLLOUT,
    STAGES,
    batch_of,
    layout_of,
    prompted_batch,
    small_params,
)
from tiny import CONFIG, END, REASONER, assert_close, policy_of

POLICY = dataclasses.replace(
    POLICY, capacities=((1.0, 1.0),)
)  # each is traced, and uses the same keys
ADDITIVE = policy_of(
    dataclasses.replace(ROLLOUT, latent_policy_noise=True), REASONER, "additive"
)
GAUSSIAN = Colar(12, 0.4, gaussian=True).on(CONFIG)
COLAR = policy_of(
    dataclasses.replace(ROLLOUT, latent_policy_noise=True, stopping="length"),
    GAUSSIAN,
    "colar",
    end_id=END,
)
EVERY = {
    "slpo": (POLICY, OBJECTIVES["slpo"](passes=2)),
    "answer_only": (POLICY, OBJECTIVES["answer_only"]()),
    "pathwise": (POLICY, OBJECTIVES["pathwise"](estimator="reward", temperature=1.0)),
    "exact": (ADDITIVE, OBJECTIVES["exact"]()),
    "slpo, additive": (ADDITIVE, OBJECTIVES["slpo"](passes=2)),
}


def _traced(function, *arguments):
    """As the checker wants it: inside jit, and anew."""
    with jax.debug_key_reuse(True):
        jax.eval_shape(jax.jit(lambda *args: function(*args)), *arguments)


def test_the_checker_sees_a_key_that_is_used_twice():
    def twice(key):
        return jax.random.normal(key) + jax.random.uniform(key)

    with pytest.raises(jax.errors.KeyReuseError):
        _traced(twice, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_step_of_reinforcement_learning(name):
    policy, objective = EVERY[name]
    loss = make_rollout_and_loss(
        policy, objective, small_steps.rigged_reward, small_steps.GROUP
    )
    _traced(
        jax.grad(loss, has_aux=True),
        small_params(),
        prompted_batch(),
        jax.random.key(0),
    )


@pytest.mark.parametrize("stage", ["imitate", "cold_start"])
def test_a_step_of_the_other_stages(stage):
    _traced(
        jax.grad(STAGES[stage][0](), has_aux=True),
        small_params(),
        batch_of(stage),
        jax.random.key(0),
    )


@pytest.mark.parametrize(
    "policy", [POLICY, ADDITIVE, COLAR], ids=["latent", "additive", "colar"]
)
def test_a_rollout(policy):
    batch = prompted_batch()
    keys = jax.random.split(jax.random.key(0), len(batch.draw_ids))
    params = small_params() | {
        "reasoner": jax.eval_shape(policy.reasoner.init, keys[0])
    }
    rule = ROLLOUT.max_latents if policy is COLAR else None
    _traced(
        lambda params, keys: sample(policy, params, batch.prompts, keys, rule),
        params,
        keys,
    )


# Layers in a loop: rollouts, caches and the gradient are those of one layer after another.

IN_LOOP = Coconut().on(dataclasses.replace(tiny.CONFIG, scan_layers=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "noise"),
    [pytest.param("rl", "thought", marks=pytest.mark.slow), pytest.param("rl", "all", marks=pytest.mark.slow),
     ("cold_start", "all"), pytest.param("imitate", "all", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_step_is_the_same(monkeypatch, stage, noise):
    found = []
    for reasoner in (tiny.REASONER, IN_LOOP):
        policy = tiny.policy_of(
            dataclasses.replace(small_steps.ROLLOUT, dropout_where=noise), reasoner
        )
        monkeypatch.setattr(small_steps, "POLICY", policy)
        monkeypatch.setattr(
            small_steps,
            "IMITATION",
            policy.with_config(max_latents=3, dropout_rate=0.2),
        )
        make, trained = small_steps.STAGES[stage]
        step, arguments = small_steps.step_of(
            make(), small_params(), trained, batch_of(stage), stage
        )
        of_all = (
            f"f32[{tiny.CONFIG.n_layer},{tiny.CONFIG.n_embd},{4 * tiny.CONFIG.n_embd}]"
        )
        assert (of_all in str(jax.make_jaxpr(step)(*arguments))) == (
            reasoner is IN_LOOP
        )
        state, metrics = step.lower(*arguments).compile(compiler_options=tiny.FAST)(
            *arguments
        )
        found.append((state.opt_state[0].trace, metrics))
    assert (
        small_steps.difference(found[0][0], jax.tree.map(lambda x: 0 * x, found[0][0]))
        > 0.01
    )
    tiny.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_of_a_layer_a_backward_pass_keeps_what_is_named():
    """Of the feed-forward layer the first product, of attention the projections: no activation behind them."""
    rows = 3
    length = 5
    width = tiny.CONFIG.n_embd

    def loss(params, x_BLD):
        at_BL = jnp.tile(jnp.arange(length), (rows, 1))
        seen_BL = jnp.ones((rows, length), bool)
        return IN_LOOP.forward(params, x_BLD, at_BL, seen_BL)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(
        small_params()["reasoner"], jnp.ones((rows, length, width))
    )
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    kept = [
        x.aval.shape[-1]
        for x in forward.outvars
        if x.aval.shape[:3] == (tiny.CONFIG.n_layer, rows, length)
    ]
    assert sorted(kept) == sorted([width, 3 * width, width, 4 * width])


pytestmark = pytest.mark.usefixtures("cpu_devices")
ROWS_OF_BATCH = 4


def _loss(params, batch, key):
    """Its gradient is the batch's, so many times as it has rows in the mean."""
    del key
    parts = jax.tree.map(
        lambda p, g: ROWS_OF_BATCH * jnp.sum(p * g), params["reasoner"], batch
    )
    loss = sum(jax.tree.leaves(parts))
    return loss, {"loss": (loss, jnp.float32(ROWS_OF_BATCH))}


def _step(config, params, loss=_loss, batch=None, **how):
    optimizer = make_optimizer(config)
    layout = layout_of()
    state = init_state(
        {"reasoner": params}, ("reasoner",), optimizer, jax.random.key(0), layout
    )
    step = make_train_step(loss, optimizer, ("reasoner",), layout, "rl", **how)
    return state, step.lower(state, params if batch is None else batch).compile()


def _arrays(seed, size):
    rng = np.random.default_rng(seed)
    return {
        "a": rng.normal(size=(size, size)).astype(np.float32),
        "b": rng.normal(size=size).astype(np.float32),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_steps_are_optax_s_and_a_broken_one_changes_nothing(name):
    config = OptimizerConfig(name, learning_rate=0.1, weight_decay=0.1, clip_norm=3.0)
    params = _arrays(0, 8)
    state, step = _step(config, params)
    plain = make_optimizer(
        OptimizerConfig(name, learning_rate=0.1, weight_decay=0.1, clip_norm=None)
    )
    oracle = optax.chain(optax.clip_by_global_norm(3.0), plain)
    expected = params
    expected_state = oracle.init(params)
    for number, scale in enumerate((1.0, 1e-3, np.nan, 2.0, np.inf)):
        gradient = jax.tree.map(
            lambda g, scale=scale: g * np.float32(scale), _arrays(1 + number, 8)
        )
        state, metrics = step(state, gradient)
        assert int(metrics["skipped_in_a_row"]) == (not np.isfinite(scale))
        if np.isfinite(scale):
            changes, expected_state = oracle.update(gradient, expected_state, expected)
            expected = optax.apply_updates(expected, changes)
        assert_close(state.params["reasoner"], expected, rtol=2e-5, atol=1e-6)
        assert_close(state.opt_state[1], expected_state[1], rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_learning_rate_is_that_of_the_step(name):
    """A warm-up of 4 steps; one that changed nothing is not one of them."""
    config = OptimizerConfig(name, learning_rate=0.1, warmup_steps=4)
    state, step = _step(config, _arrays(0, 8), schedule=make_schedule(config))
    rates = []
    for scale in (1.0, np.nan, 1.0, 1.0):
        state, metrics = step(
            state,
            jax.tree.map(lambda g, scale=scale: g * np.float32(scale), _arrays(1, 8)),
        )
        rates.append(float(metrics["learning_rate"]))
    assert rates == pytest.approx([0.0, 0.025, 0.025, 0.05])


def test_a_gradient_that_is_not_finite_changes_nothing_whatever_the_loss():
    def loss(params, batch, key):
        return _loss(params, batch, key)[0], {
            "loss": (jnp.float32(0), jnp.float32(ROWS_OF_BATCH))
        }

    params = _arrays(0, 8)
    state, step = _step(OptimizerConfig("adamw", learning_rate=0.1), params, loss)
    broken = _arrays(1, 8)
    broken["a"][3, 4] = np.nan
    state, metrics = step(state, broken)
    assert (float(metrics["loss"]), int(metrics["skipped_steps"])) == (0, 1)
    jax.tree.map(np.testing.assert_array_equal, state.params["reasoner"], params)
    assert not any(np.any(x) for x in jax.tree.leaves(state.opt_state))


def test_a_gradient_is_the_mean_over_the_rows_that_count():
    """Of one row it is that row's, and of none it is nothing; so is the loss."""

    def loss(params, batch, key):
        total = batch["rows"][0] * jnp.sum(params["reasoner"]["a"] * batch["g"])
        return total, {"loss": (total, batch["rows"][0])}

    params = {"a": _arrays(0, 8)["a"]}
    given = _arrays(1, 8)["a"]
    batch = {"g": given, "rows": np.ones(1, np.float32)}
    _, step = _step(
        OptimizerConfig("adamw", learning_rate=0.1, warmup_steps=0), params, loss, batch
    )
    for rows in (0, 1, 2, 5):
        state, _ = _step(
            OptimizerConfig("adamw", learning_rate=0.1, warmup_steps=0),
            params,
            loss,
            batch,
        )
        state, metrics = step(state, batch | {"rows": np.full(1, rows, np.float32)})
        assert metrics["grad_norm"] == pytest.approx(
            np.linalg.norm(given) * (rows > 0), rel=1e-5
        )
        assert metrics["loss"] == pytest.approx(
            (params["a"] * given).sum() * (rows > 0), rel=1e-5
        )
        assert metrics["skipped_steps"] == 0


@pytest.mark.parametrize("broken", [0, 1])
def test_a_step_of_two_updates_of_which_one_is_broken_is_counted_and_takes_the_other(
    broken,
):
    bad = jax.random.fold_in(noise.stream_key(jax.random.key(0), "rl", 0), broken)

    def loss(params, batch, key):
        is_bad = jnp.all(jax.random.key_data(key) == jax.random.key_data(bad))
        total, metrics = _loss(params, batch, key)
        total = jnp.where(is_bad, jnp.nan, total)
        return total, metrics | {"loss": (total, metrics["loss"][1])}

    config = OptimizerConfig("adamw", learning_rate=0.1)
    params = _arrays(0, 8)
    gradient = _arrays(1, 8)
    state, step = _step(config, params, loss, updates=2)
    state, metrics = step(state, gradient)
    assert (int(metrics["skipped_steps"]), int(metrics["skipped_in_a_row"])) == (1, 1)
    once, step = _step(config, params)
    once, _ = step(once, gradient)
    assert_close(state.params, once.params, rtol=1e-6)


def test_moments_are_made_in_place():
    """XLA:CPU made them in fresh memory, twice the parameters', and copied them over the old ones."""
    params = _arrays(0, 512)
    _, step = _step(OptimizerConfig("adamw", learning_rate=0.1), params)
    assert step.memory_analysis().temp_size_in_bytes < params["a"].nbytes / 4

"""Properties of all stages' steps: no random key is used twice, as jax's own checker counts; layers may be a loop."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import small_steps
import tiny
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.architectures.colar import Colar
from slpo_jax.policy.rollout import sample
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.rl_loss import make_loss
from small_steps import POLICY, ROLLOUT, STAGES, batch_of, prompted_batch, small_params
from tiny import CONFIG, END, REASONER, policy_of

POLICY = dataclasses.replace(POLICY, capacities=((1.0, 1.0),))  # each is traced, and uses the same keys
ADDITIVE = policy_of(dataclasses.replace(ROLLOUT, latent_policy_noise=True), REASONER, "additive")
GAUSSIAN = Colar(12, 0.4, gaussian=True).on(CONFIG)
COLAR = policy_of(
    dataclasses.replace(ROLLOUT, latent_policy_noise=True, stopping="length"), GAUSSIAN, "colar", end_id=END
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


@pytest.mark.parametrize("name", EVERY)
def test_a_step_of_reinforcement_learning(name):
    policy, objective = EVERY[name]
    loss = make_loss(policy, objective, small_steps.rigged_reward, small_steps.GROUP)
    _traced(jax.grad(loss, has_aux=True), small_params(), prompted_batch(), jax.random.key(0))


@pytest.mark.parametrize("stage", ["imitate", "cold_start"])
def test_a_step_of_the_other_stages(stage):
    _traced(jax.grad(STAGES[stage][0](), has_aux=True), small_params(), batch_of(stage), jax.random.key(0))


@pytest.mark.parametrize("policy", [POLICY, ADDITIVE, COLAR], ids=["latent", "additive", "colar"])
def test_a_rollout(policy):
    batch = prompted_batch()
    keys = jax.random.split(jax.random.key(0), len(batch.index))
    params = small_params() | {"reasoner": jax.eval_shape(policy.reasoner.init, keys[0])}
    rule = ROLLOUT.max_latents if policy is COLAR else None
    _traced(lambda params, keys: sample(policy, params, batch.prompts, keys, rule), params, keys)


# Layers in a loop: rollouts, caches and the gradient are those of one layer after another.

IN_LOOP = Coconut().on(dataclasses.replace(tiny.CONFIG, scan_layers=True))


@pytest.mark.parametrize(
    ("stage", "noise"),
    [pytest.param("rl", "thought", marks=pytest.mark.slow), pytest.param("rl", "all", marks=pytest.mark.slow),
     ("cold_start", "all"), pytest.param("imitate", "all", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_step_is_the_same(monkeypatch, stage, noise):
    found = []
    for reasoner in (tiny.REASONER, IN_LOOP):
        policy = tiny.policy_of(dataclasses.replace(small_steps.ROLLOUT, dropout_where=noise), reasoner)
        monkeypatch.setattr(small_steps, "POLICY", policy)
        monkeypatch.setattr(small_steps, "IMITATION", policy.having(max_latents=3, dropout_rate=0.2))
        make, trained = small_steps.STAGES[stage]
        step, arguments = small_steps.step_of(make(), small_params(), trained, batch_of(stage), stage)
        of_all = f"f32[{tiny.CONFIG.n_layer},{tiny.CONFIG.n_embd},{4 * tiny.CONFIG.n_embd}]"
        assert (of_all in str(jax.make_jaxpr(step)(*arguments))) == (reasoner is IN_LOOP)
        state, metrics = step.lower(*arguments).compile(compiler_options=tiny.FAST)(*arguments)
        found.append((state.opt_state[0].trace, metrics))
    assert small_steps.difference(found[0][0], jax.tree.map(lambda x: 0 * x, found[0][0])) > 0.01
    tiny.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_of_a_layer_a_backward_pass_keeps_what_is_named():
    """Of the feed-forward layer the first product, of attention the projections: no activation behind them."""
    rows, length, width = 3, 5, tiny.CONFIG.n_embd

    def loss(params, x_BLD):
        at_BL, seen_BL = jnp.tile(jnp.arange(length), (rows, 1)), jnp.ones((rows, length), bool)
        return IN_LOOP.forward(params, x_BLD, at_BL, seen_BL)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(small_params()["reasoner"], jnp.ones((rows, length, width)))
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    kept = [x.aval.shape[-1] for x in forward.outvars if x.aval.shape[:3] == (tiny.CONFIG.n_layer, rows, length)]
    assert sorted(kept) == sorted([width, 3 * width, width, 4 * width])

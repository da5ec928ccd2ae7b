"""Steps of a model whose layers are a loop: rollouts, caches and the gradient are those of one layer after another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_steps
import tiny
from small_steps import OPTIMIZER, batch_of, difference, small_params

from slpo_jax.checkpoints.architectures.coconut import Coconut
from slpo_jax.io.mesh import device_mesh, shard_rows
from slpo_jax.training.sharding import Layout
from slpo_jax.training.state import init_state, make_train_step

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
        layout = Layout(device_mesh(jax.devices("cpu")[:1]))
        step = make_train_step(make(), OPTIMIZER, trained, layout, stage)
        state = init_state(small_params(), trained, OPTIMIZER, jax.random.key(0), layout)
        batch = shard_rows(batch_of(stage), layout.mesh)
        of_all = f"f32[{tiny.CONFIG.n_layer},{tiny.CONFIG.n_embd},{4 * tiny.CONFIG.n_embd}]"
        assert (of_all in str(jax.make_jaxpr(step)(state, batch))) == (reasoner is IN_LOOP)
        state, metrics = step.lower(state, batch).compile(compiler_options=tiny.FAST)(state, batch)
        found.append((state.opt_state[0].trace, metrics))
    assert difference(found[0][0], jax.tree.map(lambda x: 0 * x, found[0][0])) > 0.01
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


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

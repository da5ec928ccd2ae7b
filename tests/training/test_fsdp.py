"""Parameters in parts: cut as the rules say, the same steps, and no loop that waits for other devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.measure.compiled import collectives
from slpo_jax.errors import UserError
from slpo_jax.io.mesh import device_mesh, shard_rows
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer, scaled
from slpo_jax.training.sharding import Layout
from slpo_jax.training.state import init_optimizer, init_state, make_train_step

pytestmark = pytest.mark.usefixtures("cpu_devices")
SHAPES = {"reasoner": {"wte": {"embedding": (12, 8)}, "h_0": {"kernel": (4, 6), "bias": (8,)}}, "gate": {"odd": (3, 5)}}


def _layout(fsdp: int) -> Layout:
    return Layout(device_mesh(jax.devices("cpu")[:4], fsdp))


def _zeros(shapes):
    return jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize(
    ("fsdp", "embedding", "kernel"),
    [(1, (), ()), (2, ("fsdp",), (None, "fsdp")), (4, ("fsdp",), ("fsdp",))],  # 6 has no 4 equal parts
)
def test_the_longest_axis_with_equal_parts_is_cut(fsdp, embedding, kernel):
    specs = _layout(fsdp).specs(_zeros(SHAPES))
    reasoner = specs["reasoner"]
    found = [reasoner["wte"]["embedding"], reasoner["h_0"]["kernel"], reasoner["h_0"]["bias"]]
    for spec, expected in zip(found, (embedding, kernel, ()), strict=True):
        trimmed = [*spec]
        while trimmed and trimmed[-1] is None:
            trimmed.pop()
        expected = [*expected]
        while expected and expected[-1] is None:
            expected.pop()
        assert trimmed == expected
    assert specs["gate"]["odd"] == PartitionSpec()


def test_parts_must_divide_the_devices():
    with pytest.raises(UserError, match=r"config\.sharding\.fsdp: 3 does not divide the 4 devices"):
        _layout(3)


def _linear_loss(params, batch, _key):
    x_BD, y_BE = batch
    loss = ((x_BD @ params["reasoner"]["w"] * params["gate"]["scale"][None] - y_BE) ** 2).sum()
    return loss, {"loss": (loss, jnp.float32(x_BD.shape[0]))}


@pytest.mark.parametrize("name", ["adafactor", "adamw"])
@pytest.mark.parametrize("fsdp", [2, 4])
def test_optimizers_do_not_know_the_parts(name, fsdp):
    """Norm, factored moments and weight decay are those of the whole arrays; the state stays cut from step to step."""
    rng, parts = np.random.default_rng(0), {}
    batch = rng.normal(size=(8, 16)).astype(np.float32), rng.normal(size=(8, 4)).astype(np.float32)
    first = {"reasoner": {"w": rng.normal(size=(16, 4)).astype(np.float32)}, "gate": {"scale": np.ones(4, np.float32)}}
    optimizer = make_optimizer(OptimizerConfig(name, 0.05, weight_decay=0.1, clip_norm=0.5))
    if fsdp == 2:
        optimizer = scaled(optimizer, {"reasoner": 1.0, "gate": {"scale": 0.5}})
    trained = ("reasoner", "gate")
    for each in (1, fsdp):
        layout = _layout(each)
        state = init_state(first, trained, optimizer, jax.random.key(0), layout)
        step = make_train_step(_linear_loss, optimizer, trained, layout, "imitate")
        for _ in range(3):
            state, metrics = step(state, shard_rows(batch, layout.mesh))
        parts[each] = jax.tree.map(np.asarray, (state.params, state.opt_state)), metrics
    w = state.params["reasoner"]["w"]
    assert w.sharding.shard_shape(w.shape) == (16 // fsdp, 4)
    alike = [x for x in jax.tree.leaves(state.opt_state) if x.shape == w.shape]
    assert len(alike) == (2 if name == "adamw" else 0)
    assert all(x.sharding.shard_shape(x.shape) == (16 // fsdp, 4) for x in alike)
    for ours, theirs in zip(*(jax.tree.leaves(parts[each][0]) for each in (fsdp, 1)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert float(parts[fsdp][1]["grad_norm"]) == pytest.approx(float(parts[1][1]["grad_norm"]), rel=1e-5)
    assert np.abs(parts[1][0][0]["reasoner"]["w"] - first["reasoner"]["w"]).max() > 0.05


def test_a_fresh_optimizer_is_cut_too():
    layout, params = _layout(4), {"reasoner": {"w": jnp.ones((16, 4))}}
    state = init_optimizer(make_optimizer(OptimizerConfig("adamw", 0.1)), params, layout)
    (first, second) = (x for x in jax.tree.leaves(state) if x.shape == (16, 4))
    assert first.sharding.shard_shape((16, 4)) == second.sharding.shard_shape((16, 4)) == (4, 4)


def test_a_collective_in_a_loop_is_seen():
    mesh = device_mesh(jax.devices("cpu")[:4], 2)

    def looped(x):
        return jax.lax.fori_loop(0, jax.lax.axis_index("data") + 3, lambda _, y: jax.lax.psum(y, "fsdp") * 0.5, x)

    def once(x):
        return jax.lax.psum(x, "fsdp")

    for function, in_loop in ((looped, True), (once, False)):
        spec = PartitionSpec("fsdp")
        mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        found = collectives(jax.jit(mapped).lower(jnp.ones((2, 6))).compile())
        assert [(each.kind, each.bytes, each.in_loop) for each in found] == [("all-reduce", 24, in_loop)]

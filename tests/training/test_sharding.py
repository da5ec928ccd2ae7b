"""Any number of devices, parts and micro-batches, and any order of rows, gives the same step; no loop waits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import small_steps
from benchmarks.measure.compiled import collectives
from slpo_jax.errors import UserError
from slpo_jax.policy import noise
from slpo_jax.runtime.mesh import device_mesh, replicate
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer, scale_rates
from small_steps import (
    batch_of,
    difference,
    layout_of,
    small_params,
    step_of,
    take_steps,
)
from tiny import assert_close

pytestmark = pytest.mark.usefixtures("cpu_devices")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "devices", "micro_batches", "fsdp"),
    [("rl", 2, 2, 2), ("imitate", 4, 1, 2), ("cold_start", 2, 2, 1)],
)
def test_steps_do_not_know_devices_and_micro_batches(
    stage, devices, micro_batches, fsdp
):
    """Nor parameters in parts, on 1 x 2 devices and 2 x 2; 1 x 4 take the steps of 4 x 1 in test_hosts.py."""
    batches = [batch_of(stage)] * 3
    whole = take_steps(stage, batches)
    cut = take_steps(stage, batches, devices, micro_batches, fsdp)
    assert difference(whole.params, small_params()) > 0.05
    for ours, theirs in zip(cut.metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=5e-4, abs=1e-5)
    assert difference(cut.params, whole.params) < 1e-4
    scale = max(float(np.abs(g).max()) for g in jax.tree.leaves(whole.gradient))
    assert difference(cut.gradient, whole.gradient) < 1e-3 * scale


@pytest.mark.slow
def test_loops_wait_for_nobody():
    """Parameters are gathered before micro-batches' rollouts, and gradients scattered after their backward passes."""
    layout, program = small_steps.sharded_step("rl", 2, 2, 2)
    found = collectives(program)
    assert {each.kind for each in found} >= {"all-gather", "all-reduce"}
    assert not [each for each in found if each.in_loop]
    specs = layout.specs(small_params())
    sizes = zip(jax.tree.leaves(small_params()), jax.tree.leaves(specs), strict=True)
    cut = [x.size * 4 for x, spec in sizes if "fsdp" in spec]
    assert (
        sum(each.bytes for each in found if each.kind == "all-gather")
        >= sum(cut)
        > 1000
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rl", "imitate", "cold_start"])
def test_steps_do_not_know_the_order_of_rows(stage):
    batch = batch_of(stage)
    order = np.array([2, 0, 3, 1])
    whole = take_steps(stage, [batch])
    shuffled = take_steps(stage, [jax.tree.map(lambda x: x[order], batch)])
    assert shuffled.metrics[0] == pytest.approx(whole.metrics[0], rel=1e-4, abs=1e-6)
    assert difference(shuffled.params, whole.params) < 1e-5
    # Noise follows the example: were these other examples, the same rows would fare otherwise.
    others = take_steps(
        stage,
        [
            batch
            if stage == "imitate"
            else small_steps.prompted_batch(index=(6, 12, 3, 31))
        ],
    )
    if stage != "imitate":
        assert others.metrics[0] != pytest.approx(whole.metrics[0], rel=1e-3)


def _toy_loss(params, batch, key):
    """A loss with noise by example and a count that differs between rows."""
    x_BD, weight_B, index_B = batch
    noise_B = jax.vmap(jax.random.normal)(noise.row_keys(key, index_B))
    per_row_B = weight_B * (x_BD @ params["gate"]["w"] + noise_B) ** 2
    rows = jnp.float32(len(noise_B))
    return per_row_B.sum(), {
        "loss": (per_row_B.sum(), weight_B.sum()),
        "noise": (noise_B.sum(), rows),
    }


def _toy_params():
    return {"reasoner": {"w": jnp.ones(2)}, "gate": {"w": jnp.array([0.5, -1.0, 2.0])}}


@pytest.fixture(scope="module")
def toy_batch():
    rng = np.random.default_rng(0)
    weights = np.array([1, 0, 3, 2, 5, 1, 0, 4], np.float32)
    return (
        rng.normal(size=(8, 3)).astype(np.float32),
        weights,
        np.arange(8, dtype=np.int32) * 3,
    )


@pytest.mark.parametrize(
    ("devices", "micro_batches"), [(1, 1), (1, 8), (2, 4), (4, 1), (4, 2)]
)
def test_step_by_hand(toy_batch, devices, micro_batches, caplog):
    """Gradient of the weighted mean over all rows, one optimizer step, and one program for all steps."""
    optimizer = optax.adam(0.1)
    first = _toy_params()
    how = (
        ("gate",),
        toy_batch,
        "cold_start",
        optimizer,
        layout_of(devices),
        micro_batches,
    )
    step, (state, rows) = step_of(_toy_loss, first, *how)
    x, weights, index = toy_batch
    w = first["gate"]["w"]
    opt_state = optimizer.init(first["gate"]["w"])
    for number in range(3):
        with jax.log_compiles():
            state, metrics = step(state, rows)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), number)
        draws = np.array([jax.random.normal(jax.random.fold_in(key, i)) for i in index])
        residual = x @ np.asarray(w) + draws
        gradient = 2 * (weights * residual) @ x / weights.sum()
        assert metrics["loss"] == pytest.approx(
            (weights * residual**2).sum() / weights.sum(), rel=1e-5
        )
        assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
        assert metrics["noise"] == pytest.approx(draws.mean(), abs=1e-5)
        update, opt_state = optimizer.update(jnp.asarray(gradient), opt_state)
        w = w + update
        np.testing.assert_allclose(state.params["gate"]["w"], w, rtol=1e-4)
        np.testing.assert_array_equal(state.params["reasoner"]["w"], np.ones(2))
        assert int(state.step) == number + 1
    assert (
        sum(
            "Compiling jit(train_step)" in record.getMessage()
            for record in caplog.records
        )
        == 1
    )


@pytest.mark.parametrize(("devices", "fsdp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("placed", [False, True])
def test_init_state_leaves_the_caller_its_params(toy_batch, devices, fsdp, placed):
    """Steps give away their state's buffers, of which none is the caller's, who may have placed them already."""
    layout = layout_of(devices, fsdp)
    first = replicate(_toy_params(), layout.mesh) if placed else _toy_params()
    step, (state, rows) = step_of(
        _toy_loss, first, ("gate",), toy_batch, "cold_start", optax.adam(0.1), layout
    )
    for _ in range(2):
        state, _ = step(state, rows)
    assert np.all(state.params["gate"]["w"] != first["gate"]["w"])
    assert first["gate"]["w"].tolist() == [0.5, -1.0, 2.0]
    assert first["reasoner"]["w"].tolist() == [1.0, 1.0]


# Parameters in parts.

SHAPES = {"embedding": (12, 8), "kernel": (4, 6), "bias": (8,), "odd": (3, 5)}


@pytest.mark.parametrize(
    ("fsdp", "embedding", "kernel"),
    [
        (1, (12, 8), (4, 6)),
        (2, (6, 8), (4, 3)),
        (4, (3, 8), (1, 6)),
    ],  # 6 has no 4 equal parts
)
def test_the_longest_axis_with_equal_parts_is_cut(fsdp, embedding, kernel):
    layout = layout_of(4, fsdp)
    specs = layout.specs({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
    cut = {
        name: NamedSharding(layout.mesh, specs[name]).shard_shape(shape)
        for name, shape in SHAPES.items()
    }
    assert cut == SHAPES | {"embedding": embedding, "kernel": kernel}


def test_parts_must_divide_the_devices():
    with pytest.raises(UserError, match=r"config\.sharding\.fsdp: 3 .* 4 "):
        layout_of(4, 3)


def _linear_loss(params, batch, _key):
    x_BD, y_BE = batch
    loss = (
        (x_BD @ params["reasoner"]["w"] * params["gate"]["scale"][None] - y_BE) ** 2
    ).sum()
    return loss, {"loss": (loss, jnp.float32(x_BD.shape[0]))}


@pytest.mark.parametrize("name", ["adafactor", "adamw"])
@pytest.mark.parametrize("fsdp", [2, 4])
def test_optimizers_do_not_know_the_parts(name, fsdp):
    """Norm, factored moments and weight decay are those of the whole arrays; the state stays cut from step to step."""
    rng = np.random.default_rng(0)
    parts = {}
    batch = (
        rng.normal(size=(8, 16)).astype(np.float32),
        rng.normal(size=(8, 4)).astype(np.float32),
    )
    first = {
        "reasoner": {"w": rng.normal(size=(16, 4)).astype(np.float32)},
        "gate": {"scale": np.ones(4, np.float32)},
    }
    optimizer = make_optimizer(
        OptimizerConfig(name, 0.05, weight_decay=0.1, clip_norm=0.5)
    )
    if fsdp == 2:
        optimizer = scale_rates(optimizer, {"reasoner": 1.0, "gate": {"scale": 0.5}})
    trained = ("reasoner", "gate")
    for each in (1, fsdp):
        step, (state, rows) = step_of(
            _linear_loss,
            first,
            trained,
            batch,
            "imitate",
            optimizer,
            layout_of(4, each),
        )
        for _ in range(3):
            state, metrics = step(state, rows)
        parts[each] = jax.tree.map(np.asarray, (state.params, state.opt_state)), metrics
    w = state.params["reasoner"]["w"]
    assert w.sharding.shard_shape(w.shape) == (16 // fsdp, 4)
    alike = [x for x in jax.tree.leaves(state.opt_state) if x.shape == w.shape]
    assert len(alike) == (2 if name == "adamw" else 0)
    assert all(x.sharding.shard_shape(x.shape) == (16 // fsdp, 4) for x in alike)
    assert_close(*(parts[each][0] for each in (fsdp, 1)), rtol=1e-5, atol=1e-6)
    assert float(parts[fsdp][1]["grad_norm"]) == pytest.approx(
        float(parts[1][1]["grad_norm"]), rel=1e-5
    )
    assert np.abs(parts[1][0][0]["reasoner"]["w"] - first["reasoner"]["w"]).max() > 0.05


def test_a_collective_in_a_loop_is_seen():
    mesh = device_mesh(jax.devices("cpu")[:4], 2)

    def looped(x):
        return jax.lax.fori_loop(
            0,
            jax.lax.axis_index("data") + 3,
            lambda _, y: jax.lax.psum(y, "fsdp") * 0.5,
            x,
        )

    def once(x):
        return jax.lax.psum(x, "fsdp")

    for function, in_loop in ((looped, True), (once, False)):
        spec = PartitionSpec("fsdp")
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        found = collectives(jax.jit(mapped).lower(jnp.ones((2, 6))).compile())
        assert [(each.kind, each.bytes, each.in_loop) for each in found] == [
            ("all-reduce", 24, in_loop)
        ]

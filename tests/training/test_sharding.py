"""Any number of devices and micro-batches, and any order of rows, gives the same step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_steps import (
    BATCH,
    GROUP,
    POLICY,
    Taken,
    batch_of,
    difference,
    prompted_batch,
    rigged_reward,
    sharded_step,
    small_params,
    take_steps,
)
from tiny import FAST

from benchmarks.measure.compiled import collectives
from slpo_jax.io.mesh import EVERYWHERE, ROWS, device_mesh, replicate, shard_rows
from slpo_jax.policy import noise
from slpo_jax.training.rl import roll_out
from slpo_jax.training.sharding import Layout, total
from slpo_jax.training.state import init_state, make_train_step

pytestmark = pytest.mark.usefixtures("cpu_devices")
STEP_KEY = noise.stream_key(jax.random.key(0), "rl", 0)


def _sampled(devices: int, batch):
    """Trajectories and rewards of the SLPO step under shard_map, as numpy."""
    mesh = device_mesh(jax.devices("cpu")[:devices])
    mapped = jax.shard_map(
        lambda params, batch: roll_out(POLICY, params, batch, rigged_reward, GROUP, STEP_KEY),
        mesh=mesh, in_specs=(EVERYWHERE, ROWS), out_specs=ROWS, check_vma=False,
    )  # fmt: skip
    trajectories, rewards = jax.jit(mapped, compiler_options=FAST)(small_params(), shard_rows(batch, mesh))
    trajectories = trajectories.replace(keys=jax.random.key_data(trajectories.keys))
    return jax.tree.map(np.array, (trajectories, rewards))


@pytest.fixture(scope="module")
def sampled():
    return _sampled(1, prompted_batch())


def test_the_batch_is_worth_sharding(sampled):
    """Lengths, answers and rewards differ between rows, so that a mix-up would show."""
    trajectories, rewards = sampled
    assert len(np.unique(trajectories.lengths)) >= 4
    assert len(np.unique(trajectories.tokens, axis=0)) >= BATCH * GROUP - 2
    assert ((rewards.min(axis=1) < rewards.max(axis=1)).sum()) >= 2


def test_trajectories_and_rewards_do_not_know_the_devices(sampled):
    again = _sampled(4, prompted_batch())
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(sampled), strict=True):
        if np.issubdtype(ours.dtype, np.floating) and ours.ndim == 3:
            # Latents: products of fewer rows may round another way, and each latent is made from those before.
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
        else:
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "devices", "micro_batches", "fsdp"), [("rl", 2, 2, 2), ("imitate", 4, 1, 2), ("cold_start", 2, 2, 1)]
)
def test_steps_do_not_know_devices_and_micro_batches(stage, devices, micro_batches, fsdp):
    """Nor parameters in parts, on 1 x 2 devices and 2 x 2; 1 x 4 take the steps of 4 x 1 in test_hosts.py."""
    batches = [batch_of(stage)] * 3
    whole, cut = take_steps(stage, batches), take_steps(stage, batches, devices, micro_batches, fsdp)
    assert difference(whole.params, small_params()) > 0.05
    _same_steps(cut, whole)


def _same_steps(cut: Taken, whole: Taken) -> None:
    for ours, theirs in zip(cut.metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=5e-4, abs=1e-5)
    assert difference(cut.params, whole.params) < 1e-4
    scale = max(float(np.abs(g).max()) for g in jax.tree.leaves(whole.gradient))
    assert difference(cut.gradient, whole.gradient) < 1e-3 * scale


@pytest.mark.slow
def test_loops_wait_for_nobody():
    """Parameters are gathered before micro-batches' rollouts, and gradients scattered after their backward passes."""
    layout, program = sharded_step("rl", 2, 2, 2)
    found = collectives(program)
    assert {each.kind for each in found} >= {"all-gather", "all-reduce"}
    assert not [each for each in found if each.in_loop]
    specs = layout.specs(small_params())
    sizes = zip(jax.tree.leaves(small_params()), jax.tree.leaves(specs), strict=True)
    cut = [x.size * 4 for x, spec in sizes if "fsdp" in spec]
    assert sum(each.bytes for each in found if each.kind == "all-gather") >= sum(cut) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rl", "imitate", "cold_start"])
def test_steps_do_not_know_the_order_of_rows(stage):
    batch, order = batch_of(stage), np.array([2, 0, 3, 1])
    whole = take_steps(stage, [batch])
    shuffled = take_steps(stage, [jax.tree.map(lambda x: x[order], batch)])
    assert shuffled.metrics[0] == pytest.approx(whole.metrics[0], rel=1e-4, abs=1e-6)
    assert difference(shuffled.params, whole.params) < 1e-5
    # Noise follows the example: were these other examples, the same rows would fare otherwise.
    others = take_steps(stage, [batch if stage == "imitate" else prompted_batch(index=(6, 12, 3, 31))])
    if stage != "imitate":
        assert others.metrics[0] != pytest.approx(whole.metrics[0], rel=1e-3)


def _toy_loss(params, batch, key):
    """A loss with noise by example and a count that differs between rows."""
    x_BD, weight_B, index_B = batch
    noise_B = jax.vmap(jax.random.normal)(noise.row_keys(key, index_B))
    per_row_B = weight_B * (x_BD @ params["gate"]["w"] + noise_B) ** 2
    rows = jnp.float32(len(noise_B))
    return per_row_B.sum(), {"loss": (per_row_B.sum(), weight_B.sum()), "noise": (noise_B.sum(), rows)}


@pytest.fixture(scope="module")
def toy_batch():
    rng = np.random.default_rng(0)
    weights = np.array([1, 0, 3, 2, 5, 1, 0, 4], np.float32)
    return rng.normal(size=(8, 3)).astype(np.float32), weights, np.arange(8, dtype=np.int32) * 3


@pytest.mark.parametrize(("devices", "micro_batches"), [(1, 1), (1, 8), (2, 4), (4, 1), (4, 2)])
def test_step_by_hand(toy_batch, devices, micro_batches, caplog):
    """Gradient of the weighted mean over all rows, one optimizer step, and one program for all steps."""
    mesh, optimizer = device_mesh(jax.devices("cpu")[:devices]), optax.adam(0.1)
    first = {"reasoner": {"w": jnp.ones(2)}, "gate": {"w": jnp.array([0.5, -1.0, 2.0])}}
    state = init_state(first, ("gate",), optimizer, jax.random.key(4), Layout(mesh))
    step = make_train_step(_toy_loss, optimizer, ("gate",), Layout(mesh), "cold_start", micro_batches)
    x, weights, index = toy_batch
    w, opt_state = first["gate"]["w"], optimizer.init(first["gate"]["w"])
    for number in range(3):
        with jax.log_compiles():
            state, metrics = step(state, shard_rows(toy_batch, mesh))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(4), 1), number)
        draws = np.array([jax.random.normal(jax.random.fold_in(key, i)) for i in index])
        residual = x @ np.asarray(w) + draws
        gradient = 2 * (weights * residual) @ x / weights.sum()
        assert metrics["loss"] == pytest.approx((weights * residual**2).sum() / weights.sum(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
        assert metrics["noise"] == pytest.approx(draws.mean(), abs=1e-5)
        update, opt_state = optimizer.update(jnp.asarray(gradient), opt_state)
        w = w + update
        np.testing.assert_allclose(state.params["gate"]["w"], w, rtol=1e-4)
        np.testing.assert_array_equal(state.params["reasoner"]["w"], np.ones(2))
        assert int(state.step) == number + 1
    assert sum("Compiling jit(train_step)" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(("devices", "fsdp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("placed", [False, True])
def test_init_state_leaves_the_caller_its_params(toy_batch, devices, fsdp, placed):
    """Steps give away their state's buffers, of which none is the caller's, who may have placed them already."""
    layout = Layout(device_mesh(jax.devices("cpu")[:devices], fsdp))
    first = {"reasoner": {"w": jnp.ones(2)}, "gate": {"w": jnp.array([0.5, -1.0, 2.0])}}
    first = replicate(first, layout.mesh) if placed else first
    state = init_state(first, ("gate",), optax.adam(0.1), jax.random.key(4), layout)
    step = make_train_step(_toy_loss, optax.adam(0.1), ("gate",), layout, "cold_start")
    for _ in range(2):
        state, _ = step(state, shard_rows(toy_batch, layout.mesh))
    assert np.all(state.params["gate"]["w"] != first["gate"]["w"])
    assert first["gate"]["w"].tolist() == [0.5, -1.0, 2.0]
    assert first["reasoner"]["w"].tolist() == [1.0, 1.0]


def test_a_batch_without_weight_changes_nothing(toy_batch):
    mesh, optimizer = device_mesh(jax.devices("cpu")[:2]), optax.sgd(1.0)
    first = {"gate": {"w": jnp.array([0.5, -1.0, 2.0])}}
    state = init_state(first, ("gate",), optimizer, jax.random.key(4), Layout(mesh))
    step = make_train_step(_toy_loss, optimizer, ("gate",), Layout(mesh), "cold_start")
    state, metrics = step(state, shard_rows((toy_batch[0], 0 * toy_batch[1], toy_batch[2]), mesh))
    np.testing.assert_array_equal(state.params["gate"]["w"], first["gate"]["w"])
    assert (metrics["loss"], metrics["grad_norm"]) == (0, 0)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(toy_batch, spoilt):
    """Neither parameters nor the optimizer's state; its number and its noise are used up all the same."""
    mesh, optimizer = device_mesh(jax.devices("cpu")[:2]), optax.adam(0.1)
    first = {"gate": {"w": jnp.array([0.5, -1.0, 2.0])}}
    state = init_state(first, ("gate",), optimizer, jax.random.key(4), Layout(mesh))
    step = make_train_step(_toy_loss, optimizer, ("gate",), Layout(mesh), "cold_start", 2)
    bad = (np.where(np.arange(3) == 1, spoilt, toy_batch[0]).astype(np.float32), *toy_batch[1:])
    counts = []
    for batch in (toy_batch, bad, bad, toy_batch, bad):
        before = jax.tree.map(np.array, (state.params, state.opt_state))
        state, metrics = step(state, shard_rows(batch, mesh))
        counts.append((int(metrics["skipped_steps"]), int(metrics["skipped_in_a_row"])))
        same = jax.tree.map(
            lambda x, y: bool((x == y).all()), jax.tree.map(np.array, (state.params, state.opt_state)), before
        )
        assert all(jax.tree.leaves(same)) == (batch is bad)
    assert counts == [(0, 0), (1, 1), (2, 2), (2, 0), (3, 1)]
    assert int(state.step) == 5


def test_no_moment_is_copied():
    """Each array of the state is written where it was, which XLA does only where nothing reads it any more."""

    def loss(params, batch, key):
        out = jnp.sum(jnp.tanh(batch @ params["gate"]["w"]))
        return out, {"loss": (out, jnp.float32(len(batch)))}

    layout = Layout(device_mesh(jax.devices("cpu")[:1]))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    params = {"gate": {"w": jnp.ones((96, 48))}}
    state = init_state(params, ("gate",), optimizer, jax.random.key(4), layout)
    step = make_train_step(loss, optimizer, ("gate",), layout, "cold_start")
    program = step.lower(state, jnp.ones((4, 96))).compile().as_text()
    assert "f32[96,48]" in program
    assert not [line for line in program.splitlines() if re.search(r"= f32\[96,48\]\S* copy\(", line)]


@pytest.mark.parametrize("count", [1, 2])
def test_one_device_sums_nothing(count):
    mesh = device_mesh(jax.devices("cpu")[:count])
    summing = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=ROWS, out_specs=EVERYWHERE, check_vma=False))
    x_BD = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(summing(x_BD), x_BD.reshape(count, -1, 3).sum(0))
    assert ("all-reduce" in summing.lower(x_BD).compile().as_text()) == (count > 1)

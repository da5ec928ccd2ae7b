"""The state of a stage and its one train step: gradients summed over the `data` axis, then the optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from slpo_jax.policy import noise

Params = Any
Sums = dict[str, tuple[jax.Array, jax.Array]]
"""Metrics as (sum, count), so that neither micro-batches nor devices bias a mean."""
LossFn = Callable[[Params, Any, jax.Array], tuple[jax.Array, Sums]]
"""(params, batch, key of the step) -> (sum of the loss over the batch, metrics, among them "loss")."""

AXIS = "data"


@struct.dataclass
class TrainState:
    """Everything that a step reads and writes.

    Attributes:
        step: int32, steps taken in this stage; with the config's seed it is also the position in the input.
        params: {"reasoner": ..., "gate": ...}.
        opt_state: the optimizer's, of the trained part of params.
        key: the run's base key; a step folds its number in, so resuming needs no other generator state.
        skipped: int32 [2], steps that changed nothing because loss or gradient was not finite: all of them, and those
            in a row up to now.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    key: jax.Array
    skipped: jax.Array = struct.field(default_factory=lambda: jnp.zeros(2, jnp.int32))


def data_mesh(devices=None) -> Mesh:
    """A one-axis mesh over all devices, or the given ones."""
    devices = devices or jax.devices()
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Host arrays [B, ...], the same on every process, as arrays whose rows are spread over the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    def put(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def _summed_gradients(loss_fn: LossFn, mesh: Mesh, micro_batches: int):
    """(trained, frozen, batch, key) -> (gradients of the summed loss, metrics), over micro-batches and devices."""

    def local(trained, frozen, batch, key):
        def one(batch):
            grads, sums = jax.grad(lambda p: loss_fn({**frozen, **p}, batch, key), has_aux=True)(trained)
            return grads, sums

        if micro_batches == 1:
            out = one(batch)
        else:
            batches = jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), batch)
            shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], batches))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            out, _ = jax.lax.scan(lambda acc, b: (jax.tree.map(jnp.add, acc, one(b)), None), zeros, batches)
        return jax.lax.psum(out, AXIS)

    # check_vma would sum the gradients of replicated parameters by itself; here the one psum is in plain sight.
    rows, everywhere = PartitionSpec(AXIS), PartitionSpec()
    return jax.shard_map(
        local, mesh=mesh, in_specs=(everywhere, everywhere, rows, everywhere), out_specs=everywhere, check_vma=False
    )


def init_state(params: Params, trained: tuple[str, ...], optimizer, key: jax.Array, mesh: Mesh) -> TrainState:
    """The state before a stage's first step, on every device of the mesh."""
    opt_state = optimizer.init({name: params[name] for name in trained})
    # A copy of the key: a step donates its state's buffers, and the run's key is used again.
    key = jax.random.wrap_key_data(jnp.array(jax.random.key_data(key), copy=True), impl=jax.random.key_impl(key))
    return replicate(TrainState(jnp.int32(0), params, opt_state, key), mesh)


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    trained: tuple[str, ...],
    mesh: Mesh,
    stream: str,
    micro_batches: int = 1,
):
    """The jitted `(state, batch) -> (state, metrics)` of a stage; the state's buffers are donated.

    A step whose loss or gradient is not finite changes neither parameters nor the optimizer's state, and is counted in
    `TrainState.skipped`, which is among the metrics.

    Args:
        loss_fn: see `LossFn`; differentiated with respect to the trained part of params.
        trained: top-level names in params that the optimizer changes.
        mesh: from `data_mesh`; the batch's rows are sharded over it, all else is replicated.
        stream: the stage's name in `noise.STREAMS`.
        micro_batches: gradient accumulation inside the step; changes memory, not the result.
    """
    gradients = _summed_gradients(loss_fn, mesh, micro_batches)

    def train_step(state: TrainState, batch) -> tuple[TrainState, dict[str, jax.Array]]:
        key = noise.stream_key(state.key, stream, state.step)
        part = {name: state.params[name] for name in trained}
        frozen = {name: value for name, value in state.params.items() if name not in trained}
        grads, sums = gradients(part, frozen, batch, key)
        # A batch of which every row is left out of the mean has no gradient; it must not become NaN.
        grads = jax.tree.map(lambda g: g / jnp.maximum(sums["loss"][1], 1), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, part)
        metrics = {name: total / jnp.maximum(count, 1) for name, (total, count) in sums.items()}
        metrics["grad_norm"] = optax.tree.norm(grads)
        finite = jnp.isfinite(metrics["grad_norm"]) & jnp.isfinite(metrics["loss"])
        new, old = (optax.apply_updates(part, updates), opt_state), (part, state.opt_state)
        part, opt_state = jax.tree.map(lambda x, before: jnp.where(finite, x, before), new, old)
        skipped = jnp.where(finite, state.skipped * jnp.array([1, 0]), state.skipped + 1)
        metrics["skipped_steps"], metrics["skipped_in_a_row"] = skipped
        params = {**state.params, **part}
        changed = {"step": state.step + 1, "params": params, "opt_state": opt_state, "skipped": skipped}
        return dataclasses.replace(state, **changed), metrics

    return jax.jit(train_step, donate_argnums=0)

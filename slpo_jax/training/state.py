"""The state of a stage and its one train step: gradients summed over all devices, then the optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from slpo_jax.models import xla_cpu
from slpo_jax.models.parts import CARRIED
from slpo_jax.policy import noise
from slpo_jax.runtime.mesh import (
    EVERYWHERE,
    ROWS,
    Layout,
    all_gather_params,
    psum_all,
    psum_scatter_grads,
    replicate,
)
from slpo_jax.training.optimizer import steps_taken

Params = Any
Sums = dict[str, tuple[jax.Array, jax.Array]]
"""Metrics as (sum, count), so that neither micro-batches nor devices bias a mean."""
LossFn = Callable[[Params, Any, jax.Array], tuple[jax.Array, Sums]]
"""(params, batch, key of the step) -> (sum of the loss over the batch, metrics). The count of the metric "loss" is what
the gradient of the sum is divided by: the batch's rows, or for a mean over tokens their number."""


@struct.dataclass
class TrainState:
    """Everything that a step reads and writes.

    Attributes:
        step: int32, steps taken in this stage; with the config's seed it is also the position in the input.
        params: all parts.
        opt_state: the optimizer's, of the trained part of params.
        key: the run's base key; a step folds its number in, so resuming needs no other generator state.
        skipped: int32 [2], steps that changed nothing because loss or gradient was not finite: all of them, and
            the consecutive ones up to now.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    key: jax.Array
    skipped: jax.Array = struct.field(default_factory=lambda: jnp.zeros(2, jnp.int32))


def split_micro_batches(batch: Any, micro_batches: int) -> Any:
    """Cut arrays [B, ..] into [micro_batches, rows, ..].

    Some may have no entries, as references that no device reads.
    """

    def cut(x):
        rows, *shape = x.shape
        size = rows // micro_batches
        return x.reshape(micro_batches, size, *shape)

    return jax.tree.map(cut, batch)


def map_micro_batches(
    function: Callable[[Any], Any], batch: Any, micro_batches: int
) -> Any:
    """Run function(batch), rows to rows, on one micro-batch after the other."""
    if micro_batches == 1:
        return function(batch)
    batches = split_micro_batches(batch, micro_batches)
    results = jax.lax.map(function, batches)

    def join(x):
        _, size, *shape = x.shape
        rows = micro_batches * size
        return x.reshape(rows, *shape)

    return jax.tree.map(join, results)


def take_minibatch(batch: Any, number: jax.Array, minibatches: int) -> Any:
    """Take every `minibatches`-th prompt, from `number` on, of arrays [B, ..] and [B*G, ..].

    A prompt's G rows are consecutive. On however many devices the rows are, these are the same prompts, and as many on
    each.
    """
    # Arrays with one row a prompt are the shortest.
    rows_of_arrays = [x.shape[0] for x in jax.tree.leaves(batch)]
    prompts = min(rows_of_arrays)

    def cut(x):
        rows, *shape = x.shape
        group = rows // prompts
        places = prompts // minibatches
        by_place = x.reshape(places, minibatches, group, *shape)
        taken = jnp.take(by_place, number, axis=1)
        return taken.reshape(rows // minibatches, *shape)

    return jax.tree.map(cut, batch)


def _summed_gradients(loss_fn: LossFn, layout: Layout, micro_batches: int):
    """Make (trained, frozen, batch, key) -> (gradients of the summed loss, metrics), over micro-batches and devices."""

    def gradients(trained, frozen, batch, key):
        trained_specs = layout.specs(trained)
        specs = (trained_specs, layout.specs(frozen))

        @jax.jit  # micro-batches ask for its shapes first, and are not to trace it twice
        def of_batch(trained, frozen, batch, key):
            def loss_of(trained):
                return loss_fn({**frozen, **trained}, batch, key)

            return jax.grad(loss_of, has_aux=True)(trained)

        def local(trained, frozen, batch, key):
            trained, frozen = all_gather_params((trained, frozen), specs)

            def one(batch):
                return of_batch(trained, frozen, batch, key)

            def add(sums, batch):
                more = one(batch)
                sums = jax.tree.map(jnp.add, sums, more)
                return sums, None

            # Micro-batches one after the other, whose gradients and metrics are sums.
            if micro_batches == 1:
                grads, sums = one(batch)
            else:
                batches = split_micro_batches(batch, micro_batches)
                first = jax.tree.map(lambda x: x[0], batches)
                shapes = jax.eval_shape(one, first)
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
                (grads, sums), _ = jax.lax.scan(add, zeros, batches)

            # Then the sum over devices.
            grads = psum_scatter_grads(grads, trained_specs)
            return grads, psum_all(sums)

        # check_vma would sum the gradients of replicated parameters by itself; here the sums are in plain sight.
        everywhere = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(*specs, ROWS, EVERYWHERE),
            out_specs=(trained_specs, EVERYWHERE),
            check_vma=False,
        )
        return everywhere(trained, frozen, batch, key)

    return gradients


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    def choose(after, before):
        return jnp.where(condition, after, before)

    return jax.tree.map(choose, new, old)


def _update(
    optimizer, grads: Params, part: Params, opt_state: Any, finite: jax.Array
) -> tuple[Params, Any]:
    """Return (parameters, the optimizer's state) after an update; as they were where that is not finite."""

    def next_state(old):
        _, new = optimizer.update(grads, old, part)
        return new

    changes, new_state = optimizer.update(grads, opt_state, part)
    changed = optax.apply_updates(part, changes)
    new_part = _where(finite, changed, part)
    # On a CPU this updates the moments in place, for less memory.
    new_state = xla_cpu.recompute_after(
        new_part,
        finite,
        next_state,
        opt_state,
        new_state,
    )
    new_state = _where(finite, new_state, opt_state)
    return new_part, new_state


def init_state(
    params: Params, trained: tuple[str, ...], optimizer, key: jax.Array, layout: Layout
) -> TrainState:
    """Make the state before a stage's first step, laid out over the devices.

    Args:
        params: the same on every process; copied, so that no step gives the caller's away.
        trained: see `make_train_step`.
        key: the run's; copied as well.
    """
    trained_params = {name: params[name] for name in trained}
    opt_state = init_optimizer(optimizer, trained_params, layout)
    if not layout.is_sharded:
        params = replicate(params, layout.mesh)
    copies = copy_params(params, layout)
    step = jnp.int32(0)
    key = jnp.copy(key)
    skipped = jnp.zeros(2, jnp.int32)
    step, key, skipped = replicate((step, key, skipped), layout.mesh)
    return TrainState(
        step=step,
        params=copies,
        opt_state=opt_state,
        key=key,
        skipped=skipped,
    )


def copy_params(params: Params, layout: Layout) -> Params:
    """Copy parameters, laid out as a state's, to buffers that no step gives away."""

    def copy(tree):
        return jax.tree.map(jnp.copy, tree)

    specs = layout.specs(params)
    shardings = layout.shardings(specs)
    copy_sharded = jax.jit(copy, out_shardings=shardings)
    return copy_sharded(params)


def init_optimizer(
    optimizer: optax.GradientTransformation, trained: Params, layout: Layout
) -> Any:
    """Make the optimizer's state before its first step, laid out over the devices."""
    if not layout.is_sharded:
        opt_state = optimizer.init(trained)
        return replicate(opt_state, layout.mesh)
    shapes = jax.eval_shape(optimizer.init, trained)
    specs = layout.state_specs(optimizer, trained, shapes)
    shardings = layout.shardings(specs)
    init_sharded = jax.jit(optimizer.init, out_shardings=shardings)
    return init_sharded(trained)


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    trained: tuple[str, ...],
    layout: Layout,
    stream: str,
    micro_batches: int = 1,
    *,
    updates: int = 1,
    minibatches: int = 1,
    schedule: optax.Schedule | None = None,
):
    """Make the jitted `(state, batch) -> (state, metrics)` of a stage; the state's buffers are donated.

    An update whose loss or gradient is not finite changes neither parameters nor the optimizer's state; its step is
    counted in `TrainState.skipped`, which is among the metrics. So is "counts", of what each mean is over, by its name.

    Args:
        loss_fn: see `LossFn`; differentiated with respect to the trained part of params.
        trained: top-level names in params that the optimizer changes.
        layout: of the state; the batch's rows are spread over all its devices.
        stream: the stage's section, a name in `noise.STREAMS`.
        micro_batches: gradient accumulation inside the step; changes memory, not the result.
        updates: of the optimizer in one step, on the same batch; metrics are their means.
        minibatches: that the prompts are cut into, see `take_minibatch`; the updates take them in turn.
        schedule: the optimizer's, whose learning rate is among the metrics then.
    """
    gradients = _summed_gradients(loss_fn, layout, micro_batches)

    def update(part, opt_state, frozen, batch, key):
        # The gradient of the mean. A batch of which every row is left out of the mean has none, which must not be NaN.
        grads, sums = gradients(part, frozen, batch, key)
        _, count = sums["loss"]
        share = 1 / jnp.maximum(count, 1)
        grads = jax.tree.map(lambda g: g * share, grads)

        # Metrics are means, beside what each is over.
        metrics: dict[str, Any] = {}
        counts: dict[str, jax.Array] = {}
        for name, (value, count) in sums.items():
            metrics[name] = value / jnp.maximum(count, 1)
            counts[name] = count
        metrics["counts"] = counts
        metrics["grad_norm"] = optax.tree.norm(grads)
        if schedule is not None:
            taken = steps_taken(opt_state)
            metrics["learning_rate"] = schedule(taken)

        # What is not finite changes nothing.
        finite = jnp.isfinite(metrics["grad_norm"])
        finite &= jnp.isfinite(metrics["loss"])
        part, opt_state = _update(optimizer, grads, part, opt_state, finite)
        part_specs = layout.specs(part)
        part = layout.pin(part, part_specs)
        state_specs = layout.state_specs(optimizer, part, opt_state)
        opt_state = layout.pin(opt_state, state_specs)
        return part, opt_state, metrics, finite

    update_parts: Callable = update
    if updates != 1:
        update_parts = _repeat(update, updates, minibatches)

    def train_step(state: TrainState, batch) -> tuple[TrainState, dict[str, Any]]:
        # Parts that are only carried along are not read.
        key = noise.stream_key(state.key, stream, state.step)
        part = {name: state.params[name] for name in trained}
        frozen: Params = {}
        for name, x in state.params.items():
            if name not in trained and name not in CARRIED:
                frozen[name] = x
        part, opt_state, metrics, finite = update_parts(
            part, state.opt_state, frozen, batch, key
        )

        # Steps that changed nothing, all of them and the consecutive ones up to now.
        none_in_a_row = state.skipped * jnp.array([1, 0])
        one_more = state.skipped + 1
        skipped = jnp.where(finite, none_in_a_row, one_more)
        metrics["skipped_steps"], metrics["skipped_in_a_row"] = skipped
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params={**state.params, **part},
            opt_state=opt_state,
            skipped=skipped,
        )
        return state, metrics

    return jax.jit(train_step, donate_argnums=0)


def _repeat(update: Callable, updates: int, minibatches: int) -> Callable:
    """Make several updates of one, each on the next slice of the batch; metrics are their means."""

    def several(part, opt_state, frozen, batch, key):
        def one(carry, number):
            key_of = jax.random.fold_in(key, number)
            minibatch = batch
            if minibatches > 1:
                minibatch = take_minibatch(batch, number % minibatches, minibatches)
            part, opt_state = carry
            part, opt_state, metrics, finite = update(
                part, opt_state, frozen, minibatch, key_of
            )
            return (part, opt_state), (metrics, finite)

        carry = (part, opt_state)
        numbers = jnp.arange(updates)
        carry, (metrics, finite) = jax.lax.scan(one, carry, numbers)
        part, opt_state = carry
        means = jax.tree.map(lambda x: x.mean(axis=0), metrics)
        return part, opt_state, means, finite.all()

    return several

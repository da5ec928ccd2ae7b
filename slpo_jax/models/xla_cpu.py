"""Forms that XLA's compiler for CPUs makes faster, or smaller. No other module asks where a program runs.

Each function states its result in the plain form that accelerators get; on a CPU `cpu_NAME` computes it, and its
operations have that name. docs/speed.md has the gain of each.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

# The columns that are moved together.
_BLOCK = 32
_made_for: list[str] = []


def on_cpu() -> bool:
    """Return whether programs are made for a CPU."""
    if _made_for:
        return _made_for[-1] == "cpu"
    return jax.default_backend() == "cpu"


@contextlib.contextmanager
def made_for(platform: str) -> Iterator[None]:
    """Trace programs for another platform than the one that they are traced on.

    Args:
        platform: as jax calls it: "cpu", "gpu" or "tpu".
    """
    _made_for.append(platform)
    # Programs that were traced for the other platform must not be found.
    jax.clear_caches()
    try:
        yield
    finally:
        _made_for.pop()
        jax.clear_caches()


def after(first: jax.Array, tree: Any) -> Any:
    """Return the arrays, on a CPU known only once `first` is.

    So a backward pass recomputes the results that depend on them instead of keeping those; elsewhere `remat_but` sees
    to that.

    Args:
        first: float, of any shape.
        tree: of floats. On a CPU their last bit is set where `first` begins with NaN.
    """
    if first.size == 0 or not on_cpu():
        return tree
    begins = first[(0,) * first.ndim]
    return cpu_after(begins, tree)


@jax.custom_jvp
@jax.named_scope("cpu_after")
def cpu_after(begins: jax.Array, tree: Any) -> Any:
    """Make the tree's bits depend on a cotangent.

    XLA:CPU drops barriers. It then keeps the forward pass's results where the backward pass recomputes the same values,
    or recomputes many layers before it comes to the first of them. With these bits it can't undo a rounding either: it
    keeps float32 for a value that is rounded and cast up again.
    """

    def set_bit(x: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(x, unsigned)
        # The bit is 0 but for NaN, which no compiler may assume away.
        is_nan = begins != begins
        bits = bits | is_nan.astype(unsigned)
        return jax.lax.bitcast_convert_type(bits, x.dtype)

    return jax.tree.map(set_bit, tree)


@cpu_after.defjvp
def _cpu_after_jvp(primals, tangents):
    """Use the identity's derivative: that of a cast to bits would be 0."""
    _, tree_tangent = tangents
    return cpu_after(*primals), tree_tangent


def remat(function: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute a part of a block in the backward pass, on a CPU; elsewhere `remat_but` sees to that.

    On a CPU a backward pass keeps the arguments alone, and the part has no forward-mode derivative.
    """

    def call(*args):
        if on_cpu():
            return _remat(function)(*args)
        return function(*args)

    return call


def remat_but(block: Callable[..., Any], kept: str) -> Callable[..., Any]:
    """Recompute a block in the backward pass, but for its arguments and the arrays named `kept`.

    On a CPU it is the block itself, as XLA:CPU drops the barriers of `jax.checkpoint`; see `remat`.
    """
    if on_cpu():
        return block
    policy = jax.checkpoint_policies.save_only_these_names(kept)
    return jax.checkpoint(block, policy=policy)


def _remat(function: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute a function in the backward pass by `after`."""
    call = jax.custom_vjp(function)

    def forward(*args):
        return function(*args), args

    def backward(args, g):
        _, pull = jax.vjp(function, *after(g, args))
        return pull(g)

    call.defvjp(forward, backward)
    return call


def fewer(rows: int) -> int:
    """Return the rows that a loop multiplies at once: an eighth is enough on a CPU, and wastes fewer."""
    return rows // 8 if on_cpu() else rows


def asked_for(dtype: Any) -> Any:
    """Return the type to ask of products, before they are rounded: XLA:CPU would round them and cast them up again."""
    return jnp.float32 if on_cpu() else dtype


def summed_last(x: jax.Array, axes: str) -> tuple[jax.Array, str]:
    """Return an array [.., N, D] of a product that sums over N, and its axes as they are laid out."""
    if not on_cpu():
        return x, axes
    swapped = axes[-1] + axes[-2]
    return cpu_transpose(x), axes[:-2] + swapped


@jax.named_scope("cpu_transpose")
def cpu_transpose(x: jax.Array) -> jax.Array:
    """Return [.., N, D] -> [.., D, N], laid out in that order, in two copies, each of whole blocks of columns.

    XLA:CPU folds the transpose that a sum over N needs into the product, which it then doesn't multiply natively in
    bfloat16. In one copy it jumps from row to row; of 1,024 rows of 49,152 that takes four times as long.
    """
    *leading, rows, columns = x.shape
    blocks = -(-columns // _BLOCK)
    widths = [(0, 0)] * x.ndim
    widths[-1] = (0, blocks * _BLOCK - columns)
    x = jnp.pad(x, widths)

    # The first copy puts blocks before rows, the second transposes within each block.
    x = x.reshape(*leading, rows, blocks, _BLOCK)
    x = x.swapaxes(-3, -2)
    x = jax.lax.optimization_barrier(x)
    x = x.swapaxes(-2, -1)
    x = jax.lax.optimization_barrier(x)
    x = x.reshape(*leading, blocks * _BLOCK, rows)
    return x[..., :columns, :]


def recompute_after(
    made: Any,
    condition: jax.Array,
    compute: Callable[[Any], Any],
    old: Any,
    new: Any,
) -> Any:
    """Return `new`, which is compute(old), where `made` is computed from `old` too.

    Args:
        made: arrays of numbers.
        condition: bool; whether the result is used.
    """
    if not on_cpu():
        return new
    return compute(cpu_once_made(made, condition, old))


@jax.named_scope("cpu_once_made")
def cpu_once_made(made: Any, condition: jax.Array, old: Any) -> Any:
    """Return `old`, known only once all of `made` is.

    XLA:CPU computes parameters and moments in loops of their own, and all of them read the old moments. So it would
    compute the new ones once, in fresh memory, and copy them; SmolLM2's step would need a fifth more. Computed twice,
    the second time from this function's result, they are written in place.
    """

    def sum_first(tree):
        total = 0
        for x in jax.tree.leaves(tree):
            first = x[(slice(1),) * x.ndim]
            total += first.sum(dtype=jnp.float32)
        return total

    def zero(tree):
        return jnp.float32(0)

    # A number that can't be known before each array of `made` is.
    first_sum = jax.lax.cond(condition, sum_first, zero, made)
    is_known = condition & ~jnp.isnan(first_sum)

    def multiply(x):
        if not jnp.isdtype(x.dtype, "real floating"):
            return x
        return x * is_known.astype(x.dtype)

    return jax.tree.map(multiply, old)

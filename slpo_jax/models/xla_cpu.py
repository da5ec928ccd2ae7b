"""Forms in which XLA's compiler for CPUs is faster, or takes less memory. No other module asks where a program runs.

Each function says what it computes, in the plain form that accelerators get; on a CPU it is what `cpu_NAME` makes: its
operations have that name. What each gains is in docs/speed.md.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

_BLOCK = 32  # columns that are moved together
_made_for: list[str] = []


def on_cpu() -> bool:
    """Return whether programs are made for a CPU."""
    return (_made_for[-1] if _made_for else jax.default_backend()) == "cpu"


@contextlib.contextmanager
def made_for(platform: str) -> Iterator[None]:
    """Have what is traced within made for another platform than the one that it is traced on.

    Args:
        platform: as jax calls it: "cpu", "gpu" or "tpu".
    """
    _made_for.append(platform)
    jax.clear_caches()  # of what was traced for the other
    try:
        yield
    finally:
        _made_for.pop()
        jax.clear_caches()


def after(first: jax.Array, tree: Any) -> Any:
    """Return the arrays, on a CPU known only once `first` is, so that a backward pass makes again, and doesn't keep,
    what it makes of them; elsewhere `made_again` sees to that.

    Args:
        first: float, of any shape.
        tree: of floats. On a CPU their last bit is set where `first` begins with NaN.
    """
    if first.size == 0:
        return tree
    return cpu_after(first[(0,) * first.ndim], tree) if on_cpu() else tree


@jax.custom_jvp
@jax.named_scope("cpu_after")
def cpu_after(begins: jax.Array, tree: Any) -> Any:
    """Make the tree's bits depend on a cotangent. XLA:CPU drops barriers, and then keeps from the forward pass what the
    backward pass makes again of the same values, or makes it of many layers before it comes to the first of them. Nor
    can it take back their rounding: it keeps float32 for what is rounded and cast up again.
    """

    def bits_after(x: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(x, unsigned)
        return jax.lax.bitcast_convert_type(
            bits | (begins != begins).astype(unsigned), x.dtype
        )

    return jax.tree.map(bits_after, tree)


@cpu_after.defjvp
def _cpu_after_jvp(primals, tangents):
    """Use the identity's derivative: that of a cast to bits would be 0."""
    return cpu_after(*primals), tangents[1]


def remade(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block's function. On a CPU a backward pass keeps its arguments alone, and it has no forward-mode
    derivative; elsewhere `made_again` sees to that.
    """

    def call(*args):
        return (_remade(function) if on_cpu() else function)(*args)

    return call


def made_again(block: Callable[..., Any], kept: str) -> Callable[..., Any]:
    """Return a block of which a backward pass keeps the arguments and what has this name (`jax.checkpoint`'s policy).

    On a CPU it is the block, as XLA:CPU drops the barriers of `jax.checkpoint`.
    """
    return (
        block
        if on_cpu()
        else jax.checkpoint(
            block, policy=jax.checkpoint_policies.save_only_these_names(kept)
        )
    )


def _remade(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remake by `after`, as XLA:CPU drops the barriers of `jax.checkpoint`."""
    call = jax.custom_vjp(function)

    def backward(args, g):
        _, pull = jax.vjp(function, *after(g, args))
        return pull(g)

    call.defvjp(lambda *args: (function(*args), args), backward)
    return call


def fewer(rows: int) -> int:
    """Return the rows that a loop multiplies at once: on a CPU an eighth, enough, and fewer are made for nothing."""
    return rows // 8 if on_cpu() else rows


def asked_for(dtype: Any) -> Any:
    """Return the type to ask of products, before they are rounded: XLA:CPU would cast up what it rounded."""
    return jnp.float32 if on_cpu() else dtype


def summed_last(x: jax.Array, axes: str) -> tuple[jax.Array, str]:
    """Return an array [.., N, D] of a product that sums over N, and its axes as they are laid out."""
    return (cpu_transposed(x), axes[:-2] + axes[:-3:-1]) if on_cpu() else (x, axes)


@jax.named_scope("cpu_transposed")
def cpu_transposed(x: jax.Array) -> jax.Array:
    """Return [.., N, D] -> [.., D, N], laid out in that order, in two copies, each of whole blocks of columns.

    XLA:CPU folds the transpose that a sum over N needs into the product, which it then doesn't multiply natively in
    bfloat16. In one copy it jumps from row to row; of 1,024 rows of 49,152 that takes four times as long.
    """
    *leading, rows, columns = x.shape
    blocks = -(-columns // _BLOCK)
    x = jnp.pad(x, (*((0, 0) for _ in leading), (0, 0), (0, blocks * _BLOCK - columns)))
    x = jax.lax.optimization_barrier(
        x.reshape(*leading, rows, blocks, _BLOCK).swapaxes(-3, -2)
    )
    x = jax.lax.optimization_barrier(x.swapaxes(-2, -1))
    return x.reshape(*leading, blocks * _BLOCK, rows)[..., :columns, :]


def remade_after(
    made: Any, condition: jax.Array, remake: Callable[[Any], Any], old: Any, new: Any
) -> Any:
    """Return `new`, which is remake(old), where `old` is read by what makes `made` too.

    Args:
        made: arrays of numbers.
        condition: bool; whether anybody looks at what is returned.
    """
    return remake(cpu_once_made(made, condition, old)) if on_cpu() else new


@jax.named_scope("cpu_once_made")
def cpu_once_made(made: Any, condition: jax.Array, old: Any) -> Any:
    """Return `old`, known only once all of `made` is.

    XLA:CPU makes parameters and moments in loops of their own, and all of them read the old moments. So it would make
    the new ones once, in fresh memory, and copy them; SmolLM2's step would need a fifth more. Made twice, the second
    time from what is returned, they are made in place.
    """

    def first(tree):
        return sum(
            x[(slice(1),) * x.ndim].sum(dtype=jnp.float32)
            for x in jax.tree.leaves(tree)
        )

    is_known = condition & ~jnp.isnan(
        jax.lax.cond(condition, first, lambda tree: jnp.float32(0), made)
    )
    return jax.tree.map(
        lambda x: (
            x * is_known.astype(x.dtype) if jnp.isdtype(x.dtype, "real floating") else x
        ),
        old,
    )

"""What a backward pass makes again instead of keeping it, on XLA:CPU too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def after(first: jax.Array, tree: Any) -> Any:
    """The same arrays, known only once `first` is.

    XLA:CPU drops barriers, and then keeps from the forward pass what the backward pass makes again of the same values,
    or makes it of many layers before it comes to the first of them. It can't where they depend on a cotangent. Nor can
    it take back their rounding: it keeps float32 for what is rounded and cast up again.

    Args:
        first: float, of any shape.
        tree: of floats. Their last bit is set where `first` begins with NaN.
    """
    if first.size == 0:
        return tree
    if jax.default_backend() != "cpu":
        return jax.lax.optimization_barrier((first, tree))[1]
    return _with_last_bit(first[(0,) * first.ndim], tree)


@jax.custom_jvp
def _with_last_bit(begins: jax.Array, tree: Any) -> Any:
    """The last bit of all numbers is set where `begins` is NaN."""

    def bits_after(x: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(x, unsigned)
        return jax.lax.bitcast_convert_type(bits | (begins != begins).astype(unsigned), x.dtype)

    return jax.tree.map(bits_after, tree)


@_with_last_bit.defjvp
def _with_last_bit_jvp(primals, tangents):
    """The identity's: that of a cast to bits would be 0."""
    return _with_last_bit(*primals), tangents[1]


def remade(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """The function, of which a backward pass keeps the arguments alone; it has no forward-mode derivative."""
    call = jax.custom_vjp(function)

    def backward(args, g):
        _, pull = jax.vjp(function, *after(g, args))
        return pull(g)

    call.defvjp(lambda *args: (function(*args), args), backward)
    return call

"""Products of positions with a matrix, and products in low precision."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from slpo_jax.models import xla_cpu

KEPT = "kept"


def kept(tree: Any) -> Any:
    """Mark arrays that a backward pass gets from a block's forward pass, while it makes all else again."""
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), tree)


def is_low(dtype: Any) -> bool:
    """Return whether a type's numbers have fewer than 32 bits."""
    return jnp.dtype(dtype).itemsize < 4


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply by `jnp.einsum`, in the precision of the first if low, with sums in float32 that are rounded once.

    The gradient is made of such products too. XLA's CPU compiler has no others in bfloat16: it casts operands up.

    Args:
        spec: every index is in two of the three terms.
        b: in the precision of `a`, or of float32 as parameters are: then its gradient is not rounded.
    """
    return _low_product(spec, True, a, b) if is_low(a.dtype) else float_product(spec, a, b)


def float_product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply as `product`, with results in float32, as logits and scores are.

    In low precision their cotangents are rounded to that of the operands, as torch's autocast does: a product of one in
    float32 with one in bfloat16 is slow everywhere.

    Args:
        spec, b: as in `product`.
    """
    if is_low(a.dtype):
        return _low_product(spec, False, a, b)
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def sums(spec: str, a: jax.Array, b: jax.Array, rounded: bool = False) -> jax.Array:
    """Multiply and sum in float32; only `b` may have to be rounded to the precision of `a`.

    Args:
        rounded: what comes out is in the precision of `a`.
    """
    out = xla_cpu.asked_for(a.dtype) if rounded else jnp.float32
    precision = jax.lax.Precision.DEFAULT if is_low(a.dtype) else None  # of float32 what the run has set: float32's
    result = jnp.einsum(spec, a, b.astype(a.dtype), precision=precision, preferred_element_type=out)
    return result.astype(a.dtype) if rounded else result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _low_product(spec: str, rounded: bool, a: jax.Array, b: jax.Array) -> jax.Array:
    return sums(spec, a, b, rounded)


def _low_forward(spec: str, rounded: bool, a: jax.Array, b: jax.Array):
    return _low_product(spec, rounded, a, b), (a, b)


def _low_backward(spec: str, rounded: bool, operands, g: jax.Array):
    (a, b), (first, second, out) = operands, spec.replace("->", ",").split(",")
    g = g.astype(a.dtype)
    of_a, of_b = sums(f"{out},{second}->{first}", g, b, True), sums_over_rows(f"{first},{out}->{second}", a, g)
    return of_a, of_b.astype(b.dtype)


def sums_over_rows(spec: str, a: jax.Array, g: jax.Array) -> jax.Array:
    """Sum products, as `sums`, over the last axis but one of both arrays."""
    first, second, out = spec.replace("->", ",").split(",")
    if out[-2] not in first:
        first, a, second, g = second, g, first, a
    if is_low(a.dtype):
        a, first = xla_cpu.summed_last(a, first)
    return sums(f"{first},{second}->{out}", a, g)


_low_product.defvjp(_low_forward, _low_backward)


def _all_but_kernel(*arrays: jax.Array | None, dtype: Any = None, inexact: bool = True) -> list[jax.Array | None]:
    """Return inputs, kernel and bias as a layer promotes them, but for the kernel: `product` rounds that."""
    inputs, _, bias = nn.dtypes.promote_dtype(*arrays, dtype=dtype, inexact=inexact)
    return [inputs, arrays[1], bias]


def _rows_by_kernel(x, kernel, *_, **__) -> jax.Array:
    """Multiply, as `product`, [.., D] by [D, V], as `nn.Dense` asks for it."""
    out = product("nd,dv->nv", x.reshape(-1, x.shape[-1]), kernel)
    return kept(out.reshape(*x.shape[:-1], out.shape[-1]))


def _kept_dot_general(*args, **kwargs) -> jax.Array:
    return kept(jax.lax.dot_general(*args, **kwargs))


def dense(features: int, dtype, std: float, name: str, use_bias: bool) -> nn.Dense:
    """Make a linear layer of a block.

    Args:
        features: of what comes out.
        dtype: of activations.
        std: of the kernel's normal distribution in the beginning.
    """
    options: dict[str, Any] = {"dot_general": _kept_dot_general}
    if is_low(dtype):
        options = {"dot_general": _rows_by_kernel, "promote_dtype": _all_but_kernel}
    return nn.Dense(features, use_bias, dtype=dtype, kernel_init=nn.initializers.normal(std), name=name, **options)


def updated(params: Any) -> Any:
    """Return parameters as layers read them: `A @ B` is added to the kernel of each module that has both."""
    if not isinstance(params, dict):
        return params
    if "A" in params:
        return {"kernel": params["kernel"] + params["A"] @ params["B"]} | {
            name: x for name, x in params.items() if name not in ("kernel", "A", "B")
        }
    return {name: updated(part) for name, part in params.items()}


def head_logits(hidden: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Return [.., D] -> float32 logits [.., V].

    Args:
        head_VD: in the precision of `hidden`, or in float32, as `product` takes it.
    """
    logits = float_product("nd,vd->nv", hidden.reshape(-1, hidden.shape[-1]), head_VD)
    return logits.reshape(*hidden.shape[:-1], logits.shape[-1])

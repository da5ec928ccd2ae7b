"""Products of positions with a matrix, as one product of rows, and products in low precision."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def of_rows(x, matrix, dimension_numbers, precision=None, preferred_element_type=None) -> jax.Array:
    """`jax.lax.dot_general` of [.., D] and a matrix, all leading axes being one.

    XLA:CPU's gradient of a matrix copies a cotangent of several leading axes into another layout first, which for
    SmolLM2-135M's takes a quarter of a backward pass; of rows it doesn't. The bits are the same.

    Args:
        dimension_numbers: contracts x's last axis with one of the matrix's, without batch axes.
    Returns:
        [.., the matrix's other axis].
    """
    (_, matrix_axes), batch = dimension_numbers
    rows = x.reshape(-1, x.shape[-1])
    if matrix_axes == (0,) and preferred_element_type is None and _is_low(rows):
        out = product("nd,dv->nv", rows, matrix)
    else:
        out = jax.lax.dot_general(rows, matrix, (((1,), matrix_axes), batch), precision, preferred_element_type)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _is_low(x: jax.Array) -> bool:
    """Whether it has fewer than 32 bits."""
    return x.dtype.itemsize < 4


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` of two; where the first is in low precision, in that, with sums in float32 that are rounded once.

    In bfloat16 XLA:CPU multiplies natively only where the result is asked for in float32: else it casts both operands
    up first, which takes twice the time for a matrix, and four times for a cache of values. The gradient is made of
    such products too.

    Args:
        spec: every index is in two of the three terms.
        b: in the precision of `a`, or of float32 as parameters are: then its gradient is not rounded.
    """
    return _low_product(spec, a, b) if _is_low(a) else jnp.einsum(spec, a, b)


def _sums(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Products of numbers in low precision, of which only `b` may have to be rounded to it, summed in float32."""
    return jnp.einsum(spec, a, b.astype(a.dtype), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _low_product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return _sums(spec, a, b).astype(a.dtype)


def _low_forward(spec: str, a: jax.Array, b: jax.Array):
    return _low_product(spec, a, b), (a, b)


def _low_backward(spec: str, operands, g: jax.Array):
    (a, b), (first, second, out) = operands, spec.replace("->", ",").split(",")
    of_a, of_b = _sums(f"{out},{second}->{first}", g, b), _sums(*_in_halves(f"{first},{out}->{second}", a, g))
    return of_a.astype(a.dtype), of_b.astype(b.dtype)


def _in_halves(spec: str, a: jax.Array, g: jax.Array) -> tuple[str, jax.Array, jax.Array]:
    """What is summed over the rows of two matrices, as sums over two halves of them.

    XLA:CPU folds the transpose that a sum over rows needs into the product, which it then doesn't multiply natively;
    of two axes it has to make the transpose, and takes half the time.
    """
    if a.ndim > 2 or len(a) % 2:
        return spec, a, g
    a, g = (x.reshape(2, len(x) // 2, x.shape[1]) for x in (a, g))
    return f"z{spec.replace(',', ',z')}", a, g


_low_product.defvjp(_low_forward, _low_backward)


def _all_but_kernel(*arrays: jax.Array | None, dtype: Any = None, inexact: bool = True) -> list[jax.Array | None]:
    """Inputs, kernel and bias as a layer promotes them, but for the kernel in low precision: `product` rounds that."""
    inputs, kernel, bias = nn.dtypes.promote_dtype(*arrays, dtype=dtype, inexact=inexact)
    return [inputs, arrays[1] if _is_low(inputs) else kernel, bias]


def dense(features: int, dtype, std: float, name: str, use_bias: bool) -> nn.Dense:
    """A linear layer of a block.

    Args:
        features: of what comes out.
        dtype: of activations.
        std: of the kernel's normal distribution in the beginning.
    """
    init = nn.initializers.normal(std)
    return nn.Dense(
        features, use_bias, dtype=dtype, kernel_init=init, dot_general=of_rows, promote_dtype=_all_but_kernel, name=name
    )


def head_logits(hidden: jax.Array, head_VD: jax.Array) -> jax.Array:
    """[.., D] -> float32 logits [.., V].

    In low precision their cotangents are rounded to that of the hidden states, as torch's autocast does: a product of
    one in float32 with one in bfloat16 is slow everywhere.

    Args:
        head_VD: in the precision of `hidden`, or in float32, as `product` takes it.
    """
    if _is_low(hidden):
        logits = _low_logits(hidden.reshape(-1, hidden.shape[-1]), head_VD)
        return logits.reshape(*hidden.shape[:-1], logits.shape[-1])
    contracted = ((hidden.ndim - 1,), (1,)), ((), ())
    return of_rows(hidden, head_VD, contracted, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _low_logits(hidden_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
    return _sums("nd,vd->nv", hidden_ND, head_VD)


def _low_logits_forward(hidden_ND: jax.Array, head_VD: jax.Array):
    return _low_logits(hidden_ND, head_VD), (hidden_ND, head_VD)


def _low_logits_backward(operands, g_NV: jax.Array):
    return _low_backward("nd,vd->nv", operands, g_NV.astype(operands[0].dtype))


_low_logits.defvjp(_low_logits_forward, _low_logits_backward)

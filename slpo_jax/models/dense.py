"""Products of positions with a matrix, as one product of rows, and products in low precision."""

import functools

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
    if matrix_axes == (0,) and preferred_element_type is None and _is_low(rows, matrix):
        out = product("nd,dv->nv", rows, matrix)
    else:
        out = jax.lax.dot_general(rows, matrix, (((1,), matrix_axes), batch), precision, preferred_element_type)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _is_low(*operands: jax.Array) -> bool:
    """Whether all are of one dtype of fewer than 32 bits."""
    return len({x.dtype for x in operands}) == 1 and operands[0].dtype.itemsize < 4


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` of two; of two in low precision with sums in float32 that are rounded once.

    In bfloat16 XLA:CPU multiplies natively only where the result is asked for in float32: else it casts both operands
    up first, which takes twice the time for a matrix, and four times for a cache of values. The gradient is made of
    such products too.

    Args:
        spec: every index is in two of the three terms.
    """
    return _low_product(spec, a, b) if _is_low(a, b) else jnp.einsum(spec, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _low_product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def _low_forward(spec: str, a: jax.Array, b: jax.Array):
    return _low_product(spec, a, b), (a, b)


def _low_backward(spec: str, operands, g: jax.Array):
    (a, b), (first, second, out) = operands, spec.replace("->", ",").split(",")
    return _low_product(f"{out},{second}->{first}", g, b), _low_product(f"{first},{out}->{second}", a, g)


_low_product.defvjp(_low_forward, _low_backward)


def dense(features: int, dtype, std: float, name: str, use_bias: bool) -> nn.Dense:
    """A linear layer of a block.

    Args:
        features: of what comes out.
        dtype: of activations.
        std: of the kernel's normal distribution in the beginning.
    """
    init = nn.initializers.normal(std)
    return nn.Dense(features, use_bias, dtype=dtype, kernel_init=init, dot_general=of_rows, name=name)


def head_logits(hidden: jax.Array, head_VD: jax.Array) -> jax.Array:
    """[.., D] -> float32 logits [.., V].

    In low precision their cotangents are rounded to the dtype of the two, as torch's autocast does: a product of one in
    float32 with one in bfloat16 is slow everywhere.
    """
    if _is_low(hidden, head_VD):
        logits = _low_logits(hidden.reshape(-1, hidden.shape[-1]), head_VD)
        return logits.reshape(*hidden.shape[:-1], logits.shape[-1])
    contracted = ((hidden.ndim - 1,), (1,)), ((), ())
    return of_rows(hidden, head_VD, contracted, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _low_logits(hidden_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
    return jnp.einsum("nd,vd->nv", hidden_ND, head_VD, preferred_element_type=jnp.float32)


def _low_logits_forward(hidden_ND: jax.Array, head_VD: jax.Array):
    return _low_logits(hidden_ND, head_VD), (hidden_ND, head_VD)


def _low_logits_backward(operands, g_NV: jax.Array):
    return _low_backward("nd,vd->nv", operands, g_NV.astype(operands[0].dtype))


_low_logits.defvjp(_low_logits_forward, _low_logits_backward)

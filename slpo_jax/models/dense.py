"""Products of positions with a matrix, as one product of rows."""

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
    out = jax.lax.dot_general(rows, matrix, (((1,), matrix_axes), batch), precision, preferred_element_type)
    return out.reshape(*x.shape[:-1], out.shape[-1])


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
    """[.., D] -> float32 logits [.., V]."""
    contracted = ((hidden.ndim - 1,), (1,)), ((), ())
    return of_rows(hidden, head_VD, contracted, preferred_element_type=jnp.float32)

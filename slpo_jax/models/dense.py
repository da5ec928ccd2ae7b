"""Products of positions with a matrix, as one product of rows, and products in low precision."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

TURNED = "kernel_VD"
_BLOCK = 32  # columns that are moved together
_FEW = 128  # rows, up to which a product takes the time that its matrix is read in


def of_rows(x, matrix, dimension_numbers, precision=None, preferred_element_type=None) -> jax.Array:
    """`jax.lax.dot_general` of [.., D] and a matrix, all leading axes being one.

    XLA:CPU's gradient of a matrix copies a cotangent of several leading axes into another layout first, which for
    SmolLM2-135M's takes a quarter of a backward pass; of rows it doesn't. The bits are the same.

    Args:
        dimension_numbers: contracts x's last axis with the matrix's first, without batch axes, as `nn.Dense` does.
    Returns:
        [.., the matrix's last axis].
    """
    (_, matrix_axes), batch = dimension_numbers
    rows = x.reshape(-1, x.shape[-1])
    if is_low(rows.dtype):
        out = product("nd,dv->nv", rows, matrix)
    else:
        out = jax.lax.dot_general(rows, matrix, (((1,), matrix_axes), batch), precision, preferred_element_type)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def is_low(dtype: Any) -> bool:
    """Whether its numbers have fewer than 32 bits."""
    return jnp.dtype(dtype).itemsize < 4


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` of two; where the first is in low precision, in that, with sums in float32 that are rounded once.

    In bfloat16 XLA:CPU multiplies natively only where the result is asked for in float32: else it casts both operands
    up first, which takes twice the time for a matrix, and four times for a cache of values. The gradient is made of
    such products too.

    Args:
        spec: every index is in two of the three terms.
        b: in the precision of `a`, or of float32 as parameters are: then its gradient is not rounded.
    """
    return float_product(spec, a, b).astype(a.dtype)


def float_product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`product` with results in float32, as logits and scores are.

    In low precision their cotangents are rounded to that of the operands, as torch's autocast does: a product of one in
    float32 with one in bfloat16 is slow everywhere.

    Args:
        spec, b: as in `product`.
    """
    return _low_product(spec, a, b) if is_low(a.dtype) else jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _sums(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Products of numbers in low precision, of which only `b` may have to be rounded to it, summed in float32."""
    return jnp.einsum(spec, a, b.astype(a.dtype), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _low_product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return _sums(spec, a, b)


def _low_forward(spec: str, a: jax.Array, b: jax.Array):
    return _low_product(spec, a, b), (a, b)


def _low_backward(spec: str, operands, g: jax.Array):
    (a, b), (first, second, out) = operands, spec.replace("->", ",").split(",")
    g = g.astype(a.dtype)
    of_a, of_b = _sums(f"{out},{second}->{first}", g, b), sums_over_rows(f"{first},{out}->{second}", a, g)
    return of_a.astype(a.dtype), of_b.astype(b.dtype)


def sums_over_rows(spec: str, a: jax.Array, g: jax.Array) -> jax.Array:
    """float32 sums over the last axis but one of two arrays in low precision; not differentiable.

    XLA:CPU folds the transpose that such a sum needs into the product, which it then doesn't multiply natively. So one
    of the two is laid out anew before: the one whose axis is the result's last but one.

    Args:
        spec: as `jnp.einsum` takes it.
    """
    first, second, out = spec.replace("->", ",").split(",")
    if out[-2] not in first:
        first, a, second, g = second, g, first, a
    if jax.default_backend() == "cpu":
        first, a = first[:-2] + first[:-3:-1], _transposed(a)
    return _sums(f"{first},{second}->{out}", a, g)


def _transposed(x: jax.Array) -> jax.Array:
    """[.., N, D] -> [.., D, N], laid out in that order: in two copies, of which each moves whole blocks of columns.

    In one copy XLA:CPU jumps from row to row; of 1,024 rows of 49,152 that takes four times as long.
    """
    *leading, rows, columns = x.shape
    blocks = -(-columns // _BLOCK)
    x = jnp.pad(x, (*((0, 0) for _ in leading), (0, 0), (0, blocks * _BLOCK - columns)))
    x = jax.lax.optimization_barrier(x.reshape(*leading, rows, blocks, _BLOCK).swapaxes(-3, -2))
    x = jax.lax.optimization_barrier(x.swapaxes(-2, -1))
    return x.reshape(*leading, blocks * _BLOCK, rows)[..., :columns, :]


_low_product.defvjp(_low_forward, _low_backward)


def _all_but_kernel(*arrays: jax.Array | None, dtype: Any = None, inexact: bool = True) -> list[jax.Array | None]:
    """Inputs, kernel and bias as a layer promotes them, but for the kernel in low precision: `product` rounds that."""
    inputs, kernel, bias = nn.dtypes.promote_dtype(*arrays, dtype=dtype, inexact=inexact)
    return [inputs, arrays[1] if is_low(inputs.dtype) else kernel, bias]


class Dense(nn.Dense):
    """A linear layer, with its kernel [D, V] or, where no gradient is asked for, that of `turned`."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        if not self.has_variable("params", TURNED):
            return super().__call__(inputs)
        rows = inputs.astype(self.dtype).reshape(-1, inputs.shape[-1])
        if len(rows) <= _FEW:
            out = self.columns(rows).T
        else:
            out = self._biased(product("nd,vd->nv", rows, self.get_variable("params", TURNED)), 0)
        return out.reshape(*inputs.shape[:-1], self.features)

    def columns(self, inputs: jax.Array, axes: str = "nd") -> jax.Array:
        """[V, N], of `inputs` with these axes, from a turned kernel that is the left operand.

        XLA:CPU lays a right operand out anew for each product; of few rows that is most of the time.
        """
        kernel: jax.Array = self.get_variable("params", TURNED)
        return self._biased(product(f"vd,{axes}->vn", kernel, inputs.astype(self.dtype)), 1)

    def _biased(self, out: jax.Array, other_axis: int) -> jax.Array:
        if not self.use_bias:
            return out
        return out + jnp.expand_dims(self.get_variable("params", "bias").astype(self.dtype), other_axis)


def feed_forward(x: jax.Array, ups: Sequence[Dense], combine: Callable[..., jax.Array], down: Dense) -> jax.Array:
    """down(combine(up(x), ..)); of few rows, with turned kernels, what is between the layers is never turned back.

    Args:
        combine: of what each of `ups` returns, elementwise.
    """
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > _FEW or not all(layer.has_variable("params", TURNED) for layer in (*ups, down)):
        return down(combine(*(up(x) for up in ups)))
    hidden_VN = combine(*(up.columns(rows) for up in ups))
    return down.columns(hidden_VN, "dn").T.reshape(*x.shape[:-1], down.features)


def turned(params: Any) -> Any:
    """Parameters in low precision with all layers' kernels [D, V] as [V, D], for products that are made many times.

    A product of few rows takes the time that its matrix is read in, and XLA:CPU reads [V, D] in two thirds of the time
    of [D, V].

    Args:
        params: a tree in which every `kernel` is a `Dense` layer's.
    """
    if not isinstance(params, Mapping):
        return params
    rest = {name: turned(inner) for name, inner in params.items() if name != "kernel"}
    return rest | ({TURNED: _transposed(params["kernel"])} if "kernel" in params else {})


def dense(features: int, dtype, std: float, name: str, use_bias: bool) -> Dense:
    """A linear layer of a block.

    Args:
        features: of what comes out.
        dtype: of activations.
        std: of the kernel's normal distribution in the beginning.
    """
    init = nn.initializers.normal(std)
    return Dense(
        features, use_bias, dtype=dtype, kernel_init=init, dot_general=of_rows, promote_dtype=_all_but_kernel, name=name
    )


def head_logits(hidden: jax.Array, head_VD: jax.Array) -> jax.Array:
    """[.., D] -> float32 logits [.., V].

    Args:
        head_VD: in the precision of `hidden`, or in float32, as `product` takes it.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    # The head as the left operand, see `Dense.columns`; without the barrier XLA turns the product around again.
    if len(rows) <= _FEW and is_low(head_VD.dtype) and jax.default_backend() == "cpu":
        logits = jax.lax.optimization_barrier(float_product("vd,nd->vn", head_VD, rows)).T
    else:
        logits = float_product("nd,vd->nv", rows, head_VD)
    return logits.reshape(*hidden.shape[:-1], logits.shape[-1])

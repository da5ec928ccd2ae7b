"""The pieces of a block: products of positions with a matrix, also in low precision, and MC-dropout.

A mask depends on a position's own key, and on nothing else: the mask of one position at one site is a function of that
position's key and the site's number. Rows can therefore be batched, padded, bucketed or sharded in any way without
changing a single mask.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from slpo_jax.models import xla_cpu

KEPT = "kept"
SITES = ("attention", "mlp")
"""The places of a block that can have dropout; a backbone's config chooses among them."""
SITE_NUMBERS = 3
"""The numbers of a layer's sites. One is spare: the numbers decide the masks, so they never change."""


def save_for_backward(tree: Any) -> Any:
    """Mark arrays that a backward pass gets from a block's forward pass, while it recomputes all others."""
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), tree)


def is_low(dtype: Any) -> bool:
    """Return whether a type's numbers have fewer than 32 bits."""
    return jnp.dtype(dtype).itemsize < 4


def product(
    spec: str,
    a: jax.Array,
    b: jax.Array,
) -> jax.Array:
    """Multiply by `jnp.einsum` in the precision of `a`, if that is low; sums are in float32 and rounded once.

    The gradient is made of such products too. XLA's CPU compiler has no others in bfloat16: it casts operands up.

    Args:
        spec: every index is in two of the three terms.
        b: in the precision of `a`, or in float32 as parameters are: then its gradient is not rounded.
    """
    if is_low(a.dtype):
        return _low_product(spec, True, a, b)
    return float_product(spec, a, b)


def float_product(
    spec: str,
    a: jax.Array,
    b: jax.Array,
) -> jax.Array:
    """Multiply as `product` does, with results in float32, as logits and scores are.

    In low precision their cotangents are rounded to that of the operands, as torch's autocast does: a product of one in
    float32 with one in bfloat16 is slow everywhere.

    Args:
        spec, b: as in `product`.
    """
    if is_low(a.dtype):
        return _low_product(spec, False, a, b)
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def sums(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    rounded: bool = False,
) -> jax.Array:
    """Multiply and sum in float32; only `b` may have to be rounded to the precision of `a`.

    Args:
        rounded: the result is in the precision of `a`.
    """
    accumulated = xla_cpu.asked_for(a.dtype) if rounded else jnp.float32
    # None is the precision that the run has set for float32: that of float32.
    precision = jax.lax.Precision.DEFAULT if is_low(a.dtype) else None
    result = jnp.einsum(
        spec,
        a,
        b.astype(a.dtype),
        precision=precision,
        preferred_element_type=accumulated,
    )
    return result.astype(a.dtype) if rounded else result


def _terms(spec: str) -> list[str]:
    """Split the specification of a product into its three terms."""
    return spec.replace("->", ",").split(",")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _low_product(
    spec: str,
    rounded: bool,
    a: jax.Array,
    b: jax.Array,
) -> jax.Array:
    return sums(spec, a, b, rounded)


def _low_forward(
    spec: str,
    rounded: bool,
    a: jax.Array,
    b: jax.Array,
):
    return _low_product(spec, rounded, a, b), (a, b)


def _low_backward(spec: str, rounded: bool, operands, g: jax.Array):
    # Each operand's gradient is a product of the cotangent and the other operand.
    a, b = operands
    first, second, out = _terms(spec)
    g = g.astype(a.dtype)
    of_a = sums(
        f"{out},{second}->{first}",
        g,
        b,
        True,
    )
    of_b = sums_over_rows(
        f"{first},{out}->{second}",
        a,
        g,
    )
    return of_a, of_b.astype(b.dtype)


def sums_over_rows(
    spec: str,
    a: jax.Array,
    g: jax.Array,
) -> jax.Array:
    """Sum products, as `sums` does, over the last axis but one of both arrays."""
    first, second, out = _terms(spec)
    # The first operand is the one that has the result's last axis but one.
    if out[-2] not in first:
        first, second = second, first
        a, g = g, a
    if is_low(a.dtype):
        a, first = xla_cpu.summed_last(a, first)
    return sums(
        f"{first},{second}->{out}",
        a,
        g,
    )


_low_product.defvjp(_low_forward, _low_backward)


def _all_but_kernel(
    *arrays: jax.Array | None, dtype: Any = None, inexact: bool = True
) -> list[jax.Array | None]:
    """Return inputs, kernel and bias as a layer promotes them, but for the kernel, which `product` rounds."""
    inputs, _, bias = nn.dtypes.promote_dtype(
        *arrays,
        dtype=dtype,
        inexact=inexact,
    )
    kernel = arrays[1]
    return [inputs, kernel, bias]


def _rows_by_kernel(x, kernel, *_, **__) -> jax.Array:
    """Multiply [.., D] by [D, V] as `product` does, in the form that `nn.Dense` calls."""
    *leading, width = x.shape
    out_NV = product(
        "nd,dv->nv",
        x.reshape(-1, width),
        kernel,
    )
    return save_for_backward(out_NV.reshape(*leading, out_NV.shape[-1]))


def _kept_dot_general(*args, **kwargs) -> jax.Array:
    return save_for_backward(jax.lax.dot_general(*args, **kwargs))


def dense(
    features: int,
    dtype,
    std: float,
    name: str,
    use_bias: bool,
) -> nn.Dense:
    """Make a linear layer of a block.

    Args:
        features: width of the output.
        dtype: of activations.
        std: of the normal distribution that the kernel starts from.
    """
    # Results are kept for the backward pass; in low precision the product is ours, which promotes the kernel itself.
    options: dict[str, Any] = {"dot_general": _kept_dot_general}
    if is_low(dtype):
        options = {
            "dot_general": _rows_by_kernel,
            "promote_dtype": _all_but_kernel,
        }
    return nn.Dense(
        features,
        use_bias,
        dtype=dtype,
        kernel_init=nn.initializers.normal(std),
        name=name,
        **options,
    )


def add_low_rank(params: Any) -> Any:
    """Return parameters as layers read them: `A @ B` is added to the kernel of each module that has both."""
    if not isinstance(params, dict):
        return params
    if "A" not in params:
        return {name: add_low_rank(part) for name, part in params.items()}
    layer = dict(params)
    a = layer.pop("A")
    b = layer.pop("B")
    layer["kernel"] = layer["kernel"] + a @ b
    return layer


def head_logits(hidden: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Return [.., D] -> float32 logits [.., V].

    Args:
        head_VD: in the precision of `hidden`, or in float32, as `product` takes it.
    """
    *leading, width = hidden.shape
    logits_NV = float_product(
        "nd,vd->nv",
        hidden.reshape(-1, width),
        head_VD,
    )
    return logits_NV.reshape(*leading, logits_NV.shape[-1])


@struct.dataclass
class Dropout:
    """The noise of the first positions of one forward pass; positions after these are deterministic.

    Attributes:
        keys_BL: typed PRNG keys, one a noisy position.
        active_BL: bool; False makes that position's forward deterministic.
        rate: the probability p of dropping a unit; 0 costs nothing.
    """

    keys_BL: jax.Array
    active_BL: jax.Array
    rate: float = struct.field(pytree_node=False)


def site_number(layer: int, name: str) -> int:
    """Return the number that keeps the masks of different sites of one position apart."""
    return SITE_NUMBERS * layer + SITES.index(name)


def _bits(
    keys_BL: jax.Array,
    site: int | jax.Array,
    width: int,
) -> jax.Array:
    """Hash (position's key, site, unit) by a counter: uint32 [B, L, width].

    The keys come out of threefry. Stretching one over the units of a site needs no cryptographic strength, and
    threefry would take most of a small model's step: two rounds of MurmurHash3's finaliser, with the key's second
    word mixed in between, do it in an eighth of the time.
    """
    words = jax.random.key_data(keys_BL)
    units = jnp.arange(width, dtype=jnp.uint32) + jnp.uint32(site * width)
    first_word = words[..., :1]

    # A counter of the units of all sites, spread over 32 bits by the golden ratio.
    counter = units * jnp.uint32(0x9E3779B9)
    x = first_word + jnp.expand_dims(counter, range(words.ndim - 1))

    # Two rounds of the finaliser, with the second word mixed in between.
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    x = (x ^ (x >> 16)) + words[..., 1:2]
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def drop(
    x_BLD: jax.Array,
    dropout: Dropout | None,
    site: int | jax.Array,
) -> jax.Array:
    """Apply inverted dropout with exact probability `rate` (to 2**-32), position by position.

    Args:
        x_BLD: activations.
        dropout: the pass's noise, covering the first positions of x; None for none.
        site: a `site_number`.
    Returns:
        [B, L, D]: x / (1 - rate) where kept, 0 where dropped, x itself where the position is not active.
    """
    if dropout is None or dropout.rate == 0.0:
        return x_BLD
    # A unit is kept where its 32 random bits reach the rate's share of their range.
    threshold = jnp.uint32(round(dropout.rate * 2**32))
    kept_BLD = _bits(dropout.keys_BL, site, x_BLD.shape[-1]) >= threshold
    factor_BLD = jnp.where(
        kept_BLD,
        1.0 / (1.0 - dropout.rate),
        0.0,
    )
    factor_BLD = jnp.where(
        dropout.active_BL[..., None],
        factor_BLD,
        1.0,
    )
    factor_BLD = factor_BLD.astype(x_BLD.dtype)

    # Positions after the first ones, which the noise covers, stay as they are.
    covered = factor_BLD.shape[1]
    if covered == x_BLD.shape[1]:
        return x_BLD * factor_BLD
    noisy_BLD = x_BLD[:, :covered] * factor_BLD
    return jnp.concatenate(
        [noisy_BLD, x_BLD[:, covered:]],
        axis=1,
    )

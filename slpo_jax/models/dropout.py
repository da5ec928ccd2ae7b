"""MC-dropout whose masks depend on a position's own key, and on nothing else.

The mask of one position at one site is a function of that position's key and the site's number. Rows can therefore be
batched, padded, bucketed or sharded in any way without changing a single mask.
"""

import jax
import jax.numpy as jnp
from flax import struct

SITES = ("attention", "mlp")
"""Where in a block dropout can be; a backbone's config says where it is."""
SITE_NUMBERS = 3
"""Of a layer. One is to spare: numbers decide masks, so they stay what they are."""


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


def _bits(keys_BL: jax.Array, site: int | jax.Array, width: int) -> jax.Array:
    """Hash (position's key, site, unit) by a counter: uint32 [B, L, width].

    The keys come out of threefry. Stretching one over the units of a site needs no cryptographic strength, and
    threefry would take most of a small model's step: two rounds of MurmurHash3's finaliser, with the key's second
    word mixed in between, do it in an eighth of the time.
    """
    words = jax.random.key_data(keys_BL)
    units = jnp.arange(width, dtype=jnp.uint32) + jnp.uint32(site * width)
    x = words[..., :1] + jnp.expand_dims(units * jnp.uint32(0x9E3779B9), range(words.ndim - 1))
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    x = (x ^ (x >> 16)) + words[..., 1:2]
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def drop(x_BLD: jax.Array, dropout: Dropout | None, site: int | jax.Array) -> jax.Array:
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
    width = x_BLD.shape[-1]
    kept_BLD = _bits(dropout.keys_BL, site, width) >= jnp.uint32(round(dropout.rate * 2**32))
    factor_BLD = jnp.where(kept_BLD, 1.0 / (1.0 - dropout.rate), 0.0)
    factor_BLD = jnp.where(dropout.active_BL[..., None], factor_BLD, 1.0).astype(x_BLD.dtype)
    covered = factor_BLD.shape[1]
    if covered == x_BLD.shape[1]:
        return x_BLD * factor_BLD
    return jnp.concatenate([x_BLD[:, :covered] * factor_BLD, x_BLD[:, covered:]], axis=1)

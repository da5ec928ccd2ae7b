"""The key-value cache, and attention over a shared prefix plus a row's own slots."""

import jax
import jax.numpy as jnp
from flax import struct

MASKED = float(jnp.finfo(jnp.float32).min)


@struct.dataclass
class KVCache:
    """Keys and values of the slots that later positions may attend to; an argument and a return value, never a variable.

    Attributes:
        keys, values: one array [B, S, H, Dh] a layer.
        valid: bool [B, S]. Used as a prefix, a cache of B rows may serve B*R rows (R in a row for each of its own);
            `valid` may then have B*R rows, so that each sees a part of its own.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    valid: jax.Array

    @property
    def slots(self) -> int:
        return self.valid.shape[1]


def empty_cache(layers: int, rows: int, slots: int, heads: int, head_width: int, dtype) -> KVCache:
    """A cache of zeros in which no slot is valid yet."""
    zeros = tuple(jnp.zeros((rows, slots, heads, head_width), dtype) for _ in range(layers))
    return KVCache(zeros, zeros, jnp.zeros((rows, slots), bool))


def join(first: KVCache, second: KVCache) -> KVCache:
    """One cache whose slots are those of `first`, then those of `second`."""

    def along_slots(a, b):
        return jnp.concatenate([a, b], axis=1)

    return jax.tree.map(along_slots, first, second)


def write(cache: KVCache, layer: int, k_BLHD: jax.Array, v_BLHD: jax.Array, start) -> tuple[jax.Array, jax.Array]:
    """The layer's keys and values [B, S, H, Dh] with slots start .. start+L-1 replaced."""
    return (
        jax.lax.dynamic_update_slice_in_dim(cache.keys[layer], k_BLHD, start, axis=1),
        jax.lax.dynamic_update_slice_in_dim(cache.values[layer], v_BLHD, start, axis=1),
    )


def own_mask(valid_BS: jax.Array, length: int, start) -> jax.Array:
    """bool [B, L, S]: query i (slot start+i) sees the valid slots up to its own."""
    slots = jnp.arange(valid_BS.shape[1])
    causal_LS = slots[None, :] <= start + jnp.arange(length)[:, None]
    return causal_LS[None] & valid_BS[:, None, :]


def attend(q_BLHD, k_BSHD, v_BSHD, mask_BLS, prefix=None) -> jax.Array:
    """Softmax attention over own slots and, without copying it for each row, over a shared prefix.

    Args:
        q_BLHD: queries of B = C*R rows.
        k_BSHD, v_BSHD: own keys and values.
        mask_BLS: bool, see `own_mask`. A query that sees nothing gets a finite, meaningless result.
        prefix: None or (keys [C, U, H, Dh], values [C, U, H, Dh], valid [C or B, U]).
    Returns:
        [B, L, H, Dh], in the dtype of the values; scores and softmax in float32.
    """
    rows, length, heads, head_width = q_BLHD.shape
    q_BLHD = q_BLHD * head_width**-0.5
    scores = jnp.einsum("blhd,bshd->bhls", q_BLHD, k_BSHD, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BLS[:, None], scores, MASKED)
    if prefix is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(v_BSHD.dtype)
        return jnp.einsum("bhls,bshd->blhd", weights, v_BSHD)
    k_CUHD, v_CUHD, valid_U = prefix
    shared, width = k_CUHD.shape[:2]
    q_CRLHD = q_BLHD.reshape(shared, -1, length, heads, head_width)
    before = jnp.einsum("crlhd,cuhd->crhlu", q_CRLHD, k_CUHD, preferred_element_type=jnp.float32)
    before = jnp.where(valid_U.reshape(shared, -1, 1, 1, width), before, MASKED)
    before = before.reshape(rows, heads, length, width)
    weights = jax.nn.softmax(jnp.concatenate([before, scores], axis=-1), axis=-1).astype(v_BSHD.dtype)
    weights_CRHLU = weights[..., :width].reshape(shared, -1, heads, length, width)
    out = jnp.einsum("crhlu,cuhd->crlhd", weights_CRHLU, v_CUHD).reshape(q_BLHD.shape)
    return out + jnp.einsum("bhls,bshd->blhd", weights[..., width:], v_BSHD)

"""The key-value cache, and attention over a shared prefix plus a row's own slots."""

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.dense import float_product, product

MASKED = float(jnp.finfo(jnp.float32).min)


@struct.dataclass
class KVCache:
    """Keys and values of slots that later positions may attend to; an argument and a return value, never a variable.

    Attributes:
        keys, values: one array [B, G, S, Dh] a layer, G key-value heads (heads before slots: no attention product needs
            a transpose).
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
    zeros = tuple(jnp.zeros((rows, heads, slots, head_width), dtype) for _ in range(layers))
    return KVCache(zeros, zeros, jnp.zeros((rows, slots), bool))


def join(first: KVCache, second: KVCache) -> KVCache:
    """One cache whose slots are those of `first`, then those of `second`."""

    def along_slots(a, b):
        return jnp.concatenate([a, b], axis=-2)

    return KVCache(
        jax.tree.map(along_slots, first.keys, second.keys),
        jax.tree.map(along_slots, first.values, second.values),
        jnp.concatenate([first.valid, second.valid], axis=1),
    )


def grow(cache: KVCache, slots: int) -> KVCache:
    """The cache with so many slots, of which those that it had not yet are zeros that nobody sees."""
    more = slots - cache.slots

    def longer(x_BGSD):
        return jnp.pad(x_BGSD, ((0, 0), (0, 0), (0, more), (0, 0)))

    keys, values = (jax.tree.map(longer, layers) for layers in (cache.keys, cache.values))
    return KVCache(keys, values, jnp.pad(cache.valid, ((0, 0), (0, more))))


def write(cache: KVCache, layer: int, k_BGLD: jax.Array, v_BGLD: jax.Array, start) -> tuple[jax.Array, jax.Array]:
    """The layer's keys and values [B, G, S, Dh] with slots start .. start+L-1 replaced."""
    return (
        jax.lax.dynamic_update_slice_in_dim(cache.keys[layer], k_BGLD, start, axis=2),
        jax.lax.dynamic_update_slice_in_dim(cache.values[layer], v_BGLD, start, axis=2),
    )


def own_mask(valid_BS: jax.Array, length: int, start, owner_BS: jax.Array | None = None) -> jax.Array:
    """bool [B, L, S]: query i (slot start+i) sees the valid slots up to its own, of the same owner if there are any."""
    slots = jnp.arange(valid_BS.shape[1])
    causal_LS = slots[None, :] <= start + jnp.arange(length)[:, None]
    mask_BLS = causal_LS[None] & valid_BS[:, None, :]
    return mask_BLS if owner_BS is None else mask_BLS & (owner_BS[:, :, None] == owner_BS[:, None, :])


def attend(q_BHLD, k_BGSD, v_BGSD, mask_BLS, prefix=None) -> jax.Array:
    """Softmax attention over own slots and, without copying it for each row, over a shared prefix.

    Args:
        q_BHLD: queries of B = C*R rows.
        k_BGSD, v_BGSD: own keys and values of G heads, each read, without being copied, by H/G consecutive query heads.
        mask_BLS: bool, see `own_mask`. A query that sees nothing gets a finite, meaningless result.
        prefix: None or (keys [C, G, U, Dh], values [C, G, U, Dh], valid [C or B, U]).
    Returns:
        [B, H, L, Dh], in the dtype of the values; scores and softmax in float32.
    """
    (rows, heads, length, _), groups = q_BHLD.shape, k_BGSD.shape[1]

    def stacked(x):  # [B, H, L, .] -> [B, G, H/G*L, .]: the query heads that share a key become one matrix
        return x.reshape(rows, groups, -1, x.shape[-1])

    def unstacked(x):
        return x.reshape(rows, heads, length, x.shape[-1])

    q_BHLD = q_BHLD * q_BHLD.shape[-1] ** -0.5
    scores = unstacked(float_product("bgqd,bgsd->bgqs", stacked(q_BHLD), k_BGSD))
    scores = jnp.where(mask_BLS[:, None], scores, MASKED)
    if prefix is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(v_BGSD.dtype)
        return unstacked(product("bgqs,bgsd->bgqd", stacked(weights), v_BGSD))
    k_CGUD, v_CGUD, valid_U = prefix
    shared, _, width, _ = k_CGUD.shape

    def grouped(x):  # [B, H, L, .] -> [C, G, R*H/G*L, .]: and so do the rows that share a prefix
        x = x.reshape(shared, rows // shared, groups, -1, x.shape[-1]).swapaxes(1, 2)
        return x.reshape(shared, groups, -1, x.shape[-1])

    def ungrouped(x):
        x = x.reshape(shared, groups, rows // shared, -1, x.shape[-1]).swapaxes(1, 2)
        return x.reshape(rows, heads, length, x.shape[-1])

    before = float_product("cgqd,cgud->cgqu", grouped(q_BHLD), k_CGUD)
    seen = jnp.broadcast_to(valid_U.reshape(shared, -1, width), (shared, rows // shared, width))
    before = jnp.where(seen.reshape(rows, 1, 1, width), ungrouped(before), MASKED)
    weights = jax.nn.softmax(jnp.concatenate([before, scores], axis=-1), axis=-1).astype(v_BGSD.dtype)
    out = ungrouped(product("cgqu,cgud->cgqd", grouped(weights[..., :width]), v_CGUD))
    return out + unstacked(product("bgqs,bgsd->bgqd", stacked(weights[..., width:]), v_BGSD))

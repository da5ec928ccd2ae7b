"""The key-value cache, and attention over a shared prefix plus a row's own slots."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.layers import float_product, kept
from slpo_jax.models.xla_cpu import after

SCORES = 2**29  # that are made at once: 2 GiB, of each of the passes that a vmap makes
MASKED = float(jnp.finfo(jnp.float32).min)
Slots = tuple[tuple[jax.Array, jax.Array], ...]
"""Keys and values [C, G, S, Dh] that a query looks at, its own and those before."""


@struct.dataclass
class KVCache:
    """Keys and values of slots that later positions may attend to; an argument and a return value, never a variable.

    Attributes:
        keys, values: one array [B, G, S, Dh] a layer, G key-value heads (heads before slots: no attention product needs
            a transpose); of a model whose layers are a loop, one array [layers, B, G, S, Dh].
        valid: bool [B, S]. Used as a prefix, a cache of B rows may serve B*R rows (R in a row for each of its own);
            `valid` may then have B*R rows, so that each sees a part of its own.
    """

    keys: tuple[jax.Array, ...] | jax.Array
    values: tuple[jax.Array, ...] | jax.Array
    valid: jax.Array

    @property
    def slots(self) -> int:
        return self.valid.shape[1]

    @property
    def rows_axes(self) -> "KVCache":
        """The axis of each array that is that of the rows."""
        axis = int(isinstance(self.keys, jax.Array))
        return KVCache(axis, axis, 0)  # type: ignore[arg-type]


def join(first: KVCache, second: KVCache) -> KVCache:
    """Join two caches, the slots of `first` before those of `second`."""

    def along_slots(a, b):
        return jnp.concatenate([a, b], axis=-2)

    return KVCache(
        jax.tree.map(along_slots, first.keys, second.keys),
        jax.tree.map(along_slots, first.values, second.values),
        jnp.concatenate([first.valid, second.valid], axis=1),
    )


def grow(cache: KVCache, slots: int) -> KVCache:
    """Return the cache with so many slots, of which new ones are zeros that nobody sees."""
    more = slots - cache.slots

    def longer(x_BGSD):
        return jnp.pad(
            x_BGSD, (*((0, 0) for _ in x_BGSD.shape[:-2]), (0, more), (0, 0))
        )

    keys, values = (
        jax.tree.map(longer, layers) for layers in (cache.keys, cache.values)
    )
    return KVCache(keys, values, jnp.pad(cache.valid, ((0, 0), (0, more))))


def write(
    slots: tuple[jax.Array, jax.Array], new: tuple[jax.Array, jax.Array], start
) -> tuple[jax.Array, jax.Array]:
    """Return keys and values [.., S, Dh] with slots start .. start+L-1 replaced by new ones [.., L, Dh]."""
    put = functools.partial(
        jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=-2
    )
    return put(slots[0], new[0]), put(slots[1], new[1])


def own_mask(
    valid_BS: jax.Array, length: int, start, owner_BS: jax.Array | None = None
) -> jax.Array:
    """Return bool [B, L, S]: query i (slot start+i) sees its owner's (if any) valid slots up to its own."""
    slots = jnp.arange(valid_BS.shape[1])
    causal_LS = slots[None, :] <= start + jnp.arange(length)[:, None]
    mask_BLS = causal_LS[None] & valid_BS[:, None, :]
    return (
        mask_BLS
        if owner_BS is None
        else mask_BLS & (owner_BS[:, :, None] == owner_BS[:, None, :])
    )


class _Part(NamedTuple):
    """Slots that R = B/C consecutive rows of queries look at together.

    Attributes:
        keys, values: [C, G, S, Dh].
        seen: bool [C or B, L or 1, S].
    """

    keys: jax.Array
    values: jax.Array
    seen: jax.Array

    def grouped(self, x_BHL: jax.Array) -> jax.Array:
        """Return [B, H, L, ..] -> [C, G, R*H/G*L, ..]: the query heads and rows that share a key become one matrix."""
        (rows, heads, length, *inner) = x_BHL.shape
        (shared, groups, _, _) = self.keys.shape
        x = x_BHL.reshape(
            shared, rows // shared, groups, heads // groups * length, *inner
        ).swapaxes(1, 2)
        return x.reshape(shared, groups, -1, *inner)

    def ungrouped(self, x: jax.Array, rows: int, heads: int, length: int) -> jax.Array:
        """Return [C, G, R*H/G*L, ..] -> [B, H, L, ..]."""
        (shared, groups, _, *inner) = x.shape
        x = x.reshape(shared, groups, rows // shared, -1, *inner).swapaxes(1, 2)
        return x.reshape(rows, heads, length, *inner)

    def scores(self, q_BHLD: jax.Array) -> jax.Array:
        """Return float32 [C, G, R*H/G*L, S]; `MASKED` where a query doesn't see a slot."""
        (rows, heads, length, _) = q_BHLD.shape
        (shared, groups, slots, _) = self.keys.shape
        scores = float_product("cgqd,cgsd->cgqs", self.grouped(q_BHLD), self.keys)
        seen_CRLS = self.seen.reshape(shared, -1, *self.seen.shape[1:])
        by_head = scores.reshape(
            shared, groups, rows // shared, heads // groups, length, slots
        )
        return jnp.where(seen_CRLS[:, None, :, None], by_head, MASKED).reshape(
            scores.shape
        )

    def weights(self, q_BHLD: jax.Array, most_BHL: jax.Array) -> jax.Array:
        """Return e to the scores less `most_BHL`, [C, G, R*H/G*L, S] in the dtype of the values."""
        return jnp.exp(self.scores(q_BHLD) - self.grouped(most_BHL)[..., None]).astype(
            self.values.dtype
        )


def _in_turn(function: Callable, slots: Slots, *queries: jax.Array) -> Any:
    """Return function(slots, *queries); where it makes many scores, of one key-value head after the other.

    Args:
        queries: each [B, H, L, ..], the first with a width; what comes out has heads, or those of keys, on axis 1 too.
    """
    groups = slots[0][0].shape[1]
    most = max(keys.shape[2] for keys, _ in slots)
    if queries[0][..., 0].size * most <= SCORES:
        return function(slots, *queries)

    def cut(x):
        return jnp.moveaxis(x.reshape(x.shape[0], groups, -1, *x.shape[2:]), 1, 0)

    def whole(x):
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    return jax.tree.map(
        whole,
        jax.lax.map(lambda part: function(*part), jax.tree.map(cut, (slots, *queries))),
    )


@jax.custom_vjp
def _attend(q_BHLD: jax.Array, slots: Slots, masks: tuple[jax.Array, ...]) -> jax.Array:
    return _attend_forward(q_BHLD, slots, masks)[0]


def _attend_forward(q_BHLD: jax.Array, slots: Slots, masks: tuple[jax.Array, ...]):
    outputs = kept(_in_turn(functools.partial(_outputs, masks), slots, q_BHLD))
    return outputs[-1], (slots, masks, (q_BHLD, *outputs))


def _attend_backward(residuals, g_BHLD: jax.Array):
    """Make the weights again: kept for a backward pass, they would be most of its memory."""
    slots, masks, residuals = residuals
    q_BHLD, *outputs = after(g_BHLD, residuals)
    return *_in_turn(
        functools.partial(_gradients, masks), slots, q_BHLD, *outputs, g_BHLD
    ), None


def _parts(slots: Slots, masks: tuple[jax.Array, ...]) -> list[_Part]:
    return [_Part(*slot, by) for slot, by in zip(slots, masks, strict=True)]


def _outputs(
    masks, slots: Slots, q_BHLD: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each query's greatest score, its sum of weights, and its output."""
    shape = q_BHLD.shape[:3]
    parts = _parts(slots, masks)
    most_BHL = functools.reduce(
        jnp.maximum,
        [part.ungrouped(part.scores(q_BHLD).max(-1), *shape) for part in parts],
    )
    whole_BHL = jnp.float32(0)
    out_BHLD = jnp.float32(0)
    for part in parts:
        weights = part.weights(q_BHLD, most_BHL)
        whole_BHL += part.ungrouped(weights.astype(jnp.float32).sum(-1), *shape)
        out_BHLD += part.ungrouped(
            float_product("cgqs,cgsd->cgqd", weights, part.values), *shape
        )
    return (
        most_BHL,
        whole_BHL,
        (out_BHLD / whole_BHL[..., None]).astype(parts[0].values.dtype),
    )


def _gradients(
    masks, slots: Slots, q_BHLD, most_BHL, whole_BHL, out_BHLD, g_BHLD
) -> tuple[jax.Array, Slots]:
    """Return the gradients of the queries, and of keys and values."""
    shape = q_BHLD.shape[:3]
    float32 = jnp.float32
    g_BHLD = (g_BHLD.astype(float32) / whole_BHL[..., None]).astype(q_BHLD.dtype)
    along_BHL = jnp.sum(g_BHLD.astype(float32) * out_BHLD.astype(float32), axis=-1)
    of_q = float32(0)
    of_slots = []
    for part in _parts(slots, masks):
        weights = part.weights(q_BHLD, most_BHL)
        g = part.grouped(g_BHLD)
        of_weights = (
            float_product("cgqd,cgsd->cgqs", g, part.values)
            - part.grouped(along_BHL)[..., None]
        )
        of_scores = (weights.astype(float32) * of_weights).astype(weights.dtype)
        of_keys = float_product("cgqs,cgqd->cgsd", of_scores, part.grouped(q_BHLD))
        of_values = float_product("cgqs,cgqd->cgsd", weights, g)
        of_q += part.ungrouped(
            float_product("cgqs,cgsd->cgqd", of_scores, part.keys), *shape
        )
        of_slots.append(
            (of_keys.astype(part.keys.dtype), of_values.astype(part.values.dtype))
        )
    return of_q.astype(q_BHLD.dtype), tuple(of_slots)


_attend.defvjp(_attend_forward, _attend_backward)


def attend(q_BHLD, k_BGSD, v_BGSD, mask_BLS, *before) -> jax.Array:
    """Attend, by softmax, over own slots and, without copying them, over slots that come before.

    Neither the scores nor the weights of a forward pass are kept for the backward pass (Dao et al., 2022).
    `jax.nn.dot_product_attention` would keep the weights, or in cuDNN's form has no gradient of the sums' logarithm, by
    which several calls are merged (jax 0.10).

    Args:
        q_BHLD: queries of B = C*R rows.
        k_BGSD, v_BGSD: own keys and values of G heads, each read, without being copied, by H/G consecutive query heads.
        mask_BLS: bool, see `own_mask`. A query that sees nothing gets a finite, meaningless result.
        before: (keys [C, G, U, Dh], values [C, G, U, Dh], valid [C or B, U]) each, as a prefix that rows share.
    Returns:
        [B, H, L, Dh], in the dtype of the values; scores and sums in float32.
    """
    slots = ((k_BGSD, v_BGSD), *((keys, values) for keys, values, _ in before))
    masks = (mask_BLS, *(valid[:, None] for *_, valid in before))
    return _attend(q_BHLD * q_BHLD.shape[-1] ** -0.5, slots, masks)

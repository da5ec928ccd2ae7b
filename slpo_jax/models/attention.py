"""The key-value cache, and attention over a shared prefix plus a row's own slots."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.layers import float_product, save_for_backward
from slpo_jax.models.xla_cpu import after

# The scores that are computed at once: 2 GiB, for each of the passes that a vmap makes.
SCORES = 2**29
MASKED = float(jnp.finfo(jnp.float32).min)
Slots = tuple[tuple[jax.Array, jax.Array], ...]
"""Keys and values [C, G, S, Dh] that a query attends to, its own and those before."""


@struct.dataclass
class KVCache:
    """Keys and values of slots that later positions may attend to; an argument and a return value, never a variable.

    Attributes:
        keys, values: one array [B, G, S, Dh] a layer, G key-value heads (heads before slots: no attention product needs
            a transpose); of a model whose layers are a loop, one array [layers, B, G, S, Dh].
        valid: bool [B, S]. Used as a prefix, a cache of B rows may serve B*R rows, R consecutive ones for each of its
            own; `valid` may then have B*R rows, so that each sees a part of its own.
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
    """Extend the cache to `slots` slots; the new ones are zeros that no query sees."""
    more = slots - cache.slots

    def pad_slots(x_BGSD):
        widths = [(0, 0)] * x_BGSD.ndim
        widths[-2] = (0, more)
        return jnp.pad(x_BGSD, widths)

    return KVCache(
        jax.tree.map(pad_slots, cache.keys),
        jax.tree.map(pad_slots, cache.values),
        jnp.pad(cache.valid, ((0, 0), (0, more))),
    )


def write(
    slots: tuple[jax.Array, jax.Array], new: tuple[jax.Array, jax.Array], start
) -> tuple[jax.Array, jax.Array]:
    """Return keys and values [.., S, Dh] with slots start .. start+L-1 replaced by new ones [.., L, Dh]."""
    keys, values = slots
    new_keys, new_values = new
    put = functools.partial(
        jax.lax.dynamic_update_slice_in_dim,
        start_index=start,
        axis=-2,
    )
    return put(keys, new_keys), put(values, new_values)


def own_mask(
    valid_BS: jax.Array, length: int, start, owner_BS: jax.Array | None = None
) -> jax.Array:
    """Return bool [B, L, S]: query i (slot start+i) sees its owner's (if any) valid slots up to its own."""
    # No query sees later slots, or those of another sequence in its row.
    slots_S = jnp.arange(valid_BS.shape[1])
    queries_L = start + jnp.arange(length)
    causal_LS = slots_S[None, :] <= queries_L[:, None]
    mask_BLS = causal_LS[None] & valid_BS[:, None, :]
    if owner_BS is None:
        return mask_BLS
    same_owner_BSS = owner_BS[:, :, None] == owner_BS[:, None, :]
    return mask_BLS & same_owner_BSS


class _Part(NamedTuple):
    """Slots that R = B/C consecutive rows of queries look at together.

    Attributes:
        keys, values: [C, G, S, Dh].
        seen: bool [C or B, L or 1, S].
    """

    keys: jax.Array
    values: jax.Array
    seen: jax.Array

    def group(self, x_BHL: jax.Array) -> jax.Array:
        """Return [B, H, L, ..] -> [C, G, R*H/G*L, ..]: the query heads and rows that share a key become one matrix."""
        rows, heads, length, *inner = x_BHL.shape
        shared, groups = self.keys.shape[:2]
        x = x_BHL.reshape(
            shared,
            rows // shared,
            groups,
            heads // groups * length,
            *inner,
        )
        return x.swapaxes(1, 2).reshape(shared, groups, -1, *inner)

    def ungroup(
        self,
        x: jax.Array,
        rows: int,
        heads: int,
        length: int,
    ) -> jax.Array:
        """Return [C, G, R*H/G*L, ..] -> [B, H, L, ..]."""
        shared, groups, _, *inner = x.shape
        x = x.reshape(shared, groups, rows // shared, -1, *inner)
        return x.swapaxes(1, 2).reshape(rows, heads, length, *inner)

    def scores(self, q_BHLD: jax.Array) -> jax.Array:
        """Return float32 [C, G, R*H/G*L, S]; `MASKED` where a query doesn't see a slot."""
        rows, heads, length, _ = q_BHLD.shape
        shared, groups, slots, _ = self.keys.shape
        scores = float_product("cgqd,cgsd->cgqs", self.group(q_BHLD), self.keys)
        # The mask has an axis of rows, and none of heads.
        by_head = scores.reshape(
            shared,
            groups,
            rows // shared,
            heads // groups,
            length,
            slots,
        )
        seen_CRLS = self.seen.reshape(shared, -1, *self.seen.shape[1:])
        masked = jnp.where(
            seen_CRLS[:, None, :, None],
            by_head,
            MASKED,
        )
        return masked.reshape(scores.shape)

    def weights(self, q_BHLD: jax.Array, most_BHL: jax.Array) -> jax.Array:
        """Return e to the scores less `most_BHL`, [C, G, R*H/G*L, S] in the dtype of the values."""
        most = self.group(most_BHL)[..., None]
        weights = jnp.exp(self.scores(q_BHLD) - most)
        return weights.astype(self.values.dtype)


def _map_heads(function: Callable, slots: Slots, *queries: jax.Array) -> Any:
    """Return function(slots, *queries), one key-value head after the other where the scores would be many.

    Args:
        queries: each [B, H, L, ..], the first with a width; all results have heads, or those of keys, on axis 1 too.
    """
    # Compute all heads at once if their scores fit.
    groups = slots[0][0].shape[1]
    longest = max(keys.shape[2] for keys, _ in slots)
    if queries[0][..., 0].size * longest <= SCORES:
        return function(slots, *queries)

    # Otherwise loop over the key-value heads, each with the query heads that read it.
    def split(x):
        by_group = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
        return jnp.moveaxis(by_group, 1, 0)

    def join_groups(x):
        by_group = jnp.moveaxis(x, 0, 1)
        return by_group.reshape(x.shape[1], -1, *x.shape[3:])

    arguments = jax.tree.map(split, (slots, *queries))
    results = jax.lax.map(lambda one: function(*one), arguments)
    return jax.tree.map(join_groups, results)


@jax.custom_vjp
def _attend(
    q_BHLD: jax.Array,
    slots: Slots,
    masks: tuple[jax.Array, ...],
) -> jax.Array:
    return _attend_forward(q_BHLD, slots, masks)[0]


def _attend_forward(
    q_BHLD: jax.Array,
    slots: Slots,
    masks: tuple[jax.Array, ...],
):
    outputs = save_for_backward(
        _map_heads(
            functools.partial(_outputs, masks),
            slots,
            q_BHLD,
        )
    )
    return outputs[-1], (slots, masks, (q_BHLD, *outputs))


def _attend_backward(residuals, g_BHLD: jax.Array):
    """Recompute the weights: kept for a backward pass, they would be most of its memory."""
    slots, masks, kept_residuals = residuals
    q_BHLD, *outputs = after(g_BHLD, kept_residuals)
    gradients = functools.partial(_gradients, masks)
    of_q, of_slots = _map_heads(
        gradients,
        slots,
        q_BHLD,
        *outputs,
        g_BHLD,
    )
    return of_q, of_slots, None


def _parts(slots: Slots, masks: tuple[jax.Array, ...]) -> list[_Part]:
    return [
        _Part(keys, values, seen)
        for (keys, values), seen in zip(slots, masks, strict=True)
    ]


def _outputs(
    masks, slots: Slots, q_BHLD: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each query's greatest score, its sum of weights, and its output."""
    shape = q_BHLD.shape[:3]
    parts = _parts(slots, masks)

    # The greatest score over all parts, which keeps the exponentials finite.
    most_by_part = []
    for part in parts:
        most = part.scores(q_BHLD).max(-1)
        most_by_part.append(part.ungroup(most, *shape))
    most_BHL = functools.reduce(jnp.maximum, most_by_part)

    # The sum of the weights and the weighted sum of the values, part by part.
    whole_BHL = jnp.float32(0)
    out_BHLD = jnp.float32(0)
    for part in parts:
        weights = part.weights(q_BHLD, most_BHL)
        whole = weights.astype(jnp.float32).sum(-1)
        whole_BHL += part.ungroup(whole, *shape)
        out = float_product("cgqs,cgsd->cgqd", weights, part.values)
        out_BHLD += part.ungroup(out, *shape)
    mean_BHLD = out_BHLD / whole_BHL[..., None]
    return most_BHL, whole_BHL, mean_BHLD.astype(parts[0].values.dtype)


def _gradients(
    masks, slots: Slots, q_BHLD, most_BHL, whole_BHL, out_BHLD, g_BHLD
) -> tuple[jax.Array, Slots]:
    """Return the gradients of the queries, and of keys and values."""
    shape = q_BHLD.shape[:3]
    float32 = jnp.float32

    # The cotangent of the weighted sum, and its part along the output, which the softmax takes off every score.
    g_BHLD = g_BHLD.astype(float32) / whole_BHL[..., None]
    g_BHLD = g_BHLD.astype(q_BHLD.dtype)
    along_BHL = jnp.sum(
        g_BHLD.astype(float32) * out_BHLD.astype(float32),
        axis=-1,
    )

    of_q = float32(0)
    of_slots = []
    for part in _parts(slots, masks):
        weights = part.weights(q_BHLD, most_BHL)
        g = part.group(g_BHLD)

        # From the output to the weights, and through the softmax to the scores.
        of_weights = float_product("cgqd,cgsd->cgqs", g, part.values)
        of_weights = of_weights - part.group(along_BHL)[..., None]
        of_scores = weights.astype(float32) * of_weights
        of_scores = of_scores.astype(weights.dtype)

        # To keys, values and queries; the queries' gradient is the sum over the parts.
        q = part.group(q_BHLD)
        of_keys = float_product("cgqs,cgqd->cgsd", of_scores, q)
        of_values = float_product("cgqs,cgqd->cgsd", weights, g)
        of_q_here = float_product("cgqs,cgsd->cgqd", of_scores, part.keys)
        of_q += part.ungroup(of_q_here, *shape)
        of_keys = of_keys.astype(part.keys.dtype)
        of_values = of_values.astype(part.values.dtype)
        of_slots.append((of_keys, of_values))
    return of_q.astype(q_BHLD.dtype), tuple(of_slots)


_attend.defvjp(_attend_forward, _attend_backward)


def attend(q_BHLD, k_BGSD, v_BGSD, mask_BLS, *before) -> jax.Array:
    """Attend by softmax over a row's own slots and, without copying them, over slots that come before.

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
    # Each stretch of slots has keys, values and a mask of its own; all share one softmax.
    slots = [(k_BGSD, v_BGSD)]
    masks = [mask_BLS]
    for keys, values, valid in before:
        slots.append((keys, values))
        masks.append(valid[:, None])
    scale = q_BHLD.shape[-1] ** -0.5
    return _attend(
        q_BHLD * scale,
        tuple(slots),
        tuple(masks),
    )

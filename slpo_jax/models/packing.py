"""Sequences laid end to end, so that no time is spent on slots that hold nothing.

A rollout that stops at tau < T and answers in fewer than A tokens leaves slots unused: about half of them in practice.
So only the used slots of each prompt's G rollouts are scored, in one row of S packed slots a prompt. A padded batch
of prompts is half padding too: all of them can be one row. The place of a slot changes nothing: positions, masks
and noise belong to the slot, and a packed slot sees the slots of its own sequence alone.
"""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Packing:
    """The places of the used slots of each row's G sequences, sequence by sequence.

    Attributes:
        source_BS: int in [0, G*X), the slot that each packed slot holds, counted through the sequences.
        used_BS: bool, whether the packed slot holds a used one.
        packed_BM: int [B, G*X], the place of each slot; means nothing for an unused one.
        used_BM: bool, whether the slot is used.
        slots: X, slots of one sequence; may be 0, where thought has no latents.
        group: G, sequences of a row.
    """

    source_BS: jax.Array
    used_BS: jax.Array
    packed_BM: jax.Array
    used_BM: jax.Array
    slots: int = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)

    @property
    def capacity(self) -> int:
        """S, the packed slots of a row."""
        return self.source_BS.shape[1]

    @property
    def owner_BS(self) -> jax.Array:
        """The number, in its row, of the sequence that a packed slot belongs to."""
        return self.source_BS // max(self.slots, 1)

    def pack(self, x_NX: jax.Array) -> jax.Array:
        """Return [B*G, X, ..] -> [B, S, ..]."""
        _, _, *inner = x_NX.shape
        rows = self.source_BS.shape[0]
        x_BM = x_NX.reshape(rows, self.group * self.slots, *inner)
        return _move(
            x_BM,
            from_BO=self.source_BS,
            back_BI=self.packed_BM,
            used_BI=self.used_BM,
        )

    def unpack(self, x_BS: jax.Array) -> jax.Array:
        """Return [B, S, ..] -> [B*G, X, ..]; finite, but meaningless, at unused slots."""
        rows, _, *inner = x_BS.shape
        x_BM = _move(
            x_BS,
            from_BO=self.packed_BM,
            back_BI=self.source_BS,
            used_BI=self.used_BS,
        )
        return x_BM.reshape(rows * self.group, self.slots, *inner)


def pack(used_NX: jax.Array, group: int, capacity: int) -> Packing:
    """Pack slots, the used ones first.

    Args:
        used_NX: bool, N = B*group sequences, a row's G consecutive.
        capacity: S; used slots beyond it are lost, see `most_used`.
    """
    sequences, slots = used_NX.shape
    used_BM = used_NX.reshape(sequences // group, group * slots)

    # The stable order of a row's slots, the used ones first, and each used slot's place in it.
    order_BM = jnp.argsort(~used_BM, axis=1, stable=True)
    source_BS = order_BM[:, :capacity]
    place_BM = jnp.cumsum(used_BM, axis=1) - 1
    packed_BM = jnp.clip(place_BM, 0, capacity - 1)
    used_BS = _take_by_row(used_BM, source_BS)
    return Packing(source_BS, used_BS, packed_BM, used_BM, slots, group)


def most_used(used_NX: jax.Array, group: int) -> jax.Array:
    """Return int: the used slots of the row that has most of them."""
    sequences, slots = used_NX.shape
    used_BM = used_NX.reshape(sequences // group, group * slots)
    used_B = used_BM.sum(axis=1)
    return used_B.max()


def _move(
    x_BI: jax.Array,
    from_BO: jax.Array,
    back_BI: jax.Array,
    used_BI: jax.Array,
) -> jax.Array:
    """Move [B, I, ..] -> [B, O, ..], by the source of each output.

    Args:
        back_BI: the output that each used input goes to.
        used_BI: bool; inputs that are not used have no gradient.
    """
    if not jnp.issubdtype(x_BI.dtype, jnp.floating):
        return _take_by_row(x_BI, from_BO)

    # A used input goes to one output only, so the gradient is a gather too: autodiff would make it a slow scatter.
    @jax.custom_vjp
    def move(x_BI, from_BO, back_BI, used_BI):
        return _take_by_row(x_BI, from_BO)

    def forward(x_BI, from_BO, back_BI, used_BI):
        return move(x_BI, from_BO, back_BI, used_BI), (back_BI, used_BI)

    def backward(residuals, g_BO):
        back_BI, used_BI = residuals
        ones = (1,) * (g_BO.ndim - 2)
        is_used = used_BI.reshape(*used_BI.shape, *ones)
        g_BI = jnp.where(is_used, _take_by_row(g_BO, back_BI), 0)
        return g_BI, None, None, None

    move.defvjp(forward, backward)
    return move(x_BI, from_BO, back_BI, used_BI)


def _take_by_row(x_BM: jax.Array, index_BS: jax.Array) -> jax.Array:
    # Not take_along_axis: x may be typed keys.
    row_B1 = jnp.arange(x_BM.shape[0])[:, None]
    return x_BM[row_B1, index_BS]

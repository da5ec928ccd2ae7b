"""Sequences laid end to end, so that no time is spent on slots that hold nothing.

A rollout that stops at tau < T and answers in fewer than A tokens leaves slots unused: about half of them in practice.
Of each prompt's G rollouts only the used slots are scored, in one row of S packed slots a prompt. A padded batch
of prompts is half padding too: all of them can be one row. Where a slot is packed changes nothing: positions, masks
and noise belong to the slot, and a packed slot sees its own sequence's alone.
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
        packed_BM: int [B, G*X], where each slot is packed; means nothing for an unused one.
        used_BM: bool, which slots are used.
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

    def packed(self, x_NX: jax.Array) -> jax.Array:
        """Return [B*G, X, ..] -> [B, S, ..]."""
        x_BM = x_NX.reshape(
            self.source_BS.shape[0], self.group * self.slots, *x_NX.shape[2:]
        )
        return _move(x_BM, self.source_BS, self.packed_BM, self.used_BM)

    def unpacked(self, x_BS: jax.Array) -> jax.Array:
        """Return [B, S, ..] -> [B*G, X, ..]; finite, but meaningless, at unused slots."""
        x_BM = _move(x_BS, self.packed_BM, self.source_BS, self.used_BS)
        return x_BM.reshape(x_BS.shape[0] * self.group, self.slots, *x_BS.shape[2:])


def pack(used_NX: jax.Array, group: int, capacity: int) -> Packing:
    """Pack slots, the used ones first.

    Args:
        used_NX: bool, N = B*group sequences, a row's G in a row.
        capacity: S; used slots beyond it are lost, see `most_used`.
    """
    rows, slots = used_NX.shape
    used_BM = used_NX.reshape(rows // group, group * slots)
    source_BS = jnp.argsort(~used_BM, axis=1, stable=True)[:, :capacity]
    packed_BM = jnp.clip(jnp.cumsum(used_BM, axis=1) - 1, 0, capacity - 1)
    return Packing(
        source_BS, _rows_take(used_BM, source_BS), packed_BM, used_BM, slots, group
    )


def most_used(used_NX: jax.Array, group: int) -> jax.Array:
    """Return int: the used slots of the row that has most of them."""
    rows, slots = used_NX.shape
    return used_NX.reshape(rows // group, group * slots).sum(axis=1).max()


def _move(
    x_BI: jax.Array, from_BO: jax.Array, back_BI: jax.Array, used_BI: jax.Array
) -> jax.Array:
    """Move [B, I, ..] -> [B, O, ..]; `back_BI` is where what is used of x went; the rest has no gradient."""
    if not jnp.issubdtype(x_BI.dtype, jnp.floating):
        return _rows_take(x_BI, from_BO)

    # What is used goes to one packed slot only, so the gradient is a gather too: autodiff would make it a slow scatter.
    @jax.custom_vjp
    def move(x_BI, from_BO, back_BI, used_BI):
        return _rows_take(x_BI, from_BO)

    def forward(x_BI, from_BO, back_BI, used_BI):
        return move(x_BI, from_BO, back_BI, used_BI), (back_BI, used_BI)

    def backward(residuals, g_BO):
        back_BI, used_BI = residuals
        used_BI = used_BI.reshape(*used_BI.shape, *(1,) * (g_BO.ndim - 2))
        return jnp.where(used_BI, _rows_take(g_BO, back_BI), 0), None, None, None

    move.defvjp(forward, backward)
    return move(x_BI, from_BO, back_BI, used_BI)


def _rows_take(x_BM: jax.Array, index_BS: jax.Array) -> jax.Array:
    # Not take_along_axis: x may be typed keys.
    return x_BM[jnp.arange(x_BM.shape[0])[:, None], index_BS]

"""Trajectories laid end to end, so that scoring spends no time on slots that hold nothing.

A rollout that stops at tau < T and answers in fewer than A tokens leaves slots unused: about half of them in practice.
Of each prompt's G rollouts only the used slots are scored, in one row of S places a prompt. Where a slot lies in the
row changes nothing: positions, masks and noise belong to the slot, and a place sees its own rollout's places alone.
"""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Packing:
    """Where the used slots of each prompt's G rollouts lie, rollout by rollout.

    Attributes:
        source_BS: int in [0, G*X), the slot at each place, counted through the rollouts.
        used_BS: bool, whether the place holds a used slot.
        place_BM: int [B, G*X], the place of each slot; means nothing for an unused one.
        slots: X, slots of one rollout.
    """

    source_BS: jax.Array
    used_BS: jax.Array
    place_BM: jax.Array
    slots: int = struct.field(pytree_node=False)

    @property
    def rollout_BS(self) -> jax.Array:
        """Which of its prompt's rollouts a place belongs to."""
        return self.source_BS // self.slots

    def packed(self, x_NX: jax.Array) -> jax.Array:
        """[B*G, X, ..] -> [B, S, ..]."""
        x_BM = x_NX.reshape(self.source_BS.shape[0], -1, *x_NX.shape[2:])
        return _rows_take(x_BM, self.source_BS)

    def unpacked(self, x_BS: jax.Array) -> jax.Array:
        """[B, S, ..] -> [B*G, X, ..]; finite, but meaningless, at unused slots."""
        return _rows_take(x_BS, self.place_BM).reshape(-1, self.slots, *x_BS.shape[2:])


def pack(used_NX: jax.Array, group: int, places: int) -> Packing:
    """Used slots first.

    Args:
        used_NX: bool, N = B*group rows, a prompt's rows in a row.
        places: S; used slots beyond it are lost, see `most_used`.
    """
    slots = used_NX.shape[1]
    used_BM = used_NX.reshape(-1, group * slots)
    source_BS = jnp.argsort(~used_BM, axis=1, stable=True)[:, :places]
    place_BM = jnp.clip(jnp.cumsum(used_BM, axis=1) - 1, 0, places - 1)
    return Packing(source_BS, _rows_take(used_BM, source_BS), place_BM, slots)


def most_used(used_NX: jax.Array, group: int) -> jax.Array:
    """int: the used slots of the prompt that has most of them."""
    return used_NX.reshape(-1, group * used_NX.shape[1]).sum(axis=1).max()


def _rows_take(x_BM: jax.Array, index_BS: jax.Array) -> jax.Array:
    # Not take_along_axis: x may be typed keys.
    return x_BM[jnp.arange(x_BM.shape[0])[:, None], index_BS]

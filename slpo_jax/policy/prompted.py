"""Problems to roll out, and what decides on their answers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Prompts:
    """Left-padded prompts: tokens int [N, P], valid bool [N, P]; of numpy on the host, of jax inside jit.

    Attributes:
        capacity: if not 0, the prompts of one device's batch (or micro-batch) are encoded end to end, in one row of so
            many slots, which have to be enough for all their tokens: see `data.batches.end_to_end`.
    """

    tokens: Any
    valid: Any
    capacity: int = struct.field(pytree_node=False, default=0)

    @property
    def lengths(self) -> jax.Array:
        """Real tokens of each row, int [N]."""
        return self.valid.sum(axis=1)


@struct.dataclass
class PromptedBatch:
    """Problems to roll out.

    Attributes:
        prompts: of B rows.
        references: encoded for the verifier, uint8 [B, R].
        index: int [B], what randomness is drawn by: `data.batches.draw_numbers`.
        answers: int [B, A], the reference answers' tokens up to and including eos, then pad; None where no objective
            asks for them.
    """

    prompts: Prompts
    references: Any
    index: Any
    answers: Any = None


def repeat_rows(tree, copies: int):
    """Each row `copies` times in a row."""
    return jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), tree)

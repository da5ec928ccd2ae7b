"""Problems to roll out, and what decides on their answers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.policy.rollout import Prompts

RewardFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(tokens int [N, A], references uint8 [N, R]) -> bool [N], traceable."""


@struct.dataclass
class PromptedBatch:
    """Problems to roll out: prompts, encoded references uint8 [B, R], global example indices int [B]."""

    prompts: Prompts
    references: Any
    index: Any


def repeat_rows(tree, copies: int):
    """Each row `copies` times in a row."""
    return jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), tree)

"""What completions earn that nobody has judged: those that are truncated, and those that a reward fails on."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Truncated = Literal["lowest", "value", "masked", "judged"]
"""Ways to reward a truncated completion, see `config.rl.truncated`."""


@dataclass(frozen=True)
class Unjudged:
    """The rule for completions that are not judged.

    Attributes:
        way: see `config.rl.truncated`.
        value: what each earns where the way is "value".
    """

    way: Truncated = "lowest"
    value: float = 0.0

    @property
    def overrides_truncated(self) -> bool:
        """Whether it is for every truncated completion, and not only for those that no reward has judged."""
        return self.way in ("value", "masked")

    def fill(self, rewards: jax.Array, unjudged: jax.Array) -> jax.Array:
        """Return the rewards of a batch, of which those that are masked are NaN.

        Args:
            rewards: float32, of any shape, of the whole batch.
            unjudged: bool, of the same shape.
        Returns:
            float32. By "lowest" and "judged" an unjudged completion earns the lowest reward of those that are judged,
            and at most 0, so that it can't be right, and verifiers of 0 and 1 say what they say on the device.
        """
        if self.way == "value":
            return jnp.where(unjudged, self.value, rewards)
        if self.way == "masked":
            return jnp.where(unjudged, jnp.nan, rewards)
        return jnp.where(
            unjudged, jnp.min(rewards, initial=0.0, where=~unjudged), rewards
        )


LOWEST = Unjudged()

"""The laws of a step of thought. A new one is a file here, a line in `THINKERS`, and `config.thinker.name`."""

from slpo_jax.policy.thinkers.additive import Additive
from slpo_jax.policy.thinkers.latent import Latent
from slpo_jax.policy.thinkers.thinker import Action, Thinker

THINKERS = {"latent": Latent, "additive": Additive}
"""By name the settings of a thinker (`config.thinker.NAME`), which make it of a reasoner and a gate."""

__all__ = ["THINKERS", "Action", "Thinker"]

"""Latents as the reasoner makes them: what noise they have is dropout's (COCONUT, CODI)."""

import dataclasses

from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import LatentPolicy, LatentPolicySettings


@dataclasses.dataclass(frozen=True)
class Latent(LatentPolicySettings):
    """Nothing to set."""

    of_latents = True
    is_the_reasoners = True

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """The action is the latent itself; its density, over dropout's masks, is intractable."""

        def draw(params, hidden_BLD, keys_BL=None):
            return reasoner.transition(params, hidden_BLD)

        return LatentPolicy.seen_as_fed(gate, draw)

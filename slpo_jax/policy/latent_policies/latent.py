"""Latents as the reasoner makes them: what noise they have is dropout's (COCONUT, CODI)."""

import dataclasses

from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import LatentPolicy, LatentPolicySettings, gaussian_latent_policy
from slpo_jax.settings import setting


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


@dataclasses.dataclass(frozen=True)
class Additive(LatentPolicySettings):
    """h + sigma n, with n standard normal and h the reasoner's own latent (for CODI after the projector).

    Attributes:
        sigma: standard deviation of each coordinate; published: 0.6 for COCONUT, 1.4 for CODI, on GPT-2.
    """

    of_latents = True
    is_the_reasoners = True
    has_likelihood = True

    sigma: float = setting(0.6, above=0)

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """The action is the noisy latent, which the gate sees too."""
        return gaussian_latent_policy(reasoner.transition, lambda _: self.sigma, gate)

"""Soft tokens (Soft Thinking, Zhang et al., 2025): each step is the mean embedding of the likeliest next tokens."""

import dataclasses

from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import LatentPolicy
from slpo_jax.policy.latent_policies.mixture import Kept, ending_at


@dataclasses.dataclass(frozen=True)
class Soft(Kept):
    """Deterministic: what noise it has is dropout's. The defaults are the paper's program's."""

    @property
    def mixed(self) -> int:
        return min(filter(None, (self.top_k, self.most)), default=0)

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """The action is the mixture, which the gate sees too."""

        def draw(params, hidden_BLD, keys_BL=None):
            return self.mean(reasoner, params, hidden_BLD)

        return ending_at(LatentPolicy.seen_as_fed(gate, draw), self, reasoner)

"""The laws of a step of thought. A new one is a file here, a line in `LATENT_POLICIES`, and its name in a config."""

import dataclasses

from slpo_jax.policy.latent_policies.adalr import Adalr
from slpo_jax.policy.latent_policies.gumbel_top_k import GumbelTopK
from slpo_jax.policy.latent_policies.hybrid import Hybrid
from slpo_jax.policy.latent_policies.latent import Additive, Colar, Latent
from slpo_jax.policy.latent_policies.latent_policy import Action, LatentPolicy, LatentPolicySettings
from slpo_jax.policy.latent_policies.soft_tokens import Gumbel, NoisySoft, Soft
from slpo_jax.settings import Checked, selection

LATENT_POLICIES: dict[str, type[LatentPolicySettings]] = {
    "latent": Latent,
    "additive": Additive,
    "colar": Colar,
    "adalr": Adalr,
    "soft": Soft,
    "noisy_soft": NoisySoft,
    "gumbel": Gumbel,
    "gumbel_top_k": GumbelTopK,
    "hybrid": Hybrid,
}
"""By name the settings of a latent policy (`config.latent_policy.NAME`), which make it of a reasoner and a gate."""


def with_likelihood(in_vectors: bool = False) -> str:
    """Return the names of latent policies with a likelihood, for messages.

    Args:
        in_vectors: without those whose thoughts are tokens.
    """
    settings = LATENT_POLICIES.items()
    return ", ".join(name for name, kind in settings if kind.has_likelihood and not (in_vectors and kind.writes))


def own_of(architecture: str) -> str:
    """Return the name of the latent policy that is for this architecture alone; "" where there is none."""
    return next((name for name, kind in LATENT_POLICIES.items() if kind.of_architecture == architecture), "")


def has_parameters(name: str) -> bool:
    """Tell whether a latent policy has parameters of its own, as far as can be told of one that is not here."""
    return name not in LATENT_POLICIES or LATENT_POLICIES[name].has_parameters


@dataclasses.dataclass(frozen=True)
class LatentPolicyConfig(Checked):
    """The section `config.latent_policy`: the name of the one that is used, and beside it the settings of each."""

    name: str = "latent"

    @property
    def selected(self) -> LatentPolicySettings:
        """The settings of the latent policy that is used."""
        settings: LatentPolicySettings = getattr(self, self.name)
        return settings


def latent_policy_config() -> LatentPolicyConfig:
    """Make the defaults, with a section for each of `LATENT_POLICIES`."""
    section: LatentPolicyConfig = selection(LatentPolicyConfig, "name", "latent", LATENT_POLICIES)
    return section


__all__ = [
    "LATENT_POLICIES", "Action", "LatentPolicy", "LatentPolicyConfig", "LatentPolicySettings",
    "has_parameters", "latent_policy_config", "own_of", "with_likelihood",
]  # fmt: skip

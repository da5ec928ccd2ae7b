"""Soft tokens with Gaussian noise (Soft Tokens, Butt et al., 2025): a mixture of embeddings with an exact density."""

import dataclasses

import jax
import jax.numpy as jnp

from slpo_jax.config.bounds import setting
from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import LatentPolicy, gaussian_latent_policy
from slpo_jax.policy.latent_policies.mixture import Kept, ending_at


@dataclasses.dataclass(frozen=True)
class NoisySoft(Kept):
    """x + sigma n, n standard normal, x the mixture at temperature 0.5 ("soft") or near 0 ("fuzzy" tokens).

    Attributes:
        scale: sigma as a multiple of the root mean square of the embeddings' coordinates.
    """

    has_likelihood = True

    temperature: float = setting(0.5, above=0)
    top_k: int = setting(0, least=0, note="0 keeps all")
    top_p: float = setting(1.0, above=0, most=1)
    min_p: float = setting(0.0, least=0, most=1)
    most: int = setting(0, least=0, note="0 keeps all")
    scale: float = setting(0.33, above=0)

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """The action is the noisy mixture, which the gate sees too."""

        def sigma(params):
            table_VD = reasoner.embed(params, jnp.arange(reasoner.config.vocab_size)).astype(jnp.float32)
            return jax.lax.stop_gradient(self.scale * jnp.sqrt(jnp.mean(jnp.square(table_VD))))

        noisy = gaussian_latent_policy(lambda params, hidden_BLD: self.mean(reasoner, params, hidden_BLD), sigma, gate)
        return ending_at(noisy, self, reasoner)

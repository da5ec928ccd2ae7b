"""Soft tokens by Gumbel-softmax (LEPO): each step is a random mixture of the likeliest next tokens' embeddings."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from slpo_jax.config.bounds import setting
from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import LatentPolicy
from slpo_jax.policy.latent_policies.mixture import Kept, ending_at, log_softmax_of_kept, mixture

_LEAST = 1e-30  # a weight's logarithm, and what is divided by it, stay finite


@dataclasses.dataclass(frozen=True)
class Gumbel(Kept):
    """Weights softmax((log p + g) / tau) of the kept tokens, g standard Gumbel.

    Attributes:
        tau: towards 0 the mixture is one sampled token.
        likelihood: of a step: "cross_entropy" is the paper's, sum_k y_k log p_k, which is no density; "concrete" is
            that of the weights themselves (Maddison et al., 2017).
    """

    has_likelihood = True

    temperature: float = setting(1.0, above=0)
    min_p: float = setting(0.0, least=0, most=1)
    most: int = setting(0, least=0, note="0 keeps all")
    tau: float = setting(0.5, above=0)
    likelihood: Literal["cross_entropy", "concrete"] = "cross_entropy"

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """The action is {"ids", "weights"}, [B, L, M] each."""

        def draw(params, hidden_BLD, keys_BL=None):
            kept_BLM, ids_BLM = self.of(reasoner.logits(params, hidden_BLD))
            if ids_BLM is None:
                ids_BLM = jnp.broadcast_to(jnp.arange(kept_BLM.shape[-1]), kept_BLM.shape)
            if keys_BL is not None:
                noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, kept_BLM.shape[-1:], kept_BLM.dtype)))
                kept_BLM = kept_BLM + noise(keys_BL)
            return {"ids": ids_BLM, "weights": jax.nn.softmax(kept_BLM / self.tau, axis=-1)}

        def feed(params, action):
            return mixture(reasoner, params, action["ids"], action["weights"])

        def log_prob(params, hidden_BLD, action):
            logits_BLV = reasoner.logits(params, hidden_BLD)
            if self.likelihood == "cross_entropy":
                log_p_BLV = jax.nn.log_softmax(logits_BLV, axis=-1)
                taken_BLM = jnp.take_along_axis(log_p_BLV, action["ids"], axis=-1)
                return jnp.sum(action["weights"] * taken_BLM, axis=-1)
            kept_BLM = jnp.take_along_axis(logits_BLV / self.temperature, action["ids"], axis=-1)
            return concrete_log_prob(action["weights"], kept_BLM, self.tau)

        return ending_at(LatentPolicy.seen_as_fed(gate, draw, feed, log_prob=log_prob), self, reasoner)


def concrete_log_prob(weights: Any, logits: jax.Array, tau: float) -> jax.Array:
    """log density of weights [.., M] on the simplex (Maddison et al., 2017, equation 10); float32 [..].

    Tokens of weight 0 were cut, and count as not being there.

    Args:
        logits: [.., M], unnormalised.
    """
    there = weights > 0.0
    n = there.sum(axis=-1)
    log_p = log_softmax_of_kept(jnp.where(there, logits, -jnp.inf))
    log_y, log_p = jnp.log(jnp.maximum(weights, _LEAST)), jnp.where(there, log_p, 0.0)
    terms = jnp.where(there, log_p - tau * log_y, -jnp.inf)
    constant = jax.lax.lgamma(n.astype(jnp.float32)) + (n - 1) * jnp.log(tau)
    each = jnp.sum(jnp.where(there, log_p - (tau + 1.0) * log_y, 0.0), axis=-1)
    return constant - n * jax.nn.logsumexp(terms, axis=-1) + each

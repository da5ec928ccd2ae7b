"""Soft tokens with Gaussian noise (Soft Tokens, Butt et al., 2025): a mixture of embeddings with an exact density."""

import dataclasses

import jax
import jax.numpy as jnp

from slpo_jax.checked import setting
from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.thinkers.mixture import Kept, mixture
from slpo_jax.policy.thinkers.noise import gaussian_log_prob, standard_normal
from slpo_jax.policy.thinkers.thinker import Thinker


@dataclasses.dataclass(frozen=True)
class NoisySoft(Kept):
    """x + sigma n, n standard normal, x the mixture at temperature 0.5 ("soft") or near 0 ("fuzzy" tokens).

    Attributes:
        scale: sigma as a multiple of the root mean square of the embeddings' coordinates.
    """

    temperature: float = setting(0.5, above=0)
    top_k: int = setting(0, least=0, note="0 keeps all")
    top_p: float = setting(1.0, above=0, most=1)
    min_p: float = setting(0.0, least=0, most=1)
    most: int = setting(0, least=0, note="0 keeps all")
    scale: float = setting(0.33, above=0)

    def __call__(self, reasoner: Reasoner, gate: Gate) -> Thinker:
        """The action is the noisy mixture, which the gate sees too."""

        def mean(params, hidden_BLD):
            kept_BLM, ids_BLM = self.of(reasoner.logits(params["reasoner"], hidden_BLD))
            return mixture(reasoner, params["reasoner"], ids_BLM, jax.nn.softmax(kept_BLM, axis=-1))

        def sigma(params):
            table_VD = reasoner.embed(params["reasoner"], jnp.arange(reasoner.config.vocab_size)).astype(jnp.float32)
            return jax.lax.stop_gradient(self.scale * jnp.sqrt(jnp.mean(jnp.square(table_VD))))

        def draw(params, hidden_BLD, keys_BL=None):
            mean_BLD = mean(params, hidden_BLD)
            if keys_BL is None:
                return mean_BLD
            return mean_BLD + (sigma(params) * standard_normal(keys_BL, mean_BLD)).astype(mean_BLD.dtype)

        def log_prob(params, hidden_BLD, inputs_BLD):
            return gaussian_log_prob(inputs_BLD, mean(params, hidden_BLD), sigma(params))

        return Thinker(
            init=lambda key: {},
            draw=draw,
            feed=lambda params, inputs_BLD: inputs_BLD,
            stop_logits=lambda params, inputs_BLD, dropout=None: gate.logits(params["gate"], inputs_BLD, dropout),
            log_prob=log_prob,
        )

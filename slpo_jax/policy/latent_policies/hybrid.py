"""Hybrid thought (HRPO, Yue et al., 2025): each step is a sampled token and a share of its law's mixture."""

import dataclasses

import jax
import jax.numpy as jnp

from slpo_jax.models.gate import Gate
from slpo_jax.models.parts import LATENT_POLICY
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import (
    LatentPolicy,
    LatentPolicySettings,
)
from slpo_jax.policy.latent_policies.soft_tokens import mixture
from slpo_jax.policy.noise import most_likely
from slpo_jax.settings import setting

# c of the decay, as in Griffin's recurrent gate (De et al., 2024).
_SHARPNESS = 8.0
# The greatest decay at the start.
_MOST = 0.999
# The standard deviation of the gates' weights at the start.
_SPREAD = 0.02
_EPSILON = 1e-8


@dataclasses.dataclass(frozen=True)
class Hybrid(LatentPolicySettings):
    """Token w of q = softmax(logits / temperature), truncated to the likeliest, is fed as a e_w + sqrt(1 - a^2) i s.

    s = q^T E / |q|_2, and of e_w the gates r = sig(W_r e_w + b_r), i = sig(W_i e_w + b_i) and the decay
    a = exp(-8 softplus(-L) r), with parameters {"recurrence", "input", "decay"} of the latent policy's own.

    Attributes:
        temperature: temperature of q, which tokens are drawn from; their likelihood is that at temperature 1, of all
            tokens.
        top_k: likeliest tokens that q keeps.
        r_min: at the start exp(-8 softplus(-L)) is uniform from here to 0.999.
        end_text: one token, which ends the thought and is fed as it is: plain tokens follow. "" is none.
        decay_rate: learning rate of L as a multiple of that of the gates.
        end_id: of `end_text`. No key of the section.
    """

    has_likelihood = True
    writes = True
    has_parameters = True

    temperature: float = setting(0.5, above=0)
    top_k: int = setting(50, least=0, note="0 keeps all")
    r_min: float = setting(0.99, above=0, below=_MOST)
    end_text: str = "####"
    decay_rate: float = setting(10.0, above=0)
    end_id: int | None = setting(None, least=0, in_config=False)

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """Make the law; actions are {"token": [B, L], "ids", "weights": [B, L, M]}: the token, and q, a constant."""
        D = reasoner.width

        def init(key):
            recurrence_key, input_key, decay_key = jax.random.split(key, 3)
            recurrence_DD = _SPREAD * jax.random.normal(recurrence_key, (D, D))
            input_DD = _SPREAD * jax.random.normal(input_key, (D, D))
            # L such that exp(-8 softplus(-L)) is u.
            u_D = jax.random.uniform(
                decay_key,
                (D,),
                minval=self.r_min,
                maxval=_MOST,
            )
            decay_D = -jnp.log(jnp.expm1(-jnp.log(u_D) / _SHARPNESS))
            return {
                "recurrence": {"kernel": recurrence_DD, "bias": jnp.zeros(D)},
                "input": {"kernel": input_DD, "bias": jnp.zeros(D)},
                "decay": decay_D,
            }

        def draw(params, hidden_BLD, keys_BL=None):
            # q, of the likeliest tokens or of all.
            logits_BLV = reasoner.logits(params, hidden_BLD) / self.temperature
            logits_BLM, ids_BLM = most_likely(logits_BLV, self.top_k, 1.0)
            if ids_BLM is None:
                ids_M = jnp.arange(logits_BLM.shape[-1])
                ids_BLM = jnp.broadcast_to(ids_M, logits_BLM.shape)

            # A token of it: drawn, or the likeliest without noise.
            if keys_BL is None:
                place_BL = jnp.argmax(logits_BLM, axis=-1)
            else:
                draw_places = jax.vmap(jax.vmap(jax.random.categorical))
                place_BL = draw_places(keys_BL, logits_BLM)
            token_BL1 = jnp.take_along_axis(
                ids_BLM,
                place_BL[..., None],
                axis=-1,
            )
            return {
                "token": token_BL1[..., 0],
                "ids": ids_BLM,
                "weights": jax.nn.softmax(logits_BLM, axis=-1),
            }

        def feed(params, action):
            e_BLD = reasoner.embed(params, action["token"])
            s_BLD = mixture(reasoner, params, action["ids"], action["weights"])
            norm_BL1 = jnp.linalg.norm(
                action["weights"],
                axis=-1,
                keepdims=True,
            )
            # The slots after a thought's end have no action, and so no weights.
            s_BLD = jax.lax.stop_gradient(s_BLD / jnp.maximum(norm_BL1, _EPSILON))
            x_BLD = mix(params[LATENT_POLICY], e_BLD, s_BLD)
            if self.end_id is None:
                return x_BLD
            is_end_BL1 = ends(params, action)[..., None]
            return jnp.where(is_end_BL1, e_BLD, x_BLD)

        def ends(params, action):
            return action["token"] == self.end_id

        def says(params, action):
            return action["token"]

        def log_prob(params, hidden_BLD, action):
            log_probs_BL, _ = reasoner.log_probs(params, hidden_BLD, action["token"])
            return log_probs_BL

        return LatentPolicy.seen_as_fed(
            gate,
            draw,
            feed,
            init=init,
            log_prob=log_prob,
            ends=None if self.end_id is None else ends,
            says=says,
            rates=(("decay", self.decay_rate),),
        )


def mix(
    params,
    e_BLD: jax.Array,
    s_BLD: jax.Array,
) -> jax.Array:
    """Mix a e + sqrt(1 - a^2 + 1e-8) i s (HRPO, Yue et al., 2025), of the type of e.

    Args:
        params: the latent policy's own.
        e_BLD: the tokens' embeddings.
        s_BLD: the normalised mixtures.
    """
    wide_BLD = e_BLD.astype(jnp.float32)

    def gate(name):
        layer = params[name]
        logits_BLD = wide_BLD @ layer["kernel"] + layer["bias"][None, None]
        return jax.nn.sigmoid(logits_BLD)

    slowness_D = _SHARPNESS * jax.nn.softplus(-params["decay"])
    a_BLD = jnp.exp(-slowness_D[None, None] * gate("recurrence"))
    share_BLD = jnp.sqrt(1.0 - jnp.square(a_BLD) + _EPSILON) * gate("input")
    x_BLD = a_BLD * wide_BLD + share_BLD * s_BLD.astype(jnp.float32)
    return x_BLD.astype(e_BLD.dtype)

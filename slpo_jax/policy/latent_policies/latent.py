"""Latents as the reasoner makes them: as they are (COCONUT, CODI), with noise added, or drawn from CoLaR's head."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm

from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import (
    LatentPolicy,
    LatentPolicySettings,
    gaussian_latent_policy,
    standard_normal,
    token_log_prob,
)
from slpo_jax.settings import setting


@dataclasses.dataclass(frozen=True)
class Latent(LatentPolicySettings):
    """Nothing to set."""

    of_latents = True
    is_the_reasoners = True

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """Make the law whose action is the latent itself; its density, over dropout's masks, is intractable."""

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
        """Make the law whose action is the noisy latent, which the gate sees too."""
        return gaussian_latent_policy(reasoner.transition, lambda _: self.sigma, gate)


@dataclasses.dataclass(frozen=True)
class Colar(LatentPolicySettings):
    """u = s (mu + temperature sigma n), n standard normal; of a head without sigma (LatentTTS's), u = s mu.

    The likelihood is that of u / s, the mean over D as in CoLaR's reinforcement learning.

    Where `end_text` is drawn after a latent, the thought has ended; without noise, where it is the likeliest token.

    Attributes:
        temperature: factor of sigma.
        end_text: one token, which ends the thought; "" is none: T latents.
        least: latents before `end_text` is looked for; published: 1, with LatentTTS 0.
        end_id: of `end_text`. No key of the section.
    """

    of_latents = True
    of_architecture = "colar"
    is_the_reasoners = True
    has_likelihood = True

    temperature: float = setting(1.0, above=0)
    end_text: str = "###"
    least: int = setting(1, least=0)
    end_id: int | None = setting(None, least=0, in_config=False)

    @property
    def ended_by(self) -> tuple[str, int]:
        return self.stop_token, self.least

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """Make the law of {"of": the latent, "halts": whether the thought has ended before it}."""

        def law(params, hidden_BLD):
            assert reasoner.law is not None
            gaussian = reasoner.law(params, hidden_BLD)
            return gaussian._replace(std=self.temperature * gaussian.std)

        def latents(params, hidden_BLD, keys_BL):
            if not reasoner.gaussian or keys_BL is None:
                return reasoner.transition(params, hidden_BLD).astype(jnp.float32)
            gaussian = law(params, hidden_BLD)
            return reasoner.unit * (gaussian.mean + gaussian.std * standard_normal(keys_BL, gaussian.mean))

        def halts(params, hidden_BLD, keys_BL):
            if self.end_id is None:
                return jnp.zeros(hidden_BLD.shape[:2], bool)
            logits_BLV = reasoner.logits(params, hidden_BLD)
            if keys_BL is None:
                return jnp.argmax(logits_BLV, axis=-1) == self.end_id
            keys_BL = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, 1)))(keys_BL)
            return jax.vmap(jax.vmap(jax.random.categorical))(keys_BL, logits_BLV) == self.end_id

        def draw(params, hidden_BLD, keys_BL=None):
            return {"of": latents(params, hidden_BLD, keys_BL), "halts": halts(params, hidden_BLD, keys_BL)}

        def log_prob(params, hidden_BLD, action):
            return norm.logpdf(action["of"] / reasoner.unit, *law(params, hidden_BLD)).mean(axis=-1)

        return LatentPolicy(
            init=lambda key: {},
            draw=draw,
            feed=lambda params, action: action["of"].astype(reasoner.config.dtype),
            stop_logits=lambda params, action, dropout=None: gate.logits(params, action["of"], dropout),
            log_prob=log_prob if reasoner.gaussian else None,
            halts=None if self.end_id is None else lambda params, action: action["halts"],
            halting_log_prob=token_log_prob(reasoner, self.end_id),
            least=self.least,
        )

"""Latents with Gaussian noise added to them (LatentTTS, You et al., 2025), which has an exact density."""

import dataclasses

from slpo_jax.checked import check_fields, setting
from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.thinkers.noise import gaussian_log_prob, standard_normal
from slpo_jax.policy.thinkers.thinker import Thinker


@dataclasses.dataclass(frozen=True)
class Additive:
    """h + sigma n, with n standard normal and h the reasoner's own latent (for CODI after the projector).

    Attributes:
        sigma: standard deviation of each coordinate; published: 0.6 for COCONUT, 1.4 for CODI, on GPT-2.
    """

    sigma: float = setting(0.6, above=0)

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, reasoner: Reasoner, gate: Gate) -> Thinker:
        """The action is the noisy latent, which the gate sees too."""

        def mean(params, hidden_BLD):
            return reasoner.transition(params["reasoner"], hidden_BLD)

        def draw(params, hidden_BLD, keys_BL=None):
            mean_BLD = mean(params, hidden_BLD)
            if keys_BL is None:
                return mean_BLD
            return mean_BLD + self.sigma * standard_normal(keys_BL, mean_BLD)

        def log_prob(params, hidden_BLD, latents_BLD):
            return gaussian_log_prob(latents_BLD, mean(params, hidden_BLD), self.sigma)

        return Thinker(
            init=lambda key: {},
            draw=draw,
            feed=lambda params, latents_BLD: latents_BLD,
            stop_logits=lambda params, latents_BLD, dropout=None: gate.logits(params["gate"], latents_BLD, dropout),
            log_prob=log_prob,
        )

"""AdaLR's thought: before each latent the reasoner chooses, by the logits of two tokens alone, to go on or to stop."""

import dataclasses

import jax
import jax.numpy as jnp

from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import (
    LatentPolicy,
    LatentPolicySettings,
)
from slpo_jax.settings import setting

CONTINUE = "<|CONTINUE|>"
STOP = "<|STOP|>"


@dataclasses.dataclass(frozen=True)
class Adalr(LatentPolicySettings):
    """The reasoner's own latents, and a choice before each: P(stop) = sigmoid((stop - continue) / temperature).

    `stop` and `continue` are the logits of two tokens after the position before. Without noise the thought stops where
    `stop` is the greater. A thought may have no latents. Its likelihood is that of these choices: given them, latents
    are a function of the parameters.

    Attributes:
        temperature: that the two logits are divided by.
        continue_id: of the token that stands for going on. No key of the section.
        stop_id: of the token that stands for stopping. No key of the section.
    """

    of_latents = True
    of_architecture = "adalr"
    is_the_reasoners = True
    has_likelihood = True

    temperature: float = setting(1.0, above=0)
    continue_id: int = setting(0, least=0, in_config=False)
    stop_id: int = setting(0, least=0, in_config=False)

    @property
    def stop_token(self) -> str:
        return STOP

    @property
    def ended_by(self) -> tuple[str, int]:
        return STOP, 0

    @property
    def goes_on_by(self) -> str:
        return CONTINUE

    def with_ids(self, token, closing_ids):
        return dataclasses.replace(
            self, continue_id=token(CONTINUE), stop_id=token(STOP)
        )

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """Make the law of {"of": the latent, "stop": the logit of P(stop) before it, "halts": whether it stopped}."""

        def stop_logits_after(params, hidden_BLD):
            tokens_M = jnp.array([self.continue_id, self.stop_id])
            logits_BLM = reasoner.logits_of(params, hidden_BLD, tokens_M)
            return (logits_BLM[..., 1] - logits_BLM[..., 0]) / self.temperature

        def draw(params, hidden_BLD, keys_BL=None):
            stop_BL = stop_logits_after(params, hidden_BLD)
            threshold_BL = jnp.zeros_like(stop_BL)
            if keys_BL is not None:
                threshold_BL = -jax.vmap(jax.vmap(jax.random.logistic))(keys_BL)
            latents_BLD = reasoner.transition(params, hidden_BLD)
            return {"of": latents_BLD, "stop": stop_BL, "halts": stop_BL > threshold_BL}

        def log_prob(params, hidden_BLD, action):
            return jax.nn.log_sigmoid(-stop_logits_after(params, hidden_BLD))

        def halting_log_prob(params, hidden_BLD):
            return jax.nn.log_sigmoid(stop_logits_after(params, hidden_BLD))

        return LatentPolicy(
            init=lambda key: {},
            draw=draw,
            feed=lambda params, action: action["of"],
            stop_logits=lambda params, action, dropout=None: action["stop"],
            log_prob=log_prob,
            halts=lambda params, action: action["halts"],
            halting_log_prob=halting_log_prob,
        )

"""Soft tokens of the highest noisy scores, whose likelihood is that of the scores (Latent-GRPO, SofT-GRPO)."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import LatentPolicy, LatentPolicySettings, token_log_prob
from slpo_jax.policy.latent_policies.soft_tokens import mixture
from slpo_jax.policy.noise import most_likely
from slpo_jax.settings import FieldError, setting

_ADDED = 1e-6  # to probabilities, by SofT-GRPO's program
_CERTAIN = -3.0  # of its log-probabilities, those whose scores count


@dataclasses.dataclass(frozen=True)
class GumbelTopK(LatentPolicySettings):
    """Weights softmax(s / tau) of the highest scores s = log p + g, g clipped and shifted Gumbel noise.

    The defaults are Latent-GRPO's (arXiv 2604.27998). Where `config.prompt.closing` is there, its first token ends the
    thought as the likeliest one or as the one of the highest score, before the step that is to be made of it; that
    choice has the token's likelihood.

    Attributes:
        top_k: likeliest tokens that may be mixed; 0 is all.
        top_p: then the likeliest of these that have this probability together; 1 is all.
        least: but so many of them at least.
        most: highest scores that are mixed.
        down: how far noise may go below 0; what is lower is clipped.
        up: how far noise may go above 0; what is higher is clipped.
        shift: added to the clipped noise; as large as `down` it leaves none below 0.
        tau: temperature of the softmax over scores.
        likelihood: the scores' likelihood, by d = s - log p: "signed" is Latent-GRPO's, the mean of -d - e^-d, with the
            gradient of d - e^d where A <= 0 and d < 0; "clipped" is SofT-GRPO's, of d clipped as the noise and p among
            the mixed tokens, mean over those with log p > -3.
        halt_id: the first of `config.prompt.closing`. No key of the section.
    """

    has_likelihood = True

    top_k: int = setting(0, least=0, note="0 is all")
    top_p: float = setting(0.95, above=0, most=1)
    least: int = setting(10, least=1)
    most: int = setting(10, least=1)
    down: float = setting(1.5, least=0)
    up: float = setting(3.0, least=0)
    shift: float = setting(1.5, least=0)
    tau: float = setting(1.0, above=0)
    likelihood: Literal["signed", "clipped"] = "signed"
    halt_id: int | None = setting(None, least=0, in_config=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.likelihood != "clipped" and min(self.least, self.top_k or self.least) < self.most:
            raise FieldError(
                self, "most", f"only {min(self.least, self.top_k or self.least)} tokens are sure to have a score, and "
                f"likelihood={self.likelihood} needs one of each that is mixed; lower it, or raise least and top_k"
            )  # fmt: skip

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """Make the law of {"ids", "scores": [B, L, M], the highest first}, and {"halts": [B, L]} if it can end."""

        def draw(params, hidden_BLD, keys_BL=None):
            log_p_BLV = jax.nn.log_softmax(reasoner.logits(params, hidden_BLD), axis=-1)
            scores_BLC, ids_BLC = self.candidates(log_p_BLV)
            clean_BL = ids_BLC[..., 0]
            if keys_BL is not None:
                scores_BLC += jax.vmap(jax.vmap(self.noise, (0, None)), (0, None))(keys_BL, scores_BLC.shape[-1])
            scores_BLM, at_BLM = jax.lax.top_k(scores_BLC, min(self.most, scores_BLC.shape[-1]))
            action = {"ids": jnp.take_along_axis(ids_BLC, at_BLM, axis=-1), "scores": scores_BLM}
            if self.halt_id is None:
                return action
            return action | {"halts": (clean_BL == self.halt_id) | (action["ids"][..., 0] == self.halt_id)}

        def feed(params, action):
            return mixture(reasoner, params, action["ids"], jax.nn.softmax(action["scores"] / self.tau, axis=-1))

        def log_prob(params, hidden_BLD, action, advantages_BL=None):
            log_p_BLV = jax.nn.log_softmax(reasoner.logits(params, hidden_BLD), axis=-1)
            log_p_BLM = jnp.take_along_axis(log_p_BLV, action["ids"], axis=-1)
            return self.log_prob(action["scores"], log_p_BLM, advantages_BL)

        return LatentPolicy.seen_as_fed(
            gate,
            draw,
            feed,
            log_prob=log_prob,
            signed=self.likelihood == "signed",
            halts=None if self.halt_id is None else lambda params, action: action["halts"],
            halting_log_prob=token_log_prob(reasoner, self.halt_id),
        )

    def noise(self, key: jax.Array, number: int) -> jax.Array:
        """Draw Gumbel noise [number], clipped and shifted."""
        return self._clipped(jax.random.gumbel(key, (number,))) + self.shift

    def _clipped(self, noise: jax.Array) -> jax.Array:
        return jnp.clip(noise, -self.down, self.up)

    def candidates(self, log_p: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return log-probabilities, of [.., V], that may be mixed, likeliest first, -inf where cut; ids [.., C]."""
        log_p, ids = most_likely(log_p, self.top_k, self.top_p, self.least)
        if ids is None:
            log_p, ids = jax.lax.top_k(log_p, log_p.shape[-1])
        return (jnp.log(jax.nn.softmax(log_p, axis=-1) + _ADDED), ids) if self.likelihood == "clipped" else (log_p, ids)

    def log_prob(self, scores: Any, log_p: jax.Array, advantages: jax.Array | None = None) -> jax.Array:
        """Return the log-likelihood, float32 [..], of scores [.., M] by their tokens' log-probabilities now.

        Args:
            advantages: [..], for the gradient of "signed"; None: that of the value.
        """
        if self.likelihood == "clipped":
            log_p = jnp.log(jax.nn.softmax(log_p, axis=-1) + _ADDED)
            return jnp.mean(_log_density(self._clipped(scores - log_p)), -1, where=log_p > _CERTAIN)
        d = scores - log_p
        value = _log_density(d)
        if advantages is not None:
            turned = _log_density(jnp.where((advantages[..., None] <= 0) & (d < 0), -d, d))
            value = jax.lax.stop_gradient(value - turned) + turned
        return value.mean(axis=-1)


def _log_density(g: jax.Array) -> jax.Array:
    """Return the log-density of standard Gumbel noise."""
    return -g - jnp.exp(-g)

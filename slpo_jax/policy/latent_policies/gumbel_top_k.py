"""Soft tokens of the highest noisy scores, whose likelihood is that of the scores (Latent-GRPO, SofT-GRPO)."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import (
    LatentPolicy,
    LatentPolicySettings,
    token_log_prob,
)
from slpo_jax.policy.latent_policies.soft_tokens import mixture
from slpo_jax.policy.noise import most_likely
from slpo_jax.settings import FieldError, setting

# SofT-GRPO's program adds this to probabilities.
_ADDED = 1e-6
# It counts the scores of tokens with a higher log-probability.
_CERTAIN = -3.0


@dataclasses.dataclass(frozen=True)
class GumbelTopK(LatentPolicySettings):
    """Weights softmax(s / tau) of the highest scores s = log p + g, g clipped and shifted Gumbel noise.

    The defaults are Latent-GRPO's (arXiv 2604.27998). With a `config.prompt.closing`, its first token ends the thought
    as the likeliest one or as the one of the highest score, before the step that would be made of it; that choice has
    the token's likelihood, as an answer's token has it (`config.objective.NAME.tempered`).

    Attributes:
        top_k: likeliest tokens that may be mixed; 0 is all.
        top_p: then the likeliest of these that have this probability together; 1 is all.
        least: but at least this number of them.
        most: highest scores that are mixed.
        down: how far noise may go below 0; lower noise is clipped.
        up: how far noise may go above 0; higher noise is clipped.
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
        sure = min(self.least, self.top_k or self.least)
        if self.likelihood != "clipped" and sure < self.most:
            raise FieldError(
                self,
                "most",
                f"only {sure} tokens are sure to have a score, and likelihood={self.likelihood} needs one of each that "
                "is mixed; lower it, or raise least and top_k",
            )

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """Make the law of {"ids", "scores": [B, L, M], the highest first}, and {"halts": [B, L]} if it can end."""

        def draw(params, hidden_BLD, keys_BL=None):
            # Score the tokens that may be mixed: their log-probability, and noise.
            logits_BLV = reasoner.logits(params, hidden_BLD)
            log_p_BLV = jax.nn.log_softmax(logits_BLV, axis=-1)
            scores_BLC, ids_BLC = self.candidates(log_p_BLV)
            likeliest_BL = ids_BLC[..., 0]
            candidates = scores_BLC.shape[-1]
            if keys_BL is not None:
                noise = jax.vmap(
                    jax.vmap(self.noise, (0, None)),
                    (0, None),
                )
                scores_BLC += noise(keys_BL, candidates)

            # Mix those of the highest scores.
            most = min(self.most, candidates)
            scores_BLM, places_BLM = jax.lax.top_k(scores_BLC, most)
            ids_BLM = jnp.take_along_axis(ids_BLC, places_BLM, axis=-1)
            action = {"ids": ids_BLM, "scores": scores_BLM}

            # The token that halts does so with the noise or without it.
            if self.halt_id is not None:
                clean_BL = likeliest_BL == self.halt_id
                noisy_BL = ids_BLM[..., 0] == self.halt_id
                action["halts"] = clean_BL | noisy_BL
            return action

        def feed(params, action):
            weights_BLM = jax.nn.softmax(
                action["scores"] / self.tau,
                axis=-1,
            )
            return mixture(reasoner, params, action["ids"], weights_BLM)

        def log_prob(params, hidden_BLD, action, advantages_BL=None):
            logits_BLV = reasoner.logits(params, hidden_BLD)
            log_p_BLV = jax.nn.log_softmax(logits_BLV, axis=-1)
            log_p_BLM = jnp.take_along_axis(log_p_BLV, action["ids"], axis=-1)
            return self.log_prob(action["scores"], log_p_BLM, advantages_BL)

        def halts(params, action):
            return action["halts"]

        return LatentPolicy.seen_as_fed(
            gate,
            draw,
            feed,
            log_prob=log_prob,
            signed=self.likelihood == "signed",
            halts=None if self.halt_id is None else halts,
            halting_log_prob=token_log_prob(reasoner, self.halt_id),
            halts_as_answers=True,
        )

    def noise(self, key: jax.Array, number: int) -> jax.Array:
        """Draw Gumbel noise [number], clipped and shifted."""
        return self._clip(jax.random.gumbel(key, (number,))) + self.shift

    def _clip(self, noise: jax.Array) -> jax.Array:
        return jnp.clip(noise, -self.down, self.up)

    def candidates(self, log_p: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Truncate log-probabilities [.., V] to those that may be mixed.

        Returns:
            their log-probabilities, likeliest first, -inf where truncated, and their ids, [.., C] each.
        """
        log_p, ids = most_likely(
            log_p,
            self.top_k,
            self.top_p,
            self.least,
        )
        if ids is None:
            log_p, ids = jax.lax.top_k(log_p, log_p.shape[-1])
        if self.likelihood == "clipped":
            log_p = _renormalise(log_p)
        return log_p, ids

    def log_prob(
        self, scores: Any, log_p: jax.Array, advantages: jax.Array | None = None
    ) -> jax.Array:
        """Return the log-likelihood, float32 [..], of scores [.., M] by their tokens' log-probabilities now.

        Args:
            advantages: [..], for the gradient of "signed"; None: that of the value.
        """
        # SofT-GRPO: the noise that the scores would need, clipped as it was drawn.
        if self.likelihood == "clipped":
            log_p = _renormalise(log_p)
            density = _log_density(self._clip(scores - log_p))
            return jnp.mean(density, -1, where=log_p > _CERTAIN)

        # Latent-GRPO: the value is the noise's log-density; the gradient is turned where it would push noise below 0.
        d = scores - log_p
        value = _log_density(d)
        if advantages is not None:
            is_turned = (advantages[..., None] <= 0) & (d < 0)
            turned = _log_density(jnp.where(is_turned, -d, d))
            value = jax.lax.stop_gradient(value - turned) + turned
        return value.mean(axis=-1)


def _renormalise(log_p: jax.Array) -> jax.Array:
    """Return log-probabilities of the mixed tokens among themselves, as SofT-GRPO's program has them."""
    return jnp.log(jax.nn.softmax(log_p, axis=-1) + _ADDED)


def _log_density(g: jax.Array) -> jax.Array:
    """Return the log-density of standard Gumbel noise."""
    return -g - jnp.exp(-g)

"""Thoughts in soft tokens: the likeliest next tokens, a mixture of their embeddings, and an end at a token.

As the likeliest one, that token stands for the text that nobody samples.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import (
    LatentPolicy,
    LatentPolicySettings,
    gaussian_latent_policy,
)
from slpo_jax.policy.noise import most_likely
from slpo_jax.settings import setting


@dataclasses.dataclass(frozen=True)
class Kept(LatentPolicySettings):
    """The tokens that are mixed, by softmax(logits / temperature).

    Attributes:
        temperature: temperature of the softmax.
        top_k: likeliest tokens that are kept; 0 keeps all.
        top_p: then the likeliest of these that have this probability together; 1 keeps all.
        min_p: then those at least this share as likely as the likeliest; 0 keeps all.
        most: then at most so many; 0 keeps all.
        end_text: one token; where it is the likeliest, the thought ends; "" is none: T steps.
        end_id: of `end_text`. No key of the section.
        halt_id: the first of `config.prompt.closing`, if it is there; before the step at which that is the likeliest,
            the thought has ended. No key of the section.
    """

    temperature: float = setting(0.6, above=0)
    top_k: int = setting(30, least=0, note="0 keeps all")
    top_p: float = setting(0.95, above=0, most=1)
    min_p: float = setting(0.001, least=0, most=1)
    most: int = setting(10, least=0, note="0 keeps all")
    end_text: str = ""
    end_id: int | None = setting(None, least=0, in_config=False)
    halt_id: int | None = setting(None, least=0, in_config=False)

    def of(self, logits: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the logits, of [.., V], that are kept, divided by the temperature, and their token ids, [.., M] each.

        The likeliest come first; what a row has fewer of is -inf. Each cut is made of what the one before left,
        renormalised. Where none limits M, the ids are None: all tokens, as the logits have them.
        """
        logits, ids = most_likely(logits / self.temperature, self.top_k, self.top_p)
        if ids is None and self.most:
            logits, ids = jax.lax.top_k(logits, min(self.most, logits.shape[-1]))
        if self.min_p > 0.0:
            logits = jnp.where(
                jnp.exp(logits - logits.max(axis=-1, keepdims=True)) >= self.min_p,
                logits,
                -jnp.inf,
            )
        return (
            (logits[..., : self.most], ids[..., : self.most])
            if self.most and ids is not None
            else (logits, ids)
        )

    def mean(self, reasoner: Reasoner, params, hidden_BLD: jax.Array) -> jax.Array:
        """Return the mixture [B, L, D] of the kept tokens, each as likely as it is; of `params`, all parts."""
        logits_BLM, ids_BLM = self.of(reasoner.logits(params, hidden_BLD))
        return mixture(reasoner, params, ids_BLM, jax.nn.softmax(logits_BLM, axis=-1))


def mixture(
    reasoner: Reasoner, params, ids: jax.Array | None, weights: jax.Array
) -> jax.Array:
    """Mix embeddings: sum_k weights_k E[ids_k], leaves [.., M] -> [.., D], E being the input embeddings.

    Args:
        params: all parts.
        ids: None is all tokens.
    """
    if ids is None:
        table_VD = reasoner.embed(params, jnp.arange(weights.shape[-1]))
        return jnp.einsum("...v,vd->...d", weights.astype(table_VD.dtype), table_VD)
    embeddings = reasoner.embed(params, ids)
    return jnp.einsum("...m,...md->...d", weights.astype(embeddings.dtype), embeddings)


def log_softmax_of_kept(logits: jax.Array) -> jax.Array:
    """Return the log of the renormalised distribution [.., M], -inf where cut, with finite gradients."""
    whole = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.where(
        jnp.isfinite(logits),
        jnp.where(jnp.isfinite(logits), logits, 0.0) - whole,
        -jnp.inf,
    )


def ending_at(
    latent_policy: LatentPolicy, kept: Kept, reasoner: Reasoner
) -> LatentPolicy:
    """Return the latent policy with an end: the first step at which `kept.end_id` is the likeliest token.

    That step is fed as the token's own embedding (Soft Thinking, LEPO). Given the steps before, nothing about it is
    random: its log-likelihood is 0, and what parameters change about where the end comes is left out, as in the papers.
    With `kept.halt_id` it is that token, and the step is not fed at all (Latent-SFT).

    Args:
        kept: whose `end_id` None is the latent policy as it is.
    Returns:
        one with actions {"of": the latent policy's own, "ends": bool [B, L]}.
    """
    end_id = kept.end_id if kept.halt_id is None else kept.halt_id
    if end_id is None:
        return latent_policy

    def draw(params, hidden_BLD, keys_BL=None):
        ends_BL = jnp.argmax(reasoner.logits(params, hidden_BLD), axis=-1) == end_id
        return {"of": latent_policy.draw(params, hidden_BLD, keys_BL), "ends": ends_BL}

    def feed(params, action):
        if kept.halt_id is not None:
            return latent_policy.feed(params, action["of"])
        end_11D = reasoner.embed(params, jnp.full((1, 1), end_id))
        return jnp.where(
            action["ends"][..., None], end_11D, latent_policy.feed(params, action["of"])
        )

    def log_prob(params, hidden_BLD, action):
        assert latent_policy.log_prob is not None
        return jnp.where(
            action["ends"],
            0.0,
            latent_policy.log_prob(params, hidden_BLD, action["of"]),
        )

    def ends(params, action):
        return action["ends"]

    return dataclasses.replace(
        latent_policy,
        draw=draw,
        feed=feed,
        stop_logits=lambda params, action, dropout=None: latent_policy.stop_logits(
            params, action["of"], dropout
        ),
        log_prob=latent_policy.log_prob and log_prob,
        ends=ends if kept.halt_id is None else None,
        halts=None if kept.halt_id is None else ends,
    )


@dataclasses.dataclass(frozen=True)
class Soft(Kept):
    """Deterministic: what noise it has is dropout's. The defaults are the paper's program's."""

    @property
    def mixed(self) -> int:
        return min(filter(None, (self.top_k, self.most)), default=0)

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """Make the law whose action is the mixture, which the gate sees too."""

        def draw(params, hidden_BLD, keys_BL=None):
            return self.mean(reasoner, params, hidden_BLD)

        return ending_at(LatentPolicy.seen_as_fed(gate, draw), self, reasoner)


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
        """Make the law whose action is the noisy mixture, which the gate sees too."""

        def sigma(params):
            table_VD = reasoner.embed(
                params, jnp.arange(reasoner.config.vocab_size)
            ).astype(jnp.float32)
            return jax.lax.stop_gradient(
                self.scale * jnp.sqrt(jnp.mean(jnp.square(table_VD)))
            )

        noisy = gaussian_latent_policy(
            lambda params, hidden_BLD: self.mean(reasoner, params, hidden_BLD),
            sigma,
            gate,
        )
        return ending_at(noisy, self, reasoner)


_LEAST = 1e-30  # a weight's logarithm, and what is divided by it, stay finite


@dataclasses.dataclass(frozen=True)
class Gumbel(Kept):
    """Weights softmax((log p + g) / tau) of the kept tokens, g standard Gumbel.

    Attributes:
        tau: temperature of the mixture's weights; towards 0 it is one sampled token.
        likelihood: a step's likelihood: "cross_entropy" is the paper's, sum_k y_k log p_k, which is no density;
            "concrete" is that of the weights themselves (Maddison et al., 2017).
    """

    has_likelihood = True

    temperature: float = setting(1.0, above=0)
    min_p: float = setting(0.0, least=0, most=1)
    most: int = setting(0, least=0, note="0 keeps all")
    tau: float = setting(0.5, above=0)
    likelihood: Literal["cross_entropy", "concrete"] = "cross_entropy"

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """Make the law of {"ids", "weights"}, [B, L, M] each."""

        def draw(params, hidden_BLD, keys_BL=None):
            logits_BLM, ids_BLM = self.of(reasoner.logits(params, hidden_BLD))
            if ids_BLM is None:
                ids_BLM = jnp.broadcast_to(
                    jnp.arange(logits_BLM.shape[-1]), logits_BLM.shape
                )
            if keys_BL is not None:
                noise = jax.vmap(
                    jax.vmap(
                        lambda key: jax.random.gumbel(
                            key, logits_BLM.shape[-1:], logits_BLM.dtype
                        )
                    )
                )
                logits_BLM = logits_BLM + noise(keys_BL)
            return {
                "ids": ids_BLM,
                "weights": jax.nn.softmax(logits_BLM / self.tau, axis=-1),
            }

        def feed(params, action):
            return mixture(reasoner, params, action["ids"], action["weights"])

        def log_prob(params, hidden_BLD, action):
            logits_BLV = reasoner.logits(params, hidden_BLD)
            if self.likelihood == "cross_entropy":
                log_p_BLV = jax.nn.log_softmax(logits_BLV, axis=-1)
                log_p_BLM = jnp.take_along_axis(log_p_BLV, action["ids"], axis=-1)
                return jnp.sum(action["weights"] * log_p_BLM, axis=-1)
            logits_BLM = jnp.take_along_axis(
                logits_BLV / self.temperature, action["ids"], axis=-1
            )
            return concrete_log_prob(action["weights"], logits_BLM, self.tau)

        return ending_at(
            LatentPolicy.seen_as_fed(gate, draw, feed, log_prob=log_prob),
            self,
            reasoner,
        )


def concrete_log_prob(weights: Any, logits: jax.Array, tau: float) -> jax.Array:
    """Return the log density of weights [.., M] on the simplex (Maddison et al., 2017, eq. 10); float32 [..].

    Tokens of weight 0 were cut, and count as not being there.

    Args:
        logits: [.., M], unnormalised.
    """
    is_mixed = weights > 0.0
    n = is_mixed.sum(axis=-1)
    log_p = log_softmax_of_kept(jnp.where(is_mixed, logits, -jnp.inf))
    log_y = jnp.log(jnp.maximum(weights, _LEAST))
    log_p = jnp.where(is_mixed, log_p, 0.0)
    terms = jnp.where(is_mixed, log_p - tau * log_y, -jnp.inf)
    constant = jax.lax.lgamma(n.astype(jnp.float32)) + (n - 1) * jnp.log(tau)
    product = jnp.sum(jnp.where(is_mixed, log_p - (tau + 1.0) * log_y, 0.0), axis=-1)
    return constant - n * jax.nn.logsumexp(terms, axis=-1) + product

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
class TruncatedSoftmax(LatentPolicySettings):
    """The tokens that are mixed, by softmax(logits / temperature).

    Attributes:
        temperature: temperature of the softmax.
        top_k: the number of likeliest tokens that are kept; 0 keeps all.
        top_p: then the likeliest of these that have this probability together; 1 keeps all.
        min_p: then those at least this share as likely as the likeliest; 0 keeps all.
        most: then at most this number; 0 keeps all.
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
        """Return the kept ones of logits [.., V], divided by the temperature, and their token ids, [.., M] each.

        The likeliest come first; rows with fewer than M have -inf. Each truncation is of the law that the one before
        left, renormalised. Where none limits M, the ids are None: all tokens, as the logits have them.
        """
        logits, ids = most_likely(
            logits / self.temperature,
            self.top_k,
            self.top_p,
        )
        if ids is None and self.most:
            logits, ids = jax.lax.top_k(
                logits,
                min(self.most, logits.shape[-1]),
            )
        if self.min_p > 0.0:
            highest = logits.max(axis=-1, keepdims=True)
            is_kept = jnp.exp(logits - highest) >= self.min_p
            logits = jnp.where(is_kept, logits, -jnp.inf)
        if self.most and ids is not None:
            logits = logits[..., : self.most]
            ids = ids[..., : self.most]
        return logits, ids

    def mean(
        self,
        reasoner: Reasoner,
        params,
        hidden_BLD: jax.Array,
    ) -> jax.Array:
        """Return the mixture [B, L, D] of the kept tokens, each as likely as it is; of `params`, all parts."""
        logits_BLM, ids_BLM = self.of(reasoner.logits(params, hidden_BLD))
        return mixture(
            reasoner,
            params,
            ids_BLM,
            jax.nn.softmax(logits_BLM, axis=-1),
        )


def mixture(
    reasoner: Reasoner, params, ids: jax.Array | None, weights: jax.Array
) -> jax.Array:
    """Mix embeddings: sum_k weights_k E[ids_k], leaves [.., M] -> [.., D], E being the input embeddings.

    Args:
        params: all parts.
        ids: None is all tokens.
    """
    if ids is None:
        table_VD = reasoner.embed(
            params,
            jnp.arange(weights.shape[-1]),
        )
        weights = weights.astype(table_VD.dtype)
        return jnp.einsum("...v,vd->...d", weights, table_VD)
    embeddings = reasoner.embed(params, ids)
    weights = weights.astype(embeddings.dtype)
    return jnp.einsum("...m,...md->...d", weights, embeddings)


def log_softmax_of_kept(logits: jax.Array) -> jax.Array:
    """Return the log of the renormalised distribution [.., M], -inf where truncated, with finite gradients."""
    whole = jax.nn.logsumexp(
        logits,
        axis=-1,
        keepdims=True,
    )
    is_kept = jnp.isfinite(logits)
    log_p = jnp.where(is_kept, logits, 0.0) - whole
    return jnp.where(is_kept, log_p, -jnp.inf)


def ending_at(
    latent_policy: LatentPolicy,
    kept: TruncatedSoftmax,
    reasoner: Reasoner,
) -> LatentPolicy:
    """Return the latent policy with an end: the first step at which `kept.end_id` is the likeliest token.

    That step is fed as the token's own embedding (Soft Thinking, LEPO). Given the steps before, nothing about it is
    random: its log-likelihood is 0, and the effect of parameters on the place of the end is left out, as in the papers.
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
        x_BLD = latent_policy.feed(params, action["of"])
        return jnp.where(
            action["ends"][..., None],
            end_11D,
            x_BLD,
        )

    def stop_logits(params, action, dropout=None):
        return latent_policy.stop_logits(params, action["of"], dropout)

    def log_prob(params, hidden_BLD, action):
        assert latent_policy.log_prob is not None
        log_prob_BL = latent_policy.log_prob(params, hidden_BLD, action["of"])
        return jnp.where(action["ends"], 0.0, log_prob_BL)

    def ends(params, action):
        return action["ends"]

    return dataclasses.replace(
        latent_policy,
        draw=draw,
        feed=feed,
        stop_logits=stop_logits,
        log_prob=None if latent_policy.log_prob is None else log_prob,
        ends=ends if kept.halt_id is None else None,
        halts=None if kept.halt_id is None else ends,
    )


@dataclasses.dataclass(frozen=True)
class Soft(TruncatedSoftmax):
    """Deterministic: its only noise is dropout's. The defaults are the paper's program's."""

    @property
    def mixed(self) -> int:
        if self.top_k and self.most:
            return min(self.top_k, self.most)
        return self.top_k or self.most

    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """Make the law whose action is the mixture, which the gate sees too."""

        def draw(params, hidden_BLD, keys_BL=None):
            return self.mean(reasoner, params, hidden_BLD)

        return ending_at(LatentPolicy.seen_as_fed(gate, draw), self, reasoner)


@dataclasses.dataclass(frozen=True)
class NoisySoft(TruncatedSoftmax):
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

        def mean(params, hidden_BLD):
            return self.mean(reasoner, params, hidden_BLD)

        def sigma(params):
            vocabulary = jnp.arange(reasoner.config.vocab_size)
            table_VD = reasoner.embed(params, vocabulary).astype(jnp.float32)
            root_mean_square = jnp.sqrt(jnp.mean(jnp.square(table_VD)))
            return jax.lax.stop_gradient(self.scale * root_mean_square)

        noisy = gaussian_latent_policy(mean, sigma, gate)
        return ending_at(noisy, self, reasoner)


# The least weight, whose logarithm and its derivative are finite.
_LEAST = 1e-30


@dataclasses.dataclass(frozen=True)
class Gumbel(TruncatedSoftmax):
    """Weights softmax((log p + g) / tau) of the kept tokens, g standard Gumbel.

    Attributes:
        tau: temperature of the mixture's weights; towards 0 it is one sampled token.
        likelihood: a step's likelihood: "cross_entropy" is the paper's, sum_k y_k log p_k, not a density;
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
            shape_M = logits_BLM.shape[-1:]
            dtype = logits_BLM.dtype
            if ids_BLM is None:
                ids_M = jnp.arange(logits_BLM.shape[-1])
                ids_BLM = jnp.broadcast_to(ids_M, logits_BLM.shape)
            if keys_BL is not None:

                def draw_noise(key):
                    return jax.random.gumbel(key, shape_M, dtype)

                logits_BLM = logits_BLM + jax.vmap(jax.vmap(draw_noise))(keys_BL)
            weights_BLM = jax.nn.softmax(logits_BLM / self.tau, axis=-1)
            return {"ids": ids_BLM, "weights": weights_BLM}

        def feed(params, action):
            return mixture(reasoner, params, action["ids"], action["weights"])

        def log_prob(params, hidden_BLD, action):
            logits_BLV = reasoner.logits(params, hidden_BLD)
            if self.likelihood == "cross_entropy":
                log_p_BLV = jax.nn.log_softmax(logits_BLV, axis=-1)
                log_p_BLM = jnp.take_along_axis(
                    log_p_BLV,
                    action["ids"],
                    axis=-1,
                )
                return jnp.sum(action["weights"] * log_p_BLM, axis=-1)
            logits_BLV = logits_BLV / self.temperature
            logits_BLM = jnp.take_along_axis(
                logits_BLV,
                action["ids"],
                axis=-1,
            )
            return concrete_log_prob(action["weights"], logits_BLM, self.tau)

        noisy = LatentPolicy.seen_as_fed(gate, draw, feed, log_prob=log_prob)
        return ending_at(noisy, self, reasoner)


def concrete_log_prob(
    weights: Any,
    logits: jax.Array,
    tau: float,
) -> jax.Array:
    """Return the log density of weights [.., M] on the simplex (Maddison et al., 2017, eq. 10); float32 [..].

    Tokens of weight 0 were truncated and do not count.

    Args:
        logits: [.., M], unnormalised.
    """
    is_mixed = weights > 0.0
    n = is_mixed.sum(axis=-1)
    log_p = log_softmax_of_kept(
        jnp.where(
            is_mixed,
            logits,
            -jnp.inf,
        )
    )
    log_y = jnp.log(jnp.maximum(weights, _LEAST))
    log_p = jnp.where(is_mixed, log_p, 0.0)
    terms = jnp.where(
        is_mixed,
        log_p - tau * log_y,
        -jnp.inf,
    )

    # log of (n - 1)! tau^(n - 1) prod_k p_k y_k^(-tau - 1) / (sum_k p_k y_k^-tau)^n.
    constant = jax.lax.lgamma(n.astype(jnp.float32)) + (n - 1) * jnp.log(tau)
    factors = jnp.where(
        is_mixed,
        log_p - (tau + 1.0) * log_y,
        0.0,
    )
    product = jnp.sum(factors, axis=-1)
    return constant - n * jax.nn.logsumexp(terms, axis=-1) + product

"""Thoughts of soft tokens that end at a token: as the likeliest one, it stands for the text that nobody samples."""

import dataclasses

import jax
import jax.numpy as jnp

from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies.latent_policy import LatentPolicy
from slpo_jax.policy.latent_policies.mixture import Kept


def entropy(logits: jax.Array) -> jax.Array:
    """Of softmax(logits [.., V]), in nats: float32 [..]."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def ending_at(latent_policy: LatentPolicy, kept: Kept, reasoner: Reasoner) -> LatentPolicy:
    """The latent policy, whose thought ends with the first step at which `kept.end_id` is the likeliest token.

    That step is fed as the token's own embedding (Soft Thinking, LEPO). Given the steps before, nothing about it is
    random: its log-likelihood is 0, and what parameters change about where the end comes is left out, as in the papers.
    With `kept.halt_id` it is that token, and the step is not fed at all (Latent-SFT).

    With a cold stop (Soft Thinking) so is the last of `kept.cold_steps` steps in a row that were nearly certain. How
    many there were up to a step is no function of its hidden state: `LatentPolicy.after` counts them.

    Args:
        kept: whose `end_id` None is the latent policy as it is.
    Returns:
        one with actions {"of": the latent policy's own, "ends": bool [B, L]}, and with a cold stop {"cold": int [B,
        L]}.
    """
    end_id = kept.end_id if kept.halt_id is None else kept.halt_id
    if end_id is None:
        return latent_policy

    def draw(params, hidden_BLD, keys_BL=None):
        logits_BLV = reasoner.logits(params, hidden_BLD)
        ends_BL = jnp.argmax(logits_BLV, axis=-1) == end_id
        action = {"of": latent_policy.draw(params, hidden_BLD, keys_BL), "ends": ends_BL}
        if kept.cold_entropy:
            cold_BL = entropy(logits_BLV / kept.temperature) < kept.cold_entropy
            return counted(action, cold_BL.astype(jnp.int32))
        return action

    def counted(action, cold_BL):
        return action | {"cold": cold_BL, "ends": action["ends"] | (cold_BL >= kept.cold_steps)}

    def after(params, action, before):
        return counted(action, jnp.where(action["cold"] > 0, before["cold"] + 1, 0))

    def feed(params, action):
        if kept.halt_id is not None:
            return latent_policy.feed(params, action["of"])
        end_11D = reasoner.embed(params, jnp.full((1, 1), end_id))
        return jnp.where(action["ends"][..., None], end_11D, latent_policy.feed(params, action["of"]))

    def log_prob(params, hidden_BLD, action):
        assert latent_policy.log_prob is not None
        return jnp.where(action["ends"], 0.0, latent_policy.log_prob(params, hidden_BLD, action["of"]))

    def ends(params, action):
        return action["ends"]

    return dataclasses.replace(
        latent_policy,
        draw=draw,
        feed=feed,
        stop_logits=lambda params, action, dropout=None: latent_policy.stop_logits(params, action["of"], dropout),
        log_prob=latent_policy.log_prob and log_prob,
        ends=ends if kept.halt_id is None else None,
        halts=None if kept.halt_id is None else ends,
        after=after if kept.cold_entropy else None,
    )

"""Thoughts of soft tokens that end at a token: as the likeliest one, it stands for the text that nobody samples."""

import dataclasses

import jax.numpy as jnp

from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.thinkers.thinker import Thinker


def ending_at(thinker: Thinker, end_id: int | None, reasoner: Reasoner) -> Thinker:
    """The thinker, whose thought ends with the first step at which `end_id` is the likeliest token.

    That step is fed as the token's own embedding (Soft Thinking, LEPO). Given the steps before, nothing about it is
    random: its log-likelihood is 0, and what parameters change about where the end comes is left out, as it is in the
    papers.

    Args:
        end_id: None is the thinker as it is.
    Returns:
        one with actions {"of": the thinker's own, "ends": bool [B, L]}.
    """
    if end_id is None:
        return thinker

    def draw(params, hidden_BLD, keys_BL=None):
        likeliest_BL = jnp.argmax(reasoner.logits(params["reasoner"], hidden_BLD), axis=-1)
        return {"of": thinker.draw(params, hidden_BLD, keys_BL), "ends": likeliest_BL == end_id}

    def feed(params, action):
        end_11D = reasoner.embed(params["reasoner"], jnp.full((1, 1), end_id))
        return jnp.where(action["ends"][..., None], end_11D, thinker.feed(params, action["of"]))

    def log_prob(params, hidden_BLD, action):
        assert thinker.log_prob is not None
        return jnp.where(action["ends"], 0.0, thinker.log_prob(params, hidden_BLD, action["of"]))

    return dataclasses.replace(
        thinker,
        draw=draw,
        feed=feed,
        stop_logits=lambda params, action, dropout=None: thinker.stop_logits(params, action["of"], dropout),
        log_prob=thinker.log_prob and log_prob,
        ends=lambda params, action: action["ends"],
    )

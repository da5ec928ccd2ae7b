"""How likely answers are after a replayed thought."""

import jax
import jax.numpy as jnp

from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.rollout import Replay, Trajectories
from slpo_jax.rewards.ending import answer_mask


def one_later(first_ND: jax.Array, hidden_NAD: jax.Array) -> jax.Array:
    """[N, A, D]: of slot a, what came out of the slot before."""
    return jnp.concatenate([first_ND[:, None], hidden_NAD[:, :-1]], axis=1)


def fed_tokens(tokens_NA: jax.Array, end_id: int | None) -> jax.Array:
    """int [N, A]: what is fed so that the answer `tokens_NA` comes out: the end marker, then all but its last token.

    Without a marker the answer itself: what follows its last token is not looked at.
    """
    if end_id is None:
        return tokens_NA
    return jnp.concatenate([jnp.full_like(tokens_NA[:, :1], end_id), tokens_NA[:, :-1]], axis=1)


def answer_after_replay(policy: Policy, params, replayed: Replay, trajectories: Trajectories, tokens_NA) -> jax.Array:
    """log pi(answer | prompt, replayed thought): the gradient goes through the thought too.

    The answer attends to the very keys and values that the rollout's own answer did.

    Args:
        params: all parts.
        replayed: of these trajectories.
        tokens_NA: int, answers up to and including their end, then anything; not always the trajectories' own.
    Returns:
        float32 [N], sums over the answer's tokens.
    """
    reasoner, config = policy.reasoner, policy.config
    spoken_NA, slots_A = answer_mask(tokens_NA, config.eos_ids, config.stops), jnp.arange(tokens_NA.shape[1])
    dropout = noise.answer_dropout(trajectories.keys, slots_A, config.dropout_rate, config.dropout_where)
    hidden_NAD, _ = reasoner.forward(
        params,
        reasoner.embed(params, fed_tokens(tokens_NA, config.end_id)),
        replayed.before[:, None] + slots_A[None],
        spoken_NA,
        prefix=replayed.prefix,
        cache=replayed.cache,
        start=config.max_latents,
        dropout=dropout,
    )
    if replayed.hidden is not None:
        hidden_NAD = one_later(replayed.hidden, hidden_NAD)
    log_probs_NA, _ = reasoner.log_probs(params, hidden_NAD, tokens_NA, spoken_NA)
    return jnp.sum(log_probs_NA, axis=1, where=spoken_NA)

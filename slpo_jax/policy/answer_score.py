"""How likely answers are after a replayed thought."""

import jax
import jax.numpy as jnp

from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy, RolloutConfig
from slpo_jax.policy.rollout import Replay, Trajectories
from slpo_jax.rewards.ending import answer_mask


def one_later(first_ND: jax.Array, hidden_NAD: jax.Array) -> jax.Array:
    """[N, A, D]: of slot a, what came out of the slot before."""
    return jnp.concatenate([first_ND[:, None], hidden_NAD[:, :-1]], axis=1)


def fed_tokens(tokens_NA: jax.Array, closing_ids: tuple[int, ...]) -> jax.Array:
    """int [N, S]: what is fed so that the answer `tokens_NA` comes out: the end marker, then all but its last token.

    Without a marker the answer itself: what follows its last token is not looked at.
    """
    if not closing_ids:
        return tokens_NA
    marker_NM = [jnp.full_like(tokens_NA[:, :1], token) for token in closing_ids]
    return jnp.concatenate([*marker_NM, tokens_NA[:, :-1]], axis=1)


def fed_slots(spoken_NA: jax.Array, config: RolloutConfig) -> jax.Array:
    """bool [N, S]: of `fed_tokens`, those that are there, from which of the answer's tokens are."""
    closing_NM = [spoken_NA[:, :1]] * config.closing_slots
    return jnp.concatenate([*closing_NM, spoken_NA], axis=1) if closing_NM else spoken_NA


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
    spoken_NA = answer_mask(tokens_NA, config.eos_ids)
    fed_NS = fed_slots(spoken_NA, config)
    slots_S = jnp.arange(fed_NS.shape[1])
    dropout = noise.answer_dropout(trajectories.keys, slots_S, config.dropout_rate, config.dropout_where)
    hidden_NSD, _ = reasoner.forward(
        params,
        reasoner.embed(params, fed_tokens(tokens_NA, config.closing_ids)),
        replayed.before[:, None] + slots_S[None],
        fed_NS,
        prefix=replayed.prefix,
        cache=replayed.cache,
        start=config.max_latents,
        dropout=dropout,
    )
    hidden_NAD = hidden_NSD[:, config.closing_slots :]
    if replayed.hidden is not None:
        hidden_NAD = one_later(replayed.hidden, hidden_NAD)
    log_probs_NA, _ = reasoner.log_probs(params, hidden_NAD, tokens_NA, spoken_NA)
    return jnp.sum(log_probs_NA, axis=1, where=spoken_NA)

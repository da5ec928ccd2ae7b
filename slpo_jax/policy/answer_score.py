"""How likely answers are: after the hidden states of a pass, and after a replayed thought."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.rollout import Replay, Trajectories
from slpo_jax.rewards.ending import answer_mask

LOGITS_OF_A_ROW = 2**23  # of an answer; 171 tokens of 49,152. Longer ones are scored in pieces
LOGITS_AT_ONCE = 2**25  # of a piece: 128 MiB
ALIGNED = 64  # a piece's rows are a multiple of it, as products are faster then
NORMALISER = "normaliser"


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


def answer_log_probs(reasoner: Reasoner, params, hidden_NAD: jax.Array, tokens_NA: jax.Array) -> jax.Array:
    """Log-probabilities of the given tokens after these hidden states.

    Of long answers only `LOGITS_AT_ONCE` logits are there at a time, and are made again in the backward pass.

    Args:
        params: all parts.
    Returns:
        float32 [N, A].
    """
    vocabulary = reasoner.config.vocab_size
    if tokens_NA.shape[1] * vocabulary <= LOGITS_OF_A_ROW:
        return token_log_probs(reasoner.logits(params, hidden_NAD), tokens_NA)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(NORMALISER))
    def piece(hidden_CD, tokens_C):
        return token_log_probs(reasoner.logits(params, hidden_CD[None]), tokens_C[None])[0]

    pieces = -(-tokens_NA.size // max(ALIGNED, LOGITS_AT_ONCE // vocabulary // ALIGNED * ALIGNED))
    rows = -(-tokens_NA.size // (pieces * ALIGNED)) * ALIGNED  # alike, so that few are there for nothing

    def cut(x):
        x = jnp.pad(x, ((0, -len(x) % rows), *((0, 0) for _ in x.shape[1:])))
        return x.reshape(-1, rows, *x.shape[1:])

    positions = hidden_NAD.reshape(-1, hidden_NAD.shape[-1]), tokens_NA.reshape(-1)
    log_probs = jax.lax.map(lambda each: piece(*each), jax.tree.map(cut, positions))
    log_probs = log_probs.reshape(-1)[: tokens_NA.size]
    return log_probs.reshape(tokens_NA.shape)


@jax.custom_vjp
def token_log_probs(logits_BLV: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    """float32 [B, L]: log softmax(logits) at the given tokens."""
    return _token_log_probs(logits_BLV, tokens_BL)[0]


def _token_log_probs(logits_BLV: jax.Array, tokens_BL: jax.Array):
    chosen_BL = jnp.take_along_axis(logits_BLV, tokens_BL[..., None], axis=-1)[..., 0]
    whole_BL = checkpoint_name(jax.nn.logsumexp(logits_BLV, axis=-1), NORMALISER)
    return chosen_BL - whole_BL, (logits_BLV, tokens_BL, whole_BL)


def _token_log_probs_backward(kept, g_BL: jax.Array):
    """In one pass, where autodiff keeps exponentials, and scatters."""
    logits_BLV, tokens_BL, whole_BL = kept
    is_token_BLV = jax.nn.one_hot(tokens_BL, logits_BLV.shape[-1])
    return g_BL[..., None] * (is_token_BLV - jnp.exp(logits_BLV - whole_BL[..., None])), None


token_log_probs.defvjp(_token_log_probs, _token_log_probs_backward)


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
    log_probs_NA = answer_log_probs(reasoner, params, hidden_NAD, tokens_NA)
    return jnp.sum(log_probs_NA, axis=1, where=spoken_NA)

"""Randomness: keys folded from (step, example, rollout, position), never from a device or a row.

A site's number is folded in last, inside `models.layers`. So the same trajectories come out of 1 device or 4, in any
batch order and, because a prompt's positions are counted back from its end, in any padding.

Tokens are drawn by temperature, then top-k, then top-p, each renormalised, as transformers' `generate` does.
"""

import dataclasses
import enum
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.layers import Dropout
from slpo_jax.settings import Checked, setting
from slpo_jax.stages import ABOUT

DropoutWhere = Literal["thought", "latents", "rollout", "all"]


@dataclasses.dataclass(frozen=True)
class DropoutConfig(Checked):
    """The section `config.dropout`: the noise of rollouts and of scoring.

    Attributes:
        rate: p, the probability of dropping a unit.
        where: "thought" is every forward up to the one that makes the last latent, "latents" the same without the
            prompt, "rollout" the same with one mask a rollout and site, kept over all steps (Dropout-GRPO, arXiv
            2606.10184), "all" every position.
    """

    rate: float = setting(0.1, least=0, below=1)
    where: DropoutWhere = "thought"


STREAMS: dict[str, int] = {section: about.stream for section, about in ABOUT.items()}


@enum.unique
class Stream(enum.IntEnum):
    """Numbers of the other streams of randomness. They never change, or resumed runs would draw other numbers.

    Up to 6: on the host for one batch of imitation (`Draw.rng`). From 2^27: parameters, folded into the run's key, as
    `STREAMS` are.
    """

    LATENT_COUNTS = 1
    REMOVED_TOKENS = 2
    SPEED = 3
    LABELS = 4
    EARLIER_STAGES = 5
    GRAPHS = 6
    ADAPTERS = 1 << 27
    LATENT_POLICY = 1 << 28
    RECIPE_PARTS = 1 << 29
    REASONER = 1 << 30


# Folded into a step's key, so that scoring has other noise than the rollouts that it scores.
ROLLOUTS = 0
SCORING = 1

# Offsets of position keys, one for each kind of position; a kind has 2^20 positions.
_LATENT = 0 << 20
_PROMPT = 1 << 20
_ANSWER = 2 << 20
_STOP = 3 << 20
_TOKEN = 4 << 20
_GATE = 5 << 20
_DRAW = 6 << 20


def stream_key(
    key: jax.Array,
    stream: str,
    step: jax.Array | int,
) -> jax.Array:
    """Return the key of one step of one stream of randomness."""
    of_stream = jax.random.fold_in(key, STREAMS[stream])
    return jax.random.fold_in(of_stream, step)


def row_keys(key: jax.Array, *indices: jax.Array) -> jax.Array:
    """Return one key a row, from the row's indices (global example, rollout, ...), each int [N].

    Returns:
        typed keys [N].
    """
    keys_N = jnp.broadcast_to(key, indices[0].shape)
    for index_N in indices:
        keys_N = jax.vmap(jax.random.fold_in)(keys_N, index_N)
    return keys_N


def rollout_keys(
    key: jax.Array,
    index_B: jax.Array,
    group: int,
) -> jax.Array:
    """Return keys [B*G] of G rollouts of each example, an example's consecutive."""
    examples_N = jnp.repeat(index_B, group)
    rollouts_N = jnp.tile(jnp.arange(group), index_B.shape[0])
    return row_keys(key, examples_N, rollouts_N)


def _position_keys(keys_N: jax.Array, positions_L: jax.Array) -> jax.Array:
    """Return keys [N, L], each row's key with each position folded in."""

    def fold_positions(key):
        return jax.vmap(lambda position: jax.random.fold_in(key, position))(positions_L)

    return jax.vmap(fold_positions)(keys_N)


def _everywhere(
    keys_N: jax.Array,
    positions_L: jax.Array,
    rate: float,
) -> Dropout:
    """Return noise that is active at every position."""
    keys_NL = _position_keys(keys_N, positions_L)
    return Dropout(keys_NL, jnp.ones(keys_NL.shape, bool), rate)


def reaches_prompts(rate: float, where: DropoutWhere) -> bool:
    """Return whether prompts have noise."""
    return rate > 0.0 and where in ("thought", "all")


def prompt_dropout(
    keys_N: jax.Array, valid_NP: jax.Array, rate: float, where: DropoutWhere
) -> Dropout | None:
    """Return the noise of a left-padded prompt; its positions are counted back from the last."""
    if not reaches_prompts(rate, where):
        return None
    from_end_P = jnp.arange(valid_NP.shape[1])[::-1]
    keys_NP = _position_keys(keys_N, _PROMPT + from_end_P)
    return Dropout(keys_NP, valid_NP, rate)


def latent_dropout(
    keys_N, steps_T, last_NT, rate: float, where: DropoutWhere
) -> Dropout | None:
    """Return the noise of the forwards of latents h_t, t in steps_T (counted from 1).

    Rollouts, scoring and the cold start's candidates all follow this law: the last latent h_tau, which makes no other,
    is fed without noise unless that is everywhere.

    Args:
        last_NT: bool, whether h_t is its row's last.
    """
    if rate == 0.0:
        return None
    # By rollout, the mask of the first step is that of every step.
    places_T = jnp.ones_like(steps_T) if where == "rollout" else steps_T
    keys_NT = _position_keys(keys_N, _LATENT + places_T)
    active_NT = ~last_NT | (where == "all")
    return Dropout(keys_NT, active_NT, rate)


def draw_keys(keys_N: jax.Array, steps_T: jax.Array) -> jax.Array:
    """Return keys [N, T] of the latent policy's own noise in its draws at steps t in steps_T (counted from 1)."""
    return _position_keys(keys_N, _DRAW + steps_T)


def gate_dropout(keys_N, steps_T, rate: float) -> Dropout | None:
    """Return the noise of the gate on latents h_t, t in steps_T, apart from that of the forwards they are fed to."""
    if not rate:
        return None
    return _everywhere(keys_N, _GATE + steps_T, rate)


def answer_dropout(
    keys_N,
    slots_A,
    rate: float,
    where: DropoutWhere,
) -> Dropout | None:
    """Return the noise of answer slots (the end marker is slot 0): none unless `where` is "all"."""
    if not rate or where != "all":
        return None
    return _everywhere(keys_N, _ANSWER + slots_A, rate)


def followed_by(first: Dropout | None, second: Dropout | None) -> Dropout | None:
    """Return the noise of a pass over two stretches of positions; only the last stretch may be without noise."""
    if first is None or second is None:
        return first

    def join(first_BL, second_BL):
        return jnp.concatenate([first_BL, second_BL], axis=1)

    return jax.tree.map(join, first, second)


def stop_uniforms(keys_N: jax.Array, step: jax.Array) -> jax.Array:
    """Return one uniform number in [0, 1) a row for the stop decision at latent step `step`."""

    def draw(key):
        return jax.random.uniform(jax.random.fold_in(key, _STOP + step))

    return jax.vmap(draw)(keys_N)


def token_keys(keys_N: jax.Array, slot: jax.Array) -> jax.Array:
    """Return keys [N] of the token that an answer slot predicts."""

    def fold_slot(key):
        return jax.random.fold_in(key, _TOKEN + slot)

    return jax.vmap(fold_slot)(keys_N)


@struct.dataclass
class PassKeys:
    """Keys of a scoring pass (of K passes, with a leading axis): of the prompts [B] and of the trajectories [N]."""

    prompts: jax.Array
    trajectories: jax.Array


def pass_keys(
    key: jax.Array,
    index_B: jax.Array,
    group: int,
    passes: int,
) -> PassKeys:
    """Make the keys of K independent passes.

    Args:
        key: the step's scoring key.
        index_B: int, see `PromptedBatch.draw_ids`: keys depend on it, not on places in the batch.
        group, passes: G and K.
    """
    index_N = jnp.repeat(index_B, group)
    rollout_N = jnp.tile(jnp.arange(group), index_B.shape[0])

    def make_keys(pass_key):
        # The trajectories count from 1, so that no trajectory's key is its prompt's.
        prompts_B = row_keys(pass_key, index_B, jnp.zeros_like(index_B))
        trajectories_N = row_keys(pass_key, index_N, 1 + rollout_N)
        return PassKeys(prompts_B, trajectories_N)

    return jax.vmap(make_keys)(jax.random.split(key, passes))


# Tokens that are drawn from together: about the root of real vocabularies.
BLOCK = 256
# Tokens of a vocabulary that is drawn from in blocks.
LARGE = 4 * BLOCK


def most_likely(
    logits_NV: jax.Array, top_k: int, top_p: float, least: int = 1
) -> tuple[jax.Array, jax.Array | None]:
    """Truncate a law (top-p: Holtzman et al., 2020).

    Args:
        logits_NV: float32, divided by the temperature; finite or -inf.
        top_k: the number of likeliest tokens to keep; 0 keeps all.
        top_p: then keep the fewest of the likeliest that have this probability together; 1 keeps all.
        least: but at least this number of them.
    Returns:
        logits [N, M], -inf where truncated, and the token ids [N, M] that they belong to, the likeliest first; with
        nothing to truncate the logits themselves, and None.
    """
    vocabulary = logits_NV.shape[-1]
    if top_k not in range(1, vocabulary) and top_p >= 1.0:
        return logits_NV, None

    # Sort the likeliest tokens.
    most = min(top_k or vocabulary, vocabulary)
    logits_NM, ids_NM = jax.lax.top_k(logits_NV, most)
    if top_p >= 1.0:
        return logits_NM, ids_NM

    # Keep those before which there is less than the wanted probability.
    probabilities_NM = jax.nn.softmax(logits_NM, axis=-1)
    before_NM = jnp.cumsum(probabilities_NM, axis=-1) - probabilities_NM
    is_first_M = jnp.arange(most) < least
    is_first_NM = jnp.broadcast_to(is_first_M, logits_NM.shape)
    is_kept_NM = (before_NM < top_p) | is_first_NM
    return jnp.where(is_kept_NM, logits_NM, -jnp.inf), ids_NM


def draw_from_blocks(key: jax.Array, logits_V: jax.Array) -> jax.Array:
    """Draw as `jax.random.categorical`, with other numbers: first a block of tokens, then one in it.

    The law is the same, with as many random numbers as there are blocks and tokens in a block, not one for each token.
    """
    missing = -logits_V.size % BLOCK
    logits_V = jnp.pad(
        logits_V,
        (0, missing),
        constant_values=-jnp.inf,
    )
    logits_KB = logits_V.reshape(-1, BLOCK)
    block_key, token_key = jax.random.split(key)
    block_logits_K = jax.nn.logsumexp(logits_KB, axis=1)
    block = jax.random.categorical(block_key, block_logits_K)
    token = jax.random.categorical(token_key, logits_KB[block])
    return block * BLOCK + token


def draw_tokens(
    keys_N: jax.Array,
    logits_NV: jax.Array,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> jax.Array:
    """Draw a token for each row, int32 [N]; from a large vocabulary that is not truncated as `draw_from_blocks` does.

    Args:
        keys_N: typed keys, used once.
        temperature: 0 is greedy, whatever the others are.
        top_k, top_p: see `most_likely`.
    """
    if temperature == 0.0:
        return jnp.argmax(logits_NV, axis=-1).astype(jnp.int32)
    logits_NM, ids_NM = most_likely(logits_NV / temperature, top_k, top_p)
    in_blocks = ids_NM is None and logits_NM.shape[-1] >= LARGE
    draw = draw_from_blocks if in_blocks else jax.random.categorical
    tokens_N = jax.vmap(draw)(keys_N, logits_NM)
    # A draw from a truncated law is a place among the kept tokens.
    if ids_NM is not None:
        token_N1 = jnp.take_along_axis(
            ids_NM,
            tokens_N[:, None],
            axis=1,
        )
        tokens_N = token_N1[:, 0]
    return tokens_N.astype(jnp.int32)

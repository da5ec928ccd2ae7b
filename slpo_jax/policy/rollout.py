"""Sampling thought trajectories and their answers, in the slot layout of SPEC section 1.

`[ prompt, left-padded: P | latents: T | end marker + answer: A ]`: the latent h_t is fed at latent slot t, the end
marker at the first answer slot, whose output is the first answer token. All loops end when every row has ended.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.attention import KVCache
from slpo_jax.models.gate import Gate
from slpo_jax.models.packing import pack
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy import noise

Stopping = Literal["sample", "threshold", "length"]


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How to think and to answer.

    Attributes:
        max_latents: T.
        answer_slots: A; at most A tokens are generated, the end-of-sequence token included.
        end_id, eos_id, pad_id: token ids.
        dropout_rate: p; 0 is the deterministic pass.
        dropout_where: see `noise.DropoutWhere`.
        stopping: "sample" (Bernoulli(rho_t), the law of training), "threshold" (first rho_t >= threshold, Alg. 1) or
            "length" (a given number of latents a row).
        temperature: of the answer tokens; 0 is greedy.
        banned_ids: tokens that are never generated.
    """

    max_latents: int
    answer_slots: int
    end_id: int
    eos_id: int
    pad_id: int
    dropout_rate: float = 0.1
    dropout_where: noise.DropoutWhere = "thought"
    stopping: Stopping = "sample"
    temperature: float = 0.0
    banned_ids: tuple[int, ...] = ()


@struct.dataclass
class Prompts:
    """Left-padded prompts: tokens int [N, P], valid bool [N, P]; of numpy on the host, of jax inside jit.

    Attributes:
        places: if not 0, the prompts of one device's batch (or micro-batch) are encoded end to end, in one row of so
            many places, which have to be enough for all their tokens: see `end_to_end`.
    """

    tokens: Any
    valid: Any
    places: int = struct.field(pytree_node=False, default=0)

    @property
    def lengths(self) -> jax.Array:
        """Real tokens of each row, int [N]."""
        return self.valid.sum(axis=1)


@struct.dataclass
class Trajectories:
    """What N rollouts produced.

    Attributes:
        latents: [N, T, D]: h_1 .. h_tau, zeros after.
        lengths: int [N], tau.
        tokens: int [N, A], generated answer tokens up to and including eos, then pad.
    """

    latents: jax.Array
    lengths: jax.Array
    tokens: jax.Array


@struct.dataclass
class _Thought:
    """The loop's state before latent step t: `h` is the latent about to be fed."""

    t: jax.Array
    h_ND: jax.Array
    cache: KVCache
    latents_NTD: jax.Array
    lengths_N: jax.Array
    active_N: jax.Array


def encode_prompts(reasoner: Reasoner, params, prompts: Prompts, dropout) -> tuple[jax.Array, KVCache]:
    """Prefill: the first latent h_1 [N, D] and the prompts' cache."""
    tokens, positions, packing = prompts.tokens, jnp.cumsum(prompts.valid, axis=1) - 1, None
    if prompts.places:
        packing = pack(prompts.valid, prompts.valid.shape[0], prompts.places)
        tokens, positions, dropout = jax.tree.map(packing.packed, (tokens, positions, dropout))
    hidden_N1D, prefix = reasoner.forward(
        params,
        reasoner.embed(params, tokens),
        positions,
        prompts.valid,
        dropout=dropout,
        last=1,
        packing=packing,
    )
    return reasoner.transition(params, hidden_N1D)[:, 0], prefix


def encode_for_rollouts(reasoner, params, prompts: Prompts, keys_N, config: RolloutConfig) -> tuple[jax.Array, KVCache]:
    """The first latents h_1 [N, D] of N/B rollouts a prompt, a prompt's in a row, and their prefix of B or N rows.

    Prompts without noise are encoded once for all their rollouts; else each rollout has masks of its own, and vmap lets
    them share what no noise has reached yet: embeddings and the first attention.
    """
    rows, rollouts = prompts.tokens.shape[0], keys_N.shape[0]

    def encode(keys_B):
        dropout = noise.prompt_dropout(keys_B, prompts.valid, config.dropout_rate, config.dropout_where)
        return encode_prompts(reasoner, params, prompts, dropout)

    if not noise.reaches_prompts(config.dropout_rate, config.dropout_where):
        first_BD, prefix = encode(keys_N[:rows])
        return repeat_to(first_BD, rollouts), prefix
    encoded = jax.vmap(encode, in_axes=1, out_axes=1)(keys_N.reshape(rows, -1))
    return jax.tree.map(lambda x: x.reshape(rollouts, *x.shape[2:]), encoded)


def repeat_to(x_B: jax.Array, rollouts: int) -> jax.Array:
    """[B, ..] -> [N, ..], each row N/B times in a row."""
    return jnp.repeat(x_B, rollouts // x_B.shape[0], axis=0)


def _latent_step(reasoner, gate, params, prefix, before_N, keys_N, config: RolloutConfig, stop_rule, thought):
    """Decide whether h_t is the last latent, feed it (without noise if it is), and move on to h_{t+1}."""
    t = thought.t
    rho_N = jax.nn.sigmoid(gate.logits(params["gate"], thought.h_ND[:, None])[:, 0])
    if config.stopping == "sample":
        fires_N = noise.stop_uniforms(keys_N, t) < rho_N
    elif config.stopping == "threshold":
        fires_N = rho_N >= stop_rule
    else:
        fires_N = t >= stop_rule
    stops_N = thought.active_N & (fires_N | (t == config.max_latents))
    goes_on_N = thought.active_N & ~stops_N
    noisy_N = goes_on_N | (config.dropout_where == "all")
    dropout = noise.latent_dropout(keys_N, t[None], noisy_N[:, None], config.dropout_rate)
    hidden_N1D, cache = reasoner.forward(
        params["reasoner"],
        thought.h_ND[:, None],
        (before_N + t - 1)[:, None],
        thought.active_N[:, None],
        prefix=prefix,
        cache=thought.cache,
        start=t - 1,
        dropout=dropout,
    )
    h_ND = jnp.where(thought.active_N[:, None], thought.h_ND, 0.0).astype(thought.latents_NTD.dtype)
    return _Thought(
        t=t + 1,
        h_ND=reasoner.transition(params["reasoner"], hidden_N1D)[:, 0],
        cache=cache,
        latents_NTD=jax.lax.dynamic_update_slice_in_dim(thought.latents_NTD, h_ND[:, None], t - 1, axis=1),
        lengths_N=jnp.where(stops_N, t, thought.lengths_N),
        active_N=goes_on_N,
    )


def think(
    reasoner, gate, params, prompts: Prompts, keys_N, config: RolloutConfig, stop_rule=None, differentiable=False,
    real_N=None,
) -> tuple[_Thought, KVCache]:  # fmt: skip
    """Prompt and latent steps; returns the finished thought and the prompts' cache. Arguments as in `rollout`."""
    h_ND, prefix = encode_for_rollouts(reasoner, params["reasoner"], prompts, keys_N, config)
    rows = h_ND.shape[0]
    before_N = repeat_to(prompts.lengths, rows)
    thought = _Thought(
        t=jnp.int32(1),
        h_ND=h_ND,
        cache=reasoner.empty_cache(rows, config.max_latents + config.answer_slots),
        latents_NTD=jnp.zeros((rows, config.max_latents, reasoner.width), h_ND.dtype),
        lengths_N=jnp.zeros(rows, jnp.int32),
        active_N=jnp.full(rows, config.max_latents > 0) if real_N is None else real_N & (config.max_latents > 0),
    )

    def step(thought):
        return _latent_step(reasoner, gate, params, prefix, before_N, keys_N, config, stop_rule, thought)

    if config.max_latents == 0:
        return thought, prefix
    if differentiable:
        thought, _ = jax.lax.scan(lambda carry, _: (step(carry), None), thought, length=config.max_latents)
    else:
        thought = jax.lax.while_loop(lambda thought: thought.active_N.any(), step, thought)
    return thought, prefix


def decode_answers(
    reasoner, params, prefix: KVCache, cache: KVCache, first_slot, before_N, keys_N, config, real_N=None
):
    """Generate answers after the end marker.

    Args:
        prefix, cache: what the answers attend to; they are written into `cache` from slot `first_slot` on.
        before_N: int, real positions before the end marker.
        keys_N: the rows' keys (used when answers are sampled or dropout is on everywhere).
        real_N: bool, rows that speak at all; None is all.
    Returns:
        int32 [N, A]: tokens up to and including eos, then pad.
    """
    rows = before_N.shape[0]

    def body(state):
        slot, token_N, ended_N, tokens_NA, cache = state
        hidden_N1D, cache = reasoner.forward(
            params,
            reasoner.embed(params, token_N[:, None]),
            (before_N + slot)[:, None],
            ~ended_N[:, None],
            prefix=prefix,
            cache=cache,
            start=first_slot + slot,
            dropout=noise.answer_dropout(keys_N, slot[None], config.dropout_rate, config.dropout_where),
        )
        logits_NV = reasoner.logits(params, hidden_N1D)[:, 0]
        if config.banned_ids:
            logits_NV = logits_NV.at[:, jnp.array(config.banned_ids)].set(-jnp.inf)
        token_N = noise.sample_tokens(keys_N, slot, logits_NV, config.temperature)
        token_N = jnp.where(ended_N, config.pad_id, token_N)
        tokens_NA = jax.lax.dynamic_update_slice_in_dim(tokens_NA, token_N[:, None], slot, axis=1)
        return slot + 1, token_N, ended_N | (token_N == config.eos_id), tokens_NA, cache

    def goes_on(state):
        slot, _, ended_N, _, _ = state
        return (slot < config.answer_slots) & ~ended_N.all()

    start = (
        jnp.int32(0),
        jnp.full(rows, config.end_id, jnp.int32),
        jnp.zeros(rows, bool) if real_N is None else ~real_N,
        jnp.full((rows, config.answer_slots), config.pad_id, jnp.int32),
        cache,
    )
    return jax.lax.while_loop(goes_on, body, start)[3]


def rollout(
    reasoner: Reasoner,
    gate: Gate,
    params: Any,
    prompts: Prompts,
    keys_N: jax.Array,
    config: RolloutConfig,
    stop_rule: jax.Array | float | None = None,
    real_N: jax.Array | None = None,
) -> Trajectories:
    """Think, stop and answer: Alg. 1 of the paper, and the behaviour law q of section 4.2.

    Args:
        params: {"reasoner": ..., "gate": ...}.
        prompts: B prompts; with dropout off a row's result does not depend on the other rows or on the padding.
        keys_N: one key a rollout, N/B of them for each prompt, in a row; see `noise.row_keys`.
        stop_rule: the threshold (stopping "threshold"), int [N] numbers of latents ("length"), unused for "sample".
        real_N: bool, False for rows that only fill a batch up: they end before they begin, so that no loop waits for
            them. None: all are real.
    Returns:
        `Trajectories` of N rows.
    """
    thought, prefix = think(reasoner, gate, params, prompts, keys_N, config, stop_rule, real_N=real_N)
    before_N = repeat_to(prompts.lengths, keys_N.shape[0]) + thought.lengths_N
    tokens_NA = decode_answers(
        reasoner, params["reasoner"], prefix, thought.cache, config.max_latents, before_N, keys_N, config, real_N
    )
    return Trajectories(thought.latents_NTD, thought.lengths_N, tokens_NA)


def replay_latents(reasoner, gate, params, prompts: Prompts, keys_N, lengths_N, config: RolloutConfig) -> jax.Array:
    """The latents of a finished rollout once more, from the same keys, masks and lengths, differentiably.

    A reward gradient that flows through the latents themselves (the pathwise gradient of dropout noise) starts here.

    Args:
        lengths_N: int, tau of each row of the rollout.
    Returns:
        [N, T, D], equal to the rollout's latents.
    """
    config = dataclasses.replace(config, stopping="length")
    thought, _ = think(reasoner, gate, params, prompts, keys_N, config, lengths_N, differentiable=True)
    return thought.latents_NTD

"""Teacher-forced passes over realised trajectories."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.packing import Packing, most_used, pack
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy import noise
from slpo_jax.policy.rollout import Prompts, RolloutConfig, Trajectories, encode_prompts


@struct.dataclass
class PassScores:
    """What one stochastic pass says of N trajectories.

    Attributes:
        latents: z_1 .. z_T, [N, T, D]; z_t comes from the prefix h_<t.
        answer_log_prob: float32 [N], the sum of the answer tokens' log-probabilities, eos included.
    """

    latents: jax.Array
    answer_log_prob: jax.Array


def answer_mask(tokens_NA: jax.Array, eos_id: int) -> jax.Array:
    """bool [N, A]: the generated tokens, up to and including eos."""
    is_eos_NA = tokens_NA == eos_id
    return jnp.cumsum(is_eos_NA, axis=1) - is_eos_NA == 0


@dataclasses.dataclass(frozen=True)
class Room:
    """How many places a prompt's row has in a scoring pass, for its G rollouts together; static.

    Attributes:
        latents: at most G*T.
        answers: at most G*A.
    """

    latents: int
    answers: int


def full_room(group: int, config: RolloutConfig) -> Room:
    """Room for whatever G rollouts can be."""
    return Room(group * config.max_latents, group * config.answer_slots)


def used_slots(trajectories: Trajectories, eos_id: int) -> tuple[jax.Array, jax.Array]:
    """bool [N, T] and bool [N, A]: the latents that were fed, and the generated tokens."""
    steps_T = jnp.arange(1, trajectories.latents.shape[1] + 1)
    return steps_T <= trajectories.lengths[:, None], answer_mask(trajectories.tokens, eos_id)


def smallest_room(rooms: Sequence[Room], trajectories: Trajectories, group: int, eos_id: int) -> jax.Array:
    """int: the first of the ascending `rooms` that every prompt's G trajectories fit in; the last has to hold them."""
    fed_NT, spoken_NA = used_slots(trajectories, eos_id)
    latents, answers = most_used(fed_NT, group), most_used(spoken_NA, group)
    limits = jnp.array([(room.latents, room.answers) for room in rooms[:-1]], jnp.int32).reshape(-1, 2)
    return jnp.sum(jnp.any(limits < jnp.stack([latents, answers]), axis=1), dtype=jnp.int32)


def score_pass(
    reasoner: Reasoner,
    params: Any,
    prompts: Prompts,
    trajectories: Trajectories,
    prompt_keys_B: jax.Array,
    keys_N: jax.Array,
    config: RolloutConfig,
    room: Room | None = None,
) -> PassScores:
    """One teacher-forced pass over realised trajectories with fresh dropout masks: all latent positions at once.

    Each of the B prompts is encoded once and shared by its G trajectories, whose used slots lie side by side in one row
    (`packing`): first the latents of all, then the answers of all. Dropout is on where the rollout had it, position by
    position.

    Args:
        params: the reasoner's parameters.
        trajectories: N = B*G rows, a prompt's G rows in a row; its latents are stop-gradient inputs and targets.
        prompt_keys_B, keys_N: this pass's keys for the prompts and for the trajectories.
        config: the rollout's.
        room: None has room for every slot; what doesn't fit is lost.
    Returns:
        `PassScores` of N rows.
    """
    group = keys_N.shape[0] // prompt_keys_B.shape[0]
    room = room or full_room(group, config)
    noisy = noise.prompt_dropout(prompt_keys_B, prompts.valid, config.dropout_rate, config.dropout_where)
    first_BD, prefix = encode_prompts(reasoner, params, prompts, noisy)
    thoughts, answers, inputs = _side_by_side(reasoner, params, prompts, trajectories, keys_N, config, room)
    hidden_BSD, _ = reasoner.forward(params, prefix=prefix, **inputs)
    later_NTD = thoughts.unpacked(reasoner.transition(params, hidden_BSD[:, : room.latents]))[:, :-1]
    z_NTD = jnp.concatenate([jnp.repeat(first_BD, group, axis=0)[:, None], later_NTD], axis=1)
    tokens_BS = answers.packed(trajectories.tokens)
    log_probs_NA = answers.unpacked(answer_log_probs(reasoner, params, hidden_BSD[:, room.latents :], tokens_BS))
    spoken_NA = answer_mask(trajectories.tokens, config.eos_id)
    return PassScores(z_NTD, jnp.sum(log_probs_NA, axis=1, where=spoken_NA))


def _side_by_side(
    reasoner: Reasoner, params, prompts: Prompts, trajectories: Trajectories, keys_N, config: RolloutConfig, room: Room
) -> tuple[Packing, Packing, dict[str, Any]]:
    """Where latents and answers lie in their prompts' rows, and the arguments of the forward pass over those rows."""
    group = keys_N.shape[0] // prompts.tokens.shape[0]
    rate, where = config.dropout_rate, config.dropout_where
    fed_NT, spoken_NA = used_slots(trajectories, config.eos_id)
    thoughts, answers = pack(fed_NT, group, room.latents), pack(spoken_NA, group, room.answers)
    before_N1, lengths_N1 = jnp.repeat(prompts.lengths, group)[:, None], trajectories.lengths[:, None]
    steps_T, slots_A = jnp.arange(1, config.max_latents + 1), jnp.arange(config.answer_slots)
    end_N1 = jnp.full_like(trajectories.tokens[:, :1], config.end_id)
    fed_tokens_NA = jnp.concatenate([end_N1, trajectories.tokens[:, :-1]], axis=1)
    noisy_NT = fed_NT if where == "all" else steps_T < lengths_N1

    def laid_out(x_NT, x_NA):
        return jnp.concatenate([thoughts.packed(x_NT), answers.packed(x_NA)], axis=1)

    return (
        thoughts,
        answers,
        {
            "inputs_BLD": laid_out(jax.lax.stop_gradient(trajectories.latents), reasoner.embed(params, fed_tokens_NA)),
            "positions_BL": laid_out(before_N1 + steps_T - 1, before_N1 + lengths_N1 + slots_A),
            "valid_BL": jnp.concatenate([thoughts.used_BS, answers.used_BS], axis=1),
            "owner_BL": jnp.concatenate([thoughts.owner_BS, answers.owner_BS], axis=1),
            "dropout": noise.followed_by(
                jax.tree.map(thoughts.packed, noise.latent_dropout(keys_N, steps_T, noisy_NT, rate)),
                jax.tree.map(answers.packed, noise.answer_dropout(keys_N, slots_A, rate, where)),
            ),
        },
    )


def answer_log_probs(reasoner: Reasoner, params, hidden_BLD: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    """float32 [B, L]: log-probabilities of the given tokens after these hidden states."""
    return token_log_probs(reasoner.logits(params, hidden_BLD), tokens_BL)


def token_log_probs(logits_BLV: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    """float32 [B, L]: log softmax(logits) at the given tokens."""
    chosen_BL = jnp.take_along_axis(logits_BLV, tokens_BL[..., None], axis=-1)[..., 0]
    return chosen_BL - jax.nn.logsumexp(logits_BLV, axis=-1)


def score(
    reasoner: Reasoner,
    params: Any,
    prompts: Prompts,
    index_B: jax.Array,
    trajectories: Trajectories,
    key: jax.Array,
    passes: int,
    config: RolloutConfig,
    room: Room | None = None,
) -> PassScores:
    """K independent passes, vmapped over their keys: `PassScores` with a leading axis K.

    Args:
        index_B: int, global example indices (the keys depend on them and not on places in the batch).
        key: this step's scoring key.
        passes: K.
        room: see `score_pass`.
    """
    group = trajectories.lengths.shape[0] // index_B.shape[0]
    index_N = jnp.repeat(index_B, group)
    rollout_N = jnp.tile(jnp.arange(group), index_B.shape[0])

    def one(pass_key):
        # The trajectories count from 1, so that no trajectory's key is its prompt's.
        prompt_keys_B = noise.row_keys(pass_key, index_B, jnp.zeros_like(index_B))
        keys_N = noise.row_keys(pass_key, index_N, 1 + rollout_N)
        return score_pass(reasoner, params, prompts, trajectories, prompt_keys_B, keys_N, config, room)

    return jax.vmap(one)(jax.random.split(key, passes))


def score_clean(
    reasoner, params, prompts: Prompts, trajectories: Trajectories, config: RolloutConfig, room: Room | None = None
) -> PassScores:
    """One pass without any noise."""
    keys_B = jnp.broadcast_to(jax.random.key(0), (prompts.tokens.shape[0],))
    keys_N = jnp.broadcast_to(keys_B[0], trajectories.lengths.shape)
    clean = dataclasses.replace(config, dropout_rate=0.0)
    return score_pass(reasoner, params, prompts, trajectories, keys_B, keys_N, clean, room)

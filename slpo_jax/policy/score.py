"""Teacher-forced passes over realised trajectories: what a latent policy would draw, and the answer's likelihood."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.packing import Packing, most_used, pack
from slpo_jax.policy import noise
from slpo_jax.policy.latent_policies import Action
from slpo_jax.policy.noise import PassKeys
from slpo_jax.policy.policy import Policy, Prompts, RolloutConfig, encode_prompts
from slpo_jax.policy.rollout import Replay, Trajectories
from slpo_jax.rewards.verifier import answer_mask, is_end, said_eos


def one_later(first_ND: jax.Array, hidden_NAD: jax.Array) -> jax.Array:
    """Return [N, A, D]: hidden states shifted by a slot, so that each is the one that slot a's token comes out of."""
    return jnp.concatenate([first_ND[:, None], hidden_NAD[:, :-1]], axis=1)


def fed_tokens(tokens_NA: jax.Array, closing_ids: tuple[int, ...]) -> jax.Array:
    """Return int [N, S], what is fed for `tokens_NA` to come out: the end marker, then all but its last token.

    Without a marker the answer itself: what follows its last token is not looked at.
    """
    if not closing_ids:
        return tokens_NA
    marker_NM = [jnp.full_like(tokens_NA[:, :1], token) for token in closing_ids]
    return jnp.concatenate([*marker_NM, tokens_NA[:, :-1]], axis=1)


def fed_slots(spoken_NA: jax.Array, config: RolloutConfig) -> jax.Array:
    """Mark, bool [N, S], the slots of `fed_tokens` that are there, as the answer's tokens are marked."""
    closing_NM = [spoken_NA[:, :1]] * config.closing_slots
    return jnp.concatenate([*closing_NM, spoken_NA], axis=1) if closing_NM else spoken_NA


def answer_after_replay(policy: Policy, params, replayed: Replay, trajectories: Trajectories, tokens_NA) -> jax.Array:
    """Return log pi(answer | prompt, replayed thought): the gradient goes through the thought too.

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


@struct.dataclass
class Scores:
    """The outcome of one pass over N trajectories.

    Attributes:
        actions: z_1 .. z_T, leaves [N, T, ..]: what the latent policy draws, z_t after the prefix of steps < t.
        action_log_probs: float32 [N, T], of the trajectories' own actions; None without a density, or where T is 0.
        token_log_probs: float32 [N, A], of the answer's tokens, the one that ended it included; anything after them.
        answer_log_prob: float32 [N], their sum.
        hidden: [N, A, D], of the positions that these tokens come out of.
        halting_log_prob: float32 [N], of halting after a thought's last step; None where that has none.
    """

    actions: Action
    action_log_probs: jax.Array | None
    token_log_probs: jax.Array
    answer_log_prob: jax.Array
    hidden: jax.Array
    halting_log_prob: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The slots of a row in a scoring pass, for all of its rollouts (`Policy.row_of`) together; static.

    Attributes:
        latents: at most G*T, or T.
        answers: at most G*S, or S (`RolloutConfig.suffix_slots`).
    """

    latents: int
    answers: int


def full_capacity(policy: Policy, group: int) -> Capacity:
    """Return enough slots for whatever a row's rollouts can be."""
    rollouts = policy.row_of(group)
    return Capacity(rollouts * policy.config.max_latents, rollouts * policy.config.suffix_slots)


def capacities(policy: Policy, group: int) -> list[Capacity]:
    """Count `Policy.capacities` in slots."""
    full = full_capacity(policy, group)
    return [Capacity(math.ceil(latent * full.latents), math.ceil(answer * full.answers))
            for latent, answer in policy.capacities]  # fmt: skip


def used_slots(policy: Policy, trajectories: Trajectories) -> tuple[jax.Array, jax.Array]:
    """Mark, bool [N, T] and bool [N, A], the latent slots that were fed, and the generated tokens of the answer."""
    steps_T, config = jnp.arange(1, policy.config.max_latents + 1), policy.config
    spoken_NA = answer_mask(trajectories.tokens, config.eos_ids)
    if trajectories.said is not None:
        spoken_NA &= ~said_eos(trajectories.said, trajectories.lengths, config.eos_ids)[:, None]
    return steps_T[None] <= trajectories.lengths[:, None], spoken_NA


def are_cut(policy: Policy, trajectories: Trajectories) -> jax.Array:
    """Tell, bool [N], which rollouts have no end within the budget of answer tokens, so that they can't be right."""
    config = policy.config
    ended_N = is_end(trajectories.tokens, config.eos_ids).any(axis=1)
    if trajectories.said is not None:
        ended_N |= said_eos(trajectories.said, trajectories.lengths, config.eos_ids)
    return ~ended_N


def smallest_capacity(policy: Policy, choices: Sequence[Capacity], trajectories: Trajectories, group: int) -> jax.Array:
    """Return the first of the ascending choices, int, that all rows' trajectories fit in; the last has to do."""
    fed_NT, spoken_NA = used_slots(policy, trajectories)
    slots = fed_NT, fed_slots(spoken_NA, policy.config)
    latents, answers = (most_used(mask, policy.row_of(group)) for mask in slots)
    limits = jnp.array([(choice.latents, choice.answers) for choice in choices[:-1]], jnp.int32).reshape(-1, 2)
    return jnp.sum(jnp.any(limits < jnp.stack([latents, answers])[None], axis=1), dtype=jnp.int32)


def score(
    policy: Policy,
    params: Any,
    prompts: Prompts,
    trajectories: Trajectories,
    keys: PassKeys | None,
    capacity: Capacity | None = None,
    advantages_NT: jax.Array | None = None,
    temperature: float = 1.0,
) -> Scores:
    """Replay realised trajectories, teacher-forced, with fresh noise: all latent positions at once.

    Each of the B prompts is encoded once and shared by its G trajectories. Their used slots lie side by side in one row
    (`packing`), or in a row each (`Policy.layout`): first the latents of all, then the answers of all. Noise is on
    where the rollout had it, position by position.

    Args:
        params: all parts.
        trajectories: N = B*G rows, a prompt's G rows in a row.
        keys: this pass's, or K passes' by a leading axis, which all that is returned has then too; None: no noise.
        capacity: None has a slot for everything; what doesn't fit is lost.
        advantages_NT: of the steps, constants, for a `LatentPolicy.signed` log_prob.
        temperature: that the answers' tokens have their likelihood at.
    Returns:
        `Scores` of N rows.
    """
    if keys is None:
        policy = policy.without_noise()
        unused_N = jnp.broadcast_to(jax.random.key(0), trajectories.keys.shape)
        keys = PassKeys(unused_N[: prompts.tokens.shape[0]], unused_N)
    group = keys.trajectories.shape[-1] // keys.prompts.shape[-1]
    capacity, together = capacity or full_capacity(policy, group), policy.row_of(group)
    fed_NT, spoken_NA = used_slots(policy, trajectories)
    fed_NS = fed_slots(spoken_NA, policy.config)
    packed = _Packed(pack(fed_NT, together, capacity.latents), pack(fed_NS, together, capacity.answers), spoken_NA)
    forward = functools.partial(_forward, policy, params, prompts, trajectories, packed, advantages_NT)
    over_passes = jax.vmap if keys.prompts.ndim == 2 else lambda function: function
    return _read_out(policy, params, trajectories, packed, over_passes, over_passes(forward)(keys), temperature)


@struct.dataclass
class _Packed:
    """Where the used slots of thoughts and answers lie in the prompts' rows; the answers' tokens, bool [N, A]."""

    thoughts: Packing
    answers: Packing
    spoken_NA: jax.Array


@struct.dataclass
class _Pass:
    """One pass, before the head: `Scores.actions`, `Scores.action_log_probs`, and what tokens come out of.

    Attributes:
        before: hidden states of the answers, as these are packed, or [N, A, D] where no marker stands before them.
        last_ND: of the token that halts, or None.
    """

    actions: Action
    action_log_probs: jax.Array | None
    before: jax.Array
    last_ND: jax.Array | None


def _forward(policy: Policy, params, prompts, trajectories, packed: _Packed, advantages_NT, keys: PassKeys) -> _Pass:
    reasoner, latent_policy, thoughts = policy.reasoner, policy.latent_policy, packed.thoughts
    config, steps_T = policy.config, jnp.arange(1, policy.config.max_latents + 1)
    noisy = noise.prompt_dropout(keys.prompts, prompts.valid, config.dropout_rate, config.dropout_where)
    first_BD, prefix = encode_prompts(reasoner, params, prompts, noisy)
    first_ND = jnp.repeat(first_BD, keys.trajectories.shape[0] // keys.prompts.shape[0], axis=0)
    inputs = _side_by_side(policy, params, prompts, trajectories, keys, packed)
    hidden_BSD, _ = reasoner.forward(params, prefix=prefix, **inputs)
    # What comes after slot t is step t + 1's.
    of_step = functools.partial(_of_step, thoughts, first_ND[:, None], hidden_BSD)
    actions, log_probs = trajectories.actions, None
    if config.max_latents:
        draws = functools.partial(noise.draw_keys, keys.trajectories) if config.latent_policy_noise else lambda _: None
        actions = of_step(functools.partial(latent_policy.draw, params), draws(steps_T[:1]), draws(steps_T + 1))
    if latent_policy.log_prob is not None and config.max_latents:
        log_prob: Callable[..., jax.Array] = latent_policy.log_prob
        signs = (advantages_NT,) if latent_policy.signed and advantages_NT is not None else ()
        realised = jax.lax.stop_gradient((trajectories.actions, *signs))
        first = jax.tree.map(lambda x: x[:, :1], realised)
        later = jax.tree.map(lambda x: jnp.concatenate([x[:, 1:], x[:, -1:]], axis=1), realised)
        log_probs = of_step(lambda hidden, action: log_prob(params, hidden, *action), first, later)
    before, last_ND = hidden_BSD[:, thoughts.capacity :], None
    if can_halt(policy) or not config.closing_ids:
        last_ND = _last(first_ND, thoughts.unpacked(hidden_BSD[:, : thoughts.capacity]), trajectories.lengths)
        before = before if config.closing_ids else one_later(last_ND, packed.answers.unpacked(before))
    return _Pass(actions, log_probs, before, last_ND if can_halt(policy) else None)


def _read_out(policy: Policy, params, trajectories, packed: _Packed, over_passes, passes: _Pass, temperature) -> Scores:
    """Put the head on the hidden states of all passes at once: its products, and its gradient, are one."""
    reasoner, config, answers, tokens_NA = policy.reasoner, policy.config, packed.answers, trajectories.tokens
    before, last = passes.before, passes.last_ND
    if temperature != 1.0:
        before, last = jax.tree.map(lambda x: x / temperature, (before, last))  # logits are linear in it
    if not config.closing_ids:
        hidden_NAD, answered = before, reasoner.log_probs(params, before, tokens_NA, packed.spoken_NA)[0]
    else:
        closing = config.closing_slots
        targets_NS = jnp.pad(tokens_NA, ((0, 0), (closing, 0))) if closing else tokens_NA
        targeted, _ = reasoner.log_probs(params, before, answers.packed(targets_NS), answers.used_BS)
        answered = over_passes(answers.unpacked)(targeted)[..., closing:]
        hidden_NAD = over_passes(answers.unpacked)(before)[..., closing:, :]
    halting = None
    if last is not None and policy.latent_policy.halting_log_prob is not None:
        halting = policy.latent_policy.halting_log_prob(params, last[..., None, :])[..., 0]
    answer_log_prob = jnp.sum(answered, axis=-1, where=packed.spoken_NA)
    return Scores(passes.actions, passes.action_log_probs, answered, answer_log_prob, hidden_NAD, halting)


def can_halt(policy: Policy) -> bool:
    """Return whether thoughts that end before step T are chosen to, by a choice that has a likelihood."""
    return policy.latent_policy.halting_log_prob is not None and policy.config.max_latents > 0


def _last(first_ND: jax.Array, hidden_NTD: jax.Array, lengths_N: jax.Array) -> jax.Array:
    """Return [N, D]: hidden states of the thoughts' last positions: of latent tau, or of the prompt where that is 0."""
    states_NTD = jnp.concatenate([first_ND[:, None], hidden_NTD], axis=1)
    return jnp.take_along_axis(states_NTD, lengths_N[:, None, None], axis=1)[:, 0]


def _of_step(thoughts: Packing, first_N1D, hidden_BSD, function, first_argument, later_arguments):
    """Run function(hidden state before step t, argument of step t) for all steps, leaves [N, T, ..].

    Args:
        thoughts: how the latent slots are packed.
        first_N1D, hidden_BSD: hidden states before step 1, and at the packed slots, the latents' first.
        first_argument: of step 1, leaves [N, 1, ..], or None.
        later_arguments: of steps 2 .. T + 1, leaves [N, T, ..], or None; there is no step T + 1, and anything will do.
    """
    first = function(first_N1D, first_argument)
    later = function(hidden_BSD[:, : thoughts.capacity], jax.tree.map(thoughts.packed, later_arguments))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, thoughts.unpacked(b)[:, :-1]], axis=1), first, later)


def _side_by_side(policy: Policy, params, prompts, trajectories, keys: PassKeys, packed: _Packed) -> dict[str, Any]:
    """Lay out the forward pass over the prompts' rows: the packed latents, then the packed answers."""
    config, thoughts, answers = policy.config, packed.thoughts, packed.answers
    group = keys.trajectories.shape[0] // keys.prompts.shape[0]
    rate, where = config.dropout_rate, config.dropout_where
    before_N1, lengths_N1 = jnp.repeat(prompts.lengths, group)[:, None], trajectories.lengths[:, None]
    steps_T, slots_S = jnp.arange(1, config.max_latents + 1), jnp.arange(config.suffix_slots)
    last_NT = policy.latent_policy.known_last(steps_T[None] >= lengths_N1)

    def laid_out(x_NT, x_NS):
        return jnp.concatenate([thoughts.packed(x_NT), answers.packed(x_NS)], axis=1)

    latents_NTD = policy.latent_policy.feed(params, jax.lax.stop_gradient(trajectories.actions))
    inputs_NSD = policy.reasoner.embed(params, fed_tokens(trajectories.tokens, config.closing_ids))
    return {
        "inputs_BLD": laid_out(latents_NTD, inputs_NSD),
        "positions_BL": laid_out(before_N1 + steps_T[None] - 1, before_N1 + lengths_N1 + slots_S[None]),
        "valid_BL": jnp.concatenate([thoughts.used_BS, answers.used_BS], axis=1),
        "owner_BL": jnp.concatenate([thoughts.owner_BS, answers.owner_BS], axis=1),
        "dropout": noise.followed_by(
            jax.tree.map(thoughts.packed, noise.latent_dropout(keys.trajectories, steps_T, last_NT, rate, where)),
            jax.tree.map(answers.packed, noise.answer_dropout(keys.trajectories, slots_S, rate, where)),
        ),
    }

"""Teacher-forced passes over realised trajectories: a latent policy's draws, and the answer's likelihood."""

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
    """Return [N, A, D]: hidden states shifted by a slot, so that each is the state that predicts slot a's token."""
    return jnp.concatenate(
        [first_ND[:, None], hidden_NAD[:, :-1]],
        axis=1,
    )


def fed_tokens(tokens_NA: jax.Array, closing_ids: tuple[int, ...]) -> jax.Array:
    """Return int [N, S], the inputs that predict `tokens_NA`: the end marker, then all answer tokens but the last.

    Without a marker they are the answer itself, and the prediction after its last token is not used.
    """
    if not closing_ids:
        return tokens_NA
    columns = [jnp.full_like(tokens_NA[:, :1], token) for token in closing_ids]
    columns.append(tokens_NA[:, :-1])
    return jnp.concatenate(columns, axis=1)


def fed_slots(spoken_NA: jax.Array, config: RolloutConfig) -> jax.Array:
    """Mark, bool [N, S], the used slots of `fed_tokens`: the marker's, and those of the answer's tokens."""
    if not config.closing_slots:
        return spoken_NA
    columns = [spoken_NA[:, :1]] * config.closing_slots
    columns.append(spoken_NA)
    return jnp.concatenate(columns, axis=1)


def answer_after_replay(
    policy: Policy, params, replayed: Replay, trajectories: Trajectories, tokens_NA
) -> jax.Array:
    """Return log pi(answer | prompt, replayed thought): the gradient goes through the thought too.

    The answer attends to the very keys and values that the rollout's own answer did.

    Args:
        params: all parts.
        replayed: of these trajectories.
        tokens_NA: int, answers up to and including their end, then anything; not always the trajectories' own.
    Returns:
        float32 [N], sums over the answer's tokens.
    """
    reasoner = policy.reasoner
    config = policy.config
    spoken_NA = answer_mask(tokens_NA, config.eos_ids)
    fed_NS = fed_slots(spoken_NA, config)
    slots_S = jnp.arange(fed_NS.shape[1])

    # Feed the marker and the answer behind the thought's own keys and values.
    dropout = noise.answer_dropout(
        trajectories.keys, slots_S, config.dropout_rate, config.dropout_where
    )
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

    # The marker's last slot predicts the first token; without a marker the thought's last position does.
    hidden_NAD = hidden_NSD[:, config.closing_slots :]
    if replayed.hidden is not None:
        hidden_NAD = one_later(replayed.hidden, hidden_NAD)
    log_probs_NA, _ = reasoner.log_probs(params, hidden_NAD, tokens_NA, spoken_NA)
    return jnp.sum(log_probs_NA, axis=1, where=spoken_NA)


@struct.dataclass
class Scores:
    """The outcome of one pass over N trajectories.

    Attributes:
        actions: z_1 .. z_T, leaves [N, T, ..]: the latent policy's draws, z_t after the prefix of steps < t.
        action_log_probs: float32 [N, T], of the trajectories' own actions; None without a density, or where T is 0.
        token_log_probs: float32 [N, A], of the answer's tokens, the one that ended it included; anything after them.
        answer_log_prob: float32 [N], their sum.
        hidden: [N, A, D], of the positions that predict these tokens.
        halting_log_prob: float32 [N], of halting after a thought's last step; None where that has no likelihood.
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
    """Return enough slots for the longest rollouts that a row can have."""
    rollouts = policy.row_of(group)
    return Capacity(
        latents=rollouts * policy.config.max_latents,
        answers=rollouts * policy.config.suffix_slots,
    )


def capacities(policy: Policy, group: int) -> list[Capacity]:
    """Return `Policy.capacities` in slots."""
    full = full_capacity(policy, group)
    choices = []
    for latent_share, answer_share in policy.capacities:
        latents = math.ceil(latent_share * full.latents)
        answers = math.ceil(answer_share * full.answers)
        choices.append(Capacity(latents, answers))
    return choices


def used_slots(
    policy: Policy, trajectories: Trajectories
) -> tuple[jax.Array, jax.Array]:
    """Mark, bool [N, T] and bool [N, A], the latent slots that were fed, and the generated tokens of the answer."""
    config = policy.config
    steps_T = jnp.arange(1, config.max_latents + 1)
    lengths_N = trajectories.lengths
    spoken_NA = answer_mask(trajectories.tokens, config.eos_ids)
    # No answer follows a written thought that said eos.
    if trajectories.said is not None:
        ended_N = said_eos(trajectories.said, lengths_N, config.eos_ids)
        spoken_NA &= ~ended_N[:, None]
    return steps_T[None] <= lengths_N[:, None], spoken_NA


def are_truncated(policy: Policy, trajectories: Trajectories) -> jax.Array:
    """Mark, bool [N], the rollouts without an end within the budget of answer tokens, which can't be right."""
    config = policy.config
    ended_N = is_end(trajectories.tokens, config.eos_ids).any(axis=1)
    if trajectories.said is not None:
        ended_N |= said_eos(trajectories.said, trajectories.lengths, config.eos_ids)
    return ~ended_N


def smallest_capacity(
    policy: Policy, choices: Sequence[Capacity], trajectories: Trajectories, group: int
) -> jax.Array:
    """Return the index, int, of the first of the ascending choices that all rows' trajectories fit in.

    Nothing is compared with the last choice, which has room for all.
    """
    fed_NT, spoken_NA = used_slots(policy, trajectories)
    fed_NS = fed_slots(spoken_NA, policy.config)
    together = policy.row_of(group)
    latents = most_used(fed_NT, together)
    answers = most_used(fed_NS, together)
    used_2 = jnp.stack([latents, answers])

    limits = [(choice.latents, choice.answers) for choice in choices[:-1]]
    limits_C2 = jnp.array(limits, jnp.int32).reshape(-1, 2)
    too_small_C = jnp.any(limits_C2 < used_2[None], axis=1)
    return jnp.sum(too_small_C, dtype=jnp.int32)


def score(
    policy: Policy,
    params: Any,
    prompts: Prompts,
    trajectories: Trajectories,
    keys: PassKeys | None,
    capacity: Capacity | None = None,
    advantages_NT: jax.Array | None = None,
    likelihood_temperature: float = 1.0,
) -> Scores:
    """Replay realised trajectories, teacher-forced, with fresh noise: all latent positions at once.

    Each of the B prompts is encoded once and shared by its G trajectories. Their used slots lie side by side in one row
    (`packing`), or in a row each (`Policy.layout`): first the latents of all, then the answers of all. Noise is on
    where the rollout had it, position by position.

    Args:
        params: all parts.
        trajectories: N = B*G rows, a prompt's G consecutive.
        keys: of this pass, or of K passes by a leading axis, which the scores then have too; None: no noise.
        capacity: None has a slot for everything; slots beyond it are lost.
        advantages_NT: of the steps, constants, for a `LatentPolicy.signed` log_prob.
        likelihood_temperature: of the law that the answers' tokens have their likelihood under, and so has halting
            where `LatentPolicy.halts_as_answers`.
    Returns:
        `Scores` of N rows.
    """
    # The config's temperature is that of drawn tokens, of which a pass has none: their likelihood has its own.
    if keys is None:
        policy = policy.without_noise()
        unused_N = jnp.broadcast_to(jax.random.key(0), trajectories.keys.shape)
        keys = PassKeys(unused_N[: prompts.tokens.shape[0]], unused_N)

    # Find the places of all used slots in the prompts' rows, which every pass shares.
    group = keys.trajectories.shape[-1] // keys.prompts.shape[-1]
    capacity = capacity or full_capacity(policy, group)
    together = policy.row_of(group)
    fed_NT, spoken_NA = used_slots(policy, trajectories)
    fed_NS = fed_slots(spoken_NA, policy.config)
    packed = _Packed(
        pack(fed_NT, together, capacity.latents),
        pack(fed_NS, together, capacity.answers),
        spoken_NA,
    )

    # Run the passes up to their hidden states, each under noise of its own.
    def over_passes(function):
        return jax.vmap(function) if keys.prompts.ndim == 2 else function

    forward = functools.partial(
        _forward, policy, params, prompts, trajectories, packed, advantages_NT
    )
    passes = over_passes(forward)(keys)

    # Put the head on all of them at once.
    return _read_out(
        policy,
        params,
        trajectories,
        packed,
        over_passes,
        passes,
        likelihood_temperature,
    )


@struct.dataclass
class _Packed:
    """The places of the used slots of thoughts and answers in the prompts' rows; the answers' tokens, bool [N, A]."""

    thoughts: Packing
    answers: Packing
    spoken_NA: jax.Array


@struct.dataclass
class _Pass:
    """One pass, before the head: `Scores.actions`, `Scores.action_log_probs`, and the states that predict tokens.

    Attributes:
        hidden: of the answers, as these are packed, or [N, A, D] where no marker stands before them.
        last_ND: the states that predict the token that halts, or None.
    """

    actions: Action
    action_log_probs: jax.Array | None
    hidden: jax.Array
    last_ND: jax.Array | None


def _forward(
    policy: Policy,
    params,
    prompts,
    trajectories,
    packed: _Packed,
    advantages_NT,
    keys: PassKeys,
) -> _Pass:
    """Run one pass over all trajectories, without the head."""
    reasoner = policy.reasoner
    latent_policy = policy.latent_policy
    thoughts = packed.thoughts
    config = policy.config
    steps_T = jnp.arange(1, config.max_latents + 1)

    # Encode the prompts, and run the model over latents and answers behind them.
    noisy = noise.prompt_dropout(
        keys.prompts, prompts.valid, config.dropout_rate, config.dropout_where
    )
    first_BD, prefix = encode_prompts(reasoner, params, prompts, noisy)
    group = keys.trajectories.shape[0] // keys.prompts.shape[0]
    first_ND = jnp.repeat(first_BD, group, axis=0)
    inputs = _side_by_side(policy, params, prompts, trajectories, keys, packed)
    hidden_BSD, _ = reasoner.forward(params, prefix=prefix, **inputs)

    # Draw the actions that the latent policy would choose; the state at slot t is that of step t + 1.
    of_step = functools.partial(
        _of_step,
        thoughts,
        first_ND[:, None],
        hidden_BSD,
    )
    actions = trajectories.actions
    if config.max_latents:

        def draw_keys(steps_T):
            if not config.latent_policy_noise:
                return None
            return noise.draw_keys(keys.trajectories, steps_T)

        actions = of_step(
            functools.partial(latent_policy.draw, params),
            draw_keys(steps_T[:1]),
            draw_keys(steps_T + 1),
        )

    # Score the actions that were taken.
    log_probs = None
    if latent_policy.log_prob is not None and config.max_latents:
        log_prob: Callable[..., jax.Array] = latent_policy.log_prob
        arguments = [trajectories.actions]
        if latent_policy.signed and advantages_NT is not None:
            arguments.append(advantages_NT)
        realised = jax.lax.stop_gradient(tuple(arguments))

        def drop_first(x_NT):
            """Return steps 2 .. T + 1; the last is not used."""
            return jnp.concatenate(
                [x_NT[:, 1:], x_NT[:, -1:]],
                axis=1,
            )

        log_probs = of_step(
            lambda hidden, action: log_prob(params, hidden, *action),
            jax.tree.map(lambda x_NT: x_NT[:, :1], realised),
            jax.tree.map(drop_first, realised),
        )

    # The thought's last position predicts the token that halts and, without a marker, the first answer token.
    hidden = hidden_BSD[:, thoughts.capacity :]
    last_ND = None
    if can_halt(policy) or not config.closing_ids:
        hidden_NTD = thoughts.unpack(hidden_BSD[:, : thoughts.capacity])
        last_ND = _select_last(first_ND, hidden_NTD, trajectories.lengths)
        if not config.closing_ids:
            hidden = one_later(last_ND, packed.answers.unpack(hidden))
    return _Pass(actions, log_probs, hidden, last_ND if can_halt(policy) else None)


def _read_out(
    policy: Policy,
    params,
    trajectories,
    packed: _Packed,
    over_passes,
    passes: _Pass,
    likelihood_temperature,
) -> Scores:
    """Put the head on the hidden states of all passes at once: its products, and its gradient, are one."""
    reasoner = policy.reasoner
    config = policy.config
    answers = packed.answers
    tokens_NA = trajectories.tokens
    last = passes.last_ND

    # The logits are linear in the hidden state. The choice to halt has a law of its own, or the answers' (Latent-GRPO).
    scaled = passes.hidden
    if likelihood_temperature != 1.0:
        scaled = scaled / likelihood_temperature
        if last is not None and policy.latent_policy.halts_as_answers:
            last = last / likelihood_temperature

    # The answers' tokens: without a marker in places of their own, else in the packed ones behind the marker's.
    if not config.closing_ids:
        hidden_NAD = passes.hidden
        answered, _ = reasoner.log_probs(params, scaled, tokens_NA, packed.spoken_NA)
    else:
        closing = config.closing_slots
        targets_NS = tokens_NA
        if closing:
            targets_NS = jnp.pad(tokens_NA, ((0, 0), (closing, 0)))
        targeted, _ = reasoner.log_probs(
            params, scaled, answers.pack(targets_NS), answers.used_BS
        )
        unpack = over_passes(answers.unpack)
        answered = unpack(targeted)[..., closing:]
        hidden_NAD = unpack(passes.hidden)[..., closing:, :]

    # The choice to halt, after each thought's last step.
    halting = None
    halting_log_prob = policy.latent_policy.halting_log_prob
    if last is not None and halting_log_prob is not None:
        halting = halting_log_prob(params, last[..., None, :])[..., 0]
    return Scores(
        actions=passes.actions,
        action_log_probs=passes.action_log_probs,
        token_log_probs=answered,
        answer_log_prob=jnp.sum(answered, axis=-1, where=packed.spoken_NA),
        hidden=hidden_NAD,
        halting_log_prob=halting,
    )


def can_halt(policy: Policy) -> bool:
    """Return whether thoughts that end before step T are chosen to, by a choice that has a likelihood."""
    has_likelihood = policy.latent_policy.halting_log_prob is not None
    return has_likelihood and policy.config.max_latents > 0


def _select_last(
    first_ND: jax.Array, hidden_NTD: jax.Array, lengths_N: jax.Array
) -> jax.Array:
    """Select the states [N, D] of the thoughts' last positions: of latent tau, or of the prompt where that is 0."""
    states_NTD = jnp.concatenate([first_ND[:, None], hidden_NTD], axis=1)
    last_N1D = jnp.take_along_axis(
        states_NTD,
        lengths_N[:, None, None],
        axis=1,
    )
    return last_N1D[:, 0]


def _of_step(
    thoughts: Packing, first_N1D, hidden_BSD, function, first_argument, later_arguments
):
    """Run function(hidden state before step t, argument of step t) for all steps, leaves [N, T, ..].

    Args:
        thoughts: the places of the latent slots.
        first_N1D, hidden_BSD: hidden states before step 1, and at the packed slots, the latents' first.
        first_argument: of step 1, leaves [N, 1, ..], or None.
        later_arguments: of steps 2 .. T + 1, leaves [N, T, ..], or None; there is no step T + 1, and anything will do.
    """
    first = function(first_N1D, first_argument)
    hidden_of_latents = hidden_BSD[:, : thoughts.capacity]
    packed_arguments = jax.tree.map(thoughts.pack, later_arguments)
    later = function(hidden_of_latents, packed_arguments)

    def join_steps(first_N1, later_BS):
        later_NT = thoughts.unpack(later_BS)
        return jnp.concatenate(
            [first_N1, later_NT[:, :-1]],
            axis=1,
        )

    return jax.tree.map(join_steps, first, later)


def _side_by_side(
    policy: Policy, params, prompts, trajectories, keys: PassKeys, packed: _Packed
) -> dict[str, Any]:
    """Lay out the forward pass over the prompts' rows: the packed latents, then the packed answers."""
    config = policy.config
    thoughts = packed.thoughts
    answers = packed.answers
    group = keys.trajectories.shape[0] // keys.prompts.shape[0]
    rate = config.dropout_rate
    where = config.dropout_where
    before_N1 = jnp.repeat(prompts.lengths, group)[:, None]
    lengths_N1 = trajectories.lengths[:, None]
    steps_T = jnp.arange(1, config.max_latents + 1)
    slots_S = jnp.arange(config.suffix_slots)
    last_NT = policy.latent_policy.known_last(steps_T[None] >= lengths_N1)

    def pack_both(x_NT, x_NS):
        return jnp.concatenate(
            [thoughts.pack(x_NT), answers.pack(x_NS)],
            axis=1,
        )

    # The inputs: realised latents, as constants, and the answers' tokens.
    actions = jax.lax.stop_gradient(trajectories.actions)
    latents_NTD = policy.latent_policy.feed(params, actions)
    tokens_NS = fed_tokens(trajectories.tokens, config.closing_ids)
    words_NSD = policy.reasoner.embed(params, tokens_NS)
    inputs_BLD = pack_both(latents_NTD, words_NSD)

    # The positions count from the prompt's end; an answer follows its own thought.
    latent_positions_NT = before_N1 + steps_T[None] - 1
    answer_positions_NS = before_N1 + lengths_N1 + slots_S[None]
    positions_BL = pack_both(latent_positions_NT, answer_positions_NS)

    # A packed slot belongs to one trajectory and attends to that alone.
    valid_BL = jnp.concatenate([thoughts.used_BS, answers.used_BS], axis=1)
    owner_BL = jnp.concatenate([thoughts.owner_BS, answers.owner_BS], axis=1)

    # The noise of each slot moves with it.
    latent_noise = noise.latent_dropout(
        keys.trajectories, steps_T, last_NT, rate, where
    )
    latent_noise = jax.tree.map(thoughts.pack, latent_noise)
    answer_noise = noise.answer_dropout(keys.trajectories, slots_S, rate, where)
    answer_noise = jax.tree.map(answers.pack, answer_noise)
    return {
        "inputs_BLD": inputs_BLD,
        "positions_BL": positions_BL,
        "valid_BL": valid_BL,
        "owner_BL": owner_BL,
        "dropout": noise.followed_by(latent_noise, answer_noise),
    }

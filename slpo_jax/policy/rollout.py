"""Sampling thought trajectories and their answers, in the project's slot layout.

`[ prompt, left-padded: P | latents: T | end marker + answer: A ]`: the action drawn for step t is fed at latent slot t,
and the end marker's M tokens at the first of the A + M - 1 slots after those; the last of them predicts the first
answer token. Without an end marker (`RolloutConfig.closing_ids` ()) the last latent, or the prompt, predicts it, and it
is fed at the first answer slot.
All loops end when every row has ended. Where a thought is written down (`LatentPolicy.says`), so that it is a part of
the completion, one that says eos ends its row: there is no answer.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.attention import KVCache
from slpo_jax.policy import noise
from slpo_jax.policy.decoding import cache_sizes, decode_answers
from slpo_jax.policy.latent_policies import Action
from slpo_jax.policy.policy import Policy, Prompts, encode_for_rollouts, repeat_to
from slpo_jax.rewards.verifier import is_end, said_eos

NO_TOKEN = -1
"""It fills the room behind a completion without eos."""


@struct.dataclass
class Trajectories:
    """N rollouts, and their keys: enough to repeat them.

    Attributes:
        actions: leaves [N, T, ..], the actions of steps 1 .. tau, zeros after.
        lengths: int [N], tau.
        tokens: int [N, A], generated answer tokens up to and including the one that ended the answer, then pad; all pad
            after a thought that said eos itself.
        keys: typed keys [N], of all the noise in a row.
        old_log_probs: by an objective, under the policy that rolled them out, leaves [N, ..]; None: nothing.
        ref_log_probs: the same under the policy that the stage started from.
        said: int [N, T], the tokens that steps 1 .. tau are written down as; None where thought is silent.
    """

    actions: Action
    lengths: jax.Array
    tokens: jax.Array
    keys: jax.Array
    old_log_probs: Any = None
    ref_log_probs: Any = None
    said: jax.Array | None = None

    @property
    def completions(self) -> jax.Array:
        """int [N, T + A]: the text of a rollout, the thought's tokens and then the answer's, without a gap.

        It ends with eos, or else with `NO_TOKEN`, so that one without eos has no pad that is eos. A silent thought has
        no part in it: it is `tokens`, [N, A].
        """
        if self.said is None:
            return self.tokens
        written_NS = jnp.concatenate([self.said, self.tokens], axis=1)
        lengths_N1 = self.lengths[:, None]
        slots_1S = jnp.arange(written_NS.shape[1])[None]
        # From the thought's end on the answer's tokens follow, which are written after its last slot.
        of_answer_NS = slots_1S - lengths_N1 + self.said.shape[1]
        source_NS = jnp.where(slots_1S < lengths_N1, slots_1S, of_answer_NS)
        return jnp.take_along_axis(
            written_NS, source_NS, axis=1, mode="fill", fill_value=NO_TOKEN
        )


@struct.dataclass
class Replay:
    """A finished thought, replayed differentiably.

    Attributes:
        actions: leaves [N, T, ..].
        prefix, cache: keys and values of prompts and of latents, with free slots for the answer from slot T on.
        before: int [N], real positions before the end marker.
        hidden: [N, D], of the thought's last position, which predicts the first answer token; None with an end marker.
    """

    actions: Action
    prefix: KVCache
    cache: KVCache
    before: jax.Array
    hidden: jax.Array | None = None


@struct.dataclass
class _Thought:
    """The loop's state before latent step t: `action`, leaves [N, ..], is about to be fed.

    Attributes:
        hidden_ND: of the last position that was fed; None where an end marker follows.
    """

    t: jax.Array
    action: Action
    cache: KVCache
    actions: Action
    lengths_N: jax.Array
    active_N: jax.Array
    hidden_ND: jax.Array | None = None


def _draw(policy: Policy, params, hidden_ND, keys_N, step) -> Action:
    """Draw the action of one step, leaves [N, ..]."""
    keys_N1 = None
    if policy.config.latent_policy_noise:
        keys_N1 = noise.draw_keys(keys_N, step[None])
    action_N1 = policy.latent_policy.draw(
        params,
        hidden_ND[:, None],
        keys_N1,
    )
    return jax.tree.map(lambda x: x[:, 0], action_N1)


def _by_row(mask_N: jax.Array, like_N: jax.Array) -> jax.Array:
    """Give a mask [N] the axes of an array [N, ..]."""
    ones = (1,) * (like_N.ndim - 1)
    return mask_N.reshape(-1, *ones)


def _choose_given(given: Trajectories | None, step, draw_N: Action) -> Action:
    """Choose the given action of a step where there is one, else the drawn one, leaves [N, ..]."""
    if given is None:
        return draw_N

    def choose(action_NT, draw_N):
        action_N = jax.lax.dynamic_index_in_dim(
            action_NT, step - 1, axis=1, keepdims=False
        )
        is_given = _by_row(step <= given.lengths, draw_N)
        return jnp.where(is_given, action_N, draw_N).astype(draw_N.dtype)

    return jax.tree.map(choose, given.actions, draw_N)


def ends_with(
    policy: Policy,
    params,
    action_N1: Action,
    t,
    keys_N,
    rule,
) -> jax.Array:
    """Return, bool [N], whether step t's action, leaves [N, 1, ..], ends a thought; arguments as in `sample`."""
    latent_policy = policy.latent_policy
    config = policy.config

    # The stopping rule.
    logits_N1 = latent_policy.stop_logits(params, action_N1)
    rho_N = jax.nn.sigmoid(logits_N1[:, 0])
    if config.stopping == "sample":
        ends_N = noise.stop_uniforms(keys_N, t) < rho_N
    elif config.stopping == "threshold":
        ends_N = rho_N >= rule
    else:
        ends_N = t >= rule

    # An action that is the end itself, or that is written down as eos.
    if latent_policy.ends is not None:
        ends_N |= latent_policy.ends(params, action_N1)[:, 0]
    if latent_policy.says is not None:
        ends_N |= is_end(
            latent_policy.says(params, action_N1)[:, 0],
            config.eos_ids,
        )
    return ends_N


def _halts(policy: Policy, params, action: Action) -> jax.Array:
    """Return, bool [N], whether this action, leaves [N, ..], is not fed, as its thought has ended before it."""
    assert policy.latent_policy.halts is not None
    action_N1 = jax.tree.map(lambda x: x[:, None], action)
    halts_N1 = policy.latent_policy.halts(params, action_N1)
    return halts_N1[:, 0]


def _latent_step(
    policy: Policy,
    params,
    prefix,
    before_N,
    keys_N,
    rule,
    given: Trajectories | None,
    thought: _Thought,
) -> _Thought:
    """Decide whether step t is the last, feed its action (without noise if it is), and draw or look up the next."""
    config = policy.config
    latent_policy = policy.latent_policy
    t = thought.t

    # Decide whether the step is its thought's last; given actions before the last never are.
    action_N1 = jax.tree.map(
        lambda x: x[:, None],
        thought.action,
    )
    ends_N = ends_with(policy, params, action_N1, t, keys_N, rule)
    if given is not None:
        ends_N &= t >= given.lengths
    stops_N = thought.active_N & (ends_N | (t == config.max_latents))
    goes_on_N = thought.active_N & ~stops_N

    # Feed the action.
    last_N1 = latent_policy.known_last(~goes_on_N[:, None])
    dropout = noise.latent_dropout(
        keys_N, t[None], last_N1, config.dropout_rate, config.dropout_where
    )
    hidden_N1D, cache = policy.reasoner.forward(
        params,
        latent_policy.feed(params, action_N1),
        (before_N + t - 1)[:, None],
        thought.active_N[:, None],
        prefix=prefix,
        cache=thought.cache,
        start=t - 1,
        dropout=dropout,
    )

    # Draw the next action, which may halt its thought before it is fed.
    draw = _draw(
        policy,
        params,
        hidden_N1D[:, 0],
        keys_N,
        t + 1,
    )
    action = _choose_given(given, t + 1, draw)
    if latent_policy.halts is not None:
        halts_N = _halts(policy, params, action) & (t >= latent_policy.least)
        goes_on_N &= ~halts_N
        stops_N = thought.active_N & ~goes_on_N

    # Write down the action that was fed, and the state after it, in the rows that were active.
    def keep(actions, action):
        is_fed = _by_row(thought.active_N, action)
        fed = jnp.where(is_fed, action, 0).astype(actions.dtype)
        return jax.lax.dynamic_update_slice_in_dim(
            actions,
            fed[:, None],
            t - 1,
            axis=1,
        )

    actions = jax.tree.map(keep, thought.actions, thought.action)
    lengths_N = jnp.where(stops_N, t, thought.lengths_N)
    hidden_ND = None
    if thought.hidden_ND is not None:
        active_N1 = thought.active_N[:, None]
        hidden_ND = jnp.where(
            active_N1,
            hidden_N1D[:, 0],
            thought.hidden_ND,
        )
    return _Thought(
        t=t + 1,
        action=action,
        cache=cache,
        actions=actions,
        lengths_N=lengths_N,
        active_N=goes_on_N,
        hidden_ND=hidden_ND,
    )


def think(
    policy: Policy,
    params,
    prompts: Prompts,
    keys_N,
    rule=None,
    differentiable: bool = False,
    real_N=None,
    given: Trajectories | None = None,
) -> tuple[_Thought, KVCache]:
    """Encode prompts and take latent steps: the finished thought and the prompts' cache.

    Args:
        differentiable: T steps of a scan, and a cache for a whole answer; else the loop ends with the last row.
        others: as in `sample`.
    """
    config = policy.config
    latent_policy = policy.latent_policy
    steps = config.max_latents

    # Encode the prompts, and draw the first actions.
    hidden_ND, prefix = encode_for_rollouts(
        policy.reasoner, params, prompts, keys_N, config
    )
    rows = hidden_ND.shape[0]
    before_N = repeat_to(prompts.lengths, rows)
    draw = _draw(policy, params, hidden_ND, keys_N, jnp.int32(1))
    first = _choose_given(given, jnp.int32(1), draw)

    # Decide which rows think at all.
    active_N = jnp.full(rows, steps > 0) if real_N is None else real_N & (steps > 0)
    may_be_empty = not config.closing_ids or latent_policy.halts is not None
    if config.stopping == "length" and may_be_empty:
        active_N &= rule > 0
    if latent_policy.halts is not None and not latent_policy.least:
        active_N &= ~_halts(policy, params, first)

    # Begin with an empty cache, which has room for the thought and for an answer, or the beginning of one.
    slots = config.suffix_slots
    if not differentiable:
        slots = cache_sizes(slots)[0]

    def zeros(x_N):
        return jnp.zeros(
            (rows, steps, *x_N.shape[1:]),
            x_N.dtype,
        )

    thought = _Thought(
        t=jnp.int32(1),
        action=first,
        cache=policy.reasoner.empty_cache(rows, steps + slots),
        actions=jax.tree.map(zeros, first),
        lengths_N=jnp.zeros(rows, jnp.int32),
        active_N=active_N,
        hidden_ND=None if config.closing_ids else hidden_ND,
    )

    def step(thought):
        return _latent_step(
            policy, params, prefix, before_N, keys_N, rule, given, thought
        )

    # Take the steps.
    if steps == 0:
        return thought, prefix
    if differentiable:
        thought, _ = jax.lax.scan(
            lambda thought, _: (step(thought), None), thought, length=steps
        )
    else:
        thought = jax.lax.while_loop(
            lambda thought: thought.active_N.any(), step, thought
        )
    return thought, prefix


def sample(
    policy: Policy,
    params: Any,
    prompts: Prompts,
    keys_N: jax.Array,
    rule: jax.Array | float | None = None,
    real_N: jax.Array | None = None,
    given: Trajectories | None = None,
) -> Trajectories:
    """Think, stop and answer: Alg. 1 of the paper, and the behaviour law q of section 4.2.

    Args:
        params: all parts.
        prompts: B prompts; without noise a row's result does not depend on the other rows or on the padding.
        keys_N: one key a rollout, N/B consecutive ones for each prompt; see `noise.row_keys`.
        rule: the threshold (stopping "threshold"), int [N] numbers of latents ("length"; also 0 where no end marker
            follows or `LatentPolicy.halts` is there), unused for "sample".
        real_N: bool, False for rows that only fill up a batch: they end before they begin, so that no loop waits for
            them. None: all are real.
        given: N rows, of whose actions the first `lengths` are taken as they are, under this rollout's own noise; it
            decides whether the last of them ends the thought, and goes on from there. None: all are drawn.
    Returns:
        `Trajectories` of N rows.
    """
    # Think.
    params = policy.reasoner.cast(params)
    thought, prefix = think(
        policy, params, prompts, keys_N, rule, real_N=real_N, given=given
    )
    before_N = repeat_to(prompts.lengths, keys_N.shape[0]) + thought.lengths_N

    # No answer follows a written thought that says eos.
    words_NT = None
    if policy.latent_policy.says is not None:
        words_NT = policy.latent_policy.says(params, thought.actions)
        goes_on_N = ~said_eos(words_NT, thought.lengths_N, policy.config.eos_ids)
        real_N = goes_on_N if real_N is None else real_N & goes_on_N

    # Answer.
    tokens_NA = decode_answers(
        policy,
        params,
        prefix,
        thought.cache,
        policy.config.max_latents,
        before_N,
        keys_N,
        real_N=real_N,
        hidden_ND=thought.hidden_ND,
    )
    return Trajectories(
        actions=thought.actions,
        lengths=thought.lengths_N,
        tokens=tokens_NA,
        keys=keys_N,
        said=words_NT,
    )


def replay(
    policy: Policy, params, prompts: Prompts, trajectories: Trajectories
) -> Replay:
    """Replay the thought of finished rollouts: the same keys, masks and lengths, differentiably.

    A rollout's actions are a deterministic function of parameters and keys, so the gradient of the answer goes back
    through them: the pathwise gradient of the noise.

    Returns:
        `Replay`; its actions equal those of the trajectories.
    """
    # The keys are used again on purpose.
    keys_N = jax.random.clone(trajectories.keys)
    lengths_N = trajectories.lengths

    # The lengths are given, so that nothing else ends a thought.
    latent_policy = dataclasses.replace(
        policy.latent_policy.not_halting(),
        ends=None,
        says=None,
    )
    by_length = dataclasses.replace(
        policy.with_config(stopping="length"),
        latent_policy=latent_policy,
    )
    thought, prefix = think(
        by_length, params, prompts, keys_N, lengths_N, differentiable=True
    )
    before_N = repeat_to(prompts.lengths, keys_N.shape[0]) + lengths_N
    return Replay(thought.actions, prefix, thought.cache, before_N, thought.hidden_ND)

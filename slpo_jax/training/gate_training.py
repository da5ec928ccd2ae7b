"""The stopping gate's cold start: the first stop is supervised by correctness (paper section 4.1).

Names of arrays end with their axes (`slpo_jax/__init__.py`): B problems, N trajectories of all of them, T latents of
each; C candidate lengths of a trajectory, M = N*C candidates, A slots of an answer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from slpo_jax.models.attention import KVCache, join
from slpo_jax.models.gate import stop_set_loss
from slpo_jax.policy import noise
from slpo_jax.policy.decoding import cache_sizes, decode_answers
from slpo_jax.policy.latent_policies import Action
from slpo_jax.policy.policy import (
    Policy,
    PromptedBatch,
    Prompts,
    repeat_rows,
    repeat_to,
)
from slpo_jax.policy.rollout import Trajectories, replay, think
from slpo_jax.policy.score import answer_after_replay
from slpo_jax.rewards.reward import RewardFn
from slpo_jax.runtime.mesh import Layout
from slpo_jax.settings import Checked, setting
from slpo_jax.training.host_rewards import HostRewardFn, HostVerdicts
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.rollouts import make_draw_program
from slpo_jax.training.state import LossFn, TrainState, make_train_step


def _seen_before(
    prompt_cache: KVCache, latent_cache: KVCache, lengths_C: jax.Array
) -> KVCache:
    """Join prompt and latent slots to one prefix, of which the candidate of length t sees the latents before t."""
    rows, steps = latent_cache.valid.shape
    (candidates,) = lengths_C.shape

    # Repeat the prompts' slots for their trajectories.
    def repeat(x, axis):
        copies = rows // x.shape[axis]
        return jnp.repeat(x, copies, axis)

    axes = jax.tree.broadcast(prompt_cache.rows_axes, prompt_cache)
    prompt_cache = jax.tree.map(repeat, prompt_cache, axes)
    slots = prompt_cache.slots

    # All of them are seen, and the latents before the candidate's length.
    steps_T = jnp.arange(1, steps + 1)
    seen_CT = steps_T[None, :] < lengths_C[:, None]
    seen_NCT = jnp.broadcast_to(seen_CT, (rows, candidates, steps))
    prompt_N1P = prompt_cache.valid[:, None]
    prompt_NCP = jnp.broadcast_to(prompt_N1P, (rows, candidates, slots))
    valid = jnp.concatenate([prompt_NCP, seen_NCT], axis=2)
    valid = valid.reshape(rows * candidates, -1)
    return dataclasses.replace(join(prompt_cache, latent_cache), valid=valid)


def decode_candidates(
    policy: Policy, params, prompts: Prompts, keys_N, min_latents: int
) -> tuple[Action, jax.Array]:
    """Answer at every candidate length of full-length trajectories (paper section 4.1, the cold start).

    All C = T - T_min + 1 candidates of a trajectory share its one cache of prompt and latents and are decoded as one
    batch: candidate t sees the noisy slots before t, and feeds step t's action again as its last: with other noise than
    in the cache, if any (`noise.latent_dropout`).

    Args:
        policy: its stopping rule is not used.
        prompts, keys_N: as in `rollout.sample`.
        min_latents: T_min.
    Returns:
        actions, leaves [N, T, ..], and answer tokens int32 [N, C, A].
    """
    # Trajectories of full length, without answers.
    config = policy.config
    full = policy.with_config(stopping="length", answer_slots=0)
    not_halting = policy.latent_policy.not_halting()
    full = dataclasses.replace(full, latent_policy=not_halting)
    params = policy.reasoner.cast(params)
    steps = config.max_latents
    thought, prompt_cache = think(full, params, prompts, keys_N, jnp.int32(steps))

    # Each candidate sees the slots before its length, and feeds its last thought again.
    rows = keys_N.shape[0]
    lengths_C = jnp.arange(min_latents, steps + 1)
    (candidates,) = lengths_C.shape
    shared = _seen_before(prompt_cache, thought.cache, lengths_C)
    fed_NTD = policy.latent_policy.feed(params, thought.actions)
    inputs_NCD = fed_NTD[:, min_latents - 1 :]
    prompts_N = repeat_to(prompts.lengths, rows)
    before_NC = prompts_N[:, None] + lengths_C[None]
    before_M = before_NC.reshape(-1)
    # Each of these latents is known to be its candidate's last, which decides on its dropout.
    all_NC = jnp.ones((rows, candidates), bool)
    last_NC = policy.latent_policy.known_last(all_NC)
    dropout_NC = noise.latent_dropout(
        keys_N, lengths_C, last_NC, config.dropout_rate, config.dropout_where
    )

    def flatten(x):
        return x.reshape(-1, 1)

    dropout_M1 = jax.tree.map(flatten, dropout_NC)
    cache_slots, *_ = cache_sizes(config.suffix_slots)
    size = rows * candidates  # M, the rows of all candidates
    inputs_M1D = inputs_NCD.reshape(size, 1, -1)
    positions_M1 = before_M[:, None] - 1
    valid_M1 = jnp.ones((size, 1), bool)
    empty = policy.reasoner.empty_cache(size, 1 + cache_slots)
    _, cache = policy.reasoner.forward(
        params,
        inputs_M1D,
        positions_M1,
        valid_M1,
        prefix=shared,
        cache=empty,
        start=0,
        dropout=dropout_M1,
    )

    # Then it answers.
    keys_M = jnp.repeat(keys_N, candidates)
    tokens_MA = decode_answers(policy, params, shared, cache, 1, before_M, keys_M)
    tokens_NCA = tokens_MA.reshape(rows, candidates, config.answer_slots)
    return thought.actions, tokens_NCA


@dataclasses.dataclass(frozen=True)
class ColdStartConfig(Checked):
    """The section `config.cold_start`, and the two settings from elsewhere that the loss needs.

    Attributes:
        batch_size: problems a step, over all devices.
        micro_batches: gradient accumulation.
        steps: optimizer steps, at most.
        trajectories: N, sampled full-length trajectories a problem.
        train_backbone: send the gate's gradient on, through the latents, into the reasoner.
        answer_weight: weight of the likelihood of right answers at lengths that are right, which keeps a trained
            reasoner's answers; without `train_backbone` it has no effect.
        evaluate_every: steps between validations; the gate with the best validation accuracy is kept.
        patience: validations without a better one before it stops.
        optimizer: of what is trained.
        min_latents: T_min (`config.min_latents`); candidate lengths are T_min..T.
        gate_dropout: dropout of the gate head while it trains (`config.gate.dropout`).
    """

    batch_size: int = setting(256, least=1)
    micro_batches: int = setting(2, least=1)
    steps: int = setting(20_000, least=1)
    trajectories: int = setting(4, least=1)
    train_backbone: bool = False
    answer_weight: float = setting(1.0, least=0)
    evaluate_every: int = setting(500, least=1)
    patience: int = setting(20, least=1)
    optimizer: OptimizerConfig = OptimizerConfig("adafactor", 1e-4)
    min_latents: int = setting(3, least=1, in_config=False)
    gate_dropout: float = setting(0.1, least=0, below=1, in_config=False)


def candidates_of(
    policy: Policy,
    config: ColdStartConfig,
    params,
    batch: PromptedBatch,
    key: jax.Array,
):
    """Draw full-length trajectories, and answer at every candidate length of each; see `decode_candidates`."""
    params = policy.reasoner.stack(params)
    keys_N = noise.rollout_keys(key, batch.draw_ids, config.trajectories)
    return decode_candidates(policy, params, batch.prompts, keys_N, config.min_latents)


def candidates_with_lengths(
    policy: Policy,
    config: ColdStartConfig,
    params,
    batch: PromptedBatch,
    key: jax.Array,
):
    """Return `candidates_of`, and the candidates' lengths, int [N, C]."""
    actions, tokens_NCA = candidates_of(policy, config, params, batch, key)
    most = policy.config.max_latents
    lengths_C = jnp.arange(config.min_latents, most + 1)
    rows, candidates, _ = tokens_NCA.shape
    lengths_NC = jnp.broadcast_to(lengths_C, (rows, candidates))
    return actions, tokens_NCA, lengths_NC


def make_loss(policy: Policy, reward: RewardFn, config: ColdStartConfig) -> LossFn:
    """Make L_stop (paper section 4.1), summed over the trajectories that have a valid length; others are left out.

    With `train_backbone` each also has `answer_weight` times the negative log-likelihood of its own right answer at one
    of its valid lengths, each equally likely: L_stop alone moves latents towards the gate's decision and away from
    answers.

    Metrics: `loss`, of which `answer_log_likelihood` is a part; `valid_share`, the trajectories with a valid length;
    `right_share`, the candidates that are right; `expected_length`, the mean of tau under the gate's law.
    """
    candidates_loss = make_candidates_loss(policy, config)

    def loss_fn(params, batch: PromptedBatch, key):
        params = policy.reasoner.stack(params)
        fixed = jax.lax.stop_gradient(params)
        actions, tokens_NCA = candidates_of(policy, config, fixed, batch, key)
        _, candidates, slots = tokens_NCA.shape

        # Each problem's candidates, of all its trajectories, are judged by its reference.
        copies = config.trajectories * candidates
        references = repeat_rows(batch.references, copies)
        completions = tokens_NCA.reshape(-1, slots)
        rewards = reward(completions, references)
        prompts = len(batch.draw_ids)
        rewards = rewards.reshape(prompts, -1)
        judged = (batch, (actions, tokens_NCA), rewards)
        return candidates_loss(params, judged, key)

    return loss_fn


def make_candidates_loss(policy: Policy, config: ColdStartConfig) -> LossFn:
    """Make the loss of (batch, candidates, rewards [B, N * C / B]): `make_loss` after the verdicts; 1 is right."""

    def loss_fn(
        params, judged: tuple[PromptedBatch, tuple[Action, jax.Array], jax.Array], key
    ):
        batch, (actions, tokens_NCA), rewards = judged
        most = policy.config.max_latents
        steps_T = jnp.arange(1, most + 1)
        params = policy.reasoner.stack(params)
        rows, candidates, _ = tokens_NCA.shape
        # With the key that the candidates were drawn with, so that a replay has their noise.
        keys_N = noise.rollout_keys(key, batch.draw_ids, config.trajectories)

        # The valid lengths of a trajectory are those of its right candidates.
        rewards_NC = rewards.reshape(rows, -1)
        right_NC = rewards_NC >= 1
        too_short = config.min_latents - 1
        in_set_NT = jnp.pad(right_NC, ((0, 0), (too_short, 0)))
        valid_N = in_set_NT.any(axis=1)

        # To reach the reasoner the gradient goes through the thoughts, which are replayed. Right answers stay likely.
        answer_term = None
        if config.train_backbone:
            lengths_N = jnp.full(rows, most)
            full = Trajectories(
                actions=actions,
                lengths=lengths_N,
                tokens=tokens_NCA[:, -1],
                keys=keys_N,
            )
            if config.answer_weight:
                stopped = _stop(full, tokens_NCA, right_NC, config.min_latents)
                replayed = replay(policy, params, batch.prompts, stopped)
                answers_N = answer_after_replay(
                    policy, params, replayed, stopped, stopped.tokens
                )
                valid_answers_N = answers_N * valid_N
                answer_term = valid_answers_N.sum()
            replayed = replay(policy, params, batch.prompts, full)
            actions = replayed.actions

        # The gate is to stop first at one of the lengths that are right. The loss is 0 where there are none.
        gate_noise = noise.gate_dropout(keys_N, steps_T, config.gate_dropout)
        logits_NT = policy.latent_policy.stop_logits(params, actions, gate_noise)
        loss_N = jax.vmap(stop_set_loss)(logits_NT, in_set_NT)

        # The expected length: the probability that a thought reaches a step, 1 for the first, summed over steps.
        before_last_NT = logits_NT[:, :-1]
        going_on_NT = 1 - jax.nn.sigmoid(before_last_NT)
        surviving_NT = jnp.cumprod(going_on_NT, axis=1)
        steps = 1.0 * rows + surviving_NT.sum()

        # Sums, and what they are over.
        count = jnp.float32(rows)
        valid = valid_N.sum().astype(jnp.float32)
        loss = loss_N.sum()
        metrics = {}
        if answer_term is not None:
            loss = loss - config.answer_weight * answer_term
            metrics["answer_log_likelihood"] = (answer_term, valid)
        metrics |= {
            "loss": (loss, valid),
            "valid_share": (valid, count),
            "right_share": (right_NC.sum(), count * candidates),
            "expected_length": (steps, count),
        }
        return loss, metrics

    return loss_fn


def _stop(
    full: Trajectories, tokens_NCA: jax.Array, right_NC: jax.Array, min_latents: int
) -> Trajectories:
    """Stop each trajectory at one of the lengths at which it is right; at T_min where it is right at none."""
    # Full-length thoughts draw no stops, so nothing else uses these numbers.
    uniforms_N = noise.stop_uniforms(full.keys, jnp.int32(1))
    n_right_N = right_NC.sum(axis=1)
    rank_N = jnp.floor(uniforms_N * n_right_N) + 1

    # Its place is the first up to which there are that many right ones.
    right_so_far_NC = jnp.cumsum(right_NC, axis=1)
    reaches_NC = right_so_far_NC >= rank_N[:, None]
    place_N = reaches_NC.argmax(axis=1)
    place_N11 = place_N[:, None, None]
    tokens_N1A = jnp.take_along_axis(tokens_NCA, place_N11, axis=1)
    lengths_N = min_latents + place_N
    tokens_NA = tokens_N1A[:, 0]
    return dataclasses.replace(full, lengths=lengths_N, tokens=tokens_NA)


def make_host_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    trained: tuple[str, ...],
    layout: Layout,
    stream: str,
    micro_batches: int = 1,
    *,
    sample: Callable[..., tuple[Any, jax.Array, jax.Array]],
    host_reward: HostRewardFn,
    schedule: optax.Schedule | None = None,
):
    """Make a train step that asks the host between its two programs.

    The loss is of (batch, what is sampled, rewards float32 [B, N / B]).

    Args:
        sample: (parameters, batch, the step's key) -> (anything, completions int [.., A], a prompt's consecutive, and
            the latents of each one's thought, int [..]).
        host_reward: each process asks for its own rows.
    """

    def sample_without(params, _, batch, key):
        return sample(params, batch, key)

    draw = make_draw_program(sample_without, layout, stream, micro_batches)
    improve = make_train_step(
        loss_fn, optimizer, trained, layout, stream, micro_batches, schedule=schedule
    )
    verdicts = HostVerdicts(host_reward, layout.mesh)

    def step(state: TrainState, batch):
        batch, actions, tokens, latents = draw(state, batch, {})
        rewards_BG = verdicts.ask(tokens, batch.draw_ids, latents)
        sampled = (actions, tokens)
        judged = (batch, sampled, rewards_BG)
        return improve(state, judged)

    return verdicts.with_metrics(step)

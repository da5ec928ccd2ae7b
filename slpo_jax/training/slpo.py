"""SLPO's train step (paper section 4.2; SPEC section 2): roll out, reward, score K times, one surrogate loss."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy import noise
from slpo_jax.policy.advantage import grpo, rloo
from slpo_jax.policy.objective import ObjectiveConfig, surrogate_loss, trajectory_scores
from slpo_jax.policy.prompted import PromptedBatch, RewardFn, repeat_rows
from slpo_jax.policy.rollout import RolloutConfig, Trajectories, rollout
from slpo_jax.policy.score import Room, full_room, score, score_clean, smallest_room
from slpo_jax.training.state import LossFn

ADVANTAGES = {"rloo": rloo, "grpo": grpo}




@dataclasses.dataclass(frozen=True)
class SlpoConfig:
    """Settings of the SLPO stage.

    Attributes:
        group: G.
        passes: K.
        advantage: "rloo" or "grpo".
        answer_passes: the answer's log-likelihood, "mean" over the K passes or one "clean" pass.
        rooms: (share of a prompt's G*T latent slots, share of its G*A answer slots) that a scoring pass has room for,
            ascending to (1, 1). Each pair is a program of its own; the result does not depend on them.
    """

    group: int = 8
    passes: int = 4
    advantage: Literal["rloo", "grpo"] = "rloo"
    answer_passes: Literal["mean", "clean"] = "mean"
    rooms: tuple[tuple[float, float], ...] = ((0.625, 0.375), (0.75, 0.5), (1.0, 1.0))


@dataclasses.dataclass(frozen=True)
class Slpo:
    """The parts that a step is made of: models, reward and settings."""

    reasoner: Reasoner
    gate: Gate
    reward: RewardFn
    rollout_config: RolloutConfig
    objective: ObjectiveConfig
    config: SlpoConfig






def sample(slpo: Slpo, params, batch: PromptedBatch, key: jax.Array) -> tuple[Trajectories, jax.Array]:
    """Roll out G trajectories a prompt and verify their answers.

    The B*G rollouts are one batch, not a vmap over G, so that one loop ends when the last of them has ended.

    Args:
        key: the step's key.
    Returns:
        `Trajectories` of B*G rows, a prompt's G in a row, and float32 rewards [B, G].
    """
    group = slpo.config.group
    index_N, references = repeat_rows((batch.index, batch.references), group)
    rollout_N = jnp.tile(jnp.arange(group), batch.index.shape[0])
    keys_N = noise.row_keys(jax.random.fold_in(key, 0), index_N, rollout_N)
    rule = None
    if slpo.rollout_config.stopping == "threshold":
        rule = 0.5
    elif slpo.rollout_config.stopping == "length":
        rule = slpo.rollout_config.max_latents
    trajectories = rollout(slpo.reasoner, slpo.gate, params, batch.prompts, keys_N, slpo.rollout_config, rule)
    rewards_N = slpo.reward(trajectories.tokens, references).astype(jnp.float32)
    return trajectories, rewards_N.reshape(-1, group)


def loss_of_trajectories(slpo: Slpo, params, batch: PromptedBatch, trajectories: Trajectories, rewards_BG, key):
    """The surrogate loss summed over prompts, and the scores it is made of (paper section 4.2).

    The scoring passes are compiled for each of `SlpoConfig.rooms`; the smallest that these trajectories fit in runs.

    Args:
        trajectories, rewards_BG: from `sample`, constants.
        key: the step's key.
    """
    rooms = scoring_rooms(slpo)
    branches = [functools.partial(_loss_with_room, slpo, room) for room in rooms]
    room = smallest_room(rooms, trajectories, slpo.config.group, slpo.rollout_config.eos_id)
    return switch_with_gradient(room, branches, params, batch, trajectories, rewards_BG, key)


def scoring_rooms(slpo: Slpo) -> list[Room]:
    """`SlpoConfig.rooms` in places."""
    full = full_room(slpo.config.group, slpo.rollout_config)
    shares = slpo.config.rooms
    return [Room(math.ceil(thought * full.latents), math.ceil(said * full.answers)) for thought, said in shares]


def _loss_with_room(slpo: Slpo, room: Room, params, batch: PromptedBatch, trajectories, rewards_BG, key):
    config, rollout_config = slpo.config, slpo.rollout_config
    scores = score(
        slpo.reasoner,
        params["reasoner"],
        batch.prompts,
        batch.index,
        trajectories,
        jax.random.fold_in(key, 1),
        config.passes,
        rollout_config,
        room,
    )
    if config.answer_passes == "clean":
        clean = score_clean(slpo.reasoner, params["reasoner"], batch.prompts, trajectories, rollout_config, room)
        answer_N = clean.answer_log_prob
    else:
        answer_N = scores.answer_log_prob.mean(axis=0)
    gate_logits_NT = slpo.gate.logits(params["gate"], trajectories.latents)
    terms = trajectory_scores(
        trajectories.latents, scores.latents, trajectories.lengths, answer_N, gate_logits_NT, slpo.objective
    )
    advantages_BG = jax.vmap(ADVANTAGES[config.advantage])(rewards_BG)
    return surrogate_loss(terms, advantages_BG, slpo.objective), terms


def switch_with_gradient(index, branches, params, *constants):
    """`jax.lax.switch` over `branch(params, *constants) -> (loss, aux)`, with gradients for params alone.

    The chosen branch makes loss and gradient together. Differentiating the switch itself would keep what every branch
    has to remember for its backward pass, not only the chosen one.

    Returns:
        (loss, aux); no gradient goes through aux.
    """

    @jax.custom_vjp
    def choose(params, index, constants):
        return jax.lax.switch(index, branches, params, *constants)

    def forward(params, index, constants):
        with_gradient = [jax.value_and_grad(branch, has_aux=True) for branch in branches]
        return jax.lax.switch(index, with_gradient, params, *constants)

    def backward(grads, cotangents):
        return jax.tree.map(lambda g: cotangents[0] * g, grads), None, None

    choose.defvjp(forward, backward)
    return choose(params, index, constants)


def make_loss(slpo: Slpo) -> LossFn:
    """The step's loss.

    Metrics: `loss`, `reward`, `solved` (prompts with a right rollout), `mixed` (prompts whose rewards differ: the only
    ones with a gradient), `latent_steps`, the three log-likelihoods and the surrogate variance, each a mean.
    """

    def loss_fn(params, batch: PromptedBatch, key):
        trajectories, rewards_BG = jax.lax.stop_gradient(sample(slpo, params, batch, key))
        loss, terms = loss_of_trajectories(slpo, params, batch, trajectories, rewards_BG, key)
        prompts, rollouts = jnp.float32(rewards_BG.shape[0]), jnp.float32(rewards_BG.size)
        low_B, high_B = rewards_BG.min(axis=1), rewards_BG.max(axis=1)
        return loss, {
            "loss": (loss, prompts),
            "reward": (rewards_BG.sum(), rollouts),
            "solved": (high_B.sum(), prompts),
            "mixed": ((high_B > low_B).sum(), prompts),
            "latent_steps": (trajectories.lengths.sum(), rollouts),
            "latent_log_likelihood": (terms.latent.sum(), rollouts),
            "answer_log_likelihood": (terms.answer.sum(), rollouts),
            "stop_log_likelihood": (terms.stop.sum(), rollouts),
            "surrogate_variance": (terms.variance.sum(), rollouts),
        }

    return loss_fn

"""SLPO's train step (paper section 4.2; SPEC section 2): roll out, reward, score K times, one surrogate loss."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy import noise
from slpo_jax.policy.advantage import grpo, rloo
from slpo_jax.policy.objective import ObjectiveConfig, surrogate_loss, trajectory_scores
from slpo_jax.policy.rollout import Prompts, RolloutConfig, Trajectories, rollout
from slpo_jax.policy.surrogate import score, score_clean
from slpo_jax.text.batches import EncodedProblems, batch_indices
from slpo_jax.text.verifier import encode_references
from slpo_jax.training.state import LossFn

RewardFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(tokens int [N, A], references uint8 [N, R]) -> bool [N], traceable."""

ADVANTAGES = {"rloo": rloo, "grpo": grpo}


@struct.dataclass
class PromptedBatch:
    """Problems to roll out: prompts, encoded references uint8 [B, R], global example indices int [B]."""

    prompts: Prompts
    references: Any
    index: Any


@dataclasses.dataclass(frozen=True)
class SlpoConfig:
    """Settings of the SLPO stage.

    Attributes:
        group: G.
        passes: K.
        advantage: "rloo" or "grpo".
        answer_passes: the answer's log-likelihood, "mean" over the K passes or one "clean" pass.
    """

    group: int = 8
    passes: int = 4
    advantage: Literal["rloo", "grpo"] = "rloo"
    answer_passes: Literal["mean", "clean"] = "mean"


@dataclasses.dataclass(frozen=True)
class Slpo:
    """The parts that a step is made of: models, reward and settings."""

    reasoner: Reasoner
    gate: Gate
    reward: RewardFn
    rollout_config: RolloutConfig
    objective: ObjectiveConfig
    config: SlpoConfig


def make_batch(problems: EncodedProblems, step: int, seed: int, batch_size: int, prompt_slots, width: int):
    """The `PromptedBatch` of one step; a pure function of its arguments."""
    indices = batch_indices(seed, step, len(problems), batch_size)
    prompts = problems.prompt_batch(indices, prompt_slots)
    references = encode_references([problems.problems[i].answer for i in indices], width)
    return PromptedBatch(Prompts(prompts.tokens, prompts.valid), references, prompts.index)


def repeat_rows(tree, copies: int):
    """Each row `copies` times in a row."""
    return jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), tree)


def sample(slpo: Slpo, params, batch: PromptedBatch, key: jax.Array) -> tuple[Trajectories, jax.Array]:
    """Roll out G trajectories a prompt and verify their answers.

    The B*G rollouts are one batch, not a vmap over G, so that one loop ends when the last of them has ended.

    Args:
        key: the step's key.
    Returns:
        `Trajectories` of B*G rows, a prompt's G in a row, and float32 rewards [B, G].
    """
    group = slpo.config.group
    prompts, index_N, references = repeat_rows((batch.prompts, batch.index, batch.references), group)
    rollout_N = jnp.tile(jnp.arange(group), batch.index.shape[0])
    keys_N = noise.row_keys(jax.random.fold_in(key, 0), index_N, rollout_N)
    rule = None
    if slpo.rollout_config.stopping == "threshold":
        rule = 0.5
    elif slpo.rollout_config.stopping == "length":
        rule = slpo.rollout_config.max_latents
    trajectories = rollout(slpo.reasoner, slpo.gate, params, prompts, keys_N, slpo.rollout_config, rule)
    rewards_N = slpo.reward(trajectories.tokens, references).astype(jnp.float32)
    return trajectories, rewards_N.reshape(-1, group)


def loss_of_trajectories(slpo: Slpo, params, batch: PromptedBatch, trajectories: Trajectories, rewards_BG, key):
    """The surrogate loss summed over prompts, and the scores it is made of (paper section 4.2).

    Args:
        trajectories, rewards_BG: from `sample`, constants.
        key: the step's key.
    """
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
    )
    if config.answer_passes == "clean":
        clean = score_clean(slpo.reasoner, params["reasoner"], batch.prompts, trajectories, rollout_config)
        answer_N = clean.answer_log_prob
    else:
        answer_N = scores.answer_log_prob.mean(axis=0)
    gate_logits_NT = slpo.gate.logits(params["gate"], trajectories.latents)
    terms = trajectory_scores(
        trajectories.latents, scores.latents, trajectories.lengths, answer_N, gate_logits_NT, slpo.objective
    )
    advantages_BG = jax.vmap(ADVANTAGES[config.advantage])(rewards_BG)
    return surrogate_loss(terms, advantages_BG, slpo.objective), terms


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

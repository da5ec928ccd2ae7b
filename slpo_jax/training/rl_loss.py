"""The losses of the stage `rl`, by whatever objective: of rollouts, or of a program that rolls out and verifies too."""

import jax
import jax.numpy as jnp

from slpo_jax.policy.policy import Policy, PromptedBatch
from slpo_jax.policy.score import used_slots
from slpo_jax.rewards.reward import RewardFn
from slpo_jax.rewards.unjudged import LOWEST, Unjudged
from slpo_jax.training.objectives import Objective
from slpo_jax.training.rollouts import RolledBatch, roll_out, rollout_sums
from slpo_jax.training.state import LossFn


def make_rollout_and_loss(
    policy: Policy,
    objective: Objective,
    reward: RewardFn,
    group: int,
    unjudged: Unjudged = LOWEST,
) -> LossFn:
    """Make the loss of a step that rolls out, verifies and improves at once.

    Metrics, each as (sum, count): `loss`, `reward`, `solved` (prompts with a rollout that earns 1 or more, which counts
    as right), `mixed` (prompts whose rewards differ), `latent_steps`, `answer_tokens`, `cut` (rollouts without an end
    within the maximum number of new tokens), the objective's own, and where `answer_log_likelihood` is one of these,
    `answer_entropy` in nats a token.
    """
    rollout_loss = make_rollout_loss(policy, objective)

    def loss_fn(params, batch: PromptedBatch, key):
        # Once for both halves: of stacked ones it changes nothing.
        params = policy.reasoner.stack(params)
        rolled = jax.lax.stop_gradient(
            roll_out(policy, params, batch, reward, group, key, unjudged)
        )
        return rollout_loss(params, (batch, *rolled), key)

    return loss_fn


def make_rollout_loss(policy: Policy, objective: Objective) -> LossFn:
    """Make the loss of (batch, trajectories, rewards [B, G]): `make_rollout_and_loss` after the rollout."""

    def loss_fn(params, rolled: RolledBatch, key):
        batch, trajectories, rewards_BG = rolled
        params = policy.reasoner.stack(params)
        loss, count, metrics = objective(
            policy, params, batch, trajectories, rewards_BG, key
        )
        sums = {
            "loss": (loss, jnp.float32(count)),
            **rollout_sums(policy, trajectories, rewards_BG),
        }
        if "answer_log_likelihood" in metrics:
            log_likelihood, _ = metrics["answer_log_likelihood"]
            _, spoken_NA = used_slots(policy, trajectories)
            tokens = spoken_NA.sum().astype(jnp.float32)
            sums["answer_entropy"] = (-log_likelihood, tokens)
        return loss, sums | metrics

    return loss_fn

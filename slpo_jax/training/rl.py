"""The step of the stage `rl`: roll out, verify, and improve by whatever objective."""

import jax
import jax.numpy as jnp

from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import PromptedBatch, RewardFn, repeat_rows
from slpo_jax.policy.rollout import Trajectories, sample
from slpo_jax.training.objectives import Objective
from slpo_jax.training.state import LossFn


def roll_out(
    policy: Policy, params, batch: PromptedBatch, reward: RewardFn, group: int, key: jax.Array
) -> tuple[Trajectories, jax.Array]:
    """Roll out G trajectories a prompt and verify their answers.

    The B*G rollouts are one batch, not a vmap over G, so that one loop ends when the last of them has ended.

    Args:
        group: G.
        key: the step's key.
    Returns:
        `Trajectories` of B*G rows, a prompt's G in a row, and float32 rewards [B, G].
    """
    index_N, references = repeat_rows((batch.index, batch.references), group)
    rollout_N = jnp.tile(jnp.arange(group), batch.index.shape[0])
    keys_N = noise.row_keys(jax.random.fold_in(key, 0), index_N, rollout_N)
    rule = {"sample": None, "threshold": 0.5, "length": policy.config.max_latents}[policy.config.stopping]
    trajectories = sample(policy, params, batch.prompts, keys_N, rule)
    rewards_N = reward(trajectories.tokens, references).astype(jnp.float32)
    return trajectories, rewards_N.reshape(-1, group)


def make_loss(policy: Policy, objective: Objective, reward: RewardFn, group: int) -> LossFn:
    """The step's loss.

    Metrics, each a mean: `loss`, `reward`, `solved` (prompts with a right rollout), `mixed` (prompts whose rewards
    differ), `latent_steps`, and the objective's own.
    """

    def loss_fn(params, batch: PromptedBatch, key):
        trajectories, rewards_BG = jax.lax.stop_gradient(roll_out(policy, params, batch, reward, group, key))
        loss, metrics = objective(policy, params, batch, trajectories, rewards_BG, key)
        prompts, rollouts = jnp.float32(rewards_BG.shape[0]), jnp.float32(rewards_BG.size)
        low_B, high_B = rewards_BG.min(axis=1), rewards_BG.max(axis=1)
        return loss, {
            "loss": (loss, prompts),
            "reward": (rewards_BG.sum(), rollouts),
            "solved": (high_B.sum(), prompts),
            "mixed": ((high_B > low_B).sum(), prompts),
            "latent_steps": (trajectories.lengths.sum(), rollouts),
        } | metrics

    return loss_fn

"""The stopping gate's cold start: the first stop is supervised by correctness (paper section 4.1)."""

import dataclasses

import jax
import jax.numpy as jnp

from slpo_jax.config.bounds import Checked, setting
from slpo_jax.models.gate import stop_set_loss
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import PromptedBatch, repeat_rows
from slpo_jax.policy.rollout import Trajectories, replay
from slpo_jax.policy.stop_answers import decode_candidates
from slpo_jax.rewards.reward import RewardFn
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.state import LossFn


@dataclasses.dataclass(frozen=True)
class ColdStartConfig(Checked):
    """The section `config.cold_start`, and the two settings from elsewhere that the loss needs.

    Attributes:
        batch_size: problems a step, over all devices.
        micro_batches: gradient accumulation.
        steps: optimizer steps, at most.
        trajectories: N, sampled full-length trajectories a problem.
        train_backbone: send the gate's gradient on, through the latents, into the reasoner.
        evaluate_every: steps between validations; the gate with the best validation accuracy is kept.
        patience: validations without a better one before it stops.
        optimizer: of what is trained.
        min_latents: T_min (`config.min_latents`); candidate lengths are T_min..T.
        gate_dropout: dropout of the gate head while it trains (`config.gate.dropout`).
    """

    batch_size: int = setting(256, least=1)
    micro_batches: int = setting(2, least=1, affects="nothing")
    steps: int = setting(20_000, least=1)
    trajectories: int = setting(4, least=1)
    train_backbone: bool = False
    evaluate_every: int = setting(500, least=1)
    patience: int = setting(20, least=1)
    optimizer: OptimizerConfig = OptimizerConfig("adafactor", 1e-4)
    min_latents: int = setting(3, least=1, in_config=False)
    gate_dropout: float = setting(0.1, least=0, below=1, in_config=False)


def make_loss(policy: Policy, reward: RewardFn, config: ColdStartConfig) -> LossFn:
    """L_stop (paper section 4.1), summed over the trajectories that have a valid length; the others are left out.

    Metrics: `loss`; `valid_share`, the trajectories with a valid length; `right_share`, the mean reward over all
    candidate lengths; `expected_length`, the mean of tau under the gate's law.
    """

    def loss_fn(params, batch: PromptedBatch, key):
        steps_T = jnp.arange(1, policy.config.max_latents + 1)
        copies, params = config.trajectories, policy.reasoner.stacked(params)
        prompts = batch.prompts
        references, keys_N = repeat_rows(batch.references, copies), noise.rollout_keys(key, batch.index, copies)
        frozen = jax.lax.stop_gradient(params)
        actions, tokens_NCA = decode_candidates(policy, frozen, prompts, keys_N, config.min_latents)
        rows, candidates, slots = tokens_NCA.shape
        right_NC = reward(tokens_NCA.reshape(-1, slots), jnp.repeat(references, candidates, axis=0))
        right_NC = right_NC.reshape(rows, candidates)
        in_set_NT = jnp.pad(right_NC, ((0, 0), (config.min_latents - 1, 0)))
        if config.train_backbone:
            lengths_N = jnp.full(rows, policy.config.max_latents)
            full = Trajectories(actions, lengths_N, tokens_NCA[:, -1], keys_N)
            actions = replay(policy, params, prompts, full).actions
        gate_noise = noise.gate_dropout(keys_N, steps_T, config.gate_dropout)
        logits_NT = policy.latent_policy.stop_logits(params, actions, gate_noise)
        loss_N = jax.vmap(stop_set_loss)(logits_NT, in_set_NT)
        valid_N = in_set_NT.any(axis=1)
        surviving_NT = jnp.cumprod(1 - jax.nn.sigmoid(logits_NT[:, :-1]), axis=1)
        count = jnp.float32(rows)
        return loss_N.sum(), {
            "loss": (loss_N.sum(), valid_N.sum().astype(jnp.float32)),
            "valid_share": (valid_N.sum(), count),
            "right_share": (right_NC.sum(), count * candidates),
            "expected_length": (1.0 * rows + surviving_NT.sum(), count),
        }

    return loss_fn

"""Rollouts that are held fixed, what a slow loop over them asks for, and an objective's loss on them."""

import functools

import jax
import numpy as np

from slow_policy import factors_of, leave_one_out, rollouts_of, stop_log_prob
from slpo_jax.training.rollouts import roll_out
from small_steps import (
    GROUP,
    PROMPTS,
    REASONER,
    ROLLOUT,
    prompted_batch,
    rigged_reward,
    small_params,
)
from tiny import EOS, PAD, compiled, policy_of

KEY = jax.random.key(7)
SIGMA = 0.3
POLICY = policy_of(ROLLOUT)
ADDITIVE = policy_of(ROLLOUT, REASONER, "additive", sigma=SIGMA).with_config(
    dropout_rate=0.0
)
# Reference answers that the model is not too unlikely to give.
ANSWERS = [[42, EOS], [EOS], [42, 42, EOS], [17, EOS]]
BATCH = prompted_batch().replace(
    answers=np.array(
        [row + [PAD] * (ROLLOUT.answer_slots - len(row)) for row in ANSWERS], np.int32
    )
)


class Frozen:
    """What a policy's rollouts are, and all that a slow loop over them asks for."""

    def __init__(self, policy):
        rolled = compiled(
            functools.partial(roll_out, policy), static=("reward", "group")
        )
        self.policy, self.params = policy, small_params()
        self.trajectories, self.rewards = rolled(
            self.params, BATCH, reward=rigged_reward, group=GROUP, key=KEY
        )
        self.rollouts = rollouts_of(BATCH.prompts, self.trajectories)
        keys = self.trajectories.keys
        self.factors = factors_of(self.rollouts, keys, keys, policy.config)
        self.advantages = leave_one_out(self.rewards)
        assert min(np.sum(self.advantages > 0), np.sum(self.advantages < 0)) >= 2
        assert len(np.unique(self.trajectories.lengths)) >= 3

    def loss_and_gradient(self, objective):
        """Of the objective, over the prompts' number."""

        def loss(params):
            total, _, metrics = objective(
                self.policy, params, BATCH, self.trajectories, self.rewards, KEY
            )
            return total / len(PROMPTS), metrics

        (value, metrics), gradient = compiled(jax.value_and_grad(loss, has_aux=True))(
            self.params
        )
        return (
            float(value),
            gradient,
            {name: float(total / count) for name, (total, count) in metrics.items()},
        )

    def weighted(self, log_probs) -> float:
        """-1/B sum_x 1/G sum_i A_i l_i."""
        return -float(self.advantages @ np.asarray(log_probs)) / len(self.advantages)

    def stops(self, params) -> list[float]:
        return [
            stop_log_prob(params["gate"], row.latents, ROLLOUT.max_latents)
            for row in self.rollouts
        ]

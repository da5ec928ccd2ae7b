"""RLOO, GRPO or PKPO on the answer's likelihood and the stop alone: SLPO without the latent term or any surrogate."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from slpo_jax.config.bounds import setting
from slpo_jax.errors import UserError
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.score import Capacity, pass_keys, score
from slpo_jax.training.objectives.objective import Objective, at_capacity, means, policy_gradient_loss


@dataclass(frozen=True)
class AnswerOnly(Objective):
    """One pass with fresh dropout, in which the thought is a constant.

    Attributes:
        answer_weight: factor of the answer's log-likelihood beside the stop term.
    """

    answer_weight: float = setting(1.0, least=0)

    def check(self, key, policy, group):
        super().check(key, policy, group)
        if self.answer_weight == 0.0 and (self.stop_weight == 0.0 or not policy.stops_itself):
            raise UserError(f"{key}.answer_weight: 0, and there is no stop term, so there is nothing to train; set it")

    def __call__(self, policy, params, batch, trajectories, rewards_BG, key):
        loss, (answer_N, stop_N) = at_capacity(self._loss, policy, params, batch, trajectories, rewards_BG, key)
        stop = {} if stop_N is None else {"stop_log_likelihood": stop_N}
        return loss, means(rewards_BG.size, answer_log_likelihood=answer_N, **stop)

    def _loss(self, policy: Policy, capacity: Capacity, params, batch, trajectories, rewards_BG, key):
        keys_1 = pass_keys(jax.random.fold_in(key, 1), batch.index, rewards_BG.shape[1], 1)
        keys = jax.tree.map(lambda x: jnp.squeeze(x, 0), keys_1)
        answer_N = score(policy, params, batch.prompts, trajectories, keys, capacity).answer_log_prob
        stop = self.stop_term(policy, params, trajectories)
        loss = policy_gradient_loss(((self.answer_weight, answer_N), stop), self.advantages(rewards_BG))
        return loss, (answer_N, stop and stop[1])

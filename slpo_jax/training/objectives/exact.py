"""REINFORCE with a baseline (Williams, 1992) where the law of a step of thought has a density or a probability."""

from dataclasses import dataclass

import jax.numpy as jnp

from slpo_jax.config.bounds import setting
from slpo_jax.errors import UserError
from slpo_jax.policy.latent_policies import with_likelihood
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.score import Capacity, score
from slpo_jax.training.objectives.objective import Objective, at_capacity, means, policy_gradient_loss


@dataclass(frozen=True)
class Exact(Objective):
    """-A_i log pi(xi_i | x), all of it exact: the thought's, the answer's and the stop's log-likelihood.

    Attributes:
        latent_weight, answer_weight: factors of the two terms beside the stop term; 0 leaves one out.
    """

    of_written_thoughts = True

    latent_weight: float = setting(1.0, least=0)
    answer_weight: float = setting(1.0, least=0)

    def check(self, key, policy, group):
        super().check(key, policy, group)
        if policy.latent_policy.log_prob is None:
            raise UserError(
                f"{key}: needs a thought with a likelihood, and that of config.latent_policy.name is intractable; use "
                f"one of {with_likelihood()}, or another objective (slpo, pathwise)"
            )
        if policy.config.dropout_rate:
            raise UserError(
                f"config.dropout.rate: {policy.config.dropout_rate} makes the likelihood of a thought intractable, "
                f"which {key} needs; set it to 0"
            )
        stop = self.stop_weight if policy.stops_itself else 0.0
        if self.latent_weight == self.answer_weight == stop == 0.0:
            raise UserError(f"{key}: all weights of its terms are 0, so there is nothing to train; set one")

    def __call__(self, policy, params, batch, trajectories, rewards_BG, key):
        loss, terms = at_capacity(self._loss, policy, params, batch, trajectories, rewards_BG)
        names = ("latent_log_likelihood", "answer_log_likelihood", "stop_log_likelihood")
        logged = {name: term for name, term in zip(names, terms, strict=True) if term is not None}
        return loss, means(rewards_BG.size, **logged)

    def _loss(self, policy: Policy, capacity: Capacity, params, batch, trajectories, rewards_BG):
        scores = score(policy, params, batch.prompts, trajectories, None, capacity)
        latent_N = latent = None
        if scores.action_log_probs is not None:
            fed_NT = jnp.arange(1, policy.config.max_latents + 1)[None] <= trajectories.lengths[:, None]
            latent_N = jnp.sum(scores.action_log_probs, axis=1, where=fed_NT)
            if scores.halting_log_prob is not None:
                latent_N += jnp.where(trajectories.lengths < policy.config.max_latents, scores.halting_log_prob, 0.0)
            latent = (self.latent_weight, latent_N)
        stop = self.stop_term(policy, params, trajectories)
        terms = (latent, (self.answer_weight, scores.answer_log_prob), stop)
        loss = policy_gradient_loss(terms, self.advantages(rewards_BG))
        return loss, (latent_N, scores.answer_log_prob, stop and stop[1])

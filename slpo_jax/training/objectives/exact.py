"""REINFORCE with a baseline (Williams, 1992) where the law of a step of thought has a density or a probability."""

from dataclasses import dataclass

import jax.numpy as jnp

from slpo_jax.errors import UserError
from slpo_jax.policy.latent_policies import with_likelihood
from slpo_jax.policy.score import score, used_slots
from slpo_jax.training.objectives.objective import WeightedTerms


@dataclass(frozen=True)
class Exact(WeightedTerms):
    """-A_i log pi(xi_i | x), all of it exact: the thought's, the answer's and the stop's log-likelihood."""

    of_written_thoughts, of_one_policy = True, True

    def check(self, key, policy, group):
        if policy.latent_policy.log_prob is None:
            raise UserError(
                f"{key}: needs a thought with a likelihood, and that of config.latent_policy.name is intractable; use "
                f"one of {with_likelihood()}, or another objective (slpo, pathwise)"
            )
        super().check(key, policy, group)

    def terms(self, policy, capacity, params, batch, trajectories, key):
        scores = score(policy, params, batch.prompts, trajectories, None, capacity)
        found = {"answer_log_likelihood": scores.answer_log_prob}
        if scores.action_log_probs is not None:
            fed_NT, _ = used_slots(policy, trajectories)
            latent_N = jnp.sum(scores.action_log_probs, axis=1, where=fed_NT)
            if scores.halting_log_prob is not None:
                latent_N += jnp.where(trajectories.lengths < policy.config.max_latents, scores.halting_log_prob, 0.0)
            found["latent_log_likelihood"] = latent_N
        return found

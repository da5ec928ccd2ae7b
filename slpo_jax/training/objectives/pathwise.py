"""The gradient of the answer through the thought itself: rollouts replayed, differentiably, with their own noise.

A rollout's thought is a deterministic function h(theta, x, eps_i) of the parameters and its keys. With the keys, the
length and the stop decisions fixed, s_i(a) = log pi(a | x, h(theta, x, eps_i)) has a gradient through h, and no density
of the thought is needed.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from slpo_jax.errors import UserError
from slpo_jax.policy.latent_policies import with_likelihood
from slpo_jax.policy.policy import repeat_rows
from slpo_jax.policy.rollout import replay
from slpo_jax.policy.score import answer_after_replay
from slpo_jax.settings import setting
from slpo_jax.training.objectives.objective import (
    Objective,
    means,
    policy_gradient_loss,
)


def pass_at_k_log_prob(scores_G: jax.Array) -> jax.Array:
    """Return the log-probability that one or more of G rollouts are right: log(1 - prod_i (1 - p_i)), p_i = exp s_i.

    Args:
        scores_G: float32 [G], log-probabilities s_i of the reference.
    Returns:
        float32 scalar, finite with a finite gradient for every s_i <= 0, which is not 0 where all are far below.
    """
    # Where all p_i are below 1e-7, their sum is that probability to float32's rounding.
    rare = jnp.max(scores_G) < -16.0

    # Elsewhere log(1 - e^n), n the log-probability that none is right; its gradient stays finite where it isn't used.
    usual_G = jnp.minimum(jnp.where(rare, -1.0, scores_G), -1e-4)
    none_right = jnp.sum(jnp.log1p(-jnp.exp(usual_G)))
    log_sum = jax.nn.logsumexp(scores_G)
    some_right = jnp.log(-jnp.expm1(none_right))
    return jnp.where(rare, log_sum, some_right)


@dataclass(frozen=True)
class Pathwise(Objective):
    """Three estimators on replayed thoughts; the stop term is A_i log P(tau_i) in all.

    Attributes:
        estimator: "pass_at_k" maximises `pass_at_k_log_prob` of the reference answer, whose tokens have to be known;
            "reward" is -A_i s_i(a_i) of the rollouts' own answers, sampled at temperature 1 (greedy ones bias it);
            "mixture" is `mixture_weight` of the first and the rest the mean of s_i(reference).
        mixture_weight: share of "pass_at_k" in "mixture".
    """

    metrics: ClassVar = {
        "pass_at_k": "The probability that pathwise maximises.",
        "reference_log_likelihood": "Of the reference answer.",
    }

    estimator: Literal["pass_at_k", "reward", "mixture"] = "pass_at_k"
    mixture_weight: float = setting(0.5, least=0, most=1)

    @property
    def needs_answers(self) -> bool:
        return self.estimator != "reward"

    def check(self, key, policy, group):
        super().check(key, policy, group)
        config = policy.config
        sampled = (config.temperature, config.top_k, config.top_p)
        if self.estimator == "reward" and sampled != (1.0, 0, 1.0):
            raise UserError(
                f"{key}.estimator: reward is biased by answers that are not sampled from the policy; set its "
                f"temperature to 1.0, config.rl.top_k to 0 and top_p to 1.0, not {sampled}"
            )

        # Pass@k of thoughts that are all the same is that of one.
        asks_for_pass_k = self.estimator == "pass_at_k" or (
            self.estimator == "mixture" and self.mixture_weight > 0.0
        )
        has_likelihood = policy.latent_policy.log_prob is not None
        is_drawn = config.max_latents > 0 and has_likelihood
        is_random = is_drawn or config.dropout_rate or config.stopping == "sample"
        if asks_for_pass_k and not is_random:
            raise UserError(
                f"{key}.estimator: {self.estimator} is of {group} thoughts, which without noise are all one; raise "
                "config.dropout.rate, use a config.latent_policy.name with noise of its own "
                f"({with_likelihood(in_vectors=True)}), or estimator=reward"
            )

    def __call__(self, policy, params, batch, trajectories, rewards_BG, key):
        prompts, group = rewards_BG.shape

        # s_i: the answer's likelihood after each replayed thought.
        replayed = replay(policy, params, batch.prompts, trajectories)
        tokens_NA = trajectories.tokens
        if self.needs_answers:
            tokens_NA = repeat_rows(batch.answers, group)
        scores_N = answer_after_replay(
            policy, params, replayed, trajectories, tokens_NA
        )
        logged: dict[str, jax.Array] = {}
        stop_terms: list[tuple[float, jax.Array]] = []
        stop = self.stop_term(policy, params, trajectories)
        if stop is not None:
            stop_terms.append(stop)
            _, logged["stop_log_likelihood"] = stop

        # "reward": -A_i s_i(a_i), of the rollouts' own answers.
        if self.estimator == "reward":
            terms = [(1.0, scores_N), *stop_terms]
            loss = policy_gradient_loss(terms, self.advantages(rewards_BG))
            logged["answer_log_likelihood"] = scores_N
            return loss, prompts, means(rewards_BG.size, **logged)

        # "pass_at_k" and "mixture": of the reference answer.
        scores_BG = scores_N.reshape(rewards_BG.shape)
        solved_B = jax.vmap(pass_at_k_log_prob)(scores_BG)
        weight = self.mixture_weight if self.estimator == "mixture" else 1.0
        mixture_B = weight * solved_B + (1.0 - weight) * scores_BG.mean(axis=1)
        loss = -jnp.sum(mixture_B)
        if stop_terms:
            loss = loss + policy_gradient_loss(stop_terms, self.advantages(rewards_BG))

        logged["reference_log_likelihood"] = scores_N
        metrics = means(rewards_BG.size, **logged)
        metrics["pass_at_k"] = (jnp.exp(solved_B).sum(), jnp.float32(prompts))
        return loss, prompts, metrics

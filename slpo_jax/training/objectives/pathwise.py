"""The gradient of the answer through the thought itself: rollouts replayed, differentiably, with their own noise.

A rollout's thought is a deterministic function h(theta, x, eps_i) of the parameters and its keys. With the keys, the
length and the stop decisions fixed, s_i(a) = log pi(a | x, h(theta, x, eps_i)) has a gradient through h, and no density
of the thought is needed.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from slpo_jax.config.bounds import setting
from slpo_jax.errors import UserError
from slpo_jax.policy.answer_score import answer_after_replay
from slpo_jax.policy.latent_policies import with_likelihood
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import repeat_rows
from slpo_jax.policy.rollout import replay
from slpo_jax.training.objectives.objective import Objective, means, policy_gradient_loss


def pass_at_k_log_prob(scores_G: jax.Array, k: int | None = None) -> jax.Array:
    """The log-probability that one at least of k rollouts says the reference, mean over the subsets of k among G.

    Of all G that is log(1 - prod_i (1 - p_i)), p_i = exp s_i; of one log(mean_i p_i).

    Args:
        scores_G: float32 [G], log-probabilities s_i of the reference.
        k: from 1 to G; None is G.
    Returns:
        float32 scalar, finite with a finite gradient for every s_i <= 0, which is not 0 where all are far below.
    """
    if k is not None and k < scores_G.size:
        return _one_of_k_log_prob(scores_G, k)
    # Where all p_i are below 1e-7, their sum is that probability to float32's rounding.
    rare = jnp.max(scores_G) < -16.0
    usual_G = jnp.minimum(jnp.where(rare, -1.0, scores_G), -1e-4)
    none_right = jnp.sum(jnp.log1p(-jnp.exp(usual_G)))
    return jnp.where(rare, jax.nn.logsumexp(scores_G), jnp.log(-jnp.expm1(none_right)))


def _one_of_k_log_prob(scores_G: jax.Array, k: int) -> jax.Array:
    """The same of k < G, over the subsets one rollout after the other.

    With u_j the sum of 1 - prod (1 - p_i) over the subsets of j rollouts among the first n - 1, the subsets of the
    first n that hold the n-th add C(n - 1, j - 1) p_n + (1 - p_n) u_(j-1). All summands are positive, so nothing
    cancels; they are in units of the largest p_i, so nothing underflows.
    """
    largest = jax.lax.stop_gradient(scores_G.max())
    shares_G, wrong_G = jnp.exp(scores_G - largest), -jnp.expm1(scores_G)
    u = jnp.zeros(k)  # of j = 1..k; of none there is no chance
    for n in range(scores_G.size):
        subsets = jnp.array([math.comb(n, j) for j in range(k)], jnp.float32)
        u = u + subsets * shares_G[n] + wrong_G[n] * jnp.concatenate([jnp.zeros(1), u[:-1]])
    return jnp.log(u[-1]) + largest - math.log(math.comb(scores_G.size, k))


@dataclass(frozen=True)
class Pathwise(Objective):
    """Three estimators on replayed thoughts; the stop term is A_i log P(tau_i) in all.

    Attributes:
        estimator: "pass_at_k" maximises `pass_at_k_log_prob` of the reference answer, whose tokens have to be known;
            "reward" is -A_i s_i(a_i) of the rollouts' own answers, sampled at temperature 1 (greedy ones bias it);
            "mixture" is `mixture_weight` of the first and the rest the mean of s_i(reference).
        mixture_weight: of "mixture".
        k: of "pass_at_k" and "mixture", how many of the G rollouts may try; None is all, 1 is Pass@1.
        log: of these two, whether the logarithm of that probability is maximised, or itself.
    """

    metrics: ClassVar = {
        "pass_at_k": "The probability that pathwise maximises.",
        "reference_log_likelihood": "Of the reference answer.",
    }

    estimator: Literal["pass_at_k", "reward", "mixture"] = "pass_at_k"
    mixture_weight: float = setting(0.5, least=0, most=1)
    k: int | None = setting(None, least=1)
    log: bool = True

    @property
    def needs_answers(self) -> bool:
        return self.estimator != "reward"

    def check(self, key, policy, group):
        super().check(key, policy, group)
        if self.estimator == "reward" and policy.config.temperature != 1.0:
            raise UserError(
                f"{key}.temperature: answers at {policy.config.temperature} are not sampled from the policy, which "
                "biases the estimator reward; set it to 1.0"
            )
        if self.estimator == "reward" and (policy.config.top_k or policy.config.top_p < 1.0):
            name = "top_k" if policy.config.top_k else "top_p"
            raise UserError(
                f"config.rl.{name}: {getattr(policy.config, name)} leaves tokens out, and answers that are not sampled "
                f"from the policy bias {key}'s estimator reward; keep all"
            )
        if self.k is not None and self.k > group:
            raise UserError(
                f"{key}.k: {self.k} is more than the rollouts of a prompt ({group}); lower it or raise config.rl.group"
            )
        weight = {"reward": 0.0, "mixture": self.mixture_weight}.get(self.estimator, 1.0)
        if weight and self.k != 1 and not _thoughts_differ(policy):
            raise UserError(
                f"{key}.estimator: {self.estimator} is of {group} thoughts, which without noise are all one; raise "
                "config.dropout.rate, use a config.latent_policy.name with noise of its own "
                f"({with_likelihood(in_vectors=True)}), or estimator=reward"
            )

    def __call__(self, policy, params, batch, trajectories, rewards_BG, key):
        group = rewards_BG.shape[1]
        replayed = replay(policy, params, batch.prompts, trajectories)
        spoken_NA = repeat_rows(batch.answers, group) if self.needs_answers else trajectories.tokens
        scores_N = answer_after_replay(policy, params, replayed, trajectories, spoken_NA)
        stop = self.stop_term(policy, params, trajectories)
        metrics = means(rewards_BG.size, **({} if stop is None else {"stop_log_likelihood": stop[1]}))
        if self.estimator == "reward":
            loss = policy_gradient_loss(((1.0, scores_N), stop), self.advantages(rewards_BG))
            return loss, metrics | means(rewards_BG.size, answer_log_likelihood=scores_N)
        scores_BG = scores_N.reshape(rewards_BG.shape)
        solved_B = jax.vmap(lambda scores_G: pass_at_k_log_prob(scores_G, self.k))(scores_BG)
        weight = self.mixture_weight if self.estimator == "mixture" else 1.0
        aim_B = solved_B if self.log else jnp.exp(solved_B)
        loss = -jnp.sum(weight * aim_B + (1.0 - weight) * scores_BG.mean(axis=1))
        if stop is not None:
            loss = loss + policy_gradient_loss((stop,), self.advantages(rewards_BG))
        metrics |= means(rewards_BG.size, reference_log_likelihood=scores_N)
        return loss, metrics | {"pass_at_k": (jnp.exp(solved_B).sum(), jnp.float32(solved_B.size))}


def _thoughts_differ(policy: Policy) -> bool:
    """Whether anything in the rollouts of one prompt is drawn before the answer."""
    drawn = policy.config.max_latents > 0 and policy.latent_policy.log_prob is not None
    return drawn or policy.config.dropout_rate > 0.0 or policy.config.stopping == "sample"

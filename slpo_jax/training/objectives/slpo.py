"""Surrogate latent policy optimization (paper section 4.2): K passes, a Gaussian, and a REINFORCE loss under it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import chex
import jax
import jax.numpy as jnp

from slpo_jax.errors import UserError
from slpo_jax.policy import noise
from slpo_jax.policy.latent_policies import with_likelihood
from slpo_jax.policy.latent_policies.latent_policy import gaussian_log_prob
from slpo_jax.policy.noise import pass_keys
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.score import score, used_slots
from slpo_jax.settings import setting
from slpo_jax.training.objectives.objective import WeightedTerms

EPSILON = 1e-6


def moments(z_KD: jax.Array, epsilon: float = EPSILON) -> tuple[jax.Array, jax.Array]:
    """Compute mean and floored isotropic variance of K samples of one transition (paper section 4.2).

    mu = 1/K sum_k z^(k);  sigma^2 = 1/(K D) sum_k ||z^(k) - mu||^2 + epsilon.

    Args:
        z_KD: [K, D].
    Returns:
        mu float32 [D], sigma^2 float32 scalar.
    """
    chex.assert_rank(z_KD, 2)
    z_KD = z_KD.astype(jnp.float32)
    # Around the first sample: equal samples then have no variance at all, whatever their size and number.
    offsets_KD = z_KD - z_KD[:1]
    offset_D = offsets_KD.mean(axis=0)
    mu_D = z_KD[0] + offset_D
    variance = jnp.mean(jnp.square(offsets_KD - offset_D[None])) + epsilon
    return mu_D, variance


def latent_log_likelihood(
    h_TD,
    z_KTD,
    length,
    epsilon: float = EPSILON,
    reduction: Literal["sum", "mean"] = "sum",
    detach_variance: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Sum over t <= tau of log pi~(h_t | x, h_<t) for one trajectory (paper section 4.2).

    Args:
        h_TD: realised latents, taken as constants.
        z_KTD: the K passes' latents.
        length: tau.
        epsilon: floor of the variance.
        reduction: over D, "sum" as printed in the paper or "mean".
        detach_variance: stop the gradient through the variance (Prop. 1's setting).
    Returns:
        the log-likelihood, and the mean of sigma^2 over t <= tau; 0 and 0 of no step.
    """
    # Fit a Gaussian to the passes' latents of each step, and score the realised latent under it.
    h_TD = jax.lax.stop_gradient(h_TD)
    mu_TD, variance_T = jax.vmap(moments, in_axes=(1, None))(z_KTD, epsilon)
    density_variance_T = variance_T
    if detach_variance:
        density_variance_T = jax.lax.stop_gradient(variance_T)
    log_probs_T = jax.vmap(gaussian_log_prob)(h_TD, mu_TD, density_variance_T)
    if reduction == "mean":
        log_probs_T = log_probs_T / h_TD.shape[-1]

    # Sum, and average, over the steps that the thought has.
    is_step_T = jnp.arange(1, h_TD.shape[0] + 1) <= length
    log_likelihood = jnp.sum(log_probs_T, where=is_step_T)
    variances = jnp.sum(variance_T, where=is_step_T)
    return log_likelihood, variances / jnp.maximum(is_step_T.sum(), 1)


@dataclass(frozen=True)
class AnswerOnly(WeightedTerms):
    """SLPO without the latent term or any surrogate: one pass with fresh dropout, the thought being a constant."""

    def terms(self, policy, capacity, params, batch, trajectories, key):
        # The keys of one pass, which has no axis of passes.
        group = trajectories.lengths.shape[0] // batch.draw_ids.shape[0]
        keys_1 = pass_keys(
            jax.random.fold_in(key, noise.SCORING),
            batch.draw_ids,
            group,
            1,
        )
        keys = jax.tree.map(lambda x: jnp.squeeze(x, 0), keys_1)
        scores = score(policy, params, batch.prompts, trajectories, keys, capacity)
        return {"answer_log_likelihood": scores.answer_log_prob}


@dataclass(frozen=True)
class Slpo(AnswerOnly):
    """The paper's objective.

    Attributes:
        passes: K, the noisy passes over a thought; with 1 there is no latent term.
        latent_reduction: how the latent term is reduced over D: "sum" as printed in the paper, or "mean".
        scored_latents: number of first latents in the latent term (8 or 16 of 32 soft tokens in the paper); 0 is all.
        detach_variance: stop the gradient through the variance (Prop. 1's setting).
        epsilon: floor of the variance.
    """

    label = "SLPO"
    metrics: ClassVar = {
        "surrogate_variance": "Mean of the variance that SLPO's surrogate is fitted with."
    }

    latent_weight: float = setting(1.0, least=0)  # type: ignore[misc]
    passes: int = setting(4, least=1)
    latent_reduction: Literal["sum", "mean"] = "sum"
    scored_latents: int = setting(0, least=0, note="0 is all")
    detach_variance: bool = False
    epsilon: float = setting(EPSILON, above=0)

    def check(self, key, policy, group):
        super().check(key, policy, group)
        latent = self.latent_weight if policy.config.max_latents else 0.0
        # A latent policy has noise of its own just where it has a likelihood.
        has_noise = policy.latent_policy.log_prob is not None
        if latent and not policy.config.dropout_rate and not has_noise:
            raise UserError(
                f"{key}.latent_weight: {latent:g} scores thoughts under K passes that config.dropout.rate=0 makes all "
                "the same; raise the rate, or set the weight to 0"
            )
        if latent and self.passes < 2:
            raise UserError(
                f"{key}.passes: one pass has no variance, which the latent term divides by; give at least 2, or "
                f"{key}.latent_weight=0"
            )

    def terms(self, policy, capacity, params, batch, trajectories, key):
        if self.passes == 1:
            return super().terms(policy, capacity, params, batch, trajectories, key)
        # Score the rollouts in K passes, each fed the realised latents under dropout of its own. The answer's term is
        # the mean over them. `WeightedTerms` adds the stop's term, the weights and the advantages.
        group = trajectories.lengths.shape[0] // batch.draw_ids.shape[0]
        keys_K = pass_keys(
            jax.random.fold_in(key, noise.SCORING),
            batch.draw_ids,
            group,
            self.passes,
        )
        scores_K = score(policy, params, batch.prompts, trajectories, keys_K, capacity)
        terms = {"answer_log_likelihood": scores_K.answer_log_prob.mean(axis=0)}

        # Fit the surrogate to the passes' latents, and score the rollout's own under it.
        if policy.config.max_latents:
            latent_N, variance_N = self._latent_terms(
                policy, params, trajectories, scores_K.actions
            )
            terms["latent_log_likelihood"] = latent_N
            terms["surrogate_variance"] = variance_N
        return terms

    def _latent_terms(self, policy: Policy, params, trajectories, actions_K):
        """Return log pi~ of the vectors that were fed, under the K passes' own ones, and sigma^2: [N] each."""
        feed = policy.latent_policy.feed
        h_NTD = feed(params, trajectories.actions)
        z_KNTD = jax.vmap(feed, in_axes=(None, 0))(params, actions_K)

        def score_thought(h_TD, z_KTD, length):
            return latent_log_likelihood(
                h_TD,
                z_KTD,
                length,
                self.epsilon,
                self.latent_reduction,
                self.detach_variance,
            )

        most = self.scored_latents or policy.config.max_latents
        scored_N = jnp.minimum(trajectories.lengths, most)
        score_thoughts = jax.vmap(score_thought, in_axes=(0, 1, 0))
        return score_thoughts(h_NTD, z_KNTD, scored_N)


@dataclass(frozen=True)
class Exact(WeightedTerms):
    """-A_i log pi(xi_i | x), all of it exact: of rollout i's thought, its answer and its stop."""

    of_written_thoughts = True
    of_one_policy = True

    latent_weight: float = setting(1.0, least=0)  # type: ignore[misc]

    def check(self, key, policy, group):
        if policy.latent_policy.log_prob is None:
            raise UserError(
                f"{key}: needs a thought with a likelihood, and that of config.latent_policy.name is intractable; use "
                f"one of {with_likelihood()}, or another objective (slpo, pathwise)"
            )
        super().check(key, policy, group)

    def terms(self, policy, capacity, params, batch, trajectories, key):
        scores = score(policy, params, batch.prompts, trajectories, None, capacity)
        terms = {"answer_log_likelihood": scores.answer_log_prob}
        if scores.action_log_probs is not None:
            fed_NT, _ = used_slots(policy, trajectories)
            latent_N = jnp.sum(scores.action_log_probs, axis=1, where=fed_NT)
            # A thought that ends before step T has chosen to.
            if scores.halting_log_prob is not None:
                halted_N = trajectories.lengths < policy.config.max_latents
                latent_N += jnp.where(halted_N, scores.halting_log_prob, 0.0)
            terms["latent_log_likelihood"] = latent_N
        return terms

"""Token-level GRPO (Shao et al., 2024): a clipped ratio for every choice of a rollout, averaged over choices."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from slpo_jax.errors import UserError
from slpo_jax.models.parts import REASONER, Params, detach
from slpo_jax.policy.advantage import AdvantageName, best_positive
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.score import Capacity, are_truncated, can_halt, score, used_slots
from slpo_jax.settings import setting
from slpo_jax.training.objectives.objective import Objective, at_capacity
from slpo_jax.training.state import Sums


class Choices(NamedTuple):
    """The choices in N rollouts, C at most in each: latents with a likelihood, answer tokens, the stop.

    Attributes:
        log_probs: float32 [N, C].
        weights: float32 [N, C], of the choices' losses; 0 where there was no choice.
        made: bool [N, C].
        answer: float32 [N], sums of the answers' log_probs.
    """

    log_probs: jax.Array
    weights: jax.Array
    made: jax.Array
    answer: jax.Array


class Kind(NamedTuple):
    """A kind of choice in N rollouts: the latents, the token that halts, the answer's tokens, or the gate's stop.

    Attributes:
        log_probs: (params, `Scores`) -> float32 [N, C].
        made: bool [N, C], the choices that were made.
        weight: of each one's loss.
    """

    log_probs: Callable[[Params, Any], jax.Array]
    made: jax.Array
    weight: float


def k3(log_ratio: jax.Array) -> jax.Array:
    """Return r - log r - 1, log r = log(pi_0 / pi); its mean over samples of pi is KL(pi || pi_0) (Schulman, 2020)."""
    return jnp.expm1(log_ratio) - log_ratio


def clipped_gains(
    ratio: jax.Array, advantages: jax.Array, clip: float | None, dual_clip: float | None
) -> jax.Array:
    """Return min(rho A, clip(rho, 1 - clip, 1 + clip) A), where A < 0 at least dual_clip A (Ye et al., 2020).

    Args:
        ratio, advantages: float32, of one shape or broadcast.
        clip, dual_clip: None does not clip.
    """
    gains = ratio * advantages
    if clip is not None:
        clipped_ratio = jnp.clip(ratio, 1.0 - clip, 1.0 + clip)
        gains = jnp.minimum(gains, clipped_ratio * advantages)
    if dual_clip is not None:
        bounded = jnp.maximum(gains, dual_clip * advantages)
        gains = jnp.where(advantages < 0, bounded, gains)
    return gains


def with_detached_inputs(policy: Policy) -> Policy:
    """Return the policy that feeds embeddings as constants; a latent policy's own parameters keep their gradient."""
    reasoner = policy.reasoner
    latent_policy = policy.latent_policy

    def embed(params, tokens_BL):
        return jax.lax.stop_gradient(reasoner.embed(params, tokens_BL))

    def feed(params, action):
        return latent_policy.feed(detach(params, REASONER), action)

    return dataclasses.replace(
        policy,
        reasoner=dataclasses.replace(reasoner, embed=embed),
        latent_policy=dataclasses.replace(latent_policy, feed=feed),
    )


@dataclass(frozen=True)
class Grpo(Objective):
    """-min(rho A_i, clip(rho, 1 - clip, 1 + clip) A_i) + beta k3 for every choice, rho = pi / pi of the rollout.

    With one update a step rho is 1, its gradient that of the log-likelihood, and nothing is clipped.

    k3 = pi_0 / pi - log(pi_0 / pi) - 1 estimates the divergence from the policy that the stage started from (Schulman,
    2020). That is the model with plain tokens: where a thought is written down, it is fed the tokens themselves (HRPO).

    Attributes:
        updates: optimizer updates on the same rollouts, of each minibatch (TRL's num_iterations).
        minibatches: equal parts of the prompts, each update being of the rollouts of one, in turn.
        clip: how far rho may go from 1 (TRL's epsilon); None does not clip.
        dual_clip: where A is negative rho counts as this at most (Ye et al., 2020); None does not clip.
        first_choice: "best": of the first choices only that of the rollout with positive A and the best mean
            log-probability keeps its A, and the group's others have 0; without a positive A, all keep it; then all
            choices of a truncated rollout have 0, which still counts in the group's mean (Latent-GRPO).
        tempered: the tokens' likelihood is at the temperature that they are sampled at, as always in TRL; else it is at
            1, whatever they are sampled at.
        reduction: mean or sum over choices: "token_mean" of the whole batch, "sequence_mean" of each rollout's own
            means, or "sum" over a rollout's, as the other objectives.
        latent_weight: factor of the thought's choices, where it has a likelihood; 0 leaves them out.
        kl_weight: beta, the factor of k3, the estimate of the KL divergence from the start; 0 leaves it out, and needs
            neither its pass nor the parameters of the start.
        detach_inputs: no gradient goes through the embeddings that are fed, as in trainers that store a rollout's
            inputs (LEPO).
    """

    label = "GRPO"
    metrics: ClassVar = {
        "log_likelihood": "GRPO's: of all choices of a rollout.",
        "clipped": "GRPO's share of clipped choices.",
        "ratio": "GRPO's mean ratio of a choice's probability to the rollout's.",
        "kl": "GRPO's divergence from the start.",
    }
    of_written_thoughts = True
    of_one_policy = True

    advantage: AdvantageName = "grpo"
    updates: int = setting(1, least=1)
    minibatches: int = setting(1, least=1)
    clip: float | None = setting(
        0.2,
        above=0,
        below=1,
        note="None does not clip",
    )
    dual_clip: float | None = setting(None, above=1, note="None does not clip")
    first_choice: Literal["all", "best"] = "all"
    tempered: bool = False
    reduction: Literal["token_mean", "sequence_mean", "sum"] = "token_mean"
    latent_weight: float = setting(1.0, least=0)
    kl_weight: float = setting(0.0, least=0)
    detach_inputs: bool = False

    @property
    def needs_ref_log_probs(self) -> bool:
        return self.kl_weight > 0.0

    @property
    def updates_per_step(self) -> int:
        return self.updates * self.minibatches

    @property
    def needs_old_log_probs(self) -> bool:
        return super().needs_old_log_probs or self.first_choice == "best"

    def check(self, key, policy, group):
        super().check(key, policy, group)
        if self.tempered and policy.config.temperature == 0.0:
            raise UserError(
                f"{key}.tempered: True, but greedy tokens have no likelihood; give a temperature above 0"
            )
        config = policy.config
        draws_thoughts = (
            config.max_latents and policy.latent_policy.log_prob is not None
        )
        draws = draws_thoughts or policy.stops_itself or config.temperature > 0.0
        if not draws:
            raise UserError(
                f"{key}.temperature: 0 makes all rollouts of a prompt the same, as nothing else is drawn; give e.g. 1.0"
            )

    def compute_old_log_probs(self, policy, params, batch, trajectories):
        """Return the log-probabilities of the choices, [N, C]."""

        def log_probs(*args):
            no_loss = jnp.float32(0)
            return no_loss, self._choices(*args).log_probs

        _, log_probs_NC = at_capacity(log_probs, policy, params, batch, trajectories)
        return log_probs_NC

    def compute_ref_log_probs(self, policy, params, batch, trajectories):
        """Score the choices as `compute_old_log_probs` does; a thought that is written down is fed as its tokens."""
        latent_policy = policy.latent_policy
        reasoner = policy.reasoner
        if latent_policy.says is not None:

            def feed(params, action):
                return reasoner.embed(params, latent_policy.says(params, action))

            plain = dataclasses.replace(latent_policy, feed=feed)
            policy = dataclasses.replace(policy, latent_policy=plain)
        return self.compute_old_log_probs(policy, params, batch, trajectories)

    def __call__(self, policy, params, batch, trajectories, rewards_BG, key):
        loss, (count, metrics) = at_capacity(
            self._loss, policy, params, batch, trajectories, rewards_BG
        )
        return loss, count, metrics

    def _loss(
        self,
        policy: Policy,
        capacity: Capacity,
        params,
        batch,
        trajectories,
        rewards_BG,
    ):
        # Score the choices of all rollouts, each with its rollout's advantage, which is one for all of them ([N, 1]).
        advantages_BG = self.advantages(rewards_BG)
        advantages_NC = advantages_BG.reshape(-1, 1)
        if self.first_choice == "best":
            advantages_NC = self.keep_best_first(policy, trajectories, advantages_BG)
        choices = self._choices(
            policy, capacity, params, batch, trajectories, advantages_NC
        )

        # Masked rollouts have no choices.
        kept_N1 = ~jnp.isnan(rewards_BG).reshape(-1, 1)
        made_NC = choices.made & kept_N1
        weights_NC = jnp.where(kept_N1, choices.weights, 0.0)

        # rho, which is 1 where nothing was chosen or no update came before, and the clipped objective.
        old_NC = trajectories.old_log_probs
        if old_NC is None:
            old_NC = jax.lax.stop_gradient(choices.log_probs)
        log_ratio_NC = jnp.where(made_NC, choices.log_probs - old_NC, 0.0)
        ratio_NC = jnp.exp(log_ratio_NC)
        gains_NC = clipped_gains(ratio_NC, advantages_NC, self.clip, self.dual_clip)
        is_clipped_NC = gains_NC != ratio_NC * advantages_NC
        clipped = jnp.sum(made_NC & is_clipped_NC)
        metrics: Sums = {}
        if trajectories.old_log_probs is not None:
            metrics["ratio"] = (jnp.sum(ratio_NC, where=made_NC), made_NC.sum())

        # The penalty for the distance from the start.
        if self.kl_weight:
            away_NC = trajectories.ref_log_probs - choices.log_probs
            kl_NC = k3(jnp.where(made_NC, away_NC, 0.0))
            gains_NC = gains_NC - self.kl_weight * kl_NC
            metrics["kl"] = (kl_NC.sum(), made_NC.sum())

        # Reduce over the choices of a rollout, and over rollouts.
        made_N = made_NC.sum(axis=1)
        made = made_N.sum()
        num_rollouts = kept_N1.sum().astype(jnp.float32)
        num_prompts = jnp.float32(rewards_BG.shape[0])
        losses_N = -jnp.sum(weights_NC * gains_NC, axis=1)
        if self.reduction == "token_mean":
            loss = losses_N.sum()
            count = made.astype(jnp.float32)
        elif self.reduction == "sequence_mean":
            loss = jnp.sum(losses_N / jnp.maximum(made_N, 1))
            count = num_rollouts
        else:
            loss = losses_N.sum() / rewards_BG.shape[1]
            count = num_prompts

        log_likelihood = jnp.sum(choices.log_probs, where=made_NC)
        metrics["log_likelihood"] = (log_likelihood, num_rollouts)
        metrics["answer_log_likelihood"] = (choices.answer.sum(), num_rollouts)
        metrics["clipped"] = (clipped, made)
        return loss, (count, metrics)

    def _kinds(self, policy: Policy, trajectories) -> list[Kind]:
        """Return the kinds of choices that have a weight here, in the order of `Choices`: latents come first."""
        fed_NT, spoken_NA = used_slots(policy, trajectories)

        def latent_log_probs(params, scores):
            return scores.action_log_probs

        def halting_log_probs(params, scores):
            return scores.halting_log_prob[:, None]

        def answer_log_probs(params, scores):
            return scores.token_log_probs

        def stop_log_probs(params, scores):
            _, log_prob_N = self.stop_term(policy, params, trajectories)  # type: ignore[misc]
            return log_prob_N[:, None]

        # Keep the kinds that this policy has and that have a weight.
        kinds = []
        has_likelihood = policy.latent_policy.log_prob is not None
        if has_likelihood and policy.config.max_latents and self.latent_weight:
            kinds.append(Kind(latent_log_probs, fed_NT, self.latent_weight))
        if can_halt(policy):
            halted_N = trajectories.lengths < policy.config.max_latents
            kinds.append(
                Kind(
                    halting_log_probs,
                    halted_N[:, None],
                    1.0,
                )
            )
        kinds.append(Kind(answer_log_probs, spoken_NA, 1.0))
        if policy.stops_itself and self.stop_weight:
            stopped_N1 = jnp.ones_like(spoken_NA[:, :1])
            kinds.append(Kind(stop_log_probs, stopped_N1, self.stop_weight))
        return kinds

    def keep_best_first(
        self, policy: Policy, trajectories, advantages_BG: jax.Array
    ) -> jax.Array:
        """Return [N, C]: rollouts' advantages, at their first choices after `best_positive`; 0 of truncated ones."""
        kinds = self._kinds(policy, trajectories)
        made_NC = jnp.concatenate([kind.made for kind in kinds], axis=1)

        # Of the positive rollouts of a group the likeliest is the one of the best mean log-probability.
        mean_N = jnp.mean(trajectories.old_log_probs, axis=1, where=made_NC)
        mean_BG = mean_N.reshape(advantages_BG.shape)
        first_BG = jax.vmap(best_positive)(advantages_BG, mean_BG)
        is_first_NC = made_NC & (jnp.cumsum(made_NC, axis=1) == 1)
        advantages_NC = jnp.where(
            is_first_NC,
            first_BG.reshape(-1, 1),
            advantages_BG.reshape(-1, 1),
        )
        is_truncated_N1 = are_truncated(policy, trajectories)[:, None]
        return jnp.where(is_truncated_N1, 0.0, advantages_NC)

    def _choices(
        self,
        policy: Policy,
        capacity: Capacity,
        params,
        batch,
        trajectories,
        advantages_NC: jax.Array | None = None,
    ) -> Choices:
        """Score all choices of the rollouts."""
        kinds = self._kinds(policy, trajectories)
        made_NC = jnp.concatenate([kind.made for kind in kinds], axis=1)

        # The latents' choices, if they have a weight, come first, and their likelihood may depend on their advantages.
        advantages_NT = None
        if advantages_NC is not None and self.latent_weight:
            advantages_NC = jnp.broadcast_to(advantages_NC, made_NC.shape)
            advantages_NT = advantages_NC[:, : policy.config.max_latents]

        scores = score(
            with_detached_inputs(policy) if self.detach_inputs else policy,
            params,
            batch.prompts,
            trajectories,
            None,
            capacity,
            advantages_NT=advantages_NT,
            likelihood_temperature=policy.config.temperature if self.tempered else 1.0,
        )
        log_probs = [kind.log_probs(params, scores) for kind in kinds]
        log_probs_NC = jnp.concatenate(log_probs, axis=1)
        weights = [kind.weight * kind.made for kind in kinds]
        weights_NC = jnp.concatenate(weights, axis=1)
        return Choices(log_probs_NC, weights_NC, made_NC, scores.answer_log_prob)

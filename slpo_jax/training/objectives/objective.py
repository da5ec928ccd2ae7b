"""Objectives of the stage `rl`, and their common parts: advantages, the stop term, capacities."""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from slpo_jax.errors import UserError
from slpo_jax.models.gate import stop_log_likelihood
from slpo_jax.policy.advantage import ADVANTAGES, AdvantageName
from slpo_jax.policy.policy import Policy, PromptedBatch
from slpo_jax.policy.rollout import Trajectories
from slpo_jax.policy.score import Capacity, capacities, smallest_capacity
from slpo_jax.settings import Checked, setting
from slpo_jax.training.state import Params, Sums

OPTIMIZER_KEYS = ("learning_rate", "schedule")
"""Settings of the stage's optimizer that an objective may replace; None or "" does not."""


@dataclass(frozen=True)
class Objective(Checked, abc.ABC):
    """A policy-gradient estimator on groups of G rollouts; a frozen dataclass that is its own config section.

    Attributes:
        kind: a name in `OBJECTIVES`; "" is the one of its own name.
        after: the objective that it goes on from; "": it begins where imitation and the cold start ended.
        steps: batches of rollouts, each with `updates_per_step` of the optimizer; None is `config.rl.steps`.
        learning_rate: the rate after warm-up; None is the stage's (`config.rl.optimizer`).
        schedule: schedule of the rate; "" is the stage's.
        latent_policy_learning_rate: rate of the latent policy's own parameters; None is `learning_rate`.
        temperature: temperature of the answers in rollouts, 0 is greedy; None is the stage's.
        advantage: how a group's rewards become A_i.
        pass_k: k of "pkpo", up to G.
        stop_weight: factor of the stop term A_i log P(tau_i); without a gate there is none.
    """

    label: ClassVar[str] = ""
    """Its name in a report; "" is its name in the config."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """Metrics that it alone logs, and their meaning; `evaluation.curves` has those that several log."""
    of_written_thoughts: ClassVar[bool] = False
    """Whether it is for thoughts of sampled tokens too, which need their likelihood and have no other gradient."""
    of_one_policy: ClassVar[bool] = False
    """Whether it takes likelihoods of the policy that rolled out; dropout would change that in every pass."""

    kind: str = ""
    after: str = ""
    steps: int | None = setting(None, least=1)
    learning_rate: float | None = setting(None, above=0)
    schedule: Literal["", "constant", "linear", "cosine"] = ""
    latent_policy_learning_rate: float | None = setting(None, above=0)
    temperature: float | None = setting(None, least=0)
    advantage: AdvantageName = "rloo"
    pass_k: int = setting(4, least=2, note="of 1 that is rloo")
    stop_weight: float = setting(1.0, least=0)

    @abc.abstractmethod
    def __call__(
        self,
        policy: Policy,
        params: Params,
        batch: PromptedBatch,
        trajectories: Trajectories,
        rewards_BG: jax.Array,
        key: jax.Array,
    ) -> tuple[jax.Array, int | jax.Array, Sums]:
        """Return the sum of the loss, its divisor for the mean, such as B, and the objective's own metrics.

        Args:
            trajectories: N = B*G rows, a prompt's G consecutive; constants, as the rewards are.
            rewards_BG: float32, NaN of rollouts that are masked (`config.rl.truncated`), which add nothing.
            key: of the step, for noise beside the rollout's.
        """

    @property
    def needs_answers(self) -> bool:
        """Whether batches have to bring the reference answers' tokens."""
        return False

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates on the same rollouts."""
        return 1

    @property
    def minibatches(self) -> int:
        """Parts of equally many prompts that a step is cut into; each update is of the rollouts of one, in turn."""
        return 1

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether `compute_old_log_probs` is asked for before the first update, as it is for more than one."""
        return self.updates_per_step > 1

    def compute_old_log_probs(
        self,
        policy: Policy,
        params: Params,
        batch: PromptedBatch,
        trajectories: Trajectories,
    ) -> Any:
        """Return what updates compare the policy that rolled out by, leaves [N, ..]: `Trajectories.old_log_probs`."""
        return None

    @property
    def needs_ref_log_probs(self) -> bool:
        """Whether it compares with the parameters that it started from: `compute_ref_log_probs` is asked for."""
        return False

    def compute_ref_log_probs(
        self,
        policy: Policy,
        params: Params,
        batch: PromptedBatch,
        trajectories: Trajectories,
    ) -> Any:
        """Return the same of the policy that it started from, leaves [N, ..]: `Trajectories.ref_log_probs`.

        Args:
            params: those that it started from.
        """
        return None

    def check(self, key: str, policy: Policy, group: int) -> None:
        """Refuse a policy that the objective can't be used on.

        Args:
            key: where the objective's settings stand in the config.
            group: G.
        Raises:
            UserError: one line with the key and the remedy.
        """
        writes = policy.config.max_latents and policy.latent_policy.says is not None
        if writes and not self.of_written_thoughts:
            raise UserError(
                f"{key}: is for thoughts in vectors, and those of config.latent_policy.name are sampled tokens; use "
                "the objective grpo or exact, or another latent policy"
            )
        if self.of_one_policy and policy.config.dropout_rate:
            raise UserError(
                f"config.dropout.rate: {policy.config.dropout_rate} makes every pass another policy, and {key} takes "
                "likelihoods of one; set it to 0, or use another objective (answer_only, slpo, pathwise)"
            )
        if self.advantage == "pkpo" and self.pass_k > group:
            raise UserError(
                f"{key}.pass_k: {self.pass_k} is more than config.rl.group={group}; lower it or raise the group"
            )

    def advantages(self, rewards_BG: jax.Array) -> jax.Array:
        """Compute the advantages [B, G], constants; 0 of a rollout whose reward is NaN, which is out of its group."""
        advantage = ADVANTAGES[self.advantage](self.pass_k)
        whole_BG = jax.vmap(advantage)(rewards_BG)

        # Of a group with masked rollouts only the others count.
        counts_BG = ~jnp.isnan(rewards_BG)
        kept_BG = jnp.where(counts_BG, rewards_BG, 0.0)
        masked_BG = jax.vmap(advantage)(kept_BG, counts_BG)
        is_whole_B1 = counts_BG.all(axis=1, keepdims=True)
        return jnp.where(is_whole_B1, whole_BG, masked_BG)

    def stop_term(
        self, policy: Policy, params: Params, trajectories: Trajectories
    ) -> tuple[float, jax.Array] | None:
        """Return (weight, log P(tau) float32 [N]); None where no gate decides on the length."""
        if not policy.stops_itself:
            return None
        logits_NT = policy.latent_policy.stop_logits(params, trajectories.actions)
        log_prob_N = jax.vmap(stop_log_likelihood)(logits_NT, trajectories.lengths)
        return self.stop_weight, log_prob_N


@dataclass(frozen=True)
class WeightedTerms(Objective):
    """-A_i times a weighted sum of the thought's, the answer's and the stop's log-likelihood, scored in one go.

    Attributes:
        latent_weight: factor of the thought's log-likelihood, a setting where there is a latent term; 0 leaves it out.
        answer_weight: factor of the answer's log-likelihood; 0 leaves the term out.
    """

    latent_weight: ClassVar[float] = 0.0
    answer_weight: float = setting(1.0, least=0)

    def check(self, key, policy, group):
        super().check(key, policy, group)
        latent = self.latent_weight if policy.config.max_latents else 0.0
        stop = self.stop_weight if policy.stops_itself else 0.0
        if latent == self.answer_weight == stop == 0.0:
            raise UserError(
                f"{key}: all weights of its terms are 0, so there is nothing to train; set one"
            )

    @abc.abstractmethod
    def terms(
        self, policy: Policy, capacity: Capacity, params, batch, trajectories, key
    ) -> dict[str, jax.Array]:
        """Return `answer_log_likelihood`, `latent_log_likelihood` if there is one, and other metrics, [N] each."""

    def __call__(self, policy, params, batch, trajectories, rewards_BG, key):
        loss, logged = at_capacity(
            self._loss, policy, params, batch, trajectories, rewards_BG, key
        )
        return loss, len(rewards_BG), means(rewards_BG.size, **logged)

    def _loss(
        self,
        policy: Policy,
        capacity: Capacity,
        params,
        batch,
        trajectories,
        rewards_BG,
        key,
    ):
        # Collect the terms that there are, each with its weight; all of them are logged.
        logged = dict(
            self.terms(
                policy,
                capacity,
                params,
                batch,
                trajectories,
                key,
            )
        )
        terms = []
        if "latent_log_likelihood" in logged:
            terms.append((self.latent_weight, logged["latent_log_likelihood"]))
        terms.append((self.answer_weight, logged["answer_log_likelihood"]))
        stop = self.stop_term(policy, params, trajectories)
        if stop is not None:
            terms.append(stop)
            _, logged["stop_log_likelihood"] = stop
        return policy_gradient_loss(terms, self.advantages(rewards_BG)), logged


def policy_gradient_loss(
    terms: Sequence[tuple[float, jax.Array]], advantages_BG: jax.Array
) -> jax.Array:
    """Sum over prompts of -1/G sum_i A_i l(xi_i | x), l a weighted sum of log-likelihoods (paper Prop. 2).

    xi_i is rollout i: its thought, its answer and its length.

    Args:
        terms: (weight, float32 [N]) each, which are summed in this order.
        advantages_BG: stop-gradient advantages.
    Returns:
        float32 scalar; the caller divides by the number of prompts.
    """
    # A term that is off is left out of the graph, so that it costs no backward pass and can spread no NaN.
    total_N = sum(weight * term_N for weight, term_N in terms if weight != 0.0)
    group = advantages_BG.shape[1]
    return -jnp.sum(advantages_BG.reshape(-1) * total_N) / group


def means(num_rollouts: int, **per_rollout: jax.Array) -> Sums:
    """Make metrics that are means over rollouts, of arrays [N]."""
    count = jnp.float32(num_rollouts)
    return {name: (values.sum(), count) for name, values in per_rollout.items()}


def at_capacity(
    branch: Callable[..., tuple[jax.Array, Any]],
    policy: Policy,
    params,
    batch,
    trajectories,
    *constants,
):
    """Run `branch(policy, capacity, params, batch, trajectories, *constants)` in the smallest bucket that it fits in.

    A capacity is a bucket of padded lengths: the slots that scoring has for latents and for answers. A program is
    compiled for each of `Policy.capacities`; a switch chooses the smallest that these trajectories fit in, which
    makes loss and gradient together. Differentiating the switch itself would keep the residuals of every branch for its
    backward pass, not only those of the chosen one.

    Returns:
        (loss, aux) as the branch; gradients are for params alone, and none goes through aux.
    """
    group = trajectories.lengths.shape[0] // batch.draw_ids.shape[0]
    choices = capacities(policy, group)
    branches = [functools.partial(branch, policy, choice) for choice in choices]

    # A switch whose forward pass makes the gradient too, and whose backward pass only scales it.
    @jax.custom_vjp
    def choose(params, index, constants):
        return jax.lax.switch(index, branches, params, *constants)

    def forward(params, index, constants):
        with_gradient = [
            jax.value_and_grad(branch, has_aux=True) for branch in branches
        ]
        return jax.lax.switch(index, with_gradient, params, *constants)

    def backward(grads, cotangents):
        return jax.tree.map(lambda g: cotangents[0] * g, grads), None, None

    choose.defvjp(forward, backward)
    index = smallest_capacity(policy, choices, trajectories, group)
    return choose(params, index, (batch, trajectories, *constants))

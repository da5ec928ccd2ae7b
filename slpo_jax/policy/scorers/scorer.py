"""What a scorer is, and those without parameters: how sure a reasoner is of a rollout itself."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from slpo_jax.models.gate import stop_log_likelihood
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompts import Prompts
from slpo_jax.policy.rollout import Trajectories
from slpo_jax.policy.score import score, used_slots

ScoreFn = Callable[[Policy, Any, Prompts, Trajectories], jax.Array]
"""(policy, all parts of the parameters, prompts of B rows, trajectories of N rows, N/B of each prompt in a row)
-> float32 [N], the largest is the best."""


@dataclass(frozen=True)
class Scorer:
    """A score, and what is to be known of it.

    Attributes:
        score: 0 or more, and a vote counts as much as it says.
        log: it is any number instead, and a vote counts as much as e to it, among the samples of its problem.
        part: the part of the parameters that it has beside the policy's, which the stage of this name trains; "": none.
        needs_gate: it asks a trained gate.
    """

    score: ScoreFn
    log: bool = False
    part: str = ""
    needs_gate: bool = False


def stop_log_prob(policy, params, prompts, trajectories):
    """log P(tau), of the gate's distribution of the first stop, in which a thought of T latents has to stop; [N]."""
    logits_NT = policy.latent_policy.stop_logits(params, trajectories.actions)
    return jax.vmap(stop_log_likelihood)(logits_NT, jnp.maximum(trajectories.lengths, 1))


def likelihood(policy: Policy, params: Any, prompts: Prompts, trajectories: Trajectories) -> jax.Array:
    """The geometric mean of the probabilities of the answer's tokens, its end included; see `Scorer`.

    Returns:
        float32 [N], in (0, 1]; 1 for an answer without tokens.
    """
    log_prob_N = score(policy, params, prompts, trajectories, None).answer_log_prob
    tokens_N = used_slots(policy, trajectories)[1].sum(axis=1)
    return jnp.exp(log_prob_N / jnp.maximum(tokens_N, 1))


def self_certainty(policy, params, prompts, trajectories):
    """The mean of KL(uniform || p) over the answer's tokens, p without noise after its own thought (Kang et al., 2025).

    Returns:
        float32 [N], 0 or more; 0 for an answer without tokens.
    """
    spoken_NA = used_slots(policy, trajectories)[1]
    hidden_NAD = score(policy, params, prompts, trajectories, None).hidden

    def divergence(hidden_ND):  # of one slot at a time: the logits of all would take much memory
        log_probs_NV = jax.nn.log_softmax(policy.reasoner.logits(params, hidden_ND[:, None])[:, 0])
        return -math.log(log_probs_NV.shape[1]) - log_probs_NV.mean(axis=1)

    found_NA = jax.lax.map(divergence, hidden_NAD.swapaxes(0, 1)).T
    return jnp.sum(found_NA, axis=1, where=spoken_NA) / jnp.maximum(spoken_NA.sum(axis=1), 1)

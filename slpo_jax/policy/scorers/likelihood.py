"""How likely a rollout's answer is after its own thought, to the model without noise."""

from typing import Any

import jax
import jax.numpy as jnp

from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.rollout import Trajectories
from slpo_jax.policy.score import score, used_slots


def likelihood(policy: Policy, params: Any, prompts: Prompts, trajectories: Trajectories) -> jax.Array:
    """The geometric mean of the probabilities of the answer's tokens, its end included; see `Scorer`.

    Returns:
        float32 [N], in (0, 1]; 1 for an answer without tokens.
    """
    log_prob_N = score(policy, params, prompts, trajectories, None).answer_log_prob
    tokens_N = used_slots(policy, trajectories)[1].sum(axis=1)
    return jnp.exp(log_prob_N / jnp.maximum(tokens_N, 1))

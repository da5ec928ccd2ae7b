"""What a scorer is: a number for each rollout, by which one is chosen among those of its problem."""

from collections.abc import Callable
from typing import Any

import jax

from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.rollout import Trajectories

Scorer = Callable[[Policy, Any, Prompts, Trajectories], jax.Array]
"""(policy, all parts of the parameters, prompts of B rows, trajectories of N rows, N/B of each prompt in a row)
-> float32 [N], 0 or more: the largest is the best, and a vote counts as much as it says."""

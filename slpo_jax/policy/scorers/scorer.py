"""What a scorer is: a number for each rollout, by which one is chosen among those of its problem."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.rollout import Trajectories

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

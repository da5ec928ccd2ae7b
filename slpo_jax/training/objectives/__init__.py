"""The objectives of the stage `rl`. A new one is a file here, a line in `OBJECTIVES`, and its name in a config."""

from slpo_jax.training.objectives.grpo import Grpo
from slpo_jax.training.objectives.objective import OPTIMIZER_KEYS, Objective
from slpo_jax.training.objectives.pathwise import Pathwise
from slpo_jax.training.objectives.slpo import AnswerOnly, Exact, Slpo

OBJECTIVES: dict[str, type[Objective]] = {
    "slpo": Slpo,
    "answer_only": AnswerOnly,
    "exact": Exact,
    "grpo": Grpo,
    "pathwise": Pathwise,
}
"""By name the settings of an objective (`config.objective.NAME`), which are the objective themselves."""

__all__ = ["OBJECTIVES", "OPTIMIZER_KEYS", "Objective"]

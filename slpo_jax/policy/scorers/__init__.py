"""What chooses among a problem's samples. A new one is a file here, a line in `SCORERS`, and its name in a config."""

from slpo_jax.policy.scorers.likelihood import likelihood
from slpo_jax.policy.scorers.scorer import Scorer

SCORERS: dict[str, Scorer] = {"likelihood": likelihood}
"""By name in `config.evaluate.scorers`."""

__all__ = ["SCORERS", "Scorer"]

"""What chooses among a problem's samples. A new one is a file here, a line in `SCORERS`, and its name in a config."""

from slpo_jax.policy.scorers.latent_rm_scorer import PART, latent_rm
from slpo_jax.policy.scorers.scorer import Scorer, likelihood, self_certainty, stop_log_prob

SCORERS: dict[str, Scorer] = {
    "likelihood": Scorer(likelihood),
    "self_certainty": Scorer(self_certainty),
    "gate": Scorer(stop_log_prob, log=True, needs_gate=True),
    "latent_rm": Scorer(latent_rm, log=True, part=PART),
}
"""By name in `config.evaluate.scorers`."""

__all__ = ["SCORERS", "Scorer"]

"""What `launch/reproduce.py` runs and compares, a `Grid` a name."""

from collections.abc import Mapping
from typing import Any

from grid import Grid, Run, Timing
from soft import SOFT_GRIDS
from twelve import TWELVE_GRIDS

__all__ = ["GRIDS", "TIMINGS"]

_LATENT, _ANSWER, _STOP = (f"objective.slpo.{term}_weight" for term in ("latent", "answer", "stop"))


def _slpo_alone(label: str, overrides: Mapping[str, Any]) -> Run:
    """SLPO from the cold start of "main"."""
    start = {"stages": ("rl", "evaluate"), "init": "{after}/checkpoints/cold_start"}
    return Run(label, start | dict(overrides), after="main")


_VALIDATED = {"data.eval.valid": "synthetic:valid", "evaluate.datasets": ("valid",)}


def _rates_of_the_quick_start() -> tuple[Run, ...]:
    """Its reasoner, and each of its objectives at three rates, evaluated on validation alone."""
    stages = {"stages": ("imitate", "cold_start", "evaluate"), "imitate.control": False}
    after = {"stages": ("rl", "evaluate"), "init": "{after}/checkpoints/cold_start"} | _VALIDATED
    return (
        Run("main", stages | _VALIDATED),
        *(
            Run(
                f"{name}_{rate:.0e}",
                after | {"rl.objectives": (name,), f"objective.{name}.learning_rate": rate},
                after="main",
                rows=(name,),
            )
            for name in ("slpo", "pathwise")
            for rate in (3e-5, 1e-4, 3e-4)
        ),
    )


_ABLATIONS = {
    "no_latent_term": {_LATENT: 0.0},
    "no_answer_term": {_ANSWER: 0.0},
    "no_stop_term": {_STOP: 0.0},
    "latent_alone": {_ANSWER: 0.0, _STOP: 0.0},
    "answer_alone": {_LATENT: 0.0, _STOP: 0.0},
    "stop_alone": {_LATENT: 0.0, _ANSWER: 0.0},
    "latent_sum_over_d": {"objective.slpo.latent_reduction": "sum"},
    "detached_variance": {"objective.slpo.detach_variance": True},
    "grpo": {"objective.slpo.advantage": "grpo"},
    "sampled_answers": {"rl.temperature": 1.0},
    # The config's own are 3e-5 and 32.
    "lr_third": {"rl.optimizer.learning_rate": 1e-5},
    "lr_x_3": {"rl.optimizer.learning_rate": 9e-5},
    "lr_x_10": {"rl.optimizer.learning_rate": 3e-4},
    "batch_quarter": {"rl.batch_size": 8},
}

GRIDS = {
    # What the quick start shows, over three seeds: README's table.
    "quickstart": Grid(
        "configs/quickstart.py",
        (Run("main"),),
        rows=("slpo", "pathwise"),
        minus=("cold_start", "imitate_control"),
        folder="quickstart_seeds",
    ),
    # Which learning rates does it show? Of another seed than those three.
    "quickstart_rates": Grid("configs/quickstart.py", _rates_of_the_quick_start(), seeds=(100,)),
    # Does SLPO beat the cold gate and further imitation, and what of it is needed? docs/measurements.md, 1 and 2.
    "ablations": Grid(
        "configs/arithmetic.py",
        (
            Run("main"),
            *(_slpo_alone(label, overrides) for label, overrides in _ABLATIONS.items()),
            Run("no_imitation_dropout", {"imitate.dropout": 0.0, "imitate.control": False}, after="main"),
        ),
    ),
    **TWELVE_GRIDS,
    **SOFT_GRIDS,
}

TIMINGS = {
    # The paper's table of computational cost. With PyTorch beside it: `python -m benchmarks.step`.
    "cost": Timing("step", ("rollout", "surrogate", "backward", "other"), ("--shapes=gpt2", "--torch=none")),
}

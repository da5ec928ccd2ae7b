"""What `launch/reproduce.py` runs and compares, a `Grid` a name."""

import dataclasses
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Run:
    """One line of a grid, run once for each seed.

    Attributes:
        label: of its folder and its line in the comparison.
        overrides: value by config key; "{after}" in one stands for the workdir of `after` with the same seed.
        after: the label of a run that comes first, whose report's rows this one takes where it has none of its own
            (`config.evaluate.rows_from`); "": none.
        seeds: instead of the grid's.
        config: instead of the grid's.
    """

    label: str
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    after: str = ""
    seeds: tuple[int, ...] = ()
    config: str = ""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Runs and the comparison that they are made for.

    Attributes:
        config: a config file, as --config of slpo_jax.main takes it; relative to the checkout.
        runs: no two with one label; those named in `after` before those that name them.
        rows: of the report, compared between the runs.
        minus: a baseline of theirs, which they are set beside within each run; "": they stand alone.
        metrics: of the report.
    """

    config: str
    runs: tuple[Run, ...]
    rows: tuple[str, ...] = ("slpo",)
    minus: str = "cold_start"
    seeds: tuple[int, ...] = (0, 1, 2)
    metrics: tuple[str, ...] = ("acc", "pass@1", "pass@8", "pass@16", "latent_steps")


_LATENT, _ANSWER, _STOP = (f"objective.slpo.{term}_weight" for term in ("latent", "answer", "stop"))


def _slpo_alone(label: str, overrides: Mapping[str, Any]) -> Run:
    """SLPO from the cold start of "main"."""
    start = {"stages": ("rl", "evaluate"), "init": "{after}/checkpoints/cold_start"}
    return Run(label, start | dict(overrides), after="main")


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
    # The config's own are 1e-4 and 32.
    "lr_third": {"rl.optimizer.learning_rate": 1e-4 / 3},
    "lr_x_3": {"rl.optimizer.learning_rate": 3e-4},
    "lr_x_10": {"rl.optimizer.learning_rate": 1e-3},
    "batch_quarter": {"rl.batch_size": 8},
}

_REASONERS = ("coconut_gpt2", "coconut_llama", "codi_gpt2", "codi_llama")
TWELVE = runpy.run_path(str(Path(__file__).resolve().parents[1] / "configs" / "twelve.py"))

GRIDS = {
    # Does SLPO beat the cold gate and further imitation, and what of it is needed? docs/measurements.md, 1 and 2.
    "ablations": Grid(
        "configs/arithmetic.py",
        (
            Run("main"),
            *(_slpo_alone(label, overrides) for label, overrides in _ABLATIONS.items()),
            Run("no_imitation_dropout", {"imitate.dropout": 0.0, "imitate.control": False}, after="main"),
        ),
    ),
    # Which learning rate has each objective in the twelve settings? Of another seed than theirs, on validation alone.
    "twelve_rates": Grid(
        "configs/twelve.py",
        tuple(Run(reasoner, config=f"configs/twelve.py:{reasoner},tune") for reasoner in _REASONERS),
        rows=tuple(TWELVE["variant"](name, rate) for name in TWELVE["COMPARED"] for rate in TWELVE["RATES"]),
        seeds=(100,),
    ),
    # Tables 1 and 2: every objective and control in each of them.
    "twelve": Grid(
        "configs/twelve.py",
        tuple(Run(reasoner, config=f"configs/twelve.py:{reasoner}") for reasoner in _REASONERS),
        rows=("imitate_control", *TWELVE["COMPARED"]),
    ),
}

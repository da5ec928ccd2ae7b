"""The grids of configs/soft_quickstart.py: the paper's tables 3 and 4 in small."""

import runpy
from pathlib import Path

from grid import Grid, Run

_CONFIG = "configs/soft_quickstart.py"
SOFT = runpy.run_path(str(Path(__file__).resolve().parents[1] / _CONFIG))
_TRAINED = tuple(method for method in SOFT["METHODS"] if method != "cot")
_START = {"stages": ("rl", "evaluate"), "init": "{after}/checkpoints/imitate"}
_METRICS = ("acc", "pass@1", "pass@32", "latent_steps", "answer_tokens")

SOFT_GRIDS = {
    # Which learning rate has each method? Of another seed than theirs, on validation alone.
    "soft_rates": Grid(
        _CONFIG,
        (
            Run("cot", config=f"{_CONFIG}:cot,tune"),
            *(Run(method, _START, after="cot", config=f"{_CONFIG}:{method},tune") for method in _TRAINED),
        ),
        rows=tuple(SOFT["variant"](method, rate) for method in _TRAINED for rate in SOFT["RATES"]),
        minus=("imitate",),
        seeds=(100,),
        metrics=_METRICS,
    ),
    # Tables 3 and 4, figure 5: each method beside chain of thought, which may come after soft tokens too ("_latent").
    "soft": Grid(
        _CONFIG,
        (
            Run("cot", config=f"{_CONFIG}:cot", rows=("imitate", "imitate_fixed_tmax")),
            *(Run(method, _START, after="cot", config=f"{_CONFIG}:{method}", rows=(method,)) for method in _TRAINED),
            Run(
                "grpo_latent", {"stages": ("evaluate",), "init": "{after}/checkpoints/grpo"}, after="grpo",
                config=f"{_CONFIG}:cot", rows=("checkpoint",),
            ),
        ),
        rows=("imitate", "imitate_fixed_tmax", *_TRAINED, "checkpoint"),
        minus=("imitate",),
        metrics=_METRICS,
        over_training=("answer_tokens", "reward"),  # figure 5, and what came with it
    ),
}  # fmt: skip

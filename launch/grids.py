"""What `launch/reproduce.py` runs and compares, a `Grid` a name."""

import dataclasses
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar


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
        minus: baselines of theirs, which they are set beside within each run; without any they stand alone.
        metrics: of the report.
        folder: under runs/, shared with grids that have some of the same runs; "": the grid's name.
    """

    config: str
    runs: tuple[Run, ...]
    rows: tuple[str, ...] = ("slpo",)
    minus: tuple[str, ...] = ("cold_start",)
    seeds: tuple[int, ...] = (0, 1, 2)
    metrics: tuple[str, ...] = ("acc", "pass@1", "pass@8", "pass@16", "latent_steps")
    folder: str = ""


@dataclasses.dataclass(frozen=True)
class Study:
    """A benchmark of what each run of a grid left, and the means of its figures over the seeds.

    Attributes:
        grid: its name; runs that are not finished are run first.
        module: of benchmarks/, whose `--json` holds "tables": name -> rows.
        checkpoints: what it is given, by stage.
        key: of a row, what it is called.
        metrics: of a row: numbers, or pairs of a number and its error.
        flags: further ones.
    """

    grid: str
    module: str
    checkpoints: tuple[str, ...]
    key: str
    metrics: tuple[str, ...]
    flags: tuple[str, ...] = ()
    rows: ClassVar[tuple[str, ...]] = ()
    minus: ClassVar[tuple[str, ...]] = ()


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
_CELLS = {reasoner: Run(reasoner, config=f"configs/twelve.py:{reasoner}") for reasoner in _REASONERS}


def _again(label: str, reasoner: str, overrides: Mapping[str, Any]) -> Run:
    """SLPO with another setting, from the cold start of the reasoner's own run."""
    start = {
        "stages": ("rl", "evaluate"), "init": "{after}/checkpoints/cold_start", "rl.objectives": ("slpo_mean",),
    }  # fmt: skip
    return Run(label, start | dict(overrides), after=reasoner, config=_CELLS[reasoner].config)


def _evaluated(label: str, stage: str, overrides: Mapping[str, Any]) -> Run:
    """A checkpoint of COCONUT's run on GPT-2, evaluated in another way."""
    start = {"stages": ("evaluate",), "init": f"{{after}}/checkpoints/{stage}"}
    return Run(label, start | dict(overrides), after="coconut_gpt2", config=_CELLS["coconut_gpt2"].config)


_SWEEP = ((2, 4), (4, 4), (8, 4), (4, 2), (4, 8))  # (K, G)
_THRESHOLDS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_TEXT = {"stages": ("imitate", "evaluate"), "max_latents": 0, "gate.enabled": False, "imitate.c_thought": 0,
         "imitate.control": False}  # fmt: skip

GRIDS = {
    # What the quick start shows, over three seeds: README's table.
    "quickstart": Grid(
        "configs/quickstart.py",
        (Run("main"),),
        rows=("slpo", "pathwise"),
        minus=("cold_start", "imitate_control"),
        folder="quickstart_seeds",
    ),
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
        tuple(
            Run(reasoner, config=f"configs/twelve.py:{reasoner},tune") for reasoner in ("coconut_gpt2", "codi_gpt2")
        ),
        rows=tuple(TWELVE["variant"](name, rate) for name in TWELVE["COMPARED"] for rate in TWELVE["RATES"]),
        seeds=(100,),
    ),
    # The paper's tables 1 and 2: every objective and control in each of the twelve settings.
    "twelve": Grid(
        "configs/twelve.py",
        tuple(_CELLS.values()),
        rows=("imitate", "imitate_fixed_tmax", "imitate_control", "cold_start", *TWELVE["COMPARED"]),
        minus=("cold_start", "imitate_control", "reference"),
    ),
    # Table 2's rows of explicit text: written steps, and steps that are left out one after the other until none is.
    "text": Grid(
        "configs/twelve.py",
        (
            Run("cot_sft", _TEXT | {"max_answer_tokens": 32, "imitate.cot_steps": 15_500, "imitate.final_steps": 0}),
            Run("no_thought", _TEXT),
        ),
        rows=("imitate",),
        minus=(),
        metrics=("acc", "pass@1", "pass@8", "pass@16", "answer_tokens"),
        folder="twelve",
    ),
    # Figure 4 and table 6.
    "advantages": Grid(
        "configs/twelve.py",
        tuple(
            run
            for reasoner in ("coconut_gpt2", "codi_gpt2")
            for run in (
                _CELLS[reasoner],
                _again(f"{reasoner}_grpo", reasoner, {"objective.slpo_mean.advantage": "grpo"}),
            )
        ),
        rows=("slpo_mean",),
        metrics=("pass@1", "pass@8", "pass@16"),
        folder="twelve",
    ),
    # Figures 3 and 8.
    "sweeps": Grid(
        "configs/twelve.py",
        (
            _CELLS["coconut_gpt2"],
            *(
                _again(f"K{K}_G{G}", "coconut_gpt2", {"objective.slpo_mean.passes": K, "rl.group": G})
                for K, G in _SWEEP
            ),
        ),
        rows=("slpo_mean",),
        metrics=("pass@1", "pass@2", "pass@8", "pass@16"),
        folder="twelve",
    ),
    # How many latents, and how many right, does each threshold of the gate give?
    "thresholds": Grid(
        "configs/twelve.py",
        (
            _CELLS["coconut_gpt2"],
            *(
                _evaluated(f"threshold_{x}", "slpo_mean", {"evaluate.thresholds": (x,), "evaluate.samples": 0})
                for x in _THRESHOLDS
            ),
        ),
        rows=("checkpoint",),
        minus=(),
        metrics=("acc", "latent_steps"),
        folder="twelve",
    ),
    # Figure 7; its picture is in each run's figures/difficulty.png.
    "difficulty": Grid(
        "configs/twelve.py",
        (
            _CELLS["coconut_gpt2"],
            *(
                _evaluated(
                    f"difficulty_{stage}_{split}",
                    stage,
                    {
                        "data.eval.split": f"synthetic:{split}", "evaluate.datasets": ("split",),
                        "evaluate.samples": 32, "evaluate.seeds": 1,
                    },
                )
                for stage in ("cold_start", "slpo_mean")
                for split in ("valid", "test")
            ),
        ),
        rows=("checkpoint",),
        minus=(),
        metrics=("acc", "pass@1", "latent_steps", "pearson_difficulty_r"),
        folder="twelve",
    ),
}  # fmt: skip

STUDIES = {
    # Figures 6, 9 and 10.
    "geometry": Study(
        "twelve", "geometry", ("cold_start", "slpo_mean", "pass_at_k"), "checkpoint",
        ("distance_change", "rank_change"),
    ),
    # Does SLPO's latent term point where the reward's own gradient through the latents does?
    "gradients": Study(
        "twelve", "gradients", ("cold_start", "slpo_mean"), "estimator", ("cosine", "cosine_of_means", "noise"),
    ),
}  # fmt: skip

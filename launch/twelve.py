"""The grids of configs/twelve.py: the paper's tables and figures in small."""

import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grid import Grid, Run

_REASONERS = ("coconut_gpt2", "coconut_llama", "codi_gpt2", "codi_llama")
_GPT2 = ("coconut_gpt2", "codi_gpt2")
TWELVE = runpy.run_path(str(Path(__file__).resolve().parents[1] / "configs" / "twelve.py"))
_HALF, _THEN = 300, ("reward", "reference", "answer_only")
_CELLS = {reasoner: Run(reasoner, config=f"configs/twelve.py:{reasoner}") for reasoner in _REASONERS}


def _again(
    label: str,
    reasoner: str,
    overrides: Mapping[str, Any],
    objective: str = "slpo_mean",
    after: str = "",
    stage: str = "cold_start",
    kind: str = "",
) -> Run:
    """An objective with another setting, from the cold start of the reasoner's own run, or a stage of another's."""
    start = {"stages": ("rl", "evaluate"), "init": f"{{after}}/checkpoints/{stage}", "rl.objectives": (objective,)}
    config = _CELLS[reasoner].config
    return Run(label, start | dict(overrides), after=after or reasoner, config=config, rows=(objective,), kind=kind)


def _on(reasoners: Sequence[str], others: Callable[[str], Sequence[Run]]) -> tuple[Run, ...]:
    """The runs of these reasoners, and what is run from each."""
    return tuple(run for reasoner in reasoners for run in (_CELLS[reasoner], *others(reasoner)))


def _first(reasoner: str) -> Run:
    """Pass@k for half of the steps."""
    return _again(f"{reasoner}_first", reasoner, {"rl.steps": _HALF}, "pass_at_k", kind="pass_at_k, half of the steps")


def _then(name: str, reasoner: str, steps: int = _HALF, suffix: str = "") -> Run:
    """Another objective after that."""
    label, kind = f"{reasoner}_then_{name}{suffix}", f"pass_at_k, then {name}{suffix.replace('_', ', equal ')}"
    return _again(label, reasoner, {"rl.steps": steps}, name, f"{reasoner}_first", "pass_at_k", kind)


def _evaluated(label: str, reasoner: str, stage: str, overrides: Mapping[str, Any]) -> Run:
    """A checkpoint of the reasoner's own run, evaluated in another way."""
    start = {"stages": ("evaluate",), "init": f"{{after}}/checkpoints/{stage}"}
    return Run(label, start | dict(overrides), after=reasoner, config=_CELLS[reasoner].config, alone=True)


_SWEEP = ((2, 4), (4, 4), (8, 4), (4, 2), (4, 8))  # (K, G)
_THRESHOLDS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_BASELINES = ("cold_start", "imitate_control", "reference")
# Steps in about the time of 600 of SLPO (docs/reproduction.md, "Learning rates").
_ON_ITS_WAY = tuple(TWELVE["stopped"]("slpo_mean", steps) for steps in TWELVE["PATH"])
_EQUAL_SECONDS = {"reference": 900, "pass_at_k": 800, "mixture": 800, "answer_only": 2400}
_THEN_EQUAL_SECONDS = 1500  # of answer_only, after half of the steps of pass_at_k
_TEXT = {"stages": ("imitate", "evaluate"), "max_latents": 0, "gate.enabled": False, "imitate.c_thought": 0,
         "imitate.control": False}  # fmt: skip
_COT = {"max_answer_tokens": 32, "imitate.max_latent_stage": 0, "imitate.cot_steps": 15_500, "imitate.final_steps": 0}
# A chain has at most 24 tokens, and an epoch 1,563 steps: a token every 391, and from step 10,884 of 15,500 on all are
# gone. The budget of answers would hold a whole chain, so that none is cut off that is still written.
_ICOT = {"max_answer_tokens": 32, "imitate.recipe": "icot", "imitate.final_steps": 14_000,
         "imitate.icot.tokens_per_epoch": 4, "imitate.suffix_slots": (8, 16)}  # fmt: skip

TWELVE_GRIDS = {
    # Which learning rate has each objective in the twelve settings? Of another seed than theirs, on validation alone.
    "twelve_rates": Grid(
        "configs/twelve.py",
        tuple(Run(reasoner, config=f"configs/twelve.py:{reasoner},tune") for reasoner in _REASONERS),
        rows=tuple(TWELVE["variant"](name, rate) for name in TWELVE["COMPARED"] for rate in TWELVE["RATES"]),
        seeds=(100,),
    ),
    # Which ways are above the cold gate in all four figures in as many seconds? Of that seed too, on validation alone.
    "ways": Grid(
        "configs/twelve.py",
        tuple(Run(reasoner, config=f"configs/twelve.py:{reasoner},ways") for reasoner in _GPT2),
        rows=tuple(TWELVE["WAYS"]),
        seeds=(100,),
    ),
    # The paper's tables 1 and 2: every objective and control in each of the twelve settings.
    "twelve": Grid(
        "configs/twelve.py",
        tuple(_CELLS.values()),
        rows=("imitate", "imitate_fixed_tmax", "imitate_control", "cold_start", *TWELVE["COMPARED"]),
        minus=_BASELINES,
        metrics=("acc", "pass@1", "pass@8", "pass@16", "latent_steps", "distinct_answers"),
    ),
    # As "twelve", but as many seconds of training as SLPO has, instead of as many steps.
    "seconds": Grid(
        "configs/twelve.py",
        _on(
            _REASONERS,
            lambda reasoner: [
                _first(reasoner),
                *(
                    _again(
                        f"{reasoner}_{name}_seconds", reasoner, {"rl.steps": steps}, name, kind=f"{name}, equal seconds"
                    )
                    for name, steps in _EQUAL_SECONDS.items()
                ),
                _then("answer_only", reasoner, _THEN_EQUAL_SECONDS, "_seconds"),
            ],
        ),
        rows=("slpo_mean", *_EQUAL_SECONDS),
        minus=_BASELINES,
        folder="twelve",
    ),
    # Which learning rate, of those that fall, has each of "falling"? On validation alone.
    "falling_rates": Grid(
        "configs/twelve.py",
        (Run("codi_llama", config="configs/twelve.py:codi_llama,falling_rates"),),
        rows=tuple(TWELVE["variant"](name, rate) for name in TWELVE["FALLING_TUNED"] for rate in TWELVE["RATES"]),
        seeds=(100, 101),
    ),
    # What "ways" asks for, on the test sets: seeds that nothing was chosen or tried with.
    "falling": Grid(
        "configs/twelve.py",
        tuple(
            # Other seeds for the rates of "falling_rates", as 3 to 5 were seen before these were asked for.
            Run(
                reasoner,
                config=f"configs/twelve.py:{reasoner},falling",
                seeds=(6, 7, 8) if reasoner in TWELVE["CHOSEN_FALLING"] else (),
            )
            for reasoner in _REASONERS
        ),
        rows=TWELVE["FALLING"],
        minus=("cold_start", "imitate_control", "reference_falling"),
        seeds=(3, 4, 5),
    ),
    # Is one after the other above all controls on all figures? As many steps in all as each alone in "twelve".
    "schedules": Grid(
        "configs/twelve.py",
        _on(
            _REASONERS,
            lambda reasoner: [
                _first(reasoner),
                *(_then(name, reasoner) for name in _THEN),
            ],
        ),
        rows=("pass_at_k", "mixture", *_THEN),
        minus=_BASELINES,
        folder="twelve",
    ),
    # Table 2's rows of explicit text: written steps, and steps that are left out until none is, one after the other or
    # token by token. All have as many optimizer steps.
    "text": Grid(
        "configs/twelve.py",
        (
            Run("cot_sft", _TEXT | _COT),
            Run("no_thought", _TEXT),
            Run("icot", _TEXT | _ICOT),
        ),
        rows=("imitate",),
        minus=(),
        metrics=("acc", "pass@1", "pass@8", "pass@16", "answer_tokens"),
        folder="twelve",
    ),
    # Figure 4 and table 6.
    "advantages": Grid(
        "configs/twelve.py",
        _on(
            _GPT2,
            lambda reasoner: [_again(f"{reasoner}_grpo", reasoner, {"objective.slpo_mean.advantage": "grpo"})],
        ),
        rows=("slpo_mean",),
        metrics=("pass@1", "pass@8", "pass@16"),
        folder="twelve",
    ),
    # Figures 3 and 8.
    "sweeps": Grid(
        "configs/twelve.py",
        _on(
            _GPT2,
            lambda reasoner: [
                _again(f"{reasoner}_K{K}_G{G}", reasoner, {"objective.slpo_mean.passes": K, "rl.group": G})
                for K, G in _SWEEP
            ]
        ),
        rows=("slpo_mean",),
        metrics=("pass@1", "pass@2", "pass@8", "pass@16"),
        folder="twelve",
    ),
    # What SLPO is like on its way.
    "path": Grid(
        "configs/twelve.py",
        tuple(Run(f"{reasoner}_path", config=f"configs/twelve.py:{reasoner},path") for reasoner in _GPT2),
        rows=_ON_ITS_WAY,
        folder="twelve",
    ),
    # How many latents, and how many right, does each threshold of the gate give?
    "thresholds": Grid(
        "configs/twelve.py",
        _on(
            _GPT2,
            lambda reasoner: [
                _evaluated(f"{reasoner}_threshold_{x}", reasoner, "slpo_mean",
                           {"evaluate.thresholds": (x,), "evaluate.samples": 0})
                for x in _THRESHOLDS
            ]
        ),
        rows=("checkpoint",),
        minus=(),
        metrics=("acc", "latent_steps"),
        folder="twelve",
    ),
    # Figure 7; its picture is in each run's figures/difficulty.png.
    "difficulty": Grid(
        "configs/twelve.py",
        _on(
            _GPT2,
            lambda reasoner: [
                _evaluated(
                    f"{reasoner}_difficulty_{stage}_{split}",
                    reasoner,
                    stage,
                    {
                        "data.eval.split": f"synthetic:{split}", "evaluate.datasets": ("split",),
                        "evaluate.samples": 32, "evaluate.seeds": 1,
                    },
                )
                for stage in ("cold_start", "slpo_mean")
                for split in ("valid", "test")
            ]
        ),
        rows=("checkpoint",),
        minus=(),
        metrics=("acc", "pass@1", "latent_steps", "pearson_difficulty_r"),
        folder="twelve",
    ),
}  # fmt: skip

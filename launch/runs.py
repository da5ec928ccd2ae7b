"""Every run of the tables that `launch/reproduce.py` makes, as data.

A run is a name, a config, keys of it that differ, and the run that it starts from. A table is runs, the rows of their
reports that are compared, and what each is set beside, over training seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobs import Run, Table
from slpo_jax.config import variant_name

CONTENDERS = ("no_thought", "icot", "cot_sft", "coconut", "simcot_coconut", "codi", "simcot_codi", "dart", "colar",
               "regular", "latent_sft", "latent_grpo")  # fmt: skip
_RATES = (1e-5, 3e-5, 1e-4)
_AVERAGES = ("acc", "pass@1", "pass@8", "pass@16")
_RL = {"stages": ("rl", "evaluate"), "init": "{after}/checkpoints/cold_start"}


# --- Few demonstrations, then rewards (configs/quickstart.py).

_QUICKSTART = "configs/quickstart.py"
# By run, its cell.
_QUICK_CELLS = {
    "simcot": "all",
    "no_latents": "no_latents",
    "cot": "cot",
}
_QUICK_OBJECTIVES = ("keys", "answer_only", "slpo", "replay", "grpo")
_QUICK_RATES = (1e-4, 3e-4, 1e-3)
# The same on word problems. The first of them are the demonstrations, and rewards have them all.
_WORD_PROBLEMS = {
    "tokenizer": "synthetic:30",
    "prompt_slots": (24,),
    "imitate.max_latent_stage": 3,
    "data.demos": "",
    "data.train": "synthetic:train",
    "data.valid": "synthetic:valid",
    "data.eval.test": "synthetic:test",
}
_WORD_DEMOS = _WORD_PROBLEMS | {
    "data.synthetic.train_size": 2_000,
    "stages": ("imitate", "evaluate"),
}
_WORD_REWARDS = _WORD_PROBLEMS | {
    "data.synthetic.train_size": 8_500,
    "stages": ("rl", "evaluate"),
    "init": "{after}/checkpoints/imitate",
}
_WRITTEN = {"imitate.max_latent_stage": 0, "max_answer_tokens": 28}
_THREE_LATENTS = {"max_latents": 3, "imitate.final_latents": "published"}
_FURTHER = {"stages": ("imitate", "evaluate"), "imitate.control": True}
_IMITATED = {
    "stages": ("imitate", "evaluate"),
    "imitate.control": False,
    "evaluate.samples": 0,
}

# --- One small COCONUT: the ablations.

_ARITHMETIC = "configs/arithmetic.py"
_LATENT, _ANSWER, _STOP = (
    f"objective.slpo.{term}_weight" for term in ("latent", "answer", "stop")
)
_ABLATIONS: dict[str, dict[str, Any]] = {
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
_NO_DROPOUT = {"imitate.dropout": 0.0, "imitate.control": False}
_JUDGED = {
    "stages": ("imitate", "cold_start", "evaluate"),
    "imitate.control": False,
    "evaluate.samples": 0,
}
_SELECTED = {
    "stages": ("latent_rm", "evaluate"), "init": "{after}/checkpoints/cold_start",
    "latent_rm.problems": 1500, "latent_rm.completions": 16, "latent_rm.threshold": 0.8,
    "latent_rm.batch_size": 64, "latent_rm.steps": 400, "latent_rm.evaluate_every": 0,
    "latent_rm.optimizer.learning_rate": 1e-3, "latent_rm.optimizer.warmup_steps": 40,
    "evaluate.thresholds": (0.8,), "evaluate.limit": 500, "evaluate.samples": 64, "evaluate.seeds": 1,
    "evaluate.scorers": ("gate", "likelihood", "self_certainty", "latent_rm"),
    "evaluate.beams": 4, "evaluate.candidates": 4,
}  # fmt: skip
_SHORT = {
    "imitate.cot_steps": 800,
    "imitate.stage_steps": 300,
    "imitate.final_steps": 4000,
    "cold_start.steps": 300,
}

# --- Where rewards pay (configs/countdown.py), and what latents are worth on chains.

_COUNTDOWN = "configs/countdown.py"
_DEPTH = "configs/depth.py"
_PRICE = "configs/price.py"
_CHAINS = "configs/chains.py"
_ON_CHAINS = (
    "none",
    "cot",
    "coconut",
    "simcot_coconut",
    "codi",
    "simcot_codi",
    "colar",
    "regular",
    "adalr",
)
_ASKED_SEVEN = {
    "data.eval.depth_6": "chain:6",
    "data.eval.depth_7": "chain:7",
    "prompt_slots": (24,),
}
_SEVEN = _ASKED_SEVEN | {
    "data.chain.depth": 7,
    "max_latents": 8,
    "imitate.max_latent_stage": 7,
    "imitate.suffix_slots": tuple(range(4, 46, 6)),
}
_REWARDED = (
    "slpo_sum",
    "slpo",
    "answer_only",
    "answer_only_pkpo",
    "replay",
    "slpo_pkpo",
    "replay_pkpo",
    "grpo",
)
_COUNTDOWN_RATES = (3e-5, 1e-4, 3e-4)

# --- Twelve settings: {COCONUT, CODI} x {GPT-2, Llama}, on three test sets each (configs/twelve.py).

_REASONERS = ("coconut_gpt2", "coconut_llama", "codi_gpt2", "codi_llama")
_GPT2 = ("coconut_gpt2", "codi_gpt2")
_TWELVE = "configs/twelve.py"
_OBJECTIVES = (
    "reference",
    "slpo_sum",
    "slpo_mean",
    "slpo_pkpo",
    "answer_only",
    "reward",
    "pass_at_k",
    "mixture",
)
_BASELINES = ("cold_start", "imitate_control", "reference")
_FALLING = ("reference_falling", "slpo_mean_falling", "pass_at_8_falling", "then_answer_only",
            "then_answer_only_falling")  # fmt: skip
# Steps that take about as long as 600 of SLPO.
_SECONDS = {"reference": 900, "pass_at_k": 800, "mixture": 800, "answer_only": 2400}
_K_AND_G = ((2, 4), (4, 4), (8, 4), (4, 2), (4, 8))


def _again(
    name: str,
    reasoner: str,
    objective: str,
    changes: dict[str, Any],
    kind: str = "",
    first: str = "",
) -> Run:
    """An objective with other settings, from the cold start of the reasoner's own run, or after the run `first`."""
    start = {"init": "{after}/checkpoints/pass_at_k"} if first else {}
    overrides = _RL | start | {"rl.objectives": (objective,)} | changes
    return Run(
        name,
        f"{_TWELVE}:{reasoner}",
        overrides,
        first or reasoner,
        (objective,),
        kind=kind,
    )


def _evaluated(name: str, reasoner: str, stage: str, changes: Mapping[str, Any]) -> Run:
    """A checkpoint of the reasoner's own run, evaluated in another way."""
    start = {"stages": ("evaluate",), "init": f"{{after}}/checkpoints/{stage}"}
    return Run(name, f"{_TWELVE}:{reasoner}", start | changes, reasoner, alone=True)


def _on(
    reasoners: Sequence[str], others: Callable[[str], Sequence[Run]], argument: str = ""
) -> tuple[Run, ...]:
    """The runs of these reasoners, and what is run from each."""
    runs = []
    for name in reasoners:
        runs.append(Run(name, f"{_TWELVE}:{name}{argument}"))
        runs += others(name)
    return tuple(runs)


def _variant_names(names: Sequence[str], rates: Sequence[float]) -> tuple[str, ...]:
    """What objectives are called at each of the rates that are tried."""
    variants = []
    for name in names:
        variants += [variant_name(name, rate) for rate in rates]
    return tuple(variants)


def _in_equal_seconds(reasoner: str) -> list[Run]:
    first = _again(
        f"{reasoner}_first",
        reasoner,
        "pass_at_k",
        {"rl.steps": 300},
        "pass_at_k, half of the steps",
    )
    then = _again(
        f"{reasoner}_then",
        reasoner,
        "answer_only",
        {"rl.steps": 1500},
        "pass_at_k, then answer_only",
        first.name,
    )
    runs = []
    for name, steps in _SECONDS.items():
        runs.append(
            _again(
                f"{reasoner}_{name}_seconds",
                reasoner,
                name,
                {"rl.steps": steps},
                f"{name}, equal seconds",
            )
        )
    return [*runs, first, then]


def _by_difficulty(reasoner: str) -> list[Run]:
    sampled = {
        "evaluate.datasets": ("split",),
        "evaluate.samples": 32,
        "evaluate.seeds": 1,
    }
    runs = []
    for stage in ("cold_start", "slpo_mean"):
        for split in ("valid", "test"):
            changes = sampled | {"data.eval.split": f"synthetic:{split}"}
            name = f"{reasoner}_difficulty_{stage}_{split}"
            runs.append(_evaluated(name, reasoner, stage, changes))
    return runs


# All have as many optimizer steps: CoT-SFT and iCoT write in 32 tokens what the others leave out. A chain has at most
# 24 tokens, and an epoch 1,563 steps: iCoT leaves one out every 391, and none is left from step 10,884 of 15,500 on.
_TEXT = {"stages": ("imitate", "evaluate"), "max_latents": 0, "gate.enabled": False, "imitate.c_thought": 0,
         "imitate.control": False}  # fmt: skip
_COT = {
    "max_answer_tokens": 32,
    "imitate.max_latent_stage": 0,
    "imitate.cot_steps": 15_500,
    "imitate.final_steps": 0,
}
_ICOT = {"max_answer_tokens": 32, "imitate.recipe": "icot", "imitate.final_steps": 14_000,
         "imitate.icot.tokens_per_epoch": 4, "imitate.suffix_slots": (8, 16)}  # fmt: skip

# --- Soft tokens on a tiny Llama (configs/soft_quickstart.py).

_SOFT = "configs/soft_quickstart.py"
_METHODS = ("grpo", "soft_tokens", "lepo", "hrpo", "slpo", "pathwise")
_SOFT_RATES = (3e-5, 1e-4, 3e-4)
_SOFT_METRICS = ("acc", "pass@1", "pass@32", "latent_steps", "answer_tokens")
_SOFT_START = {"stages": ("rl", "evaluate"), "init": "{after}/checkpoints/imitate"}
_LATENT_GRPO = {"stages": ("evaluate",), "init": "{after}/checkpoints/grpo"}

# --- The arena: every reasoner on both backbones, and what each objective makes of it (configs/arena.py).

_ARENA = "configs/arena.py"
_CONTROLS = ("imitate", "imitate_control", "reference")
_TRAINED = ("reference", "slpo", "exact", "pathwise", "grpo", "latent_grpo")
_ARENA_RATES = (3e-5, 1e-4, 3e-4)

TABLES = {
    # What the quick start shows, over six seeds, beside no latents and chain of thought with the same demonstrations
    # and rewards; and which learning rates its objectives and further imitation have, on validation alone.
    "quickstart": Table(
        tuple(Run(name, f"{_QUICKSTART}:{cell}") for name, cell in _QUICK_CELLS.items()),
        ("imitate_no_thought", "imitate", "imitate_control", *_QUICK_OBJECTIVES),
        ("imitate_no_thought", "imitate", "imitate_control", "keys", "answer_only"), (0, 1, 2, 3, 4, 5),
        (*_AVERAGES, "latent_steps", "answer_tokens"), folder="quickstart_seeds",
        across=(("no_latents", "answer_only"), ("cot", "grpo")),
    ),
    "words_few": Table(
        (
            # Problems have one to three steps. Without a gate all think three latents, in imitation too.
            Run("simcot", _QUICKSTART, _WORD_DEMOS | _THREE_LATENTS, rows=("imitate", "imitate_control")),
            Run("rewards", f"{_QUICKSTART}:all", _WORD_REWARDS | _THREE_LATENTS, "simcot", _QUICK_OBJECTIVES[:-1]),
            Run("no_latents", f"{_QUICKSTART}:no_latents", _WORD_DEMOS, rows=("imitate",)),
            Run("no_latents_rewards", f"{_QUICKSTART}:no_latents", _WORD_REWARDS, "no_latents", ("answer_only",)),
            Run("cot", f"{_QUICKSTART}:cot", _WORD_DEMOS | _WRITTEN, rows=("imitate",)),
        ),
        ("imitate", "imitate_control", *_QUICK_OBJECTIVES[:-1]), ("imitate", "imitate_control", "keys", "answer_only"),
        metrics=(*_AVERAGES, "sequential_steps"), across=(("no_latents_rewards", "answer_only"),),
    ),
    "graph": Table(
        (Run("main", "configs/graph.py"),),
        ("imitate_no_thought", "imitate", "imitate_control", "cold_start", "slpo", "pathwise"),
        ("imitate_no_thought", "imitate", "imitate_control", "cold_start"),
        metrics=(*_AVERAGES, "latent_steps"), by_set=("acc", "pass@16", "latent_steps"),
    ),
    "quickstart_rates": Table(
        (
            *(Run(name, f"{_QUICKSTART}:{cell},tune") for name, cell in _QUICK_CELLS.items()),
            *(Run(variant_name("further", rate), f"{_QUICKSTART}:tune",
                  _FURTHER | {"imitate.control_rate": rate}, rows=("imitate_control",))
              for rate in _QUICK_RATES),
        ),
        ("imitate_control", *_variant_names(_QUICK_OBJECTIVES, _QUICK_RATES)), ("imitate",),
        (100,),
    ),
    # Reasoners of the quick start by their demonstrations, for `benchmarks.gradients`.
    "gradients_chains": Table(
        tuple(
            Run(f"{name}_{demos}", _QUICKSTART,
                _IMITATED | {"imitate.recipe": recipe, "data.chain.demos_size": demos})
            for name, recipe in (("simcot", "simcot"), ("coconut", "curriculum")) for demos in (300, 600, 2000)
        ),
        ("imitate",), (), metrics=("acc",),
    ),
    "countdown": Table(
        (
            *(Run(cell, f"{_COUNTDOWN}:{cell}")
              for cell in (*(f"{each}_gpt2" for each in ("coconut", "codi", "no_thought", "cot_sft")),
                           "coconut_llama", "codi_llama")),
            # Without latents an objective of dropout's noise too, which GRPO has none of.
            Run("no_thought_gpt2_noisy", f"{_COUNTDOWN}:no_thought_gpt2",
                {"stages": ("rl", "evaluate"), "init": "{after}/checkpoints/imitate", "dropout.rate": 0.1,
                 "rl.objectives": ("answer_only",)}, "no_thought_gpt2", ("answer_only",)),
        ),
        ("imitate", "imitate_control", "keys", *_REWARDED), ("imitate", "imitate_control", "keys", "answer_only"),
    ),
    # What `slpo train countdown` shows, over three seeds: PKPO with and without the term for the latents.
    "countdown_pkpo": Table(
        (Run("coconut_llama", _COUNTDOWN, {"cpu_devices": 1}),),
        ("imitate", "imitate_control", "keys", "answer_only", "answer_only_pkpo", "slpo", "slpo_pkpo"),
        ("imitate", "imitate_control", "keys", "answer_only", "answer_only_pkpo"),
    ),
    "countdown_rates": Table(
        tuple(Run(name, f"{_COUNTDOWN}:{name},tune")
              for name in ("coconut_gpt2", "coconut_llama", "no_thought_gpt2", "cot_sft_gpt2")),
        _variant_names(("keys", *_REWARDED), _COUNTDOWN_RATES), ("imitate",), (100,),
    ),
    # Rewards for more numbers than demonstrations have.
    "countdown_beyond": Table(
        (Run("coconut_gpt2", f"{_COUNTDOWN}:coconut_gpt2,beyond"),),
        ("imitate", "imitate_control", "keys", *_REWARDED[:-1]), ("imitate_control", "keys"), (0, 1, 2),
        ("acc", "pass@8"), ("acc",),
    ),
    # What latents are worth on chains, whether the gate stops in time, and what an answer costs.
    "depth": Table(
        tuple(Run(cell, f"{_DEPTH}:{cell}") for cell in ("none", "simcot", "cot", "coconut")),
        ("imitate", "imitate_by_steps"), (), (0, 1, 2, 3, 4, 17),
        ("acc", "latent_steps", "sequential_steps", "milliseconds"), ("acc", "latent_steps", "sequential_steps"),
    ),
    # More operations than five, demonstrated or only asked for.
    "depth_beyond": Table(
        (
            Run("seven", f"{_DEPTH}:simcot", _SEVEN),
            Run("llama", f"{_DEPTH}:simcot", {"reasoner": "coconut_llama", "max_latents": 8} | _ASKED_SEVEN),
        ),
        ("imitate", "imitate_by_steps"), (), (0,),
        ("acc", "latent_steps", "sequential_steps"), ("acc", "latent_steps"),
    ),
    # Which reasoners learn chains in as many minutes?
    "chains": Table(
        tuple(Run(name, f"{_CHAINS}:{name}") for name in _ON_CHAINS),
        ("imitate",), (), (0, 1, 2),
        ("acc", "latent_steps", "sequential_steps"), ("acc", "latent_steps"),
    ),
    # Do rewards shorten thoughts that are longer than needed, and what do right answers alone do?
    "price": Table(
        (
            Run("priced", _PRICE),
            Run("unpriced", f"{_PRICE}:right", _RL, "priced"),
        ),
        ("cold_start", "slpo"), ("cold_start",),
        metrics=("acc", "pass@1", "pass@8", "latent_steps"), by_set=("acc", "latent_steps"),
    ),
    # Does SLPO beat the cold gate and further imitation, and what of it is needed?
    "ablations": Table(
        (
            Run("main", _ARITHMETIC),
            *(Run(name, _ARITHMETIC, _RL | changes, "main") for name, changes in _ABLATIONS.items()),
            Run("no_imitation_dropout", _ARITHMETIC, _NO_DROPOUT, "main"),
        ),
    ),
    # The paper's tables 1 and 2: every objective and control in each of the twelve settings, in as many steps; the
    # same in as many seconds; and at learning rates that fall to 0, with seeds that nothing was chosen with.
    "table1": Table(
        _on(_REASONERS, lambda _: ()),
        ("imitate", "imitate_fixed_tmax", "imitate_control", "cold_start", *_OBJECTIVES), _BASELINES,
        metrics=(*_AVERAGES, "latent_steps", "distinct_answers"),
    ),
    "table1_seconds": Table(_on(_REASONERS, _in_equal_seconds), ("slpo_mean", *_SECONDS), _BASELINES, folder="table1"),
    # LatentRM and selectors without training, on a small reasoner of word problems with its trained gate.
    "selectors": Table(
        (
            Run("start", _ARITHMETIC, _JUDGED | _SHORT),
            Run("selectors", _ARITHMETIC, _SELECTED, "start", alone=True),
        ),
        ("checkpoint",), (), samples=(4, 16, 64),
    ),
    "table1_falling": Table(
        tuple(
            # Rates of its own were chosen when the table of the others had been seen.
            Run(name, f"{_TWELVE}:{name},falling", seeds=(6, 7, 8) if name == "codi_llama" else ())
            for name in _REASONERS
        ),
        _FALLING, ("cold_start", "imitate_control", "reference_falling"), seeds=(3, 4, 5),
    ),
    "table1_rates": Table(
        _on(_REASONERS, lambda _: (), ",tune"),
        _variant_names(_OBJECTIVES, _RATES), ("cold_start",), seeds=(100,),
    ),
    # Table 2's rows of explicit text: written steps, none, and steps that are left out token by token.
    "table2": Table(
        (Run("cot_sft", _TWELVE, _TEXT | _COT), Run("no_thought", _TWELVE, _TEXT), Run("icot", _TWELVE, _TEXT | _ICOT)),
        ("imitate",), (), metrics=(*_AVERAGES, "answer_tokens"), folder="table1",
    ),
    # Tables 3 and 4: each method beside chain of thought, which may come after soft tokens too.
    "table4": Table(
        (
            Run("cot", f"{_SOFT}:cot", rows=("imitate", "imitate_fixed_tmax")),
            *(Run(name, f"{_SOFT}:{name}", _SOFT_START, "cot", (name,)) for name in _METHODS),
            Run("grpo_latent", f"{_SOFT}:cot", _LATENT_GRPO, "grpo", ("checkpoint",)),
        ),
        ("imitate", "imitate_fixed_tmax", *_METHODS, "checkpoint"), ("imitate",), metrics=_SOFT_METRICS,
    ),
    "table4_rates": Table(
        (
            Run("cot", f"{_SOFT}:cot,tune"),
            *(Run(name, f"{_SOFT}:{name},tune", _SOFT_START, "cot") for name in _METHODS),
        ),
        _variant_names(_METHODS, _SOFT_RATES), ("imitate",), (100,),
        ("pass@1", "pass@32"),
    ),
    # Which reasoners think at all, and does a reward improve them? Imitation's rate is chosen for each of them, on one
    # backbone; the objectives' for all, on two of them.
    **{
        name: Table(
            tuple(Run(f"{each}_{on}", f"{_ARENA}:{each}_{on}", group=each) for each in CONTENDERS),
            (*_CONTROLS, *_TRAINED[1:]), _CONTROLS, metrics=(*_AVERAGES, "latent_steps"), by_set=("acc", "pass@16"),
            beside="no_thought",
        )
        for name, on in (("arena", "gpt2"), ("arena_llama", "llama"))
    },
    "arena_imitation": Table(
        tuple(
            Run(variant_name(each, rate), f"{_ARENA}:{each}_gpt2,tune",
                _IMITATED | {"imitate.optimizer.learning_rate": rate})
            for each in CONTENDERS for rate in (1e-3, 2e-3) if each != "latent_grpo"  # begins as Latent-SFT
        ),
        ("imitate",), (), (100,), ("acc",),
    ),
    # What was not learned in two minutes, in six: of the first two the first seeds, of the others the one that was not.
    "arena_longer": Table(
        tuple(
            Run(f"{each}_gpt2", f"{_ARENA}:{each}_gpt2,longer", seeds=seeds)
            for each, seeds in (("codi", (0, 1)), ("latent_sft", (0,)), ("dart", (1,)), ("colar", (1,)))
        ),
        ("imitate",), (), metrics=("acc",), by_set=("acc",),
    ),
    "arena_rates": Table(
        tuple(Run(name, f"{_ARENA}:{name},tune") for name in ("coconut_gpt2", "latent_grpo_gpt2")),
        _variant_names(_TRAINED, _ARENA_RATES), ("imitate",), (100,),
    ),
    # Figures 3 and 8: K and G. Figure 4, which is table 6: RLOO or GRPO. Figure 7: r of latents with difficulty.
    "figure3": Table(
        _on(
            _GPT2,
            lambda reasoner: [
                _again(f"{reasoner}_K{K}_G{G}", reasoner, "slpo_mean", {"objective.slpo_mean.passes": K, "rl.group": G})
                for K, G in _K_AND_G
            ],
        ),
        ("slpo_mean",), ("cold_start",), metrics=("pass@1", "pass@2", "pass@8", "pass@16"), folder="table1",
    ),
    "figure4": Table(
        _on(
            _GPT2,
            lambda reasoner: [
                _again(f"{reasoner}_grpo", reasoner, "slpo_mean", {"objective.slpo_mean.advantage": "grpo"})
            ],
        ),
        ("slpo_mean",), ("cold_start",), metrics=("pass@1", "pass@8", "pass@16"), folder="table1",
    ),
    "figure7": Table(
        _on(_GPT2, _by_difficulty), ("checkpoint",), (), folder="table1",
        metrics=("acc", "pass@1", "latent_steps", "pearson_difficulty_r"),
    ),
}  # fmt: skip
"""By the name that `launch/reproduce.py` is given: as in the paper, where it has one."""

"""Tables 1 and 2 of the paper in small. twelve:REASONER.

Twelve settings: {COCONUT, CODI} x {GPT-2, Llama}, each on three held-out sets. `slpo train twelve:REASONER` trains a
reasoner from nothing on problems with numbers to 99 and up to four steps, and then every objective that is compared,
each from the same cold start. With `REASONER,tune` it trains each of them at every rate of `RATES` instead and
evaluates on the validation problems alone: `CHOSEN` comes from there (`launch/reproduce.py table1_rates`). With
`REASONER,falling` it trains `FALLING`, objectives alone and one after the other at learning rates that fall to 0, in
about as many seconds as SLPO's 600 steps take.
"""

from slpo_jax.architectures import architecture_of
from slpo_jax.config import default_config, objective_variant, variant_name
from slpo_jax.errors import UserError

RATES = (1e-5, 3e-5, 1e-4)
# By name: the objective and its settings. What comes first is a baseline of what comes after.
COMPARED = {
    "reference": (
        "pathwise",
        {"estimator": "mixture", "mixture_weight": 0.0},
    ),  # a control: no reward, no Pass@k
    "slpo_sum": ("slpo", {"latent_reduction": "sum"}),  # as printed
    "slpo_mean": ("slpo", {"latent_reduction": "mean"}),
    "slpo_pkpo": ("slpo", {"latent_reduction": "mean", "advantage": "pkpo"}),
    "answer_only": ("answer_only", {}),
    "reward": ("pathwise", {"estimator": "reward", "temperature": 1.0}),
    "pass_at_k": ("pathwise", {"estimator": "pass_at_k"}),
    "mixture": ("pathwise", {"estimator": "mixture", "mixture_weight": 0.5}),
}
_FALLS = {"schedule": "linear"}  # the learning rate, to 0
# By name: the objective that it comes after, steps, the row of `COMPARED` whose learning rate it has, and settings of
# its own.
FALLING = {
    "reference_falling": ("", 900, "reference", _FALLS),
    "slpo_mean_falling": ("", 600, "slpo_mean", _FALLS),
    "pass_at_8_falling": ("", 800, "pass_at_k", _FALLS),
    "first": ("", 300, "pass_at_k", {}),
    "then_answer_only": ("first", 1500, "answer_only", {}),
    "then_answer_only_falling": ("first", 1500, "answer_only", _FALLS),
}
# Learning rate by reasoner and objective.
CHOSEN = {
    "coconut_gpt2": {
        "reference": 1e-4, "slpo_sum": 1e-5, "slpo_mean": 3e-5, "slpo_pkpo": 1e-5, "answer_only": 3e-5, "reward": 1e-5,
        "pass_at_k": 1e-4, "mixture": 1e-4,
    },
    "codi_gpt2": {
        "reference": 1e-4, "slpo_sum": 3e-5, "slpo_mean": 3e-5, "slpo_pkpo": 1e-5, "answer_only": 1e-5, "reward": 1e-5,
        "pass_at_k": 3e-5, "mixture": 3e-5,
    },
    "codi_llama": {
        "reference": 1e-5, "slpo_sum": 1e-5, "slpo_mean": 1e-5, "slpo_pkpo": 1e-5, "answer_only": 3e-5, "reward": 3e-5,
        "pass_at_k": 3e-5, "mixture": 3e-5,
    },
    "coconut_llama": {
        "reference": 1e-5, "slpo_sum": 1e-5, "slpo_mean": 3e-5, "slpo_pkpo": 1e-5, "answer_only": 1e-5, "reward": 1e-5,
        "pass_at_k": 1e-5, "mixture": 1e-5,
    },
}  # fmt: skip

# The same at a falling rate, chosen on 4,000 validation problems and two seeds; else that of `CHOSEN`.
CHOSEN_FALLING = {
    "codi_llama": {
        "reference_falling": 1e-4, "slpo_mean_falling": 1e-4, "pass_at_8_falling": 1e-4,
        "then_answer_only_falling": 3e-5,
    },
}  # fmt: skip


def get_config(cell: str = "coconut_gpt2"):
    reasoner, _, kind = cell.partition(",")
    if kind not in ("", "tune", "falling"):
        raise UserError(
            f"configs/twelve.py:{cell}: {kind} is no variant; give REASONER, REASONER,tune or ..,falling"
        )
    tune = kind == "tune"
    config = default_config()
    config.reasoner = reasoner
    config.tokenizer = "synthetic:99"
    config.model.update(n_layer=2, n_head=2, n_embd=32, n_positions=128)
    config.max_latents = 6
    config.min_latents = 1
    config.prompt_slots = (28,)
    config.max_answer_tokens = 3
    config.data.synthetic.update(
        max_value=99, max_steps=4, train_size=100_000
    )  # few are seen often
    config.data.train = "synthetic:train"
    config.data.valid = "synthetic:valid"

    config.imitate.update(
        batch_size=64, c_thought=1, max_latent_stage=4, cot_steps=1500, stage_steps=500, final_steps=12_000,
        final_latents="random", dropout=0.1, control=not tune,
    )  # fmt: skip
    config.imitate.optimizer.update(
        learning_rate=2e-3, warmup_steps=100, schedule="linear", final_fraction=0.02
    )
    if architecture_of(reasoner).default_recipe == "distil":
        config.max_answer_tokens = 7
        # Not "published": with 4 latents for all it had 48 % at 4 and 8 % at 6, and the gate chooses among them.
        config.imitate.distil.distil_factor = 1.0
    config.cold_start.update(
        batch_size=32, micro_batches=1, steps=400, evaluate_every=100, patience=4
    )
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-3)
    config.rl.update(batch_size=32, steps=600, capacities=((0.625, 1.0), (1.0, 1.0)))
    config.rl.optimizer.update(name="adamw", learning_rate=1e-4, warmup_steps=20)
    config.evaluate.update(batch_size=1024, prompt_multiple=28, seeds=1)
    config.log_every = 20
    config.checkpoint_every = 1000

    config.rl.objectives = tuple(
        _falling(config) if kind == "falling" else _objectives(config, tune)
    )
    if tune:
        config.data.eval.valid = "synthetic:valid"
        config.data.synthetic.valid_size = 500
    else:
        config.data.eval.same = "synthetic:test"
        config.data.eval.large = "synthetic:large"
        config.data.eval.template = "synthetic:template"
    return config


def _objectives(config, tune: bool) -> list[str]:
    """The names of those that a cell trains, with their settings in the config."""
    names = []
    chosen = CHOSEN.get(config.reasoner, {})
    for name, (objective, settings) in COMPARED.items():
        for rate in RATES if tune else (chosen.get(name, 3e-5),):
            names.append(variant_name(name, rate) if tune else name)
            objective_variant(
                config, names[-1], objective, learning_rate=rate, **settings
            )
    return names


def _falling(config) -> list[str]:
    """The names in `FALLING`, with their settings in the config."""
    chosen = CHOSEN.get(config.reasoner, {}) | CHOSEN_FALLING.get(config.reasoner, {})
    for name, (after, steps, row, settings) in FALLING.items():
        objective, own = COMPARED[row]
        rate = chosen.get(name, chosen.get(row, 3e-5))
        own = own | settings | {"after": after, "steps": steps, "learning_rate": rate}
        objective_variant(config, name, objective, **own)
    return list(FALLING)

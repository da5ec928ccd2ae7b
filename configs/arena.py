"""One cell of the arena: a reasoner on a small GPT-2 or Llama, and what rewards make of it.

`--config=configs/arena.py:REASONER_BACKBONE`, e.g. `simcot_codi_llama`, trains it from nothing on generated word
problems, in as many steps as every other, and then each objective that applies to it, from where imitation ended: a
control without rewards, SLPO, Pass@k by replay, and its own where it has one. There is no gate: all latent reasoners
think `LATENTS` latents, but those that stop themselves.

With `REASONER_BACKBONE,tune` it trains each of them at every rate of `TRIED` and evaluates on the validation problems
alone: `RATES`, the same for all reasoners, comes from there (`launch/reproduce.py arena_rates`).
"""

from _presets import LATENT_GRPO, LATENT_SFT_MIXTURE, colar_thought

from slpo_jax.config import default_config
from slpo_jax.config.presets import objective_variant, tried
from slpo_jax.errors import UserError

LATENTS = 3  # no problem has more steps
STEPS, RL_STEPS = 2000, 120
TRIED = (3e-5, 1e-4, 3e-4)
RATES = {"reference": 1e-4, "slpo": 1e-4, "exact": 1e-4, "pathwise": 1e-4, "grpo": 3e-5, "latent_grpo": 3e-5}
_COCONUT = {"c_thought": 1, "max_latent_stage": LATENTS, "cot_steps": 300, "stage_steps": 150}
_CODI = {"c_thought": 1, "max_latent_stage": LATENTS, "cot_steps": 0}
_SIMCOT = {"recipe": "simcot"}
_COLAR = {"c_thought": 1, "cot_steps": 500, "stage_steps": 0}
_LATENT_SFT = {"recipe": "latent_sft", "c_thought": 0, "max_latent_stage": 0, "cot_steps": 450, "stage_steps": 150}
_WORDS = {"c_thought": 0, "max_latent_stage": 0}
# By name: the architecture, keys of config.imitate, and tokens of an answer. CoLaR's and Latent-SFT's latents are of
# five tokens, so that four are enough; Latent-GRPO is Latent-SFT with the noise and the objective that are its own.
REASONERS = {
    "coconut": ("coconut", _COCONUT, 3),
    "simcot_coconut": ("coconut", _COCONUT | _SIMCOT, 3),
    "codi": ("codi", _CODI, 7),
    "simcot_codi": ("codi", _CODI | _SIMCOT, 7),
    "colar": ("colar", _COLAR | {"recipe": "colar", "max_latent_stage": 4}, 4),
    "regular": ("colar", _COLAR | {"recipe": "regular", "max_latent_stage": LATENTS}, 4),
    "dart": ("dart", _CODI, 7),
    "latent_sft": ("text", _LATENT_SFT, 4),
    "latent_grpo": ("text", _LATENT_SFT, 4),
    "cot_sft": ("coconut", _WORDS | {"cot_steps": STEPS}, 24),
    "icot": ("coconut", _WORDS | {"cot_steps": 0, "recipe": "icot"}, 24),
    "no_thought": ("coconut", _COCONUT | {"c_thought": 0}, 3),
}
OBJECTIVES = {
    "reference": ("pathwise", {"estimator": "mixture", "mixture_weight": 0.0}),
    "slpo": ("slpo", {"latent_reduction": "mean"}),
    "exact": ("exact", {}),
    "pathwise": ("pathwise", {}),
    "grpo": ("grpo", {"temperature": 1.0, "reduction": "sequence_mean"}),
    "latent_grpo": ("grpo", LATENT_GRPO | {"temperature": 0.6}),
}


def get_config(cell: str = "coconut_gpt2"):
    cell, _, tune = cell.partition(",")
    name, _, backbone = cell.rpartition("_")
    if name not in REASONERS or backbone not in ("gpt2", "llama") or tune not in ("", "tune"):
        known = ", ".join(REASONERS)
        raise UserError(f"configs/arena.py:{cell}: no such cell; give one of {known}, then _gpt2 or _llama [,tune]")
    architecture, imitate, answer_tokens = REASONERS[name]
    config = default_config()
    config.reasoner = f"{architecture}_{backbone}"
    config.tokenizer = "synthetic:30"
    config.model.update(n_layer=2, n_head=2, n_embd=32, n_positions=64)
    config.gate.enabled = False
    config.min_latents = 1
    config.max_latents = imitate["c_thought"] * imitate["max_latent_stage"]
    config.prompt_slots = (24,)
    config.max_answer_tokens = answer_tokens
    config.data.train = "synthetic:train"
    config.data.valid = "synthetic:valid"
    if tune:
        config.data.eval.valid = "synthetic:valid"
    else:
        config.data.eval.same = "synthetic:test"
        config.data.eval.large = "synthetic:large"
        config.data.eval.template = "synthetic:template"

    stages = 3 if architecture == "text" else imitate["max_latent_stage"]
    before = imitate["cot_steps"] + stages * imitate.get("stage_steps", 0)
    config.imitate.update(batch_size=64, dropout=0.1, final_latents="published", final_steps=STEPS - before, **imitate)
    config.imitate.optimizer.update(learning_rate=2e-3, warmup_steps=100, schedule="linear", final_fraction=0.05)
    config.imitate.distil.distil_factor = 1.0
    config.imitate.icot.tokens_per_epoch = 5
    if imitate.get("recipe") == "icot":  # which begins its optimizer anew every 94 steps
        config.imitate.optimizer.warmup_steps = 20
    config.stages = ("imitate", "rl", "evaluate")
    config.rl.update(batch_size=32, steps=RL_STEPS, capacities=((1.0, 1.0),))  # hardly a slot is spare
    config.rl.optimizer.update(name="adamw", learning_rate=1e-4, warmup_steps=20)
    if architecture == "colar":
        colar_thought(config, config.max_latents)
        config.model.update(n_positions=80, scale=0.2)  # near the standard deviation of its embeddings
        config.update(prompt_slots=(40,))
        config.prompt.speed = 5 if name == "colar" else 1
        config.rl.temperature = 0.0  # of all objectives but GRPO
    if architecture == "text":
        _mixtures(config, "gumbel_top_k" if name == "latent_grpo" else "soft")
    config.evaluate.update(batch_size=1024, prompt_multiple=24, samples=16, seeds=1, limit=300, probed=0)
    config.log_every = 20
    config.checkpoint_every = 10_000

    objectives: tuple[str, ...] = ("reference", "slpo", "pathwise")
    if name == "latent_grpo":
        objectives = ("reference", "latent_grpo")
    elif architecture == "colar":
        objectives = ("reference", "exact", "pathwise", "grpo")  # the likelihood that SLPO estimates is known
    elif not config.max_latents:
        objectives = ("grpo",)
        config.imitate.control = not tune  # in words there is no other control
    if {"grpo", "latent_grpo"} & {*objectives}:  # whose ratios are of one policy; Pass@k is under dropout as of all
        config.dropout.rate, config.evaluate.dropout = 0.0, 0.1
    config.rl.objectives = ()
    for objective in objectives:
        base, settings = OBJECTIVES[objective]
        for rate in TRIED if tune else (RATES[objective],):
            named = tried(objective, rate) if tune else objective
            objective_variant(config, named, base, learning_rate=rate, **settings)
            config.rl.objectives = (*config.rl.objectives, named)
    return config


def _mixtures(config, latent_policy: str) -> None:
    """Latent-SFT's prompt, and mixtures of tokens as latents."""
    config.max_latents = 4
    config.model.n_positions = 80
    config.prompt.update(format="{question}\n<think>", closing="</think>")
    config.latent_policy.name = latent_policy
    config.latent_policy.soft.update(LATENT_SFT_MIXTURE)
    config.imitate.latent_sft.ratio = 5

"""Graphs: one of twelve reasoners, then rewards. arena:REASONER_BACKBONE.

`slpo train arena:REASONER_BACKBONE`, e.g. `simcot_codi_llama`, trains a small GPT-2 or Llama from nothing on the graphs
of `configs/graph.py`, whose depth decides, and then each objective that applies to it, from where imitation ended: a
control without rewards, SLPO, pathwise, and its own where it has one. A stage of imitation ends when it is
learned, or at its most steps; these add up to about two minutes of one core. There is no gate: all latent reasoners
think `DEPTH` latents, but those that stop themselves.

With `REASONER_BACKBONE,tune` it evaluates on the validation problems alone, and trains each objective at every rate of
`TRIED`; with `,longer` it imitates alone, in three times the steps. Imitation's rate is the better of 1e-3 and 2e-3 for
each reasoner (`launch/reproduce.py arena_imitation`), an objective's is the same for all (`launch/reproduce.py
arena_rates`).
"""

from _presets import LATENT_GRPO, colar_thought
from _soft import LATENT_SFT_MIXTURE
from slpo_jax.config import default_config, objective_variant, variant_name
from slpo_jax.errors import UserError

DEPTH = 2  # edges to follow in training, one or two; and the latents that all think
RL_STEPS = 120
TRIED = (3e-5, 1e-4, 3e-4)
RATES = {
    "reference": 1e-4,
    "slpo": 1e-4,
    "exact": 1e-4,
    "pathwise": 1e-4,
    "grpo": 3e-5,
    "latent_grpo": 1e-4,
}
_COCONUT = {"c_thought": 1, "max_latent_stage": DEPTH}
_LATENT_SFT = {"recipe": "latent_sft", "c_thought": 0, "max_latent_stage": 0}
_WORDS = {"c_thought": 0, "max_latent_stage": 0}
# By name: the architecture; keys of config.imitate; steps in two minutes; how they are shared among the words, the
# stages and the last; tokens of an answer; imitation's rate. A step of a problem is a node and a line break, and so a
# latent of CoLaR's and Latent-SFT's. Latent-GRPO is Latent-SFT with the noise and the objective that are its own.
REASONERS = {
    "coconut": ("coconut", _COCONUT, 2600, (7, 1, 1), 3, 2e-3),
    "simcot_coconut": (
        "coconut",
        _COCONUT | {"recipe": "simcot"},
        2000,
        (7, 1, 1),
        3,
        2e-3,
    ),
    "codi": ("codi", _COCONUT, 1450, (0, 0, 1), 7, 1e-3),
    "simcot_codi": ("codi", _COCONUT | {"recipe": "simcot"}, 1300, (0, 0, 1), 7, 2e-3),
    "colar": ("colar", _COCONUT | {"recipe": "colar"}, 1850, (1, 0, 1), 4, 2e-3),
    "regular": ("colar", _COCONUT | {"recipe": "regular"}, 1900, (1, 0, 1), 4, 2e-3),
    "dart": ("dart", _COCONUT, 1450, (0, 0, 1), 7, 1e-3),
    "latent_sft": ("text", _LATENT_SFT, 1850, (6, 1, 1), 4, 2e-3),
    "latent_grpo": ("text", _LATENT_SFT, 1850, (6, 1, 1), 4, 2e-3),
    "cot_sft": ("coconut", _WORDS, 2500, (1, 0, 0), 12, 1e-3),
    "icot": ("coconut", _WORDS | {"recipe": "icot"}, 2600, (1, 0, 1), 12, 2e-3),
    "no_thought": ("coconut", _COCONUT | {"c_thought": 0}, 2800, (7, 1, 1), 3, 2e-3),
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
    cell, _, more = cell.partition(",")
    tune = more == "tune"
    name, _, backbone = cell.rpartition("_")
    if (
        name not in REASONERS
        or backbone not in ("gpt2", "llama")
        or more not in ("", "tune", "longer")
    ):
        known = ", ".join(REASONERS)
        raise UserError(
            f"configs/arena.py:{cell}: no such cell; give one of {known}, then _gpt2 or _llama [,tune|,longer]"
        )
    architecture, imitate, *_, answer_tokens, _ = REASONERS[name]
    config = default_config()
    config.reasoner = f"{architecture}_{backbone}"
    config.tokenizer = "graph:8"
    config.model.update(n_layer=2, n_head=8, n_embd=64, n_positions=64)
    config.gate.enabled = False
    config.min_latents = 1
    config.max_latents = imitate["c_thought"] * imitate["max_latent_stage"]
    config.prompt.answers = "texts"
    config.prompt_slots = (24,)
    config.max_answer_tokens = answer_tokens
    config.data.graph.update(depth=DEPTH, nodes=8)
    config.data.train = "graph:train"
    config.data.valid = "graph:valid"
    if tune:
        config.data.eval.valid = "graph:valid"
    else:
        for depth in range(
            1, DEPTH + 2
        ):  # the last is one deeper than any that is trained on
            config.data.eval[f"depth_{depth}"] = f"graph:{depth}"
    config.stages = (
        ("imitate", "evaluate") if more == "longer" else ("imitate", "rl", "evaluate")
    )
    _imitation(config, name, 3 if more == "longer" else 1)
    if architecture == "colar":
        colar_thought(config, config.max_latents)
        config.model.update(scale=0.2)  # near the standard deviation of its embeddings
        config.prompt.speed = 2 if name == "colar" else 1
    if architecture == "text":
        _mixtures(config, "gumbel_top_k" if name == "latent_grpo" else "soft")
    _objectives(config, name, tune)
    config.evaluate.update(
        batch_size=1024, prompt_multiple=8, samples=16, seeds=1, limit=300, probed=0
    )
    config.log_every = 50
    config.checkpoint_every = 10_000
    return config


def _imitation(config, name: str, times: int) -> None:
    architecture, imitate, steps, (words, stage, last), _, rate = REASONERS[name]
    share = (
        times
        * steps
        // (
            words
            + stage * (3 if architecture == "text" else imitate["max_latent_stage"])
            + last
        )
    )
    # Others say themselves when a phase ends, or judge answers after the true thoughts alone.
    learnable = imitate.get("recipe", "simcot") == "simcot"
    config.imitate.update(
        batch_size=128, final_latents="published", cot_steps=words * share, stage_steps=stage * share,
        final_steps=last * share, stage_until=0.98 * learnable, **imitate,
    )  # fmt: skip
    config.imitate.optimizer.update(
        learning_rate=rate, warmup_steps=100, schedule="constant"
    )
    config.imitate.distil.distil_factor = 1.0
    config.imitate.icot.tokens_per_epoch = 4


def _objectives(config, name: str, tune: bool) -> None:
    """Those that apply to the reasoner, at every rate that is tried or at its own."""
    objectives: tuple[str, ...] = ("reference", "slpo", "pathwise")
    if name == "latent_grpo":
        objectives = ("reference", "latent_grpo")
    elif config.latent_policy.name == "colar":
        objectives = (
            "reference",
            "exact",
            "pathwise",
            "grpo",
        )  # the likelihood that SLPO estimates is known
    elif not config.max_latents:
        objectives = ("grpo",)
        config.imitate.control = not tune  # in words there is no other control
    if {"grpo", "latent_grpo"} & {
        *objectives
    }:  # whose ratios are of one policy; Pass@k is under dropout as of all
        config.dropout.rate = 0.0
        config.evaluate.dropout = 0.1
    # Hardly a slot is spare. Answers are greedy, but GRPO's.
    config.rl.update(
        batch_size=32,
        steps=RL_STEPS,
        capacities=((1.0, 1.0),),
        temperature=0.0,
        objectives=(),
    )
    config.rl.optimizer.update(name="adamw", learning_rate=1e-4, warmup_steps=20)
    for objective in objectives:
        base, settings = OBJECTIVES[objective]
        for rate in TRIED if tune else (RATES[objective],):
            named = variant_name(objective, rate) if tune else objective
            objective_variant(config, named, base, learning_rate=rate, **settings)
            config.rl.objectives = (*config.rl.objectives, named)


def _mixtures(config, latent_policy: str) -> None:
    """Latent-SFT's prompt, and mixtures of tokens as latents."""
    config.max_latents = DEPTH + 1
    config.prompt.update(format="{question}\n<think>", closing="</think>")
    config.latent_policy.name = latent_policy
    config.latent_policy.soft.update(LATENT_SFT_MIXTURE)
    config.imitate.latent_sft.ratio = 2

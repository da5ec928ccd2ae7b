"""Soft tokens in minutes, on a tiny Llama. soft_quickstart:METHOD.

It learns to write its steps, and goes on with one of the methods below. Half of the solutions that it learns from are
the answer alone, so that it answers at once as often as it writes its steps, and is right less often then: what
reinforcement learning has to find out.

`slpo train soft_quickstart:METHOD` trains it from nothing on these solutions, and then with METHOD, four soft tokens
before the words (`grpo`: words alone; `hrpo`: every word up to the answer's mark is a soft token as well; `cot`: no
reinforcement learning). `latent_sft` is imitation of another kind, whose thoughts end by themselves, and `latent_grpo`
goes on from it. Every other method has the same start, batches and rollouts; with `METHOD,tune` it is trained at every
rate of `RATES` and evaluated on the validation problems alone: `CHOSEN` comes from there (`launch/reproduce.py
table4_rates`).
"""

from _presets import LATENT_GRPO, SOFT_GRPO, SOFT_GRPO_OBJECTIVE
from _soft import LATENT_SFT_MIXTURE
from slpo_jax.config import default_config, objective_variant, variant_name
from slpo_jax.errors import UserError

SOFT_TOKENS = 4
WORDS = 24
CHUNKS = 12
RATES = (3e-5, 1e-4, 3e-4)
GATES = 20  # times the model's rate, as HRPO trains its gates
# By name: the latent policy and its settings, the noise of dropout, the objective and its settings.
METHODS = {
    "cot": ("soft", {}, 0.0, "", {}),
    "grpo": ("soft", {}, 0.0, "grpo", {"reduction": "sequence_mean"}),
    "soft_tokens": ("noisy_soft", {}, 0.0, "exact", {}),
    "lepo": (
        "gumbel",
        {},
        0.0,
        "grpo",
        {"reduction": "sequence_mean", "detach_inputs": True},
    ),
    "hrpo": (
        "hybrid",
        {},
        0.0,
        "grpo",
        {"kl_weight": 0.005, "reduction": "sequence_mean"},
    ),
    "slpo": (
        "soft",
        {"temperature": 1.0},
        0.1,
        "slpo",
        {"passes": 2, "scored_latents": 2, "advantage": "grpo"},
    ),
    "pathwise": ("gumbel", {}, 0.0, "pathwise", {"estimator": "reward"}),
    "latent_grpo": ("gumbel_top_k", {}, 0.0, "grpo", LATENT_GRPO),
    "soft_grpo": ("gumbel_top_k", SOFT_GRPO, 0.0, "grpo", SOFT_GRPO_OBJECTIVE),
    "latent_sft": ("soft", LATENT_SFT_MIXTURE, 0.0, "", {}),
}
AFTER_LATENT_SFT = ("latent_sft", "latent_grpo")
CHOSEN = {
    "grpo": 1e-4,
    "soft_tokens": 1e-4,
    "lepo": 3e-4,
    "hrpo": 3e-5,
    "slpo": 3e-5,
    "pathwise": 3e-4,
}


def _latent_sft(config):
    config.max_latents = CHUNKS
    config.prompt.update(format="{question}\n<think>", closing="</think>")
    config.max_answer_tokens = 4
    config.data.synthetic.written_share = 1.0
    config.imitate.update(
        recipe="latent_sft", cot_steps=1500, stage_steps=400, final_steps=1500
    )


def get_config(argument: str = "lepo"):
    method, _, tune = argument.partition(",")
    if method not in METHODS or tune not in ("", "tune"):
        known = ", ".join(METHODS)
        raise UserError(
            f"configs/soft_quickstart.py:{argument}: no such method; give one of {known}, or METHOD,tune"
        )
    latent_policy, of_latent_policy, dropout, kind, of_objective = METHODS[method]
    config = default_config()
    config.reasoner = "text_llama"
    config.tokenizer = "synthetic:12"
    config.model.update(n_layer=2, n_head=2, n_kv_head=1, n_embd=32, n_positions=96)
    config.gate.enabled = False
    config.max_latents = {"grpo": 0, "hrpo": WORDS}.get(method, SOFT_TOKENS)
    config.min_latents = 1
    config.prompt_slots = (24,)
    config.max_answer_tokens = WORDS
    config.cpu_devices = 2
    config.dropout.rate = dropout
    config.latent_policy.name = latent_policy
    config.latent_policy[latent_policy].update(of_latent_policy)
    config.data.synthetic.update(max_value=12, written_share=0.5)
    config.data.train = "synthetic:train"
    config.data.valid = "synthetic:valid"
    if tune:
        config.data.eval.valid = "synthetic:valid"
    else:
        config.data.eval.same = "synthetic:test"
        config.data.eval.large = "synthetic:large"
        config.data.eval.template = "synthetic:template"

    config.imitate.update(
        batch_size=64,
        c_thought=0,
        max_latent_stage=0,
        cot_steps=2000,
        final_steps=0,
        dropout=0.1,
    )
    config.imitate.optimizer.update(
        learning_rate=2e-3, warmup_steps=100, schedule="linear", final_fraction=0.05
    )
    config.stages = ("imitate", "rl", "evaluate") if kind else ("imitate", "evaluate")
    config.rl.update(
        batch_size=16, steps=400, temperature=1.0, capacities=((1.0, 0.75), (1.0, 1.0))
    )
    config.rl.optimizer.update(name="adamw", learning_rate=1e-4, warmup_steps=20)
    rates = (
        {variant_name(method, rate): rate for rate in RATES}
        if tune
        else {method: CHOSEN.get(method, 1e-4)}
    )
    if kind:
        for name, rate in rates.items():
            objective_variant(config, name, kind, learning_rate=rate, **of_objective)
            if method == "hrpo":
                config.objective[name].latent_policy_learning_rate = GATES * rate
        config.rl.objectives = tuple(rates)
    if method in AFTER_LATENT_SFT:
        _latent_sft(config)
    if method == "latent_grpo":
        config.rl.update(dynamic_batches=4, temperature=0.6)
    config.evaluate.update(
        batch_size=512,
        prompt_multiple=24,
        samples=32,
        seeds=1,
        limit=200,
        temperature=1.0,
    )
    config.evaluate.dropout = (
        0.0  # of every method, so that all are compared under one law
    )
    config.log_every = 20
    config.checkpoint_every = 500
    return config

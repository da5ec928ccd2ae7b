"""The main job on an embedded default: from random weights to a latent reasoner trained with rewards, on two CPU cores.

Two objectives go on from the same start: the paper's, and the one that aims at Pass@k itself.

`configs/arithmetic.py` is the same with imitation run to convergence and several seeds: what this shows in minutes is
one run of a reasoner that more imitation would still improve, and its report says so in the control's row.

`--config=configs/quickstart.py:colar` trains CoLaR instead, `:regular` ReGuLaR with a text encoder (docs/methods.md).
"""

from _presets import colar_thought

from slpo_jax.config import default_config
from slpo_jax.errors import UserError


def get_config(method: str = ""):
    config = default_config()
    config.tokenizer = "synthetic:30"
    config.model.update(n_layer=2, n_head=2, n_embd=32, n_positions=64)
    config.max_latents = 6
    config.min_latents = 1
    config.prompt_slots = (24,)
    config.max_answer_tokens = 3
    config.cpu_devices = 2
    config.data.train = "synthetic:train"
    config.data.valid = "synthetic:valid"
    config.data.eval.same = "synthetic:test"
    config.data.eval.large = "synthetic:large"
    config.data.eval.template = "synthetic:template"

    config.imitate.update(
        batch_size=64, c_thought=1, max_latent_stage=3, cot_steps=800, stage_steps=300, final_steps=4000,
        final_latents="random", dropout=0.1, control=True,
    )  # fmt: skip
    config.imitate.optimizer.update(learning_rate=2e-3, warmup_steps=100, schedule="linear", final_fraction=0.05)
    config.cold_start.update(batch_size=32, micro_batches=1, steps=300, evaluate_every=100, patience=3)
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-3)
    config.rl.update(batch_size=32, steps=400, capacities=((0.625, 1.0), (1.0, 1.0)))  # answers fill their three slots
    config.rl.objectives = ("slpo", "pathwise")
    config.objective.slpo.latent_reduction = "mean"
    config.objective.slpo.learning_rate = 3e-5  # both rates: launch/reproduce.py quickstart_rates
    config.rl.optimizer.update(name="adamw", learning_rate=1e-4, warmup_steps=20)
    config.evaluate.update(batch_size=1024, prompt_multiple=24)
    config.log_every = 20
    config.checkpoint_every = 500
    if method:
        _colar(config, method)
    return config


def _colar(config, method: str) -> None:
    """CoLaR, or ReGuLaR with a text encoder, and its own reinforcement learning: `quickstart:METHOD`."""
    if method not in ("colar", "regular"):
        raise UserError(f"configs/quickstart.py:{method}: no such method; give one of colar, regular")
    colar_thought(config, latents=12)
    config.reasoner = "colar_gpt2"
    config.model.update(n_positions=80, scale=0.2)  # near the standard deviation of its embeddings, once trained
    config.update(prompt_slots=(40,), max_answer_tokens=4)
    config.prompt.speed = 2 if method == "colar" else 1
    config.imitate.recipe = method
    config.objective.grpo.learning_rate = 3e-5

"""Soft tokens in minutes: a tiny Llama that learns to write its steps, and goes on with one of the methods below.

`--config=configs/soft_quickstart.py:METHOD` trains it from nothing on written solutions, and then with METHOD, eight
soft tokens before the words (`grpo`: words alone). Every method has the same start, batches and advantages.
"""

from slpo_jax.config import default_config
from slpo_jax.errors import UserError

SOFT_TOKENS = 8
# By name: the thinker and its settings, the noise of dropout, the objective and its settings.
METHODS = {
    "grpo": ("soft", {}, 0.0, "answer_only", {"answer_pass": "clean"}),
    "soft_tokens": ("noisy_soft", {}, 0.0, "exact", {}),
    "lepo": ("gumbel", {}, 0.0, "exact", {}),
    "slpo": ("soft", {"temperature": 1.0}, 0.1, "slpo", {"passes": 2, "latent_reduction": "mean"}),
    "pathwise": ("gumbel", {}, 0.0, "pathwise", {"estimator": "reward"}),
}


def get_config(method: str = "lepo"):
    if method not in METHODS:
        raise UserError(f"configs/soft_quickstart.py:{method}: no such method; give one of {', '.join(METHODS)}")
    thinker, of_thinker, dropout, objective, of_objective = METHODS[method]
    config = default_config()
    config.reasoner = "text_llama"
    config.tokenizer = "synthetic:30"
    config.model.update(n_layer=2, n_head=2, n_kv_head=1, n_embd=32, n_positions=96)
    config.gate.enabled = False
    config.max_latents = 0 if method == "grpo" else SOFT_TOKENS
    config.min_latents = 1
    config.prompt_slots = (24,)
    config.max_answer_tokens = 24
    config.cpu_devices = 2
    config.dropout.rate = dropout
    config.thinker.name = thinker
    config.thinker[thinker].update(of_thinker)
    config.data.train = "synthetic:train"
    config.data.valid = "synthetic:valid"
    config.data.eval.same = "synthetic:test"
    config.data.eval.large = "synthetic:large"
    config.data.eval.template = "synthetic:template"

    config.imitate.update(batch_size=64, c_thought=0, max_latent_stage=0, cot_steps=4000, final_steps=0, dropout=0.1)
    config.imitate.optimizer.update(learning_rate=2e-3, warmup_steps=100, schedule="linear", final_fraction=0.05)
    config.stages = ("imitate", "rl", "evaluate")
    config.rl.update(batch_size=16, steps=200, temperature=1.0, capacities=((1.0, 0.75), (1.0, 1.0)))
    config.rl.objectives = (objective,)
    config.objective[objective].update(of_objective)
    config.rl.optimizer.update(name="adamw", learning_rate=1e-4, warmup_steps=20)
    config.evaluate.update(batch_size=512, prompt_multiple=24, samples=32, seeds=1, limit=100, temperature=1.0)
    config.log_every = 20
    config.checkpoint_every = 500
    return config

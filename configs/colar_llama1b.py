"""CoLaR (Tan et al., 2025) on Llama-3.2-1B-Instruct. colar_llama1b:regular: ReGuLaR.

`slpo train colar_llama1b:colar` (the default) has its CoT model, training and rewards, or `:regular` for ReGuLaR's,
with a text encoder in the place of its vision encoder (docs/methods.md). GSM8K-Aug is read from `data/`, as by
`configs/coconut_llama1b.py`. From a published file: `--config.init=epoch.ckpt --config.lora_alpha=32
--config.stages="('rl','evaluate')"`.
"""

from _presets import GSM8K_AUG, colar_imitation, colar_thought, paper
from slpo_jax.config import default_config


def get_config(recipe: str = "colar"):
    config = default_config()
    config.reasoner = "colar_llama"
    config.init = config.base = "meta-llama/Llama-3.2-1B-Instruct"
    config.model.update(remat=True, scan_layers=True, projector=2048)
    paper(config, "data", cold_start_micro_batches=8, evaluation_batch=256)
    colar_imitation(config, recipe)
    colar_thought(config, latents=64)
    config.imitate.micro_batches = 4
    # 512 questions an epoch, eight rollouts of one an update; so many that each question comes once.
    config.rl.update(
        batch_size=512, group=8, steps=-(-GSM8K_AUG // 512), top_p=0.9, top_k=50
    )
    config.objective.grpo.minibatches = 512
    config.rl.optimizer.update(
        name="adamw",
        learning_rate=1e-6,
        warmup_steps=0,
        weight_decay=0.01,
        clip_norm=32.0,
    )
    config.evaluate.update(temperature=1.0, top_p=0.9, top_k=50, samples=5)
    return config

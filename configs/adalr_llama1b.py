"""AdaLR (2511.21581) on Llama-3.2-1B-Instruct. adalr_llama1b:WHICH.

`slpo train adalr_llama1b:latent_6` (the default) has six latents a problem, `:latent_6_by_1` five and one for each
step, at most ten; then come rewards by GRPO. GSM8K-Aug is read from `data/`, as by `configs/coconut_llama1b.py`. A
published checkpoint is evaluated with `--config.stages="('evaluate',)"` and
`--config.init=Lapisbird/Llama-adaLR-model-latent-6`.
"""

from _presets import gsm8k_files
from slpo_jax.config import default_config
from slpo_jax.errors import UserError

LATENTS = {"latent_6": (6, 0), "latent_6_by_1": (5, 1)}


def get_config(which: str = "latent_6"):
    if which not in LATENTS:
        raise UserError(
            f"configs/adalr_llama1b.py:{which}: give one of {', '.join(LATENTS)}"
        )
    latents, latents_a_step = LATENTS[which]
    config = default_config()
    config.reasoner = "adalr_llama"
    config.init = config.base = "meta-llama/Llama-3.2-1B-Instruct"
    config.model.update(remat=True, scan_layers=True)
    config.stages = ("imitate", "rl", "evaluate")
    config.gate.enabled = False
    config.max_latents = 32
    config.min_latents = 1
    config.dropout.rate = 0.0
    config.latent_policy.name = "adalr"
    config.prompt_slots = (64, 128, 256)
    config.max_answer_tokens = 16
    gsm8k_files(config, "data", "train.txt")
    config.imitate.update(
        batch_size=128, micro_batches=4, max_tokens=200, c_thought=0, max_latent_stage=0, cot_steps=0,
        final_steps=30_000, suffix_slots=(128, 192),
    )  # fmt: skip
    config.imitate.adalr.update(latents=latents, latents_a_step=latents_a_step)
    config.imitate.lora.update(rank=128, alpha=32.0)
    config.imitate.optimizer.update(
        name="adamw",
        learning_rate=8e-4,
        schedule="cosine",
        warmup_steps=900,
        weight_decay=0.1,
        clip_norm=2.0,
    )
    # 16 rollouts of eight problems a step, and one update.
    config.rl.update(
        batch_size=8, group=16, steps=60_000, objectives=("grpo",), temperature=1.0
    )
    config.rl.lora.update(rank=32, alpha=32.0)
    config.rl.optimizer.update(
        name="adamw",
        learning_rate=1e-5,
        schedule="cosine",
        warmup_steps=1000,
        weight_decay=1e-3,
    )
    config.objective.grpo.update(kl_weight=1e-3)
    config.evaluate.update(samples=0, seeds=1, batch_size=256)
    return config

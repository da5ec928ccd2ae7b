"""All four stages on the real GSM8K with GPT-2's tokenizer and a small GPT-2 from random weights, for an hour of CPU.

`--config=configs/gsm8k_small.py:DIR` reads `gsm8k_train.jsonl`, `gsm_valid.json`, `gsm_test.json`, `gsm_hard.json`,
`multiarith.json` and `gpt2_tokenizer/` (vocab.json, merges.txt) from DIR; the default is `data`.
"""

from slpo_jax.config import default_config
from slpo_jax.run.presets import gsm8k_files


def get_config(folder: str = "data"):
    config = default_config()
    config.tokenizer = f"{folder}/gpt2_tokenizer"
    config.model.update(n_layer=4, n_head=2, n_embd=64, n_positions=512)
    config.max_latents = 6
    config.min_latents = 1
    config.prompt_slots = (64, 96, 224)
    config.max_answer_tokens = 12
    gsm8k_files(config, folder, "gsm8k_train.jsonl")
    config.imitate.update(
        batch_size=8, c_thought=1, max_latent_stage=3, cot_steps=300, stage_steps=60, final_steps=500,
        final_latents="random", control=True,
    )  # fmt: skip
    config.imitate.optimizer.update(learning_rate=1e-3, warmup_steps=50, schedule="linear", final_fraction=0.1)
    config.cold_start.update(batch_size=8, micro_batches=1, steps=100, evaluate_every=50, patience=2)
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-3)
    config.rl.update(batch_size=8, steps=30)
    config.objective.slpo.latent_reduction = "mean"
    config.rl.optimizer.update(name="adamw", learning_rate=3e-5, warmup_steps=10)
    config.evaluate.update(batch_size=256, samples=8, seeds=1)
    config.checkpoint_every = 200
    return config

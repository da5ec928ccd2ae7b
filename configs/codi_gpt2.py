"""CODI on GPT-2 (124M), as the paper (appendix A). codi_gpt2:DIR.

The paper's 16 prompts a device on 4 devices are the batch of 64; batches are sharded over whatever devices there are.
`slpo train codi_gpt2:DIR` reads GSM8K-Aug (`train.txt`, lines "question||steps #### answer"), `gsm_valid.json`,
`gsm_test.json`, `gsm_hard.json` and `multiarith.json` from DIR; the default is `data`. CODI's own training starts from
the base model: `--config.init=openai-community/gpt2 --config.stages="('imitate','cold_start','rl','evaluate')"`. It is
the published one, but without dropout of the adapters' inputs (`presets.codi_imitation`).
"""

from _presets import codi_imitation, paper
from slpo_jax.config import default_config


def get_config(folder: str = "data"):
    config = default_config()
    config.reasoner = "codi_gpt2"
    config.init = "zen-E/CODI-gpt2"
    config.base = "openai-community/gpt2"
    config.lora_alpha = 32.0  # of the published file's adapters
    paper(config, folder, cold_start_micro_batches=2, evaluation_batch=2048)
    codi_imitation(config, epochs=40, learning_rate=3e-3)  # not run by default
    config.imitate.update(micro_batches=2, dropout=0.1, max_tokens=1_000)
    config.imitate.distil.distil_factor = 1.0
    return config

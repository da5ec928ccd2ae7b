"""CODI on Llama-3.2-1B-Instruct, as the paper. codi_llama1b:DIR.

The paper's 16 prompts a device on 4 devices are the batch of 64; batches are sharded over whatever devices there are.
`slpo train codi_llama1b:DIR` reads GSM8K-Aug (`train.txt`, lines "question||steps #### answer"), `gsm_valid.json`,
`gsm_test.json`, `gsm_hard.json` and `multiarith.json` from DIR; the default is `data`. CODI's own training starts from
the base model: `--config.init=meta-llama/Llama-3.2-1B-Instruct
--config.stages="('imitate','cold_start','rl','evaluate')"`. It is the published one, but without dropout of the
adapters' inputs (`presets.codi_imitation`). Activations are bfloat16 on accelerators; a published checkpoint gives the
tokens of the program that wrote it with `--config.model.dtype=float32`. Layers are one block in a loop, and its
activations are made again in the backward pass: so SLPO's step fits the paper's four 48 GB cards (docs/speed.md).
"""

from _presets import codi_imitation, paper
from slpo_jax.config import default_config


def get_config(folder: str = "data"):
    config = default_config()
    config.reasoner = "codi_llama"
    config.init = "zen-E/CODI-llama3.2-1b-Instruct"
    config.base = "meta-llama/Llama-3.2-1B-Instruct"
    config.lora_alpha = 32.0  # of the published file's adapters
    config.model.update(remat=True, scan_layers=True)
    paper(config, folder, cold_start_micro_batches=8, evaluation_batch=256)
    codi_imitation(config, epochs=10, learning_rate=8e-4)  # not run by default
    config.imitate.update(micro_batches=4, max_tokens=200)
    return config

"""COCONUT on Llama-3.2-1B-Instruct, as the paper. coconut_llama1b:DIR.

No such checkpoint is known to be published: `--config.init=` must name one, or Llama itself with `imitate` put in front
of the stages: `--config.init=meta-llama/Llama-3.2-1B-Instruct --config.stages="('imitate','cold_start','rl',
'evaluate')"`, which trains COCONUT as its authors trained GPT-2. `config.base` has the tokenizer of a file without one.
`slpo train coconut_llama1b:DIR` reads GSM8K-Aug (`train.txt`, lines "question||steps #### answer"), `gsm_valid.json`,
`gsm_test.json`, `gsm_hard.json` and `multiarith.json` from DIR; the default is `data`. Activations are bfloat16 on
accelerators; a published checkpoint gives the tokens of the program that wrote it with `--config.model.dtype=float32`.
Layers are one block in a loop, and its activations are made again in the backward pass: so SLPO's step fits the paper's
four 48 GB cards (docs/speed.md).
"""

from _presets import coconut_imitation, paper
from slpo_jax.config import default_config


def get_config(folder: str = "data"):
    config = default_config()
    config.reasoner = "coconut_llama"
    config.base = "meta-llama/Llama-3.2-1B-Instruct"
    config.model.update(remat=True, scan_layers=True)
    paper(config, folder, cold_start_micro_batches=8, evaluation_batch=256)
    config.rl.capacities = ((0.75, 0.375), (1.0, 1.0))  # an answer is "### 72" and eos
    coconut_imitation(config)  # not run by default
    config.imitate.micro_batches = 4
    return config

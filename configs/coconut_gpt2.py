"""COCONUT on GPT-2 (124M), as the paper (appendix A). coconut_gpt2:DIR.

The paper's 16 prompts a device on 4 devices are the batch of 64; batches are sharded over whatever devices there are.
`slpo train coconut_gpt2:DIR` reads GSM8K-Aug (`train.txt`, lines "question||steps #### answer"), `gsm_valid.json`,
`gsm_test.json`, `gsm_hard.json` and `multiarith.json` from DIR; the default is `data`. The published checkpoint brings
its tokenizer; to start from another file without one, give `--config.init=FILE --config.base=openai-community/gpt2`.
COCONUT's own training starts from GPT-2 itself: `--config.init=openai-community/gpt2
--config.stages="('imitate','cold_start','rl','evaluate')"`.
"""

from _presets import coconut_imitation, paper
from slpo_jax.config import default_config


def get_config(folder: str = "data"):
    config = default_config()
    config.reasoner = "coconut_gpt2"
    config.init = "ModalityDance/latent-tts-coconut"
    paper(config, folder, cold_start_micro_batches=2, evaluation_batch=2048)
    config.rl.capacities = ((0.75, 0.375), (1.0, 1.0))  # an answer is "### 72" and eos
    coconut_imitation(config)  # not run by default
    config.imitate.dropout = 0.1  # GPT-2's own
    return config

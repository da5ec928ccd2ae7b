"""Tables 3 and 4 of the paper on Llama-3.2-1B-Instruct. soft_llama1b:METHOD.

METHOD is cot, latent, grpo, lepo, soft_tokens, hrpo, slpo, pathwise or soft_grpo (`_presets.py`); or latent_sft
and latent_grpo, which goes on from it, on GSM8K-Aug's files in `data`.
The 1B's settings are not published; they are the 3B's.
Model and data are hub ids, from its cache where there is no network; local directories of the same layout do as well
(`--config.init=DIR`, `--config.data.train=DIR`).
"""

from _soft import soft_llama
from slpo_jax.config import default_config


def get_config(method: str = "slpo"):
    config = default_config()
    tuned = (
        method == "latent_grpo"
    )  # it begins where Latent-SFT's published checkpoint is
    model = (
        "DJCheng/LLaMA3.2-1B-Instruct-Latent-SFT-Top10"
        if tuned
        else "meta-llama/Llama-3.2-1B-Instruct"
    )
    soft_llama(config, method, model)
    return config

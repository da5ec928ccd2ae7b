"""The paper's tables 3 and 4 on Llama-3.2-3B-Instruct: `--config=configs/soft_llama3b.py:METHOD`.

METHOD is cot, latent, grpo, lepo, soft_tokens, hrpo, slpo, pathwise or soft_grpo (`run/presets.py`); or latent_sft
and latent_grpo, which goes on from it, on GSM8K-Aug's files in `data`.
For latent_grpo give a checkpoint of latent_sft (`--config.init=RUN`): none is published. Its published settings are in
docs/methods.md.
Model and data are hub ids, from its cache where there is no network; local directories of the same layout do as well
(`--config.init=DIR`, `--config.data.train=DIR`).
"""

from slpo_jax.config import default_config
from slpo_jax.run.presets import soft_llama


def get_config(method: str = "slpo"):
    config = default_config()
    soft_llama(config, method, "meta-llama/Llama-3.2-3B-Instruct")
    return config

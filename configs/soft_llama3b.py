"""Tables 3 and 4 of the paper on Llama-3.2-3B-Instruct. soft_llama3b:METHOD[,CARDS].

METHOD is cot, latent, grpo, lepo, soft_tokens, hrpo, slpo, pathwise or soft_grpo (`_presets.py`); or latent_sft
and latent_grpo, which goes on from it, on GSM8K-Aug's files in `data`.
For latent_grpo give a checkpoint of latent_sft (`--config.init=RUN`): none is published. Its published settings are in
docs/methods.md.
`METHOD,CARDS` trains adapters of rank 32 on so many devices, which share the parameters: `slpo,1` and `grpo,1` fit one
H100 of 80 GB, `slpo,4` and `grpo,4` four A6000 of 48 GB (docs/speed.md). Without CARDS all parameters are trained, as
published, but for hrpo's.
Model and data are hub ids, from its cache where there is no network; local directories of the same layout do as well
(`--config.init=DIR`, `--config.data.train=DIR`).
"""

from _soft import on_cards, soft_llama
from slpo_jax.config import default_config


def get_config(argument: str = "slpo"):
    method, _, cards = argument.partition(",")
    config = default_config()
    soft_llama(config, method, "meta-llama/Llama-3.2-3B-Instruct")
    on_cards(config, cards)
    return config

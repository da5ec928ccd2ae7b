"""Latent-SFT and Latent-GRPO on Qwen2.5-Math-7B. soft_qwen7b:METHOD[,CARDS].

METHOD is latent_sft or latent_grpo. `METHOD,CARDS` with another METHOD of `configs/soft_llama3b.py` trains adapters of
Qwen2.5-7B-Instruct as that file those of a Llama: `slpo,1` and `grpo,1` fit one H100 of 80 GB (docs/speed.md). Models
are hub ids, from its cache where there is no network; a local directory of the same layout does as well
(`--config.init=DIR`, `--config.data.eval.gsm8k=DIR`).
"""

from _presets import SOFT_METHODS
from _soft import hub_tests, latent_sft, on_cards, soft_llama
from slpo_jax.config import default_config
from slpo_jax.errors import UserError

_PUBLISHED = {"latent_sft": "SFT", "latent_grpo": "GRPO"}
_PROMPT = (
    "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>"
)


def get_config(argument: str = "latent_sft"):
    method, _, cards = argument.partition(",")
    config = default_config()
    if cards and method in SOFT_METHODS:
        soft_llama(config, method, "Qwen/Qwen2.5-7B-Instruct")
        config.reasoner = "text_qwen2"
        on_cards(config, cards)
        return config
    if argument not in _PUBLISHED:
        known = [*_PUBLISHED, *(f"{name},1" for name in SOFT_METHODS)]
        raise UserError(
            f"configs/soft_qwen7b.py:{argument}: no such method; give one of {', '.join(known)}"
        )
    latent_sft(
        config, f"DJCheng/Qwen2.5-Math-7B-Latent-{_PUBLISHED[method]}-4k-Top10", "data"
    )
    config.reasoner = "text_qwen2"
    config.prompt.format = _PROMPT
    config.stages = ("evaluate",)
    config.max_answer_tokens = 3328  # of 4,096 positions
    config.data.update(train="", valid="")
    hub_tests(config)
    return config

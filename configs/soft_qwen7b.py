"""What Latent-SFT and Latent-GRPO publish on Qwen2.5-Math-7B, evaluated: `--config=configs/soft_qwen7b.py:METHOD`.

METHOD is latent_sft or latent_grpo. Both are hub ids, from its cache where there is no network; a local directory of
the same layout does as well (`--config.init=DIR`, `--config.data.eval.gsm8k=DIR`).
"""

from slpo_jax.config import default_config
from slpo_jax.errors import UserError
from slpo_jax.run.presets import hub_tests, latent_sft

_PUBLISHED = {"latent_sft": "SFT", "latent_grpo": "GRPO"}
_PROMPT = (
    "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>"
)


def get_config(method: str = "latent_sft"):
    if method not in _PUBLISHED:
        raise UserError(f"configs/soft_qwen7b.py:{method}: no such method; give one of {', '.join(_PUBLISHED)}")
    config = default_config()
    latent_sft(config, f"DJCheng/Qwen2.5-Math-7B-Latent-{_PUBLISHED[method]}-4k-Top10", "data")
    config.reasoner, config.prompt.format = "text_qwen2", _PROMPT
    config.stages = ("evaluate",)
    config.max_answer_tokens = 3328  # of 4,096 positions
    config.data.update(train="", valid="")
    hub_tests(config)
    return config

"""Instruct models, Latent-SFT and Latent-GRPO: what several files in configs/ have in common."""

from ml_collections import ConfigDict

from _presets import GSM8K_AUG, LATENT_GRPO, gsm8k_files, soft_method
from slpo_jax.config import objective_variant
from slpo_jax.errors import UserError

# As Latent-SFT mixes (Deng et al., 2025).
LATENT_SFT_MIXTURE = {
    "temperature": 1.0,
    "top_k": 10,
    "top_p": 1.0,
    "min_p": 0.0,
    "most": 0,
}
_LATENT_SFT_PROMPT = (
    "<|start_header_id|>user<|end_header_id|>\n\nPlease reason step by step, and put your final answer within "
    "\\boxed{}.\n{question}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n<think>"
)


def latent_sft(config: ConfigDict, model: str, folder: str) -> None:
    """Latent-SFT's published training on GSM8K-Aug as COCONUT's train.txt, and its evaluation.

    Args:
        model: hub id of a Llama 3 instruct model, or of what was trained so.
        folder: see `gsm8k_files`.
    """
    epoch = -(-GSM8K_AUG // 512)
    config.reasoner = "text_llama"
    config.init = model
    config.gate.enabled = False
    config.model.update(remat=True, scan_layers=True)
    config.prompt.update(format=_LATENT_SFT_PROMPT, closing="</think>", answers="boxed")
    config.latent_policy.name = "soft"
    config.latent_policy.soft.update(LATENT_SFT_MIXTURE)
    config.max_latents = 128
    config.min_latents = 1
    config.max_answer_tokens = 128
    config.dropout.rate = 0.0
    config.prompt_slots = (128, 256, 512)
    gsm8k_files(config, folder, "train.txt")
    config.stages = ("imitate", "evaluate")
    config.imitate.update(
        recipe="latent_sft", batch_size=512, micro_batches=32, c_thought=0, max_latent_stage=0, cot_steps=0,
        stage_steps=10 * epoch, final_steps=70 * epoch, suffix_slots=(128, 192, 256),
    )  # fmt: skip
    config.imitate.latent_sft.final_learning_rate = 3e-4
    config.imitate.lora.update(rank=64, alpha=128.0)
    config.imitate.optimizer.update(
        name="adamw",
        learning_rate=1e-4,
        schedule="cosine",
        warmup_steps=epoch // 2,
        weight_decay=0.01,
    )
    config.evaluate.update(
        batch_size=256, samples=5, seeds=1, temperature=0.6, top_p=0.95
    )


def latent_grpo(config: ConfigDict, model: str, folder: str) -> None:
    """Latent-GRPO's published training, 10 epochs of GSM8K-Aug, and the evaluation of `latent_sft`.

    Args:
        model: hub id or directory of what Latent-SFT has trained; other models collapse.
        folder: see `gsm8k_files`.
    """
    latent_sft(config, model, folder)
    config.latent_policy.name = "gumbel_top_k"
    config.stages = ("rl", "evaluate")
    objective_variant(config, "latent_grpo", "grpo", learning_rate=1e-6, **LATENT_GRPO)
    config.rl.update(
        objectives=("latent_grpo",), batch_size=64, micro_batches=2, steps=10 * GSM8K_AUG // 64, temperature=0.6,
        top_k=30, top_p=0.95, dynamic_batches=50, capacities=((0.25, 0.5), (1.0, 1.0)),
    )  # fmt: skip
    config.rl.optimizer.update(name="adamw", weight_decay=0.01, warmup_steps=0)


def hub_tests(config: ConfigDict) -> None:
    """The four test sets of the paper's soft tokens, from the hub, and no others."""
    config.data.eval = ConfigDict(
        {
            "gsm8k": "openai/gsm8k", "math500": "HuggingFaceH4/MATH-500", "aime25": "opencompass/AIME2025",
            "amc23": "zwhe99/amc23",
        }
    )  # fmt: skip


def soft_llama(config: ConfigDict, method: str, model: str) -> None:
    """A method on Llama-3.2's instruct models: DAPO-Math to train on, the paper's four sets, answers in boxes.

    Args:
        model: hub id.
    """
    if method in (own := {"latent_sft": latent_sft, "latent_grpo": latent_grpo}):
        own[method](config, model, "data")
        return
    soft_method(config, method)
    config.init = model
    config.model.update(remat=True, scan_layers=True)
    asked = r"Please reason step by step, and put your final answer within \boxed{}."
    config.prompt.update(system=asked, instruction=asked, answers="boxed")
    config.prompt_slots = (128, 256, 512)
    config.max_answer_tokens = 2048
    config.data.train = "open-r1/DAPO-Math-17k-Processed"
    hub_tests(config)
    # An epoch of some 14,000 problems.
    config.rl.update(
        batch_size=64 if method == "soft_grpo" else 32, micro_batches=8, steps=440
    )
    config.rl.optimizer.update(
        name="adamw", weight_decay=0.1, schedule="cosine", warmup_steps=13
    )
    config.evaluate.update(batch_size=256)


def on_cards(config: ConfigDict, devices: str) -> None:
    """Adapters of rank 32, of one prompt a device at a time, and parameters in as many parts as there are devices.

    Args:
        devices: how many; "" leaves the config as it is.
    Raises:
        UserError: not a number that divides the batch.
    """
    if not devices:
        return
    parts = max(
        (config.objective[name].get("minibatches", 1) for name in config.rl.objectives),
        default=1,
    )
    if (
        not devices.isdecimal()
        or not int(devices)
        or config.rl.batch_size % (int(devices) * parts)
    ):
        raise UserError(
            f"--config: {devices!r} cards do not divide {config.rl.batch_size} prompts; give 1, 4 or so"
        )
    config.rl.lora.update(rank=32, alpha=64.0)
    config.rl.micro_batches = config.rl.batch_size // int(devices) // parts
    config.sharding.fsdp = int(devices)
    config.evaluate.batch_size = 32 * int(devices)  # no figure depends on it

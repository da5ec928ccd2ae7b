"""A backbone's shapes, in our dataclasses and in Hugging Face's config.json."""

import dataclasses
import math
from typing import Any

from absl import logging

from slpo_jax.errors import UserError
from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.models.llama import LlamaConfig, Qwen2Config, RopeScaling

BackboneConfig = GPT2Config | LlamaConfig

# What our backbones compute; another value in config.json would load and then decode wrongly.
_GPT2_FIXED = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_LLAMA_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
_FIXED = {"gpt2": _GPT2_FIXED, "llama": _LLAMA_FIXED, "qwen2": {"hidden_act": "silu", "use_sliding_window": False}}
BACKBONE_OF = {"gpt2": "gpt2", "llama": "llama", "qwen2": "llama"}
# Our fields, and Hugging Face's keys of them, as they follow each other in a config.json.
_GPT2_KEYS = {
    "vocab_size": "vocab_size", "n_positions": "n_positions", "n_embd": "n_embd", "n_layer": "n_layer",
    "n_head": "n_head", "n_inner": "n_inner", "norm_epsilon": "layer_norm_epsilon", "tied": "tie_word_embeddings",
}  # fmt: skip
_LLAMA_KEYS = {
    "vocab_size": "vocab_size", "n_positions": "max_position_embeddings", "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim", "n_inner": "intermediate_size", "norm_epsilon": "rms_norm_eps",
    "rope_theta": "rope_theta", "rope_scaling": "rope_scaling", "tied": "tie_word_embeddings",
}  # fmt: skip
_COUNTS = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")


def from_hugging_face(values: dict[str, Any], source: str) -> BackboneConfig:
    """Our config of a Hugging Face config.json.

    Args:
        values: its contents.
        source: its path, for messages.
    Raises:
        UserError: another architecture, a missing key, or a value that our backbones don't compute.
    """
    kind = values.get("model_type")
    if kind not in _FIXED:
        raise UserError(f"{source}: model_type {kind!r} is not supported; give a gpt2, llama or qwen2 model")
    for key, wanted in _FIXED[kind].items():
        if values.get(key, wanted) != wanted:
            raise UserError(f"{source}: {key} = {values[key]!r} is not supported, only {wanted!r}; give another model")
    if values.get("auto_map"):
        logging.warning("%s: its own code (auto_map) is not run; the model is taken as a plain %s", source, kind)
    fields = _Fields(values, source)
    return _gpt2(fields) if kind == "gpt2" else _llama(fields)


class _Fields:
    """The values of a config.json, checked when they are asked for."""

    def __init__(self, values: dict[str, Any], source: str):
        self.values, self.source = values, source

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; null is as good as missing."""
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            raise UserError(f"{self.source}: {key} is {value!r}, not a positive whole number; mend it")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise UserError(f"{self.source}: {key} is {value!r}, not a positive number; mend it")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise UserError(f"{self.source}: {key} is {value!r}, neither true nor false; mend it")
        return value

    def divisor(self, key: str, of: str, number: int, default: int | None = None) -> int:
        """A positive whole number that divides another field's."""
        value = self.count(key, default)
        if number % value:
            raise UserError(f"{self.source}: {key} is {value}, which does not divide {of}, {number}; mend it")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.source}: key {key!r} is missing; give the model's whole config.json")
        return value


def _gpt2(fields: _Fields) -> GPT2Config:
    counts: dict[str, Any] = {name: fields.count(_GPT2_KEYS[name]) for name in _COUNTS}
    fields.divisor("n_head", "n_embd", counts["n_embd"])
    return GPT2Config(
        **counts,
        n_inner=fields.count("n_inner") if fields.values.get("n_inner") is not None else 0,
        norm_epsilon=fields.real("layer_norm_epsilon", 1e-5),
        tied=fields.flag("tie_word_embeddings", True),
    )


def _llama(fields: _Fields) -> LlamaConfig:
    counts: dict[str, Any] = {name: fields.count(_LLAMA_KEYS[name]) for name in (*_COUNTS, "n_inner")}
    values, width, heads = fields.values, counts["n_embd"], counts["n_head"]
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{fields.source}: rope_parameters is {rope!r}, no object; mend it")
    rope_fields = _Fields({"rope_theta": values.get("rope_theta")} | rope, fields.source)
    if values.get("head_dim") is None:
        fields.divisor("num_attention_heads", "hidden_size", width)
    head_dim = fields.count("head_dim", width // heads)
    if head_dim % 2:
        raise UserError(f"{fields.source}: head_dim is {head_dim}, which rope can't halve; give another model")
    return (Qwen2Config if values["model_type"] == "qwen2" else LlamaConfig)(
        **counts,
        n_kv_head=fields.divisor("num_key_value_heads", "num_attention_heads", heads, heads),
        head_dim=head_dim,
        norm_epsilon=fields.real("rms_norm_eps", 1e-6),
        rope_theta=rope_fields.real("rope_theta", 10_000.0),
        rope_scaling=_rope_scaling(rope_fields),
        tied=fields.flag("tie_word_embeddings", False),
    )


def _rope_scaling(rope: _Fields) -> RopeScaling | None:
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(
            f"{rope.source}: rope scaling {kind!r} is not supported; give a model with default or llama3 rope"
        )
    return RopeScaling(
        factor=rope.real("factor"),
        low_freq_factor=rope.real("low_freq_factor"),
        high_freq_factor=rope.real("high_freq_factor"),
        original_max_position_embeddings=rope.count("original_max_position_embeddings"),
    )


def to_hugging_face(config: BackboneConfig) -> dict[str, Any]:
    """The config.json of a model of these shapes, in a form that all recent transformers read."""
    keys = _GPT2_KEYS if isinstance(config, GPT2Config) else _LLAMA_KEYS
    values = {key: getattr(config, name) for name, key in keys.items()}
    if isinstance(config, GPT2Config):
        family: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
        values |= {"n_inner": config.n_inner or None, "activation_function": "gelu_new"}
    else:
        family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        family |= {"attention_bias": False, "mlp_bias": False}
        if isinstance(config, Qwen2Config):
            family = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
        scaling = config.rope_scaling
        scaled = scaling and {"rope_type": "llama3"} | dataclasses.asdict(scaling)
        values |= {"rope_scaling": scaled, "hidden_act": "silu"}
    return family | values | {"torch_dtype": "float32"}

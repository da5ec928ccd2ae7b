"""A backbone's shapes, in our dataclasses and in Hugging Face's config.json."""

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
_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


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
    width = fields.count("n_embd")
    return GPT2Config(
        vocab_size=fields.count("vocab_size"),
        n_positions=fields.count("n_positions"),
        n_embd=width,
        n_layer=fields.count("n_layer"),
        n_head=fields.divisor("n_head", "n_embd", width),
        n_inner=fields.count("n_inner") if fields.values.get("n_inner") is not None else 0,
        norm_epsilon=fields.real("layer_norm_epsilon", 1e-5),
        tied=fields.flag("tie_word_embeddings", True),
    )


def _llama(fields: _Fields) -> LlamaConfig:
    values, width, heads = fields.values, fields.count("hidden_size"), fields.count("num_attention_heads")
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
        vocab_size=fields.count("vocab_size"),
        n_positions=fields.count("max_position_embeddings"),
        n_embd=width,
        n_layer=fields.count("num_hidden_layers"),
        n_head=heads,
        n_kv_head=fields.divisor("num_key_value_heads", "num_attention_heads", heads, heads),
        head_dim=head_dim,
        n_inner=fields.count("intermediate_size"),
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
    if isinstance(config, GPT2Config):
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_positions": config.n_positions,
            "n_embd": config.n_embd,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_inner": config.n_inner or None,
            "layer_norm_epsilon": config.norm_epsilon,
            "tie_word_embeddings": config.tied,
            "activation_function": "gelu_new",
            "torch_dtype": "float32",
        }
    scaling = config.rope_scaling
    family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
    if isinstance(config, Qwen2Config):
        family = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    return {
        **family,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.n_positions,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "intermediate_size": config.n_inner,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling and {"rope_type": "llama3", **{key: getattr(scaling, key) for key in _ROPE_KEYS}},
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }

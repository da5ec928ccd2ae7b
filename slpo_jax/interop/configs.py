"""A backbone's shapes, in our dataclasses and in Hugging Face's config.json."""

from typing import Any

from slpo_jax.errors import UserError
from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.models.llama import LlamaConfig, RopeScaling

BackboneConfig = GPT2Config | LlamaConfig

# What our backbones compute; another value in config.json would load and then decode wrongly.
_GPT2_FIXED = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_LLAMA_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
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
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{source}: model_type {kind!r} is not supported; give a gpt2 or llama model")
    for key, wanted in (_GPT2_FIXED if kind == "gpt2" else _LLAMA_FIXED).items():
        if values.get(key, wanted) != wanted:
            raise UserError(f"{source}: {key} = {values[key]!r} is not supported, only {wanted!r}; give another model")
    try:
        return _gpt2(values) if kind == "gpt2" else _llama(values, source)
    except KeyError as error:
        raise UserError(f"{source}: key {error} is missing; give the model's whole config.json") from None


def _gpt2(values: dict[str, Any]) -> GPT2Config:
    return GPT2Config(
        vocab_size=values["vocab_size"],
        n_positions=values["n_positions"],
        n_embd=values["n_embd"],
        n_layer=values["n_layer"],
        n_head=values["n_head"],
        n_inner=values.get("n_inner") or 0,
        norm_epsilon=values.get("layer_norm_epsilon", 1e-5),
        tied=values.get("tie_word_embeddings", True),
    )


def _llama(values: dict[str, Any], source: str) -> LlamaConfig:
    heads = values["num_attention_heads"]
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return LlamaConfig(
        vocab_size=values["vocab_size"],
        n_positions=values["max_position_embeddings"],
        n_embd=values["hidden_size"],
        n_layer=values["num_hidden_layers"],
        n_head=heads,
        n_kv_head=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        n_inner=values["intermediate_size"],
        norm_epsilon=values["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(rope, source),
        tied=values.get("tie_word_embeddings", False),
    )


def _rope_scaling(rope: dict[str, Any], source: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"{source}: rope scaling {kind!r} is not supported; give a model with default or llama3 rope")
    return RopeScaling(**{key: rope[key] for key in _ROPE_KEYS})


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
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }

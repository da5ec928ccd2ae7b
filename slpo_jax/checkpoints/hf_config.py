"""A backbone's shapes, in our dataclasses and in Hugging Face's config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from absl import logging

from slpo_jax.errors import UserError
from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.models.llama import LLAMAS, LlamaConfig, RopeScaling
from slpo_jax.models.reasoner import BACKBONES, BackboneConfig
from slpo_jax.settings import FieldError

# What our backbones compute; another value in config.json would load and then decode wrongly.
_FIXED = {
    "gpt2": {
        "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False},
}  # fmt: skip
_EACH_LAYER = {"layer_types": "full_attention"}
_DEFAULTS = {"qwen3": {"head_dim": 128}}  # transformers', where they aren't those of the others
BACKBONE_OF = {kind: "llama" if kind in LLAMAS else kind for kind in BACKBONES}
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


def from_hugging_face(values: dict[str, Any], source: str) -> BackboneConfig:
    """Our config of a Hugging Face config.json.

    Args:
        values: its contents.
        source: its path, for messages.
    Raises:
        UserError: another architecture, a missing key, or a value that our backbones don't compute.
    """
    kind = supported_kind(values, source)
    for key, wanted in (_FIXED[kind] | _EACH_LAYER).items():
        found = values.get(key, wanted)
        for each in found if isinstance(found, list) else [found]:
            if each != wanted:
                raise UserError(f"{source}: {key} = {each!r} is not supported, only {wanted!r}; give another model")
    if values.get("auto_map"):
        logging.warning("%s: its own code (auto_map) is not run; the model is taken as a plain %s", source, kind)
    if kind == "gpt2":
        gpt2: GPT2Config = _made(GPT2Config, _GPT2_KEYS, values, source, n_inner=0, norm_epsilon=1e-5, tied=True)
        return gpt2
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{source}: rope_parameters is {rope!r}, no object; mend it")
    values = _DEFAULTS.get(kind, {}) | values | {"rope_theta": rope.get("rope_theta", values.get("rope_theta"))}
    values["rope_scaling"] = _rope_scaling(rope, source)
    defaults = {"n_kv_head": values.get("num_attention_heads"), "norm_epsilon": 1e-6, "rope_theta": 10_000.0}
    defaults |= {"head_dim": 2, "rope_scaling": None, "tied": False}
    llama: LlamaConfig = _made(LLAMAS[kind], _LLAMA_KEYS, values, source, **defaults)
    if values.get("head_dim") is not None:
        return llama
    if llama.n_embd % (2 * llama.n_head):
        raise UserError(
            f"{source}: num_attention_heads: {llama.n_head} does not cut hidden_size, {llama.n_embd}, into even parts; "
            "mend it"
        )
    return dataclasses.replace(llama, head_dim=llama.n_embd // llama.n_head)


def supported_kind(values: Mapping[str, Any], source: str) -> str:
    """The model_type of a config.json.

    Raises:
        UserError: it is none of `BACKBONES`.
    """
    kind = values.get("model_type")
    if kind not in _FIXED:
        raise UserError(f"{source}: model_type {kind!r} is not supported; give one of {', '.join(BACKBONES)}")
    return str(kind)


def _made(cls: Any, keys: Mapping[str, str], values: Mapping[str, Any], source: str, **defaults: Any) -> Any:
    """A dataclass of what a file has under the keys of its fields; null is as good as missing."""
    found = defaults
    for name, key in keys.items():
        value = values.get(key)
        if value is not None:
            found[name] = float(value) if type(value) is int and type(getattr(cls, name)) is float else value
        elif name not in found:
            raise UserError(f"{source}: key {key!r} is missing; give the model's whole config.json")
    try:
        return cls(**found)
    except FieldError as error:
        raise UserError(f"{source}: {keys[error.field]}: {error.problem}") from None


def _rope_scaling(rope: Mapping[str, Any], source: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"{source}: rope scaling {kind!r} is not supported; give a model with default or llama3 rope")
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    scaling: RopeScaling = _made(RopeScaling, dict(zip(names, names, strict=True)), rope, source)
    return scaling


def to_hugging_face(config: BackboneConfig) -> dict[str, Any]:
    """The config.json of a model of these shapes, in a form that all recent transformers read."""
    keys = _GPT2_KEYS if isinstance(config, GPT2Config) else _LLAMA_KEYS
    values = {key: getattr(config, name) for name, key in keys.items()}
    if isinstance(config, GPT2Config):
        name = "GPT2LMHeadModel"
        values |= {"n_inner": config.n_inner or None, "activation_function": "gelu_new"}
    else:
        name, scaling = f"{config.title}ForCausalLM", config.rope_scaling
        scaled = scaling and {"rope_type": "llama3"} | dataclasses.asdict(scaling)
        values |= {"rope_scaling": scaled, **_FIXED[config.model_type]}
    return {"architectures": [name], "model_type": config.model_type, **values, "torch_dtype": "float32"}

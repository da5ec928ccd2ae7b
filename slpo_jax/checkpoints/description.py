"""Read and write the files that describe a reasoner, beside its weights.

They make a Hugging Face model directory: `config.json` (the language model's shapes), the tokenizer's files, and
`reasoner.json` (below). Without weights it lies beside our Orbax checkpoints; with `model.safetensors` it is an export.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from slpo_jax.architectures import ARCHITECTURES, Architecture
from slpo_jax.data.templates import Template
from slpo_jax.data.tokenizer_files import save_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.io.files import read_json
from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.models.llama import LLAMAS, LlamaConfig, RopeScaling
from slpo_jax.models.reasoner import BACKBONES, BackboneConfig
from slpo_jax.settings import FieldError

FILE = "reasoner.json"
MODEL_FILE = "config.json"
REMEDY = "give the model's whole directory, or fetch it again"  # for one of its files
_FACTS = ("gate", "source", "config", "rule")
# The values that our backbones compute; another one in config.json would load and then decode wrongly.
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
# Of transformers, where they differ between the models of the Llama family.
_DEFAULTS = {"qwen3": {"head_dim": 128}}
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


@dataclasses.dataclass(frozen=True)
class Description:
    """A reasoner's architecture and shapes.

    Attributes:
        architecture: with its own settings beside the backbone's shapes.
        model: the backbone's shapes.
        gate: the hidden width of the stopping gate (0 is linear), None without a gate.
        gate_trained: False for a gate that is still random, which exports don't have.
        source: the checkpoint that the weights were converted from; "" for a run's.
        eos_ids: the tokens that end its texts, from config.json; () for the tokenizer's.
        config: of an export, the whole config to use it with (`checkpoints.saved_config`); {} where the config has a
            file of its own.
        rule: of an export or import, the threshold of its gate, or without a gate its number of latents; None if
            unknown.
    """

    architecture: Architecture
    model: BackboneConfig
    gate: int | None = None
    gate_trained: bool = False
    source: str = ""
    eos_ids: tuple[int, ...] = ()
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rule: float | int | None = None


def write_description(
    folder: Path, description: Description, template: Template
) -> None:
    """Write the files of a reasoner's folder, without weights.

    Args:
        folder: exists.
        template: with the tokenizer, and the ids that transformers and other latent-reasoning programs look for.
    """
    # config.json has the shapes and the ids of special tokens.
    config = to_hugging_face(description.model)
    closing = template.closing_ids
    if template.start_id is not None:
        config["latent_start_id"] = template.start_id
        if len(closing) == 1:
            config["latent_end_id"] = closing[0]
    if template.latent_id is not None:
        config["latent_id"] = template.latent_id
    eos_ids = list(dict.fromkeys([template.eos_id, *description.eos_ids]))
    config["eos_token_id"] = eos_ids if len(eos_ids) > 1 else eos_ids[0]
    config["pad_token_id"] = template.pad_id
    config["bos_token_id"] = template.tokenizer.bos_token_id
    _write_json(folder / MODEL_FILE, config)

    # reasoner.json has all that only this project knows.
    facts = {"format": 1, "architecture": description.architecture.name}
    facts |= dataclasses.asdict(description.architecture)
    facts |= {name: getattr(description, name) for name in _FACTS}
    _write_json(folder / FILE, facts)
    save_tokenizer(template.tokenizer, folder)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_description(folder: Path) -> Description | None:
    """Read the description in a folder, None if it has none.

    Raises:
        UserError: one that can't be read.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    values = read_json(path, REMEDY)
    config = read_json(folder / MODEL_FILE, REMEDY)
    try:
        architecture = ARCHITECTURES[values["architecture"]]
        names = [field.name for field in dataclasses.fields(architecture)]
        instance = architecture(**{name: values[name] for name in names})
        facts = {name: values[name] for name in _FACTS}
    except KeyError as error:
        raise UserError(
            f"{path}: key or value {error} is not known here; export it again, or upgrade slpo_jax"
        ) from None
    except FieldError as error:
        raise UserError(f"{path}: key {error.field}: {error.problem}") from None
    model = from_hugging_face(config, str(folder / MODEL_FILE))
    eos_ids = end_tokens(str(folder), config)
    return Description(
        instance,
        model,
        eos_ids=eos_ids,
        gate_trained=facts["gate"] is not None,
        **facts,
    )


def end_tokens(source: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the ids of the tokens that end a model's texts; () where its config names none.

    Args:
        source: the model's directory or file, for messages.
        config: its config.json.
    Raises:
        UserError: the value isn't an id or a list of ids.
    """
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise UserError(
            f"{source}: its eos_token_id is {value!r}, neither a token's id nor a list of ids; mend it"
        )
    return tuple(ids)


def from_hugging_face(values: dict[str, Any], source: str) -> BackboneConfig:
    """Read a backbone's config from a Hugging Face config.json.

    Args:
        values: its contents.
        source: its path, for messages.
    Raises:
        UserError: another architecture, a missing key, or a value that our backbones don't compute.
    """
    # Refuse settings that our backbones would ignore.
    kind = read_model_type(values, source)
    for key, supported in (_FIXED[kind] | _EACH_LAYER).items():
        setting = values.get(key, supported)
        for value in setting if isinstance(setting, list) else [setting]:
            if value != supported:
                raise UserError(
                    f"{source}: {key} = {value!r} is not supported, only {supported!r}; give another model"
                )
    # The code of an export does the same as ours. What other programs save of one lacks how it thinks.
    is_ours = Path(source).with_name(FILE).is_file()
    if "think_in_forward" in values and not is_ours:
        raise UserError(
            f"{source}: is a copy of an export without {FILE}, which says how it thinks; copy the export's other files "
            "next to it"
        )
    if values.get("auto_map") and not is_ours:
        logging.warning(
            "%s: its own code (auto_map) is not run; the model is taken as a plain %s",
            source,
            kind,
        )
    if kind == "gpt2":
        defaults: dict[str, Any] = {"n_inner": 0, "norm_epsilon": 1e-5, "tied": True}
        gpt2: GPT2Config = _read_fields(
            GPT2Config, _GPT2_KEYS, values, source, **defaults
        )
        return gpt2

    # The settings of rope lie in an object of their own, or beside the others.
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{source}: rope_parameters is {rope!r}, no object; mend it")
    values = _DEFAULTS.get(kind, {}) | values
    values["rope_theta"] = rope.get("rope_theta", values.get("rope_theta"))
    values["rope_scaling"] = _rope_scaling(rope, source)
    defaults = {
        "n_kv_head": values.get("num_attention_heads"),
        "norm_epsilon": 1e-6,
        "rope_theta": 10_000.0,
        "head_dim": 2,
        "rope_scaling": None,
        "tied": False,
    }
    llama: LlamaConfig = _read_fields(
        LLAMAS[kind], _LLAMA_KEYS, values, source, **defaults
    )

    # Without a width of its own, a head gets an equal part; rope turns pairs, so the part is even.
    if values.get("head_dim") is not None:
        return llama
    if llama.n_embd % (2 * llama.n_head):
        raise UserError(
            f"{source}: num_attention_heads: {llama.n_head} does not cut hidden_size, {llama.n_embd}, into even parts; "
            "mend it"
        )
    return dataclasses.replace(llama, head_dim=llama.n_embd // llama.n_head)


def read_model_type(values: Mapping[str, Any], source: str) -> str:
    """Read the model_type of a config.json.

    Raises:
        UserError: it isn't one of `BACKBONES`.
    """
    kind = values.get("model_type")
    if kind not in _FIXED:
        raise UserError(
            f"{source}: model_type {kind!r} is not supported; give one of {', '.join(BACKBONES)}"
        )
    return str(kind)


def _read_fields(
    cls: Any,
    keys: Mapping[str, str],
    values: Mapping[str, Any],
    source: str,
    **defaults: Any,
) -> Any:
    """Make a dataclass of a file's values, which lie under other keys; null counts as missing."""
    fields = defaults
    for name, key in keys.items():
        value = values.get(key)
        if value is not None:
            # JSON may have an int for a float.
            is_float = type(getattr(cls, name, None)) is float
            fields[name] = float(value) if is_float and type(value) is int else value
        elif name not in fields:
            raise UserError(
                f"{source}: key {key!r} is missing; give the model's whole config.json"
            )
    try:
        return cls(**fields)
    except FieldError as error:
        raise UserError(f"{source}: {keys[error.field]}: {error.problem}") from None


def _rope_scaling(rope: Mapping[str, Any], source: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(
            f"{source}: rope scaling {kind!r} is not supported; give a model with default or llama3 rope"
        )
    keys = {field.name: field.name for field in dataclasses.fields(RopeScaling)}
    scaling: RopeScaling = _read_fields(RopeScaling, keys, rope, source)
    return scaling


def to_hugging_face(config: BackboneConfig) -> dict[str, Any]:
    """Write the config.json of a model of these shapes, in a form that all recent transformers read."""
    keys = _GPT2_KEYS if isinstance(config, GPT2Config) else _LLAMA_KEYS
    values = {key: getattr(config, name) for name, key in keys.items()}
    if isinstance(config, GPT2Config):
        name = "GPT2LMHeadModel"
        values |= {"n_inner": config.n_inner or None, "activation_function": "gelu_new"}
        # transformers' default is 0.1, with which a trainer would score other answers than it has sampled.
        for name_of_rate in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
            values[name_of_rate] = 0.0
    else:
        name = f"{config.title}ForCausalLM"
        if config.rope_scaling:
            scaling = dataclasses.asdict(config.rope_scaling)
            values["rope_scaling"] = {"rope_type": "llama3"} | scaling
        values |= _FIXED[config.model_type]
    return {
        "architectures": [name],
        "model_type": config.model_type,
        **values,
        "torch_dtype": "float32",
    }

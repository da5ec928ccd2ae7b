"""Merge LoRA adapters, which lie beside the base weights in a checkpoint's file or alone in a folder of PEFT's."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from slpo_jax.architectures.tensors import Stored
from slpo_jax.architectures.weights import EMBEDDING, backbone_weights, with_head
from slpo_jax.errors import UserError, key_name
from slpo_jax.io.files import read_json
from slpo_jax.models.reasoner import BackboneConfig

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_THE_BASE = "give the base model that the adapters were trained on"
_A = ".lora_A.default.weight"
_B = ".lora_B.default.weight"
_BASE = ".base_layer."
# Of PEFT's settings those that change nothing in W + s B A, or are seen in the tensors; any other one must be off.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core",
    "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# Initialisations of A and B alone; PEFT's others also change the base.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


class Lora(NamedTuple):
    """The scaling of a checkpoint's adapters.

    Attributes:
        alpha: the scale is alpha / rank.
        by_root: the scale is alpha / sqrt(rank).
        ties: whether a head that the base ties to its embedding is tied to the embedding saved with the adapters.
    """

    alpha: float
    by_root: bool = False
    ties: bool = False


def read_lora(folder: Path, alpha: float | None) -> Lora | None:
    """Read LoRA's scale from PEFT's settings where a folder has them, else take `alpha`; None without either.

    Args:
        folder: of adapters, or a checkpoint's file, which has no settings.
        alpha: the scale times the rank, as the user gave it; None for none.
    Raises:
        UserError: a setting isn't supported.
    """
    path = folder / CONFIG
    if not path.is_file():
        return Lora(alpha) if alpha else None
    values = read_json(path, "give the adapters' whole folder")
    allowed = {"peft_type": ("LORA",), "init_lora_weights": _INITS}
    for key, value in values.items():
        is_allowed = value in allowed.get(key, (value,))
        if value and not (key in _HARMLESS and is_allowed):
            raise UserError(
                f"{path}: {key}={value} is not supported; merge the adapters with peft's merge_and_unload()"
            )
    scale = values.get("lora_alpha", alpha)
    if not scale:
        return None
    by_root = bool(values.get("use_rslora"))
    return Lora(scale, by_root, ties=bool(values.get("ensure_weight_tying")))


def add_adapters(
    model: Mapping[str, Stored],
    adapter: Mapping[str, Stored],
    lora: Lora | None,
    source: str,
) -> dict[str, Stored]:
    """Put PEFT's adapters beside a base model's tensors, for `merge_lora`, with the tensors that PEFT saved whole.

    Args:
        model: under Hugging Face's names.
        adapter: under PEFT's.
        lora: how they are scaled.
        source: the adapters' file, for messages.
    Raises:
        UserError: a tensor that belongs to no weight of the model, or doesn't fit it.
    """
    added = {_hugging_face_name(name): tensor for name, tensor in adapter.items()}
    has_head = "lm_head.weight" in model or "lm_head.weight" in added
    ties = has_head or bool(lora and lora.ties)
    tensors = dict(model)
    for name, tensor in added.items():
        # Find the base's weight. An adapter may be of a weight that PEFT saved whole.
        module, is_lora, _ = name.partition(".lora_")
        weight = f"{module}.weight" if is_lora else name
        base = model.get(weight)
        if is_lora:
            base = added.get(weight, base)
        # The file of a tied model need not have its head.
        if base is None and weight != "lm_head.weight":
            raise UserError(
                f"{source}: tensor {tensor.name} is of no weight of the base's; {_THE_BASE}"
            )

        # An adapted weight moves to the name that `merge_lora` looks for. A saved one replaces the
        # base's; its rows may be more, since a vocabulary may have grown.
        if is_lora:
            tensors.pop(weight, None)
            if base:
                tensors[f"{module}{_BASE}weight"] = base
        elif base and tensor.shape[1:] != base.shape[1:]:
            shapes = f"{list(tensor.shape)}, the base's {list(base.shape)}"
            raise UserError(
                f"{source}: tensor {tensor.name} has shape {shapes}; {_THE_BASE}"
            )
        elif name in EMBEDDING.values() and not ties:
            raise UserError(
                f"{source}: {tensor.name} is trained apart from the head, which the base ties to it; merge the "
                "adapters with peft's merge_and_unload(), or train them with ensure_weight_tying=True"
            )
    return tensors | added


def _hugging_face_name(name: str) -> str:
    """Return the name under which the base model's file would have a tensor of PEFT's."""
    name = name.removeprefix("base_model.model.")
    name = name.replace(".modules_to_save.default.", ".").replace(_BASE, ".")
    name = re.sub(r"\.lora_([AB])\.weight$", r".lora_\1.default.weight", name)
    return with_head(name)


def merge_lora(
    tensors: dict[str, Stored], lora: Lora | None, source: str
) -> dict[str, Stored]:
    """Replace every weight W that has an adapter by W + s B A.

    Args:
        tensors: `M.base_layer.weight`, `M.lora_A.default.weight` and `M.lora_B.default.weight` of adapted modules M.
        lora: how they are scaled; None if nothing says it.
        source: the file or directory, for messages.
    Raises:
        UserError: adapters without their scale, half an adapter, one of another kind, or one that doesn't fit.
    """
    adapters = [name for name in tensors if ".lora_" in name]
    others = [name for name in tensors if ".lora_" not in name]
    modules = {name.split(".lora_")[0] for name in adapters}
    if modules and lora is None:
        raise UserError(
            f"{source}: {len(modules)} weights have LoRA adapters whose scale is not in the file; give their alpha "
            f"({key_name('config.lora_alpha')}, published: 32)"
        )
    out = {name.replace(_BASE, "."): tensors[name] for name in others}
    for module in modules:
        assert lora is not None
        # An adapted module must have exactly these three tensors. Unexpected ones are named before missing ones.
        base_name = f"{module}{_BASE}weight"
        wanted = {base_name, module + _A, module + _B}
        present = {name for name in adapters if name.startswith(f"{module}.lora_")}
        if base_name in tensors:
            present.add(base_name)
        unexpected = sorted(present - wanted)
        missing = sorted(wanted - present)
        if unexpected or missing:
            name = [*unexpected, *missing][0]
            problem = "unexpected" if unexpected else "missing"
            raise UserError(
                f"{source}: tensor {name} is {problem}; only whole adapters named 'default' of rank r are known"
            )
        lora_a = tensors[module + _A]
        lora_b = tensors[module + _B]
        merged = _merge_when_read(tensors[base_name], lora_a, lora_b, lora, source)
        out[f"{module}.weight"] = merged
    return out


def _merge_when_read(
    base: Stored, lora_a: Stored, lora_b: Stored, lora: Lora, source: str
) -> Stored:
    """Return a weight [out, in], or Conv1D's [in, out], with the adapter A [r, in], B [out, r] added on reading."""
    rank, inputs = lora_a.shape
    outputs, rank_b = lora_b.shape
    # A square Conv1D looks like a square Linear: the names tell.
    is_conv1d = re.search(r"\.(c_attn|c_proj|c_fc)\.", f"{base.name}.") is not None
    shape = (inputs, outputs) if is_conv1d else (outputs, inputs)
    if rank != rank_b or tuple(base.shape) != shape:
        raise UserError(
            f"{source}: tensor {lora_b.name} {list(lora_b.shape)} and {lora_a.name} {list(lora_a.shape)} don't fit "
            f"{base.name} {list(base.shape)}; give adapters of this model"
        )
    scale = lora.alpha / (math.sqrt(rank) if lora.by_root else rank)

    def read() -> np.ndarray:
        b = np.asarray(lora_b.read(), np.float32)
        a = np.asarray(lora_a.read(), np.float32)
        delta = b @ a
        weight = np.asarray(base.read(), np.float32)
        return weight + np.float32(scale) * (delta.T if is_conv1d else delta)

    return Stored(base.name, shape, read)


def write_adapters(
    folder: Path,
    adapters: dict[str, Any],
    config: BackboneConfig,
    alpha: float,
    base: str,
) -> None:
    """Write adapters as PEFT saves them.

    Args:
        folder: exists.
        adapters: of `models.lora.init`, on the host.
        config: of the backbone whose kernels they are of.
        alpha: their scale times their rank.
        base: the place of the model that they were trained on.
    """
    # PEFT keeps A as [r, in] and B as [out, r], our kernels are the other way round.
    tensors = dict[str, np.ndarray]()
    settings = dict[str, Any]()
    targets = set[str]()
    leaves = flatten_dict(adapters)
    for weight in backbone_weights(config):
        *place, last = weight.path
        if last == "kernel" and (*place, "A") in leaves:
            for part in "AB":
                module = weight.name.removesuffix("weight")
                name = f"base_model.model.{module}lora_{part}.weight"
                transposed = np.asarray(leaves[*place, part]).T
                tensors[name] = np.ascontiguousarray(transposed)
            targets.add(place[-1])
            settings = {
                "r": leaves[*place, "A"].shape[1],
                "fan_in_fan_out": not weight.transposed,
            }

    # All modules have the same rank and layout.
    settings |= {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none",
        "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": sorted(targets), "inference_mode": True,
    }  # fmt: skip
    (folder / CONFIG).write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )
    save_file(tensors, folder / WEIGHTS[0], metadata={"format": "pt"})
    # safetensors makes its files private.
    mode = (folder / CONFIG).stat().st_mode
    (folder / WEIGHTS[0]).chmod(mode)

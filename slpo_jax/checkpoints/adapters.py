"""LoRA adapters, merged: beside the base weights in a checkpoint's own file, or alone in a folder of PEFT's."""

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
_A, _B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."
# Of PEFT's settings those that change nothing in W + s B A, or are seen in the tensors; any other one must be off.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core",
    "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # of B and A; the others also change the base


class Lora(NamedTuple):
    """The scaling of a checkpoint's adapters.

    Attributes:
        alpha: the scale is alpha / rank.
        by_root: it is alpha / sqrt(rank).
        ties: a head that the base ties to an embedding is tied to the one that is saved with the adapters.
    """

    alpha: float
    by_root: bool = False
    ties: bool = False


def lora_of(folder: Path, alpha: float | None) -> Lora | None:
    """Read PEFT's own word for LoRA's scale where a folder has it, else what was given; None where nothing says it.

    Args:
        folder: or a checkpoint's file, which is given its scale.
    Raises:
        UserError: the settings hold one that is not understood.
    """
    path = folder / CONFIG
    if not path.is_file():
        return Lora(alpha) if alpha else None
    values = read_json(path, "give the adapters' whole folder")
    allowed = {"peft_type": ("LORA",), "init_lora_weights": _INITS}
    for key, value in values.items():
        if value and (key not in _HARMLESS or value not in allowed.get(key, (value,))):
            raise UserError(
                f"{path}: {key}={value} is not supported; merge the adapters with peft's merge_and_unload()"
            )
    scale = values.get("lora_alpha", alpha)
    return Lora(scale, bool(values.get("use_rslora")), bool(values.get("ensure_weight_tying"))) if scale else None


def adapted(
    model: Mapping[str, Stored], adapter: Mapping[str, Stored], lora: Lora | None, source: str
) -> dict[str, Stored]:
    """Put PEFT's adapters beside a base model's tensors, for `merge_lora`, with the tensors that PEFT saved whole.

    Args:
        model: under Hugging Face's names.
        adapter: under PEFT's.
        lora: how they are scaled.
        source: the adapters' file, for messages.
    Raises:
        UserError: a tensor that is of no weight of the model's, or doesn't fit it.
    """
    added = {_hugging_face_name(name): tensor for name, tensor in adapter.items()}
    tensors = dict(model)
    for name, tensor in added.items():
        module, is_lora, _ = name.partition(".lora_")
        weight = f"{module}.weight" if is_lora else name
        base = added.get(weight, model.get(weight)) if is_lora else model.get(weight)
        if base is None and weight != "lm_head.weight":  # which the file of a tied model need not have
            raise UserError(f"{source}: tensor {tensor.name} is of no weight of the base's; {_THE_BASE}")
        if is_lora:
            tensors.pop(weight, None)
            tensors |= {f"{module}{_BASE}weight": base} if base else {}
        elif base and tensor.shape[1:] != base.shape[1:]:  # a vocabulary may have grown
            shapes = f"{list(tensor.shape)}, the base's {list(base.shape)}"
            raise UserError(f"{source}: tensor {tensor.name} has shape {shapes}; {_THE_BASE}")
        elif name in EMBEDDING.values() and "lm_head.weight" not in {**model, **added} and not (lora and lora.ties):
            raise UserError(
                f"{source}: {tensor.name} is trained apart from the head, which the base ties to it; merge the "
                "adapters with peft's merge_and_unload(), or train them with ensure_weight_tying=True"
            )
    return tensors | added


def _hugging_face_name(name: str) -> str:
    short = name.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".").replace(_BASE, ".")
    return with_head(re.sub(r"\.lora_([AB])\.weight$", r".lora_\1.default.weight", short))


def merge_lora(tensors: dict[str, Stored], lora: Lora | None, source: str) -> dict[str, Stored]:
    """Replace every weight W that has an adapter by W + s B A.

    Args:
        tensors: `M.base_layer.weight`, `M.lora_A.default.weight` and `M.lora_B.default.weight` of adapted modules M.
        lora: how they are scaled; None if nothing says it.
        source: the file or directory, for messages.
    Raises:
        UserError: adapters without their scale, half an adapter, one of another kind, or one that doesn't fit.
    """
    modules = {name.split(".lora_")[0] for name in tensors if ".lora_" in name}
    if modules and lora is None:
        raise UserError(
            f"{source}: {len(modules)} weights have LoRA adapters whose scale is not in the file; give their alpha "
            f"({key_name('config.lora_alpha')}, published: 32)"
        )
    out = {name.replace(_BASE, "."): tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for module in modules:
        names = (f"{module}{_BASE}weight", module + _A, module + _B)
        present = {name for name in tensors if name == names[0] or name.startswith(f"{module}.lora_")}
        for name in sorted(present.symmetric_difference(names), key=lambda name: name not in tensors):
            problem = "unexpected" if name in tensors else "missing"
            raise UserError(
                f"{source}: tensor {name} is {problem}; only whole adapters named 'default' of rank r are known"
            )
        assert lora is not None
        base, lora_a, lora_b = (tensors[name] for name in names)
        out[f"{module}.weight"] = _merged(base, lora_a, lora_b, lora, source)
    return out


def _merged(base: Stored, lora_a: Stored, lora_b: Stored, lora: Lora, source: str) -> Stored:
    """Add the adapter A [r, in], B [out, r] to a weight [out, in], or Conv1D's [in, out], when it is read."""
    (rank, inputs), (outputs, rank_b) = lora_a.shape, lora_b.shape
    linear, conv1d = (outputs, inputs), (inputs, outputs)
    # A square Conv1D looks like a square Linear: the names tell.
    is_conv1d = any(f".{name}." in f"{base.name}." for name in ("c_attn", "c_proj", "c_fc"))
    shape = conv1d if is_conv1d else linear
    if rank != rank_b or tuple(base.shape) != shape:
        raise UserError(
            f"{source}: tensor {lora_b.name} {list(lora_b.shape)} and {lora_a.name} {list(lora_a.shape)} don't fit "
            f"{base.name} {list(base.shape)}; give adapters of this model"
        )
    scale = lora.alpha / (math.sqrt(rank) if lora.by_root else rank)

    def read() -> np.ndarray:
        delta = np.asarray(lora_b.read(), np.float32) @ np.asarray(lora_a.read(), np.float32)
        weight = np.asarray(base.read(), np.float32)
        return weight + np.float32(scale) * (delta.T if is_conv1d else delta)

    return Stored(base.name, shape, read)


def write_adapters(folder: Path, adapters: dict[str, Any], config: BackboneConfig, alpha: float, base: str) -> None:
    """Write adapters as PEFT saves them.

    Args:
        folder: exists.
        adapters: of `models.lora.init`, on the host.
        config: of the backbone whose kernels they are of.
        alpha: their scale times their rank.
        base: where the model lies, with which they go together.
    """
    tensors, settings = dict[str, np.ndarray](), dict[str, Any]()
    targets, leaves = set[str](), flatten_dict(adapters)
    for weight in backbone_weights(config):
        *place, last = weight.path
        if last == "kernel" and (*place, "A") in leaves:
            for part in "AB":
                name = f"base_model.model.{weight.name.removesuffix('weight')}lora_{part}.weight"
                tensors[name] = np.ascontiguousarray(np.asarray(leaves[*place, part]).T)
            targets.add(place[-1])
            settings = {"r": leaves[*place, "A"].shape[1], "fan_in_fan_out": not weight.transposed}
    settings |= {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none",
        "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": sorted(targets), "inference_mode": True,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS[0], metadata={"format": "pt"})
    (folder / WEIGHTS[0]).chmod((folder / CONFIG).stat().st_mode)  # safetensors makes its files private

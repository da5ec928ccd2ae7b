"""The layouts in which latent reasoners are published, peeled down to plain Hugging Face names.

COCONUT's original is a state dict of `base_causallm.*` and `embedding.weight`; CODI's original has the language model
under `codi.`, with LoRA adapters beside the base weights, and its projector under `prj.`. In Hugging Face's layouts the
names are those of the language model, and CODI's projector is `projector.*`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.interop.weights import Stored

Kind = Literal["coconut", "codi", "codi_hugging_face", "plain"]
_PROJECTOR_NAMES = {"1": "1", "3": "3", "ln": "4"}  # of the original -> of Hugging Face's layout
_LORA_A, _LORA_B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."


@dataclasses.dataclass(frozen=True)
class Layout:
    """A checkpoint's tensors under Hugging Face's names.

    Attributes:
        kind: "coconut" and "codi" are the originals; "plain" has the language model alone.
        backbone: "gpt2" or "llama", by the tensors' names.
        model: the language model's tensors, adapters merged.
        projector: CODI's `projector.{1,3,4}.*`; empty for others.
        source: the file or directory.
    """

    kind: Kind
    backbone: Literal["gpt2", "llama"]
    model: dict[str, Stored]
    projector: dict[str, Stored]
    source: str

    @property
    def embedding(self) -> Stored:
        """The token embedding [V, D]."""
        return self.model[EMBEDDING[self.backbone]]


EMBEDDING = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}
_FINAL_NORM = {"gpt2": "transformer.ln_f.weight", "llama": "model.norm.weight"}


def recognise(stored: Mapping[str, Stored], source: str, lora_alpha: float | None) -> Layout:
    """Find out which layout a checkpoint has, and take it off.

    Args:
        stored: by the names in the file.
        source: the file or directory, for messages.
        lora_alpha: the scale of LoRA adapters is lora_alpha / rank; None if it is not known.
    Raises:
        UserError: no language model in it, adapters without their scale, or half an adapter.
    """
    tensors = _strip_all(dict(stored), "module.")
    kind: Kind = "plain"
    projector: dict[str, Stored] = {}
    if any(name.startswith("base_causallm.") for name in tensors):
        kind, tensors = "coconut", _coconut(tensors, source)
    elif any(name.startswith("codi.") for name in tensors):
        kind = "codi"
        projector = {f"projector.{_hugging_face_name(n, source)}": t for n, t in _with_prefix(tensors, "prj.").items()}
        _refuse_others(tensors, ("codi.", "prj."), source)
        tensors = _strip_all(_with_prefix(tensors, "codi."), "base_model.model.")
    elif any(name.startswith("projector.") for name in tensors):
        kind = "codi_hugging_face"
        projector = {name: t for name, t in tensors.items() if name.startswith("projector.")}
        tensors = {name: t for name, t in tensors.items() if name not in projector}
    tensors = _merge_lora(tensors, lora_alpha, source)
    # GPT-2 and Llama saved without their head have no prefix.
    for marker, prefix in (("wte.weight", "transformer."), ("embed_tokens.weight", "model.")):
        if marker in tensors:
            tensors = {name if name == "lm_head.weight" else prefix + name: t for name, t in tensors.items()}
    for backbone, name in EMBEDDING.items():
        # Of tensors that share their memory, safetensors' save_model keeps the first in the alphabet.
        if name not in tensors and _FINAL_NORM[backbone] in tensors and "lm_head.weight" in tensors:
            tensors[name] = tensors["lm_head.weight"]
        if name in tensors:
            return Layout(kind, "gpt2" if backbone == "gpt2" else "llama", tensors, projector, source)
    raise UserError(
        f"{source}: neither transformer.wte.weight nor model.embed_tokens.weight is in it; give a GPT-2 or Llama "
        "checkpoint, or a reasoner's in COCONUT's or CODI's layout"
    )


def _with_prefix(tensors: dict[str, Stored], prefix: str) -> dict[str, Stored]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _strip_all(tensors: dict[str, Stored], prefix: str) -> dict[str, Stored]:
    """Without the prefix, if all have it."""
    return _with_prefix(tensors, prefix) if tensors and all(name.startswith(prefix) for name in tensors) else tensors


def _refuse_others(tensors: dict[str, Stored], prefixes: tuple[str, ...], source: str) -> None:
    for name in tensors:
        if not name.startswith(prefixes):
            raise UserError(f"{source}: tensor {name} is unexpected; give a checkpoint in COCONUT's or CODI's layout")


def _hugging_face_name(name: str, source: str) -> str:
    number, _, part = name.partition(".")
    if number not in _PROJECTOR_NAMES:
        raise UserError(f"{source}: tensor prj.{name} is unexpected; CODI's projector has prj.1, prj.3 and prj.ln")
    return f"{_PROJECTOR_NAMES[number]}.{part}"


def _coconut(tensors: dict[str, Stored], source: str) -> dict[str, Stored]:
    """The language model; `embedding.weight` has to repeat its token embedding."""
    _refuse_others(tensors, ("base_causallm.", "embedding.weight"), source)
    model = _with_prefix(tensors, "base_causallm.")
    copy = tensors.get("embedding.weight")
    original = next((model[name] for name in EMBEDDING.values() if name in model), None)
    if copy is not None and original is not None and not np.array_equal(copy.read(), original.read()):
        raise UserError(f"{source}: tensor embedding.weight differs from {original.name}; the checkpoint is corrupt")
    return model


def _merge_lora(tensors: dict[str, Stored], alpha: float | None, source: str) -> dict[str, Stored]:
    """W + alpha / r * B A for every weight that has an adapter."""
    adapted = {name.split(".lora_")[0] for name in tensors if ".lora_" in name}
    if adapted and not alpha:
        raise UserError(
            f"{source}: {len(adapted)} weights have LoRA adapters whose scale is not in the file; give their alpha "
            "(config.lora_alpha, published: 32)"
        )
    out = {name.replace(_BASE, "."): tensor for name, tensor in tensors.items() if ".lora_" not in name}
    used = {f"{module}{suffix}" for module in adapted for suffix in (_LORA_A, _LORA_B)}
    for name in tensors:
        if ".lora_" in name and name not in used:
            raise UserError(f"{source}: tensor {name} is unexpected; only adapters named 'default' of rank r are known")
    for module in adapted:
        names = (f"{module}.base_layer.weight", module + _LORA_A, module + _LORA_B)
        for name in names:
            if name not in tensors:
                raise UserError(f"{source}: tensor {name} is missing beside {module}'s adapter; give the whole file")
        base, lora_a, lora_b = (tensors[name] for name in names)
        out[f"{module}.weight"] = _merged(base, lora_a, lora_b, float(alpha or 0), source)
    return out


def _merged(base: Stored, lora_a: Stored, lora_b: Stored, alpha: float, source: str) -> Stored:
    """A weight [out, in], or Conv1D's [in, out], with its adapter A [r, in], B [out, r] added when it is read."""
    (rank, inputs), (outputs, rank_b) = lora_a.shape, lora_b.shape
    linear, conv1d = (outputs, inputs), (inputs, outputs)
    # A square Conv1D looks like a square Linear: the names tell.
    is_conv1d = any(f".{name}." in f"{base.name}." for name in ("c_attn", "c_proj", "c_fc"))
    wanted = conv1d if is_conv1d else linear
    if rank != rank_b or tuple(base.shape) != wanted:
        raise UserError(
            f"{source}: tensor {lora_b.name} {list(lora_b.shape)} and {lora_a.name} {list(lora_a.shape)} don't fit "
            f"{base.name} {list(base.shape)}; give adapters of this model"
        )

    def read() -> np.ndarray:
        delta = np.asarray(lora_b.read(), np.float32) @ np.asarray(lora_a.read(), np.float32)
        weight = np.asarray(base.read(), np.float32)
        return weight + np.float32(alpha / rank) * (delta.T if is_conv1d else delta)

    return Stored(base.name, wanted, read)

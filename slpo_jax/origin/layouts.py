"""The layouts in which latent reasoners are published, peeled down to plain Hugging Face names.

COCONUT's original is a state dict of `base_causallm.*` and `embedding.weight`; CODI's original has the language model
under `codi.`, with LoRA adapters beside the base weights, and its projector under `prj.`. In Hugging Face's layouts the
names are those of the language model, and CODI's projector is `projector.*`.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.interop.adapters import Lora, merge_lora
from slpo_jax.interop.weights import Stored
from slpo_jax.origin.gates import take_gate

Kind = Literal["coconut", "codi", "codi_hugging_face", "plain"]
_PROJECTOR_NAMES = {"1": "1", "3": "3", "ln": "4"}  # of the original -> of Hugging Face's layout


@dataclasses.dataclass(frozen=True)
class Layout:
    """A checkpoint's tensors under Hugging Face's names.

    Attributes:
        kind: "coconut" and "codi" are the originals; "plain" has the language model alone.
        backbone: "gpt2" or "llama", by the tensors' names.
        model: the language model's tensors, adapters merged.
        projector: CODI's `projector.{1,3,4}.*`; empty for others.
        source: the file or directory.
        gate: the stopping gate's `gate.out.*` and, of two layers, `gate.hidden.*`; empty without one.
    """

    kind: Kind
    backbone: Literal["gpt2", "llama"]
    model: dict[str, Stored]
    projector: dict[str, Stored]
    source: str
    gate: dict[str, Stored] = dataclasses.field(default_factory=dict)

    @property
    def embedding(self) -> Stored:
        """The token embedding [V, D]."""
        return self.model[EMBEDDING[self.backbone]]


EMBEDDING = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}
_FINAL_NORM = {"gpt2": "transformer.ln_f.weight", "llama": "model.norm.weight"}


def recognise(stored: Mapping[str, Stored], source: str, lora: Lora | None) -> Layout:
    """Find out which layout a checkpoint has, and take it off.

    Args:
        stored: by the names in the file.
        source: the file or directory, for messages.
        lora: how LoRA adapters are scaled; None if nothing says it.
    Raises:
        UserError: no language model in it, adapters without their scale, or half an adapter.
    """
    tensors = _strip_all(dict(stored), "module.")
    tensors, gate = take_gate(tensors, source)
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
    if not any(table in name for name in tensors for table in ("wte.", "embed_tokens.", "lm_head.")):
        raise _unknown(stored, source)
    tensors = merge_lora(tensors, lora, source)
    # GPT-2 and Llama saved without their head have no prefix.
    for marker, prefix in (("wte.weight", "transformer."), ("embed_tokens.weight", "model.")):
        if marker in tensors:
            tensors = {name if name == "lm_head.weight" else prefix + name: t for name, t in tensors.items()}
    for backbone, name in EMBEDDING.items():
        # Of tensors that share their memory, safetensors' save_model keeps the first in the alphabet.
        if name not in tensors and _FINAL_NORM[backbone] in tensors and "lm_head.weight" in tensors:
            tensors[name] = tensors["lm_head.weight"]
        if name in tensors:
            return Layout(kind, "gpt2" if backbone == "gpt2" else "llama", tensors, projector, source, gate)
    raise _unknown(stored, source)


def _unknown(stored: Mapping[str, Stored], source: str) -> UserError:
    """The error of a file without a language model, with what it holds: its names' first parts, and one whole name."""
    counts = collections.Counter(name.split(".")[0] for name in stored)
    shown = [f"{count} {first}.*" if count > 1 else first for first, count in counts.most_common(4)]
    held = ", ".join([*shown, *([f"{len(counts) - 4} other prefixes"] if len(counts) > 4 else [])])
    example = next(name for name in stored if name.split(".")[0] == counts.most_common(1)[0][0])
    return UserError(
        f"{source}: neither transformer.wte.weight nor model.embed_tokens.weight is in it, but {held}, e.g. {example}; "
        "give a GPT-2 or Llama checkpoint, or a reasoner's in COCONUT's or CODI's layout"
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

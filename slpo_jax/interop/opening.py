"""One door to checkpoints that others wrote: local files and directories, hub ids, GGUF."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slpo_jax.errors import UserError
from slpo_jax.interop import description as descriptions
from slpo_jax.interop.description import Description, read_description
from slpo_jax.interop.layouts import Layout, recognise
from slpo_jax.interop.tensors import WEIGHT_FILES, Tensors, open_tensors, read_start
from slpo_jax.interop.weights import Stored
from slpo_jax.io.files import read_json
from slpo_jax.io.hub import TEXTS, is_hub_id, snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SIDE_FILE = "reasoner.safetensors"  # gate and projector of an export
GENERATION_FILE = "generation_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_WEIGHTS = ("*.safetensors", "*.bin")


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint whose tensors have been listed, not read.

    Attributes:
        source: the file or directory, for messages.
        layout: its tensors under Hugging Face's names.
        model: the config.json that goes with them, the checkpoint's own or the base model's.
        model_source: where that is from.
        has_own_model: whether it's the checkpoint's own; the base's vocabulary lacks the reasoner's tokens.
        description: what our exports say of themselves; None for others.
        gate: tensors of an export's stopping gate, empty without one.
        tokenizer: loads the checkpoint's or the base's tokenizer; None if neither has one.
        generation: its generation_config.json, empty without one.
    """

    source: str
    layout: Layout
    model: dict[str, Any]
    model_source: str
    has_own_model: bool
    description: Description | None
    gate: dict[str, Stored]
    tokenizer: Callable[[], "PreTrainedTokenizerFast"] | None
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)


def locate(source: str, key: str, weights: bool = True) -> Path:
    """The local file or directory of a path or hub id.

    Args:
        source: an existing path, or a hub id, which is downloaded unless it is in the hub's cache.
        key: the config's or flag's name, for messages.
        weights: False fetches config and tokenizer alone.
    Raises:
        UserError: no such path, or a hub id that can't be had.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    if not is_hub_id(source) or path.suffix in (".bin", ".pt", ".pth", ".safetensors", ".gguf"):
        raise UserError(
            f"{key}: {source} is no file, directory or hub id; give a model's, or WORKDIR/checkpoints/STAGE"
        )
    return snapshot(source, key, (*TEXTS, *(_WEIGHTS if weights else ())))


def open_checkpoint(
    init: str,
    base: str,
    lora_alpha: float | None,
    load_tokenizer: Callable[[str], "PreTrainedTokenizerFast"],
) -> Opened:
    """Open what `config.init` names.

    Args:
        init: a Hugging Face directory or hub id, a torch or safetensors file, or a GGUF file.
        base: directory or hub id of the base model, for a file that comes without config and tokenizer; "" for none.
        lora_alpha: scale of LoRA adapters times their rank; None if it is not known.
        load_tokenizer: directory -> tokenizer.
    Raises:
        UserError: one line that names the key, file or tensor at fault, and the remedy.
    """
    path = locate(init, "config.init")
    if path.is_file() and _starts_with_gguf(path):
        return _open_gguf(path)
    folder = path if path.is_dir() else None
    layout = recognise(_stored(open_tensors(path)), str(path), _alpha(folder, lora_alpha))
    # An original state dict goes with its base model, even where a config of the training lies beside it.
    original = layout.kind in ("coconut", "codi")
    own = folder is not None and (folder / descriptions.MODEL_FILE).is_file() and not (original and base)
    model_folder = folder if own and folder else _base(base, path)
    with_tokenizer = next((near for near in (folder, model_folder) if near and _has_tokenizer(near)), None)
    if with_tokenizer is None and base:
        with_tokenizer = next(filter(_has_tokenizer, [locate(base, "config.base", weights=False)]), None)
    described = read_description(folder) if folder else None
    gate: dict[str, Stored] = {}
    if described is not None and folder is not None:
        side = _stored(open_tensors(folder / SIDE_FILE)) if (folder / SIDE_FILE).is_file() else {}
        gate = {name: tensor for name, tensor in side.items() if name.startswith("gate.")}
        projector = {name: tensor for name, tensor in side.items() if name not in gate}
        layout = dataclasses.replace(layout, projector=projector)
    source = model_folder / descriptions.MODEL_FILE
    return Opened(
        source=str(path),
        layout=layout,
        model=read_json(source, descriptions.REMEDY),
        model_source=str(source),
        has_own_model=own and not original,
        description=described,
        gate=gate,
        tokenizer=partial(load_tokenizer, str(with_tokenizer)) if with_tokenizer else None,
        generation=read_json(model_folder / GENERATION_FILE, descriptions.REMEDY, default={}),
    )


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _starts_with_gguf(path: Path) -> bool:
    return read_start(path, 4) == b"GGUF"


def _open_gguf(path: Path) -> Opened:
    from slpo_jax.interop.gguf import open_gguf

    found = open_gguf(path)
    layout = recognise(_stored(found.tensors), str(path), None)
    return Opened(str(path), layout, found.config, str(path), True, None, {}, found.tokenizer)


def _stored(tensors: Tensors) -> dict[str, Stored]:
    return {name: Stored(name, tensors.shape(name), partial(tensors.read, name)) for name in tensors.names()}


def _base(base: str, path: Path) -> Path:
    if not base:
        raise UserError(
            f"config.base: not set, and {path} comes without config.json; give the directory or hub id of the model "
            "that it was trained from"
        )
    return locate(base, "config.base", weights=False)


def _alpha(folder: Path | None, alpha: float | None) -> float | None:
    """PEFT's own word for LoRA's scale, where the checkpoint has it, goes before what was given."""
    path = folder and folder / "adapter_config.json"
    if path is None or not path.is_file():
        return alpha
    values = read_json(path, descriptions.REMEDY)
    for key in ("use_rslora", "use_dora", "alpha_pattern"):
        if values.get(key):
            raise UserError(f"{path}: {key} is not supported; merge the adapters with peft's merge_and_unload()")
    found = values.get("lora_alpha")
    if found is not None and (type(found) not in (int, float) or found <= 0):
        raise UserError(f"{path}: lora_alpha is {found!r}, not a positive number; mend it")
    return float(found) if found else alpha


def has_weights(folder: Path) -> bool:
    """Whether a directory is a model in Hugging Face's layout."""
    return any((folder / name).is_file() for name in WEIGHT_FILES)

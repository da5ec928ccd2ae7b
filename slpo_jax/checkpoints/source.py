"""One door to checkpoints that others wrote: local files and directories, hub ids, GGUF."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging

from slpo_jax.checkpoints import decoder
from slpo_jax.checkpoints import description as descriptions
from slpo_jax.checkpoints.adapters import (
    CONFIG,
    WEIGHTS,
    adapted,
    adapter_file,
    holds_adapters_alone,
    lora_of,
    refuse_half_tied,
)
from slpo_jax.checkpoints.architectures import Architecture, Unwrapped
from slpo_jax.checkpoints.description import Description, read_description
from slpo_jax.checkpoints.gates import said_threshold
from slpo_jax.checkpoints.hf_config import BACKBONE_OF, BackboneConfig, from_hugging_face
from slpo_jax.checkpoints.layouts import are_adapters, recognise
from slpo_jax.checkpoints.tensors import Stored, open_tensors, read_start
from slpo_jax.checkpoints.weights import EMBEDDING, check_tree, gate_weights
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.io.artifact import CHECKSUMS, changed, read_checksums
from slpo_jax.io.files import read_json
from slpo_jax.io.hub import TEXTS, is_hub_id, snapshot
from slpo_jax.io.workdir import StageFolder, Workdir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SIDE_FILE = "reasoner.safetensors"  # of an export: its gate, and what its architecture has beside the language model
GENERATION_FILE = "generation_config.json"
REFUSING = "bad_words_ids"
"""An export's key with which transformers' own `generate` fails, where our code is not trusted, or not there."""
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_WEIGHTS = ("*.safetensors", "*.bin")


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a checkpoint is: all that lies between a path and parameters. Its tensors have been listed, not read.

    Attributes:
        source: as it was given.
        path: the file or directory, for messages.
        architecture: None where it has a language model's tensors alone, which are a base model's or
            `architectures.PLAIN`'s.
        backbone: its name in `models.reasoner.BACKBONES`; of those with the same names of tensors, the config's.
        description: what it says of itself, its gate included; None for what this project did not write.
        tokenizer: loads its tokenizer, or the base's; None if neither has one.
        orbax: the checkpoint, where it is one of ours; all below is of others.
        base: where its tokenizer or config is from, if it lacks one.
        lora_alpha: scale of its LoRA adapters times their rank, if it has some.
        tensors: under Hugging Face's names, an export's side file among them.
        model: the config.json that goes with them, the checkpoint's own or the base model's.
        model_source: where that is from.
        has_own_model: whether it's the checkpoint's own; the base's vocabulary lacks the reasoner's tokens.
        generation: its generation_config.json, empty without one.
        model_base: `config.base` where the shapes are from there, "" for the checkpoint's own.
        tokenizer_base: the same of the tokenizer.
        threshold: of a published gate, where its files say one.
    """

    source: str
    path: str
    architecture: type[Architecture] | None
    backbone: str
    description: Description | None
    tokenizer: Callable[[], "PreTrainedTokenizerFast"] | None
    orbax: Path | None = None
    base: str = ""
    lora_alpha: float | None = None
    tensors: Unwrapped = Unwrapped({}, {})
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    model_source: str = ""
    has_own_model: bool = True
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)
    model_base: str = ""
    tokenizer_base: str = ""
    threshold: float | None = None

    @property
    def reasoner(self) -> str | None:
        """Its name in `REASONERS`, None for a language model's tensors alone."""
        return f"{self.architecture.name}_{self.backbone}" if self.architecture else None

    @property
    def gate_hidden(self) -> int | None:
        """Hidden width of its stopping gate, 0 for a linear one; None if it has none."""
        if self.description is not None:
            return self.description.gate
        hidden = self.tensors.gate.get("gate.hidden.weight")
        return (hidden.shape[0] if hidden else 0) if self.tensors.gate else None

    @property
    def gate_trained(self) -> bool:
        """Whether there is a stopping gate that is no longer random."""
        return self.description.gate_trained if self.description else self.gate_published

    @property
    def gate_published(self) -> bool:
        """Whether that is somebody else's."""
        return self.description is None and bool(self.tensors.gate)

    @property
    def stage(self) -> StageFolder | None:
        """The folder of one of our checkpoints."""
        return None if self.orbax is None else StageFolder.of(self.orbax)

    @property
    def workdir(self) -> Workdir | None:
        """The run around one of our checkpoints; None if it lies alone."""
        return None if self.stage is None else self.stage.workdir

    @property
    def embedding(self) -> Stored:
        """The token embedding [V, D]."""
        return self.tensors.model[EMBEDDING[BACKBONE_OF[self.backbone]]]

    def shapes(self) -> BackboneConfig:
        """The backbone's, of its config.json.

        Raises:
            UserError: they are of another kind of model than its tensors, or not supported.
        """
        found = from_hugging_face(self.model, self.model_source)
        if (kind := self.model["model_type"]) != self.backbone:
            raise UserError(
                f"{self.model_source}: is of a {kind} model, but {self.path} has {self.backbone}'s tensors; give the "
                "config of its own base model"
            )
        return found


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


def open_checkpoint(init: str, base: str, lora_alpha: float | None, key: str = "config.init") -> Identity:
    """Open what `config.init` names, of others than this project.

    Args:
        init: a Hugging Face directory or hub id, a torch or safetensors file, a GGUF file, or a folder of PEFT's.
        base: directory or hub id of the base model, for what comes without config and tokenizer, or holds adapters
            alone; "" for none.
        lora_alpha: scale of LoRA adapters times their rank; None if it is not known.
        key: the config's name for `init`, for messages.
    Raises:
        UserError: one line that names the key, file or tensor at fault, and the remedy.
    """
    path = locate(init, key)
    if path.is_file() and _starts_with_gguf(path):
        return _open_gguf(init, path, base, lora_alpha)
    folder = path if path.is_dir() else None
    if folder and holds_adapters_alone(folder):
        return _open_adapters(init, folder, base, lora_alpha)
    if path.name in WEIGHTS and not folder:
        raise UserError(
            f"{key}: {path} holds PEFT's adapters alone; give its folder, {path.parent}, which has {CONFIG}"
        )
    stored = open_tensors(path)
    below = _below(path, "the model that they were trained on", base, lora_alpha) if are_adapters(stored) else None
    with fitting(base if below else ""):
        lora = lora_of(folder, lora_alpha)
        architecture, tensors = recognise(stored, str(path), lora, below.tensors.model if below else None)
    # An original state dict goes with its base model, even where a config of the training lies beside it.
    original = tensors.original
    own = folder is not None and _has_config(folder, original) and not (original and base)
    model_folder = folder if own and folder else _base(base, path)
    with_tokenizer = _tokenizer_folder(folder, model_folder, base)
    described = read_description(folder) if folder else None
    written = read_checksums(folder) if folder and described else {}
    texts = {name: value for name, value in written.items() if name.endswith(".json")}
    if folder and (others := changed(folder, texts)):
        logging.warning("%s: %s changed since it was written, as its %s has it", folder, ", ".join(others), CHECKSUMS)
    tensors = _with_side_file(folder or path.parent, tensors, described)
    source = model_folder / descriptions.MODEL_FILE
    model = read_json(source, descriptions.REMEDY)
    generation = read_json(model_folder / GENERATION_FILE, descriptions.REMEDY, default={})
    if described is None and isinstance(generation.get(REFUSING), str):
        text = "%s: is a copy of an export without %s, and is opened without what that says; copy it and %s too"
        logging.warning(text, path, descriptions.FILE, SIDE_FILE)
    published = described is None and bool(tensors.gate)
    return Identity(
        source=init,
        path=str(path),
        architecture=type(described.architecture) if described else architecture,
        backbone=_backbone(tensors, model),
        description=described,
        tokenizer=partial(load_tokenizer, str(with_tokenizer)) if with_tokenizer else None,
        base=base,
        lora_alpha=lora_alpha,
        tensors=tensors,
        model=model,
        model_source=str(source),
        has_own_model=own and not original,
        generation=generation,
        model_base="" if own else base,
        tokenizer_base="" if with_tokenizer == folder else base,
        threshold=said_threshold(model, folder or path.parent) if published else None,
    )


def _backbone(tensors: Unwrapped, model: Mapping[str, Any]) -> str:
    """The name of a backbone: its config's, where that goes with the names of its tensors."""
    kind, stored = model.get("model_type", ""), next(x for x, table in EMBEDDING.items() if table in tensors.model)
    return kind if BACKBONE_OF.get(kind) == stored else stored


def _with_side_file(folder: Path, tensors: Unwrapped, described: Description | None) -> Unwrapped:
    """The tensors of an export with the gate and head that its description names; others are as they were.

    Raises:
        UserError: a part of an export is missing, or lies where an export has none.
    """
    path = folder / SIDE_FILE
    if described is None:
        if path.is_file():
            raise UserError(
                f"{path}: is read only with the {descriptions.FILE} beside it; give the export's whole directory"
            )
        return tensors
    for tensor in (tensors.gate | tensors.head).values():
        raise UserError(
            f"{folder}: tensor {tensor.name} lies among the language model's, but {descriptions.FILE} is of an export, "
            f"which has it in {SIDE_FILE}; give the export as it was written, or remove {descriptions.FILE}"
        )
    side = open_tensors(path) if path.is_file() else {}
    width = described.model.n_embd
    of_gate = gate_weights(width, described.gate) if described.gate is not None else []
    check_tree(described.architecture.heads(width) + of_gate, side, str(path))
    gate = {name: tensor for name, tensor in side.items() if name.startswith("gate.")}
    head = {name: tensor for name, tensor in side.items() if name not in gate}
    beside = folder / decoder.FILE
    exported_decoder = decoder.of_export(open_tensors(beside), str(beside)) if beside.is_file() else None
    return tensors._replace(gate=gate, head=head, decoder=exported_decoder)


def _tokenizer_folder(folder: Path | None, model_folder: Path, base: str) -> Path | None:
    """The checkpoint's own, its config's or the base's folder, the first of them that has a tokenizer."""
    found = next((near for near in (folder, model_folder) if near and _has_tokenizer(near)), None)
    if found is None and base:
        return next(filter(_has_tokenizer, [locate(base, "config.base", weights=False)]), None)
    return found


def _open_adapters(init: str, folder: Path, base: str, lora_alpha: float | None) -> Identity:
    """A folder of PEFT's: the base model with its adapters merged."""
    named = "" if base else read_json(folder / CONFIG, descriptions.REMEDY).get("base_model_name_or_path")
    below = _below(folder, str(named), base, lora_alpha)
    lora = lora_of(folder, lora_alpha)
    file = adapter_file(folder)
    assert file is not None
    tensors = below.tensors
    with fitting(base):
        model = adapted(tensors.model, open_tensors(file), lora, str(file))
    own, found = _has_tokenizer(folder), dataclasses.replace(below, tensors=tensors._replace(model=model))
    refuse_half_tied(below.embedding, found.embedding, "lm_head.weight" in model, folder)
    return dataclasses.replace(
        found,
        source=init,
        path=str(folder),
        model=below.model | {"vocab_size": found.embedding.shape[0]},
        tokenizer=partial(load_tokenizer, str(folder)) if own else below.tokenizer,
        model_base=base,
        tokenizer_base="" if own else base,
    )


def _below(path: Path, model: str, base: str, lora_alpha: float | None) -> Identity:
    """The base model of adapters that lie without it.

    Args:
        path: the adapters'.
        model: that they are of, for messages.
    """
    if not base:
        raise UserError(
            f"config.base: not set, and {path} holds LoRA adapters alone, of {model}; give that model's directory or "
            "hub id"
        )
    below = locate(base, "config.base")
    if below.is_dir() and holds_adapters_alone(below):
        raise UserError(f"config.base: {base} holds adapters alone too; give the model that they were trained on")
    return open_checkpoint(base, base, lora_alpha, "config.base")


@contextlib.contextmanager
def fitting(base: str) -> Iterator[None]:
    """Name `config.base` in the error of what doesn't fit it; "" adds nothing."""
    try:
        yield
    except UserError as error:
        if not base:
            raise
        raise UserError(f"config.base: {base} doesn't fit: {error}") from error


def _has_config(folder: Path, original: bool) -> bool:
    """Whether it has a config.json; SIM-CoT's folders, in the layout of original programs, have an empty one."""
    path = folder / descriptions.MODEL_FILE
    return path.is_file() and not (original and not path.stat().st_size)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _starts_with_gguf(path: Path) -> bool:
    return read_start(path, 4) == b"GGUF"


def _open_gguf(init: str, path: Path, base: str, lora_alpha: float | None) -> Identity:
    from slpo_jax.checkpoints.gguf import open_gguf

    found = open_gguf(path)
    architecture, tensors = recognise(found.tensors, str(path), None)
    return Identity(
        init, str(path), architecture, _backbone(tensors, found.config), None, found.tokenizer, None, base, lora_alpha,
        tensors, found.config, str(path),
    )  # fmt: skip


def _base(base: str, path: Path) -> Path:
    if not base:
        raise UserError(
            f"config.base: not set, and {path} comes without config.json; give the directory or hub id of the model "
            "that it was trained from"
        )
    return locate(base, "config.base", weights=False)

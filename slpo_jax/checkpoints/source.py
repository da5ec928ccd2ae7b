"""One door to checkpoints that others wrote: local files and directories, hub ids, GGUF."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging

from slpo_jax.architectures import PLAIN, Architecture, Unwrapped
from slpo_jax.architectures.tensors import Stored, open_tensors, read_start, weights_file
from slpo_jax.architectures.weights import EMBEDDING, check_tree, gate_weights
from slpo_jax.checkpoints import decoder
from slpo_jax.checkpoints import description as descriptions
from slpo_jax.checkpoints.adapters import CONFIG, adapter_file, lora_of
from slpo_jax.checkpoints.description import Description, read_description
from slpo_jax.checkpoints.hf_config import BACKBONE_OF, from_hugging_face, supported_kind
from slpo_jax.checkpoints.layouts import are_adapters, recognise, said_threshold
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError, key_name
from slpo_jax.io.artifact import CHECKSUMS, changed, read_checksums
from slpo_jax.io.files import read_json
from slpo_jax.io.hub import TEXTS, is_hub_id, snapshot
from slpo_jax.io.workdir import StageFolder, Workdir
from slpo_jax.models.reasoner import BackboneConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SIDE_FILE = "reasoner.safetensors"  # of an export: its gate, and what its architecture has beside the language model
GENERATION_FILE = "generation_config.json"
_WEIGHTS = ("*.safetensors", "*.bin")
_TEXTS = ("tokenizer.json", "vocab.json")  # one of them is a tokenizer


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
        from_base: `config.base` where shapes or tokenizer are from there, "" where all is the checkpoint's own.
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
    from_base: str = ""
    threshold: float | None = None

    @property
    def reasoner(self) -> str | None:
        """Its name in `REASONERS`, None for a language model's tensors alone."""
        return f"{self.architecture.name}_{self.backbone}" if self.architecture else None

    @property
    def likely_reasoner(self) -> str:
        """That, and `architectures.PLAIN` for them."""
        return self.reasoner or f"{PLAIN.name}_{self.backbone}"

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
        raise UserError(key, f"{source} is no file, directory or hub id; give a model's, or WORKDIR/checkpoints/STAGE")
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
    if path.is_file() and read_start(path, 4) == b"GGUF":
        return _open_gguf(init, path, base, lora_alpha)
    adapters, whole = adapter_file(path), weights_file(path)
    if adapters and whole:
        raise UserError(f"{path}: holds both {whole.name} and {adapters.name}; keep the one that is meant")
    stored = open_tensors(adapters or path)
    opened = _open_adapters if adapters or are_adapters(stored) else _open_whole
    return opened(init, path, stored, base, lora_alpha)


def _open_whole(init: str, path: Path, stored: dict[str, Stored], base: str, lora_alpha: float | None) -> Identity:
    """A whole model in a directory or a file."""
    architecture, tensors = recognise(stored, str(path), lora_of(path, lora_alpha))
    # An original state dict goes with its base model, even where a config of the training lies beside it.
    own = path if _has(path, descriptions.MODEL_FILE) and not (tensors.original and base) else None
    needed = own is None or not _has(path, *_TEXTS)  # what isn't need not be to be had
    below = locate(base, "config.base", weights=False) if base and needed else None
    model_folder = own or below
    if model_folder is None:
        raise UserError(
            f"{key_name('config.base')}: not set, and {path} comes without config.json; give the directory or hub id "
            "of the model that it was trained from"
        )
    texts = next((x for x in (path, model_folder, below) if x and _has(x, *_TEXTS)), None)
    described, folder = read_description(path), path if path.is_dir() else path.parent
    tensors = _with_side_file(folder, tensors, described)
    model_source = model_folder / descriptions.MODEL_FILE
    model = read_json(model_source, descriptions.REMEDY)
    if own:  # others of the same tensors' names are none of ours
        supported_kind(model, str(model_source))
    return Identity(
        source=init,
        path=str(path),
        architecture=type(described.architecture) if described else architecture,
        backbone=_backbone(tensors, model),
        description=described,
        tokenizer=partial(load_tokenizer, str(texts)) if texts else None,
        base=base,
        lora_alpha=lora_alpha if any(".lora_" in name for name in stored) else None,
        tensors=tensors,
        model=model,
        model_source=str(model_source),
        has_own_model=own is not None and not tensors.original,
        generation=read_json(model_folder / GENERATION_FILE, descriptions.REMEDY, default={}),
        from_base="" if own and texts in (path, None) else base,
        threshold=said_threshold(model, folder) if tensors.gate and not described else None,
    )


def _backbone(tensors: Unwrapped, model: dict[str, Any]) -> str:
    """The name of a backbone: its config's, where that goes with the names of its tensors."""
    kind, stored = model.get("model_type", ""), next(x for x, table in EMBEDDING.items() if table in tensors.model)
    return kind if BACKBONE_OF.get(kind) == stored else stored


def _with_side_file(folder: Path, tensors: Unwrapped, described: Description | None) -> Unwrapped:
    """The tensors of an export with the gate and head that its description names; others are as they were.

    Raises:
        UserError: a part of an export is missing, or lies without its description.
    """
    path, beside = folder / SIDE_FILE, folder / decoder.FILE
    if described is None:
        if path.is_file():
            raise UserError(
                f"{path}: is read only with the {descriptions.FILE} beside it; give the export's whole directory"
            )
        return tensors
    texts = {name: value for name, value in read_checksums(folder).items() if name.endswith(".json")}
    if others := changed(folder, texts):
        logging.warning("%s: %s changed since it was written, as its %s has it", folder, ", ".join(others), CHECKSUMS)
    side, width = open_tensors(path) if path.is_file() else {}, described.model.n_embd
    of_gate = gate_weights(width, described.gate) if described.gate is not None else []
    check_tree(described.architecture.heads(width) + of_gate, side, str(path))
    gate = {name: tensor for name, tensor in side.items() if name.startswith("gate.")}
    head = {name: tensor for name, tensor in side.items() if name not in gate}
    exported_decoder = decoder.of_export(open_tensors(beside)) if beside.is_file() else None
    return tensors._replace(gate=gate, head=head, decoder=exported_decoder)


def _open_adapters(init: str, path: Path, stored: dict[str, Stored], base: str, lora_alpha: float | None) -> Identity:
    """Adapters alone, of PEFT or in a file of CoLaR's program: the base model with them merged."""
    if not base:
        raise UserError(
            f"{key_name('config.base')}: not set, and {path} holds LoRA adapters alone; give the directory or hub id "
            "of the model that they were trained on"
        )
    named = (path.is_dir() and read_json(path / CONFIG, default={}).get("base_model_name_or_path")) or "/"
    if is_hub_id(named) and not any(part.endswith(Path(named).name) for part in Path(base).absolute().parts):
        said = "config.base: is %s, and the adapters of %s were trained on %s, as %s says; give that if it is another"
        logging.warning(said, base, path, named, CONFIG)
    lora, below = lora_of(path, lora_alpha), open_checkpoint(base, "", lora_alpha, "config.base")
    with fitting(base):
        architecture, tensors = recognise(stored, str(path), lora, below.tensors.model)
    if architecture is None:
        tensors = below.tensors._replace(model=tensors.model)
    found = dataclasses.replace(
        below, tensors=tensors, source=init, path=str(path), base=base, lora_alpha=lora_alpha, from_base=base
    )
    if _has(path, *_TEXTS):
        found = dataclasses.replace(found, tokenizer=partial(load_tokenizer, str(path)))
    model = below.model | {"vocab_size": found.embedding.shape[0]}
    return dataclasses.replace(found, architecture=architecture or below.architecture, model=model)


@contextlib.contextmanager
def fitting(base: str) -> Iterator[None]:
    """Name `config.base` in the error of what doesn't fit it; "" adds nothing."""
    try:
        yield
    except UserError as error:
        if not base or error.key:
            raise
        raise UserError("config.base", f"{base} doesn't fit: {error}") from error


def _has(folder: Path, *names: str) -> bool:
    """Whether it has one of these files that isn't empty, as config.json is in SIM-CoT's folders; a file has none."""
    return any((folder / name).is_file() and (folder / name).stat().st_size for name in names)


def _open_gguf(init: str, path: Path, base: str, lora_alpha: float | None) -> Identity:
    from slpo_jax.checkpoints.gguf import open_gguf

    found = open_gguf(path)
    architecture, tensors = recognise(found.tensors, str(path), None)
    return Identity(
        init, str(path), architecture, _backbone(tensors, found.config), None, found.tokenizer,
        base=base, tensors=tensors, model=found.config, model_source=str(path),
    )  # fmt: skip

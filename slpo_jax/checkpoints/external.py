"""Open exports and checkpoints that other programs wrote: local files and directories, hub ids, GGUF."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from absl import logging

from slpo_jax.architectures import PLAIN, Architecture, Unwrapped
from slpo_jax.architectures.tensors import (
    Stored,
    open_tensors,
    read_start,
    weights_file,
)
from slpo_jax.architectures.weights import EMBEDDING, check_tree, gate_weights
from slpo_jax.checkpoints import description as descriptions
from slpo_jax.checkpoints.adapters import CONFIG, WEIGHTS, read_lora
from slpo_jax.checkpoints.description import (
    BACKBONE_OF,
    Description,
    from_hugging_face,
    read_description,
    read_model_type,
)
from slpo_jax.checkpoints.external_layouts import (
    DECODER_FILE,
    are_adapters,
    exported_decoder,
    published_threshold,
    recognise,
)
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError, key_name
from slpo_jax.io.artifact import CHECKSUMS, find_changed, read_checksums
from slpo_jax.io.files import TEXTS, is_hub_id, read_json, snapshot
from slpo_jax.models.reasoner import BackboneConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SIDE_FILE = (
    "reasoner.safetensors"  # of an export: its gate, and its architecture's own tensors
)
GENERATION_FILE = "generation_config.json"
_WEIGHTS = ("*.safetensors", "*.bin")
_FILE_SUFFIXES = (".bin", ".pt", ".pth", ".safetensors", ".gguf")  # not a hub id's end
_TEXTS = ("tokenizer.json", "vocab.json")  # a tokenizer has one of these
_EOS = "eos_token_id"


@dataclasses.dataclass(frozen=True)
class ExternalCheckpoint:
    """An export, or a checkpoint of another program; its tensors have been listed, not read.

    Attributes:
        source: as it was given.
        files: the file or directory, and of adapters the base model's.
        architecture: None where it has only the tensors of a language model, which may be a base model's or
            `architectures.PLAIN`'s.
        description: an export's description, its gate included; None where this project did not write it.
        tensors: under Hugging Face's names, an export's side file among them.
        model: the config.json that goes with them, the checkpoint's own or the base model's; its end tokens are those
            of generation_config.json, if that names some.
        model_source: the path of that config.json.
        has_own_model: whether it is the checkpoint's own; the base's vocabulary lacks the reasoner's tokens.
        tokenizer: loads its tokenizer, or the base's; None if neither has one.
        base: `config.base` where shapes or tokenizer are from there, "" where both are the checkpoint's own.
        lora_alpha: the scale of its LoRA adapters times their rank, if it has some.
        threshold: the threshold of a published gate, if its files name one.
    """

    source: str
    files: tuple[Path, ...]
    architecture: type[Architecture] | None
    description: Description | None
    tensors: Unwrapped
    model: dict[str, Any]
    model_source: str
    has_own_model: bool
    tokenizer: Callable[[], "PreTrainedTokenizerFast"] | None
    base: str = ""
    lora_alpha: float | None = None
    threshold: float | None = None
    stage_folder: ClassVar[None] = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The config of an export; {} where this project did not write it."""
        return self.description.config if self.description else {}

    @property
    def config_place(self) -> str:
        """The file of its config, for messages."""
        return f"{self.source}: {descriptions.FILE}"

    @property
    def path(self) -> str:
        """The file or directory, for messages."""
        return str(self.files[0])

    @property
    def backbone(self) -> str:
        """The name in `models.reasoner.BACKBONES`.

        Several backbones name their tensors alike; the config tells which of them this is.
        """
        kind = self.model.get("model_type", "")
        stored = next(
            kind for kind, table in EMBEDDING.items() if table in self.tensors.model
        )
        return kind if BACKBONE_OF.get(kind) == stored else stored

    @property
    def reasoner(self) -> str:
        """The name in `REASONERS`; a language model alone is taken for `PLAIN`'s."""
        return f"{(self.architecture or PLAIN).name}_{self.backbone}"

    @property
    def gate_hidden(self) -> int | None:
        """The hidden width of the stopping gate, 0 for a linear one; None without a gate."""
        if self.description is not None:
            return self.description.gate
        if not self.tensors.gate:
            return None
        hidden = self.tensors.gate.get("gate.hidden.weight")
        return hidden.shape[0] if hidden else 0

    @property
    def gate_trained(self) -> bool:
        """Whether it has a stopping gate that is no longer random."""
        if self.description:
            return self.description.gate_trained
        return bool(self.tensors.gate)

    @property
    def embedding(self) -> Stored:
        """The token embedding [V, D]."""
        return self.tensors.model[EMBEDDING[BACKBONE_OF[self.backbone]]]

    def shapes(self) -> BackboneConfig:
        """Read the backbone's shapes from its config.json.

        Raises:
            UserError: they are of another kind of model than its tensors, or not supported.
        """
        shapes = from_hugging_face(self.model, self.model_source)
        kind = self.model["model_type"]
        if kind != self.backbone:
            raise UserError(
                f"{self.model_source}: is of a {kind} model, but {self.path} has {self.backbone}'s tensors; give the "
                "config of its own base model"
            )
        return shapes


def locate(source: str, key: str, weights: bool = True) -> Path:
    """Return the local file or directory of a path or hub id.

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
    if not is_hub_id(source) or path.suffix in _FILE_SUFFIXES:
        raise UserError(
            key,
            f"{source} is no file, directory or hub id; give a model's, or WORKDIR/checkpoints/STAGE",
        )
    patterns = (*TEXTS, *_WEIGHTS) if weights else TEXTS
    return snapshot(source, key, patterns)


def open_external(
    init: str, base: str, lora_alpha: float | None, key: str = "config.init"
) -> ExternalCheckpoint:
    """Open an export, or a checkpoint that another program wrote.

    Args:
        init: a Hugging Face directory or hub id, a torch or safetensors file, a GGUF file, or a folder of PEFT's.
        base: directory or hub id of the base model, for a file without config and tokenizer, or of adapters
            alone; "" for none.
        lora_alpha: scale of LoRA adapters times their rank; None if it is not known.
        key: the config's name for `init`, for messages.
    Raises:
        UserError: one line that names the key, file or tensor at fault, and the remedy.
    """
    # GGUF files describe themselves.
    path = locate(init, key)
    if path.is_file() and read_start(path, 4) == b"GGUF":
        return _open_gguf(init, path)

    # Everything else has a whole model, or adapters alone.
    adapters = weights_file(path, WEIGHTS)
    model = weights_file(path)
    if adapters and model:
        raise UserError(
            f"{path}: holds both {model.name} and {adapters.name}; keep the one that is meant"
        )
    stored = open_tensors(adapters or path)
    if adapters or are_adapters(stored):
        return _open_adapters(init, path, stored, base, lora_alpha)
    return _open_whole(init, path, stored, base, lora_alpha)


def _open_whole(
    init: str,
    path: Path,
    stored: dict[str, Stored],
    base: str,
    lora_alpha: float | None,
) -> ExternalCheckpoint:
    """Open a whole model in a directory or a file."""
    architecture, tensors = recognise(stored, str(path), read_lora(path, lora_alpha))

    # An original state dict goes with its base model, even where a config of the training lies beside it.
    config_folder = None
    if _has(path, descriptions.MODEL_FILE) and not (tensors.original and base):
        config_folder = path

    # The base model is looked for only where the checkpoint lacks a config or a tokenizer.
    base_folder = None
    if base and (config_folder is None or not _has(path, *_TEXTS)):
        base_folder = locate(base, "config.base", weights=False)

    # The shapes come from the checkpoint's own config, or the base's.
    model_folder = config_folder or base_folder
    if model_folder is None:
        raise UserError(
            f"{key_name('config.base')}: not set, and {path} comes without config.json; give the directory or hub id "
            "of the model that it was trained from"
        )
    model_source = model_folder / descriptions.MODEL_FILE
    model = read_json(model_source, descriptions.REMEDY)
    if config_folder:
        # Models that we don't compute may have the same names of tensors.
        read_model_type(model, str(model_source))
    generation_file = model_folder / GENERATION_FILE
    generation = read_json(generation_file, descriptions.REMEDY, default={})
    if generation.get(_EOS) is not None:
        model = model | {_EOS: generation[_EOS]}

    # The tokenizer comes from the first folder that has one.
    folders = [folder for folder in (path, model_folder, base_folder) if folder]
    texts = next((folder for folder in folders if _has(folder, *_TEXTS)), None)
    tokenizer = partial(load_tokenizer, str(texts)) if texts else None

    # An export describes itself; of a published gate the files may name the threshold.
    described = read_description(path)
    folder = path if path.is_dir() else path.parent
    tensors = _with_side_file(folder, tensors, described)
    threshold = None
    if described:
        architecture = type(described.architecture)
    elif tensors.gate:
        threshold = published_threshold(model, folder)
    has_adapters = any(".lora_" in name for name in stored)
    return ExternalCheckpoint(
        source=init,
        files=(path,),
        architecture=architecture,
        description=described,
        tensors=tensors,
        model=model,
        model_source=str(model_source),
        has_own_model=config_folder is not None and not tensors.original,
        tokenizer=tokenizer,
        base="" if config_folder and texts in (path, None) else base,
        lora_alpha=lora_alpha if has_adapters else None,
        threshold=threshold,
    )


def _with_side_file(
    folder: Path, tensors: Unwrapped, described: Description | None
) -> Unwrapped:
    """Add the gate and head that an export's description names to its tensors; leave others as they are.

    Raises:
        UserError: a part of an export is missing, or lies without its description.
    """
    path = folder / SIDE_FILE
    if described is None:
        if path.is_file():
            raise UserError(
                f"{path}: is read only with the {descriptions.FILE} beside it; give the export's whole directory"
            )
        return tensors

    # Warn where somebody changed the export's texts.
    checksums = read_checksums(folder)
    texts = {name: checksums[name] for name in checksums if name.endswith(".json")}
    edited = find_changed(folder, texts)
    if edited:
        logging.warning(
            "%s: %s changed since it was written, as its %s has it",
            folder,
            ", ".join(edited),
            CHECKSUMS,
        )

    # The side file must have all that the description names.
    side = open_tensors(path) if path.is_file() else {}
    width = described.model.n_embd
    weights = described.architecture.heads(width)
    if described.gate is not None:
        weights = weights + gate_weights(width, described.gate)
    check_tree(weights, side, str(path))

    gate = {name: tensor for name, tensor in side.items() if name.startswith("gate.")}
    head = {name: tensor for name, tensor in side.items() if name not in gate}
    decoder_path = folder / DECODER_FILE
    decoder = None
    if decoder_path.is_file():
        decoder = exported_decoder(open_tensors(decoder_path))
    return tensors._replace(gate=gate, head=head, decoder=decoder)


def _open_adapters(
    init: str,
    path: Path,
    stored: dict[str, Stored],
    base: str,
    lora_alpha: float | None,
) -> ExternalCheckpoint:
    """Open adapters alone, PEFT's or in a file of CoLaR's program, merged into their base model."""
    if not base:
        raise UserError(
            f"{key_name('config.base')}: not set, and {path} holds LoRA adapters alone; give the directory or hub id "
            "of the model that they were trained on"
        )
    if path.is_dir():
        _warn_of_other_base(path, base)

    # Merge the adapters into the base model.
    lora = read_lora(path, lora_alpha)
    base_model = open_external(base, "", lora_alpha, "config.base")
    with fitting(base):
        architecture, tensors = recognise(
            stored, str(path), lora, base_model.tensors.model
        )
    if architecture is None:
        architecture = base_model.architecture
        tensors = base_model.tensors._replace(model=tensors.model)

    # A tokenizer beside the adapters goes before the base's.
    tokenizer = base_model.tokenizer
    if _has(path, *_TEXTS):
        tokenizer = partial(load_tokenizer, str(path))
    adapted = dataclasses.replace(
        base_model,
        source=init,
        files=(path, *base_model.files),
        architecture=architecture,
        tensors=tensors,
        tokenizer=tokenizer,
        base=base,
        lora_alpha=lora_alpha,
    )

    # The embedding may have grown with the adapters.
    rows = adapted.embedding.shape[0]
    return dataclasses.replace(adapted, model=base_model.model | {"vocab_size": rows})


def _warn_of_other_base(adapters: Path, base: str) -> None:
    """Warn where a folder of PEFT's names another base model than `config.base`, by their last parts."""
    settings = read_json(adapters / CONFIG, default={})
    trained_on = settings.get("base_model_name_or_path") or "/"
    name = Path(trained_on).name
    parts = Path(base).absolute().parts
    if is_hub_id(trained_on) and not any(part.endswith(name) for part in parts):
        line = "config.base: is %s, and the adapters of %s were trained on %s, as %s says; give that if it is another"
        logging.warning(line, base, adapters, trained_on, CONFIG)


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
    """Tell whether a folder has one of these files; an empty one, as SIM-CoT's config.json, doesn't count."""
    files = [folder / name for name in names if (folder / name).is_file()]
    return any(file.stat().st_size for file in files)


def _open_gguf(init: str, path: Path) -> ExternalCheckpoint:
    from slpo_jax.checkpoints.gguf import open_gguf

    opened = open_gguf(path)
    architecture, tensors = recognise(opened.tensors, str(path), None)
    return ExternalCheckpoint(
        source=init,
        files=(path,),
        architecture=architecture,
        description=None,
        tensors=tensors,
        model=opened.config,
        model_source=str(path),
        has_own_model=True,
        tokenizer=opened.tokenizer,
    )

"""Checkpoints that others wrote, and exports: local files and directories, hub ids, GGUF."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from absl import logging

from slpo_jax.architectures import PLAIN, Architecture, Unwrapped
from slpo_jax.architectures.tensors import Stored, open_tensors, read_start, weights_file
from slpo_jax.architectures.weights import EMBEDDING, check_tree, gate_weights
from slpo_jax.checkpoints import description as descriptions
from slpo_jax.checkpoints.adapters import CONFIG, WEIGHTS, lora_of
from slpo_jax.checkpoints.description import (
    BACKBONE_OF,
    Description,
    from_hugging_face,
    read_description,
    supported_kind,
)
from slpo_jax.checkpoints.foreign_layouts import (
    DECODER_FILE,
    are_adapters,
    exported_decoder,
    published_threshold,
    recognise,
)
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError, key_name
from slpo_jax.io.artifact import CHECKSUMS, changed, read_checksums
from slpo_jax.io.files import TEXTS, is_hub_id, read_json, snapshot
from slpo_jax.models.reasoner import BackboneConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SIDE_FILE = "reasoner.safetensors"  # of an export: its gate, and what its architecture has beside the language model
GENERATION_FILE = "generation_config.json"
_WEIGHTS = ("*.safetensors", "*.bin")
_TEXTS = ("tokenizer.json", "vocab.json")  # one of them is a tokenizer
_EOS = "eos_token_id"


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A checkpoint of others, or an export, whose tensors have been listed, not read.

    Attributes:
        source: as it was given.
        files: the file or directory, and of adapters the base model's.
        architecture: None where it has a language model's tensors alone, which are a base model's or
            `architectures.PLAIN`'s.
        description: what an export says of itself, its gate included; None for what this project did not write.
        tensors: under Hugging Face's names, an export's side file among them.
        model: the config.json that goes with them, the checkpoint's own or the base model's; its end tokens are those
            of generation_config.json, if that names some.
        model_source: where that is from.
        has_own_model: whether it's the checkpoint's own; the base's vocabulary lacks the reasoner's tokens.
        tokenizer: loads its tokenizer, or the base's; None if neither has one.
        base: `config.base` where shapes or tokenizer are from there, "" where all is the checkpoint's own.
        lora_alpha: scale of its LoRA adapters times their rank, if it has some.
        threshold: of a published gate, where its files say one.
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
        """The config that an export has; {} for what this project did not write."""
        return self.description.config if self.description else {}

    @property
    def config_place(self) -> str:
        """Where that is from, for messages."""
        return f"{self.source}: {descriptions.FILE}"

    @property
    def path(self) -> str:
        """The file or directory, for messages."""
        return str(self.files[0])

    @property
    def backbone(self) -> str:
        """The name in `models.reasoner.BACKBONES`: of those with the same names of tensors, the config's."""
        kind = self.model.get("model_type", "")
        stored = next(kind for kind, table in EMBEDDING.items() if table in self.tensors.model)
        return kind if BACKBONE_OF.get(kind) == stored else stored

    @property
    def reasoner(self) -> str:
        """The name in `REASONERS`; what a language model's tensors alone are taken for."""
        return f"{(self.architecture or PLAIN).name}_{self.backbone}"

    @property
    def gate_hidden(self) -> int | None:
        """The hidden width of the stopping gate, 0 for a linear one; None if there is none."""
        if self.description is not None:
            return self.description.gate
        hidden = self.tensors.gate.get("gate.hidden.weight")
        return (hidden.shape[0] if hidden else 0) if self.tensors.gate else None

    @property
    def gate_trained(self) -> bool:
        """Whether there is a stopping gate that is no longer random."""
        return self.description.gate_trained if self.description else bool(self.tensors.gate)

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
        if (kind := self.model["model_type"]) != self.backbone:
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
    if not is_hub_id(source) or path.suffix in (".bin", ".pt", ".pth", ".safetensors", ".gguf"):
        raise UserError(key, f"{source} is no file, directory or hub id; give a model's, or WORKDIR/checkpoints/STAGE")
    return snapshot(source, key, (*TEXTS, *(_WEIGHTS if weights else ())))


def open_foreign(init: str, base: str, lora_alpha: float | None, key: str = "config.init") -> Foreign:
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
        return _open_gguf(init, path)
    adapters, model = weights_file(path, WEIGHTS), weights_file(path)
    if adapters and model:
        raise UserError(f"{path}: holds both {model.name} and {adapters.name}; keep the one that is meant")
    stored = open_tensors(adapters or path)
    opened = _open_adapters if adapters or are_adapters(stored) else _open_whole
    return opened(init, path, stored, base, lora_alpha)


def _open_whole(init: str, path: Path, stored: dict[str, Stored], base: str, lora_alpha: float | None) -> Foreign:
    """Open a whole model in a directory or a file."""
    architecture, tensors = recognise(stored, str(path), lora_of(path, lora_alpha))
    # An original state dict goes with its base model, even where a config of the training lies beside it.
    config_folder = path if _has(path, descriptions.MODEL_FILE) and not (tensors.original and base) else None
    needed = config_folder is None or not _has(path, *_TEXTS)  # what isn't need not be to be had
    base_folder = locate(base, "config.base", weights=False) if base and needed else None
    model_folder = config_folder or base_folder
    if model_folder is None:
        raise UserError(
            f"{key_name('config.base')}: not set, and {path} comes without config.json; give the directory or hub id "
            "of the model that it was trained from"
        )
    texts = next((x for x in (path, model_folder, base_folder) if x and _has(x, *_TEXTS)), None)
    described, folder = read_description(path), path if path.is_dir() else path.parent
    tensors = _with_side_file(folder, tensors, described)
    model_source = model_folder / descriptions.MODEL_FILE
    model = read_json(model_source, descriptions.REMEDY)
    if config_folder:  # others of the same tensors' names are none of ours
        supported_kind(model, str(model_source))
    threshold = published_threshold(model, folder) if tensors.gate and not described else None
    ends = read_json(model_folder / GENERATION_FILE, descriptions.REMEDY, default={}).get(_EOS)
    return Foreign(
        source=init, files=(path,), architecture=type(described.architecture) if described else architecture,
        description=described, tensors=tensors, model=model if ends is None else model | {_EOS: ends},
        model_source=str(model_source), has_own_model=config_folder is not None and not tensors.original,
        tokenizer=partial(load_tokenizer, str(texts)) if texts else None,
        base="" if config_folder and texts in (path, None) else base,
        lora_alpha=lora_alpha if any(".lora_" in name for name in stored) else None, threshold=threshold,
    )  # fmt: skip


def _with_side_file(folder: Path, tensors: Unwrapped, described: Description | None) -> Unwrapped:
    """Add to the tensors of an export the gate and head that its description names; others are as they were.

    Raises:
        UserError: a part of an export is missing, or lies without its description.
    """
    path, beside = folder / SIDE_FILE, folder / DECODER_FILE
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
    decoder = exported_decoder(open_tensors(beside)) if beside.is_file() else None
    return tensors._replace(gate=gate, head=head, decoder=decoder)


def _open_adapters(init: str, path: Path, stored: dict[str, Stored], base: str, lora_alpha: float | None) -> Foreign:
    """Open adapters alone, of PEFT or in a file of CoLaR's program: the base model with them merged."""
    if not base:
        raise UserError(
            f"{key_name('config.base')}: not set, and {path} holds LoRA adapters alone; give the directory or hub id "
            "of the model that they were trained on"
        )
    trained_on = (path.is_dir() and read_json(path / CONFIG, default={}).get("base_model_name_or_path")) or "/"
    if is_hub_id(trained_on) and not any(part.endswith(Path(trained_on).name) for part in Path(base).absolute().parts):
        line = "config.base: is %s, and the adapters of %s were trained on %s, as %s says; give that if it is another"
        logging.warning(line, base, path, trained_on, CONFIG)
    lora, base_model = lora_of(path, lora_alpha), open_foreign(base, "", lora_alpha, "config.base")
    with fitting(base):
        architecture, tensors = recognise(stored, str(path), lora, base_model.tensors.model)
    if architecture is None:
        architecture, tensors = base_model.architecture, base_model.tensors._replace(model=tensors.model)
    tokenizer = partial(load_tokenizer, str(path)) if _has(path, *_TEXTS) else base_model.tokenizer
    adapted = dataclasses.replace(
        base_model, source=init, files=(path, *base_model.files), architecture=architecture, tensors=tensors,
        tokenizer=tokenizer, base=base, lora_alpha=lora_alpha,
    )  # fmt: skip
    return dataclasses.replace(adapted, model=base_model.model | {"vocab_size": adapted.embedding.shape[0]})


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
    """Tell whether a folder has one of these files that isn't empty, as config.json is in SIM-CoT's folders."""
    return any((folder / name).is_file() and (folder / name).stat().st_size for name in names)


def _open_gguf(init: str, path: Path) -> Foreign:
    from slpo_jax.checkpoints.gguf import open_gguf

    opened = open_gguf(path)
    architecture, tensors = recognise(opened.tensors, str(path), None)
    return Foreign(init, (path,), architecture, None, tensors, opened.config, str(path), True, opened.tokenizer)

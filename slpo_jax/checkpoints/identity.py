"""Open a checkpoint at a path or hub id, whether this project or another wrote it. Weights are read later."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from absl import logging

from slpo_jax.architectures.tensors import open_tensors
from slpo_jax.architectures.weights import (
    backbone_weights,
    linear,
    read_tree,
    refuse_leftovers,
)
from slpo_jax.checkpoints.description import Description, read_description
from slpo_jax.checkpoints.external import ExternalCheckpoint, locate, open_external
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.io.files import check_utf8, flatten, read_json
from slpo_jax.io.orbax import StoredParams, difference, is_checkpoint, stored_params
from slpo_jax.io.workdir import REASONER_FOLDER, StageFolder, Workdir
from slpo_jax.models.parts import GATE, OF_A_REASONER, REASONER
from slpo_jax.models.reasoner import BACKBONE
from slpo_jax.stages import REASONER_STAGES, RL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class NativeCheckpoint:
    """A checkpoint of a run, or of `slpo import`.

    Attributes:
        source: as it was given, or the newest checkpoint of a workdir.
        path: the absolute path of `source`.
        description: the contents of its reasoner's folder, with the gate that its parameters have.
        tokenizer: loads its tokenizer.
        stored: its parameters.
        reasoner: the name in `architectures.REASONERS`.
        gate_hidden: the hidden width of the stopping gate, 0 for a linear one; None without a gate.
        gate_trained: whether it has a stopping gate that is no longer random.
        stage_folder: the folder of the stage that made it.
        config: the whole config that it was made with, as its file has it.
    """

    source: str
    path: Path
    description: Description
    tokenizer: Callable[[], "PreTrainedTokenizerFast"]
    stored: StoredParams
    reasoner: str
    gate_hidden: int | None
    gate_trained: bool
    stage_folder: StageFolder
    config: Mapping[str, Any]
    base: ClassVar[str] = ""
    lora_alpha: ClassVar[float | None] = None
    threshold: ClassVar[float | None] = None

    @property
    def config_place(self) -> str:
        """The file of its config, for messages."""
        return str(self.stage_folder.config)

    @property
    def files(self) -> tuple[Path, ...]:
        """The folder of its parameters."""
        return (self.stored.folder,)


Identity = NativeCheckpoint | ExternalCheckpoint
"""An opened checkpoint, whose parameters have not been read yet."""


def newest_checkpoint(source: str) -> str:
    """Return `source`, or the checkpoint of the newest stage where `source` is a workdir.

    Finished stages go before unfinished ones.

    Raises:
        UserError: a workdir without a checkpoint.
    """
    workdir = Workdir(Path(source).expanduser())
    if is_checkpoint(workdir.root) or not workdir.checkpoints.is_dir():
        return source

    # The run's config names its objectives in order, so the last one is the newest.
    # Objectives that only an earlier config named come after these.
    config = read_json(workdir.config, default={})
    objectives = config.get(RL, {}).get("objectives", ())
    names = [*reversed(objectives), *workdir.finished_objectives()]
    names += reversed(REASONER_STAGES)
    folders = [workdir.stage_folder(name) for name in names]
    stages = [stage for stage in folders if is_checkpoint(stage.path)]
    if not stages:
        raise UserError(
            "config.init",
            f"{source} is a workdir without a checkpoint; run a stage, or give another",
        )
    newest = next((stage for stage in stages if stage.is_finished), stages[0])

    # Warn when this isn't the stage that the config leads one to expect.
    why = ""
    if newest is not stages[0]:
        why = f"{stages[0].path} is not finished"
    elif newest.name not in (*objectives, *REASONER_STAGES):
        why = f"what {workdir.config} names is not there"
    if why:
        logging.warning(
            "%s: %s, so this is taken; another is given as WORKDIR/checkpoints/STAGE",
            newest.path,
            why,
        )
    return str(newest.path)


def identify(source: str, base: str = "", lora_alpha: float | None = None) -> Identity:
    """Open the checkpoint that `config.init` names; of a workdir, its newest.

    Args:
        source, base, lora_alpha: see `slpo_jax.config`.
    Raises:
        UserError: one line that names the key, file or tensor at fault, and the remedy.
    """
    if lora_alpha is not None and not 0 < lora_alpha < math.inf:
        raise UserError(
            "config.lora_alpha", f"{lora_alpha} is not valid; give a number above 0"
        )
    check_utf8(source)
    return open_native(source) or open_external(source, base, lora_alpha)


def open_native(source: str) -> NativeCheckpoint | None:
    """Open a checkpoint of a run, or of `slpo import`, with the reasoner's folder in it or beside it.

    Args:
        source: see `newest_checkpoint`.
    Returns:
        None where there is none.
    Raises:
        UserError: it is damaged, a part of it is missing, or it is not a reasoner's.
    """
    source = newest_checkpoint(source)
    path = Path(source).expanduser().absolute()
    if not (path.is_dir() and is_checkpoint(path)):
        return None

    # Its stage has the config.
    stage = StageFolder.of(path)
    if not stage.config.is_file():
        raise UserError(
            f"{stage.config}: no such file, which says what {source} was made with; bring it back, or train or convert "
            "it again, where an earlier version of slpo_jax made it"
        )
    config = stage.read_config()

    # The reasoner's folder lies in the checkpoint, in the stage or in the workdir's `checkpoints`.
    places = [near / REASONER_FOLDER for near in (path, *path.parents[:2])]
    folder = next((place for place in places if place.is_dir()), places[0])
    description = read_description(folder)
    if description is None:
        raise UserError(
            f"{source}: has no {REASONER_FOLDER}/reasoner.json in or beside it, which says what it is; keep it"
        )
    stored = stored_params(path)
    others = sorted(stored.shapes.keys() - set(OF_A_REASONER))
    if others:
        raise UserError(
            f"{source}: has {', '.join(others)}, which no reasoner has; give a reasoner's checkpoint, of a stage that "
            "was run to its end (a reward model's is for config.evaluate.reward_model)"
        )

    # A run's parameters may hold a gate that no stage has trained.
    gate = stored.shapes.get(GATE)
    hidden = None
    if gate is not None:
        hidden = gate["hidden"]["kernel"].shape[1] if "hidden" in gate else 0
    trained = gate is not None and bool(flatten(config).get("gate.enabled"))
    return NativeCheckpoint(
        source=source,
        path=path,
        description=dataclasses.replace(description, gate=hidden, gate_trained=trained),
        tokenizer=partial(load_tokenizer, str(folder)),
        stored=stored,
        reasoner=f"{description.architecture.name}_{description.model.model_type}",
        gate_hidden=hidden,
        gate_trained=trained,
        stage_folder=stage,
        config=config,
    )


_KEY = "config.evaluate.reward_model"


def read_reward_model(
    source: str, description: Description, like: Any
) -> dict[str, Any]:
    """Read a reward model of latents, from our stage latent_rm or in its authors' layout.

    Theirs (`ModalityDance/latent-tts-rm`) is a language model without its head, under Hugging Face's names, the
    reasoner's special tokens among its rows, and `classifier.weight` [1, D] and `classifier.bias`.

    Args:
        source: a stage's checkpoint of ours, or a directory, file or hub id in the published layout.
        description: of the reasoner that it is to judge.
        like: shapes and types of the parameters that judge this reasoner.
    Raises:
        UserError: there is none, or it is of another reasoner.
    """
    path = Path(source).expanduser()
    if path.is_dir() and is_checkpoint(path):
        trained = stored_params(path)
        mismatch = difference(trained.shapes, like)
        if mismatch:
            raise UserError(
                f"{_KEY}: {source} is no reward model of this reasoner ({mismatch}); give one that was trained on it"
            )
        return trained.read(like)

    # In the published layout the model has no head, and so ties it.
    stored = open_tensors(locate(source, _KEY))
    model = dataclasses.replace(description.model, tied=True)
    backbone = backbone_weights(model)
    heads = description.architecture.heads(model.n_embd)
    others = [*heads, *linear(("classifier",), "classifier", (1, model.n_embd))]
    try:
        tree = read_tree(backbone, stored, source)
        rest = read_tree(others, stored, source)
        refuse_leftovers([*backbone, *others], stored, model, source)
    except UserError as error:
        raise UserError(
            f"{_KEY}: is no reward model of this reasoner: {error}"
        ) from None
    classifier = rest.pop("classifier")
    return {REASONER: {BACKBONE: tree, **rest}, "classifier": classifier}

"""One door to checkpoints: what lies at a path or hub id, this project's or others'. Weights are read later."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from absl import logging

from slpo_jax.architectures.tensors import open_tensors
from slpo_jax.architectures.weights import backbone_weights, linear, read_tree, refuse_leftovers
from slpo_jax.checkpoints.description import Description, read_description
from slpo_jax.checkpoints.foreign import Foreign, locate, open_foreign
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
class Ours:
    """A checkpoint of a run, or of `slpo import`.

    Attributes:
        source: as it was given, or of a workdir its newest.
        path: the same, absolute.
        description: what is said of it, with the gate that its parameters have.
        tokenizer: loads its tokenizer.
        stored: its parameters.
        reasoner: the name in `architectures.REASONERS`.
        gate_hidden: the hidden width of the stopping gate, 0 for a linear one; None if there is none.
        gate_trained: whether there is a stopping gate that is no longer random.
        stage_folder: of the stage that made it.
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


Identity = Ours | Foreign
"""What a checkpoint is: all that lies between a path and parameters."""


def newest_checkpoint(source: str) -> str:
    """Return `source`, or the newest stage's checkpoint where that is a workdir, of those that are finished if any is.

    Raises:
        UserError: a workdir without a checkpoint.
    """
    workdir = Workdir(Path(source).expanduser())
    if is_checkpoint(workdir.root) or not workdir.checkpoints.is_dir():
        return source
    # Of several objectives the one that the run's config names last, and before others that an earlier config named.
    objectives = read_json(workdir.config, default={}).get(RL, {}).get("objectives", ())
    names = [*reversed(objectives), *workdir.finished_objectives(), *reversed(REASONER_STAGES)]
    stages = [stage for stage in map(workdir.stage_folder, names) if is_checkpoint(stage.path)]
    if not stages:
        raise UserError("config.init", f"{source} is a workdir without a checkpoint; run a stage, or give another")
    newest = next((stage for stage in stages if stage.is_finished), stages[0])
    why = "" if newest.name in (*objectives, *REASONER_STAGES) else f"what {workdir.config} names is not there"
    if why := why if newest is stages[0] else f"{stages[0].path} is not finished":
        logging.warning("%s: %s, so this is taken; another is given as WORKDIR/checkpoints/STAGE", newest.path, why)
    return str(newest.path)


def identify(source: str, base: str = "", lora_alpha: float | None = None) -> Identity:
    """Open what `config.init` names, of a workdir the newest.

    Args:
        source, base, lora_alpha: see `slpo_jax.config`.
    Raises:
        UserError: one line that names the key, file or tensor at fault, and the remedy.
    """
    if lora_alpha is not None and not 0 < lora_alpha < math.inf:
        raise UserError("config.lora_alpha", f"{lora_alpha} is not valid; give a number above 0")
    check_utf8(source)
    return open_ours(source) or open_foreign(source, base, lora_alpha)


def open_ours(source: str) -> Ours | None:
    """Open a checkpoint of a run, or of `slpo import`, with the reasoner's folder in it or beside it.

    Args:
        source: see `newest_checkpoint`.
    Returns:
        None where there is none.
    Raises:
        UserError: it is damaged, or not all of it is there, or it is no reasoner's.
    """
    source = newest_checkpoint(source)
    path = Path(source).expanduser().absolute()
    if not (path.is_dir() and is_checkpoint(path)):
        return None
    stage = StageFolder.of(path)
    if not stage.config.is_file():
        raise UserError(
            f"{stage.config}: no such file, which says what {source} was made with; bring it back, or train or convert "
            "it again, where an earlier version of slpo_jax made it"
        )
    beside = (near / REASONER_FOLDER for near in (path, *path.parents[:2]))
    folder = next((near for near in beside if near.is_dir()), path / REASONER_FOLDER)
    description = read_description(folder)
    if description is None:
        raise UserError(
            f"{source}: has no {REASONER_FOLDER}/reasoner.json in or beside it, which says what it is; keep it"
        )
    stored = stored_params(path)
    if others := ", ".join(sorted(stored.shapes.keys() - set(OF_A_REASONER))):
        raise UserError(
            f"{source}: has {others}, which no reasoner has; give a reasoner's checkpoint, of a stage that was run to "
            "its end (a reward model's is for config.evaluate.reward_model)"
        )
    config = stage.read_config()
    gate, hidden = stored.shapes.get(GATE), None
    if gate is not None:
        hidden = gate["hidden"]["kernel"].shape[1] if "hidden" in gate else 0
    trained = gate is not None and bool(flatten(config).get("gate.enabled"))
    description = dataclasses.replace(description, gate=hidden, gate_trained=trained)
    reasoner = f"{description.architecture.name}_{description.model.model_type}"
    tokenizer = partial(load_tokenizer, str(folder))
    return Ours(source, path, description, tokenizer, stored, reasoner, hidden, trained, stage, config)


_KEY = "config.evaluate.reward_model"


def read_reward_model(source: str, description: Description, like: Any) -> dict[str, Any]:
    """Read a reward model of latents: of our stage latent_rm, or in its authors' layout.

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
        if what := difference(trained.shapes, like):
            raise UserError(
                f"{_KEY}: {source} is no reward model of this reasoner ({what}); give one that was trained on it"
            )
        return trained.read(like)
    stored = open_tensors(locate(source, _KEY))
    model = dataclasses.replace(description.model, tied=True)
    backbone, heads = backbone_weights(model), description.architecture.heads(model.n_embd)
    others = [*heads, *linear(("classifier",), "classifier", (1, model.n_embd))]
    try:
        tree, rest = read_tree(backbone, stored, source), read_tree(others, stored, source)
        refuse_leftovers([*backbone, *others], stored, model, source)
    except UserError as error:
        raise UserError(f"{_KEY}: is no reward model of this reasoner: {error}") from None
    classifier = rest.pop("classifier")
    return {REASONER: {BACKBONE: tree, **rest}, "classifier": classifier}

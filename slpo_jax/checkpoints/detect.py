"""What a checkpoint is, asked once: architecture, backbone, gate, texts, and its run. Weights are read later."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slpo_jax.checkpoints.architectures import Architecture, backbone_of
from slpo_jax.checkpoints.description import Description, read_description
from slpo_jax.checkpoints.source import CheckpointSource, open_checkpoint
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten, read_json
from slpo_jax.io.orbax import is_checkpoint, stored_params
from slpo_jax.io.workdir import REASONER_FOLDER, StageFolder, Workdir
from slpo_jax.models.parts import ADAPTER, GATE, OF_A_REASONER
from slpo_jax.stages import COLD_START, IMITATE, RL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TRAIN_THE_GATE = {COLD_START, RL}


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a checkpoint is.

    Attributes:
        source: as it was given.
        architecture: None where it has a language model's tensors alone, which are a base model's or
            `architectures.PLAIN`'s.
        backbone: its name in `models.reasoner.BACKBONES`.
        description: what it says of itself, its gate included; None for what this project did not write.
        tokenizer: loads the tokenizer that comes with it; None if there is none.
        orbax: the checkpoint, where it is one of ours.
        opened: its tensors' names and shapes, where it is anything else.
        base: where its tokenizer or config is from, if it lacks one.
        lora_alpha: scale of its LoRA adapters times their rank, if it has some.
    """

    source: str
    architecture: type[Architecture] | None
    backbone: str
    description: Description | None
    tokenizer: Callable[[], "PreTrainedTokenizerFast"] | None
    orbax: Path | None = None
    opened: CheckpointSource | None = None
    base: str = ""
    lora_alpha: float | None = None

    @property
    def reasoner(self) -> str | None:
        """Its name in `REASONERS`, None for a language model's tensors alone."""
        return f"{self.architecture.name}_{self.backbone}" if self.architecture else None

    @property
    def gate(self) -> int:
        """Hidden width of the stopping gate; 0 for a linear one, or none."""
        found = self.description.gate if self.description else self.opened and self.opened.gate_hidden
        return found or 0

    @property
    def gate_trained(self) -> bool:
        """Whether there is a stopping gate that is no longer random."""
        if self.description is None:
            return self.opened is not None and bool(self.opened.layout.gate)
        return self.description.gate_trained

    @property
    def gate_published(self) -> bool:
        """Whether that is somebody else's."""
        return self.description is None and self.gate_trained

    @property
    def stage(self) -> StageFolder | None:
        """The folder of one of our checkpoints."""
        return None if self.orbax is None else StageFolder.of(self.orbax)

    @property
    def workdir(self) -> Workdir | None:
        """The run around one of our checkpoints; None if it lies alone."""
        return None if self.stage is None else self.stage.workdir


def newest_checkpoint(source: str) -> str:
    """`source`, or the newest stage's checkpoint where that is a workdir.

    Raises:
        UserError: a workdir without a checkpoint.
    """
    workdir = Workdir(Path(source).expanduser())
    if is_checkpoint(workdir.root) or not workdir.checkpoints.is_dir():
        return source
    # Of several objectives the one that the run's config names last, and before others that an earlier config named.
    named = read_json(workdir.config, default={}).get(RL, {}).get("objectives", ())
    for stage in (*reversed(named), *_objectives(workdir), COLD_START, IMITATE):
        if is_checkpoint(workdir.stage(stage).path):
            return str(workdir.stage(stage).path)
    raise UserError(f"config.init: {source} is a workdir without a checkpoint; run a stage, or give another")


def _objectives(workdir: Workdir) -> list[str]:
    """The objectives that there are checkpoints of."""
    return [name for name in workdir.finished_stages() if workdir.stage(name).is_objective]


def identify(source: str, base: str = "", lora_alpha: float | None = None) -> Identity:
    """Open what `config.init` names.

    Args:
        source, base, lora_alpha: see `slpo_jax.config`.
    Raises:
        UserError: one line that names the key, file or tensor at fault, and the remedy.
    """
    if lora_alpha is not None and not 0 < lora_alpha < math.inf:
        raise UserError(f"config.lora_alpha: {lora_alpha} is not valid; give a number above 0")
    path = Path(source).expanduser()
    if path.is_dir() and is_checkpoint(path):
        return _ours(source, path.absolute())
    opened = open_checkpoint(source, base, lora_alpha)
    described = opened.description
    architecture = type(described.architecture) if described else opened.layout.architecture
    return Identity(
        source, architecture, opened.backbone, described, opened.tokenizer, opened=opened, base=base,
        lora_alpha=lora_alpha,
    )  # fmt: skip


def _ours(source: str, path: Path) -> Identity:
    """A checkpoint of a run, or of `slpo_jax.cli.convert`, with the reasoner's folder in it or beside it."""
    beside = (near / REASONER_FOLDER for near in (path, *path.parents[:2]))
    folder = next((near for near in beside if near.is_dir()), None)
    if folder is None:
        raise UserError(f"{source}: has no {REASONER_FOLDER}/ in or beside it, which says what it is; keep that folder")
    described = read_description(folder)
    if described is None:
        raise UserError(f"{folder}: has no reasoner.json, which says what {source} is; keep that folder whole")
    found = stored_params(path).keys()
    if ADAPTER in found:
        raise UserError(
            f"{source}: holds adapters that are not merged yet; run its stage to the end, or give a checkpoint that is"
        )
    if others := ", ".join(sorted(found - set(OF_A_REASONER))):
        raise UserError(
            f"{source}: has {others}, which no reasoner has; give a reasoner's checkpoint, and a reward model's as "
            "config.evaluate.reward_model"
        )
    architecture, backbone, load = (
        type(described.architecture),
        backbone_of(described.model),
        partial(load_tokenizer, str(folder)),
    )
    return Identity(source, architecture, backbone, _with_gate(described, path), load, orbax=path)


def _with_gate(description: Description, path: Path) -> Description:
    """What a checkpoint of ours holds of a gate: its parameters say, and the stage that made it."""
    gate = stored_params(path).get(GATE)
    if gate is None:
        return dataclasses.replace(description, gate=None, gate_trained=False)
    hidden = gate["hidden"]["kernel"].shape[1] if "hidden" in gate else 0
    trained, facts = description.gate_trained, StageFolder.of(path).facts
    if facts.is_file():
        trained = read_json(facts, "mend the file").get("stage") in _TRAIN_THE_GATE and has_gate(path)
    return dataclasses.replace(description, gate=hidden, gate_trained=trained)


def has_gate(checkpoint: Path) -> bool:
    """Whether the run around a checkpoint has a gate, which its parameters always have; True where there is no run."""
    facts = StageFolder.of(checkpoint).facts
    return not facts.is_file() or bool(flatten(read_json(facts, "mend the file")).get("gate.enabled", True))

"""What a checkpoint is, asked once: architecture, backbone, gate, texts, and its run. Weights are read later."""

import dataclasses
import math
from functools import partial
from pathlib import Path

from absl import logging

from slpo_jax.checkpoints.description import Description, read_description
from slpo_jax.checkpoints.source import Identity, open_checkpoint
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten, read_json
from slpo_jax.io.orbax import is_checkpoint, stored_params
from slpo_jax.io.workdir import REASONER_FOLDER, StageFolder, Workdir
from slpo_jax.models.parts import GATE, OF_A_REASONER
from slpo_jax.stages import ABOUT, REASONERS, RL

__all__ = ["Identity", "has_gate", "identify", "newest_checkpoint"]


def newest_checkpoint(source: str) -> str:
    """`source`, or the newest stage's checkpoint where that is a workdir, of those that are finished if any is.

    Raises:
        UserError: a workdir without a checkpoint.
    """
    workdir = Workdir(Path(source).expanduser())
    if is_checkpoint(workdir.root) or not workdir.checkpoints.is_dir():
        return source
    # Of several objectives the one that the run's config names last, and before others that an earlier config named.
    named = read_json(workdir.config, default={}).get(RL, {}).get("objectives", ())
    stages = [*reversed(named), *workdir.finished_objectives(), *reversed(REASONERS)]
    there = [stage for stage in map(workdir.stage, stages) if is_checkpoint(stage.path)]
    if not there:
        raise UserError("config.init", f"{source} is a workdir without a checkpoint; run a stage, or give another")
    newest = next((stage for stage in there if stage.is_finished), there[0])
    why = "" if newest.name in (*named, *REASONERS) else f"what {workdir.config} names is not there"
    if why := why if newest is there[0] else f"{there[0].path} is not finished":
        logging.warning("%s: %s, so this is taken; another is given as WORKDIR/checkpoints/STAGE", newest.path, why)
    return str(newest.path)


def identify(source: str, base: str = "", lora_alpha: float | None = None) -> Identity:
    """Open what `config.init` names.

    Args:
        source, base, lora_alpha: see `slpo_jax.config`.
    Raises:
        UserError: one line that names the key, file or tensor at fault, and the remedy.
    """
    if lora_alpha is not None and not 0 < lora_alpha < math.inf:
        raise UserError("config.lora_alpha", f"{lora_alpha} is not valid; give a number above 0")
    path = Path(source).expanduser()
    if path.is_dir() and is_checkpoint(path):
        return _ours(source, path.absolute())
    return open_checkpoint(source, base, lora_alpha)


def _ours(source: str, path: Path) -> Identity:
    """A checkpoint of a run, or of `slpo import`, with the reasoner's folder in it or beside it."""
    stage = StageFolder.of(path)
    if stage.is_finished and not stage.facts.is_file():
        raise UserError(
            f"{stage.facts}: no such file, which says what {source} was trained with; bring it back, or {stage.anew}"
        )
    beside = (near / REASONER_FOLDER for near in (path, *path.parents[:2]))
    folder = next((near for near in beside if near.is_dir()), path / REASONER_FOLDER)
    described = read_description(folder)
    if described is None:
        raise UserError(
            f"{source}: has no {REASONER_FOLDER}/reasoner.json in or beside it, which says what it is; keep it"
        )
    if others := ", ".join(sorted(stored_params(path).keys() - set(OF_A_REASONER))):
        raise UserError(
            f"{source}: has {others}, which no reasoner has; give a reasoner's checkpoint, of a stage that was run to "
            "its end (a reward model's is for config.evaluate.reward_model)"
        )
    described, load = _with_gate(described, path), partial(load_tokenizer, str(folder))
    backbone = described.model.model_type
    return Identity(source, str(path), type(described.architecture), backbone, described, load, orbax=path)


def _with_gate(description: Description, path: Path) -> Description:
    """What a checkpoint of ours holds of a gate: its parameters say, and the stage that made it."""
    gate = stored_params(path).get(GATE)
    if gate is None:
        return dataclasses.replace(description, gate=None, gate_trained=False)
    hidden = gate["hidden"]["kernel"].shape[1] if "hidden" in gate else 0
    trained, said = description.gate_trained, StageFolder.of(path).said()
    if said:
        trained = said.get("stage") in {name for name, each in ABOUT.items() if each.gate} and has_gate(path)
    return dataclasses.replace(description, gate=hidden, gate_trained=trained)


def has_gate(checkpoint: Path) -> bool:
    """Whether the run around a checkpoint has a gate, which its parameters always have; True where there is no run."""
    return bool(flatten(StageFolder.of(checkpoint).said()).get("gate.enabled", True))

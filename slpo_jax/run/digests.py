"""Digests of what an evaluation depends on: the checkpoint's parameters, the problems as loaded, the settings."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from slpo_jax.config import thinker_of
from slpo_jax.interop.adapters import adapter_file
from slpo_jax.io import hosts
from slpo_jax.io.files import digest, write_text
from slpo_jax.io.workdir import StageFolder
from slpo_jax.origin.opening import locate
from slpo_jax.origin.settings import plain
from slpo_jax.run.experiment import Experiment
from slpo_jax.text.batches import EncodedProblems

_MATTER = ("seed", "reasoner", "prompt", "max_latents", "dropout")
SPEED = ("remat", "scan_layers")  # of config.model
_FROM_FILES = ("init", "base", "lora_alpha", "tokenizer", "reasoner", "seed", "gate")  # what an import depends on


def params_digest(params: Any) -> str:
    """SHA-256 of parameters: names, types, shapes and bytes.

    Not of the checkpoint's files, whose names and layout differ between two savings of the same numbers.
    """
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def checkpoint_digest(experiment: Experiment, stage: str, load: Callable[[], Any]) -> str:
    """`params_digest` of a stage's checkpoint, or of `config.init`'s.

    It is kept beside the checkpoints with the sizes and times of the files that it is of, so that what did not change
    is not read again: seconds for billions of parameters.

    Args:
        experiment: the run.
        stage: whose checkpoint, "" for `config.init`.
        load: reads the parameters.
    """
    kept = experiment.workdir.digest(stage)
    state = _files(experiment, stage)
    known = _kept(kept, state)
    if hosts.decided(bool(known)):
        return known
    found = params_digest(load())
    write_text(kept, json.dumps({"digest": found, "files": state}, indent=1) + "\n")
    return found


def _kept(path: Path, state: dict[str, Any]) -> str:
    """The digest that was kept of these very files; "" where there is none that can be read, so that it is made."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return str(known["digest"]) if known["files"] == state else ""
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def _files(experiment: Experiment, stage: str) -> dict[str, Any]:
    """Size and time of change of each file of a checkpoint's parameters; of an import, also how it is read."""
    config = experiment.config
    if stage:
        folders, settings = [_params_folder(experiment.workdir.stage(stage).path)], {}
    else:
        folders = initial_files(experiment)
        settings = plain({key: config[key] for key in _FROM_FILES})
    states: dict[str, os.stat_result] = {}
    for folder in folders:
        files = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
        states |= {str(path.relative_to(folder.parent)): path.stat() for path in files}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()} | {"settings": settings}


def initial_files(experiment: Experiment) -> list[Path]:
    """The files or folders that the parameters of `config.init` are read from: with adapters alone, the base's too."""
    orbax, config = experiment.origin.orbax, experiment.config
    if orbax:
        return [_params_folder(orbax)]
    path = locate(config.init, "config.init").absolute()
    if path.is_dir() and adapter_file(path):
        return [path, locate(config.base, "config.base").absolute()]
    return [path]


def _params_folder(checkpoint: Path) -> Path:
    """The parameters of a stage's newest checkpoint, or of the one given."""
    if (checkpoint / "params").is_dir():
        return checkpoint / "params"
    return checkpoint / str(StageFolder(checkpoint).steps[-1]) / "params"


def problems_digest(problems: EncodedProblems, limit: int) -> tuple[str, str, int]:
    """Digests of the first problems of a set as they were loaded, and of their prompts' token ids; their number.

    Args:
        problems: the set.
        limit: how many are used; 0 is all.
    """
    count = min(limit or len(problems), len(problems))
    texts = [[problem.question, problem.steps, problem.answer] for problem in problems.problems[:count]]
    return digest(texts), digest([list(map(int, prompt)) for prompt in problems.prompts[:count]]), count


def settings_of(config: ConfigDict, more_ends: Sequence[int] = ()) -> dict[str, Any]:
    """What else the results of an evaluation depend on, by key; nothing that changes its speed alone.

    Args:
        config: the run's.
        more_ends: ids of tokens that end answers besides the tokenizer's eos, which only a checkpoint's files say.
    """
    evaluate = config.evaluate
    found = {key: config[key] for key in _MATTER} | {"thinker": thinker_of(config)}
    # Without some defaults, so that evaluations that are older than these keys stay current.
    defaults = {"answers": "auto", "stop": ()}
    found["prompt"] = {key: value for key, value in config.prompt.items() if defaults.get(key) != value}
    settings = found["thinker"][config.thinker.name]
    if not settings.get("cold_entropy"):
        settings.pop("cold_entropy", None)
    if evaluate.dropout is not None:
        found["dropout"] = config.dropout.to_dict() | {"rate": evaluate.dropout}
    found["model"] = {key: value for key, value in config.model.items() if key not in SPEED}
    if more_ends:
        found["more_ends"] = list(more_ends)
    return plain(found) | {
        "evaluate.max_answer_tokens": evaluate.max_answer_tokens or config.max_answer_tokens,
        "evaluate.samples": evaluate.samples,
        "evaluate.seeds": evaluate.seeds if evaluate.samples else 0,
        **{f"evaluate.{name}": evaluate[name] for name in ("temperature", "top_k", "top_p") if evaluate.samples},
    }

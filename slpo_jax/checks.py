"""What is checked before a stage begins: that its workdir is its own, and that its batches and texts fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from slpo_jax.config import default_config
from slpo_jax.errors import UserError
from slpo_jax.evaluation.records import write_text
from slpo_jax.experiment import Experiment
from slpo_jax.origin import REASONER_FOLDER
from slpo_jax.text.batches import EncodedProblems
from slpo_jax.training.imitate import Imitation, Phase

ADAPTER = "imitate_adapter"  # where imitation with adapters runs, until they are merged into the stage's own checkpoint

SHARED_KEYS = (
    "seed", "init", "base", "lora_alpha", "reasoner", "tokenizer", "model", "max_latents", "min_latents",
    "max_answer_tokens", "prompt_slots", "dropout", "gate",
)  # fmt: skip


def checkpoint_dir(experiment: Experiment, stage: str) -> Path:
    return experiment.workdir / "checkpoints" / stage


def has_checkpoint(experiment: Experiment, stage: str) -> bool:
    """Whether the stage (or its control) was run to its end in this workdir."""
    return (checkpoint_dir(experiment, stage) / "finished").exists()


def claim(experiment: Experiment, stage: str, write: bool = True) -> None:
    """Write down what the stage's result depends on, or make sure that it is as it was when the stage began.

    Args:
        write: False only looks.
    Raises:
        UserError: the workdir holds the same stage of another config.
    """
    if stage == "imitate" and not has_checkpoint(experiment, stage):  # it may have begun with adapters
        claim(experiment, ADAPTER, write and experiment.config.imitate.lora.rank > 0)
    facts = _facts(experiment.config, stage)
    path = checkpoint_dir(experiment, stage) / "config.json"
    begun = any(entry.name.isdigit() for entry in path.parent.glob("*"))
    if not (begun and path.exists()):  # what never got to its first checkpoint binds nobody
        if write:
            experiment.origin.write(path.parent.parent / REASONER_FOLDER)
            write_text(path, json.dumps(facts, indent=1, sort_keys=True) + "\n")
        return
    # A key that is younger than the checkpoint was at its default.
    known = _flat(_facts(default_config(), stage)) | _flat(json.loads(path.read_text()))
    changed = [key for key, value in _flat(facts).items() if value != known[key]]
    if changed:
        raise UserError(
            f"config.{changed[0]}: is not what {experiment.workdir}'s stage {stage} was run with; set it back, or use "
            "another --workdir"
        )


def _facts(config: ConfigDict, stage: str) -> dict[str, Any]:
    """What a stage's result depends on."""
    section = stage.partition("_control")[0].partition("_adapter")[0]
    facts = {key: config[key] for key in SHARED_KEYS} | {section: config[section]}
    facts["data"] = {key: config.data[key] for key in ("train", "valid", "synthetic")}
    if stage == "imitate_control":
        facts["slpo"] = {"steps": config.slpo.steps}
    return json.loads(ConfigDict(facts).to_json_best_effort())


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {key: value for name, part in tree.items() for key, value in _flat(part, f"{prefix}{name}.").items()}


def check_batch(experiment: Experiment, stage: str) -> None:
    config, devices = experiment.config[stage], experiment.mesh.size
    if config.batch_size % (devices * config.micro_batches):
        raise UserError(
            f"config.{stage}.batch_size: {config.batch_size} is not a multiple of {devices} devices x "
            f"{config.micro_batches} micro-batches; change one of them"
        )


def imitated(experiment: Experiment, imitation: Imitation, plan: list[Phase]) -> EncodedProblems:
    """The training problems that are imitated, once it is said how many are not.

    Raises:
        UserError: there are none, or one needs more positions than the model has: what is written out is not bounded
            by config.max_answer_tokens.
    """
    problems, longest = experiment.train, experiment.config.imitate.max_tokens
    kept = imitation.usable(problems, longest)
    if not kept:
        raise UserError(
            f"config.imitate.max_tokens: {longest} leaves no problem of config.data.train; raise it or give other data"
        )
    if len(kept) < len(problems):
        reason = "longer than config.imitate.max_tokens or, for CODI, with a negative answer"
        logging.warning("imitate: left out %d of %d problems: %s", len(problems) - len(kept), len(problems), reason)
    chosen, most = problems.subset(kept), experiment.reasoner.config.n_positions
    for phase in plan:
        needed = imitation.positions(chosen, phase)
        if max(needed) > most:
            raise UserError(
                f"config.model.n_positions: {most} is less than the {max(needed)} positions of problem "
                f"{kept[int(np.argmax(needed))]} in imitation's phase {phase.name}; raise it, lower "
                "config.imitate.max_tokens or drop the problem"
            )
    return chosen

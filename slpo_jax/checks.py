"""What is checked before a stage begins: that its workdir is its own, and that its batches and texts fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from slpo_jax.errors import UserError
from slpo_jax.evaluation.records import write_text
from slpo_jax.experiment import Experiment
from slpo_jax.origin import REASONER_FOLDER
from slpo_jax.training import imitate

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
    config, section = experiment.config, stage.removesuffix("_control")
    facts = {key: config[key] for key in SHARED_KEYS} | {section: config[section]}
    facts["data"] = {key: config.data[key] for key in ("train", "valid", "synthetic")}
    if stage == "imitate_control":
        facts["slpo"] = {"steps": config.slpo.steps}
    facts = json.loads(ConfigDict(facts).to_json_best_effort())
    path = checkpoint_dir(experiment, stage) / "config.json"
    begun = any(entry.name.isdigit() for entry in path.parent.glob("*"))
    if not (begun and path.exists()):  # what never got to its first checkpoint binds nobody
        if write:
            experiment.origin.write(path.parent.parent / REASONER_FOLDER)
            write_text(path, json.dumps(facts, indent=1, sort_keys=True) + "\n")
        return
    changed = [key for key in _flat(facts) if _flat(facts)[key] != _flat(json.loads(path.read_text())).get(key)]
    if changed:
        raise UserError(
            f"config.{changed[0]}: is not what {experiment.workdir}'s stage {stage} was run with; set it back, or use "
            "another --workdir"
        )


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


def check_positions(experiment: Experiment, plan: list[imitate.Phase]) -> None:
    """The written steps of imitation are not bounded by max_answer_tokens, but by the model's positions."""
    problems, most = experiment.train, experiment.reasoner.config.n_positions
    for phase in plan:
        texts = [len(problems.prompts[i]) + len(problems.suffix(i, phase.dropped)) - 1 for i in range(len(problems))]
        if max(texts) + phase.latent_slots > most:
            raise UserError(
                f"config.model.n_positions: {most} is less than the {max(texts) + phase.latent_slots} positions of "
                f"problem {int(np.argmax(texts))} in imitation's phase {phase.name}; raise it or drop the problem"
            )

"""What a stage's result depends on: written down when it begins, and held against the config when it goes on."""

import json
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.config import default_config
from slpo_jax.errors import UserError
from slpo_jax.io.files import read_json, write_text
from slpo_jax.run.experiment import Experiment

ADAPTER = "imitate_adapter"  # where imitation with adapters runs, until they are merged into the stage's own checkpoint

SHARED_KEYS = (
    "seed", "init", "base", "lora_alpha", "reasoner", "tokenizer", "model", "max_latents", "min_latents",
    "max_answer_tokens", "prompt_slots", "dropout", "gate",
)  # fmt: skip


def claim(experiment: Experiment, stage: str, write: bool = True) -> None:
    """Write down what the stage's result depends on, or make sure that it is as it was when the stage began.

    Args:
        write: False only looks.
    Raises:
        UserError: the workdir holds the same stage of another config.
    """
    folder = experiment.workdir.stage(stage)
    if stage == "imitate" and not folder.is_finished:  # it may have begun with adapters
        claim(experiment, ADAPTER, write and experiment.config.imitate.lora.rank > 0)
    facts = _facts(experiment.config, stage)
    if not (folder.steps and folder.facts.exists()):  # what never got to its first checkpoint binds nobody
        if write:
            experiment.origin.write(experiment.workdir.reasoner)
            write_text(folder.facts, json.dumps(facts, indent=1, sort_keys=True) + "\n")
        return
    # A key that is younger than the checkpoint was at its default.
    known = _flat(_facts(default_config(), stage)) | _flat(read_json(folder.facts, "mend the file"))
    changed = [key for key, value in _flat(facts).items() if value != known.get(key)]
    if changed:
        raise UserError(
            f"config.{changed[0]}: is not what {experiment.workdir}'s stage {stage} was run with; set it back, or use "
            "another --workdir"
        )


def thinker_of(config: ConfigDict) -> dict[str, Any]:
    """`config.thinker` without the settings of the thinkers that are not used."""
    name = config.thinker.name
    return {"name": name, name: config.thinker[name]}


def _facts(config: ConfigDict, stage: str) -> dict[str, Any]:
    """What a stage's result depends on."""
    facts: dict[str, Any] = {key: config[key] for key in SHARED_KEYS} | {"thinker": thinker_of(config)}
    section = {"imitate_control": "imitate", ADAPTER: "imitate"}.get(stage, stage)
    if section in ("imitate", "cold_start"):
        facts |= {"stage": section, section: config[section]}
    else:  # an objective of the stage rl; the others beside it don't matter
        others = {key: value for key, value in config.rl.items() if key != "objectives"}
        facts |= {"stage": "rl", "rl": others, "objective": {stage: config.objective.get(stage, {})}}
    facts["data"] = {key: config.data[key] for key in ("train", "valid", "synthetic")}
    if stage == "imitate_control":
        facts["rl"] = {"steps": config.rl.steps}
    return json.loads(ConfigDict(facts).to_json_best_effort())


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {key: value for name, part in tree.items() for key, value in _flat(part, f"{prefix}{name}.").items()}

"""What a stage's result depends on: written down when it begins, and held against the run when it goes on.

That is its part of the config, the files of its data to the byte, and its start: the facts of the stage before it,
which hold the start of that one, or the files of `config.init`.
"""

import json
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.checked import section
from slpo_jax.config import default_config, thinker_of
from slpo_jax.errors import UserError
from slpo_jax.evaluation.trained import flatten
from slpo_jax.io import hosts
from slpo_jax.io.files import digest, files_digest, read_json, write_text
from slpo_jax.io.workdir import StageFolder
from slpo_jax.kinds import kind_of
from slpo_jax.origin.settings import plain
from slpo_jax.policy.thinkers import WITH_PARAMETERS
from slpo_jax.run.digests import SPEED, initial_files
from slpo_jax.run.experiment import Experiment
from slpo_jax.text.dataset_rows import source_path
from slpo_jax.training.objectives import OBJECTIVES, OPTIMIZER_KEYS

ADAPTER = "imitate_adapter"  # where imitation with adapters runs, until they are merged into the stage's own checkpoint

SHARED_KEYS = (
    "seed", "init", "base", "lora_alpha", "reasoner", "tokenizer", "prompt", "model", "max_latents", "min_latents",
    "max_answer_tokens", "prompt_slots", "dropout", "gate",
)  # fmt: skip
_SHAPES = ("reasoner", "tokenizer", "gate.hidden", "model.n_layer", "model.n_head", "model.n_embd", "model.n_positions",
           "model.n_inner", "model.n_kv_head", "model.rope_theta", "model.tied", "model.projector")  # fmt: skip
_DATA = ("train", "valid")
_BEFORE: dict[str, tuple[str, ...]] = {
    "imitate": (), ADAPTER: (), "imitate_control": ("imitate",), "cold_start": ("imitate",),
}  # fmt: skip
_BEFORE_RL = ("imitate", "cold_start")


def claim(experiment: Experiment, stage: str, write: bool = True) -> None:
    """Write down what the stage's result depends on, or make sure that it is as it was when the stage began.

    Args:
        write: False only looks.
    Raises:
        UserError: the workdir holds the same stage of another config, of other data or from another start.
    """
    folder = experiment.workdir.stage(stage)
    if stage == "imitate" and not folder.is_finished:  # it may have begun with adapters
        claim(experiment, ADAPTER, write and experiment.recipe.init is not None)
    if not _binds(folder):
        if write:
            facts = _facts(experiment, stage)
            hosts.barrier(f"claim {stage}")  # nobody still looks for what is written now
            if hosts.is_first():
                experiment.origin.write(experiment.workdir.reasoner)
            write_text(folder.facts, json.dumps(facts, indent=1, sort_keys=True) + "\n")
        return
    written = _read(folder)
    _check_settings(experiment, stage, written)
    _check_files(experiment, stage, written)
    now = starting_stage(experiment, stage)
    if written.get("start", {}).get("stage", now) != now:
        then = written["start"]["stage"] or "config.init"
        raise UserError(f"{folder.path}: began from {then}, and would now from {now or 'config.init'}; {_anew(folder)}")
    _check_start(experiment, stage, written)


def check_starts(experiment: Experiment) -> None:
    """Make sure that each finished stage was trained from the start that is there now.

    Raises:
        UserError: what a stage began from was trained again, with other settings, or nothing says what it began from.
    """
    for stage in experiment.workdir.finished_stages():
        _check_start(experiment, stage, _read(experiment.workdir.stage(stage)))


def check_models(experiment: Experiment, stages: Iterable[str]) -> None:
    """Make sure that finished stages' checkpoints are read as the models that they are.

    Not all that differs can be told by their arrays.

    Raises:
        UserError: the key in which one is of another model than the config's.
    """
    now = flatten(experiment.config.to_dict())
    for stage in stages:
        then = flatten(read_json(experiment.workdir.stage(stage).facts, default={}))
        key = next((key for key in _SHAPES if then.get(key, now[key]) != now[key]), "")
        if not key and then and {then.get("thinker.name"), now["thinker.name"]} & {*WITH_PARAMETERS}:
            key = "thinker.name" if then.get("thinker.name") != now["thinker.name"] else ""
        if key:
            raise UserError(
                f"config.{key}: is {now[key]}, but the checkpoint of {experiment.workdir}'s stage {stage} has "
                f"{then.get(key, 'none')}; set it back, or use another --workdir"
            )


def starting_stage(experiment: Experiment, stage: str) -> str:
    """The stage that `stage` starts from: the last before it that is finished or about to be; "" for `config.init`.

    An objective that comes after another one starts from that.

    Raises:
        UserError: that one is neither there nor about to be.
    """
    after = experiment.config.objective.get(stage, {}).get("after", "")
    for name in (after,) if after else reversed(_BEFORE.get(stage, _BEFORE_RL)):
        if experiment.workdir.stage(name).is_finished or _is_about_to_be(experiment, name):
            return name
    if after:
        raise UserError(
            f"config.objective.{stage}.after: {after} is not in {experiment.workdir}; put it before {stage} into "
            "config.rl.objectives"
        )
    return ""


def _is_about_to_be(experiment: Experiment, stage: str) -> bool:
    config = experiment.config
    return stage in config.stages or ("rl" in config.stages and stage in config.rl.objectives)


def _binds(folder: StageFolder) -> bool:
    """What never got to its first checkpoint binds nobody."""
    return bool(folder.steps)


def _read(folder: StageFolder) -> dict[str, Any]:
    found = read_json(folder.facts, _anew(folder))
    for key in ("start", "files"):
        if not isinstance(found.get(key, {}), dict):
            raise UserError(f"{folder.facts}: '{key}' is no object; {_anew(folder)}")
    return found


def _anew(folder: StageFolder) -> str:
    return f"delete {folder.path} to run the stage anew, or use another --workdir"


def _check_settings(experiment: Experiment, stage: str, written: dict[str, Any]) -> None:
    # A key that is younger than the checkpoint was at its default.
    known = flatten(_defaults(experiment.config, stage)) | flatten(written)
    settings = flatten(_settings(experiment.config, stage))
    free = {f"data.{name}" for name in _files(experiment.config) if name in written.get("files", {})}
    free |= {key for key in settings if key.startswith("model.") and key.partition(".")[2] in SPEED}
    free |= {key for key in settings if key.endswith((".micro_batches", ".capacities"))}
    changed = [key for key, value in settings.items() if value != known.get(key) and key not in free]
    if "thinker.name" not in settings and known.get("thinker.name") in WITH_PARAMETERS:
        changed.append("thinker.name")  # whose parameters the checkpoint has
    if changed:
        key, folder = changed[0], experiment.workdir.stage(stage)
        now, then = (_shown(values.get(key, "unused")) for values in (settings, known))
        raise UserError(
            f"config.{key}: is {now}, and {then} is what {experiment.workdir}'s stage {stage} was run with; set it "
            f"back, or {_anew(folder)}"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _defaults(config: ConfigDict, stage: str) -> dict[str, Any]:
    """The stage's part of the default config, with settings of the config's thinker and kind of objective."""
    found = default_config()
    kind = config.objective.get(stage, {}).get("kind", stage)
    if stage not in found.objective and kind in OBJECTIVES:
        found.objective[stage] = section(OBJECTIVES[kind])
    name = config.thinker.name
    return _settings(found, stage) | {"thinker": {"name": found.thinker.name, name: found.thinker[name].to_dict()}}


def _check_files(experiment: Experiment, stage: str, written: dict[str, Any]) -> None:
    """Files that are gone can't be held against anything; whoever needs them says so."""
    for name, found in _files(experiment.config).items():
        if found != written.get("files", {}).get(name, found):
            raise UserError(
                f"config.data.{name}: {experiment.config.data[name]} has changed since {experiment.workdir}'s stage "
                f"{stage} began; bring the old file back, or {_anew(experiment.workdir.stage(stage))}"
            )


def _check_start(experiment: Experiment, stage: str, written: dict[str, Any]) -> None:
    before = written.get("start", {})
    if not before.get("digest"):  # random weights
        return
    if _start(experiment, before["stage"])["digest"] not in ("", before["digest"]):
        folder = experiment.workdir.stage(stage)
        raise UserError(
            f"{folder.path}: began from another {before['stage'] or 'config.init'} than is there now; bring that back, "
            f"use another --workdir, or delete {folder.path} to run the stage anew"
        )


def _facts(experiment: Experiment, stage: str) -> dict[str, Any]:
    """What a stage's result depends on."""
    start = _start(experiment, starting_stage(experiment, stage))
    return _settings(experiment.config, stage) | {"files": _files(experiment.config), "start": start}


def _settings(config: ConfigDict, stage: str) -> dict[str, Any]:
    """A stage's part of the config; the thinker's settings where it thinks, or saves parameters of the thinker's."""
    facts: dict[str, Any] = {key: config[key] for key in SHARED_KEYS}
    section = {"imitate_control": "imitate", ADAPTER: "imitate"}.get(stage, stage)
    thinks = config.max_latents and not (section == "imitate" and not kind_of(config.reasoner).has_latents)
    if thinks or config.thinker.name in WITH_PARAMETERS:
        facts["thinker"] = thinker_of(config)
    if section in ("imitate", "cold_start"):
        facts |= {"stage": section, section: config[section]}
    else:  # an objective of the stage rl; the others beside it don't matter
        shared, own = config.rl.to_dict(), config.objective.get(stage, {})
        del shared["objectives"]
        for key in OPTIMIZER_KEYS:
            if own.get(key):  # and not the one that all share
                del shared["optimizer"][key]
        if own.get("steps") is not None:
            del shared["steps"]
        facts |= {"stage": "rl", "objective": {stage: own}, "rl": shared}
    facts["data"] = {key: config.data[key] for key in (*_DATA, "synthetic")}
    if stage == "imitate_control":
        facts["rl"] = {"steps": config.rl.steps}
    return plain(facts)


def _files(config: ConfigDict) -> dict[str, str]:
    """Digests of the data's local files by key."""
    found = {name: files_digest(source_path(config.data[name])) for name in _DATA if config.data[name]}
    return {name: value for name, value in found.items() if value}


def _start(experiment: Experiment, stage: str) -> dict[str, str]:
    """A stage and the digest of its facts, "" if it is gone; for the stage "" of the files of `config.init`."""
    if not stage:
        found = [files_digest(path) for path in initial_files(experiment)] if experiment.config.init else [""]
        return {"stage": "", "digest": found[0] if len(found) == 1 else digest(found)}
    folder = experiment.workdir.stage(stage)
    facts: dict[str, Any] = {}
    if _binds(folder):
        facts = _read(folder)
    elif _is_about_to_be(experiment, stage):
        facts = _facts(experiment, stage)
    return {"stage": stage, "digest": digest(facts) if facts else ""}

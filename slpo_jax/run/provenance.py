"""What a result depends on, and whether that is still so: nothing stale, foreign or changed is used in silence.

When a stage begins, two files are written beside its checkpoint: `config.json`, the whole config that it runs by, and
`inputs.json`, digests of its data, of its start and of its rewards' code. A run that goes on is held against them, but
for the keys in `config.keys.MAY_DIFFER` and those that the stage does not use. Its start is the stage before it, with
that one's config and inputs, and so the start of that one in turn, or the files of `config.init`. What an evaluation
depends on is told by its manifest (`eval/ROW/SET.manifest`).
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from slpo_jax.architectures import architecture_of
from slpo_jax.config.config import Config, stage_config
from slpo_jax.config.keys import (
    MAY_DIFFER,
    flat_values,
    is_of_another_policy,
    is_under,
    model_settings,
    rollout_settings,
)
from slpo_jax.config.overrides import values
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.dataset_rows import place_of
from slpo_jax.data.tokenizer import BYTES, WORDS
from slpo_jax.errors import UserError
from slpo_jax.io import artifact
from slpo_jax.io.files import digest, files_below, files_digest, flatten, write_text
from slpo_jax.io.orbax import params_digest, params_dir
from slpo_jax.io.workdir import StageFolder
from slpo_jax.policy.latent_policies import has_parameters
from slpo_jax.run.experiment import Stage
from slpo_jax.run.setup import Setup
from slpo_jax.runtime import hosts
from slpo_jax.stages import (
    CONTROL,
    IMITATE,
    IMITATE_SCRATCH,
    NO_THOUGHT,
    SECTIONS,
    section_of,
)
from slpo_jax.training.recipes import ImitateSettings

_REWARDS = {"reward": "rewards", "rewards": "reward"}  # one of which is given
_CODE = "reward_code."  # before a reward's name


def settings_of(config: Config, name: str) -> dict[str, Any]:
    """Return what a stage's result depends on of a config, by dotted key, as it comes back from JSON."""
    return bound_settings(flat_values(stage_config(config, name)), name)


def bound_settings(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Pick from the whole config of a stage what its result depends on.

    Args:
        settings: of `config.json`, by dotted key.
        name: of the stage's checkpoint.
    """
    section = section_of(name)
    architecture = architecture_of(settings["reasoner"])
    # A latent policy that neither thinks nor has parameters in the checkpoint changes nothing.
    thinks = settings["max_latents"]
    if section == IMITATE:
        thinks = thinks and architecture.has_latents
    has_policy = thinks or has_parameters(settings["latent_policy.name"])
    # Nor does a recipe that is not used.
    shared = {field.name for field in dataclasses.fields(ImitateSettings)}
    recipe_keys = {*shared, settings["imitate.recipe"], architecture.default_recipe}
    bound = dict[str, Any]()
    for key, value in settings.items():
        place = key.partition(".")[0]
        if place in SECTIONS and place != section:
            continue
        if place == "objective" and not is_under(key, (f"objective.{name}",)):
            continue
        if place == "latent_policy" and not has_policy:
            continue
        if place == IMITATE and key.split(".")[1] not in recipe_keys:
            continue
        is_unnamed_reward = key in _REWARDS and not value
        if is_unnamed_reward or is_under(key, MAY_DIFFER):
            continue
        if not is_of_another_policy(key, settings):
            bound[key] = value
    if name == NO_THOUGHT:  # which has no latents after which to stop
        bound["imitate.gate_weight"] = 0.0
    if name in (CONTROL, IMITATE_SCRATCH[CONTROL]):  # which goes on for as many steps
        bound["rl.steps"] = settings["rl.steps"]
        bound["imitate.control_rate"] = settings["imitate.control_rate"]
    return bound


def evaluated_settings(config: Config, more_ends: Iterable[int] = ()) -> dict[str, Any]:
    """Return what an evaluation's rollouts depend on besides parameters and problems, by key of the config.

    Args:
        more_ends: ids of tokens that end answers besides the tokenizer's eos, which only a checkpoint's files say.
    """
    evaluate = config.evaluate
    settings = model_settings(config) | rollout_settings(config)
    tokens = settings.pop("max_answer_tokens")
    rate = settings.pop("dropout.rate")
    settings["evaluate.max_answer_tokens"] = evaluate.max_answer_tokens or tokens
    settings["evaluate.dropout"] = (
        rate if evaluate.dropout is None else evaluate.dropout
    )
    settings["seed"] = config.seed
    settings["model.dtype"] = config.model.dtype
    settings |= config.reward_facts
    settings["more_ends"] = list(more_ends)
    return settings


def problems_facts(problems: EncodedProblems, limit: int) -> dict[str, Any]:
    """Digest the first problems of a set, as loaded, and their prompts' token ids; tell their number.

    Args:
        problems: the set.
        limit: how many are used; 0 is all.
    """
    count = min(limit or len(problems), len(problems))
    first_problems = problems.problems[:count]
    texts = list[list[Any]]()
    for problem in first_problems:
        texts.append([problem.question, problem.steps, problem.answer])
    # Columns that rewards ask for come after all texts.
    for problem in first_problems:
        if problem.columns:
            texts.append([repr(sorted(problem.columns.items()))])
    prompts = [list(map(int, prompt)) for prompt in problems.prompts[:count]]
    return {"data": digest(texts), "prompts": digest(prompts), "problems": count}


def trained_with(stage: Stage) -> dict[str, Any]:
    """Read what a stage's checkpoint, or without a name `config.init`, was trained with, as it stands beside it."""
    facts = dict[str, Any]()
    folder: StageFolder | None = stage.folder
    if not stage.name:
        opened = stage.experiment.checkpoint.opened
        facts["init"] = stage.experiment.config.init
        folder = opened.stage_folder if opened else None
    if folder is None or not folder.inputs.is_file():
        return facts
    facts["stage"] = section_of(folder.name)
    facts |= bound_settings(flatten(folder.read_config()), folder.name)
    return facts | folder.read_inputs()


def is_as_trained(config: Config, facts: Mapping[str, Any]) -> bool:
    """Tell whether rollouts of a config are those that a checkpoint was trained for.

    Args:
        facts: of `trained_with`.
    """
    settings = rollout_settings(config)
    return all(facts.get(key, value) == value for key, value in settings.items())


def ensure_manifest(stage: Stage, write: bool = True) -> None:
    """Write down what the stage's result depends on, or make sure that it is as it was when the stage began.

    Args:
        write: False only looks.
    Raises:
        UserError: the workdir holds the same stage of another config, of other data or from another start.
    """
    experiment = stage.experiment
    folder = stage.folder
    config = values(stage_config(experiment.config, stage.name))
    # A stage that isn't finished may have begun with parts of its recipe's own, in a folder of their own.
    if stage.name in IMITATE_SCRATCH and not folder.is_finished:
        scratch = experiment.stage(IMITATE_SCRATCH[stage.name])
        ensure_manifest(scratch, write and experiment.recipe.has_extra_parameters)
    # Without a first checkpoint there is nothing that binds this run.
    if not folder.steps:
        if write:
            inputs = _digest_inputs(stage)
            # By now nobody still looks for the files that are about to be written.
            hosts.barrier(f"manifest {stage.name}")
            if hosts.is_first():
                experiment.checkpoint.write(experiment.workdir.reasoner)
            _write_facts(folder, config, inputs)
        return
    # Otherwise settings, the stage before and its files must be those of the beginning.
    _check_settings(stage)
    then = folder.read_inputs()["start"]["stage"]
    now = stage.start.name
    if then != now:
        raise UserError(
            f"{folder.path}: began from {then or 'config.init'}, and would now from {now or 'config.init'}; "
            f"{folder.anew}"
        )
    check_start(stage)
    # A finished stage that takes more steps is open again, with the new number of steps.
    if write and stage.needs_more_steps:
        inputs = folder.read_inputs()
        hosts.barrier(f"more steps of {stage.name}")
        if hosts.is_first():
            folder.finished.unlink(missing_ok=True)
        _write_facts(folder, config, inputs)


def _write_facts(
    folder: StageFolder, config: dict[str, Any], inputs: dict[str, Any]
) -> None:
    """Write down what a stage's result depends on."""
    write_text(folder.inputs, json.dumps(inputs, indent=1) + "\n")
    write_text(folder.config, json.dumps(config, indent=1) + "\n")


def check_models(stages: Iterable[Stage]) -> None:
    """Make sure that finished stages' checkpoints are read as the models that they are.

    Not all that differs can be told by their arrays.

    Raises:
        UserError: the key in which one is of another model than the config's.
    """
    for stage in stages:
        config = stage.experiment.config
        then = flatten(stage.folder.read_config())
        now = model_settings(config)
        name = config.latent_policy.name
        if has_parameters(name) or has_parameters(then.get("latent_policy.name", name)):
            now["latent_policy.name"] = name
        for key, value in now.items():
            was = then.get(key, "none")
            if was != value:
                raise UserError(
                    f"config.{key}: is {value}, but the checkpoint of {stage.experiment.workdir}'s stage {stage.name} "
                    f"has {was}; set it back, or use another --workdir"
                )


def initial_files(setup: Setup) -> list[Path]:
    """Return the files or folders that `config.init`'s parameters are read from: of adapters alone, the base's too."""
    opened = setup.checkpoint.opened
    return [path.absolute() for path in opened.files] if opened else []


def checkpoint_digest(stage: Stage, load: Callable[[], Any]) -> str:
    """Return `params_digest` of a stage's checkpoint, or without a name of `config.init`'s.

    It is kept beside the checkpoints with the sizes and times of the files that it is of, so that what did not change
    is not read again: seconds for billions of parameters.

    Args:
        load: reads the parameters.
    """
    # List the files that it is of, with their sizes and times.
    setup = stage.experiment
    folders = [params_dir(stage.folder.path)] if stage.name else initial_files(setup)
    state: dict[str, Any] = {}
    for folder in folders:
        files = [folder] if folder.is_file() else files_below(folder)
        for path in files:
            facts = path.stat()
            name = str(path.relative_to(folder.parent))
            state[name] = [facts.st_size, facts.st_mtime_ns]
    # What `config.init` lacks is drawn, and how it is read can be set: both follow from the config.
    if not stage.name:
        settings = flat_values(stage.experiment.config)
        unread = (*MAY_DIFFER, *SECTIONS, "objective", "data")
        read = {key: settings[key] for key in settings if not is_under(key, unread)}
        state["settings"] = read
    # All processes read the parameters, or none: reading them is done together.
    path_of_digest = stage.experiment.workdir.digest(stage.name)
    digest_before = artifact.value_of(path_of_digest, state)
    if hosts.all_processes_agree(digest_before is not None, path_of_digest):
        return digest_before
    digest_now = params_digest(load())
    artifact.write(path_of_digest, state, digest_now)
    return digest_now


def _check_settings(stage: Stage) -> None:
    """Check a stage's settings and files. Files that are gone are no difference; whoever needs them says so."""
    config = stage.experiment.config
    inputs = stage.folder.read_inputs()
    then = bound_settings(flatten(stage.folder.read_config()), stage.name)
    now = settings_of(config, stage.name)
    names = {unfinished: name for name, unfinished in IMITATE_SCRATCH.items()}
    owner = f"{stage.experiment.workdir}'s stage {names.get(stage.name, stage.name)}"
    # Files go before settings, which may have been chosen from them.
    digests = _digest_files(config)
    files = inputs["files"]
    for key in digests.keys() & files.keys():
        if digests[key] == files[key]:
            # Its bytes say more than its name, which may differ.
            now[key] = then.get(key)
        elif digests[key].split()[0] != files[key].split()[0]:
            raise UserError(
                f"config.{key}: {now[key]} has changed since {owner} began; bring the old file back, or "
                f"{stage.folder.anew}"
            )
    # A stage that takes more steps than it had may say so.
    if stage.needs_more_steps:
        for key in ("rl.steps", f"objective.{stage.name}.steps"):
            if key in then:
                now[key] = then[key]
    # The section rl of an objective has its own settings in it: name them by the objective's own keys first.
    by_place = sorted(now, key=lambda key: not key.startswith("objective."))
    now = {key: now[key] for key in by_place}
    differs = first_difference(now, then)
    if differs:
        key, is_now, was = differs
        raise UserError(
            f"config.{key}: is {is_now}, and {was} is what {owner} was run with; set it back, or {stage.folder.anew}"
        )
    # A reward's name stays when its code changes.
    code = _digest_reward_code(config, stage.name)
    differs = artifact.first_difference(code, inputs["reward_code"])
    if differs:
        raise UserError(
            f"config.reward: {differs[0]} has changed since {owner} began; bring the old one back, or "
            f"{stage.folder.anew}"
        )


def first_difference(
    now: dict[str, Any], then: dict[str, Any]
) -> tuple[str, str, str] | None:
    """Return `artifact.first_difference` of flat facts; of one reward against several, both keys are there."""
    differs = artifact.first_difference(now, then)
    if differs is None:
        return None
    key, is_now, was = differs
    other = _REWARDS.get(key)
    if other in then:
        was = f"config.{other}={json.dumps(then[other])}"
    return key, is_now, was


def check_start(stage: Stage) -> None:
    """Make sure that a stage was trained from the start that is there now.

    Raises:
        UserError: what it began from was trained again, with other settings, or nothing says what it began from.
    """
    path = stage.folder.path
    before = stage.folder.read_inputs()["start"]
    # Without a digest it began from random weights, which are the same again.
    if not before["digest"]:
        return
    now = _digest_start(stage.experiment.stage(before["stage"]))
    # A start that is gone does not differ.
    if now["digest"] not in ("", before["digest"]):
        raise UserError(
            f"{path}: began from another {before['stage'] or 'config.init'} than is there now; bring that back, "
            f"use another --workdir, or delete {path} to run the stage anew"
        )


def _digest_inputs(stage: Stage) -> dict[str, Any]:
    """Return what a stage's result depends on beside its config: digests of data, start and rewards' code."""
    config = stage.experiment.config
    return {
        "files": _digest_files(config),
        "start": _digest_start(stage.start),
        "reward_code": _digest_reward_code(config, stage.name),
    }


def _digest_reward_code(config: Config, name: str) -> dict[str, str]:
    """Return digests of the code of rewards, by name; imitation only chooses problems by them."""
    if section_of(name) == IMITATE:
        return {}
    digests = dict[str, str]()
    for key, value in config.reward_facts.items():
        if key.startswith(_CODE):
            digests[key.removeprefix(_CODE)] = value
    return digests


def _digest_files(config: Config) -> dict[str, str]:
    """Digest the local files of problems and words, and tell what of them is taken, by key of the config."""
    data = config.data
    places = dict[str, tuple[Path, str]]()
    if data.train:
        places["data.train"] = place_of(data.train, "train")
    if data.demos:
        places["data.demos"] = place_of(data.demos, "train")
    if data.valid:
        places["data.valid"] = place_of(data.valid, "validation")
    if config.tokenizer not in ("", WORDS, BYTES):
        places["tokenizer"] = (Path(config.tokenizer).expanduser(), "")
    # What lies nowhere on this machine has no digest, and is left out.
    digests = dict[str, str]()
    for key, (place, part) in places.items():
        bytes_digest = files_digest(place)
        if bytes_digest:
            digests[key] = f"{bytes_digest} {part}".strip()
    return digests


def _digest_start(stage: Stage) -> dict[str, str]:
    """Return a stage and the digest of what it depends on, "" if it is gone; without a name, `config.init`'s files'."""
    if not stage.name:
        digests = [files_digest(path) for path in initial_files(stage.experiment)]
        if len(digests) > 1:
            return {"stage": "", "digest": digest(digests)}
        return {"stage": "", "digest": digests[0] if digests else ""}
    # A stage that has begun says itself what it depends on; one that this run makes will say so.
    if stage.folder.steps:
        config = flatten(stage.folder.read_config())
        settings = bound_settings(config, stage.name)
        inputs = stage.folder.read_inputs()
    elif stage.is_wanted:
        settings = settings_of(stage.experiment.config, stage.name)
        inputs = _digest_inputs(stage)
    else:
        return {"stage": stage.name, "digest": ""}
    return {"stage": stage.name, "digest": digest([settings, inputs])}

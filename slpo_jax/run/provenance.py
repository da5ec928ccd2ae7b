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
from slpo_jax.data.dataset_rows import Role, place_of
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
from slpo_jax.stages import CONTROL, IMITATE, NO_THOUGHT, SECTIONS, UNFINISHED, section_of
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
    section, bound = section_of(name), dict[str, Any]()
    for key, value in settings.items():
        place = key.partition(".")[0]
        of_another_stage = place in SECTIONS and place != section
        of_another_objective = place == "objective" and not is_under(key, (f"objective.{name}",))
        unnamed_reward = key in _REWARDS and not value
        if of_another_stage or of_another_objective or unnamed_reward or is_under(key, MAY_DIFFER):
            continue
        if not is_of_another_policy(key, settings):
            bound[key] = value
    architecture = architecture_of(settings["reasoner"])
    # A latent policy that neither thinks nor has parameters in the checkpoint changes nothing.
    thinks = settings["max_latents"] and (section != IMITATE or architecture.has_latents)
    if not thinks and not has_parameters(settings["latent_policy.name"]):
        bound = {key: value for key, value in bound.items() if not is_under(key, ("latent_policy",))}
    # Nor does a recipe that is not used.
    if section == IMITATE:
        shared = {field.name for field in dataclasses.fields(ImitateSettings)}
        used = {*shared, settings["imitate.recipe"], architecture.default_recipe}
        others = [key for key in bound if is_under(key, ("imitate",)) and key.split(".")[1] not in used]
        for key in others:
            del bound[key]
    if name == NO_THOUGHT:  # which has no latents after which to stop
        bound["imitate.gate_weight"] = 0.0
    if name in (CONTROL, UNFINISHED[CONTROL]):  # which goes on for as many steps
        bound["rl.steps"] = settings["rl.steps"]
        bound["imitate.control_rate"] = settings["imitate.control_rate"]
    return bound


def evaluated_settings(config: Config, more_ends: Iterable[int] = ()) -> dict[str, Any]:
    """Return what an evaluation's rollouts depend on besides parameters and problems, by key of the config.

    Args:
        more_ends: ids of tokens that end answers besides the tokenizer's eos, which only a checkpoint's files say.
    """
    evaluate, settings = config.evaluate, model_settings(config) | rollout_settings(config)
    tokens, rate = settings.pop("max_answer_tokens"), settings.pop("dropout.rate")
    settings["evaluate.max_answer_tokens"] = evaluate.max_answer_tokens or tokens
    settings["evaluate.dropout"] = rate if evaluate.dropout is None else evaluate.dropout
    settings |= {"seed": config.seed, "model.dtype": config.model.dtype} | config.reward_facts
    return settings | {"more_ends": list(more_ends)}


def problems_facts(problems: EncodedProblems, limit: int) -> dict[str, Any]:
    """Digest the first problems of a set, as loaded, and their prompts' token ids; tell their number.

    Args:
        problems: the set.
        limit: how many are used; 0 is all.
    """
    count = min(limit or len(problems), len(problems))
    first_problems = problems.problems[:count]
    texts = [[problem.question, problem.steps, problem.answer] for problem in first_problems]
    texts += [[repr(sorted(problem.columns.items()))] for problem in first_problems if problem.columns]
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
    facts |= {"stage": section_of(folder.name)} | bound_settings(flatten(folder.read_config()), folder.name)
    return facts | folder.read_inputs()


def is_as_trained(config: Config, facts: Mapping[str, Any]) -> bool:
    """Tell whether rollouts of a config are those that a checkpoint was trained for.

    Args:
        facts: of `trained_with`.
    """
    return all(facts.get(key, value) == value for key, value in rollout_settings(config).items())


def ensure_manifest(stage: Stage, write: bool = True) -> None:
    """Write down what the stage's result depends on, or make sure that it is as it was when the stage began.

    Args:
        write: False only looks.
    Raises:
        UserError: the workdir holds the same stage of another config, of other data or from another start.
    """
    experiment, folder = stage.experiment, stage.folder
    if stage.name in UNFINISHED and not folder.is_finished:  # it may have begun with parts of its recipe's own
        ensure_manifest(experiment.stage(UNFINISHED[stage.name]), write and experiment.recipe.ends_apart)
    if not folder.steps:  # what never got to its first checkpoint binds nobody
        if write:
            config = values(stage_config(experiment.config, stage.name))
            inputs = _inputs(stage)
            hosts.barrier(f"manifest {stage.name}")  # nobody still looks for what is written now
            if hosts.is_first():
                experiment.checkpoint.write(experiment.workdir.reasoner)
            _write_facts(folder, config, inputs)
        return
    _check_settings(stage)
    then, now = folder.read_inputs()["start"]["stage"], stage.start.name
    if then != now:
        raise UserError(
            f"{folder.path}: began from {then or 'config.init'}, and would now from {now or 'config.init'}; "
            f"{folder.anew}"
        )
    check_start(stage)
    if write and stage.goes_on:
        config = values(stage_config(experiment.config, stage.name))
        inputs = folder.read_inputs()
        hosts.barrier(f"more steps of {stage.name}")  # nobody still looks for what is written now
        if hosts.is_first():
            folder.finished.unlink(missing_ok=True)
        _write_facts(folder, config, inputs)


def _write_facts(folder: StageFolder, config: dict[str, Any], inputs: dict[str, Any]) -> None:
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
        config, then = stage.experiment.config, flatten(stage.folder.read_config())
        now, name = model_settings(config), config.latent_policy.name
        if has_parameters(name) or has_parameters(then.get("latent_policy.name", name)):
            now["latent_policy.name"] = name
        for key, value in now.items():
            if then.get(key, "none") != value:
                raise UserError(
                    f"config.{key}: is {value}, but the checkpoint of {stage.experiment.workdir}'s stage {stage.name} "
                    f"has {then.get(key, 'none')}; set it back, or use another --workdir"
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
    folders = [params_dir(stage.folder.path)] if stage.name else initial_files(stage.experiment)
    state: dict[str, Any] = {}
    for folder in folders:
        files = [folder] if folder.is_file() else files_below(folder)
        stats = {str(path.relative_to(folder.parent)): path.stat() for path in files}
        state |= {name: [it.st_size, it.st_mtime_ns] for name, it in stats.items()}
    if not stage.name:  # what lacks in it is drawn, and how it is read can be set
        settings, unread = flat_values(stage.experiment.config), (*MAY_DIFFER, *SECTIONS, "objective", "data")
        state["settings"] = {key: value for key, value in settings.items() if not is_under(key, unread)}
    path_of_digest = stage.experiment.workdir.digest(stage.name)
    digest_before = artifact.value_of(path_of_digest, state)
    if hosts.agreed(digest_before is not None, path_of_digest):
        return digest_before
    digest_now = params_digest(load())
    artifact.write(path_of_digest, state, digest_now)
    return digest_now


def _check_settings(stage: Stage) -> None:
    """Check a stage's settings and files. Files that are gone are no difference; whoever needs them says so."""
    config, inputs = stage.experiment.config, stage.folder.read_inputs()
    then = bound_settings(flatten(stage.folder.read_config()), stage.name)
    now = settings_of(config, stage.name)
    names = {unfinished: name for name, unfinished in UNFINISHED.items()}
    owner = f"{stage.experiment.workdir}'s stage {names.get(stage.name, stage.name)}"
    # Files go before settings, which may have been chosen from them.
    digests, files = _files(config), inputs["files"]
    for key in digests.keys() & files.keys():
        if digests[key] == files[key]:  # whose bytes say more than its name
            now[key] = then.get(key)
        elif digests[key].split()[0] != files[key].split()[0]:
            raise UserError(
                f"config.{key}: {now[key]} has changed since {owner} began; bring the old file back, or "
                f"{stage.folder.anew}"
            )
    if stage.goes_on:
        for key in ("rl.steps", f"objective.{stage.name}.steps"):
            if key in then:
                now[key] = then[key]
    # The section rl of an objective has its own settings in it, whose own name is to be said.
    now = dict(sorted(now.items(), key=lambda item: not item[0].startswith("objective.")))
    if differs := first_difference(now, then):
        key, is_now, was = differs
        raise UserError(
            f"config.{key}: is {is_now}, and {was} is what {owner} was run with; set it back, or {stage.folder.anew}"
        )
    if differs := artifact.first_difference(_reward_code(config, stage.name), inputs["reward_code"]):
        raise UserError(
            f"config.reward: {differs[0]} has changed since {owner} began; bring the old one back, or "
            f"{stage.folder.anew}"
        )


def first_difference(now: dict[str, Any], then: dict[str, Any]) -> tuple[str, str, str] | None:
    """Return `artifact.first_difference` of flat facts; of one reward against several, both keys are there."""
    if (differs := artifact.first_difference(now, then)) is None:
        return None
    key, is_now, was = differs
    other = _REWARDS.get(key)
    return key, is_now, f"config.{other}={json.dumps(then[other])}" if other in then else was


def check_start(stage: Stage) -> None:
    """Make sure that a stage was trained from the start that is there now.

    Raises:
        UserError: what it began from was trained again, with other settings, or nothing says what it began from.
    """
    path = stage.folder.path
    before = stage.folder.read_inputs()["start"]
    if before["digest"] and _start(stage.experiment.stage(before["stage"]))["digest"] not in ("", before["digest"]):
        raise UserError(  # else it began from random weights, or from what is gone
            f"{path}: began from another {before['stage'] or 'config.init'} than is there now; bring that back, "
            f"use another --workdir, or delete {path} to run the stage anew"
        )


def _inputs(stage: Stage) -> dict[str, Any]:
    """Return what a stage's result depends on beside its config: digests of data, start and rewards' code."""
    config = stage.experiment.config
    code = _reward_code(config, stage.name)
    return {"files": _files(config), "start": _start(stage.start), "reward_code": code}


def _reward_code(config: Config, name: str) -> dict[str, str]:
    """Return digests of the code of rewards, by name; imitation only chooses problems by them."""
    if section_of(name) == IMITATE:
        return {}
    facts = config.reward_facts
    return {key.removeprefix(_CODE): facts[key] for key in facts if key.startswith(_CODE)}


def _files(config: Config) -> dict[str, str]:
    """Digest the local files of problems and words, and tell what of them is taken, by key of the config."""
    data = config.data
    sources: dict[str, tuple[str, Role]] = {
        "train": (data.train, "train"), "demos": (data.demos, "train"), "valid": (data.valid, "validation")
    }  # fmt: skip
    places = {f"data.{name}": place_of(*source) for name, source in sources.items() if source[0]}
    if config.tokenizer not in ("", WORDS, BYTES):
        places["tokenizer"] = Path(config.tokenizer).expanduser(), ""
    digests = {key: (files_digest(place), part) for key, (place, part) in places.items()}
    return {key: " ".join(source).strip() for key, source in digests.items() if source[0]}


def _start(stage: Stage) -> dict[str, str]:
    """Return a stage and the digest of what it depends on, "" if it is gone; without a name, `config.init`'s files'."""
    if not stage.name:
        digests = [files_digest(path) for path in initial_files(stage.experiment)] or [""]
        return {"stage": "", "digest": digests[0] if len(digests) == 1 else digest(digests)}
    if stage.folder.steps:
        inputs = stage.folder.read_inputs()
        facts = [bound_settings(flatten(stage.folder.read_config()), stage.name), inputs]
    elif stage.wanted:
        facts = [settings_of(stage.experiment.config, stage.name), _inputs(stage)]
    else:
        return {"stage": stage.name, "digest": ""}
    return {"stage": stage.name, "digest": digest(facts)}

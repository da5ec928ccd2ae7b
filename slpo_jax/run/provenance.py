"""What a result depends on, and whether that is still so: nothing stale, foreign or changed is used in silence.

A stage's manifest is written beside its checkpoint when it begins, and held against the run that goes on with it: the
settings that affect it (`settings.setting`), the files of its data to the byte, and its start, which is the manifest of
the stage before it, and so the start of that one in turn, or the files of `config.init`. What an evaluation depends on
is told by its manifest in the same way (`eval/ROW/SET.manifest`).
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from slpo_jax.architectures import architecture_of
from slpo_jax.config.config import Config, rl_of
from slpo_jax.config.overrides import values
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.dataset_rows import Role, place_of
from slpo_jax.data.tokenizer import BYTES, WORDS
from slpo_jax.errors import UserError
from slpo_jax.io import artifact
from slpo_jax.io.files import as_json, digest, files_below, files_digest, flatten, read_json, write_text
from slpo_jax.io.orbax import params_digest, params_dir
from slpo_jax.io.workdir import StageFolder
from slpo_jax.policy.latent_policies import has_parameters
from slpo_jax.run.experiment import Stage
from slpo_jax.run.setup import Setup
from slpo_jax.runtime import hosts
from slpo_jax.stages import CONTROL, IMITATE, NO_THOUGHT, RL, SECTIONS, UNFINISHED, section_of
from slpo_jax.training.recipes import RECIPES

_TRAINED = ("model", "parameters", "rollouts")  # what a trained parameter depends on
_REWARDS = {"reward": "rewards", "rewards": "reward"}  # one of which is given
_CODE = "reward_code."  # before a reward's name
_OF_STAGES = (*SECTIONS, "objective")  # of which a stage has its own alone


def settings_of(config: Config, stage: str) -> dict[str, Any]:
    """Return a stage's part of the config, as it comes back from JSON.

    Without the latent policy where it neither thinks nor has parameters in the checkpoint, and without recipes that are
    not used. An objective has the shared settings of the stage rl with its own in their place.
    """
    settings, section = values(config, _TRAINED), section_of(stage)
    facts = {key: value for key, value in settings.items() if key not in _OF_STAGES}
    architecture = architecture_of(config.reasoner)
    thinks = config.max_latents and not (section == IMITATE and not architecture.has_latents)
    if not thinks and not config.latent_policy.selected.has_parameters:
        del facts["latent_policy"]
    facts["stage"] = section
    if section == RL:
        rl = rl_of(config.rl, config.objective[stage])
        facts |= {"objective": {stage: settings["objective"][stage]}, "rl": values(rl, _TRAINED)}
    else:
        unused = {*RECIPES} - {config.imitate.recipe, architecture.default_recipe} if section == IMITATE else set()
        facts[section] = {key: value for key, value in settings[section].items() if key not in unused}
    if stage == NO_THOUGHT:
        facts[section]["gate_weight"] = 0.0
    if stage in (CONTROL, UNFINISHED[CONTROL]):  # which goes on for as many steps
        facts["rl"] = {"steps": config.rl.steps}
        facts[section]["control_rate"] = config.imitate.control_rate
    del facts["reward"], facts["rewards"]
    rewards = config.reward_facts
    if section == IMITATE:  # which a reward only chooses problems for
        rewards = {key: value for key, value in rewards.items() if not key.startswith(_CODE)}
    return as_json(facts | rewards)


def evaluated_settings(config: Config, more_ends: Iterable[int] = ()) -> dict[str, Any]:
    """Return what an evaluation's rollouts depend on besides parameters and problems, by key of the config.

    Args:
        more_ends: ids of tokens that end answers besides the tokenizer's eos, which only a checkpoint's files say.
    """
    evaluate, settings = config.evaluate, flatten(as_json(values(config, ("model", "rollouts"))))
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
            facts = _manifest(stage)
            hosts.barrier(f"manifest {stage.name}")  # nobody still looks for what is written now
            if hosts.is_first():
                experiment.checkpoint.write(experiment.workdir.reasoner)
            _write_facts(folder, facts)
        return
    written = read_json(folder.facts, folder.anew)
    _check_settings(stage, written)
    then, now = written.get("start", {}).get("stage"), stage.start.name
    if then is not None and then != now:
        raise UserError(
            f"{folder.path}: began from {then or 'config.init'}, and would now from {now or 'config.init'}; "
            f"{folder.anew}"
        )
    check_start(stage)
    if write and stage.goes_on:
        settings = settings_of(experiment.config, stage.name)
        facts = written | {key: settings[key] for key in ("rl", "objective") if key in settings}
        hosts.barrier(f"more steps of {stage.name}")  # nobody still looks for what is written now
        if hosts.is_first():
            folder.finished.unlink(missing_ok=True)
        _write_facts(folder, facts)


def _write_facts(folder: StageFolder, facts: dict[str, Any]) -> None:
    """Write down what a stage's result depends on."""
    write_text(folder.facts, json.dumps(facts, indent=1, sort_keys=True) + "\n")


def check_models(stages: Iterable[Stage]) -> None:
    """Make sure that finished stages' checkpoints are read as the models that they are.

    Not all that differs can be told by their arrays.

    Raises:
        UserError: the key in which one is of another model than the config's.
    """
    for stage in stages:
        config, then = stage.experiment.config, flatten(stage.folder.read_facts())
        now, name = flatten(as_json(values(config, ("model",)))), config.latent_policy.name
        if has_parameters(name) or has_parameters(then.get("latent_policy.name", name)):
            now["latent_policy.name"] = name
        for key, value in now.items():
            if then and then.get(key, "none") != value:
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
        settings = values(stage.experiment.config, _TRAINED)
        state["settings"] = as_json({key: value for key, value in settings.items() if key not in (*_OF_STAGES, "data")})
    path_of_digest = stage.experiment.workdir.digest(stage.name)
    digest_before = artifact.value_of(path_of_digest, state)
    if hosts.agreed(digest_before is not None, path_of_digest):
        return digest_before
    digest_now = params_digest(load())
    artifact.write(path_of_digest, state, digest_now)
    return digest_now


def _check_settings(stage: Stage, written: dict[str, Any]) -> None:
    """Check a stage's settings and files. Files that are gone are no difference; whoever needs them says so."""
    files = written.get("files", {})
    names = {unfinished: name for name, unfinished in UNFINISHED.items()}
    owner = f"{stage.experiment.workdir}'s stage {names.get(stage.name, stage.name)}"
    then = flatten({key: value for key, value in written.items() if key not in ("files", "start")})
    now, digests = flatten(settings_of(stage.experiment.config, stage.name)), _files(stage.experiment.config)
    for key in digests.keys() & files.keys():  # before settings, which may have been chosen from them
        if digests[key] == files[key]:  # whose bytes say more than its name
            now[key] = then.get(key)
        elif digests[key].split()[0] != files[key].split()[0]:
            raise UserError(
                f"config.{key}: {now[key]} has changed since {owner} began; bring the old file back, or "
                f"{stage.folder.anew}"
            )
    if stage.goes_on:
        raised = ("rl.steps", f"objective.{stage.name}.steps")
        now |= {key: then[key] for key in raised if key in then}
    if differs := first_difference(now, then):
        key, is_now, was = differs
        if key.startswith(_CODE) and key in now and key in then:
            raise UserError(
                f"config.reward: {key.removeprefix(_CODE)} has changed since {owner} began; bring the old one back, or "
                f"{stage.folder.anew}"
            )
        raise UserError(
            f"config.{key}: is {is_now}, and {was} is what {owner} was run with; set it back, or {stage.folder.anew}"
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
    before = read_json(stage.folder.facts, stage.folder.anew).get("start", {})
    if before.get("digest") and _start(stage.experiment.stage(before["stage"]))["digest"] not in ("", before["digest"]):
        raise UserError(  # else it began from random weights, or from what is gone
            f"{path}: began from another {before['stage'] or 'config.init'} than is there now; bring that back, "
            f"use another --workdir, or delete {path} to run the stage anew"
        )


def _manifest(stage: Stage) -> dict[str, Any]:
    """Return all that a stage's result depends on."""
    config = stage.experiment.config
    return settings_of(config, stage.name) | {"files": _files(config), "start": _start(stage.start)}


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
    """Return a stage and its manifest's digest, "" if it is gone; without a name, that of `config.init`'s files."""
    if not stage.name:
        digests = [files_digest(path) for path in initial_files(stage.experiment)] or [""]
        return {"stage": "", "digest": digests[0] if len(digests) == 1 else digest(digests)}
    facts: dict[str, Any] = {}
    if stage.folder.steps:
        facts = read_json(stage.folder.facts, stage.folder.anew)
    elif stage.wanted:
        facts = _manifest(stage)
    return {"stage": stage.name, "digest": digest(facts) if facts else ""}

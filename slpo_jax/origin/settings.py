"""The config that goes with a checkpoint, found out from the checkpoint: no config file is needed to use one.

What decides what it answers is also taken into a config that only evaluates: what was set there, on the command line or
away from the default, goes before what the checkpoint was made with, and that before the default. Where a config and
its checkpoint differ, a line says so.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from absl import logging
from ml_collections import ConfigDict

from slpo_jax.checked import fill
from slpo_jax.config import Config, default_config, own_latents, thinker_of
from slpo_jax.errors import UserError
from slpo_jax.evaluation.rows import RULES, is_rule, read_rule
from slpo_jax.evaluation.trained import flatten
from slpo_jax.io.files import read_json
from slpo_jax.io.workdir import Workdir
from slpo_jax.kinds import PLAIN, kind_of
from slpo_jax.origin.identify import Identity
from slpo_jax.policy.policy import Stopping
from slpo_jax.policy.thinkers import THINKERS

# What a run's config says of its start and its machine, which is not true of its checkpoint.
_NOT_THE_CHECKPOINTS = ("stages", "init", "base", "lora_alpha", "reasoner", "tokenizer", "cpu_devices", "sharding")
# Keys and sections that decide what a checkpoint answers: of every use of it, and of its evaluation alone.
_USED_WITH = ("max_latents", "max_answer_tokens", "prompt", "thinker")
_EVALUATED_WITH = (
    "min_latents", "dropout", "gate.enabled", "evaluate.max_answer_tokens", "evaluate.dropout",
    "evaluate.temperature", "evaluate.top_k", "evaluate.top_p",
)  # fmt: skip
RULE = "rule"  # beside them: the threshold, or without a gate the number of latents


def config_of(identity: Identity, reasoner: str = "", tokenizer: str = "") -> ConfigDict:
    """The config to evaluate a checkpoint with.

    Of a run's checkpoint it has the run's settings (the stage's before the workdir's), of others the defaults; the gate
    is enabled where there is a trained one. A text reasoner has no gate, and thinks only where its run did.

    Args:
        reasoner: a name in `REASONERS`; "" is what the checkpoint itself says.
        tokenizer: see `slpo_jax.config`.
    Raises:
        UserError: a setting of the run can't be used.
    """
    config = default_config()
    config.update(stages=("evaluate",), init=identity.source, base=identity.base, tokenizer=tokenizer)
    if identity.lora_alpha is not None:
        config.lora_alpha = identity.lora_alpha
    of_a_run = _take_settings(config, identity)
    config.reasoner = reasoner or identity.reasoner or f"{PLAIN.name}_{identity.backbone}"
    kind = kind_of(config.reasoner)
    if not of_a_run:
        config.max_latents = kind.latents
        config.model.dtype = "float32"  # in which it gives the tokens of the program that wrote it
    config.gate.enabled = bool(config.gate.enabled and kind.has_gate and identity.gate_trained)
    config.min_latents = min(config.min_latents, max(config.max_latents, 1))
    config.gate.hidden = identity.gate
    return config


def stopping_of(config: ConfigDict, identity: Identity) -> tuple[Stopping, float | int]:
    """How rollouts of the checkpoint end: at the threshold or the number of latents chosen on validation.

    Args:
        config: of `config_of`.
    Returns:
        ("threshold", the run's or 0.5), or without a gate ("length", the run's, imitation's own number or T).
    """
    stopping: Stopping = "threshold" if config.gate.enabled else "length"
    rule = _rule(config, identity)
    return stopping, 0.5 if rule is None else rule


def _rule(config: ConfigDict, identity: Identity) -> float | int | None:
    """How its rollouts stop; None for a gate whose threshold was not chosen yet."""
    gated, stage, said = config.gate.enabled, identity.stage, _said(identity)
    rule = read_rule(stage, "threshold" if gated else "length") if stage else None
    if rule is None and said.get("gate.enabled") == gated:
        rule = said.get(RULE)
    if rule is not None or gated:
        return rule
    imitated = stage is not None and read_json(stage.facts, default={}).get("stage") == "imitate"
    return own_latents(config) if imitated else config.max_latents


def made_with(identity: Identity) -> dict[str, Any]:
    """What a checkpoint was made with, as far as it decides what it answers.

    Returns:
        values as they come back from JSON, by key of the config and `RULE`; {} where nothing is known.
    Raises:
        UserError: a setting of its run can't be used.
    """
    if not (_run_files(identity) or _said(identity)):
        return {}
    config = config_of(identity)
    known = config.thinker.name in THINKERS  # `make_thinker` says so otherwise
    thinker = thinker_of(config) if known else {"name": config.thinker.name}
    return _decisive(config.to_dict() | {"thinker": thinker}) | {RULE: _rule(config, identity)}


def made_like(config: ConfigDict, facts: Mapping[str, Any]) -> bool:
    """Whether a checkpoint, of these facts of its stage, is used as it was made."""
    now = flatten(plain(config.to_dict()))
    return all(now.get(key) == value for key, value in _decisive(facts).items() if _among(key, _USED_WITH))


def go_with(config: ConfigDict, identity: Identity | None, workdir: Workdir, given: Collection[str] = ()) -> list[str]:
    """Have a config that only evaluates take what its checkpoints were made with.

    Args:
        identity: of `config.init`.
        workdir: the checkpoints are those of its finished stages, or else `config.init`'s.
        given: keys that were set to what they are, even where that is the default.
    Returns:
        lines that say where the config differed, and differs.
    """
    trains, stages = set(config.stages) != {"evaluate"}, workdir.finished_stages()
    if stages and not trains:
        made, source = _agreed(workdir, stages), str(workdir)
    else:
        made, source = made_with(identity) if identity else {}, str(config.init)
    rule = made.pop(RULE, None)
    if trains:
        made = {key: value for key, value in made.items() if _among(key, _USED_WITH)}
    elif rule is not None:
        made |= {"evaluate.thresholds": [rule]} if made["gate.enabled"] else {"max_latents": rule}
    files = f"{source}: its stages' config.json"
    default, taken, others = flatten(plain(default_config().to_dict())), [], []
    for key, value in made.items():
        now = flatten(plain(config.to_dict())).get(key)
        if now == value or _has_no_use(config, key):
            continue
        if trains or key in given or now != default.get(key):
            others.append(f"config.{key}={_shown(now)} and not {_shown(value)}")
        else:
            _put(config, key, value, f"{files}: key ")
            taken.append(f"config.{key}={_shown(value)} and not {_shown(now)}")
    if taken:
        config.min_latents = min(config.min_latents, max(config.max_latents or 0, 1))
        _check(config, files)
    otherwise = {source: others}
    if "evaluate" in config.stages:
        otherwise.setdefault(str(workdir), []).extend(_other_thresholds(config, workdir, stages))
    said = [(source, "evaluated as it was made", taken)]
    said += [(where, "not used as it was made, but", texts) for where, texts in otherwise.items()]
    return [f"{where}: {how} with {', '.join(texts)}" for where, how, texts in said if texts]


def _other_thresholds(config: ConfigDict, workdir: Workdir, stages: list[str]) -> list[str]:
    """Where the only threshold, which is not to be chosen, is not the one of a stage's checkpoint."""
    now, found = list(config.evaluate.thresholds), {}
    if config.gate.enabled and len(now) == 1:
        found = {stage: read_rule(workdir.stage(stage), "threshold") for stage in stages}
    return [
        f"config.evaluate.thresholds={_shown(now)} and not {_shown([rule])} of {stage}"
        for stage, rule in found.items()
        if rule not in (None, *now)
    ]


def _agreed(workdir: Workdir, stages: list[str]) -> dict[str, Any]:
    """What all finished stages of a workdir that say so were made with; where they differ, a line says so."""
    found = [_decisive(read_json(workdir.stage(stage).facts, default={})) for stage in stages]
    values = {key: [each[key] for each in found if key in each] for each in found for key in each}
    agreed = {key: each[0] for key, each in values.items() if all(value == each[0] for value in each)}
    for key in values.keys() - agreed.keys():
        logging.warning("%s: its stages were made with several config.%s, so this config's is used", workdir, key)
    return agreed


def _decisive(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of a config's sections, what decides what a checkpoint answers, by key."""
    every = flatten(plain(facts))
    return {key: value for key, value in every.items() if _among(key, (*_USED_WITH, *_EVALUATED_WITH))}


def _among(key: str, keys: tuple[str, ...]) -> bool:
    """Whether a key is one of these or in one of these sections."""
    return any(f"{key}.".startswith(f"{each}.") for each in keys)


def _has_no_use(config: ConfigDict, key: str) -> bool:
    """Whether it is of another thinker, or of a gate where there is none."""
    section, _, rest = key.partition(".")
    if key == "evaluate.thresholds":
        return not config.gate.enabled
    return section == "thinker" and rest != "name" and rest.partition(".")[0] != config.thinker.name


def _shown(value: Any) -> str:
    return repr(tuple(value) if isinstance(value, list) else value)


def plain(tree: Any) -> Any:
    """Values as they come back from JSON."""
    return json.loads(ConfigDict({"it": tree}).to_json_best_effort())["it"]


def _run_files(identity: Identity) -> list[Path]:
    """What a run has written of its settings around a checkpoint: the workdir's, then the stage's."""
    run = (identity.workdir and identity.workdir.config, identity.stage and identity.stage.facts)
    return [file for file in run if file and file.is_file()]


def _said(identity: Identity) -> Mapping[str, Any]:
    """What an export or an import says that it was made with."""
    return identity.description.settings if identity.description else {}


def _take_settings(config: ConfigDict, identity: Identity) -> bool:
    """Write what the checkpoint was made with into `config`; False if nothing says that."""
    for file in _run_files(identity):
        facts = read_json(file, "mend the file")
        _update(config, {key: value for key, value in facts.items() if key not in _NOT_THE_CHECKPOINTS}, file)
        _check(config, str(file))
    said, where = _said(identity), f"{identity.source}: reasoner.json"
    for key, value in said.items():
        if key != RULE:
            _put(config, key, value, f"{where}: key ")
    if said:
        _check(config, where)
    rule, stopping = said.get(RULE), "threshold" if said.get("gate.enabled") else "length"
    if rule is not None and not is_rule(stopping, rule):
        raise UserError(f"{where}: key {RULE}: {rule!r} is not valid; give {RULES[stopping]}")
    return bool(_run_files(identity) or said)


def _check(config: ConfigDict, where: str) -> None:
    """Fail on values of a file that a config could not have.

    Args:
        where: the file, for the message.
    """
    read = config.copy_and_resolve_references()
    try:
        if read.thinker.name and read.thinker.name not in THINKERS:
            read.thinker.name = "latent"  # `make_thinker` says so
        if read.min_latents and read.max_latents is not None:
            read.min_latents = min(read.min_latents, max(read.max_latents, 1))  # as `config_of` does
        fill(Config, read)
    except UserError as error:
        raise UserError(f"{where}: key {str(error).removeprefix('config.')}; mend the file") from None
    except (AttributeError, TypeError):
        raise UserError(f"{where}: null in a section's place; mend the file") from None


def _put(config: ConfigDict, key: str, value: Any, where: str) -> None:
    try:
        config.update_from_flattened_dict({key: tuple(value) if isinstance(value, list) else value})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{where}{key}: can't be {value!r} ({reason}); mend the file") from None


def _update(node: ConfigDict, facts: dict[str, Any], file: Path) -> None:
    for key, value in facts.items():
        if isinstance(node.get(key), ConfigDict) and isinstance(value, dict):
            _update(node[key], value, file)
        elif key in node or not node.is_locked:
            try:
                node[key] = tuple(value) if isinstance(value, list) else value
            except TypeError as error:
                raise UserError(f"{file}: key {key}: {' '.join(str(error).split())}; mend the file") from None

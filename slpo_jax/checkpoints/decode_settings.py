"""The config that goes with a checkpoint, found out from the checkpoint: no config file is needed to use one.

What decides what it answers (the settings that affect rollouts, see `slpo_jax.settings`) is also taken into a
config
that only evaluates: what was set there, on the command line or away from the default, goes before what the checkpoint
was made with, and that before the default. Where a config and its checkpoint differ, a line says so.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from slpo_jax.architectures import Architecture, architecture_of
from slpo_jax.checkpoints.identity import Identity, Ours
from slpo_jax.config.config import Config, own_latents, read_config
from slpo_jax.config.sections import changed, values
from slpo_jax.errors import UserError
from slpo_jax.evaluation.report_rows import RULES, is_rule, read_rule
from slpo_jax.io.files import as_json, flatten, read_json
from slpo_jax.io.workdir import Workdir
from slpo_jax.policy.policy import Stopping
from slpo_jax.policy.scorers import SCORERS

_GATED_LATENTS = 12  # at most, of a published gate; as in the paper
UNCHOSEN = 0.5  # the threshold, until one is chosen
RULE = "rule"  # beside the settings: the threshold, or without a gate the number of latents


def config_of(identity: Identity, reasoner: str = "", tokenizer: str = "") -> Config:
    """The config to evaluate a checkpoint with.

    Of a run's checkpoint it has the run's settings (the stage's before the workdir's), of others the defaults; the gate
    is enabled where there is a trained one. A text reasoner has no gate, and thinks only where its run did.

    Args:
        reasoner: a name in `REASONERS`; "" is what the checkpoint itself says.
        tokenizer: see `slpo_jax.config`.
    Raises:
        UserError: a setting of the run can't be used.
    """
    made, of_a_run = _as_its_run(identity)
    own: dict[str, Any] = {"reasoner": reasoner or identity.reasoner}
    own |= {"stages": ("evaluate",), "init": identity.source, "base": identity.base, "tokenizer": tokenizer}
    own |= {"lora_alpha": identity.lora_alpha, "sharding": Config.sharding, "gate.hidden": identity.gate_hidden or 0}
    architecture = architecture_of(own["reasoner"])
    if not of_a_run:
        own |= {"max_latents": architecture.latents, **_published(identity, architecture)}
    if not of_a_run or (identity.description and identity.description.source and not _run_files(identity)):
        own["model.dtype"] = "float32"  # in which it gives the tokens of the program that wrote it
    # A reward model is the run's, and isn't loaded with the reasoner.
    own |= {"evaluate.scorers": tuple(x for x in made.evaluate.scorers if x not in SCORERS or not SCORERS[x].part)}
    own["evaluate.beams"] = 0
    own["gate.enabled"] = bool(made.gate.enabled and architecture.has_gate and identity.gate_trained)
    return thinking_with(made, own)


def thinking_with(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values of some keys, and no more latents at least than there are at most."""
    most = changes.get("max_latents", config.max_latents)
    least = min(config.min_latents, max(most, 1)) if isinstance(most, int) else config.min_latents
    return changed(config, {"min_latents": least, **changes})


def stopping_of(config: Config, identity: Identity) -> tuple[Stopping, float | int | None]:
    """Find how rollouts of the checkpoint end: at the threshold or the number of latents chosen on validation.

    Args:
        config: of `config_of`.
    Returns:
        ("threshold", the run's, None where none was chosen yet), or without a gate ("length", the run's, imitation's
        own number or T).
    """
    gated, stage, said = config.gate.enabled, identity.stage, _said(identity)
    stopping: Stopping = "threshold" if gated else "length"
    rule = read_rule(stage, stopping) if stage else None
    if rule is None and said.get("gate.enabled") == gated:
        rule = said.get(RULE)
    if rule is None and gated:
        rule = identity.threshold
    elif rule is None:
        imitated = stage is not None and stage.said().get("stage") == "imitate"
        rule = own_latents(config) if imitated else config.max_latents
    return stopping, rule


def made_with(identity: Identity) -> dict[str, Any]:
    """Find what a checkpoint was made with, as far as it decides what it answers.

    Returns:
        values as they come back from JSON, by key of the config and `RULE`; {} where nothing is known.
    Raises:
        UserError: a setting of its run can't be used.
    """
    config = config_of(identity)
    return known_of(identity, config, stopping_of(config, identity)[1])


def known_of(identity: Identity, config: Config, rule: float | int | None) -> dict[str, Any]:
    """Tell `made_with` of the config of `config_of` and the rule of `stopping_of`."""
    if _run_files(identity) or _said(identity):
        return used_with(config, rule)
    published = _published(identity, architecture_of(identity.reasoner))
    own = {"gate.enabled": config.gate.enabled, "max_latents": config.max_latents, RULE: rule}
    return published | own if published else {}


def _published(identity: Identity, architecture: type[Architecture]) -> dict[str, Any]:
    """How the program of a foreign checkpoint thinks, by key of the config, where that is not the default."""
    if isinstance(identity, Ours):
        return {}
    latents = identity.tensors.decoder.latents if identity.tensors.decoder else 0
    if identity.tensors.gate and not identity.description and architecture.has_gate:
        latents = _GATED_LATENTS
    return ({"max_latents": latents} if latents else {}) | architecture.published_settings(identity.tensors)


def used_with(config: Config, rule: float | int | None) -> dict[str, Any]:
    """What decides what a reasoner answers, as `made_with` has it of a checkpoint.

    Args:
        config: that it is used with.
        rule: how its rollouts stop.
    """
    return _decisive(config) | {"gate.enabled": config.gate.enabled, RULE: rule}


def made_like(config: Config, facts: Mapping[str, Any]) -> bool:
    """Whether a checkpoint, of these facts of its stage, is used as it was made."""
    then = flatten(facts)
    return all(then.get(key, value) == value for key, value in _decisive(config).items())


def go_with(
    config: Config, identity: Identity | None, workdir: Workdir, given: Collection[str] = ()
) -> tuple[Config, list[str]]:
    """Have a config that only evaluates take what its checkpoints were made with.

    Args:
        identity: of `config.init`.
        workdir: the checkpoints are those of its finished stages, or else `config.init`'s.
        given: keys that were set to what they are, even where that is the default.
    Returns:
        the config, and lines that say where it differed, and differs.
    """
    trains, stages = set(config.stages) != {"evaluate"}, workdir.finished_stages()
    if stages and not trains:
        made, source = _agreed(workdir, stages), str(workdir)
    else:
        made, source = made_with(identity) if identity else {}, config.init
    rule = made.pop(RULE, None)
    if trains:  # what an evaluation is made with is not asked for yet, and the gate may be trained
        made = {key: value for key, value in made.items() if not key.startswith(("evaluate.", "gate."))}
    elif rule is not None:
        made |= {"evaluate.thresholds": [rule]} if made["gate.enabled"] else {"max_latents": rule}
    now, default = (flatten(as_json(values(each))) for each in (config, Config()))
    taken: dict[str, Any] = {}
    others: list[str] = []
    for key, value in made.items():
        if value == now[key] or _has_no_use(key, now | taken):
            continue
        if trains or key in given or now[key] != default[key]:
            others.append(f"config.{key}={_shown(now[key])} and not {_shown(value)}")
        else:
            taken[key] = value
    if taken:
        config = thinking_with(config, taken)
    texts = [f"config.{key}={_shown(value)} and not {_shown(now[key])}" for key, value in taken.items()]
    said = (("evaluated as it was made", texts), ("not used as it was made, but", others))
    return config, [f"{source}: {how} with {', '.join(texts)}" for how, texts in said if texts]


def _agreed(workdir: Workdir, stages: list[str]) -> dict[str, Any]:
    """What all finished stages of a workdir that say so were made with; where they differ, a line says so."""
    found = []
    for stage in stages:
        path, facts = workdir.stage(stage).facts, workdir.stage(stage).said()
        decisive, said = _decisive(_with(Config(), facts, str(path))), flatten(facts)
        found.append({key: value for key, value in decisive.items() if key in said})
    every = {key: [each[key] for each in found if key in each] for each in found for key in each}
    agreed = {key: each[0] for key, each in every.items() if all(value == each[0] for value in each)}
    for key in every.keys() - agreed.keys():
        logging.warning("%s: its stages were made with several config.%s, so this config's is used", workdir, key)
    return agreed


def _decisive(config: Config) -> dict[str, Any]:
    """What decides what a checkpoint answers, by key."""
    return flatten(as_json(values(config, ("rollouts",))))


def _has_no_use(key: str, now: Mapping[str, Any]) -> bool:
    """Whether it is of another latent policy, or of a gate where there is none."""
    section, _, rest = key.partition(".")
    if key == "evaluate.thresholds":
        return not now["gate.enabled"]
    return section == "latent_policy" and rest != "name" and rest.partition(".")[0] != now["latent_policy.name"]


def _shown(value: Any) -> str:
    return repr(tuple(value) if isinstance(value, list) else value)


def _run_files(identity: Identity) -> list[Path]:
    """What a run has written of its settings around a checkpoint: the workdir's, then the stage's."""
    stage = identity.stage
    run = (stage and stage.workdir and stage.workdir.config, stage and stage.facts)
    return [file for file in run if file and file.is_file()]


def _said(identity: Identity) -> Mapping[str, Any]:
    """What an export or an import says that it was made with."""
    return identity.description.settings if identity.description else {}


def _as_its_run(identity: Identity) -> tuple[Config, bool]:
    """The config that a checkpoint was made with, and whether anything says that; else the default."""
    config, said = Config(), dict(_said(identity))
    files = _run_files(identity)
    for file in files:
        config = _with(config, read_json(file, "mend the file"), str(file))
    where, rule = f"{identity.source}: reasoner.json", said.pop(RULE, None)
    stopping = "threshold" if said.get("gate.enabled") else "length"
    if rule is not None and not is_rule(stopping, rule):
        raise UserError(f"{where}: key {RULE}: {rule!r} is not valid; give {RULES[stopping]}")
    if said:
        with _read_from(where):
            config = thinking_with(config, said)
    return config, bool(files or said)


def _with(config: Config, facts: Mapping[str, Any], where: str) -> Config:
    """The config with the keys of it that a file has."""

    def put(node: dict[str, Any], found: Mapping[str, Any]) -> None:
        for key, value in found.items():
            if key in node and node[key] and isinstance(node[key], dict) and isinstance(value, Mapping):
                put(node[key], value)
            elif key in node:
                node[key] = value

    tree = values(config)
    # Rewards are no part of a checkpoint.
    put(tree, {key: value for key, value in facts.items() if key not in ("reward", "rewards")})
    with _read_from(where):
        return read_config(tree)


@contextlib.contextmanager
def _read_from(where: str) -> Iterator[None]:
    """Fail on values that a config could not have with the file that they are from."""
    try:
        yield
    except UserError as error:
        said = ": ".join(filter(None, (error.key.removeprefix("config."), error.problem)))
        raise UserError(f"{where}: key {said}; register it (a command's --register), or mend the file") from None

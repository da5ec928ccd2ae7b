"""The config that goes with a checkpoint, found out from the checkpoint: no config file is needed to use one.

It is merged of layers, each over those before it: the defaults; what the program of a foreign checkpoint thinks with,
or else the workdir's config.json, the stage's own, and what an export says; what using it asks for.

What decides what it answers (the settings that affect rollouts, see `slpo_jax.settings`) is also a layer of a config
that only evaluates: under what was set there, on the command line or away from the default, and over the default. Where
a config and its checkpoint differ, a line says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from slpo_jax.architectures import Architecture, architecture_of
from slpo_jax.checkpoints.identity import Identity, Ours
from slpo_jax.config.config import Config, own_latents
from slpo_jax.config.overrides import changed, values
from slpo_jax.errors import UserError
from slpo_jax.evaluation.report_rows import RULES, is_rule, read_rule
from slpo_jax.io.files import as_json, flatten, read_json
from slpo_jax.io.workdir import Workdir
from slpo_jax.policy.policy import Stopping
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.rewards.reward import REWARDS

_GATED_LATENTS = 12  # at most, of a published gate; as in the paper
UNCHOSEN = 0.5  # the threshold, until one is chosen
RULE = "rule"  # beside the settings: the threshold, or without a gate the number of latents


def config_of(identity: Identity, reasoner: str = "", tokenizer: str = "") -> Config:
    """Return the config to evaluate a checkpoint with.

    Of a run's checkpoint it has the run's settings (the stage's before the workdir's), of others the defaults; the gate
    is enabled where there is a trained one. A text reasoner has no gate, and thinks only where its run did.

    Args:
        reasoner: a name in `REASONERS`; "" is what the checkpoint itself says.
        tokenizer: see `slpo_jax.config`.
    Raises:
        UserError: a setting of the run can't be used.
    """
    reasoner = reasoner or identity.reasoner
    config, layers, architecture = Config(), _layers(identity), architecture_of(reasoner)
    for where, layer in layers.items():
        config = laid_over(config, layer, where)
    if not layers:
        config = laid_over(config, {"max_latents": architecture.latents, **_published(identity, architecture)})
    use = {
        "reasoner": reasoner, "stages": ("evaluate",), "init": identity.source, "base": identity.base,
        "tokenizer": tokenizer, "lora_alpha": identity.lora_alpha, "sharding": Config.sharding,
        "gate.hidden": identity.gate_hidden or 0,
        "gate.enabled": bool(config.gate.enabled and architecture.has_gate and identity.gate_trained),
        # A reward model is the run's, and isn't loaded with the reasoner.
        "evaluate.scorers": tuple(x for x in config.evaluate.scorers if x not in SCORERS or not SCORERS[x].part),
        "evaluate.beams": 0,
    }  # fmt: skip
    if not layers or (identity.description and identity.description.source and not identity.run_files):
        use["model.dtype"] = "float32"  # in which it gives the tokens of the program that wrote it
    return changed(config, use)


def laid_over(config: Config, layer: Mapping[str, Any], where: str = "") -> Config:
    """Return the config with other values of some keys, and no more latents at least than there are at most.

    Args:
        where: what says so, which an error of a value that it could not have begins with.
    """
    most = layer.get("max_latents", config.max_latents)
    least = min(config.min_latents, max(most, 1)) if isinstance(most, int) else config.min_latents
    try:
        return changed(config, {"min_latents": least, **layer})
    except UserError as error:
        if not where:
            raise
        problem = ": ".join(filter(None, (error.key.removeprefix("config."), error.problem)))
        raise UserError(f"{where}: key {problem}; register it (a command's --register), or mend the file") from None


def stopping_of(config: Config, identity: Identity) -> tuple[Stopping, float | int | None]:
    """Find how rollouts of the checkpoint end: at the threshold or the number of latents chosen on validation.

    Args:
        config: of `config_of`.
    Returns:
        ("threshold", the run's, None where none was chosen yet), or without a gate ("length", the run's, imitation's
        own number or T).
    """
    has_gate, stage = config.gate.enabled, identity.stage_folder
    settings = identity.description.settings if identity.description else {}
    stopping: Stopping = "threshold" if has_gate else "length"
    rule = read_rule(stage, stopping) if stage else None
    if rule is None and settings.get("gate.enabled") == has_gate:
        rule = settings.get(RULE)
    if rule is None and has_gate:
        rule = identity.threshold
    elif rule is None:
        imitated = stage is not None and stage.read_facts().get("stage") == "imitate"
        rule = own_latents(config) if imitated else config.max_latents
    return stopping, rule


def original_settings(identity: Identity, config: Config | None = None) -> dict[str, Any]:
    """Find what a checkpoint was made with, as far as it decides what it answers.

    Args:
        config: of `config_of`, where that was asked for already.
    Returns:
        values as they come back from JSON, by key of the config and `RULE`; {} where nothing is known.
    Raises:
        UserError: a setting of its run can't be used.
    """
    config = config or config_of(identity)
    rule = stopping_of(config, identity)[1]
    if identity.run_files or (identity.description and identity.description.settings):
        return decode_settings(config, rule) | stated_rewards(identity, config)
    published = _published(identity, architecture_of(identity.reasoner))
    settings = {"gate.enabled": config.gate.enabled, "max_latents": config.max_latents, RULE: rule}
    return published | settings if published else {}


def _published(identity: Identity, architecture: type[Architecture]) -> dict[str, Any]:
    """Tell how the program of a foreign checkpoint thinks, by key of the config, where that is not the default."""
    if isinstance(identity, Ours):
        return {}
    latents = identity.tensors.decoder.latents if identity.tensors.decoder else 0
    if identity.tensors.gate and not identity.description and architecture.has_gate:
        latents = _GATED_LATENTS
    published = architecture.published_settings(identity.tensors, identity.model)
    return ({"max_latents": latents} if latents else {}) | published


def decode_settings(config: Config, rule: float | int | None) -> dict[str, Any]:
    """Tell what decides what a reasoner answers, as `original_settings` has it of a checkpoint.

    Args:
        config: that it is used with.
        rule: how its rollouts stop.
    """
    return _decisive(config) | {"gate.enabled": config.gate.enabled, RULE: rule}


def is_as_trained(config: Config, facts: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint, of these facts of its stage, is used as it was made."""
    then = flatten(facts)
    return all(then.get(key, value) == value for key, value in _decisive(config).items())


def adopt_original(config: Config, identity: Identity | None, workdir: Workdir) -> tuple[Config, list[str]]:
    """Have a config that only evaluates take what its checkpoints were made with.

    Args:
        identity: of `config.init`.
        workdir: the checkpoints are those of its finished stages, or else `config.init`'s.
    Returns:
        the config, and lines that say where it differed, and differs.
    """
    trains, stages = set(config.stages) != {"evaluate"}, workdir.finished_stages()
    if stages and not trains:
        settings, source = _agreed(workdir, stages), str(workdir)
    else:
        settings, source = original_settings(identity) if identity else {}, config.init
    rule, _ = settings.pop(RULE, None), settings.pop("rewards", None)
    if trains:  # what an evaluation is made with is not asked for yet, and the gate may be trained
        settings = {key: value for key, value in settings.items() if not key.startswith(("evaluate.", "gate."))}
    elif rule is not None:
        settings |= {"evaluate.thresholds": [rule]} if settings["gate.enabled"] else {"max_latents": rule}
    now, default = (flatten(as_json(values(settings))) for settings in (config, Config()))
    adopted, overrides = dict[str, Any](), dict[str, Any]()
    for key, value in settings.items():
        if value != now[key] and not _has_no_use(key, now | adopted):
            is_set = trains or key in config.set_by or now[key] != default[key]
            (overrides if is_set else adopted)[key] = value
    in_effect, lines = now | adopted, list[str]()
    for line, keys in (("evaluated as it was made", adopted), ("not used as it was made, but", overrides)):
        texts = [f"config.{key}={_shown(in_effect[key])} and not {_shown((now | overrides)[key])}" for key in keys]
        lines += [f"{source}: {line} with {', '.join(texts)}"] * bool(keys)
    return laid_over(config, adopted), lines


def _agreed(workdir: Workdir, stages: list[str]) -> dict[str, Any]:
    """Tell what all finished stages of a workdir that say so were made with; where they differ, a line says so."""
    values_of: dict[str, list[Any]] = {}
    for folder in map(workdir.stage_folder, stages):
        facts = folder.read_facts()
        decisive = _decisive(laid_over(Config(), _known_settings(facts), str(folder.facts)))
        for key in [key for key in decisive if key in flatten(facts)]:
            values_of.setdefault(key, []).append(decisive[key])
    agreed = {key: stated[0] for key, stated in values_of.items() if all(value == stated[0] for value in stated)}
    for key in values_of.keys() - agreed.keys():
        logging.warning("%s: its stages were made with several config.%s, so this config's is used", workdir, key)
    return agreed


def _decisive(config: Config) -> dict[str, Any]:
    """Return what decides what a checkpoint answers, by key."""
    return flatten(as_json(values(config, ("rollouts",))))


def _has_no_use(key: str, now: Mapping[str, Any]) -> bool:
    """Tell whether a key is of another latent policy, or of a gate where there is none."""
    section, _, rest = key.partition(".")
    if key == "evaluate.thresholds":
        return not now["gate.enabled"]
    return section == "latent_policy" and rest != "name" and rest.partition(".")[0] != now["latent_policy.name"]


def _shown(value: Any) -> str:
    return repr(tuple(value) if isinstance(value, list) else value)


def _layers(identity: Identity) -> dict[str, dict[str, Any]]:
    """Return what a checkpoint was made with, by what says so: the workdir, the stage, and an export or import."""
    files, export, lacking = _run_facts(identity), _export_facts(identity), set[str]()
    where = f"{identity.source}: reasoner.json"
    layers = {file: _known_settings(facts) for file, facts in files.items()}
    settings = {key: value for key, value in export.items() if key not in (RULE, "rewards")}
    if settings:
        layers[where] = settings
    for file in layers:
        rewards = _rewards(files.get(file, export))
        unknown = {name for name, _ in rewards} - {*REWARDS}
        layers[file] |= {"rewards": rewards} if rewards and not unknown else {}
        lacking |= unknown
    if lacking:
        logging.warning(
            "%s: its reward %s is not registered here, so that answers are judged by the data's own; give its file "
            "(a command's --register)", identity.source, ", ".join(sorted(lacking)),
        )  # fmt: skip
    rule, stopping = export.get(RULE), "threshold" if settings.get("gate.enabled") else "length"
    if rule is not None and not is_rule(stopping, rule):
        raise UserError(f"{where}: key {RULE}: {rule!r} is not valid; give {RULES[stopping]}")
    return layers


def stated_rewards(identity: Identity, config: Config) -> dict[str, Any]:
    """Return, as a setting of an export, the rewards that a checkpoint's run names, also those not registered here.

    Args:
        config: of `config_of`, which has them where the run names none.
    """
    facts = _export_facts(identity), *reversed(_run_facts(identity).values())
    return {"rewards": next(filter(None, map(_rewards, facts)), config.weighted)}


def _run_facts(identity: Identity) -> dict[str, Mapping[str, Any]]:
    """Read what the run around a checkpoint says of its settings, by file: the workdir's, then the stage's."""
    return {str(file): read_json(file, "mend the file") for file in identity.run_files}


def _export_facts(identity: Identity) -> Mapping[str, Any]:
    """Return what an export or import says of the settings that it was made with."""
    return identity.description.settings if identity.description else {}


def _rewards(facts: Mapping[str, Any]) -> Sequence[tuple[str, float]]:
    """List the rewards that a run names, with their weights."""
    return facts.get("rewards") or ([(facts["reward"], 1.0)] if facts.get("reward") else [])


def _known_settings(facts: Mapping[str, Any], tree: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of a run that a config still has, without rewards, which may not be registered."""
    if tree is None:
        tree = {key: value for key, value in values(Config()).items() if key not in ("reward", "rewards")}
    settings = {key: value for key, value in facts.items() if key in tree}
    sections = [key for key, value in settings.items() if isinstance(value, Mapping) and isinstance(tree[key], dict)]
    return settings | {key: _known_settings(settings[key], tree[key]) for key in sections if tree[key]}

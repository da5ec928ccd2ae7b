"""The config that a checkpoint is used with: it lies beside the parameters, so no config file is needed.

A stage of a run and `slpo import` write it whole, as `config.json`; an export has it in `reasoner.json`. What another
program's checkpoint means is written here in the same form, by `published_config`.
"""

from collections.abc import Mapping
from typing import Any

from absl import logging

from slpo_jax.architectures import Architecture, architecture_of
from slpo_jax.checkpoints.foreign import Foreign
from slpo_jax.checkpoints.identity import Identity
from slpo_jax.config.config import Config, own_latents
from slpo_jax.config.keys import rollout_settings
from slpo_jax.config.overrides import changed, values
from slpo_jax.errors import UserError
from slpo_jax.evaluation.report_rows import RULES, is_rule, read_rule
from slpo_jax.io.files import as_json
from slpo_jax.policy.policy import Stopping
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.rewards.reward import REWARDS
from slpo_jax.stages import EVALUATE, IMITATE

_GATED_LATENTS = 12  # at most, of a published gate; as in the paper
UNCHOSEN = 0.5  # the threshold, until one is chosen
# Keys of a config that name places or suit the machine of the run.
_OF_THE_RUN: dict[str, Any] = {
    "init": "", "base": "", "tokenizer": "", "data.train": "", "data.demos": "", "data.valid": "", "data.eval": {},
    "evaluate.datasets": None, "evaluate.reward_model": "", "model.remat": False, "model.scan_layers": None,
}  # fmt: skip


def config_of(identity: Identity, reasoner: str = "", tokenizer: str = "") -> Config:
    """Return the config to use a checkpoint with: its own, whose weights begin at the checkpoint.

    Args:
        reasoner: a name in `REASONERS`; "" is what the checkpoint itself says.
        tokenizer: see `slpo_jax.config`.
    Raises:
        UserError: its config is not whole, or a value can't be used.
    """
    reasoner = reasoner or identity.reasoner
    if isinstance(identity, Foreign) and not identity.description:
        config = published_config(identity, architecture_of(reasoner))
    else:
        config = read_config_of(identity)
    # A reward model is the run's, and isn't loaded with the reasoner.
    scorers = [name for name in config.evaluate.scorers if name not in SCORERS or not SCORERS[name].part]
    use = {
        "reasoner": reasoner, "stages": (EVALUATE,), "init": identity.source, "base": identity.base,
        "tokenizer": tokenizer, "lora_alpha": identity.lora_alpha, "sharding": Config.sharding,
        "evaluate.scorers": tuple(scorers), "evaluate.beams": 0,
    }  # fmt: skip
    return changed(config, use)


def read_config_of(identity: Identity) -> Config:
    """Read the config that was written with a checkpoint.

    What was registered in its run and isn't here is left out; so is a reward, with a warning.

    Raises:
        UserError: it is not whole, as one of another version, or a value can't be used.
    """
    saved, where, default = identity.config, identity.config_place, values(Config())
    missing = [key for key in default if key not in saved]
    if missing:
        raise UserError(
            f"{where}: key {missing[0]}: is missing, as in what other versions of slpo_jax wrote; train or convert it "
            "again, or use that version"
        )
    layer = _without_unknown(saved, default)
    unknown = _unknown_rewards(saved)
    if unknown:
        layer |= {"reward": "", "rewards": ()}
        logging.warning(
            "%s: its reward %s is not registered here, so that answers are judged by the data's own; give its file "
            "(a command's --register)", identity.source, ", ".join(unknown),
        )  # fmt: skip
    try:
        return changed(Config(), layer)
    except UserError as error:
        problem = ": ".join(filter(None, (error.key.removeprefix("config."), error.problem)))
        raise UserError(f"{where}: key {problem}; register it (a command's --register), or mend the file") from None


def _unknown_rewards(saved: Mapping[str, Any]) -> list[str]:
    """List the rewards of a saved config that are not registered here."""
    names = [name for name, _ in saved["rewards"]]
    if saved["reward"]:
        names.append(saved["reward"])
    return sorted({*names} - {*REWARDS})


def _without_unknown(saved: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the keys that no config has here, such as the section of a recipe that is not registered."""
    known = dict[str, Any]()
    for key, value in saved.items():
        if key not in tree:
            continue
        is_section = isinstance(value, Mapping) and isinstance(tree[key], dict) and tree[key]
        known[key] = _without_unknown(value, tree[key]) if is_section else value
    return known


def published_settings(identity: Foreign, architecture: type[Architecture]) -> dict[str, Any]:
    """Tell how the program of another project's checkpoint thinks, by key of the config, as far as its files say."""
    latents = identity.tensors.decoder.latents if identity.tensors.decoder else 0
    if identity.tensors.gate and architecture.has_gate:
        latents = _GATED_LATENTS
    settings = architecture.published_settings(identity.tensors, identity.model)
    if not latents and not settings:
        return {}
    return {"max_latents": latents or architecture.latents, **settings}


def published_config(identity: Foreign, architecture: type[Architecture]) -> Config:
    """Write what another project's checkpoint means as a config: how it thinks, its gate, and its program's type."""
    settings = {
        "max_latents": architecture.latents,
        "gate.hidden": identity.gate_hidden or 0,
        "gate.enabled": architecture.has_gate and identity.gate_trained,
        "model.dtype": "float32",  # in which it gives the tokens of the program that wrote it
    }
    return with_overrides(Config(), settings | published_settings(identity, architecture))


def with_overrides(config: Config, layer: Mapping[str, Any]) -> Config:
    """Return the config with other values of some keys, and no more latents at least than there are at most."""
    most = layer.get("max_latents", config.max_latents)
    least = min(config.min_latents, max(most, 1)) if isinstance(most, int) else config.min_latents
    return changed(config, {"min_latents": least, **layer})


def config_to_keep(config: Config, identity: Identity | None) -> dict[str, Any]:
    """Return a config as it is written beside converted parameters: without the places and the machine of a run.

    Args:
        config: of `config_of`, with what was laid over it.
        identity: of the checkpoint, whose reward stays, also where it isn't registered here.
    """
    kept: dict[str, Any] = as_json(values(changed(config, _OF_THE_RUN)))
    rewards = [list(pair) for pair in config.weighted]
    stated = {"reward": "", "rewards": rewards}
    if identity and identity.config and _unknown_rewards(identity.config):
        stated = {key: identity.config[key] for key in stated}
    return kept | stated


def stopping_of(config: Config, identity: Identity) -> tuple[Stopping, float | int | None]:
    """Find how rollouts of the checkpoint end: at the threshold or the number of latents chosen on validation.

    Args:
        config: of `config_of`.
    Returns:
        ("threshold", the run's, None where none was chosen yet), or without a gate ("length", the run's, imitation's
        own number or T).
    Raises:
        UserError: the rule that an export says can't be one.
    """
    stopping: Stopping = "threshold" if config.gate.enabled else "length"
    stage, description = identity.stage_folder, identity.description
    rule = read_rule(stage, stopping) if stage else None
    if rule is None and description:
        rule = description.rule
        if rule is not None and not is_rule(stopping, rule):
            raise UserError(f"{identity.config_place}: key rule: {rule!r} is not valid; give {RULES[stopping]}")
    if rule is None and config.gate.enabled:
        rule = identity.threshold
    elif rule is None:
        imitated = IMITATE in identity.config.get("stages", ())
        rule = own_latents(config) if imitated else config.max_latents
    return stopping, rule


def stated_settings(identity: Identity, own: Config) -> dict[str, Any]:
    """Return what decides what a checkpoint answers, as far as it says, by dotted key; {} where nothing is known.

    Args:
        own: of `config_of`.
    """
    if isinstance(identity, Foreign) and not identity.description:
        return published_settings(identity, architecture_of(identity.reasoner))
    return rollout_settings(own)


def differences(config: Config, identity: Identity) -> str:
    """Say where a config uses a checkpoint in another way than it was made for; "" where it doesn't.

    Of a config that trains it further nothing is said of evaluations, whose turn has not come.
    """
    own, now = config_of(identity), rollout_settings(config)
    stated = stated_settings(identity, own)
    if {*config.stages} != {EVALUATE}:
        stated = {key: value for key, value in stated.items() if not key.startswith("evaluate.")}
    elif stated:
        _, rule = stopping_of(own, identity)
        if not own.gate.enabled:
            stated["max_latents"] = rule
        elif config.gate.enabled and rule is not None:
            stated["evaluate.thresholds"] = [rule]
            now["evaluate.thresholds"] = list(config.evaluate.thresholds)
    return say_differences(identity.source, now, stated)


def say_differences(source: str, now: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """Say which settings that both have differ, and how; "" where none does.

    Args:
        source: what was made so.
        now: values by dotted key, as they come back from JSON.
        made: the same of what the source was made with.
    """
    others = [key for key in made if key in now and now[key] != made[key]]
    texts = [f"config.{key}={_shown(now[key])} and not {_shown(made[key])}" for key in others]
    return f"{source}: not used as it was made, but with {', '.join(texts)}" if texts else ""


def _shown(value: Any) -> str:
    return repr(tuple(value) if isinstance(value, list) else value)

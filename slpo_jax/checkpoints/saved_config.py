"""Read the config that a checkpoint is used with. It lies beside the parameters, so no config file is needed.

A stage of a run and `slpo import` write it whole, as `config.json`; an export has it in `reasoner.json`. For another
program's checkpoint `published_config` makes a config of the same form.
"""

from collections.abc import Mapping
from typing import Any

from absl import logging

from slpo_jax.architectures import Architecture, architecture_of
from slpo_jax.checkpoints.external import ExternalCheckpoint
from slpo_jax.checkpoints.identity import Identity
from slpo_jax.config.config import Config, own_latents
from slpo_jax.config.keys import rollout_settings
from slpo_jax.config.overrides import merge_settings, values
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
        reasoner: a name in `REASONERS`; "" is the checkpoint's own.
        tokenizer: see `slpo_jax.config`.
    Raises:
        UserError: its config is not whole, or a value can't be used.
    """
    reasoner = reasoner or identity.reasoner
    if isinstance(identity, ExternalCheckpoint) and not identity.description:
        config = published_config(identity, architecture_of(reasoner))
    else:
        config = read_config_of(identity)
    # A reward model belongs to the run, and isn't loaded with the reasoner.
    models = {name for name, scorer in SCORERS.items() if scorer.part}
    scorers = [name for name in config.evaluate.scorers if name not in models]
    use = {
        "reasoner": reasoner, "stages": (EVALUATE,), "init": identity.source, "base": identity.base,
        "tokenizer": tokenizer, "lora_alpha": identity.lora_alpha, "sharding": Config.sharding,
        "evaluate.scorers": tuple(scorers), "evaluate.beams": 0,
    }  # fmt: skip
    return merge_settings(config, use)


def read_config_of(identity: Identity) -> Config:
    """Read the config that was written with a checkpoint.

    What was registered in its run and isn't here is left out; so is a reward, with a warning.

    Raises:
        UserError: it is not whole, as one of another version, or a value can't be used.
    """
    saved = identity.config
    where = identity.config_place
    default = values(Config())

    # A config of another version lacks keys.
    missing = [key for key in default if key not in saved]
    if missing:
        raise UserError(
            f"{where}: key {missing[0]}: is missing, as in what other versions of slpo_jax wrote; train or convert it "
            "again, or use that version"
        )

    # Rewards that aren't registered here can't be used.
    layer = _without_unknown(saved, default)
    unknown = _unknown_rewards(saved)
    if unknown:
        layer |= {"reward": "", "rewards": ()}
        logging.warning(
            "%s: its reward %s is not registered here, so that answers are judged by the data's own; give its file "
            "(a command's --register)", identity.source, ", ".join(unknown),
        )  # fmt: skip
    try:
        return merge_settings(Config(), layer)
    except UserError as error:
        key = error.key.removeprefix("config.")
        problem = f"{key}: {error.problem}" if key else error.problem
        raise UserError(
            f"{where}: key {problem}; register it (a command's --register), or mend the file"
        ) from None


def _unknown_rewards(saved: Mapping[str, Any]) -> list[str]:
    """List the rewards of a saved config that are not registered here."""
    names = [name for name, _ in saved["rewards"]]
    if saved["reward"]:
        names.append(saved["reward"])
    return sorted({*names} - {*REWARDS})


def _without_unknown(
    saved: Mapping[str, Any], tree: Mapping[str, Any]
) -> dict[str, Any]:
    """Leave out the keys that no config has here, such as the section of a recipe that is not registered."""
    known = dict[str, Any]()
    for key, value in saved.items():
        if key not in tree:
            continue
        known[key] = value
        # A dict that is empty by default is a value, not a section.
        is_section = isinstance(tree[key], dict) and tree[key]
        if is_section and isinstance(value, Mapping):
            known[key] = _without_unknown(value, tree[key])
    return known


def published_settings(
    identity: ExternalCheckpoint, architecture: type[Architecture]
) -> dict[str, Any]:
    """Read the settings of another program's thoughts from its checkpoint's files, by key of the config."""
    latents = identity.tensors.decoder.latents if identity.tensors.decoder else 0
    if identity.tensors.gate and architecture.has_gate:
        latents = _GATED_LATENTS
    settings = architecture.published_settings(identity.tensors, identity.model)
    if not latents and not settings:
        return {}
    return {"max_latents": latents or architecture.latents, **settings}


def published_config(
    identity: ExternalCheckpoint, architecture: type[Architecture]
) -> Config:
    """Make a config that uses another program's checkpoint as that program does: its thoughts, gate and precision."""
    settings = {
        "max_latents": architecture.latents,
        "gate.hidden": identity.gate_hidden or 0,
        "gate.enabled": architecture.has_gate and identity.gate_trained,
        "model.dtype": "float32",  # in which it gives the tokens of the program that wrote it
    }
    settings |= published_settings(identity, architecture)
    return with_overrides(Config(), settings)


def with_overrides(config: Config, layer: Mapping[str, Any]) -> Config:
    """Return the config with other values of some keys; `min_latents` is lowered to a lower `max_latents`."""
    most = layer.get("max_latents", config.max_latents)
    least = config.min_latents
    if isinstance(most, int):
        least = min(least, max(most, 1))
    return merge_settings(config, {"min_latents": least, **layer})


def config_to_keep(config: Config, identity: Identity | None) -> dict[str, Any]:
    """Return a config as it is written beside converted parameters, without a run's places and machine settings.

    Args:
        config: of `config_of`, with overrides.
        identity: the checkpoint's; its reward stays, even if it isn't registered here.
    """
    kept: dict[str, Any] = as_json(values(merge_settings(config, _OF_THE_RUN)))
    rewards = [list(pair) for pair in config.weighted]
    stated = {"reward": "", "rewards": rewards}
    if identity and identity.config and _unknown_rewards(identity.config):
        stated = {key: identity.config[key] for key in stated}
    return kept | stated


def stopping_of(
    config: Config, identity: Identity
) -> tuple[Stopping, float | int | None]:
    """Find the rule that ends a checkpoint's rollouts: the threshold or the number of latents chosen on validation.

    Args:
        config: of `config_of`.
    Returns:
        ("threshold", the run's, None where none was chosen yet), or without a gate ("length", the run's, imitation's
        own number or T).
    Raises:
        UserError: the rule that an export names isn't valid.
    """
    stopping: Stopping = "threshold" if config.gate.enabled else "length"

    # Validation's choice goes first.
    stage = identity.stage_folder
    if stage:
        rule = read_rule(stage, stopping)
        if rule is not None:
            return stopping, rule

    # Then the rule in the description of an export or an import.
    description = identity.description
    if description and description.rule is not None:
        if not is_rule(stopping, description.rule):
            raise UserError(
                f"{identity.config_place}: key rule: {description.rule!r} is not valid; give {RULES[stopping]}"
            )
        return stopping, description.rule

    # A gate without a choice may have a published threshold; without a gate the config has the number.
    if config.gate.enabled:
        return stopping, identity.threshold
    if IMITATE in identity.config.get("stages", ()):
        return stopping, own_latents(config)
    return stopping, config.max_latents


def stated_settings(identity: Identity, own: Config) -> dict[str, Any]:
    """Return the settings that decide a checkpoint's answers, by dotted key; {} where its files don't say.

    Args:
        own: of `config_of`.
    """
    if isinstance(identity, ExternalCheckpoint) and not identity.description:
        return published_settings(identity, architecture_of(identity.reasoner))
    return rollout_settings(own)


def differences(config: Config, identity: Identity) -> str:
    """Say where a config uses a checkpoint in another way than it was made for; "" where it doesn't.

    Settings of evaluations are compared only for a config that evaluates and doesn't train.
    """
    own = config_of(identity)
    now = rollout_settings(config)
    stated = stated_settings(identity, own)
    if {*config.stages} != {EVALUATE}:
        learned = [key for key in stated if not key.startswith("evaluate.")]
        stated = {key: stated[key] for key in learned}
    elif stated:
        _, rule = stopping_of(own, identity)
        if not own.gate.enabled:
            stated["max_latents"] = rule
        elif config.gate.enabled and rule is not None:
            stated["evaluate.thresholds"] = [rule]
            now["evaluate.thresholds"] = list(config.evaluate.thresholds)
    return say_differences(identity.source, now, stated)


def say_differences(
    source: str, now: Mapping[str, Any], made: Mapping[str, Any]
) -> str:
    """Say which settings that both have differ, and how; "" where none does.

    Args:
        source: the checkpoint.
        now: values by dotted key, as they come back from JSON.
        made: those that the source was made with, in the same form.
    """
    texts = []
    for key, value in made.items():
        if key in now and now[key] != value:
            texts.append(f"config.{key}={_show(now[key])} and not {_show(value)}")
    if not texts:
        return ""
    return f"{source}: not used as it was made, but with {', '.join(texts)}"


def _show(value: Any) -> str:
    return repr(tuple(value) if isinstance(value, list) else value)

"""Which keys of a config a result depends on. A key in a list stands for itself and for all keys below it."""

from collections.abc import Collection, Mapping
from typing import Any

from slpo_jax.config.config import Config
from slpo_jax.config.overrides import values
from slpo_jax.io.files import as_json, flatten
from slpo_jax.stages import EVALUATE, SECTIONS

MODEL = ("reasoner", "tokenizer", "model", "gate.hidden")
"""What the parameters are: their shapes and their meaning. `NOT_THE_MODEL` are the exceptions."""

NOT_THE_MODEL = ("model.dtype", "model.remat", "model.scan_layers")

ROLLOUTS = (
    "prompt", "max_latents", "max_answer_tokens", "dropout", "latent_policy", "evaluate.dropout",
    "evaluate.temperature", "evaluate.top_k", "evaluate.top_p", "evaluate.max_answer_tokens", "evaluate.by_steps",
)  # fmt: skip
"""How a policy thinks and answers, both in training and in evaluation."""

CHANGES_NOTHING = (
    *(f"{section}.micro_batches" for section in SECTIONS if section != EVALUATE),
    "model.remat", "model.scan_layers", "rl.capacities", "reward_processes", "reward_seconds", "evaluate.batch_size",
    "evaluate.prompt_multiple", "evaluate.probed", "trackers", "log_every", "checkpoint_every", "max_skipped_steps",
    "stuck_after", "cpu_devices", "sharding",
)  # fmt: skip
"""Speed, memory, and places on the disk."""

MAY_DIFFER = (
    *CHANGES_NOTHING, "stages", "data.eval", "evaluate", "rl.objectives", "imitate.control", "imitate.control_rate",
    "imitate.no_thought",
)  # fmt: skip
"""What no trained parameter depends on: it may differ when a stage goes on."""


def flat_values(config: Config) -> dict[str, Any]:
    """List a config's values by dotted key, as they come back from JSON."""
    return flatten(as_json(values(config)))


def is_under(key: str, names: Collection[str]) -> bool:
    """Tell whether a key is one of these names, or lies below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def is_of_another_policy(key: str, settings: Mapping[str, Any]) -> bool:
    """Tell whether a key belongs to a latent policy that these settings, by dotted key, do not use."""
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    used = settings["latent_policy.name"]
    return section == "latent_policy" and name not in ("name", used)


def model_settings(config: Config) -> dict[str, Any]:
    """Return the settings that shape the model's parameters and give them their meaning, by dotted key."""
    model = dict[str, Any]()
    for key, value in flat_values(config).items():
        if is_under(key, MODEL) and not is_under(key, NOT_THE_MODEL):
            model[key] = value
    return model


def rollout_settings(config: Config) -> dict[str, Any]:
    """Return the settings on which a reasoner's answers depend, by dotted key."""
    settings = flat_values(config)
    rollouts = dict[str, Any]()
    for key, value in settings.items():
        if is_under(key, ROLLOUTS) and not is_of_another_policy(key, settings):
            rollouts[key] = value
    return rollouts

"""The config that goes with a checkpoint, found out from the checkpoint: no config file is needed to use one."""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.config import default_config, own_latents
from slpo_jax.errors import UserError
from slpo_jax.evaluation.rows import read_row
from slpo_jax.io.files import read_json
from slpo_jax.origin.identify import Identity
from slpo_jax.policy.policy import Stopping

PUBLISHED_LATENTS = 6  # of COCONUT and CODI, which have no gate
# What a run's config says of its start and its machine, which is not true of its checkpoint.
_NOT_THE_CHECKPOINTS = ("stages", "init", "base", "lora_alpha", "reasoner", "tokenizer", "cpu_devices", "sharding")


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
    if not of_a_run:
        config.max_latents = PUBLISHED_LATENTS
        config.model.dtype = "float32"  # in which it gives the tokens of the program that wrote it
    # A language model's tensors alone are COCONUT's, which has no others.
    config.reasoner = reasoner or identity.reasoner or f"coconut_{identity.backbone}"
    if config.reasoner.startswith("text"):
        config.max_latents, config.gate.enabled = config.max_latents if of_a_run else 0, False
    config.min_latents = min(config.min_latents, max(config.max_latents, 1))
    config.gate.enabled = bool(config.gate.enabled and identity.gate_trained)
    config.gate.hidden = identity.gate
    return config


def stopping_of(config: ConfigDict, identity: Identity) -> tuple[Stopping, float | int]:
    """How rollouts of the checkpoint end: at the threshold or the number of latents chosen on validation.

    Args:
        config: of `config_of`.
    Returns:
        ("threshold", the run's or 0.5), or without a gate ("length", the run's, imitation's own number or T).
    """
    stage = identity.stage.name if identity.stage else ""
    stopping: Stopping = "threshold" if config.gate.enabled else "length"
    rule = _evaluated_with(identity, stopping)
    if rule is not None:
        return stopping, rule
    if stopping == "threshold":
        return stopping, 0.5
    return stopping, own_latents(config) if stage.startswith("imitate") else config.max_latents


def _evaluated_with(identity: Identity, stopping: Stopping) -> float | int | None:
    """The rule in the row of the run's report that is of this very checkpoint; None where it has none."""
    if identity.workdir is None or identity.stage is None:
        return None
    row = read_row(identity.workdir.root, identity.stage.name)
    if row is None or row.stopping != stopping or row.settings != read_json(identity.stage.facts, default={}):
        return None
    return row.rule


def _take_settings(config: ConfigDict, identity: Identity) -> bool:
    """Write the run's settings into `config`; False if there is no run around the checkpoint."""
    run = (identity.workdir and identity.workdir.config, identity.stage and identity.stage.facts)
    files = [file for file in run if file and file.is_file()]
    for file in files:
        facts = read_json(file, "mend the file")
        _update(config, {key: value for key, value in facts.items() if key not in _NOT_THE_CHECKPOINTS}, file)
    return bool(files)


def _update(node: ConfigDict, facts: dict[str, Any], file: Path) -> None:
    for key, value in facts.items():
        if isinstance(node.get(key), ConfigDict) and isinstance(value, dict):
            _update(node[key], value, file)
        elif key in node or not node.is_locked:
            try:
                node[key] = tuple(value) if isinstance(value, list) else value
            except TypeError as error:
                raise UserError(f"{file}: key {key}: {' '.join(str(error).split())}; mend the file") from None

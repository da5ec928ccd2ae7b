"""The config that goes with a checkpoint, found out from the checkpoint: no config file is needed to use one."""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.config import default_config, own_latents
from slpo_jax.errors import UserError
from slpo_jax.interop.description import read_description, read_json
from slpo_jax.interop.opening import open_checkpoint
from slpo_jax.io.orbax import is_checkpoint
from slpo_jax.io.workdir import StageFolder, Workdir
from slpo_jax.origin.open import find_folder, with_gate
from slpo_jax.origin.recipes import name_of
from slpo_jax.policy.rollout import Stopping
from slpo_jax.text.tokenizer import load_tokenizer

NEWEST_FIRST = ("slpo", "cold_start", "imitate")
PUBLISHED_LATENTS = 6  # of ungated reasoners: SPEC section 4
# What a run's config says of its start and its machine, which is not true of its checkpoint.
_NOT_THE_CHECKPOINTS = ("stages", "init", "base", "lora_alpha", "reasoner", "tokenizer", "cpu_devices")


def find_checkpoint(source: str) -> str:
    """`source`, or the newest stage's checkpoint where that is a workdir.

    Raises:
        UserError: a workdir without a checkpoint.
    """
    workdir = Workdir(Path(source).expanduser())
    if is_checkpoint(workdir.root) or not workdir.checkpoints.is_dir():
        return source
    for stage in NEWEST_FIRST:
        if is_checkpoint(workdir.stage(stage).path):
            return str(workdir.stage(stage).path)
    raise UserError(f"config.init: {source} is a workdir without a checkpoint; run a stage, or give another")


def config_of(
    source: str, reasoner: str = "", base: str = "", tokenizer: str = "", lora_alpha: float | None = None
) -> ConfigDict:
    """The config to evaluate a checkpoint with.

    Of a run's checkpoint it has the run's settings (the stage's before the workdir's), of others the defaults; the gate
    is enabled where there is a trained one.

    Args:
        source: a workdir, or anything that `config.init` takes.
        reasoner: a name in `REASONERS`; "" is what the checkpoint itself says.
        base, tokenizer, lora_alpha: see `slpo_jax.config`; None is its default.
    Raises:
        UserError: there is no checkpoint, or it can't be read.
    """
    config = default_config()
    config.update(stages=("evaluate",), init=find_checkpoint(source), base=base, tokenizer=tokenizer)
    if lora_alpha is not None:
        config.lora_alpha = lora_alpha
    path = Path(config.init).expanduser()
    if is_checkpoint(path):
        description = read_description(find_folder(path))
        assert description is not None
        description = with_gate(description, path)
        if not _take_settings(config, path):
            config.max_latents = PUBLISHED_LATENTS
        found = name_of(description.kind, description.model)
    else:
        opened = open_checkpoint(config.init, base, config.lora_alpha or None, load_tokenizer)
        description, config.max_latents = opened.description, PUBLISHED_LATENTS
        # A language model's tensors alone are COCONUT's, which has no others.
        kind = opened.layout.kind.removesuffix("_hugging_face").replace("plain", "coconut")
        found = name_of(description.kind, description.model) if description else f"{kind}_{opened.layout.backbone}"
    config.reasoner = reasoner or found
    config.min_latents = min(config.min_latents, config.max_latents)
    config.gate.enabled = bool(config.gate.enabled and description and description.gate_trained)
    config.gate.hidden = (description.gate if description else 0) or 0
    return config


def stopping_of(config: ConfigDict) -> tuple[Stopping, float | int]:
    """How rollouts of `config_of`'s checkpoint end: at the threshold or the number of latents chosen on validation.

    Returns:
        ("threshold", the run's or 0.5), or without a gate ("length", imitation's own number of latents or T).
    """
    stage = StageFolder.of(Path(config.init).expanduser())
    sweeps = stage.workdir.thresholds
    chosen = read_json(sweeps).get(stage.name, {}).get("chosen") if sweeps.is_file() else None
    if config.gate.enabled:
        return "threshold", chosen if chosen is not None else 0.5
    if stage.name.startswith("imitate"):
        return "length", chosen or own_latents(config)
    return "length", config.max_latents


def _take_settings(config: ConfigDict, path: Path) -> bool:
    """Write the run's settings into `config`; False if there is no run around the checkpoint."""
    stage = StageFolder.of(path)
    files = [file for file in (stage.workdir.config, stage.facts) if file.is_file()]
    for file in files:
        facts = {key: value for key, value in read_json(file).items() if key not in _NOT_THE_CHECKPOINTS}
        _update(config, facts, file)
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

"""Convert checkpoints: ours for transformers, and published ones for this project."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np

from slpo_jax.api.load_options import by_argument
from slpo_jax.checkpoints.checkpoint import Checkpoint, find_checkpoint
from slpo_jax.checkpoints.export import replaced_by_export, shorten_source, write_export
from slpo_jax.checkpoints.external_layouts import with_decoder
from slpo_jax.checkpoints.identity import NativeCheckpoint, identify, open_native
from slpo_jax.checkpoints.saved_config import (
    UNCHOSEN,
    config_of,
    config_to_keep,
    stopping_of,
)
from slpo_jax.errors import UserError
from slpo_jax.io.files import check_free, whole_folder, write_text
from slpo_jax.io.orbax import save_params
from slpo_jax.io.workdir import REASONER_FOLDER, StageFolder


@by_argument()
def import_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], reasoner: str = "", base: str = "",
    tokenizer: str = "", lora_alpha: float | None = None, explain: bool = False,
) -> Checkpoint:  # fmt: skip
    """Convert an external checkpoint into one of ours.

    Args:
        source: a Hugging Face directory or hub id, or a torch, safetensors or GGUF file.
        target: must not exist, or be empty.
        reasoner, base, tokenizer, lora_alpha: as of `slpo_jax.load`.
        explain: SIM-CoT's decoder too.
    Returns:
        the checkpoint, described.
    Raises:
        UserError: it can't be used; nothing has been written then.
    """
    # Refuse before anything is read.
    opened = identify(os.fspath(source), base, lora_alpha)
    if base and not opened.base:
        raise UserError("--base", f"changes nothing of {source}; leave it out")
    target = Path(target).expanduser()
    check_free(target)
    if isinstance(opened, NativeCheckpoint):
        raise UserError(
            f"{source}: is an Orbax checkpoint already; export it, or use it with --config.init"
        )

    # Read the parameters, which must be a whole reasoner's.
    config = config_of(opened, reasoner, tokenizer)
    _, rule = stopping_of(config, opened)
    checkpoint = find_checkpoint(config, opened)
    params = with_decoder(checkpoint.read(explain=explain), explain, opened.source)
    description = checkpoint.description
    architecture = description.architecture
    if checkpoint.lacks and architecture.heads(description.model.n_embd):
        problem = (
            f"has no {checkpoint.lacks} yet, so is no {architecture.title} reasoner"
        )
        raise UserError(f"{source}: {problem}; train one with the imitate stage")

    # Write them as a stage does, with the config to use them with.
    description = dataclasses.replace(
        description, source=shorten_source(opened.source), rule=rule
    )
    checkpoint = dataclasses.replace(checkpoint, description=description)
    with whole_folder(target) as folder:
        save_params(folder, jax.tree.map(np.asarray, params))
        checkpoint.write(folder / REASONER_FOLDER)
        text = json.dumps(config_to_keep(config, opened), indent=1)
        write_text(StageFolder(folder).config, f"{text}\n")
    return checkpoint


@by_argument()
def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    explain: bool = False,
) -> Checkpoint:
    """Convert one of our checkpoints into a Hugging Face directory.

    Args:
        source: WORKDIR/checkpoints/STAGE, WORKDIR for its newest, or a folder that `import_checkpoint` wrote.
        target: must not exist, be empty, or be an export that nobody has changed since.
        explain: SIM-CoT's decoder too, which must have been kept.
    Returns:
        the checkpoint, described.
    Raises:
        UserError: no checkpoint there, or the target is in use.
    """
    target = Path(target).expanduser()
    replaces = replaced_by_export(target)
    opened = open_native(os.fspath(source))
    if opened is None:
        raise UserError(
            f"{source}: holds no checkpoint of this project; give WORKDIR/checkpoints/STAGE"
        )

    # An export has the whole config, and the rule that ends rollouts.
    config = config_of(opened)
    _, rule = stopping_of(config, opened)
    kept = config_to_keep(config, opened)
    description = dataclasses.replace(opened.description, config=kept, rule=rule)
    tokenizer = opened.tokenizer()
    template = description.architecture.template(tokenizer, prompt=config.prompt)
    checkpoint = Checkpoint(description, template, opened)

    params = with_decoder(opened.stored.read(), explain, opened.source)
    params = jax.tree.map(np.asarray, params)
    place = Path(opened.source).expanduser()
    rule = UNCHOSEN if rule is None else rule
    return write_export(target, place, params, checkpoint, config, rule, replaces)

"""Checkpoints converted: ours for transformers, and published ones for this project."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np

from slpo_jax.api.load_options import by_argument
from slpo_jax.checkpoints.checkpoint import Checkpoint, find_checkpoint
from slpo_jax.checkpoints.export import replaced_by_export, short, write_export
from slpo_jax.checkpoints.foreign_layouts import with_decoder
from slpo_jax.checkpoints.identity import Ours, identify, open_ours
from slpo_jax.checkpoints.saved_config import UNCHOSEN, config_of, config_to_keep, stopping_of
from slpo_jax.errors import UserError
from slpo_jax.io.files import check_free, whole_folder, write_text
from slpo_jax.io.orbax import save_params
from slpo_jax.io.workdir import REASONER_FOLDER, StageFolder


@by_argument()
def import_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], reasoner: str = "", base: str = "",
    tokenizer: str = "", lora_alpha: float | None = None, explain: bool = False,
) -> Checkpoint:  # fmt: skip
    """Convert a foreign checkpoint into one of ours.

    Args:
        source: a Hugging Face directory or hub id, or a torch, safetensors or GGUF file.
        target: must not exist, or be empty.
        reasoner, base, tokenizer, lora_alpha: as of `slpo_jax.load`.
        explain: SIM-CoT's decoder too.
    Returns:
        what the checkpoint is.
    Raises:
        UserError: it can't be used; nothing has been written then.
    """
    opened = identify(os.fspath(source), base, lora_alpha)
    if base and not opened.base:
        raise UserError("--base", f"changes nothing of {source}; leave it out")
    target = Path(target).expanduser()
    check_free(target)
    if isinstance(opened, Ours):
        raise UserError(f"{source}: is an Orbax checkpoint already; export it, or use it with --config.init")
    config = config_of(opened, reasoner, tokenizer)
    _, rule = stopping_of(config, opened)
    checkpoint = find_checkpoint(config, opened)
    params = with_decoder(checkpoint.read(explain=explain), explain, opened.source)
    if checkpoint.lacks and checkpoint.description.architecture.heads(checkpoint.description.model.n_embd):
        what = f"has no {checkpoint.lacks} yet, so is no {checkpoint.description.architecture.title} reasoner"
        raise UserError(f"{source}: {what}; train one with the imitate stage")
    description = dataclasses.replace(checkpoint.description, source=short(opened.source), rule=rule)
    checkpoint = dataclasses.replace(checkpoint, description=description)
    with whole_folder(target) as folder:
        save_params(folder, jax.tree.map(np.asarray, params))
        checkpoint.write(folder / REASONER_FOLDER)
        text = json.dumps(config_to_keep(config, opened), indent=1)
        write_text(StageFolder(folder).config, f"{text}\n")
    return checkpoint


@by_argument()
def export_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], explain: bool = False
) -> Checkpoint:
    """Convert one of our checkpoints into a Hugging Face directory.

    Args:
        source: WORKDIR/checkpoints/STAGE, WORKDIR for its newest, or what `import_checkpoint` wrote.
        target: must not exist, be empty, or be an export that nobody has changed since.
        explain: SIM-CoT's decoder too, which must have been kept.
    Returns:
        what the checkpoint is.
    Raises:
        UserError: no checkpoint there, or the target is in use.
    """
    target = Path(target).expanduser()
    replaces, opened = replaced_by_export(target), open_ours(os.fspath(source))
    if opened is None:
        raise UserError(f"{source}: holds no checkpoint of this project; give WORKDIR/checkpoints/STAGE")
    config = config_of(opened)
    _, rule = stopping_of(config, opened)
    kept = config_to_keep(config, opened)
    description = dataclasses.replace(opened.description, config=kept, rule=rule)
    template = description.architecture.template(opened.tokenizer(), prompt=config.prompt)
    params = jax.tree.map(np.asarray, with_decoder(opened.stored.read(), explain, opened.source))
    place, rule = Path(opened.source).expanduser(), UNCHOSEN if rule is None else rule
    checkpoint = Checkpoint(description, template, opened)
    return write_export(target, place, params, checkpoint, config, rule, replaces)

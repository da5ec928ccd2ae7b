"""Checkpoints between Orbax and Hugging Face."""

import dataclasses
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import logging
from safetensors import SafetensorError
from safetensors.numpy import save_file

from slpo_jax.architectures.weights import backbone_weights, gate_weights, write_tree
from slpo_jax.checkpoints import decoder
from slpo_jax.checkpoints.checkpoint import Checkpoint, find_checkpoint
from slpo_jax.checkpoints.decode_settings import config_of, made_with, stopping_of
from slpo_jax.checkpoints.decoder import with_decoder, write_decoder
from slpo_jax.checkpoints.description import FILE
from slpo_jax.checkpoints.detect import Identity, has_gate, identify, newest_checkpoint
from slpo_jax.checkpoints.export_texts import have_asked, model_card, short, thinking_files, thinks
from slpo_jax.checkpoints.source import SIDE_FILE
from slpo_jax.config.config import Config
from slpo_jax.errors import UserError
from slpo_jax.io.artifact import CHECKSUMS, matches_checksums, read_checksums, write_checksums
from slpo_jax.io.files import check_free, whole_folder, write_text
from slpo_jax.io.orbax import is_checkpoint, load_params, save_params, stored_params
from slpo_jax.io.workdir import REASONER_FOLDER, StageFolder, Workdir
from slpo_jax.models.parts import DECODER, GATE, LATENT_POLICY, REASONER
from slpo_jax.models.reasoner import BACKBONE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def import_checkpoint(identity: Identity, target: Path, config: Config, explain: bool = False) -> Checkpoint:
    """Convert a foreign checkpoint into one of ours.

    Args:
        target: must not exist, or be empty.
        config: its reasoner and tokenizer are used.
        explain: SIM-CoT's decoder too.
    Returns:
        what the checkpoint is.
    Raises:
        UserError: it can't be used; nothing has been written then.
    """
    check_free(target)
    source = identity.source
    gate = dataclasses.replace(config.gate, hidden=identity.gate_hidden or 0)
    checkpoint = find_checkpoint(dataclasses.replace(config, init=source, gate=gate), identity)
    if checkpoint.read is None:
        raise UserError(f"{source}: is an Orbax checkpoint already; export it, or use it with --config.init")
    params = with_decoder(checkpoint.read(explain), explain, source)
    if checkpoint.lacks and checkpoint.architecture.heads(checkpoint.description.model.n_embd):
        what = f"has no {checkpoint.lacks} yet, so is no {checkpoint.architecture.title} reasoner"
        raise UserError(f"{source}: {what}; train one with the imitate stage")
    described = dataclasses.replace(checkpoint.description, source=short(source), settings=made_with(identity))
    checkpoint = dataclasses.replace(checkpoint, description=described)
    with whole_folder(target) as made:
        save_params(made, jax.tree.map(np.asarray, params))
        checkpoint.write(made / REASONER_FOLDER)
    return checkpoint


def export_checkpoint(source: Path, target: Path, explain: bool = False) -> Checkpoint:
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
    replaces = replaced_by_export(target)
    source = Path(newest_checkpoint(str(source)))
    if not is_checkpoint(source):
        raise UserError(f"{source}: holds no checkpoint of this project; give WORKDIR/checkpoints/STAGE")
    identity = identify(str(source))
    description = identity.description
    assert description is not None
    assert identity.tokenizer is not None
    description = dataclasses.replace(description, settings=made_with(identity))
    config = config_of(identity)
    template = description.architecture.template(identity.tokenizer(), prompt=config.prompt)
    loaded = with_decoder(load_params(source, stored_params(source)), explain, str(source))
    params: dict[str, Any] = jax.tree.map(np.asarray, loaded)
    _, rule = stopping_of(config, identity)
    return write_export(target, source, params, Checkpoint(description, template), config, rule, replaces)


def replaced_by_export(
    target: Path, overwrite: bool = False, remedy: str = "give another directory"
) -> Collection[str] | None:
    """What of a folder an export there takes the place of; None where it is not in use.

    An export that nobody has changed since is replaced without being asked.

    Raises:
        UserError: it is in use, and not to be overwritten, or by a run.
    """
    own = {CHECKSUMS} | {name.partition("/")[0] for name in read_checksums(target)}
    if (target / FILE).is_file() and matches_checksums(target):
        return own
    if not (overwrite and target.is_dir()):
        check_free(target, remedy)
        return None
    if is_checkpoint(target) or Workdir(target).checkpoints.is_dir():
        raise UserError(f"{target}: is a run's folder; give another directory")
    return own


def write_export(
    target: Path, source: Path, params: dict[str, Any], checkpoint: Checkpoint, config: Config, rule: float | int,
    replaces: Collection[str] | None,
) -> Checkpoint:  # fmt: skip
    """Write a Hugging Face directory of a reasoner, with what is needed to think in PyTorch.

    Args:
        target: not in use, but for what it replaces.
        source: where it is from, for the model card.
        params: all parts, on the host.
        checkpoint: what they are of; its tokenizer is changed.
        config: what it is used with, whose gate is enabled where it stops the rollouts.
        rule: the gate's threshold, or without a gate the number of latents.
        replaces: see `replaced_by_export`.
    Returns:
        what was written: without the random gate of a run that has none.
    Raises:
        UserError: no other program knows its latents, or the target is in use.
    """
    if LATENT_POLICY in params:
        raise UserError(
            f"{source}: has parameters of a latent policy's own, which no other program knows; use it as it is"
        )
    if not has_gate(source):
        checkpoint = dataclasses.replace(checkpoint, description=dataclasses.replace(checkpoint.description, gate=None))
    can_think = thinks(config, checkpoint)
    files = thinking_files(config, checkpoint, rule, can_think)
    if can_think:
        have_asked(checkpoint.template)
    files["README.md"] = model_card(source, checkpoint.description, target.name, can_think, DECODER in params)
    export_reasoner(target, params, checkpoint, files, str(source), replaces)
    _check_tokenizer(target, checkpoint.template.tokenizer)
    return checkpoint


def _check_tokenizer(folder: Path, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Say so where transformers opens another tokenizer: of a Qwen2 it takes its own, whatever the files name."""
    from transformers import AutoTokenizer

    text = "Tom has 15 apples, she's 7 ."
    if AutoTokenizer.from_pretrained(folder)(text)["input_ids"] != tokenizer(text)["input_ids"]:
        logging.warning(
            "%s: transformers' AutoTokenizer cuts texts in another way than its tokenizer.json; open that with "
            "PreTrainedTokenizerFast.from_pretrained",
            folder,
        )


def export_adapters(source: Path, target: Path) -> None:
    """Copy the adapters that a finished stage keeps beside its checkpoint.

    Args:
        source: WORKDIR/checkpoints/STAGE.
        target: must not exist, or be empty.
    Raises:
        UserError: it has none, or the target is in use.
    """
    folder = StageFolder.of(source).adapters
    if not folder.is_dir():
        raise UserError(f"adapters: {source} has none apart; train them with config.rl.lora.rank, or leave it out")
    with whole_folder(target) as made:
        shutil.copytree(folder, made, dirs_exist_ok=True)


def export_reasoner(
    folder: Path, params: dict[str, Any], checkpoint: Checkpoint, texts: Mapping[str, str], source: str = "checkpoint",
    replaces: Collection[str] | None = None,
) -> None:  # fmt: skip
    """Write a directory that transformers opens: language model, tokenizer, and what only we know beside them.

    Args:
        folder: not in use, but for what it replaces; it appears whole or not at all.
        params: the reasoner's part, and the gate's and SIM-CoT's decoder's as far as there are some.
        checkpoint: what they are of.
        texts: of further files, by their places in the folder.
        source: where they are from, for messages.
        replaces: see `replaced_by_export`.
    Raises:
        UserError: a tensor has another shape than the description says, the folder is in use, or the disk is full.
    """
    description, width = checkpoint.description, checkpoint.description.model.n_embd
    heads = {name: part for name, part in params[REASONER].items() if name != BACKBONE}
    side = write_tree(description.architecture.heads(width), heads, source)
    if description.gate is not None:
        side |= write_tree(gate_weights(width, description.gate), params[GATE], source)
    model = write_tree(backbone_weights(description.model), params[REASONER][BACKBONE], source)
    with whole_folder(folder, replaces) as made:
        checkpoint.write(made)
        try:
            save_file(model, made / "model.safetensors", metadata={"format": "pt"})  # transformers wants to know
            if side:
                save_file(side, made / SIDE_FILE)
            if DECODER in params:
                save_file(write_decoder(params, description.model), made / decoder.FILE)
        except SafetensorError as error:  # what others raise as an OSError
            raise UserError(f"{folder}: can't be written ({error}); make room, and run the command again") from None
        for name, text in texts.items():
            write_text(made / name, text)
        for file in filter(Path.is_file, made.iterdir()):
            file.chmod(0o644)  # safetensors makes its files private
        write_checksums(made)

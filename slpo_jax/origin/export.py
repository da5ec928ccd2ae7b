"""A reasoner as a directory that transformers opens: language model, tokenizer, and what only we know beside them."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.numpy import save_file

from slpo_jax.errors import UserError
from slpo_jax.interop.weights import backbone_weights, gate_weights, write_tree
from slpo_jax.models.parts import GATE, REASONER
from slpo_jax.origin.description import Description, write_description
from slpo_jax.origin.opening import SIDE_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL_FILE = "model.safetensors"


def export_reasoner(
    folder: Path,
    params: dict[str, Any],
    description: Description,
    tokenizer: "PreTrainedTokenizerFast",
    tokens: dict[str, int],
    card: str,
) -> None:
    """Write a Hugging Face model directory; it appears whole or not at all.

    Args:
        folder: must not exist, or be empty.
        params: the reasoner's part and the gate's, if there is one.
        description: of these parameters.
        tokens: ids of the marker tokens, see `write_description`.
        card: README.md.
    Raises:
        UserError: the folder is in use, or the disk is full.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not empty; give another directory to export to")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        _write(made, params, description, tokenizer, tokens)
        (made / "README.md").write_text(card, encoding="utf-8")
        made.chmod(0o755)  # mkdtemp makes it private, and safetensors its files
        for file in made.iterdir():
            file.chmod(0o644)
        if folder.exists():
            folder.rmdir()
        made.replace(folder)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, SafetensorError):  # what others raise as an OSError
            raise UserError(f"{folder}: can't be written ({error}); make room, and run the command again") from None
        raise


def _write(folder: Path, params, description: Description, tokenizer, tokens) -> None:
    model, reasoner = description.model, params[REASONER]
    write_description(folder, description, tokenizer, tokens)
    tensors = write_tree(backbone_weights(model), reasoner["backbone"])
    save_file(tensors, folder / MODEL_FILE, metadata={"format": "pt"})  # transformers wants to know
    side = write_tree(description.kind.heads(model.n_embd), reasoner)
    if description.gate is not None:
        side |= write_tree(gate_weights(model.n_embd, description.gate), params[GATE])
    if side:
        save_file(side, folder / SIDE_FILE)

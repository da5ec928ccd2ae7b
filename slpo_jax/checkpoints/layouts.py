"""The layouts in which latent reasoners are published, peeled down to plain Hugging Face names.

A stopping gate lies there under a name that nobody has agreed on.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from slpo_jax.architectures import ARCHITECTURES, Architecture, Unwrapped
from slpo_jax.architectures.tensors import Stored
from slpo_jax.architectures.weights import EMBEDDING, strip_all, with_head
from slpo_jax.checkpoints.adapters import Lora, adapted, merge_lora
from slpo_jax.checkpoints.decoder import take_decoder
from slpo_jax.errors import UserError
from slpo_jax.evaluation.report_rows import is_rule

_WORD = re.compile(r"(?<![a-z])(gate|stop|halt)")
_IN_A_CARD = re.compile(r"\bgate[\s_-]*thr\w*\s*[=:]\s*[\"']?(\d*\.\d+|[01](?![\d.]))", re.IGNORECASE)
_IN_A_KEY = re.compile(r"threshold|_thr$")
_IN_A_BLOCK = re.compile(r"(^|\.)(h|layers)\.\d+\.")  # Llama's MLPs have a gate_proj
_FINAL_NORM = {"gpt2": "transformer.ln_f.weight", "llama": "model.norm.weight"}


def are_adapters(stored: Mapping[str, Stored]) -> bool:
    """Whether a file holds LoRA adapters without the model that they are of."""
    tables = ("wte.", "embed_tokens.", "lm_head.")
    return any(".lora_A." in name for name in stored) and not any(table in name for name in stored for table in tables)


def recognise(
    stored: Mapping[str, Stored], source: str, lora: Lora | None, base: Mapping[str, Stored] | None = None
) -> tuple[type[Architecture] | None, Unwrapped]:
    """Find out which layout a checkpoint has, and take it off.

    Args:
        stored: by the names in the file.
        source: the file or directory, for messages.
        lora: how LoRA adapters are scaled; None if nothing says it.
        base: the language model that adapters are of which lie without it.
    Returns:
        the architecture, None where there is a language model alone; and its tensors, adapters merged.
    Raises:
        UserError: no language model in it, adapters without their scale, or half an adapter.
    """
    tensors, decoder = take_decoder(strip_all(dict(stored), "module."), source)
    tensors, gate = take_gate(tensors, source)
    architecture, unwrapped = None, Unwrapped(tensors, {})
    for kind in ARCHITECTURES.values():
        if taken := kind.unwrap(tensors, source):
            architecture, unwrapped = kind, taken
            break
    tensors = unwrapped.model
    if base is not None:  # a language model alone is CoLaR's first, still without a head
        tensors = adapted(base, strip_all(tensors, "llm."), lora, source)
    tensors = merge_lora(tensors, lora, source)
    tensors = {name if with_head(name) in tensors else with_head(name): tensor for name, tensor in tensors.items()}
    for backbone, name in EMBEDDING.items():
        # Of tensors that share their memory, safetensors' save_model keeps the first in the alphabet.
        if name not in tensors and _FINAL_NORM[backbone] in tensors and "lm_head.weight" in tensors:
            tensors[name] = tensors["lm_head.weight"]
        if name in tensors:
            return architecture, unwrapped._replace(model=tensors, gate=gate, decoder=decoder)
    titles, held = ", ".join(kind.title for kind in ARCHITECTURES.values()), ", ".join([*stored][:3])
    raise UserError(
        f"{source}: neither transformer.wte.weight nor model.embed_tokens.weight is in it, but {len(stored)} tensors, "
        f"e.g. {held}; give a GPT-2 or Llama checkpoint, or a reasoner's ({titles})"
    )


def take_gate(tensors: dict[str, Stored], source: str) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Take a stopping gate off: a linear map [1, D] or two, [H, D] and [1, H], that are called gate, stop or halt.

    D is the width of the token embedding. Both have biases. What was taken is said in a line; what looks like
    a gate and isn't one of these stays, so that it is refused by its name.

    Args:
        tensors: of a whole checkpoint.
        source: the file or directory, for the line.
    Returns:
        the tensors without the gate, and the gate's under our names; empty if there is none.
    """
    tables = ("wte.weight", "embed_tokens.weight", "lm_head.weight")
    width = next((tensor.shape[-1] for name, tensor in tensors.items() if name.endswith(tables)), 0)
    names = [name for name in tensors if _WORD.search(name) and not _IN_A_BLOCK.search(name)]
    modules = {name.rpartition(".")[0] for name in names}
    if {f"{module}.{part}" for module in modules for part in ("weight", "bias")} != set(names):
        return tensors, {}
    ordered = sorted(modules, key=lambda module: tensors[f"{module}.weight"].shape[:1])
    shapes = [tuple(tensors[f"{module}.weight"].shape) for module in ordered]
    hidden = shapes[-1][0] if shapes else 0
    if shapes not in ([(1, width)], [(1, hidden), (hidden, width)]):
        return tensors, {}
    what = "linear" if len(shapes) == 1 else "two layers with a GELU between them"
    line = "%s: %s are taken as the stopping gate, a stop logit of each latent: %s"
    logging.warning(line, source, ", ".join(sorted(names)), what)
    gate = {
        f"{ours}.{part}": tensors[f"{theirs}.{part}"]
        for ours, theirs in zip(("gate.out", "gate.hidden"), ordered, strict=False)
        for part in ("weight", "bias")
    }
    return {name: tensor for name, tensor in tensors.items() if name not in names}, gate


def said_threshold(config: Mapping[str, Any], folder: Path) -> float | None:
    """The threshold that a published gate's config.json or card names; None where they don't, or not one alone.

    Nobody has agreed on a key: one with threshold in its name, or that ends in _thr. A line says what is taken or not.

    Args:
        config: its config.json.
        folder: where that and README.md are.
    """
    thresholds = {f"config.json: {key}={value}": value for key, value in config.items() if _IN_A_KEY.search(key)}
    card = folder / "README.md"
    texts = _IN_A_CARD.finditer(card.read_text("utf-8", "replace")) if card.is_file() else ()
    thresholds |= {f"{card.name}: {' '.join(match[0].split())}": float(match[1]) for match in texts}
    values, where = [*thresholds.values()], ", ".join(thresholds)
    if values and all(value == values[0] and is_rule("threshold", value) for value in values):
        logging.warning("%s: %s is taken as its gate's threshold; --threshold is another", folder, where)
        return float(values[0])
    if values:
        remedy = "set config.evaluate.thresholds=(..,), or solve's --threshold"
        logging.warning("%s: %s is no one threshold of a gate, so none is taken; %s", folder, where, remedy)
    return None

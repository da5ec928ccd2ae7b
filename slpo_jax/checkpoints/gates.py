"""A stopping gate in somebody else's checkpoint, under a name that nobody has agreed on."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from slpo_jax.checkpoints.tensors import Stored
from slpo_jax.evaluation.rows import is_rule

_WORD = re.compile(r"(?<![a-z])(gate|stop|halt)")
_IN_A_CARD = re.compile(r"\bgate[\s_-]*thr\w*\s*[=:]\s*[\"']?(\d*\.\d+|[01](?![\d.]))", re.IGNORECASE)
_IN_A_BLOCK = re.compile(r"(^|\.)(h|layers)\.\d+\.")  # Llama's MLPs have a gate_proj


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
    found = [name for name in tensors if _WORD.search(name) and not _IN_A_BLOCK.search(name)]
    modules = sorted({name.rpartition(".")[0] for name in found}, key=lambda module: _shape(tensors, module)[0])
    if {f"{module}.{part}" for module in modules for part in ("weight", "bias")} != set(found):
        return tensors, {}
    shapes = [_shape(tensors, module) for module in modules]
    names = {}
    if shapes == [(1, width)]:
        names, what = {"gate.out": modules[0]}, "linear"
    elif len(shapes) == 2 and shapes == [(1, shapes[1][0]), (shapes[1][0], width)]:
        names, what = {"gate.out": modules[0], "gate.hidden": modules[1]}, "two layers with a GELU between them"
    if not names:
        return tensors, {}
    said = "%s: %s are taken as the stopping gate, a stop logit of each latent: %s"
    logging.warning(said, source, ", ".join(sorted(found)), what)
    parts = ("weight", "bias")
    gate = {f"{ours}.{part}": tensors[f"{theirs}.{part}"] for ours, theirs in names.items() for part in parts}
    return {name: tensor for name, tensor in tensors.items() if name not in found}, gate


def said_threshold(config: Mapping[str, Any], folder: Path) -> float | None:
    """The threshold that a published gate's config.json or card names; None where they don't, or not one alone.

    Nobody has agreed on a key: one with threshold in its name, or that ends in _thr. A line says what is taken or not.

    Args:
        config: its config.json.
        folder: where that and README.md are.
    """
    found = {f"config.json: {key}={value}": value for key, value in config.items() if _names_threshold(key)}
    card = folder / "README.md"
    texts = _IN_A_CARD.finditer(card.read_text("utf-8", "replace")) if card.is_file() else ()
    found |= {f"{card.name}: {' '.join(each[0].split())}": float(each[1]) for each in texts}
    values, where = [*found.values()], ", ".join(found)
    if values and all(value == values[0] and is_rule("threshold", value) for value in values):
        logging.warning("%s: %s is taken as its gate's threshold; --threshold is another", folder, where)
        return float(values[0])
    if values:
        remedy = "set config.evaluate.thresholds=(..,), or solve's --threshold"
        logging.warning("%s: %s is no one threshold of a gate, so none is taken; %s", folder, where, remedy)
    return None


def _names_threshold(key: str) -> bool:
    return "threshold" in key or key.endswith("_thr")


def _shape(tensors: dict[str, Stored], module: str) -> tuple[int, ...]:
    """Of a module's weight; (0,) if it has none of two axes."""
    weight = tensors.get(f"{module}.weight")
    return tuple(weight.shape) if weight is not None and len(weight.shape) == 2 else (0,)

"""A stopping gate in somebody else's checkpoint, under a name that nobody has agreed on."""

import re

from absl import logging

from slpo_jax.interop.tensors import Stored

_WORD = re.compile(r"(?<![a-z])(gate|stop|halt)")
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


def _shape(tensors: dict[str, Stored], module: str) -> tuple[int, ...]:
    """Of a module's weight; (0,) if it has none of two axes."""
    weight = tensors.get(f"{module}.weight")
    return tuple(weight.shape) if weight is not None and len(weight.shape) == 2 else (0,)

"""Convert between Hugging Face's named tensors and our parameter trees, strictly in both directions."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from slpo_jax.architectures.tensors import Stored
from slpo_jax.errors import UserError
from slpo_jax.models.llama import LlamaConfig
from slpo_jax.models.reasoner import (
    BACKBONE,
    BackboneConfig,
    LatentReasoner,
    as_functions,
    backbone,
)

EMBEDDING = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}

Path = tuple[str, ...]
Tree = dict[str, Any]


class Weight(NamedTuple):
    """A parameter: its path in our tree, and its name and shape in Hugging Face's layout.

    The kernel of a torch Linear is stored transposed.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    transposed: bool = False


@functools.cache
def backbone_weights(config: BackboneConfig) -> list[Weight]:
    """Return every parameter of a backbone, the token embedding first.

    The modules' parameters are named as Hugging Face's but for the dot before a layer's number, and for Linen's words.
    torch's Linear keeps [out, in], transformers' Conv1D in GPT-2 [in, out], as our Dense does.
    """
    # The shapes are those of a backbone whose layers lie apart.
    plain = dataclasses.replace(config, remat=False, scan_layers=False)
    init = as_functions(LatentReasoner(backbone(plain))).init
    shapes = jax.eval_shape(lambda: init(jax.random.key(0)))[BACKBONE]

    weights = []
    for path, leaf in flatten_dict(shapes).items():
        # An embedding is a single array in our tree, `wte`, and `wte.weight` in Hugging Face's.
        name = ".".join(path if len(path) > 1 else (*path, "weight"))
        name = re.sub(r"\.(kernel|scale)$", ".weight", name)
        name = with_head(re.sub(r"^(h|layers)_", r"\1.", name))
        transposed = path[-1] == "kernel" and isinstance(config, LlamaConfig)
        shape = leaf.shape[::-1] if transposed else leaf.shape
        weights.append(Weight(path, name, shape, transposed))
    return sorted(weights, key=lambda weight: weight.name not in EMBEDDING.values())


def linear(path: Path, name: str, shape: tuple[int, int]) -> list[Weight]:
    """Return the weights of torch's Linear of this shape, [out, in]."""
    return [
        Weight((*path, "kernel"), f"{name}.weight", shape, True),
        Weight((*path, "bias"), f"{name}.bias", shape[:1]),
    ]


def norm(path: Path, name: str, width: int) -> list[Weight]:
    """Return the weights of torch's LayerNorm."""
    return [
        Weight((*path, "scale"), f"{name}.weight", (width,)),
        Weight((*path, "bias"), f"{name}.bias", (width,)),
    ]


def gate_weights(width: int, hidden: int) -> list[Weight]:
    """Return the weights of the stopping gate: `gate.out` and, for an MLP, `gate.hidden`."""
    weights = linear(("out",), "gate.out", (1, hidden or width))
    if hidden:
        weights += linear(("hidden",), "gate.hidden", (hidden, width))
    return weights


def with_prefix(tensors: Mapping[str, Stored], prefix: str) -> dict[str, Stored]:
    """Return the tensors whose names have a prefix, under their names without it."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors[name] for name in names}


def strip_all(tensors: dict[str, Stored], prefix: str) -> dict[str, Stored]:
    """Remove the prefix, if all names have it."""
    stripped = with_prefix(tensors, prefix)
    return stripped if len(stripped) == len(tensors) else tensors


def with_head(name: str) -> str:
    """Return a tensor's name with the prefix that it lacks in a GPT-2 or Llama that was saved without its head."""
    if re.match(r"(h|wte|wpe|ln_f)\.", name):
        return f"transformer.{name}"
    if re.match(r"(layers|embed_tokens|norm|rotary_emb)\.", name):
        return f"model.{name}"
    return name


def check_tree(
    weights: list[Weight], stored: Mapping[str, Stored], source: str
) -> None:
    """Compare names and shapes, before anything is read.

    Args:
        weights: all that must be there.
        stored: by Hugging Face's names.
        source: the file or directory, for messages.
    Raises:
        UserError: a tensor is missing or has another shape.
    """
    for weight in weights:
        tensor = stored.get(weight.name)
        if tensor is None:
            raise UserError(
                f"{source}: tensor {weight.name} is missing; give the whole checkpoint of this model"
            )
        if tuple(tensor.shape) != weight.shape:
            raise UserError(
                f"{source}: tensor {tensor.name} has shape {list(tensor.shape)}, the model's config says "
                f"{list(weight.shape)}; give the config and tokenizer that the checkpoint was trained with"
            )


def read_tree(weights: list[Weight], stored: Mapping[str, Stored], source: str) -> Tree:
    """Read the stored tensors as our float32 parameter tree; arguments and errors as in `check_tree`."""
    check_tree(weights, stored, source)
    flat = {}
    for weight in weights:
        array = np.asarray(stored[weight.name].read(), np.float32)
        if weight.transposed:
            array = np.ascontiguousarray(array.T)
        flat[weight.path] = array
    tree: Tree = unflatten_dict(flat)
    return tree


def write_tree(
    weights: list[Weight], tree: Tree, source: str = "checkpoint"
) -> dict[str, np.ndarray]:
    """Return a parameter tree's tensors under Hugging Face's names: the inverse of `read_tree`, with its errors."""
    flat = flatten_dict(tree)
    out = {}
    shapes = dict[str, Stored]()
    for weight in weights:
        if weight.path in flat:
            array = np.asarray(flat[weight.path])
            if weight.transposed:
                array = np.ascontiguousarray(array.T)
            out[weight.name] = array
            shapes[weight.name] = Stored(weight.name, array.shape, lambda: np.empty(0))
    check_tree(weights, shapes, source)

    # Nothing of the tree may be left out.
    leftovers = sorted(flat.keys() - {weight.path for weight in weights})
    if leftovers:
        raise UserError(
            f"{source}: has {'/'.join(leftovers[0])} too, which is no part of the model that its config.json and "
            "reasoner.json describe; give those that the checkpoint was trained with"
        )
    return out


def refuse_leftovers(
    weights: list[Weight],
    stored: Mapping[str, Stored],
    config: BackboneConfig,
    source: str,
) -> None:
    """Refuse stored tensors that aren't weights of the model, unless they repeat its weights or constants.

    Raises:
        UserError: an unexpected tensor, a tied head that differs from the embedding, or an untied one without it.
    """
    embedding = weights[0].name
    if not config.tied and stored[embedding].name == stored["lm_head.weight"].name:
        raise UserError(
            f"{source}: tensor {embedding} is missing, and the config doesn't tie it; give the whole file"
        )
    for name in stored.keys() - {weight.name for weight in weights}:
        if name == "lm_head.weight" and config.tied:
            _check_copy(stored, name, embedding, source)
        elif not _is_buffer(name, stored[name]):
            raise UserError(
                f"{source}: tensor {stored[name].name} is unexpected; give a checkpoint of this reasoner and backbone"
            )


def _check_copy(
    stored: Mapping[str, Stored], name: str, original: str, source: str
) -> None:
    is_copy = original in stored and np.array_equal(
        stored[name].read(), stored[original].read()
    )
    if not is_copy:
        raise UserError(
            f"{source}: tensor {stored[name].name} differs from {original}, but the config ties them; set "
            "tie_word_embeddings to false in the base's config.json if that is meant"
        )


def _is_buffer(name: str, tensor: Stored) -> bool:
    """Tell whether a tensor is a constant that older transformers saved: GPT-2's mask or Llama's rope frequencies."""
    if re.fullmatch(r"transformer\.h\.\d+\.attn\.masked_bias", name):
        return tensor.shape == ()
    if re.fullmatch(r"transformer\.h\.\d+\.attn\.bias", name):
        mask = np.asarray(tensor.read(), np.float32)
        if mask.ndim != 4:
            return False
        return np.array_equal(mask[0, 0], np.tri(mask.shape[-1], dtype=np.float32))
    frequencies = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    return re.fullmatch(frequencies, name) is not None

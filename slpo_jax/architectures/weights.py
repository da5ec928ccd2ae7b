"""Hugging Face's tensor names against our parameter trees: strict in both directions."""

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
    """A parameter: its path in our tree, and Hugging Face's name and shape of it (transposed for torch's Linear)."""

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
    plain = dataclasses.replace(config, remat=False, scan_layers=False)
    init = as_functions(LatentReasoner(backbone(plain))).init
    shapes = jax.eval_shape(lambda: init(jax.random.key(0)))[BACKBONE]
    weights = []
    for path, leaf in flatten_dict(shapes).items():
        dotted = re.sub(
            r"^(h|layers)_",
            r"\1.",
            re.sub(r"\.(kernel|scale)$", ".weight", ".".join(path)),
        )
        name = with_head(dotted if len(path) > 1 else f"{dotted}.weight")
        transposed = path[-1] == "kernel" and isinstance(config, LlamaConfig)
        shape = leaf.shape[::-1] if transposed else leaf.shape
        weights.append(Weight(path, name, shape, transposed))
    return sorted(weights, key=lambda weight: weight.name not in EMBEDDING.values())


def linear(path: Path, name: str, shape: tuple[int, int]) -> list[Weight]:
    """Name torch's Linear, whose weight has this shape, [out, in]."""
    return [
        Weight((*path, "kernel"), f"{name}.weight", shape, True),
        Weight((*path, "bias"), f"{name}.bias", shape[:1]),
    ]


def norm(path: Path, name: str, width: int) -> list[Weight]:
    """Name torch's LayerNorm."""
    return [
        Weight((*path, "scale"), f"{name}.weight", (width,)),
        Weight((*path, "bias"), f"{name}.bias", (width,)),
    ]


def gate_weights(width: int, hidden: int) -> list[Weight]:
    """Return the stopping gate, `gate.out` and, for an MLP, `gate.hidden`."""
    out = linear(("out",), "gate.out", (1, hidden or width))
    return out + (linear(("hidden",), "gate.hidden", (hidden, width)) if hidden else [])


def with_prefix(tensors: Mapping[str, Stored], prefix: str) -> dict[str, Stored]:
    """Return the tensors whose names begin so, under what comes after it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def strip_all(tensors: dict[str, Stored], prefix: str) -> dict[str, Stored]:
    """Remove the prefix, if all have it."""
    return (
        with_prefix(tensors, prefix)
        if tensors and all(name.startswith(prefix) for name in tensors)
        else tensors
    )


def with_head(name: str) -> str:
    """Return the name of a tensor with the prefix that it lacks in a GPT-2 or Llama that was saved without its head."""
    if re.match(r"(h|wte|wpe|ln_f)\.", name):
        return f"transformer.{name}"
    return (
        f"model.{name}"
        if re.match(r"(layers|embed_tokens|norm|rotary_emb)\.", name)
        else name
    )


def check_tree(
    weights: list[Weight], stored: Mapping[str, Stored], source: str
) -> None:
    """Compare names and shapes, before anything is read.

    Args:
        weights: what is wanted.
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
        flat[weight.path] = (
            np.ascontiguousarray(array.T) if weight.transposed else array
        )
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
            out[weight.name] = (
                np.ascontiguousarray(array.T) if weight.transposed else array
            )
            shapes[weight.name] = Stored(
                weight.name, out[weight.name].shape, lambda: np.empty(0)
            )
    check_tree(weights, shapes, source)
    if more := sorted(flat.keys() - {weight.path for weight in weights}):
        raise UserError(
            f"{source}: has {'/'.join(more[0])} too, which is no part of the model that its config.json and "
            "reasoner.json describe; give those that the checkpoint was trained with"
        )
    return out


def refuse_leftovers(
    weights: list[Weight],
    stored: Mapping[str, Stored],
    config: BackboneConfig,
    source: str,
) -> None:
    """Refuse stored tensors that are none of the weights, and don't repeat what the model has anyway.

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
    if original not in stored or not np.array_equal(
        stored[name].read(), stored[original].read()
    ):
        raise UserError(
            f"{source}: tensor {stored[name].name} differs from {original}, but the config ties them; set "
            "tie_word_embeddings to false in the base's config.json if that is meant"
        )


def _is_buffer(name: str, tensor: Stored) -> bool:
    """Tell constants that older transformers saved: GPT-2's causal mask and Llama's rope frequencies."""
    if re.fullmatch(r"transformer\.h\.\d+\.attn\.masked_bias", name):
        return tensor.shape == ()
    if re.fullmatch(r"transformer\.h\.\d+\.attn\.bias", name):
        mask = np.asarray(tensor.read(), np.float32)
        return mask.ndim == 4 and np.array_equal(
            mask[0, 0], np.tri(mask.shape[-1], dtype=np.float32)
        )
    return (
        re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name)
        is not None
    )

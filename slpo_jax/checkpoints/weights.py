"""Hugging Face's tensor names against our parameter trees: strict in both directions."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from slpo_jax.checkpoints.hf_config import BackboneConfig
from slpo_jax.checkpoints.tensors import Stored
from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten
from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.models.llama import LlamaConfig

EMBEDDING = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}

Path = tuple[str, ...]
Tree = dict[str, Any]


class Weight(NamedTuple):
    """One parameter: its path in our tree, and Hugging Face's name and shape of it (transposed for torch's Linear)."""

    path: Path
    name: str
    shape: tuple[int, ...]
    transposed: bool = False


def backbone_weights(config: BackboneConfig) -> list[Weight]:
    """Every parameter of a backbone."""
    found = _gpt2(config) if isinstance(config, GPT2Config) else _llama(config)
    return found if config.tied else [*found, Weight(("lm_head",), "lm_head.weight", found[0].shape)]


def _gpt2(c: GPT2Config) -> list[Weight]:
    width, inner = c.n_embd, c.n_inner or 4 * c.n_embd
    found = [Weight(("wte",), "transformer.wte.weight", (c.vocab_size, width))]
    found.append(Weight(("wpe",), "transformer.wpe.weight", (c.n_positions, width)))
    # transformers' Conv1D keeps [in, out], as our Dense does.
    shapes = {
        ("attn", "c_attn"): (width, 3 * width),
        ("attn", "c_proj"): (width, width),
        ("mlp", "c_fc"): (width, inner),
        ("mlp", "c_proj"): (inner, width),
    }
    norms = norm(("ln_f",), "transformer.ln_f", width)
    for layer in range(c.n_layer):
        prefix = f"transformer.h.{layer}"
        for name in ("ln_1", "ln_2"):
            norms += norm((f"h_{layer}", name), f"{prefix}.{name}", width)
        for (part, name), shape in shapes.items():
            path: Path = (f"h_{layer}", part, name)
            found.append(Weight((*path, "kernel"), f"{prefix}.{part}.{name}.weight", shape))
            found.append(Weight((*path, "bias"), f"{prefix}.{part}.{name}.bias", shape[1:]))
    return found + norms


def _llama(c: LlamaConfig) -> list[Weight]:
    width, queries, keys = c.n_embd, c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    found = [Weight(("embed_tokens",), "model.embed_tokens.weight", (c.vocab_size, width))]
    found.append(Weight(("norm", "scale"), "model.norm.weight", (width,)))
    shapes = {
        ("self_attn", "q_proj"): (queries, width),
        ("self_attn", "k_proj"): (keys, width),
        ("self_attn", "v_proj"): (keys, width),
        ("self_attn", "o_proj"): (width, queries),
        ("mlp", "gate_proj"): (c.n_inner, width),
        ("mlp", "up_proj"): (c.n_inner, width),
        ("mlp", "down_proj"): (width, c.n_inner),
    }
    norms: dict[Path, int] = {("input_layernorm",): width, ("post_attention_layernorm",): width}
    if c.qk_norm:
        norms |= {("self_attn", name): c.head_dim for name in ("q_norm", "k_norm")}
    for layer in range(c.n_layer):
        ours, theirs = f"layers_{layer}", f"model.layers.{layer}"
        for (part, name), shape in shapes.items():
            found.append(Weight((ours, part, name, "kernel"), f"{theirs}.{part}.{name}.weight", shape, True))
            if c.qkv_bias and name in ("q_proj", "k_proj", "v_proj"):
                found.append(Weight((ours, part, name, "bias"), f"{theirs}.{part}.{name}.bias", shape[:1]))
        for path, size in norms.items():
            found.append(Weight((ours, *path, "scale"), f"{theirs}.{'.'.join(path)}.weight", (size,)))
    return found


def linear(path: Path, name: str, shape: tuple[int, int]) -> list[Weight]:
    """torch's Linear of this name, whose weight has this shape, [out, in]."""
    return [
        Weight((*path, "kernel"), f"{name}.weight", shape, True),
        Weight((*path, "bias"), f"{name}.bias", shape[:1]),
    ]


def norm(path: Path, name: str, width: int) -> list[Weight]:
    """torch's LayerNorm of this name."""
    return [Weight((*path, "scale"), f"{name}.weight", (width,)), Weight((*path, "bias"), f"{name}.bias", (width,))]


def gate_weights(width: int, hidden: int) -> list[Weight]:
    """The stopping gate, `gate.out` and, for an MLP, `gate.hidden`."""
    out = linear(("out",), "gate.out", (1, hidden or width))
    return out + (linear(("hidden",), "gate.hidden", (hidden, width)) if hidden else [])


def with_prefix(tensors: Mapping[str, Stored], prefix: str) -> dict[str, Stored]:
    """Those whose names begin so, under what comes after it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def strip_all(tensors: dict[str, Stored], prefix: str) -> dict[str, Stored]:
    """Without the prefix, if all have it."""
    return with_prefix(tensors, prefix) if tensors and all(name.startswith(prefix) for name in tensors) else tensors


def with_head(name: str) -> str:
    """The name of a tensor with the prefix that it lacks in a GPT-2 or Llama that was saved without its head."""
    if re.match(r"(h|wte|wpe|ln_f)\.", name):
        return f"transformer.{name}"
    return f"model.{name}" if re.match(r"(layers|embed_tokens|norm|rotary_emb)\.", name) else name


def check_tree(weights: list[Weight], stored: Mapping[str, Stored], source: str) -> None:
    """Compare names and shapes, before anything is read.

    Args:
        weights: what is wanted.
        stored: by Hugging Face's names.
        source: the file or directory, for messages.
    Raises:
        UserError: a tensor is missing or has another shape.
    """
    for weight in weights:
        found = stored.get(weight.name)
        if found is None:
            raise UserError(f"{source}: tensor {weight.name} is missing; give the whole checkpoint of this model")
        if tuple(found.shape) != weight.shape:
            raise UserError(
                f"{source}: tensor {found.name} has shape {list(found.shape)}, the model's config says "
                f"{list(weight.shape)}; give the config and tokenizer that the checkpoint was trained with"
            )


def read_tree(weights: list[Weight], stored: Mapping[str, Stored], source: str) -> Tree:
    """Our float32 parameter tree of the stored tensors; arguments and errors as in `check_tree`."""
    check_tree(weights, stored, source)
    tree: Tree = {}
    for weight in weights:
        array = np.asarray(stored[weight.name].read(), np.float32)
        node = tree
        for key in weight.path[:-1]:
            node = node.setdefault(key, {})
        node[weight.path[-1]] = np.ascontiguousarray(array.T) if weight.transposed else array
    return tree


def write_tree(weights: list[Weight], tree: Tree, source: str = "checkpoint") -> dict[str, np.ndarray]:
    """The tensors of a parameter tree under Hugging Face's names: the inverse of `read_tree`, with errors as there."""
    out, shapes = {}, dict[str, Stored]()
    for weight in weights:
        node: Any = tree
        for key in weight.path:
            node = None if node is None else node.get(key)
        if node is not None:
            array = np.asarray(node)
            out[weight.name] = np.ascontiguousarray(array.T) if weight.transposed else array
            shapes[weight.name] = Stored(weight.name, out[weight.name].shape, lambda: np.empty(0))
    check_tree(weights, shapes, source)
    if more := sorted(flatten(tree).keys() - {".".join(weight.path) for weight in weights}):
        raise UserError(
            f"{source}: has {more[0].replace('.', '/')} too, which is no part of the model that its config.json and "
            "reasoner.json describe; give those that the checkpoint was trained with"
        )
    return out


def refuse_leftovers(weights: list[Weight], stored: Mapping[str, Stored], config: BackboneConfig, source: str) -> None:
    """Every stored tensor must be one of the weights, or one that repeats what the model has anyway.

    Raises:
        UserError: an unexpected tensor, a tied head that differs from the embedding, or an untied one without it.
    """
    embedding = weights[0].name
    if not config.tied and stored[embedding].name == stored["lm_head.weight"].name:
        raise UserError(f"{source}: tensor {embedding} is missing, and the config doesn't tie it; give the whole file")
    for name in stored.keys() - {weight.name for weight in weights}:
        if name == "lm_head.weight" and config.tied:
            _check_copy(stored, name, embedding, source)
        elif not _is_buffer(name, stored[name]):
            raise UserError(
                f"{source}: tensor {stored[name].name} is unexpected; give a checkpoint of this reasoner and backbone"
            )


def _check_copy(stored: Mapping[str, Stored], name: str, original: str, source: str) -> None:
    if original not in stored or not np.array_equal(stored[name].read(), stored[original].read()):
        raise UserError(
            f"{source}: tensor {stored[name].name} differs from {original}, but the config ties them; set "
            "tie_word_embeddings to false in the base's config.json if that is meant"
        )


def _is_buffer(name: str, tensor: Stored) -> bool:
    """Constants that older transformers saved: GPT-2's causal mask and Llama's rope frequencies."""
    if re.fullmatch(r"transformer\.h\.\d+\.attn\.masked_bias", name):
        return tensor.shape == ()
    if re.fullmatch(r"transformer\.h\.\d+\.attn\.bias", name):
        mask = np.asarray(tensor.read(), np.float32)
        return mask.ndim == 4 and np.array_equal(mask[0, 0], np.tri(mask.shape[-1], dtype=np.float32))
    return re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name) is not None

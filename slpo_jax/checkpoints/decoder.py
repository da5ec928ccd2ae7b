"""SIM-CoT's decoder beside a reasoner: in the files of its two programs, and in an export."""

import dataclasses
from typing import Any

import numpy as np
from absl import logging

from slpo_jax.architectures.architecture import Decoder
from slpo_jax.architectures.tensors import Stored
from slpo_jax.architectures.weights import backbone_weights, read_tree, refuse_leftovers, with_prefix, write_tree
from slpo_jax.errors import UserError
from slpo_jax.models.parts import DECODER
from slpo_jax.models.reasoner import BackboneConfig, vocabulary_rows
from slpo_jax.policy.explain import READS, Reads

FILE = "decoder.safetensors"
"""Of an export: the decoder, under a language model's names, and `READS`."""
# The reasoner's prefix, the decoder's, how that reads (latents of a thought, position of the first), and the
# latents of the last stage, five thoughts, where these are not as many as without a decoder.
_LAYOUTS: tuple[tuple[str, str, Reads, int], ...] = (
    ("base_causallm.", "expainable_llm.", (2, 1), 10),  # so it is spelled there
    ("codi.", "decoder.", (1, 0), 0),
)
_SEPARATE = ("pj_in.", "pj_out.")


def take_decoder(tensors: dict[str, Stored], source: str) -> tuple[dict[str, Stored], Decoder | None]:
    """Take off the decoder that SIM-CoT's programs write beside COCONUT's and CODI's reasoner.

    One of other shapes than the reasoner's base, which has projections in and out, can't be read: a line says so.

    Args:
        tensors: of a whole checkpoint.
        source: the file or directory, for the line.
    """
    for reasoner, prefix, reads, latents in _LAYOUTS:
        decoder = with_prefix(tensors, prefix)
        if not decoder or not any(name.startswith(reasoner) for name in tensors):
            continue
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith((prefix, *_SEPARATE))}
        if len(rest) + len(decoder) < len(tensors):
            logging.warning("%s: %s* is a model with projections (pj_in, pj_out), and is left out", source, prefix)
            return rest, None
        logging.warning("%s: %s* is taken as SIM-CoT's decoder, which --explain needs", source, prefix)
        return rest, Decoder(decoder, reads, latents)
    return tensors, None


def of_export(tensors: dict[str, Stored]) -> Decoder:
    """The decoder in an export's `FILE`."""
    latents, first = tensors.pop(READS).read().tolist()
    return Decoder(tensors, (latents, first))


def read_decoder(decoder: Decoder, config: BackboneConfig, embedding: str, source: str) -> dict[str, Any]:
    """The part `parts.DECODER`.

    Args:
        config: the shapes of the reasoner's base, which it has but for the rows of its vocabulary.
        embedding: the name of that's token embedding.
    Raises:
        UserError: it has other shapes.
    """
    tensors = decoder.tensors
    if embedding not in tensors and "lm_head.weight" in tensors:  # of tensors that share their memory one is kept
        tensors[embedding] = tensors["lm_head.weight"]
    rows = tensors[embedding].shape[0] if embedding in tensors else config.vocab_size
    weights = backbone_weights(dataclasses.replace(config, vocab_size=rows))
    tree = read_tree(weights, tensors, source)
    refuse_leftovers(weights, tensors, config, source)
    return {"backbone": tree, READS: np.array(decoder.reads, np.int32)}


def write_decoder(params: dict[str, Any], config: BackboneConfig) -> dict[str, np.ndarray]:
    """The tensors of an export's `FILE`; `params` are all parts."""
    tree = params[DECODER]["backbone"]
    weights = backbone_weights(dataclasses.replace(config, vocab_size=vocabulary_rows(tree)))
    return write_tree(weights, tree) | {READS: np.asarray(params[DECODER][READS])}


def with_decoder(params: dict[str, Any], asked: bool, source: str) -> dict[str, Any]:
    """All parts, the decoder among them only where it is asked for.

    Raises:
        UserError: it is asked for, and there is none.
    """
    if asked and DECODER not in params:
        raise UserError(
            "--explain",
            f"{source} has no decoder that says its thoughts in words, or it was dropped after training; imitate with "
            "config.imitate.recipe=simcot and config.imitate.simcot.keep=True, or leave it out",
        )
    return params if asked else {name: part for name, part in params.items() if name != DECODER}

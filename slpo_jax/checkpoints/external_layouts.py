"""Recognise the layouts in which latent reasoners are published, and reduce them to plain Hugging Face names.

Nobody has agreed on a name for a stopping gate. SIM-CoT's decoder lies beside the reasoner, in the files of its two
programs and in an export.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from slpo_jax.architectures import ARCHITECTURES, Architecture, Unwrapped
from slpo_jax.architectures.architecture import Decoder
from slpo_jax.architectures.tensors import Stored
from slpo_jax.architectures.weights import (
    EMBEDDING,
    backbone_weights,
    read_tree,
    refuse_leftovers,
    strip_all,
    with_head,
    with_prefix,
    write_tree,
)
from slpo_jax.checkpoints.adapters import Lora, add_adapters, merge_lora
from slpo_jax.errors import UserError
from slpo_jax.evaluation.report_rows import is_rule
from slpo_jax.models.parts import DECODER
from slpo_jax.models.reasoner import BackboneConfig, vocabulary_rows
from slpo_jax.policy.explain import READS, Reads

DECODER_FILE = "decoder.safetensors"
"""Of an export: the decoder, under a language model's names, and `READS`."""
# The reasoner's prefix, the decoder's, how that reads (latents of a thought, position of the first), and the
# latents of the last stage, five thoughts, where these are not as many as without a decoder.
_LAYOUTS: tuple[tuple[str, str, Reads, int], ...] = (
    ("base_causallm.", "expainable_llm.", (2, 1), 10),  # so it is spelled there
    ("codi.", "decoder.", (1, 0), 0),
)
_SEPARATE = ("pj_in.", "pj_out.")


def take_decoder(
    tensors: dict[str, Stored], source: str
) -> tuple[dict[str, Stored], Decoder | None]:
    """Separate the decoder that SIM-CoT's programs write beside COCONUT's and CODI's reasoner.

    A decoder of other shapes than the reasoner's base has projections in and out. It can't be read: a line says so.

    Args:
        tensors: of a whole checkpoint.
        source: the file or directory, for the line.
    """
    for reasoner, prefix, reads, latents in _LAYOUTS:
        decoder = with_prefix(tensors, prefix)
        if not decoder or not any(name.startswith(reasoner) for name in tensors):
            continue
        own = [name for name in tensors if not name.startswith((prefix, *_SEPARATE))]
        rest = {name: tensors[name] for name in own}
        if len(rest) + len(decoder) < len(tensors):
            logging.warning(
                "%s: %s* is a model with projections (pj_in, pj_out), and is left out",
                source,
                prefix,
            )
            return rest, None
        logging.warning(
            "%s: %s* is taken as SIM-CoT's decoder, which --explain needs",
            source,
            prefix,
        )
        return rest, Decoder(decoder, reads, latents)
    return tensors, None


def exported_decoder(tensors: dict[str, Stored]) -> Decoder:
    """Return the decoder in an export's `DECODER_FILE`."""
    latents, first = tensors.pop(READS).read().tolist()
    return Decoder(tensors, (latents, first))


def read_decoder(
    decoder: Decoder, config: BackboneConfig, embedding: str, source: str
) -> dict[str, Any]:
    """Read the part `parts.DECODER`.

    Args:
        config: the shapes of the reasoner's base; the decoder has the same, but for the rows of its vocabulary.
        embedding: the name of the base's token embedding.
    Raises:
        UserError: it has other shapes.
    """
    tensors = decoder.tensors
    # Of tensors that share their memory, safetensors keeps one.
    if embedding not in tensors and "lm_head.weight" in tensors:
        tensors[embedding] = tensors["lm_head.weight"]
    rows = tensors[embedding].shape[0] if embedding in tensors else config.vocab_size
    weights = backbone_weights(dataclasses.replace(config, vocab_size=rows))
    tree = read_tree(weights, tensors, source)
    refuse_leftovers(weights, tensors, config, source)
    return {"backbone": tree, READS: np.array(decoder.reads, np.int32)}


def write_decoder(
    params: dict[str, Any], config: BackboneConfig
) -> dict[str, np.ndarray]:
    """Return the tensors of an export's `DECODER_FILE`; `params` are all parts."""
    tree = params[DECODER]["backbone"]
    weights = backbone_weights(
        dataclasses.replace(config, vocab_size=vocabulary_rows(tree))
    )
    return write_tree(weights, tree) | {READS: np.asarray(params[DECODER][READS])}


def with_decoder(params: dict[str, Any], explain: bool, source: str) -> dict[str, Any]:
    """Return all parts, the decoder among them only where `explain` asks for it.

    Raises:
        UserError: it is asked for, and is missing.
    """
    if not explain:
        return {name: part for name, part in params.items() if name != DECODER}
    if DECODER not in params:
        raise UserError(
            "--explain",
            f"{source} has no decoder that says its thoughts in words, or it was dropped after training; imitate with "
            "config.imitate.recipe=simcot and config.imitate.simcot.keep=True, or leave it out",
        )
    return params


_WORD = re.compile(r"(?<![a-z])(gate|stop|halt)")
_IN_A_CARD = re.compile(
    r"\bgate[\s_-]*thr\w*\s*[=:]\s*[\"']?(\d*\.\d+|[01](?![\d.]))", re.IGNORECASE
)
_IN_A_KEY = re.compile(r"threshold|_thr$")
_IN_A_BLOCK = re.compile(r"(^|\.)(h|layers)\.\d+\.")  # Llama's MLPs have a gate_proj
_FINAL_NORM = {"gpt2": "transformer.ln_f.weight", "llama": "model.norm.weight"}


def are_adapters(stored: Mapping[str, Stored]) -> bool:
    """Tell whether a file holds LoRA adapters without their model."""
    is_table = re.compile(r"(wte|embed_tokens|lm_head)\.").search
    has_adapters = any(".lora_A." in name for name in stored)
    return has_adapters and not any(is_table(name) for name in stored)


def recognise(
    stored: Mapping[str, Stored],
    source: str,
    lora: Lora | None,
    base: Mapping[str, Stored] | None = None,
) -> tuple[type[Architecture] | None, Unwrapped]:
    """Find out which layout a checkpoint has, and give its tensors Hugging Face's names.

    Args:
        stored: by the names in the file.
        source: the file or directory, for messages.
        lora: how LoRA adapters are scaled; None if nothing says it.
        base: the language model, where its adapters lie in a file of their own.
    Returns:
        the architecture, None for a language model alone; and its tensors, adapters merged.
    Raises:
        UserError: it lacks a language model, adapters lack their scale, or an adapter is half there.
    """
    # Separate the parts that any architecture may have.
    tensors, decoder = take_decoder(strip_all(dict(stored), "module."), source)
    tensors, gate = take_gate(tensors, source)

    # The first architecture that knows the names takes the rest apart.
    architecture = None
    unwrapped = Unwrapped(tensors, {})
    for kind in ARCHITECTURES.values():
        parts = kind.unwrap(tensors, source)
        if parts:
            architecture = kind
            unwrapped = parts
            break

    # Merge adapters. CoLaR's first checkpoint has no head yet, so it is adapters under `llm.` alone.
    tensors = unwrapped.model
    if base is not None:
        tensors = add_adapters(base, strip_all(tensors, "llm."), lora, source)
    tensors = merge_lora(tensors, lora, source)

    # Models that were saved without their head lack a prefix.
    model = dict[str, Stored]()
    for name, tensor in tensors.items():
        whole_name = with_head(name)
        model[name if whole_name in tensors else whole_name] = tensor

    # Of tensors that share their memory, safetensors' save_model keeps the first in the alphabet.
    for backbone, name in EMBEDDING.items():
        has_norm = _FINAL_NORM[backbone] in model
        if name not in model and has_norm and "lm_head.weight" in model:
            model[name] = model["lm_head.weight"]
        if name in model:
            parts = unwrapped._replace(model=model, gate=gate, decoder=decoder)
            return architecture, parts
    titles = ", ".join(kind.title for kind in ARCHITECTURES.values())
    names = ", ".join([*stored][:3])
    raise UserError(
        f"{source}: neither transformer.wte.weight nor model.embed_tokens.weight is in it, but {len(stored)} tensors, "
        f"e.g. {names}; give a GPT-2 or Llama checkpoint, or a reasoner's ({titles})"
    )


def take_gate(
    tensors: dict[str, Stored], source: str
) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Separate a stopping gate: a linear map [1, D] or two, [H, D] and [1, H], that are called gate, stop or halt.

    D is the width of the token embedding. Both have biases. A line names the tensors that were taken; others that
    look like a gate stay, so that they are refused by name.

    Args:
        tensors: of a whole checkpoint.
        source: the file or directory, for the line.
    Returns:
        the tensors without the gate, and the gate's under our names; empty without a gate.
    """
    # Every module whose name speaks of a gate must have a weight and a bias, and nothing else.
    candidates = [name for name in tensors if _WORD.search(name)]
    names = {name for name in candidates if not _IN_A_BLOCK.search(name)}
    modules = {name.rpartition(".")[0] for name in names}
    weights = {f"{module}.weight" for module in modules}
    biases = {f"{module}.bias" for module in modules}
    if weights | biases != names:
        return tensors, {}

    # The shapes must be a linear gate's, or those of an MLP, whose output layer is the first by rows.
    tables = ("wte.weight", "embed_tokens.weight", "lm_head.weight")
    embedding = next((name for name in tensors if name.endswith(tables)), None)
    width = tensors[embedding].shape[-1] if embedding else 0
    ordered = sorted(modules, key=lambda module: tensors[f"{module}.weight"].shape[:1])
    shapes = [tuple(tensors[f"{module}.weight"].shape) for module in ordered]
    hidden = shapes[-1][0] if shapes else 0
    if shapes not in ([(1, width)], [(1, hidden), (hidden, width)]):
        return tensors, {}
    kind = "linear" if len(shapes) == 1 else "two layers with a GELU between them"
    line = "%s: %s are taken as the stopping gate, a stop logit of each latent: %s"
    logging.warning(line, source, ", ".join(sorted(names)), kind)

    gate = dict[str, Stored]()
    for name, module in zip(("gate.out", "gate.hidden"), ordered, strict=False):
        gate[f"{name}.weight"] = tensors[f"{module}.weight"]
        gate[f"{name}.bias"] = tensors[f"{module}.bias"]
    return {name: tensor for name, tensor in tensors.items() if name not in names}, gate


def published_threshold(config: Mapping[str, Any], folder: Path) -> float | None:
    """Read the threshold that a published gate's config.json or card names; None without one, or of several.

    Nobody has agreed on a key: here it has threshold in its name, or ends in _thr. A line says which is taken.

    Args:
        config: its config.json.
        folder: has config.json and README.md.
    """
    # Collect the values, by the places that name them.
    thresholds = dict[str, Any]()
    for key, value in config.items():
        if _IN_A_KEY.search(key):
            thresholds[f"config.json: {key}={value}"] = value
    card = folder / "README.md"
    if card.is_file():
        text = card.read_text("utf-8", "replace")
        for match in _IN_A_CARD.finditer(text):
            thresholds[f"{card.name}: {' '.join(match[0].split())}"] = float(match[1])

    # They must agree on one valid threshold.
    values = [*thresholds.values()]
    where = ", ".join(thresholds)
    agree = all(value == values[0] for value in values)
    if values and agree and all(is_rule("threshold", value) for value in values):
        logging.warning(
            "%s: %s is taken as its gate's threshold; --threshold is another",
            folder,
            where,
        )
        return float(values[0])
    if values:
        remedy = "set config.evaluate.thresholds=(..,), or solve's --threshold"
        logging.warning(
            "%s: %s is no one threshold of a gate, so none is taken; %s",
            folder,
            where,
            remedy,
        )
    return None

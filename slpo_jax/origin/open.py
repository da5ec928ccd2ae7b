"""Where a run's first weights, shapes and texts come from: random, a checkpoint of ours, or somebody else's."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_collections import ConfigDict

from slpo_jax.checked import fill
from slpo_jax.errors import UserError
from slpo_jax.interop.configs import BackboneConfig
from slpo_jax.interop.weights import (
    Weight,
    backbone_weights,
    check_tree,
    gate_weights,
    projector_weights,
    read_tree,
    refuse_leftovers,
)
from slpo_jax.models.parts import GATE, REASONER
from slpo_jax.models.shapes import activation_type
from slpo_jax.origin.description import Description, end_tokens, write_description
from slpo_jax.origin.identify import Identity, identify
from slpo_jax.origin.opening import Opened, fitting
from slpo_jax.origin.recipes import REASONERS, Recipe
from slpo_jax.text.chat import PromptConfig
from slpo_jax.text.templates import Template
from slpo_jax.text.tokenizer import END_LATENT, START_LATENT, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_RUNTIME = ("dtype", "remat", "scan_layers")  # of a backbone's config; not of its shapes


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a run starts from.

    Attributes:
        recipe: the reasoner's parts.
        description: its kind and shapes, as they are written beside checkpoints.
        template: its texts, with the tokenizer.
        read: the imported parts of the parameters; None where they are random.
        orbax: the checkpoint of ours to start from, or None.
        is_base: the checkpoint is of a language model that has not been a reasoner yet.
    """

    recipe: Recipe
    description: Description
    template: Template
    read: Callable[[], dict[str, Any]] | None = None
    orbax: Path | None = None
    is_base: bool = False

    @property
    def tokens(self) -> dict[str, int]:
        """Ids of the marker tokens by name."""
        t = self.template
        found = {"start": t.start_id, "end": t.end_id, "pad": t.pad_id, "eos": t.eos_id, "latent": t.latent_id}
        return {name: number for name, number in found.items() if number is not None}

    def write(self, folder: Path) -> None:
        """Describe the reasoner in a folder: what our checkpoints are read with."""
        folder.mkdir(parents=True, exist_ok=True)
        write_description(folder, self.description, self.template.tokenizer, self.tokens)


def open_origin(config: ConfigDict, identity: Identity | None = None) -> Origin:
    """Find what `config.init`, `config.base`, `config.tokenizer` and `config.model` describe; weights are read later.

    Args:
        identity: of `config.init`, if it was asked for already.
    Raises:
        UserError: one line that names the key, file or tensor at fault, and the remedy.
    """
    if config.reasoner not in REASONERS:
        raise UserError(f"config.reasoner: {config.reasoner!r} is unknown; use one of {', '.join(REASONERS)}")
    recipe = REASONERS[config.reasoner]
    if not config.init:
        return _random(config, recipe)
    identity = identity or identify(config.init, config.base, config.lora_alpha)
    if identity.opened is None:
        return _ours(config, recipe, identity)
    return _imported(config, recipe, identity, identity.opened)


def _random(config: ConfigDict, recipe: Recipe) -> Origin:
    if not config.tokenizer:
        raise UserError("config.tokenizer: not set, and there is no config.init to take it from; give a directory")
    template = recipe.template(load_tokenizer(config.tokenizer), None, True, _prompt(config))
    values = config.model.to_dict()
    fields = {field.name for field in dataclasses.fields(recipe.model_config)}
    shapes = {name: value for name, value in values.items() if name in fields}
    if recipe.backbone == "llama":
        shapes["n_kv_head"] = shapes["n_kv_head"] or config.model.n_head
        shapes["n_inner"] = shapes["n_inner"] or 4 * config.model.n_embd
        shapes |= {"head_dim": config.model.n_embd // config.model.n_head, "rope_scaling": None}
    model = recipe.model_config(**shapes | {"vocab_size": len(template.tokenizer)})
    projector = (config.model.projector or config.model.n_embd) if recipe.has_projector else 0
    return Origin(recipe, Description(recipe.kind, _at_run_time(config, recipe, model), projector), template)


def _prompt(config: ConfigDict) -> PromptConfig:
    return fill(PromptConfig, config.prompt, "config.prompt")


def _at_run_time(config: ConfigDict, recipe: Recipe, model: BackboneConfig) -> BackboneConfig:
    """The shapes with what the config says of running them."""
    return dataclasses.replace(
        model,
        dtype=activation_type(config.model.dtype),
        remat=config.model.remat,
        scan_layers=config.model.scan_layers,
    )


def _ours(config: ConfigDict, recipe: Recipe, identity: Identity) -> Origin:
    """A checkpoint of a run, or of `slpo_jax.convert`."""
    description, load = identity.description, identity.tokenizer
    assert description is not None
    assert load is not None
    _check_kind(config, recipe, identity)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else load()
    template = recipe.template(tokenizer, None, description.tidy, _prompt(config))
    if len(tokenizer) > description.model.vocab_size:
        answers = config.prompt.answers
        asked = "" if answers == "auto" else f" and those of config.prompt.answers={answers}"
        raise UserError(
            f"config.tokenizer: has {len(tokenizer)} tokens with the reasoner's{asked}, {identity.orbax} "
            f"{description.model.vocab_size}; leave out what the checkpoint was not trained with"
        )
    if not config.tokenizer:
        template = _ended(template, description.eos_ids, description.model.vocab_size, identity.source)
    model = _at_run_time(config, recipe, description.model)
    return Origin(recipe, dataclasses.replace(description, model=model, settings={}), template, orbax=identity.orbax)


def _check_kind(config: ConfigDict, recipe: Recipe, identity: Identity) -> None:
    kind = recipe.kind if identity.kind == "plain" else identity.kind
    if (kind, identity.backbone) != (recipe.kind, recipe.backbone):
        raise UserError(
            f"config.reasoner: is {config.reasoner}, but {identity.source} is a {kind}_{identity.backbone} checkpoint; "
            "set it to that or give another config.init"
        )


def _imported(config: ConfigDict, recipe: Recipe, identity: Identity, opened: Opened) -> Origin:
    layout, source = opened.layout, opened.source
    _check_kind(config, recipe, identity)
    with fitting(opened.model_base):
        stored_model = opened.shapes()
    if not config.tokenizer and opened.tokenizer is None:
        raise UserError(f"config.base: {source} comes without a tokenizer; give the base model's directory or hub id")
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else opened.tokenizer()  # type: ignore[misc]
    if not opened.has_own_model:
        _check_vocabulary(recipe, opened, stored_model.vocab_size, tokenizer)
        stored_model = dataclasses.replace(stored_model, vocab_size=layout.embedding.shape[0])
    with fitting("" if config.tokenizer else opened.tokenizer_base):
        template, is_base = _texts(recipe, opened, tokenizer, _prompt(config))
    if recipe.kind == "text" and not config.tokenizer:
        ends = end_tokens(source, opened.generation, opened.model)
        template = _ended(template, ends, stored_model.vocab_size, source)
    weights = backbone_weights(stored_model)
    with fitting(opened.model_base):
        check_tree(weights, layout.model, source)
        refuse_leftovers(weights, layout.model, stored_model, source)
    projector = _projector_width(recipe, opened, is_base, stored_model.n_embd)
    extra = _extras(config, recipe, opened, stored_model.n_embd, projector)
    rows = max(stored_model.vocab_size, len(tokenizer))
    model = _at_run_time(config, recipe, dataclasses.replace(stored_model, vocab_size=rows))
    gate = opened.gate_hidden
    plain = Description(recipe.kind, model, projector, _is_tidy(opened), gate, gate_trained=gate is not None)
    description = dataclasses.replace(opened.description or plain, model=model, settings={})
    if recipe.kind == "text":
        description = dataclasses.replace(description, eos_ids=template.eos_ids)

    def read() -> dict[str, Any]:
        tree = grow(read_tree(weights, layout.model, source), rows, template.tokenizer)
        parts = {name: read_tree(wanted, stored, source) for name, (wanted, stored) in extra.items()}
        reasoner = {"backbone": tree} | {name: part for name, part in parts.items() if name == "projector"}
        return {REASONER: reasoner} | {name: part for name, part in parts.items() if name == GATE}

    return Origin(recipe, description, template, read, is_base=is_base)


def _ended(template: Template, eos_ids: tuple[int, ...], rows: int, source: str) -> Template:
    """The template with all tokens that end what the model writes, its tokenizer's eos first.

    Args:
        eos_ids: as its files name them.
        rows: of its vocabulary.
    """
    if max(eos_ids, default=0) >= rows:
        raise UserError(f"{source}: eos_token_id {max(eos_ids)} is beyond its {rows} tokens; mend it")
    return dataclasses.replace(template, more_eos_ids=tuple(dict.fromkeys(i for i in eos_ids if i != template.eos_id)))


def _check_vocabulary(recipe: Recipe, opened: Opened, base: int, tokenizer: "PreTrainedTokenizerFast") -> None:
    """A file without a config has the base's rows, or three more."""
    embedding = opened.layout.embedding
    rows = embedding.shape[0]
    known = {base, base + 3, *({len(tokenizer), len(tokenizer) + 3} if recipe.kind == "coconut" else ())}
    if rows not in known:
        raise UserError(
            f"{opened.source}: tensor {embedding.name} has {rows} rows, config.base {base} (+ 3 for the reasoner's "
            "tokens); give the base model that it was trained from"
        )


def _texts(
    recipe: Recipe, opened: Opened, tokenizer: "PreTrainedTokenizerFast", prompt: PromptConfig
) -> tuple[Template, bool]:
    """The template, and whether the reasoner's tokens are new to the model.

    They come from the tokenizer by name where it has them, else they have the published ids: after the tokenizer's for
    COCONUT, after the model's vocabulary for CODI.
    """
    layout, rows, size = opened.layout, opened.layout.embedding.shape[0], len(tokenizer)
    named = {START_LATENT, END_LATENT} <= tokenizer.get_vocab().keys()
    if size > rows:
        raise UserError(
            f"{opened.source}: tensor {layout.embedding.name} has {rows} rows, but the tokenizer {size} tokens; give "
            "the tokenizer that the checkpoint was trained with"
        )
    if recipe.kind == "text":
        return recipe.template(tokenizer, None, True, prompt), False
    without_projector = recipe.has_projector and not layout.projector
    is_base = layout.kind == "plain" and (without_projector or not (named or rows == size + 3))
    if layout.kind == "coconut" and not named and rows != size + 3:
        raise UserError(
            f"{opened.source}: tensor {layout.embedding.name} has {rows} rows, too few for the tokenizer's {size} and "
            "the reasoner's 3 special tokens; give the base model that it was trained from"
        )
    first_id = None
    if recipe.has_projector and not named:
        first_id = rows if is_base else rows - 3
    return recipe.template(tokenizer, first_id, _is_tidy(opened), prompt), is_base


def _is_tidy(opened: Opened) -> bool:
    """Whether CODI's own protocol goes with the checkpoint: see `Description.tidy`."""
    return opened.description.tidy if opened.description else opened.layout.kind != "codi_hugging_face"


def _projector_width(recipe: Recipe, opened: Opened, is_base: bool, width: int) -> int:
    if not recipe.has_projector:
        return 0
    if is_base:
        return width
    first = opened.layout.projector.get("projector.1.weight")
    if first is None:
        raise UserError(
            f"{opened.source}: tensor projector.1.weight (prj.1.weight in the original layout) is missing; give a CODI "
            "checkpoint with its projector"
        )
    return first.shape[0]


def _extras(config: ConfigDict, recipe: Recipe, opened: Opened, width: int, projector: int) -> dict[str, tuple]:
    """(weights, stored tensors) of the projector and the gate, as far as the checkpoint has them."""
    found: dict[str, tuple[list[Weight], dict]] = {}
    if opened.layout.projector:
        found["projector"] = (projector_weights(width, projector), opened.layout.projector)
    if opened.gate:
        hidden = opened.gate_hidden
        if recipe.kind == "text" and opened.description is None:  # exports of ours have one all the same
            raise UserError(f"config.reasoner: {config.reasoner} has no gate, but {opened.source} has; set coconut's")
        if config.gate.hidden != hidden:
            raise UserError(
                f"config.gate.hidden: is {config.gate.hidden}, the gate of {opened.source} has {hidden}; set it to that"
            )
        found[GATE] = (gate_weights(width, hidden or 0), opened.gate)
    for weights, stored in found.values():
        check_tree(weights, stored, opened.source)
        for name in stored.keys() - {weight.name for weight in weights}:
            raise UserError(
                f"{opened.source}: tensor {stored[name].name} is unexpected; give a {recipe.kind} checkpoint"
            )
    return found


def grow(tree: dict[str, Any], rows: int, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """A backbone's parameters with as many vocabulary rows as the tokenizer needs.

    New rows are copies of the token "<<", which opens a calculation in GSM8K, as COCONUT begins; where that is not
    one token, the mean of all rows.
    """
    ids = tokenizer("<<", add_special_tokens=False)["input_ids"]
    out = dict(tree)
    for name in ("wte", "embed_tokens", "lm_head"):
        if name in tree and len(tree[name]) < rows:
            table = tree[name]
            row = table[ids[0]] if len(ids) == 1 else table.mean(axis=0)
            out[name] = np.concatenate([table, np.tile(row, (rows - len(table), 1))])
    return out

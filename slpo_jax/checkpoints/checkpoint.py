"""Where a run's first weights, shapes and texts come from: random, a checkpoint of ours, or somebody else's."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slpo_jax.checkpoints.architectures import REASONERS, Architecture, architecture_of
from slpo_jax.checkpoints.decoder import read_decoder
from slpo_jax.checkpoints.description import Description, end_tokens, write_description
from slpo_jax.checkpoints.detect import Identity, identify
from slpo_jax.checkpoints.hf_config import BackboneConfig
from slpo_jax.checkpoints.source import fitting
from slpo_jax.checkpoints.weights import (
    Weight,
    backbone_weights,
    check_tree,
    gate_weights,
    read_tree,
    refuse_leftovers,
)
from slpo_jax.config.config import Config
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.problem import Problem
from slpo_jax.data.templates import Template, written_texts
from slpo_jax.data.tokenizer import ANSWER_MARK, WORDS, has_latent_tokens, load_tokenizer, words_of, words_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.models.llama import LlamaConfig
from slpo_jax.models.parts import DECODER, GATE, REASONER
from slpo_jax.models.reasoner import BACKBONES
from slpo_jax.models.shapes import ModelConfig, activation_type, is_loop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_SPARE = 2  # rows that SIM-CoT's checkpoints of CODI may have after its tokens


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a run starts from.

    Attributes:
        description: its architecture and shapes, as they are written beside checkpoints.
        template: its texts, with the tokenizer.
        read: gives the imported parts of the parameters, with True SIM-CoT's decoder too if there is one; None
            where they are random.
        orbax: the checkpoint of ours to start from, or None.
        lacks: what the checkpoint, of a language model that has not been a reasoner yet, lacks of one; "" for others.
    """

    description: Description
    template: Template
    read: Callable[..., dict[str, Any]] | None = None
    orbax: Path | None = None
    lacks: str = ""

    @property
    def architecture(self) -> Architecture:
        """The description's."""
        return self.description.architecture

    @property
    def is_base(self) -> bool:
        """Whether the checkpoint is of a language model that has not been a reasoner yet."""
        return bool(self.lacks)

    @property
    def tokens(self) -> dict[str, int]:
        """Ids of the marker tokens by name."""
        t = self.template
        end = t.closing_ids[0] if len(t.closing_ids) == 1 else None
        found = {"start": t.start_id, "end": end, "pad": t.pad_id, "eos": t.eos_id, "latent": t.latent_id}
        return {name: number for name, number in found.items() if number is not None}

    def write(self, folder: Path) -> None:
        """Describe the reasoner in a folder: what our checkpoints are read with."""
        folder.mkdir(parents=True, exist_ok=True)
        write_description(folder, self.description, self.template.tokenizer, self.tokens)


def find_checkpoint(
    config: Config, identity: Identity | None = None, problems: Callable[[], Iterable[Problem]] = tuple
) -> Checkpoint:
    """Find what `config.init`, `config.base`, `config.tokenizer` and `config.model` describe; weights are read later.

    Args:
        identity: of `config.init`, if it was asked for already.
        problems: to train on, whose words the tokenizer may be made of.
    Raises:
        UserError: one line that names the key, file or tensor at fault, and the remedy.
    """
    architecture = architecture_of(config.reasoner)
    if not config.init:
        return _random(config, architecture, problems)
    identity = identity or identify(config.init, config.base, config.lora_alpha)
    found = identity.reasoner or f"{architecture.name}_{identity.backbone}"
    if found != config.reasoner:
        raise UserError(
            f"config.reasoner: is {config.reasoner}, but {identity.source} is a {found} checkpoint; set it to that or "
            "give another config.init"
        )
    return _ours(config, identity) if identity.orbax else _imported(config, architecture, identity)


def _random(config: Config, architecture: type[Architecture], problems: Callable[[], Iterable[Problem]]) -> Checkpoint:
    if not config.tokenizer:
        raise UserError("config.tokenizer: not set, and there is no config.init to take it from; give a directory")
    made = architecture.drawn(config.model.n_embd, config.model)
    words = config.tokenizer == WORDS
    tokenizer = _of_words(made, config.prompt, problems()) if words else load_tokenizer(config.tokenizer)
    template = made.template(tokenizer, prompt=config.prompt)
    backbone = BACKBONES[REASONERS[config.reasoner][1]]
    fields = {field.name for field in dataclasses.fields(backbone)} - {"scan_layers"}  # which is resolved below
    shapes = {name: value for name, value in vars(config.model).items() if name in fields}
    if issubclass(backbone, LlamaConfig):
        shapes["n_kv_head"] = shapes["n_kv_head"] or config.model.n_head
        shapes["n_inner"] = shapes["n_inner"] or 4 * config.model.n_embd
        shapes |= {"head_dim": config.model.n_embd // config.model.n_head, "rope_scaling": None}
    model = backbone(**shapes | {"vocab_size": len(template.tokenizer)})
    return Checkpoint(Description(made, _at_run_time(config, model)), template)


def _of_words(made: Architecture, prompt: PromptConfig, problems: Iterable[Problem]) -> "PreTrainedTokenizerFast":
    """A tokenizer of the words of problems, and of what an architecture writes around them."""
    own = (ANSWER_MARK, "\n", prompt.closing)
    around = made.template(words_tokenizer(words_of(own)), prompt=prompt)
    return words_tokenizer(words_of((*own, *written_texts(around, problems))))


def _at_run_time(config: Config, model: BackboneConfig) -> BackboneConfig:
    """The shapes with what the config says of running them."""
    return dataclasses.replace(
        model,
        dtype=activation_type(config.model.dtype),
        remat=config.model.remat,
        scan_layers=is_loop(config.model.scan_layers, model.n_layer),
    )


def _ours(config: Config, identity: Identity) -> Checkpoint:
    """A checkpoint of a run, or of `slpo import`."""
    description, load = identity.description, identity.tokenizer
    assert description is not None
    assert load is not None
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else load()
    template = description.architecture.template(tokenizer, prompt=config.prompt)
    if len(tokenizer) > description.model.vocab_size:
        answers = config.prompt.answers
        asked = "" if answers == "auto" else f" and those of config.prompt.answers={answers}"
        raise UserError(
            f"config.tokenizer: has {len(tokenizer)} tokens with the reasoner's{asked}, {identity.orbax} "
            f"{description.model.vocab_size}; leave out what the checkpoint was not trained with"
        )
    if not config.tokenizer:
        template = _ended(template, description.eos_ids, description.model.vocab_size, identity.source)
    model = _at_run_time(config, description.model)
    return Checkpoint(dataclasses.replace(description, model=model, settings={}), template, orbax=identity.orbax)


def _imported(config: Config, architecture: type[Architecture], opened: Identity) -> Checkpoint:
    tensors, source = opened.tensors, opened.path
    with fitting(opened.model_base):
        stored = opened.shapes()
    if not config.tokenizer and opened.tokenizer is None:
        raise UserError(f"config.base: {source} comes without a tokenizer; give the base model's directory or hub id")
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else opened.tokenizer()  # type: ignore[misc]
    spare = 0
    if not opened.has_own_model:
        spare = _check_vocabulary(architecture, opened, stored.vocab_size, tokenizer)
        stored = dataclasses.replace(stored, vocab_size=opened.embedding.shape[0])
    with fitting("" if config.tokenizer else opened.tokenizer_base):
        lacks = _lacks(architecture, opened, stored.n_embd, tokenizer)
    made = _made(architecture, opened, dataclasses.replace(config.model, n_embd=stored.n_embd), bool(lacks))
    with fitting("" if config.tokenizer else opened.tokenizer_base):
        first_id = opened.embedding.shape[0] - spare - (0 if lacks else len(architecture.tokens))
        template = made.template(tokenizer, first_id if architecture.after_vocabulary else None, config.prompt)
    if not architecture.has_latents and not config.tokenizer:
        ends = end_tokens(source, opened.generation, opened.model)
        template = _ended(template, ends, stored.vocab_size, source)
    weights = backbone_weights(stored)
    with fitting(opened.model_base):
        check_tree(weights, tensors.model, source)
        refuse_leftovers(weights, tensors.model, stored, source)
    heads = made.heads(stored.n_embd) if tensors.head else []
    gates = _gate(config, made, opened, stored.n_embd)
    _check_extras(made, heads + gates, opened)
    rows = max(stored.vocab_size, len(tokenizer))
    model = _at_run_time(config, dataclasses.replace(stored, vocab_size=rows))
    plain = Description(made, model, gate=opened.gate_hidden, gate_trained=opened.gate_hidden is not None)
    description = dataclasses.replace(opened.description or plain, model=model, settings={})
    if not architecture.has_latents:
        description = dataclasses.replace(description, eos_ids=template.eos_ids)

    def read(explain: bool = False) -> dict[str, Any]:
        tree = grow(read_tree(weights, tensors.model, source), rows, template.tokenizer)
        reasoner = {"backbone": tree} | read_tree(heads, tensors.head, source)
        found = {REASONER: reasoner} | ({GATE: read_tree(gates, opened.tensors.gate, source)} if gates else {})
        decoder = tensors.decoder if explain else None
        return found | ({DECODER: read_decoder(decoder, stored, weights[0].name, source)} if decoder else {})

    return Checkpoint(description, template, read, lacks=lacks)


def _made(architecture: type[Architecture], opened: Identity, asked: ModelConfig, is_base: bool) -> Architecture:
    """The architecture with what is to be known of the checkpoint."""
    if opened.description:
        return opened.description.architecture
    if is_base:
        return architecture.drawn(asked.n_embd, asked)
    return architecture.found(opened.tensors, opened.model, opened.path)


def _ended(template: Template, eos_ids: tuple[int, ...], rows: int, source: str) -> Template:
    """The template with all tokens that end what the model writes, its tokenizer's eos first.

    Args:
        eos_ids: as its files name them.
        rows: of its vocabulary.
    """
    if max(eos_ids, default=0) >= rows:
        raise UserError(f"{source}: eos_token_id {max(eos_ids)} is beyond its {rows} tokens; mend it")
    return dataclasses.replace(template, more_eos_ids=tuple(dict.fromkeys(i for i in eos_ids if i != template.eos_id)))


def _check_vocabulary(
    architecture: type[Architecture], opened: Identity, base: int, tokenizer: "PreTrainedTokenizerFast"
) -> int:
    """A file without a config has the base's rows, or the architecture's tokens' too; how many come after these."""
    embedding, more = opened.embedding, len(architecture.tokens)
    rows, sizes = embedding.shape[0], {base} if architecture.after_vocabulary else {base, len(tokenizer)}
    spare = _SPARE if architecture.after_vocabulary and rows == base + more + _SPARE else 0
    if rows - spare not in sizes | {size + more for size in sizes}:
        raise UserError(
            f"{opened.path}: tensor {embedding.name} has {rows} rows, config.base {base} (+ {more} for the "
            "reasoner's tokens); give the base model that it was trained from"
        )
    return spare


def _lacks(architecture: type[Architecture], opened: Identity, width: int, tokenizer: "PreTrainedTokenizerFast") -> str:
    """What a language model that has not been a reasoner yet lacks of one; "" for a reasoner's.

    Tokens come from the tokenizer by name where it has them, else they have the published ids.
    """
    tensors, rows, size = opened.tensors, opened.embedding.shape[0], len(tokenizer)
    if size > rows:
        raise UserError(
            f"{opened.path}: tensor {opened.embedding.name} has {rows} rows, but the tokenizer {size} tokens; give "
            "the tokenizer that the checkpoint was trained with"
        )
    has_tokens = not architecture.tokens or has_latent_tokens(tokenizer) or rows == size + len(architecture.tokens)
    if tensors.original and not architecture.after_vocabulary and not has_tokens:
        raise UserError(
            f"{opened.path}: tensor {opened.embedding.name} has {rows} rows, too few for the tokenizer's {size} and "
            f"the reasoner's {len(architecture.tokens)} special tokens; give the base model that it was trained from"
        )
    if opened.architecture is not None and opened.description is None:
        return ""
    heads = architecture.drawn(width).heads(width)
    if heads and not tensors.head:  # an export's is in its side file
        return heads[0].path[0]
    return "" if has_tokens else "special tokens"


def _gate(config: Config, architecture: Architecture, opened: Identity, width: int) -> list[Weight]:
    """The stopping gate's weights, if the checkpoint has one."""
    hidden = opened.gate_hidden
    if not opened.tensors.gate:
        return []
    if not architecture.has_gate and opened.description is None:  # exports of ours have one all the same
        raise UserError(f"config.reasoner: {config.reasoner} has no gate, but {opened.path} has; set a latent one")
    if config.gate.hidden != hidden:
        raise UserError(
            f"config.gate.hidden: is {config.gate.hidden}, the gate of {opened.path} has {hidden}; set it to that"
        )
    return gate_weights(width, hidden or 0)


def _check_extras(architecture: Architecture, weights: list[Weight], opened: Identity) -> None:
    """The head's and the gate's tensors must be these."""
    stored = opened.tensors.head | opened.tensors.gate
    check_tree(weights, stored, opened.path)
    for name in stored.keys() - {weight.name for weight in weights}:
        raise UserError(
            f"{opened.path}: tensor {stored[name].name} is unexpected; give a {architecture.name} checkpoint"
        )


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

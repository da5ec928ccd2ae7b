"""Find a run's first weights, shapes and texts: random, from a checkpoint of ours, or from another program's."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from slpo_jax.architectures import REASONERS, Architecture, architecture_of
from slpo_jax.architectures.tensors import Stored
from slpo_jax.architectures.weights import (
    backbone_weights,
    check_tree,
    gate_weights,
    read_tree,
    refuse_leftovers,
)
from slpo_jax.checkpoints.description import Description, end_tokens, write_description
from slpo_jax.checkpoints.external import ExternalCheckpoint, fitting
from slpo_jax.checkpoints.external_layouts import read_decoder
from slpo_jax.checkpoints.identity import Identity, NativeCheckpoint, identify
from slpo_jax.config.config import Config
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.problem import Problem
from slpo_jax.data.templates import Template, written_texts
from slpo_jax.data.tokenizer import (
    ANSWER_MARK,
    WORDS,
    has_latent_tokens,
    load_tokenizer,
    words_of,
    words_tokenizer,
)
from slpo_jax.errors import UserError, key_name
from slpo_jax.models.llama import LlamaConfig
from slpo_jax.models.parts import DECODER, GATE, REASONER
from slpo_jax.models.reasoner import BACKBONES, activation_type, is_loop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_SPARE = 2  # rows that SIM-CoT's checkpoints of CODI may have after its tokens


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The start of a run: architecture, shapes, texts and parameters.

    Attributes:
        description: its architecture and shapes, as they are written beside checkpoints.
        template: its texts, with the tokenizer.
        opened: the checkpoint of `config.init`; None where parameters are random.
        read: (like, explain) -> its parameters. One of ours gives them in the shapes and types of `like`,
            SIM-CoT's decoder among them; an external one gives its decoder, if any, only if `explain` is true.
        lacks: the part of a reasoner that a plain language model still lacks; "" for a reasoner's checkpoint.
    """

    description: Description
    template: Template
    opened: Identity | None = None
    read: Callable[..., dict[str, Any]] = lambda like=None, explain=False: {}
    lacks: str = ""

    def write(self, folder: Path) -> None:
        """Describe the reasoner in a folder, with which our checkpoints are read."""
        folder.mkdir(parents=True, exist_ok=True)
        write_description(folder, self.description, self.template)


def find_checkpoint(
    config: Config,
    identity: Identity | None = None,
    problems: Callable[[], Iterable[Problem]] = tuple,
) -> Checkpoint:
    """Find what `config.init`, `config.base`, `config.tokenizer` and `config.model` describe; weights are read later.

    Args:
        identity: of `config.init`, if it was asked for already.
        problems: the problems to train on; the tokenizer may be made of their words.
    Raises:
        UserError: one line that names the key, file or tensor at fault, and the remedy.
    """
    architecture = architecture_of(config.reasoner)
    if not config.init:
        start = _start_randomly(config, architecture, problems)
    else:
        opened = identity or identify(config.init, config.base, config.lora_alpha)
        start = _start_from(config, architecture, opened)

    # The config decides how the backbone computes, whatever it was made with.
    model = dataclasses.replace(
        start.description.model,
        dtype=activation_type(config.model.dtype),
        remat=config.model.remat,
        scan_layers=is_loop(config.model.scan_layers, start.description.model.n_layer),
    )
    description = dataclasses.replace(start.description, model=model)
    return dataclasses.replace(start, description=description)


def _start_randomly(
    config: Config,
    architecture: type[Architecture],
    problems: Callable[[], Iterable[Problem]],
) -> Checkpoint:
    """Start from random weights, in the shapes of `config.model`."""
    if not config.tokenizer:
        raise UserError(
            "config.tokenizer: not set, and there is no config.init to take it from; give a directory"
        )
    instance = architecture.from_config(config.model.n_embd, config.model)

    # The texts come first, since they decide the size of the vocabulary.
    if config.tokenizer == WORDS:
        tokenizer = _words_of_problems(instance, config.prompt, problems())
    else:
        tokenizer = load_tokenizer(config.tokenizer)
    template = instance.template(tokenizer, prompt=config.prompt)

    # `find_checkpoint` sets scan_layers, for all kinds of checkpoints.
    backbone = BACKBONES[REASONERS[config.reasoner][1]]
    fields = {field.name for field in dataclasses.fields(backbone)} - {"scan_layers"}
    sizes = vars(config.model)
    shapes = {name: value for name, value in sizes.items() if name in fields}
    shapes["vocab_size"] = len(template.tokenizer)
    if issubclass(backbone, LlamaConfig):
        shapes["n_kv_head"] = shapes["n_kv_head"] or config.model.n_head
        shapes["n_inner"] = shapes["n_inner"] or 4 * config.model.n_embd
        shapes["head_dim"] = config.model.n_embd // config.model.n_head
        shapes["rope_scaling"] = None
    return Checkpoint(Description(instance, backbone(**shapes)), template)


def _words_of_problems(
    architecture: Architecture, prompt: PromptConfig, problems: Iterable[Problem]
) -> "PreTrainedTokenizerFast":
    """Make a tokenizer of the words of problems, and of those that an architecture writes around them."""
    texts = (ANSWER_MARK, "\n", prompt.closing)
    around = architecture.template(words_tokenizer(words_of(texts)), prompt=prompt)
    return words_tokenizer(words_of((*texts, *written_texts(around, problems))))


def _start_from(
    config: Config, architecture: type[Architecture], opened: Identity
) -> Checkpoint:
    """Start from an opened checkpoint, which must be of `config.reasoner`."""
    reasoner = opened.reasoner
    if isinstance(opened, ExternalCheckpoint) and opened.architecture is None:
        # Any architecture can begin with a language model.
        reasoner = f"{architecture.name}_{opened.backbone}"
    if reasoner != config.reasoner:
        raise UserError(
            f"{key_name('config.reasoner')}: is {config.reasoner}, but {opened.source} is a {reasoner} checkpoint; "
            f"set it to that or give another {key_name('config.init')}"
        )
    if isinstance(opened, NativeCheckpoint):
        return _from_native(config, opened)
    return _from_external(config, architecture, opened)


def _from_native(config: Config, opened: NativeCheckpoint) -> Checkpoint:
    """Start from a checkpoint of a run, or of `slpo import`."""
    description = opened.description
    tokenizer = (
        load_tokenizer(config.tokenizer) if config.tokenizer else opened.tokenizer()
    )
    template = description.architecture.template(tokenizer, prompt=config.prompt)
    if len(tokenizer) > description.model.vocab_size:
        raise UserError(
            f"{key_name('config.tokenizer')}: has {len(tokenizer)} tokens with the reasoner's and config.prompt's, "
            f"{opened.path} {description.model.vocab_size}; leave out what the checkpoint was not trained with"
        )
    if not config.tokenizer:
        template = _with_end_tokens(
            template, description.eos_ids, description.model.vocab_size, opened.source
        )

    def read(like: Any = None, explain: bool = False) -> dict[str, Any]:
        return opened.stored.read(like)

    return Checkpoint(description, template, opened, read)


def _from_external(
    config: Config, architecture: type[Architecture], opened: ExternalCheckpoint
) -> Checkpoint:
    """Start from an external checkpoint."""
    if config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer)
    elif opened.tokenizer is not None:
        tokenizer = opened.tokenizer()
    else:
        raise UserError(
            "config.base",
            f"{opened.path} comes without a tokenizer; give the base model's directory or hub id",
        )
    with fitting(opened.base):
        return _fit_to_config(config, architecture, opened, tokenizer)


def _fit_to_config(
    config: Config,
    architecture: type[Architecture],
    opened: ExternalCheckpoint,
    tokenizer: "PreTrainedTokenizerFast",
) -> Checkpoint:
    """Return an external checkpoint with its shapes and tokenizer, which may be those of `config.base`."""
    tensors = opened.tensors
    source = opened.path
    stored = opened.shapes()
    published = bool(opened.architecture and not opened.description)
    if published:
        tensors = architecture.with_texts(tensors, opened.model, tokenizer, source)
    width = stored.n_embd

    # Find the reasoner's tokens among the rows of the embedding.
    missing_head = ""
    heads = architecture.from_config(width).heads(width)
    if heads and not tensors.head:
        missing_head = heads[0].path[0]
    plan = vocabulary_plan(
        architecture,
        opened.embedding,
        source,
        base=None if opened.has_own_model else stored.vocab_size,
        tokens=len(tokenizer),
        has_names=has_latent_tokens(tokenizer, architecture.markers),
        published=published,
        missing_head=missing_head,
    )
    if not opened.has_own_model:
        stored = dataclasses.replace(stored, vocab_size=opened.embedding.shape[0])

    # The description has the architecture's settings, else the tensors' shapes tell them.
    if opened.description:
        instance = opened.description.architecture
    elif plan.lacks:
        instance = architecture.from_config(width, config.model)
    else:
        instance = architecture.from_checkpoint(tensors, opened.model, source)
    template = instance.template(tokenizer, plan.first_id, config.prompt)
    if not architecture.has_latents and not config.tokenizer:
        ends = end_tokens(source, opened.model)
        template = _with_end_tokens(template, ends, stored.vocab_size, source)

    # An export may have a gate, whatever its architecture.
    has_gate = tensors.gate and (architecture.has_gate or opened.description)
    if has_gate and config.gate.hidden != opened.gate_hidden:
        raise UserError(
            "config.gate.hidden",
            f"is {config.gate.hidden}, the gate of {source} has {opened.gate_hidden}; set it so",
        )

    # The checkpoint must have these tensors, and no others.
    weights = backbone_weights(stored)
    heads = instance.heads(width) if tensors.head else []
    gates = gate_weights(width, config.gate.hidden) if has_gate else []
    tensors_by_name = tensors.model | tensors.head | tensors.gate
    check_tree([*weights, *heads, *gates], tensors_by_name, source)
    refuse_leftovers([*weights, *heads, *gates], tensors_by_name, stored, source)

    # New tokens get rows of their own, once the weights are read.
    rows = max(stored.vocab_size, len(tokenizer))
    model = dataclasses.replace(stored, vocab_size=rows)
    has_any_gate = opened.gate_hidden is not None
    description = opened.description or Description(
        instance, model, gate=opened.gate_hidden, gate_trained=has_any_gate
    )
    description = dataclasses.replace(
        description, model=model, config={}, rule=None, eos_ids=template.eos_ids
    )

    def read(like: Any = None, explain: bool = False) -> dict[str, Any]:
        tree = grow(read_tree(weights, tensors.model, source), rows, template.tokenizer)
        params = {REASONER: {"backbone": tree} | read_tree(heads, tensors.head, source)}
        if gates:
            params[GATE] = read_tree(gates, tensors.gate, source)
        if explain and tensors.decoder:
            params[DECODER] = read_decoder(
                tensors.decoder, stored, weights[0].name, source
            )
        return params

    return Checkpoint(description, template, opened, read, plan.lacks)


def _with_end_tokens(
    template: Template, eos_ids: tuple[int, ...], rows: int, source: str
) -> Template:
    """Return the template with all tokens that end a text of the model, its tokenizer's eos first.

    Args:
        eos_ids: as its files name them.
        rows: of its vocabulary.
    Raises:
        UserError: an id is beyond the vocabulary.
    """
    if max(eos_ids, default=0) >= rows:
        raise UserError(
            f"{source}: eos_token_id {max(eos_ids)} is beyond its {rows} tokens; mend it"
        )
    others = [number for number in eos_ids if number != template.eos_id]
    return dataclasses.replace(template, more_eos_ids=tuple(dict.fromkeys(others)))


class VocabularyPlan(NamedTuple):
    """The meaning of the rows of an external checkpoint's embedding.

    Attributes:
        first_id: the id of the first of the architecture's tokens; None where the tokenizer has it.
        lacks: as of `Checkpoint`.
    """

    first_id: int | None
    lacks: str


def vocabulary_plan(
    architecture: type[Architecture], embedding: Stored, source: str, *,
    base: int | None, tokens: int, has_names: bool, published: bool, missing_head: str,
) -> VocabularyPlan:  # fmt: skip
    """Tell a reasoner's vocabulary from a language model's.

    Tokens come from the tokenizer by name where it has them, else they have the published ids.

    Args:
        embedding: the checkpoint's.
        source: where that is from, for messages.
        base: rows of `config.base`, for a file without a config, which may have rows for the architecture's tokens too.
        tokens: the tokenizer's tokens.
        has_names: whether the architecture's tokens are among them.
        published: whether the tensors are a reasoner's, and not an export's.
        missing_head: the first of the architecture's heads, where the checkpoint has none of them; else "".
    Raises:
        UserError: the rows are another vocabulary's.
    """
    rows = embedding.shape[0]
    more = len(architecture.tokens)
    after = architecture.after_vocabulary

    # The rows must be those of the base model, with or without the architecture's tokens.
    spare = 0
    if base is not None:
        spare = _SPARE if after and rows == base + more + _SPARE else 0
        sizes = {base} if after else {base, tokens}
        if rows - spare not in sizes | {size + more for size in sizes}:
            raise UserError(
                f"{source}: tensor {embedding.name} has {rows} rows, {key_name('config.base')} {base} (+ {more} for "
                "the reasoner's tokens); give the base model that it was trained from"
            )
    if tokens > rows:
        raise UserError(
            f"{source}: tensor {embedding.name} has {rows} rows, but the tokenizer {tokens} tokens; give "
            "the tokenizer that the checkpoint was trained with"
        )

    # A plain language model lacks the heads or the tokens of a reasoner.
    has_tokens = not more or has_names or rows == tokens + more
    lacks = missing_head
    if not lacks and not has_tokens:
        lacks = "special tokens"
    if published and (has_tokens or after):
        lacks = ""

    # Tokens after the vocabulary are its last rows, or come after them where they are still lacking.
    if not after:
        return VocabularyPlan(None, lacks)
    first_id = rows - spare
    if not lacks:
        first_id -= more
    return VocabularyPlan(first_id, lacks)


def grow(
    tree: dict[str, Any], rows: int, tokenizer: "PreTrainedTokenizerFast"
) -> dict[str, Any]:
    """Grow a backbone's parameters to the vocabulary rows that the tokenizer needs.

    New rows are copies of the token "<<", which opens a calculation in GSM8K: so COCONUT begins. Where "<<" is not
    one token, they are the mean of all rows.
    """
    ids = tokenizer("<<", add_special_tokens=False)["input_ids"]
    out = dict(tree)
    for name in ("wte", "embed_tokens", "lm_head"):
        if name in tree and len(tree[name]) < rows:
            table = tree[name]
            more = rows - len(table)
            row = table[ids[0]] if len(ids) == 1 else table.mean(axis=0)
            copies = np.tile(row, (more, 1))
            out[name] = np.concatenate([table, copies])
    return out

"""Where a run's first weights, shapes and texts come from: random, a checkpoint of ours, or somebody else's."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from slpo_jax.architectures import REASONERS, Architecture, architecture_of
from slpo_jax.architectures.tensors import Stored
from slpo_jax.architectures.weights import backbone_weights, check_tree, gate_weights, read_tree, refuse_leftovers
from slpo_jax.checkpoints.description import Description, end_tokens, write_description
from slpo_jax.checkpoints.foreign import Foreign, fitting
from slpo_jax.checkpoints.foreign_layouts import read_decoder
from slpo_jax.checkpoints.identity import Identity, Ours, identify
from slpo_jax.config.config import Config
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.problem import Problem
from slpo_jax.data.templates import Template, written_texts
from slpo_jax.data.tokenizer import ANSWER_MARK, WORDS, has_latent_tokens, load_tokenizer, words_of, words_tokenizer
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
        opened: what `config.init` is; None where parameters are random.
        read: (like, explain) -> the parameters there are. One of ours gives them in the shapes and types of `like`,
            SIM-CoT's decoder among them; a foreign one gives its decoder, if any, only if `explain` is true.
        lacks: what the checkpoint, of a language model that has not been a reasoner yet, lacks of one; "" for others.
    """

    description: Description
    template: Template
    opened: Identity | None = None
    read: Callable[..., dict[str, Any]] = lambda like=None, explain=False: {}
    lacks: str = ""

    def write(self, folder: Path) -> None:
        """Describe the reasoner in a folder: what our checkpoints are read with."""
        folder.mkdir(parents=True, exist_ok=True)
        write_description(folder, self.description, self.template)


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
        start = _random(config, architecture, problems)
    else:
        opened = identity or identify(config.init, config.base, config.lora_alpha)
        reasoner = opened.reasoner
        if isinstance(opened, Foreign) and opened.architecture is None:  # any architecture can begin with it
            reasoner = f"{architecture.name}_{opened.backbone}"
        if reasoner != config.reasoner:
            raise UserError(
                f"{key_name('config.reasoner')}: is {config.reasoner}, but {opened.source} is a {reasoner} checkpoint; "
                f"set it to that or give another {key_name('config.init')}"
            )
        start = _ours(config, opened) if isinstance(opened, Ours) else _imported(config, architecture, opened)
    model, loop = start.description.model, is_loop(config.model.scan_layers, start.description.model.n_layer)
    dtype = activation_type(config.model.dtype)
    model = dataclasses.replace(model, dtype=dtype, remat=config.model.remat, scan_layers=loop)
    return dataclasses.replace(start, description=dataclasses.replace(start.description, model=model))


def _random(config: Config, architecture: type[Architecture], problems: Callable[[], Iterable[Problem]]) -> Checkpoint:
    if not config.tokenizer:
        raise UserError("config.tokenizer: not set, and there is no config.init to take it from; give a directory")
    instance = architecture.drawn(config.model.n_embd, config.model)
    words = config.tokenizer == WORDS
    tokenizer = _words_of_problems(instance, config.prompt, problems()) if words else load_tokenizer(config.tokenizer)
    template = instance.template(tokenizer, prompt=config.prompt)
    backbone = BACKBONES[REASONERS[config.reasoner][1]]
    fields = {field.name for field in dataclasses.fields(backbone)} - {"scan_layers"}  # which is resolved below
    shapes = {name: value for name, value in vars(config.model).items() if name in fields}
    if issubclass(backbone, LlamaConfig):
        shapes["n_kv_head"] = shapes["n_kv_head"] or config.model.n_head
        shapes["n_inner"] = shapes["n_inner"] or 4 * config.model.n_embd
        shapes |= {"head_dim": config.model.n_embd // config.model.n_head, "rope_scaling": None}
    model = backbone(**shapes | {"vocab_size": len(template.tokenizer)})
    return Checkpoint(Description(instance, model), template)


def _words_of_problems(
    architecture: Architecture, prompt: PromptConfig, problems: Iterable[Problem]
) -> "PreTrainedTokenizerFast":
    """Make a tokenizer of the words of problems, and of what an architecture writes around them."""
    texts = (ANSWER_MARK, "\n", prompt.closing)
    around = architecture.template(words_tokenizer(words_of(texts)), prompt=prompt)
    return words_tokenizer(words_of((*texts, *written_texts(around, problems))))


def _ours(config: Config, opened: Ours) -> Checkpoint:
    """Start from a checkpoint of a run, or of `slpo import`."""
    description = opened.description
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else opened.tokenizer()
    template = description.architecture.template(tokenizer, prompt=config.prompt)
    if len(tokenizer) > description.model.vocab_size:
        raise UserError(
            f"{key_name('config.tokenizer')}: has {len(tokenizer)} tokens with the reasoner's and config.prompt's, "
            f"{opened.path} {description.model.vocab_size}; leave out what the checkpoint was not trained with"
        )
    if not config.tokenizer:
        template = _ended(template, description.eos_ids, description.model.vocab_size, opened.source)
    return Checkpoint(description, template, opened, lambda like=None, explain=False: opened.stored.read(like))


def _imported(config: Config, architecture: type[Architecture], opened: Foreign) -> Checkpoint:
    """Start from a foreign checkpoint."""
    if not config.tokenizer and opened.tokenizer is None:
        raise UserError(
            "config.base", f"{opened.path} comes without a tokenizer; give the base model's directory or hub id"
        )
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else opened.tokenizer()  # type: ignore[misc]
    with fitting(opened.base):
        return _fitted(config, architecture, opened, tokenizer)


def _fitted(
    config: Config, architecture: type[Architecture], opened: Foreign, tokenizer: "PreTrainedTokenizerFast"
) -> Checkpoint:
    """Return a foreign checkpoint with its shapes and tokenizer, which may be those of `config.base`."""
    tensors, source, stored = opened.tensors, opened.path, opened.shapes()
    published = bool(opened.architecture and not opened.description)
    if published:
        tensors = architecture.with_texts(tensors, opened.model, tokenizer, source)
    width = stored.n_embd
    missing = [] if tensors.head else [weight.path[0] for weight in architecture.drawn(width).heads(width)]
    plan = vocabulary_plan(
        architecture, opened.embedding, source,
        base=None if opened.has_own_model else stored.vocab_size, tokens=len(tokenizer),
        has_names=has_latent_tokens(tokenizer, architecture.markers), published=published,
        missing_head=next(iter(missing), ""),
    )  # fmt: skip
    if not opened.has_own_model:
        stored = dataclasses.replace(stored, vocab_size=opened.embedding.shape[0])
    if opened.description:
        instance = opened.description.architecture
    elif plan.lacks:
        instance = architecture.drawn(width, config.model)
    else:
        instance = architecture.found(tensors, opened.model, source)
    template = instance.template(tokenizer, plan.first_id, config.prompt)
    if not architecture.has_latents and not config.tokenizer:
        template = _ended(template, end_tokens(source, opened.model), stored.vocab_size, source)
    weights, heads = backbone_weights(stored), instance.heads(width) if tensors.head else []
    # Exports have a gate, whatever they are of.
    has_gate = tensors.gate and (architecture.has_gate or opened.description)
    if has_gate and config.gate.hidden != opened.gate_hidden:
        raise UserError(
            "config.gate.hidden", f"is {config.gate.hidden}, the gate of {source} has {opened.gate_hidden}; set it so"
        )
    gates = gate_weights(width, config.gate.hidden) if has_gate else []
    tensors_by_name = tensors.model | tensors.head | tensors.gate
    check_tree([*weights, *heads, *gates], tensors_by_name, source)
    refuse_leftovers([*weights, *heads, *gates], tensors_by_name, stored, source)
    rows = max(stored.vocab_size, len(tokenizer))
    model = dataclasses.replace(stored, vocab_size=rows)
    plain = Description(instance, model, gate=opened.gate_hidden, gate_trained=opened.gate_hidden is not None)
    base_description = opened.description or plain
    description = dataclasses.replace(base_description, model=model, config={}, rule=None, eos_ids=template.eos_ids)

    def read(like: Any = None, explain: bool = False) -> dict[str, Any]:
        tree = grow(read_tree(weights, tensors.model, source), rows, template.tokenizer)
        params = {REASONER: {"backbone": tree} | read_tree(heads, tensors.head, source)}
        if gates:
            params[GATE] = read_tree(gates, tensors.gate, source)
        if explain and tensors.decoder:
            params[DECODER] = read_decoder(tensors.decoder, stored, weights[0].name, source)
        return params

    return Checkpoint(description, template, opened, read, plan.lacks)


def _ended(template: Template, eos_ids: tuple[int, ...], rows: int, source: str) -> Template:
    """Return the template with all tokens that end what the model writes, its tokenizer's eos first.

    Args:
        eos_ids: as its files name them.
        rows: of its vocabulary.
    """
    if max(eos_ids, default=0) >= rows:
        raise UserError(f"{source}: eos_token_id {max(eos_ids)} is beyond its {rows} tokens; mend it")
    return dataclasses.replace(template, more_eos_ids=tuple(dict.fromkeys(i for i in eos_ids if i != template.eos_id)))


class VocabularyPlan(NamedTuple):
    """The meaning of the rows of a foreign checkpoint's embedding.

    Attributes:
        first_id: the id of the first of the architecture's tokens; None where the tokenizer says it.
        lacks: what a language model that has not been a reasoner yet lacks of one; "" for a reasoner's.
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
        base: rows of `config.base`, for a file without a config, which has these, or the architecture's tokens' too.
        tokens: the tokenizer's tokens.
        has_names: whether the architecture's tokens are among them.
        published: whether the tensors are a reasoner's, and no export's.
        missing_head: the first of the architecture's heads, where there are none; else "".
    Raises:
        UserError: the rows are another vocabulary's.
    """
    rows, more, after = embedding.shape[0], len(architecture.tokens), architecture.after_vocabulary
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
    has_tokens = not more or has_names or rows == tokens + more
    lacks = missing_head or ("" if has_tokens else "special tokens")
    if published and (has_tokens or after):
        lacks = ""
    return VocabularyPlan(rows - spare - (0 if lacks else more) if after else None, lacks)


def grow(tree: dict[str, Any], rows: int, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Grow a backbone's parameters to as many vocabulary rows as the tokenizer needs.

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

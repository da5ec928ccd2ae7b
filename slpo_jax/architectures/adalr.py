"""AdaLR (2511.21581): the next input is a filter of the last hidden state, and two tokens decide when to stop.

Its program writes a thought as tokens: `<|CONTINUE|>` for each latent, which is fed in the place of its embedding, and
`<|STOP|>` at the end, for which `<END>` is fed. Here `<END>` is the end marker, as of any reasoner. Of the two other
tokens, only the rows of the head are used.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from slpo_jax.architectures.architecture import (
    NO_PROMPT,
    Architecture,
    Unwrapped,
    refuse_others,
)
from slpo_jax.architectures.codi import Projecting
from slpo_jax.architectures.tensors import Stored
from slpo_jax.architectures.weights import EMBEDDING, linear, norm, with_prefix
from slpo_jax.data.templates import Template
from slpo_jax.data.tokenizer import add_reasoner_tokens, add_words
from slpo_jax.errors import UserError
from slpo_jax.policy.latent_policies.adalr import CONTINUE, STOP

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

START = "<START>"
END = "<END>"
ANSWER = " The answer is:"
SETTINGS = "_inserted_LatentThinkingModelSettings"
"""The key of config.json under which its program writes its settings."""

# Settings that don't change how latents are made. The values of all other settings are checked.
_WITHOUT_EFFECT = {
    "disable_forward_input_embeds", "disable_input_past_key_values", "disable_checkpointing_cache_update",
    "detach_binary_head_inputs", "debug_mode", "unused_token_ids", "_generation_mode",
}  # fmt: skip
_TOKEN_OF = {
    "start_token_id": START,
    "end_token_id": END,
    "continue_token_id": CONTINUE,
    "stop_token_id": STOP,
}
# In `lora_mode`, a tensor beside the model has each row that is zero in a table. The tensors of the first dict are
# there if embedding and head are one table, those of the other two if they are two.
_ROWS_OF_BOTH = {
    "_start_embed.weight": START, "_end_embed.weight": END,
    "_continue_embed.weight": CONTINUE, "_stop_embed.weight": STOP,
}  # fmt: skip
_INPUT_ROWS = {"_start_embed_in.weight": START, "_end_embed_in.weight": END}
_HEAD_ROWS = {
    "_start_embed_out.weight": START, "_continue_embed_out.weight": CONTINUE, "_stop_embed_out.weight": STOP,
}  # fmt: skip
_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Adalr(Architecture):
    """A filter, built as CODI's projector: Linear, GELU, Linear, LayerNorm, each of width D.

    Its program writes the language model under `_base_model.` and the filter under `recurrent_filter.`; in `lora_mode`
    the rows of its four tokens lie beside the model, and are zero in it.
    """

    name = "adalr"
    title = "AdaLR"
    default_recipe = "adalr"
    further_latents = 5
    # These recipes teach latents, but not when a thought stops.
    not_taught_by = (
        "curriculum", "distil", "silent", "simcot", "colar", "regular", "frontier", "latent_sft",
    )  # fmt: skip
    has_gate = False
    latents = 32  # at most; published: as many as there may be tokens
    tokens = (START, END, CONTINUE, STOP)
    markers = (START, END)
    head_prefix = "recurrent_filter."
    about_head = (
        "`recurrent_filter.*`: Linear, GELU, Linear, LayerNorm, from the last hidden state to the next latent. "
        f"There is one while the logit of `{CONTINUE}` is at least that of `{STOP}`"
    )
    layers = (
        ("linear", "recurrent_filter.input_layer"), ("gelu", "none"),
        ("linear", "recurrent_filter.output_layer"), ("norm", "recurrent_filter.norm"),
    )  # fmt: skip

    def module(self, backbone):
        return Projecting(backbone, backbone.config.n_embd)

    def template(self, tokenizer, first_id=None, prompt=NO_PROMPT):
        """Lay out question + start | latents | end + steps + " The answer is: 72" + eos."""
        add_words(tokenizer, ANSWER)
        tokens = add_reasoner_tokens(tokenizer, self.tokens, first_id, self.markers)
        ids = tokenizer.get_vocab()
        return Template(
            **tokens,
            tokenizer=tokenizer,
            answer_style=prompt.marked_style("last_number"),
            question_text=str,
            step_text=lambda step, first: step,
            answer_text=lambda answer: f"{ANSWER} {answer}",
            impossible_ids=(ids[END], ids[CONTINUE], ids[STOP]),
            trained_ids=tuple(ids[token] for token in self.tokens),
        )

    def heads(self, width):
        shape = (width, width)
        return [
            *linear(("projector", "fc_in"), "recurrent_filter.input_layer", shape),
            *linear(("projector", "fc_out"), "recurrent_filter.output_layer", shape),
            *norm(("projector", "norm"), "recurrent_filter.norm", width),
        ]

    @classmethod
    def unwrap(cls, tensors, source):
        model = with_prefix(tensors, "_base_model.")
        if not model:
            return super().unwrap(tensors, source)
        rows = (*_ROWS_OF_BOTH, *_INPUT_ROWS, *_HEAD_ROWS)
        known = ("_base_model.", cls.head_prefix, *rows)
        refuse_others(tensors, known, cls.title, source)
        own = [name for name in tensors if not name.startswith("_base_model.")]
        return Unwrapped(model, {name: tensors[name] for name in own})

    @classmethod
    def with_texts(cls, unwrapped, config, tokenizer, source):
        """Check the program's settings, and put the rows of its tokens that lie beside the model into it."""
        settings = _settings(config, source)
        ids = _token_ids(settings, tokenizer, source)
        if not settings.get("lora_mode", False):
            return unwrapped

        # The tensors that are there show whether embedding and head are one table.
        beside = unwrapped.head
        tied = any(name in beside for name in _ROWS_OF_BOTH)
        input_rows = _ROWS_OF_BOTH if tied else _INPUT_ROWS
        head_rows = _ROWS_OF_BOTH if tied else _HEAD_ROWS

        # Put the rows into both; the file of a tied model need not have the head.
        model = dict(unwrapped.model)
        table = next(name for name in EMBEDDING.values() if name in model)
        if not tied and _HEAD not in model:
            raise UserError(
                f"{source}: tensor {_HEAD} is missing; give the whole checkpoint of this model"
            )
        model[table] = _with_rows(model[table], beside, input_rows, ids, source)
        if _HEAD in model:
            model[_HEAD] = _with_rows(model[_HEAD], beside, head_rows, ids, source)

        used = {*input_rows, *head_rows}
        head = {name: tensor for name, tensor in beside.items() if name not in used}
        return unwrapped._replace(model=model, head=head)

    @classmethod
    def published_settings(cls, unwrapped, config):
        chosen: dict[str, Any] = {"latent_policy.name": "adalr"}
        # A value that isn't valid is refused in `with_texts`.
        settings = config.get(SETTINGS)
        if isinstance(settings, Mapping):
            temperature = settings.get("binary_head_temp")
            if _is_temperature(temperature):
                chosen["latent_policy.adalr.temperature"] = float(temperature)
        return chosen


def _settings(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the settings that AdaLR's program wrote into a checkpoint's config.json.

    Raises:
        UserError: they are missing, or have an unknown key or a value that isn't supported.
    """
    settings = config.get(SETTINGS)
    if not isinstance(settings, Mapping):
        raise UserError(
            f"{source}: config.json has no {SETTINGS}; give an AdaLR checkpoint with its own config.json"
        )

    # Each setting must be known.
    supported: dict[str, tuple[Any, ...]] = {
        "recurrent_filter_mode": ("MLP",),
        "add_latent_to_end": (False, None),
        "lora_mode": (True, False),
    }
    known = {*_WITHOUT_EFFECT, *_TOKEN_OF, *supported, "binary_head_temp"}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise UserError(
            f"{source}: {SETTINGS}.{unknown[0]} in config.json is not known here; upgrade slpo_jax"
        )

    # Those that change how latents are made must have a value that we compute.
    defaults = {"lora_mode": False}
    for key, values in supported.items():
        value = settings.get(key, defaults.get(key))
        if value not in values:
            raise UserError(
                f"{source}: {SETTINGS}.{key} = {settings.get(key)!r} in config.json is not supported, only "
                f"{values[0]!r}; give another checkpoint"
            )
    temperature = settings.get("binary_head_temp")
    if temperature is not None and not _is_temperature(temperature):
        raise UserError(
            f"{source}: {SETTINGS}.binary_head_temp = {temperature!r} in config.json is not valid; give a number "
            "above 0"
        )
    return settings


def _is_temperature(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 < value < math.inf


def _token_ids(
    settings: Mapping[str, Any], tokenizer: "PreTrainedTokenizerFast", source: str
) -> dict[str, int]:
    """Return the ids of the four tokens, on which the settings and the tokenizer must agree.

    Raises:
        UserError: they don't agree.
    """
    vocabulary = tokenizer.get_vocab()
    ids = {}
    for key, token in _TOKEN_OF.items():
        if settings.get(key) != vocabulary.get(token) or token not in vocabulary:
            raise UserError(
                f"{source}: {SETTINGS}.{key} in config.json is {settings.get(key)!r}, but the tokenizer's {token} is "
                f"{vocabulary.get(token)}; give the tokenizer that the checkpoint was trained with"
            )
        ids[token] = vocabulary[token]
    return ids


def _with_rows(
    table: Stored,
    beside: Mapping[str, Stored],
    rows: Mapping[str, str],
    ids: Mapping[str, int],
    source: str,
) -> Stored:
    """Return a table [V, D] with rows that lie beside it, [1, D] each.

    Args:
        beside: the tensors beside the model.
        rows: the token of each such tensor's row, by the tensor's name.
        ids: the ids of the tokens.
    Raises:
        UserError: a tensor is missing or doesn't fit; and when the table is read: its own row is not zero.
    """
    # Check the shapes now.
    width = table.shape[1]
    for name, token in rows.items():
        if name not in beside:
            raise UserError(
                f"{source}: tensor {name} is missing, and {SETTINGS} in config.json has lora_mode; give the whole "
                "checkpoint"
            )
        if tuple(beside[name].shape) != (1, width) or ids[token] >= table.shape[0]:
            raise UserError(
                f"{source}: tensor {name} has shape {list(beside[name].shape)} and is row {ids[token]} of {table.name} "
                f"{list(table.shape)}; give the config and tokenizer that the checkpoint was trained with"
            )

    # Put the rows in when the table is read.
    def read() -> np.ndarray:
        array = np.array(table.read())
        for name, token in rows.items():
            if np.any(array[ids[token]]):
                raise UserError(
                    f"{source}: row {ids[token]} ({token}) of tensor {table.name} is not zero, as it is where {name} "
                    "lies beside it; the checkpoint is corrupt, fetch it again"
                )
            array[ids[token]] = beside[name].read()[0]
        return array

    return Stored(table.name, table.shape, read)

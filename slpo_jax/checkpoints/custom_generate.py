"""`generate` of a latent reasoner in PyTorch and transformers alone: an export of slpo_jax has this file.

There it is custom_generate/generate.py, which `from_pretrained(.., trust_remote_code=True)` makes the model's own
`generate`. It is no model class (`auto_map`), so that the folder stays a GPT-2 or Llama that every program opens. Where
the file is not trusted, generation_config.json has transformers' `generate` fail, not answer without a thought.

Array names end with axes: B rows, P slots of prompts, L positions, T latents, D width.
"""

import copy
import dataclasses
import inspect
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import DynamicCache
from transformers.utils import ModelOutput, cached_file

SIDE_FILE = "reasoner.safetensors"  # weights of the gate and of what makes latents
_side_files: weakref.WeakKeyDictionary[Any, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class Thought(ModelOutput):
    """A thought and the text after it; with num_return_sequences=N each prompt has N rows one after the other.

    Attributes:
        sequences: int [B, P + A], prompts and answers; what follows an end token is padding. Latents are no tokens.
        latents: [B, T, D], zeros where a row had stopped.
        lengths: int [B], each row's number of latents.
        stop_probabilities: [B, T] of the gate at each latent, nan where a row had stopped; None without a gate.
    """

    sequences: torch.Tensor | None = None
    latents: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    stop_probabilities: torch.Tensor | None = None


@torch.no_grad()
def generate(inputs=None, generation_config=None, *, model, input_ids=None, attention_mask=None, **others):
    """Think and stop without noise, and have transformers' own `generate` write the answer, greedily unless told to.

    Args:
        inputs, input_ids: int [B, P], prompts as the tokenizer's chat template makes them, padded on the left.
        generation_config: in the place of the keyword arguments.
        attention_mask: [B, P], 0 where there is padding; by default where a row begins with the pad token.
        others: `max_latents`; `stop_threshold` of the gate's stop probability, None for `max_latents` in every row;
            `max_new_tokens` of an answer, at most as many as there are positions for; `return_dict_in_generate`; and
            what transformers' `generate` takes to write. generation_config.json has their defaults.
    Returns:
        int [B, P + A], prompts and answers, or with return_dict_in_generate=True a `Thought`.
    Raises:
        ValueError: the prompt is none of the chat template's, too long, or has a word that the tokenizer doesn't know;
            or the weights give what is no finite number.
    """
    settings, model_settings = copy.deepcopy(model.generation_config), model.generation_config
    arguments = ({} if generation_config is None else generation_config.to_diff_dict()) | others
    arguments |= dict.fromkeys(("bad_words_ids", "custom_generate", "trust_remote_code"))
    more = settings.update(**arguments)
    if settings.do_sample:
        settings.top_k = arguments.get("top_k") or 0  # where transformers' default is not all tokens
    as_thought, settings.return_dict_in_generate = settings.return_dict_in_generate, False
    ids_BP = (inputs if input_ids is None else input_ids).to(model.device)
    if attention_mask is None:
        attention_mask = (ids_BP != settings.pad_token_id).cumsum(dim=1) > 0
    valid_BP = attention_mask.to(model.device).bool()
    _check(model, settings, ids_BP, valid_BP)
    embed = model.get_input_embeddings()
    latents_BTD, stops_BT, lengths_B = _think(model, settings, embed(ids_BP), valid_BP)
    closing_BE = ids_BP.new_tensor(settings.closing_ids, dtype=torch.long).expand(len(ids_BP), -1)
    thinking_BT = torch.arange(latents_BTD.shape[1], device=model.device) < lengths_B[:, None]
    model.generation_config = settings
    try:
        answers = type(model).generate(
            model,
            inputs_embeds=torch.cat([embed(ids_BP), latents_BTD, embed(closing_BE)], dim=1),
            attention_mask=torch.cat([valid_BP, thinking_BT, torch.ones_like(closing_BE)], dim=1).long(),
            **{name: value for name, value in more.items() if value is not None and name in others},
        )
    finally:
        model.generation_config = model_settings
    rows = ids_BP, latents_BTD, lengths_B, stops_BT
    ids_BP, *thought = (x.repeat_interleave(len(answers) // len(ids_BP), dim=0) for x in rows)
    sequences = torch.cat([ids_BP, answers], dim=1)
    if not as_thought:
        return sequences
    return Thought(sequences, *thought[:2], thought[2] if settings.gate_layers else None)


def _check(model, settings, ids_BP, valid_BP) -> None:
    """Fail on what would be answered wrongly without a word; lower max_new_tokens where there are too few positions."""
    start, most = settings.prompt_end_id, model.config.max_position_embeddings
    if settings.max_latents < 0 or not 0 <= (settings.stop_threshold or 0) <= 1:
        raise ValueError("generate: max_latents is at least 0, and stop_threshold from 0 to 1")
    if settings.stop_threshold is not None and not settings.gate_layers:
        raise ValueError("generate: stop_threshold has no effect without a gate; leave it out, or set max_latents")
    if not (valid_BP[:, -1] & ((ids_BP[:, -1] == start) | (start is None))).all():
        raise ValueError(
            f"generate: a prompt ends with {'no padding' if start is None else f'token {start}'}, after which latents "
            "come; make it with "
            "tokenizer.apply_chat_template, of several ones with padding=True"
        )
    if settings.unknown_token_id is not None and (valid_BP & (ids_BP == settings.unknown_token_id)).any():
        raise ValueError("generate: a prompt has a word that the tokenizer doesn't know; use words that it knows")
    slots = int(valid_BP.sum(dim=1).max()) + settings.max_latents + max(len(settings.closing_ids) - 1, 0)
    if slots >= most:
        raise ValueError(
            f"generate: prompt and {settings.max_latents} latents take {slots} positions, the model has {most} with "
            "the answer's; shorten the prompt"
        )
    if settings.max_new_tokens > most - slots:
        settings.max_new_tokens = most - slots
        warnings.warn(f"generate: max_new_tokens is {most - slots}, for which the model has positions", stacklevel=3)


def _reader(model, rows: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return (inputs [B, L, D], valid [B, L]) -> hidden state [B, D] of the last position; calls go on."""
    valid_BS = torch.zeros(rows, 0, dtype=torch.bool, device=model.device)
    parameters = inspect.signature(model.base_model.forward).parameters
    cached = {"cache" if "cache" in parameters else "past_key_values": DynamicCache(), "use_cache": True}

    def feed(inputs_BLD, valid_BL):
        nonlocal valid_BS
        valid_BS = torch.cat([valid_BS, valid_BL], dim=1)
        positions_BS = (valid_BS.cumsum(dim=1) - 1).clamp(min=0)
        hidden_BLD = model.base_model(
            inputs_embeds=inputs_BLD,
            attention_mask=valid_BS.long(),
            position_ids=positions_BS[:, -inputs_BLD.shape[1] :],
            **cached,
        ).last_hidden_state
        return _finite(hidden_BLD[:, -1])

    return feed


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Refuse NaN, which reaches no threshold and is the likeliest token, and infinity: both mean nothing."""
    if not values.isfinite().all():
        raise ValueError("generate: a hidden state or stop logit is no finite number; the weights are damaged, or too "
                         "large for their dtype")  # fmt: skip
    return values


def _think(model, settings, inputs_BPD, valid_BP):
    """Feed latents until every row has stopped; return latents [B, T, D], stop probabilities [B, T], lengths [B]."""
    weights, feed = _side_weights(model, settings), _reader(model, len(inputs_BPD))
    hidden_BD = feed(inputs_BPD, valid_BP)
    lengths_B = torch.zeros(len(hidden_BD), dtype=torch.long, device=hidden_BD.device)
    active_B = (lengths_B < settings.max_latents) & ~_halts(model, settings, hidden_BD, lengths_B)
    latents, stops = [hidden_BD[:, None][:, :0]], [hidden_BD[:, :0].float()]
    while active_B.any():
        latent_BD = _through(settings.latent_layers, weights, hidden_BD)
        latents.append((latent_BD * active_B[:, None])[:, None])
        lengths_B = lengths_B + active_B
        stopping_B = lengths_B == settings.max_latents
        if settings.gate_layers:
            stop_B1 = _finite(_through(settings.gate_layers, weights, latent_BD.float())).sigmoid()
            stops.append(stop_B1.masked_fill(~active_B[:, None], torch.nan))
            if settings.stop_threshold is not None:
                stopping_B = stopping_B | (stop_B1[:, 0] >= settings.stop_threshold)
        hidden_BD = feed(latent_BD[:, None], active_B[:, None])
        active_B = active_B & ~stopping_B & ~_halts(model, settings, hidden_BD, lengths_B)
    return torch.cat(latents, dim=1), torch.cat(stops, dim=1), lengths_B


def _halts(model, settings, hidden_BD, lengths_B) -> torch.Tensor:
    """Tell whether thoughts of these lengths are over: where the likeliest token is the one that ends them.

    CoLaR's compares it with all tokens, AdaLR's with one alone.
    """
    if settings.halting_token_id is None:
        return torch.zeros_like(lengths_B, dtype=torch.bool)
    logits_BV = model.get_output_embeddings()(hidden_BD)
    if settings.going_on_token_id is None:
        says_B = logits_BV.argmax(dim=-1) == settings.halting_token_id
    else:
        says_B = logits_BV[:, settings.halting_token_id] > logits_BV[:, settings.going_on_token_id]
    return says_B & (lengths_B >= settings.halting_least)


def _through(layers: list[list[Any]], weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Run [B, D] through layers, each a kind and the name of its weights or its setting."""
    for kind, detail in layers:
        if kind == "gelu":
            x = functional.gelu(x, approximate=detail)
        elif kind == "scale":
            x = x * detail
        else:
            weight, bias = (weights[f"{detail}.{part}"].to(x) for part in ("weight", "bias"))
            norms = kind == "norm"
            x = functional.layer_norm(x, weight.shape, weight, bias) if norms else functional.linear(x, weight, bias)
    return x


def _side_weights(model, settings) -> dict[str, torch.Tensor]:
    """Read the tensors beside the language model's, of the same revision, once."""
    if model not in _side_files:
        needed = settings.latent_layers or settings.gate_layers
        commit = re.search("[0-9a-f]{40}", __file__)  # of this very file, if it is the hub's
        path = cached_file(model.name_or_path, SIDE_FILE, revision=commit and commit[0]) if needed else None
        _side_files[model] = load_file(path, device=str(model.device)) if path else {}
    return _side_files[model]

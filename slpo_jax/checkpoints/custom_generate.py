"""`generate` of a latent reasoner in PyTorch and transformers alone: an export of slpo_jax has this file.

There it is custom_generate/generate.py, which `from_pretrained(.., trust_remote_code=True)` makes the model's own
`generate`. It is no model class (`auto_map`), so that the folder stays a GPT-2 or Llama that every program opens. Where
the file is not trusted, generation_config.json has transformers' `generate` fail, not answer without a thought.

Array names end with axes: B rows, P slots of prompts, L positions, T latents, D width, V tokens.
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
from transformers import AutoTokenizer, DynamicCache, TopPLogitsWarper
from transformers.utils import ModelOutput, cached_file

SIDE_FILE = "reasoner.safetensors"  # weights of the gate and of what makes latents
_SAMPLING = ("temperature", "top_p", "num_return_sequences")
_SETTINGS = ("max_latents", "stop_threshold", "max_new_tokens", "return_dict_in_generate", "do_sample", *_SAMPLING)
_AS_IT_IS = {"num_beams": 1, "use_cache": True}  # may be said
_OF_THE_CALL = ("custom_generate", "trust_remote_code")
_side_files: weakref.WeakKeyDictionary[Any, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class Thought(ModelOutput):
    """What was thought and written; with num_return_sequences=N each prompt has N rows one after the other.

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
    """Think, stop and answer.

    The thought has no noise. The answer is greedy, or with do_sample=True drawn by torch's generator: at a
    `temperature`, from all tokens or from the likeliest that have `top_p` of the probability.

    Args:
        inputs, input_ids: int [B, P], prompts as the tokenizer's chat template makes them, padded on the left.
        generation_config: in the place of the keyword arguments.
        attention_mask: [B, P], 0 where there is padding; by default where a row begins with the pad token.
        others: `max_latents`; `stop_threshold` of the gate's stop probability, None for `max_latents` in every row;
            `max_new_tokens` of an answer; `do_sample`, `temperature`, `top_p`, and `num_return_sequences` of each
            prompt; `return_dict_in_generate`. generation_config.json has their defaults. What `generation_config` has
            for max_new_tokens, such as a pipeline's own, is lowered to what there are positions for.
    Returns:
        int [B, P + A], prompts and answers, or with return_dict_in_generate=True a `Thought`. A warning shows questions
        of which the tokenizer doesn't know a word.
    Raises:
        ValueError: the prompt is none of the chat template's, or too long, something else is asked for, or the weights
            give NaN.
    """
    settings = _settings(model, generation_config, others)
    ids_BP = (inputs if input_ids is None else input_ids).to(model.device)
    if attention_mask is None:
        attention_mask = (ids_BP != settings.pad_token_id).cumsum(dim=1) > 0
    valid_BP = attention_mask.to(model.device).bool()
    _check(model, settings, ids_BP, valid_BP, lowers="max_new_tokens" not in others and generation_config is not None)
    _warn_of_unknown(model, settings, ids_BP, valid_BP)
    ids_BP, valid_BP = (x.repeat_interleave(settings.num_return_sequences, dim=0) for x in (ids_BP, valid_BP))
    feed = _reader(model, len(ids_BP))
    hidden_BD = feed(model.get_input_embeddings()(ids_BP), valid_BP)
    latents_BTD, stops_BT, lengths_B = _think(model, settings, feed, hidden_BD)
    sequences = torch.cat([ids_BP, _answer(model, settings, feed, len(ids_BP))], dim=1)
    if not settings.return_dict_in_generate:
        return sequences
    return Thought(sequences, latents_BTD, lengths_B, stops_BT if settings.gate_layers else None)


def _settings(model, given, others: dict[str, Any]):
    """The reasoner's own settings, with what was asked for."""
    settings = copy.deepcopy(model.generation_config)
    own = settings.to_dict() | _AS_IT_IS
    for name, value in ((given.to_diff_dict() if given is not None else {}) | others).items():
        said = value is not None and value is not False and name not in _OF_THE_CALL
        if name in _SETTINGS and (value is not None or name == "stop_threshold"):
            setattr(settings, name, value)
        elif said and not (name in own and value == own[name]):
            raise ValueError(f"generate: {name} has no effect on a latent reasoner; leave it out")
    for name in _SAMPLING:
        setattr(settings, name, 1 if getattr(settings, name) is None else getattr(settings, name))
        # A pipeline's configuration has a temperature even where it is told not to sample.
        asked = settings.num_return_sequences if name == "num_return_sequences" else others.get(name)
        if not settings.do_sample and asked not in (None, 1):
            raise ValueError(f"generate: {name} has no effect on greedy answers; set do_sample=True, or leave it out")
    if settings.temperature <= 0 or not 0 < settings.top_p <= 1 or settings.num_return_sequences < 1:
        raise ValueError("generate: temperature is above 0, top_p above 0 to 1, and num_return_sequences at least 1")
    threshold = settings.stop_threshold
    if threshold is not None and not settings.gate_layers:
        raise ValueError("generate: stop_threshold has no effect without a gate; leave it out, or set max_latents")
    if settings.max_latents < 0 or settings.max_new_tokens < 1 or not 0 <= (threshold or 0) <= 1:
        raise ValueError("generate: max_latents is at least 0, max_new_tokens 1, and stop_threshold from 0 to 1")
    return settings


def _check(model, settings, ids_BP, valid_BP, lowers: bool) -> None:
    """Fail on what would be answered wrongly without a word.

    Args:
        lowers: max_new_tokens, rather, where there are too few positions.
    """
    start, most = model.config.latent_start_id, model.config.max_position_embeddings
    if not (valid_BP[:, -1] & (ids_BP[:, -1] == start)).all():
        raise ValueError(
            f"generate: a prompt ends with token {start}, after which latents come; make it with "
            "tokenizer.apply_chat_template, of several ones with padding=True"
        )
    slots = int(valid_BP.sum(dim=1).max()) + settings.max_latents + settings.max_new_tokens
    if lowers and most < slots < most + settings.max_new_tokens:
        settings.max_new_tokens -= slots - most
        lowered = f"generate: max_new_tokens is {settings.max_new_tokens}, for which the model has positions"
        warnings.warn(lowered, stacklevel=4)
    elif slots > most:
        raise ValueError(
            f"generate: prompt, {settings.max_latents} latents and {settings.max_new_tokens} tokens of the answer are "
            f"{slots} positions, the model has {most}; shorten the prompt, or lower max_new_tokens"
        )


def _warn_of_unknown(model, settings, ids_BP, valid_BP) -> None:
    """Show the questions of which the tokenizer lacks a word, with its mark in the place of that."""
    unknown_BP = valid_BP & (ids_BP == (-1 if settings.unknown_token_id is None else settings.unknown_token_id))
    if not unknown_BP.any():
        return
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path, **_revision())
    for row in unknown_BP.any(dim=1).nonzero()[:, 0]:
        text = tokenizer.decode(ids_BP[row][valid_BP[row]][:-1])
        said = f"generate: a word is unknown to the tokenizer where this has {tokenizer.unk_token}: {text!r}"
        warnings.warn(said, stacklevel=4)


def _reader(model, rows: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(inputs [B, L, D], valid [B, L]) -> hidden state [B, D] of the last position; calls go on from each other."""
    valid_BS = torch.zeros(rows, 0, dtype=torch.bool, device=model.device)
    known = inspect.signature(model.base_model.forward).parameters
    cached = {"cache" if "cache" in known else "past_key_values": DynamicCache(), "use_cache": True}

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
        return hidden_BLD[:, -1]

    return feed


def _think(model, settings, feed, hidden_BD):
    """Feed latents until every row has stopped: (latents [B, T, D], stop probabilities [B, T], lengths [B])."""
    weights = _side_weights(model, settings)
    active_B = torch.full((len(hidden_BD),), settings.max_latents > 0, device=hidden_BD.device)
    active_B &= ~_halts(model, settings, hidden_BD, torch.zeros_like(active_B, dtype=torch.long))
    latents, stops = [hidden_BD[:, None][:, :0]], [hidden_BD[:, :0].float()]
    lengths_B = torch.zeros_like(active_B, dtype=torch.long)
    while active_B.any():
        latent_BD = _through(settings.latent_layers, weights, hidden_BD)
        latents.append((latent_BD * active_B[:, None])[:, None])
        lengths_B = lengths_B + active_B
        stopping_B = lengths_B == settings.max_latents
        if settings.gate_layers:
            stop_B1 = _through(settings.gate_layers, weights, latent_BD.float()).sigmoid()
            _check_numbers("stop probability", stop_B1[active_B])
            stops.append(stop_B1.masked_fill(~active_B[:, None], torch.nan))
            if settings.stop_threshold is not None:
                stopping_B = stopping_B | (stop_B1[:, 0] >= settings.stop_threshold)
        hidden_BD = feed(latent_BD[:, None], active_B[:, None])
        active_B = active_B & ~stopping_B & ~_halts(model, settings, hidden_BD, lengths_B)
    return torch.cat(latents, dim=1), torch.cat(stops, dim=1), lengths_B


def _halts(model, settings, hidden_BD, lengths_B) -> torch.Tensor:
    """Whether thoughts of these lengths are over: CoLaR's, where the likeliest token is the one that ends them."""
    if settings.halting_token_id is None:
        return torch.zeros_like(lengths_B, dtype=torch.bool)
    says_B = model.get_output_embeddings()(hidden_BD).argmax(dim=-1) == settings.halting_token_id
    return says_B & (lengths_B >= settings.halting_least)


def _answer(model, settings, feed, rows: int) -> torch.Tensor:
    """Tokens [B, A] after the end marker, up to an end token, then padding."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    eos_ids = torch.tensor(settings.eos_token_id, device=model.device).flatten()
    token_B = torch.full((rows,), model.config.latent_end_id, device=model.device)
    ended_B, tokens = torch.zeros_like(token_B, dtype=torch.bool), list[torch.Tensor]()
    while len(tokens) < settings.max_new_tokens and not ended_B.all():
        logits_BV = head(feed(embed(token_B)[:, None], ~ended_B[:, None]))
        logits_BV[:, settings.suppress_tokens or []] = -torch.inf
        _check_numbers("logit", logits_BV[~ended_B])
        said_B = _drawn(settings, logits_BV) if settings.do_sample else logits_BV.argmax(dim=-1)
        token_B = said_B.masked_fill(ended_B, settings.pad_token_id)
        tokens.append(token_B)
        ended_B = ended_B | torch.isin(token_B, eos_ids)
    return torch.stack(tokens, dim=1)


def _check_numbers(what: str, found: torch.Tensor) -> None:
    """NaN reaches no threshold and is the likeliest token: the thought would not end, the answer mean nothing."""
    if found.isnan().any():
        raise ValueError(f"generate: a {what} is NaN; the weights are damaged, or too large for their dtype")


def _drawn(settings, logits_BV: torch.Tensor) -> torch.Tensor:
    """Tokens [B] at the temperature, of the fewest that have top_p of the probability."""
    logits_BV = logits_BV.float() / settings.temperature
    if settings.top_p < 1:
        logits_BV = TopPLogitsWarper(settings.top_p)(None, logits_BV)
    return torch.multinomial(logits_BV.softmax(dim=-1), 1)[:, 0]


def _through(layers: list[list[Any]], weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """[B, D] through layers, each a kind and the name of its weights or its setting."""
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
    """The tensors beside the language model's, read once."""
    if model not in _side_files:
        needed = settings.latent_layers or settings.gate_layers
        path = cached_file(model.name_or_path, SIDE_FILE, **_revision()) if needed else None
        _side_files[model] = load_file(path, device=str(model.device)) if path else {}
    return _side_files[model]


def _revision() -> dict[str, str]:
    """That of this very file, if it is the hub's."""
    commit = re.search("[0-9a-f]{40}", __file__)
    return {"revision": commit[0]} if commit else {}

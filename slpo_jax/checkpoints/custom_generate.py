"""`generate` and `forward` of a latent reasoner in PyTorch and transformers alone; each export of slpo_jax has a copy.

The copy is custom_generate/generate.py. `from_pretrained(…, trust_remote_code=True)` makes it the model's own
`generate`, and `AutoModelForCausalLM` then opens its classes (`auto_map` in config.json). They are transformers' own
classes, by the same names, with another `forward`: the folder stays a GPT-2 or Llama that every program opens. Where
the file is not trusted, generation_config.json makes transformers' `generate` fail, not answer without a thought.

Array names end with axes: B rows, P slots of prompts, L positions, T latents, E tokens that close a thought, S slots of
prompt, latents, closing tokens and text, D width, V vocabulary.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional
from transformers import DynamicCache
from transformers.utils import ModelOutput, cached_file

SIDE_FILE = (
    "reasoner.safetensors"  # weights of the gate and of the layers that make latents
)
_side_files: weakref.WeakKeyDictionary[Any, dict[str, torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass
class Thought(ModelOutput):
    """A thought and the text after it; with num_return_sequences=N each prompt has N rows one after the other.

    Attributes:
        sequences: int [B, P + A], prompts and answers; after an end token comes padding. Latents are not tokens.
        latents: [B, T, D], zeros where a row had stopped.
        lengths: int [B], each row's number of latents.
        stop_probabilities: [B, T] of the gate at each latent, nan where a row had stopped; None without a gate.
        scores, logits, hidden_states, attentions, sequences_scores, beam_indices: of the answers, as transformers'
            `generate` returns them; None where they were not asked for.
    """

    sequences: torch.Tensor | None = None
    latents: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    stop_probabilities: torch.Tensor | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    hidden_states: tuple[tuple[torch.Tensor, ...], ...] | None = None
    attentions: tuple[tuple[torch.Tensor, ...], ...] | None = None
    sequences_scores: torch.Tensor | None = None
    beam_indices: torch.Tensor | None = None


_OF_THE_ANSWERS = (
    "scores",
    "logits",
    "hidden_states",
    "attentions",
    "sequences_scores",
    "beam_indices",
)


_REFUSED = (
    "assistant_model",
    "guidance_scale",
    "inputs_embeds",
    "position_ids",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "token_type_ids",
)
"""Arguments of transformers' `generate` that make no sense with a thought before the answer, or go wrong after one."""

_locks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _one_at_a_time(function: Callable) -> Callable:
    """Have a model's calls from several threads wait for each other: while it writes, the model has other settings."""

    @functools.wraps(function)
    def call(*arguments, model, **named):
        lock = _locks.setdefault(model, threading.RLock())
        with lock:
            return function(*arguments, model=model, **named)

    return call


@_one_at_a_time
@torch.no_grad()
def generate(
    inputs=None,
    generation_config=None,
    *,
    model,
    input_ids=None,
    attention_mask=None,
    **others,
):
    """Think, stop and write without dropout: transformers' own `generate` writes the answer, greedily unless told to.

    Args:
        inputs, input_ids: int [B, P], prompts as the tokenizer's chat template makes them, padded on the left.
        generation_config: in the place of the keyword arguments.
        attention_mask: [B, P], 0 where there is padding; by default where a row begins with the pad token.
        others: `max_latents`; `stop_threshold` of the gate's stop probability, None for `max_latents` in every row;
            `max_new_tokens` of an answer, at most as many as there are positions for; `return_dict_in_generate`; and
            the arguments of transformers' `generate` for writing. generation_config.json has their defaults.
    Returns:
        int [B, P + A], prompts and answers, or with return_dict_in_generate=True a `Thought`.
    Raises:
        ValueError: the prompt isn't the chat template's, is too long, or has a word that the tokenizer doesn't know;
            or the weights give values that aren't finite.
    """
    # Some programs, as TRL does with a path, open transformers' own class with this `generate`.
    if "_reasoner" not in model.base_model.__dict__:
        _take_body(model)

    # The caller's settings go over the export's.
    settings = copy.deepcopy(model.generation_config)
    if not hasattr(settings, "prompt_end_id"):
        raise _request_error(
            "model.generation_config is another one, which does not say how the model thinks; keep the export's, and "
            "give yours to generate(generation_config=…)"
        )
    model_settings = model.generation_config
    arguments: dict[str, Any] = {}
    if generation_config is not None:
        arguments = generation_config.to_diff_dict()
    arguments |= others
    arguments |= dict.fromkeys(("custom_generate", "trust_remote_code"))
    # A text makes transformers' own `generate` fail; this one needs no such guard.
    for name in ("sequence_bias", "bad_words_ids"):
        if isinstance(arguments.get(name, ""), str):
            arguments[name] = None
    more = settings.update(**arguments)
    # Sampling is from all tokens, which is not transformers' default: None, or 50 before version 5.
    unset = transformers.GenerationConfig().top_k
    if "top_k" not in arguments and settings.top_k == unset:
        settings.top_k = None
    if settings.do_sample:
        settings.top_k = settings.top_k or 0
    as_thought = settings.return_dict_in_generate
    settings.return_dict_in_generate = True

    # A thought is made of the tokens of prompts, and has positions of its own.
    ids_BP = inputs if input_ids is None else input_ids
    if not isinstance(ids_BP, torch.Tensor) or ids_BP.dim() != 2:
        raise _request_error(
            "takes the tokens of prompts, input_ids [B, P]; make them with tokenizer.apply_chat_template of chats that "
            "have a message from the user, and give what it returns as keyword arguments: generate(**prompts)"
        )
    for name in _REFUSED:
        if arguments.get(name) is not None:
            raise _request_error(f"takes no {name}; leave it out")
    if _is_filled(_cache(arguments)):
        raise _request_error(
            "takes no past_key_values or cache with something in it, since a thought comes between; leave it out"
        )

    # Where weights are offloaded, the inputs tell on which device the model computes.
    if model.device.type != "meta":
        ids_BP = ids_BP.to(model.device)
    if attention_mask is None:
        attention_mask = (ids_BP != settings.pad_token_id).cumsum(dim=1) > 0
    valid_BP = attention_mask.to(ids_BP.device).bool()
    # A length is of prompt and answer, and a number of new tokens goes before it.
    prompt_length = ids_BP.shape[1]
    if arguments.get("max_length") and not arguments.get("max_new_tokens"):
        length = arguments["max_length"]
        if length <= prompt_length:
            raise _request_error(
                f"max_length={length} leaves no room for an answer; give more than the prompt's {prompt_length} tokens"
            )
        settings.max_new_tokens = length - prompt_length
        settings.max_length = None
    if arguments.get("min_length") and not arguments.get("min_new_tokens"):
        settings.min_new_tokens = max(arguments["min_length"] - prompt_length, 0)
        settings.min_length = None
    _check(model, settings, ids_BP, valid_BP)
    if model.config.think_in_forward:
        _check_alike(model, settings, ids_BP, valid_BP)

    # Think, then put prompt, latents and closing tokens in a row.
    latents_BTD, stops_BT, lengths_B = _think(model, settings, ids_BP, valid_BP)
    closing_E = ids_BP.new_tensor(settings.closing_ids, dtype=torch.long)
    closing_BE = closing_E.expand(len(ids_BP), -1)
    steps_T = torch.arange(latents_BTD.shape[1], device=ids_BP.device)
    thinking_BT = steps_T < lengths_B[:, None]
    embed = model.get_input_embeddings()
    inputs_BSD = torch.cat([embed(ids_BP), latents_BTD, embed(closing_BE)], dim=1)
    valid_BS = torch.cat([valid_BP, thinking_BT, torch.ones_like(closing_BE)], dim=1)

    # Have transformers write the answer, with the settings that it doesn't keep in its config.
    given = {name: more[name] for name in more if name in others}
    given = {name: value for name, value in given.items() if value is not None}
    given |= _prepend_prompts(given, ids_BP)
    model.generation_config = settings
    model._writes = True
    try:
        with _without_noise(model):
            answers = type(model).generate(
                model, inputs_embeds=inputs_BSD, attention_mask=valid_BS.long(), **given
            )
    finally:
        model.generation_config = model_settings
        model._writes = False

    # A prompt may have several answers, each with the same thought.
    times = len(answers.sequences) // len(ids_BP)
    ids_BP = ids_BP.repeat_interleave(times, dim=0)
    sequences = torch.cat([ids_BP, answers.sequences], dim=1)
    if not as_thought:
        return sequences
    latents_NTD = latents_BTD.repeat_interleave(times, dim=0)
    lengths_N = lengths_B.repeat_interleave(times, dim=0)
    stops_NT = None
    if settings.gate_layers:
        stops_NT = stops_BT.repeat_interleave(times, dim=0)

    # What transformers gives with the answers goes on.
    of_the_answers = {}
    for name in _OF_THE_ANSWERS:
        of_the_answers[name] = answers.get(name)
    return Thought(
        sequences,
        latents=latents_NTD,
        lengths=lengths_N,
        stop_probabilities=stops_NT,
        **of_the_answers,
    )


def _prepend_prompts(given: dict[str, Any], ids_BP: torch.Tensor) -> dict[str, Any]:
    """Return those of a caller's arguments that are functions of the ids so far, with the prompts before these.

    transformers' own `generate`, which is given embeddings, has the answers' ids alone.
    """

    def with_prompts(function):
        def show(ids_NA, *arguments, **named):
            # A prompt's beams or samples lie one after the other.
            times = len(ids_NA) // len(ids_BP)
            prompts_NP = ids_BP.repeat_interleave(times, dim=0)
            prompts_NP = prompts_NP.to(ids_NA.device)
            ids_NL = torch.cat([prompts_NP, ids_NA], dim=1)
            return function(ids_NL, *arguments, **named)

        return show

    changed: dict[str, Any] = {}
    for name in ("stopping_criteria", "logits_processor"):
        if name in given:
            functions = map(with_prompts, given[name])
            kind = type(given[name])
            changed[name] = kind(functions)

    allowed = given.get("prefix_allowed_tokens_fn")
    if allowed is not None:

        def allow(row, ids_A):
            prompt_P = ids_BP[row].to(ids_A.device)
            ids_L = torch.cat([prompt_P, ids_A])
            return allowed(row, ids_L)

        changed["prefix_allowed_tokens_fn"] = allow
    return changed


def _request_error(message: str) -> ValueError:
    """Make the error of a request that can't be answered; a server answers it with status 400."""
    text = f"generate: {message}"
    server = sys.modules.get("starlette.exceptions")
    if server is None:
        return ValueError(text)
    both = type(
        "RefusedRequest",
        (server.HTTPException, ValueError),
        {"__str__": lambda error: error.detail},
    )
    return both(status_code=400, detail=text)


def _check(model, settings, ids_BP, valid_BP) -> None:
    """Refuse requests whose answer would be wrong; lower max_new_tokens to the positions that are left."""
    start = settings.prompt_end_id
    most = model.config.max_position_embeddings
    threshold = settings.stop_threshold or 0
    is_threshold = isinstance(threshold, (int, float)) and 0 <= threshold <= 1
    is_count = isinstance(settings.max_latents, int) and settings.max_latents >= 0
    if not is_count or not is_threshold:
        raise _request_error(
            "max_latents is at least 0, a whole number, and stop_threshold from 0 to 1"
        )
    if settings.stop_threshold is not None and not settings.gate_layers:
        raise _request_error(
            "stop_threshold has no effect without a gate; leave it out, or set max_latents"
        )

    # The chat template writes nothing of a chat without a question.
    if not valid_BP.any(dim=1).all():
        raise _request_error(
            "a prompt is empty; give its chat a message from the user, whose last one is the question"
        )

    # Latents come after the last token, so prompts are padded on the left.
    ends_B = valid_BP[:, -1]
    end = "no padding"
    if start is not None:
        ends_B = ends_B & (ids_BP[:, -1] == start)
        end = f"token {start}"
    if not ends_B.all():
        raise _request_error(
            f"a prompt ends with {end}, after which latents come; make it with "
            "tokenizer.apply_chat_template, of several ones with padding=True"
        )
    # A tokenizer that transformers opens as another one may drop every word of a question.
    if start is not None and (valid_BP.sum(dim=1) < 2).any():
        raise _request_error(
            f"a prompt is token {start} alone, without a question; if its chat has one, open the tokenizer as the "
            "export's README.md does"
        )

    # A tokenizer of words doesn't spell every text.
    unknown = settings.unknown_token_id
    if unknown is not None:
        if (valid_BP & (ids_BP == unknown)).any():
            raise _request_error(
                "a prompt has a word that the tokenizer doesn't know; use words that it knows"
            )
        if settings.stop_strings:
            raise _request_error(
                "transformers finds stop strings with tokenizers that spell every text alone; leave them out"
            )

    # An answer's last token isn't fed, so that one closing token costs no position; `forward` is given all of them.
    closing = len(settings.closing_ids)
    if not model.config.think_in_forward:
        closing = max(closing - 1, 0)
    slots = int(valid_BP.sum(dim=1).max()) + settings.max_latents + closing
    if slots >= most:
        raise _request_error(
            f"prompt and {settings.max_latents} latents take {slots} positions, the model has {most} with "
            "the answer's; shorten the prompt"
        )
    if settings.max_new_tokens is None or settings.max_new_tokens > most - slots:
        settings.max_new_tokens = most - slots
        warnings.warn(
            f"generate: max_new_tokens is {most - slots}, for which the model has positions",
            stacklevel=3,
        )


def _check_alike(model, settings, ids_BP, valid_BP) -> None:
    """Say where `forward`, which a trainer scores answers with, thinks another thought than this `generate`."""
    for name in ("max_latents", "stop_threshold"):
        here = getattr(settings, name)
        there = getattr(model.generation_config, name)
        if here != there:
            warnings.warn(
                f"generate: {name} is {here} here, but forward thinks with {there}, so its log-probabilities are of "
                f"other thoughts; set model.generation_config.{name} to {here} instead",
                stacklevel=4,
            )
    marker = getattr(model.config, "latent_start_id", None)
    is_marker_BP = (ids_BP == marker) & valid_BP
    if marker is not None and (is_marker_BP.sum(dim=1) > 1).any():
        raise _request_error(
            f"a prompt has token {marker} several times, the first of which forward takes for its end; leave it out of "
            "questions"
        )


@contextlib.contextmanager
def _without_noise(model) -> Iterator[None]:
    """Have a model in training mode do as in evaluation: without dropout, and with the cache that a thought needs.

    Gradient checkpointing, which training mode turns on, leaves no cache.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _reader(
    model, rows: int, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return (inputs [B, L, D], valid [B, L]) -> hidden state [B, D] of the last position; calls go on."""
    valid_BS = torch.zeros(rows, 0, dtype=torch.bool, device=device)
    parameters = inspect.signature(type(model.base_model).forward).parameters
    cached = {
        "cache" if "cache" in parameters else "past_key_values": DynamicCache(),
        "use_cache": True,
    }

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
    """Refuse infinity and NaN, which would never reach a threshold and would be the likeliest token."""
    if not values.isfinite().all():
        raise ValueError("generate: a hidden state or stop logit is no finite number; the weights are damaged, or too "
                         "large for their dtype")  # fmt: skip
    return values


def _think(model, settings, ids_BP, valid_BP):
    """Feed latents until every row has stopped; return latents [B, T, D], stop probabilities [B, T], lengths [B]."""
    with torch.no_grad(), _without_noise(model):
        return _latents(model, settings, ids_BP, valid_BP)


def _latents(model, settings, ids_BP, valid_BP):
    """Think as `_think`, in the mode that the model is in."""
    weights = _side_weights(model, settings)
    feed = _reader(model, len(ids_BP), ids_BP.device)

    # Read the prompts; a thought may end before its first latent.
    hidden_BD = feed(model.get_input_embeddings()(ids_BP), valid_BP)
    lengths_B = torch.zeros(len(hidden_BD), dtype=torch.long, device=hidden_BD.device)
    halts_B = _halts(model, settings, hidden_BD, lengths_B)
    active_B = (lengths_B < settings.max_latents) & ~halts_B

    # The empty slices give `cat` its shape and type where nothing is thought.
    latents = [hidden_BD[:, None][:, :0]]
    stops = [hidden_BD[:, :0].float()]
    while active_B.any():
        # Make the next latent of rows that go on, zeros of others.
        latent_BD = _through(settings.latent_layers, weights, hidden_BD)
        latents.append((latent_BD * active_B[:, None])[:, None])
        lengths_B = lengths_B + active_B

        # A thought ends at most latents, or where the gate says so.
        stopping_B = lengths_B == settings.max_latents
        if settings.gate_layers:
            logit_B1 = _through(settings.gate_layers, weights, latent_BD.float())
            stop_B1 = _finite(logit_B1).sigmoid()
            stops.append(stop_B1.masked_fill(~active_B[:, None], torch.nan))
            if settings.stop_threshold is not None:
                stopping_B = stopping_B | (stop_B1[:, 0] >= settings.stop_threshold)

        # The last latent is fed too; after it the model may ask to halt.
        hidden_BD = feed(latent_BD[:, None], active_B[:, None])
        halts_B = _halts(model, settings, hidden_BD, lengths_B)
        active_B = active_B & ~stopping_B & ~halts_B
    return torch.cat(latents, dim=1), torch.cat(stops, dim=1), lengths_B


def _halts(model, settings, hidden_BD, lengths_B) -> torch.Tensor:
    """Tell whether thoughts of these lengths are over, because the token that ends them is likeliest.

    CoLaR compares it with all tokens, AdaLR with one.
    """
    if settings.halting_token_id is None:
        return torch.zeros_like(lengths_B, dtype=torch.bool)
    logits_BV = model.get_output_embeddings()(hidden_BD)
    if settings.going_on_token_id is None:
        says_B = logits_BV.argmax(dim=-1) == settings.halting_token_id
    else:
        says_B = (
            logits_BV[:, settings.halting_token_id]
            > logits_BV[:, settings.going_on_token_id]
        )
    return says_B & (lengths_B >= settings.halting_least)


def _through(
    layers: list[list[Any]], weights: dict[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """Run [B, D] through layers; each is a kind and the name of its weights, or its setting."""
    for kind, detail in layers:
        if kind == "gelu":
            x = functional.gelu(x, approximate=detail)
            continue
        if kind == "scale":
            x = x * detail
            continue
        weight = weights[f"{detail}.weight"].to(x)
        bias = weights[f"{detail}.bias"].to(x)
        if kind == "norm":
            x = functional.layer_norm(x, weight.shape, weight, bias)
        else:
            x = functional.linear(x, weight, bias)
    return x


def _side_weights(model, settings) -> dict[str, torch.Tensor]:
    """Read the tensors beside the language model's, of the same revision, once."""
    if model in _side_files:
        return _side_files[model]
    weights: dict[str, torch.Tensor] = {}
    if settings.latent_layers or settings.gate_layers:
        # The path of this very file has the hub's commit, if it is from there.
        commit = re.search("[0-9a-f]{40}", __file__)
        revision = commit and commit[0]
        path = cached_file(model._opened_from, SIDE_FILE, revision=revision)
        device = "cpu" if model.device.type == "meta" else str(model.device)
        weights = load_file(path, device=device)
    _side_files[model] = weights
    return weights


_PLAIN = (
    "a forward pass over a prompt's tokens has no thought, so what it says of the answer is another model's; have it "
    "think with from_pretrained(…, trust_remote_code=True, think_in_forward=True), give the `latents` that generate("
    "…, return_dict_in_generate=True) returns, or say allow_plain_forward=True"
)


def _thinking(base: Any) -> Any:
    """Derive from transformers' class of a language model one of the same name, whose `forward` knows of thoughts.

    A thought is fed in the model's body, below its head: some programs, as TRL does, call that and have a loss of their
    own.
    """

    def __init__(self, config, *arguments, **named):
        base.__init__(self, config, *arguments, **named)
        _take_body(self)

    @functools.wraps(base.forward)
    def forward(
        self,
        *arguments,
        latents=None,
        latent_lengths=None,
        allow_plain_forward=None,
        **named,
    ):
        self._given = latents, latent_lengths, allow_plain_forward
        try:
            return base.forward(self, *arguments, **named)
        finally:
            self._given = None

    def generate_batch(self, *_, **__):
        raise ValueError(
            "continuous batching gives no room for a thought; use generate, of several prompts at once"
        )

    def _replicate_for_data_parallel(self):
        raise ValueError(
            "torch.nn.DataParallel copies no thought; start the program with accelerate or torchrun, or on one GPU"
        )

    # A server that finds no such attribute has `generate` answer.
    def refuse_continuous_batching(self):
        raise AttributeError("continuous batching gives no room for a thought")

    members = {
        "__init__": __init__,
        "forward": forward,
        "generate_batch": generate_batch,
        "_replicate_for_data_parallel": _replicate_for_data_parallel,
        "init_continuous_batching": property(refuse_continuous_batching),
        "__module__": __name__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (base,), members)


GPT2LMHeadModel = _thinking(transformers.GPT2LMHeadModel)
LlamaForCausalLM = _thinking(transformers.LlamaForCausalLM)
Qwen2ForCausalLM = _thinking(transformers.Qwen2ForCausalLM)
Qwen3ForCausalLM = _thinking(transformers.Qwen3ForCausalLM)


def _take_body(model) -> None:
    """Have the body of a language model know of thoughts."""
    model._given = None
    model._writes = False
    # The side file is read later, when the process may be in another folder.
    path = model.name_or_path
    model._opened_from = os.path.abspath(path) if os.path.isdir(path) else path
    # Not as an attribute, which would make the whole a part of its body.
    model.base_model.__dict__["_reasoner"] = model
    # Of a function, since a method could not be pickled.
    model.base_model.forward = functools.partial(_body_forward, model.base_model)


def _body_forward(self, *arguments, **named):
    """Run the body of a language model, with a thought where one is asked for or given."""
    model = self._reasoner
    forward = functools.partial(type(self).forward, self)
    names = list(inspect.signature(forward).parameters)
    named |= dict(zip(names, arguments, strict=False))
    latents, lengths, allowed = model._given or (None, None, None)
    thinks = latents is not None
    if model.config.think_in_forward and not thinks:
        thinks = _lacks_thought(model, named)
    if thinks:
        return _forward_with_thought(forward, model, named, latents, lengths)

    # A pass without a thought fails in training, and warns once elsewhere.
    if allowed is None:
        allowed = model.config.allow_plain_forward
    if not allowed and _lacks_thought(model, named):
        if self.training:
            raise ValueError(_PLAIN)
        if not getattr(model, "_said_plain", False):
            model._said_plain = True
            warnings.warn(_PLAIN, stacklevel=2)
    return forward(**named)


def _cache(named: dict[str, Any]):
    """Return the cache among `forward`'s arguments, which has two names; None without one."""
    for name in ("cache", "past_key_values"):
        cache = named.get(name)
        # An empty one counts as False.
        if cache is not None:
            return cache
    return None


def _is_filled(cache) -> bool:
    return cache is not None and cache.get_seq_length() > 0


def _lacks_thought(model, named: dict[str, Any]) -> bool:
    """Tell whether a pass reads the beginning of a text, in which a thought belongs after the prompt.

    So does one that is given embeddings, or a cache that stands for them: prompt tuning puts these before a prompt.
    """
    if model._writes:
        return False
    ids = named.get("input_ids")
    embeddings = named.get("inputs_embeds")
    cache = _cache(named)
    training = model.base_model.training
    if ids is None:
        if embeddings is None:
            return False
        # A thought's own latents are fed with a cache, which may be empty.
        is_prompt = training or cache is None
        return is_prompt and embeddings.shape[1] > 1
    if _is_filled(cache) and not training:
        # What follows a prompt has no marker; prefix tuning's prompts have.
        marker = getattr(model.config, "latent_start_id", None)
        return marker is not None and bool((ids == marker).any())
    return ids.shape[1] > 1


def _forward_with_thought(
    forward, model, named: dict[str, Any], latents_BTD, lengths_B
):
    """Run `forward` with a thought after the marker that each row has among its tokens.

    Args:
        forward: the body's own.
        named: its arguments by name; `input_ids` int [B, L] are prompts, and answers as `generate` returns them.
        latents_BTD: [B, T, D]; None to think of them, without noise and without a gradient through them.
        lengths_B: int [B], each row's number of latents; None for T.
    Returns:
        the output of `forward`, with hidden states at the positions of `input_ids`: those of the marker are of the last
        slot before the answer. It has no cache; attentions are between all slots.
    """
    settings = model.generation_config
    embed = model.get_input_embeddings()
    ids_BL = named.pop("input_ids", None)
    if ids_BL is None or _cache(named) is not None:
        raise ValueError(
            "forward with a thought: takes input_ids, and no cache or inputs_embeds; use generate"
        )
    positions_BL = named.pop("position_ids", None)
    for name in ("use_cache", "inputs_embeds"):
        named.pop(name, None)
    mask_BL = named.pop("attention_mask", None)
    valid_BL = (
        torch.ones_like(ids_BL, dtype=torch.bool) if mask_BL is None else mask_BL.bool()
    )

    # A tokenizer of words doesn't spell every text.
    unknown = settings.unknown_token_id
    if unknown is not None and ((ids_BL == unknown) & valid_BL).any():
        raise ValueError(
            "forward with a thought: a row has a word that the tokenizer doesn't know; use words that it knows, and a "
            "blank before a word that follows the prompt's last one"
        )

    # Find the marker of each row.
    marker = getattr(model.config, "latent_start_id", None)
    if marker is None:
        raise ValueError(
            "forward with a thought: no token marks the end of this model's prompts; use generate"
        )
    is_marker_BL = (ids_BL == marker) & valid_BL
    if not is_marker_BL.any(dim=1).all():
        raise ValueError(
            f"forward with a thought: a row has no token {marker}, which ends a prompt; apply the chat template, and "
            "give lm-eval a number as batch_size"
        )
    place_B1 = is_marker_BL.int().argmax(dim=1, keepdim=True)

    # A sampled answer may have the marker too; only one that comes after the answer's end is of another prompt.
    eos = settings.eos_token_id
    eos_ids_E = ids_BL.new_tensor([eos] if isinstance(eos, int) else eos or [])
    slots_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
    ends_BL = torch.isin(ids_BL, eos_ids_E) & valid_BL & (slots_L > place_B1)
    after_end_BL = ends_BL.cumsum(dim=1) > 0
    has_several = (is_marker_BL & after_end_BL).any()
    if positions_BL is not None:
        # Padding has positions of any kind.
        both_valid_BL = valid_BL[:, :-1] & valid_BL[:, 1:]
        begins_again_BL = (positions_BL.diff(dim=1) < 0) & both_valid_BL
        has_several |= begins_again_BL.any()
    if has_several:
        raise ValueError(
            "forward with a thought: a row has several prompts; turn off what puts several texts in a row, such as "
            "packing and padding_free"
        )

    # Think, of prompts that end together.
    if latents_BTD is None:
        length = int(place_B1.max()) + 1
        from_BP = place_B1 - length + 1 + slots_L[:length]
        valid_BP = (from_BP >= 0) & valid_BL.gather(1, from_BP.clamp(min=0))
        ids_BP = ids_BL.gather(1, from_BP.clamp(min=0))
        no_answer = copy.deepcopy(settings)
        no_answer.max_new_tokens = 0
        _check(model, no_answer, ids_BP, valid_BP)
        latents_BTD, _, lengths_B = _think(model, settings, ids_BP, valid_BP)
    steps = latents_BTD.shape[1]
    steps_T = torch.arange(steps, device=ids_BL.device)
    if lengths_B is None:
        lengths_B = torch.full_like(ids_BL[:, 0], steps)
    lengths_B = lengths_B.to(ids_BL.device)

    # Find the place of each slot: the thought goes after the marker, the text after it moves back.
    closing_E = ids_BL.new_tensor(settings.closing_ids, dtype=torch.long)
    closing_BE = closing_E.expand(len(ids_BL), -1)
    more = steps + closing_BE.shape[1]
    slots_S = torch.arange(len(slots_L) + more, device=ids_BL.device)
    in_thought_BS = (slots_S > place_B1) & (slots_S <= place_B1 + more)
    text_BS = torch.where(slots_S > place_B1, slots_S - more, slots_S)
    thought_BS = len(slots_L) + slots_S - place_B1 - 1
    order_BS = torch.where(in_thought_BS, thought_BS, text_BS)

    # Gather the inputs in this order.
    inputs_BLD = embed(ids_BL)
    inputs_BSD = torch.cat(
        [inputs_BLD, latents_BTD.to(inputs_BLD), embed(closing_BE)], dim=1
    )
    order_BSD = order_BS[..., None].expand(-1, -1, inputs_BSD.shape[2])
    inputs_BSD = inputs_BSD.gather(1, order_BSD)
    thinking_BT = steps_T < lengths_B[:, None]
    closes_BE = torch.ones_like(closing_BE).bool()
    valid_BS = torch.cat([valid_BL, thinking_BT, closes_BE], dim=1)
    valid_BS = valid_BS.gather(1, order_BS)
    if valid_BS.sum(dim=1).max() > model.config.max_position_embeddings:
        raise ValueError(
            "forward with a thought: a row has more tokens and latents than the model has positions"
        )

    # Run everything at once.
    as_tuple = named.pop("return_dict", None) is False
    out = forward(
        inputs_embeds=inputs_BSD,
        attention_mask=valid_BS.long(),
        position_ids=(valid_BS.cumsum(dim=1) - 1).clamp(min=0),
        use_cache=False,
        return_dict=True,
        **named,
    )

    # Read the results where the tokens stand, and the marker's after the thought.
    last_B1 = place_B1 + (more if settings.closing_ids else lengths_B[:, None])
    read_BL = torch.where(slots_L > place_B1, slots_L + more, slots_L)
    read_BL = torch.where(slots_L == place_B1, last_B1, read_BL)

    def at_tokens(values_BSX):
        read_BLX = read_BL[..., None].expand(-1, -1, values_BSX.shape[2])
        return values_BSX.gather(1, read_BLX)

    out.last_hidden_state = at_tokens(out.last_hidden_state)
    if out.hidden_states is not None:
        out.hidden_states = tuple(map(at_tokens, out.hidden_states))
    return out.to_tuple() if as_tuple else out

"""Tokenizers in files: Hugging Face's, read as they are and written for other versions of transformers, and GGUF's.

tokenizer.json is the whole tokenizer. transformers 5 lets the class that tokenizer_config.json names build its own from
the vocabulary instead, with that class's pre-tokenizer; what a model was trained with is what its file says.

A GGUF file's fields describe a byte-level BPE of SmolLM2's or Llama 3's kind. transformers converts these too, but
needs torch for it, takes no note of "smollm" (SmolLM2's digits are split one by one before the text is, which moves
white space that stands before a number) and merges within words that Llama 3's vocabulary holds whole.
"""

import inspect
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

from slpo_jax.errors import UserError, first_line, key_name
from slpo_jax.io.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


SETTINGS = "tokenizer_config.json"
WHOLE = "tokenizer.json"
GPT2_EOS = "<|endoftext|>"
_REMEDY = "fetch it again"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
# What transformers 5 writes of itself or of where it read, and what names code that is not in our folder.
_OF_ITSELF = (
    "auto_map", "backend", "is_local", "local_files_only", "extra_special_tokens", "model_specific_special_tokens",
)  # fmt: skip


def read_tokenizer(directory: Path) -> "PreTrainedTokenizerFast":
    """Read a directory's tokenizer: its tokenizer.json as it is, else its vocab.json and merges.txt.

    Code that the directory brings is never run.

    Raises:
        UserError: there is neither, or they can't be used.
    """
    settings = read_json(directory / SETTINGS, _REMEDY, default={})
    has_whole = (directory / WHOLE).is_file()
    has_vocabulary = (directory / "vocab.json").is_file()
    has_merges = (directory / "merges.txt").is_file()
    if not has_whole and not (has_vocabulary and has_merges):
        raise UserError(
            f"tokenizer {directory}: has neither {WHOLE} nor vocab.json + merges.txt; add them"
        )
    if "auto_map" in settings:
        logging.warning(
            "tokenizer %s: its own code is not run; its files are taken as they are",
            directory,
        )
    try:
        if has_whole:
            return _whole(directory, settings)
        return _of_class(directory, settings)
    except UserError:
        raise
    except Exception as error:
        # The library raises a bare Exception for a malformed file.
        raise UserError(
            f"tokenizer {directory}: can't be loaded ({first_line(error)}); mend its files"
        ) from error


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Write tokenizer.json and beside it what transformers 4.57 and 5 alike need to take it as it is.

    Raises:
        OSError: a file can't be written, as on a full disk.
    """
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        # For tokenizer.json the library raises a bare one, which only writes the system's number
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(folder / WHOLE)) from error
    path = folder / SETTINGS
    saved = json.loads(path.read_text(encoding="utf-8"))
    settings = {}
    for key, value in saved.items():
        if key not in _OF_ITSELF:
            settings[key] = value
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if tokenizer.extra_special_tokens:
        settings["additional_special_tokens"] = [
            str(token) for token in tokenizer.extra_special_tokens
        ]
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    pre_tokenizer = whole["pre_tokenizer"] or {}
    if "add_prefix_space" in pre_tokenizer:  # 4.57 sets the file's to this one
        settings["add_prefix_space"] = pre_tokenizer["add_prefix_space"]
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")


def _whole(directory: Path, settings: dict[str, Any]) -> "PreTrainedTokenizerFast":
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    # Marker tokens that no file names, as GPT-2's own don't, are those of the class.
    kind = _class(_class_name(directory, settings))
    parameters = inspect.signature(kind.__init__).parameters
    for key in _NAMED:
        token = parameters[key].default if key in parameters else None
        is_missing = key not in settings and getattr(tokenizer, key) is None
        if is_missing and token in tokenizer.get_vocab():
            setattr(tokenizer, key, token)
    return tokenizer


def _of_class(directory: Path, settings: dict[str, Any]) -> "PreTrainedTokenizerFast":
    """Read a bare vocabulary with its merges, for which the class alone says how text is cut; else as GPT-2's."""
    import transformers

    name = _class_name(directory, settings)
    if not name and GPT2_EOS not in read_json(directory / "vocab.json", _REMEDY):
        raise UserError(
            f"tokenizer {directory}: vocab.json has no {GPT2_EOS}, so isn't GPT-2's; give a {WHOLE}"
        )
    kind = _class(name or "GPT2Tokenizer")
    if kind is transformers.PreTrainedTokenizerFast or not issubclass(
        kind, transformers.PreTrainedTokenizerFast
    ):
        raise UserError(
            f"tokenizer {directory}: {name} doesn't say how text is cut for vocab.json; add a {WHOLE}"
        )
    return kind.from_pretrained(directory)


def _class_name(directory: Path, settings: dict[str, Any]) -> str:
    """Return the class that the files name, or that GPT-2's config.json means without naming it; else ""."""
    model = read_json(directory / "config.json", _REMEDY, default={})
    default = "GPT2Tokenizer" if model.get("model_type") == "gpt2" else ""
    name = settings.get("tokenizer_class") or model.get("tokenizer_class")
    return str(name or default)


def _class(name: str) -> Any:
    """Return transformers' class of that name; the one that takes a tokenizer.json as it is where there is none."""
    import transformers

    slow_name = name.removesuffix("Fast")
    kind = getattr(transformers, name, None)
    kind = kind or getattr(transformers, slow_name, None)
    is_tokenizer = isinstance(kind, type) and issubclass(
        kind, transformers.PreTrainedTokenizerBase
    )
    return kind if is_tokenizer else transformers.PreTrainedTokenizerFast


# The format's kinds of token that are found whole: control and user-defined.
_IS_SPECIAL = {3: True, 4: False}
# English contractions; a word with the one mark before it; up to three digits; punctuation; line ends; white space.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
PRE_TOKENIZERS = {
    "smollm": (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
    "llama-bpe": (
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
}


def token_id(
    path: Path, fields: dict[str, Any], key: str, vocab_size: int
) -> int | None:
    """Return the id that a file names as its "bos", "eos", "eot", "eom", "unknown" or "padding" token, or None.

    Raises:
        UserError: it's no token's id.
    """
    index = fields.get(f"tokenizer.ggml.{key}_token_id")
    if index is None:
        return None
    is_id = type(index) is int and 0 <= index < vocab_size
    if not is_id:
        raise UserError(
            f"{path}: tokenizer.ggml.{key}_token_id {index} is no token's id; fetch the file again"
        )
    return index


def build_tokenizer(
    path: Path, fields: dict[str, Any], vocab_size: int, max_length: int
) -> "PreTrainedTokenizerFast":
    """Build the tokenizer of a GGUF file.

    Args:
        fields: of the file's header.
        vocab_size: rows of the model's embedding.
        max_length: positions of the model.
    Returns:
        a fast tokenizer with the file's ids. Control tokens are special; user-defined ones are found whole.
    Raises:
        UserError: it's no byte-level BPE, its pre-tokenizer is unknown, or its fields are missing or don't fit.
    """
    advice = f"name the model's own tokenizer in {key_name('config.tokenizer')}"
    model = fields.get("tokenizer.ggml.model")
    pre = fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        supported = ", ".join(PRE_TOKENIZERS)
        raise UserError(f"{path}: tokenizer.ggml.model {model!r} with tokenizer.ggml.pre {pre!r} isn't supported, only "
                        f"byte-level BPE ('gpt2') with {supported}; {advice}")  # fmt: skip
    begins = pre == "llama-bpe"  # with bos, where the file doesn't say
    try:
        tokens = fields["tokenizer.ggml.tokens"]
        pairs: list[tuple[str, str]] = []
        for merge in fields["tokenizer.ggml.merges"]:
            left, right = merge.split(" ")
            pairs.append((left, right))
        vocab = {token: index for index, token in enumerate(tokens)}
        bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=begins)
        backend = Tokenizer(bpe)
    except Exception as error:
        # The library raises a bare one for a merge whose parts are no tokens.
        raise UserError(
            f"{path}: tokenizer.ggml.tokens and tokenizer.ggml.merges don't fit; {advice}"
        ) from error
    if len(vocab) != vocab_size:
        raise UserError(
            f"{path}: tokenizer.ggml.tokens isn't {vocab_size} different tokens; {advice}"
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence([*PRE_TOKENIZERS[pre]])
    backend.decoder = decoders.ByteLevel()

    kinds = fields.get("tokenizer.ggml.token_type", [])
    # As it goes by the text, each keeps the id that it has.
    added: list[AddedToken] = []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in _IS_SPECIAL:
            special = _IS_SPECIAL[kind]
            added.append(AddedToken(token, special=special, normalized=False))
    backend.add_tokens(added)

    # Give it the markers, and put those in front and behind that the file asks for.
    markers: dict[str, str | None] = {}
    for name, key in (
        ("bos", "bos"),
        ("eos", "eos"),
        ("unk", "unknown"),
        ("pad", "padding"),
    ):
        index = token_id(path, fields, key, vocab_size)
        markers[f"{name}_token"] = None if index is None else tokens[index]
    bos: list[str] = []
    adds_bos = fields.get("tokenizer.ggml.add_bos_token", begins)
    if adds_bos and markers["bos_token"]:
        bos.append(markers["bos_token"])
    eos: list[str] = []
    adds_eos = fields.get("tokenizer.ggml.add_eos_token", False)
    if adds_eos and markers["eos_token"]:
        eos.append(markers["eos_token"])
    around = [*bos, *eos]
    specials = [(token, vocab[token]) for token in around]
    backend.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos], special_tokens=specials
    )
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=fields.get("tokenizer.chat_template"),
        **markers,
    )

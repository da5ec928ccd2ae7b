"""Hugging Face's tokenizer files: read as they are, and written so that other versions of transformers read them.

tokenizer.json is the whole tokenizer. transformers 5 lets the class that tokenizer_config.json names build its own from
the vocabulary instead, with that class's pre-tokenizer; what a model was trained with is what its file says.
"""

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging

from slpo_jax.errors import UserError, first_line
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
    """The tokenizer of a directory: its tokenizer.json as it is, else its vocab.json and merges.txt.

    Code that the directory brings is never run.

    Raises:
        UserError: there is neither, or they can't be used.
    """
    settings = read_json(directory / SETTINGS, _REMEDY, default={})
    whole = (directory / WHOLE).is_file()
    if not whole and not all((directory / name).is_file() for name in ("vocab.json", "merges.txt")):
        raise UserError(f"tokenizer {directory}: has neither {WHOLE} nor vocab.json + merges.txt; add them")
    if "auto_map" in settings:
        logging.warning("tokenizer %s: its own code is not run; its files are taken as they are", directory)
    try:
        return _whole(directory, settings) if whole else _of_class(directory, settings)
    except UserError:
        raise
    except Exception as error:  # the library raises a bare Exception for a malformed file
        raise UserError(f"tokenizer {directory}: can't be loaded ({first_line(error)}); mend its files") from error


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Write tokenizer.json and beside it what transformers 4.57 and 5 alike need to take it as it is."""
    tokenizer.save_pretrained(folder)
    path = folder / SETTINGS
    written = json.loads(path.read_text(encoding="utf-8"))
    settings = {key: value for key, value in written.items() if key not in _OF_ITSELF}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if tokenizer.extra_special_tokens:
        settings["additional_special_tokens"] = [str(token) for token in tokenizer.extra_special_tokens]
    pre_tokenizer = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
    if "add_prefix_space" in pre_tokenizer:  # 4.57 sets the file's to this one
        settings["add_prefix_space"] = pre_tokenizer["add_prefix_space"]
    path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _whole(directory: Path, settings: dict[str, Any]) -> "PreTrainedTokenizerFast":
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    # Marker tokens that no file names, as GPT-2's own don't, are those of the class.
    known = inspect.signature(_class(_class_name(directory, settings)).__init__).parameters
    for key in _NAMED:
        token = known[key].default if key in known else None
        if key not in settings and getattr(tokenizer, key) is None and token in tokenizer.get_vocab():
            setattr(tokenizer, key, token)
    return tokenizer


def _of_class(directory: Path, settings: dict[str, Any]) -> "PreTrainedTokenizerFast":
    """A bare vocabulary with its merges, for which the class alone says how text is cut; without one it is GPT-2's."""
    import transformers

    name = _class_name(directory, settings)
    if not name and GPT2_EOS not in read_json(directory / "vocab.json", _REMEDY):
        raise UserError(f"tokenizer {directory}: vocab.json has no {GPT2_EOS}, so isn't GPT-2's; give a {WHOLE}")
    kind = _class(name or "GPT2Tokenizer")
    if kind is transformers.PreTrainedTokenizerFast or not issubclass(kind, transformers.PreTrainedTokenizerFast):
        raise UserError(f"tokenizer {directory}: {name} doesn't say how text is cut for vocab.json; add a {WHOLE}")
    return kind.from_pretrained(directory)


def _class_name(directory: Path, settings: dict[str, Any]) -> str:
    """As its files name it, or as GPT-2's config.json means without naming it; "" where nothing does."""
    model = read_json(directory / "config.json", _REMEDY, default={})
    default = "GPT2Tokenizer" if model.get("model_type") == "gpt2" else ""
    return str(settings.get("tokenizer_class") or model.get("tokenizer_class") or default)


def _class(name: str) -> Any:
    """transformers' class of that name; the one that takes a tokenizer.json as it is where there is none."""
    import transformers

    found = getattr(transformers, name, None) or getattr(transformers, name.removesuffix("Fast"), None)
    known = isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)
    return found if known else transformers.PreTrainedTokenizerFast

"""The tokenizer that a GGUF file's fields describe, where it's a byte-level BPE.

transformers converts these too, but needs torch for it, takes no note of "smollm" (SmolLM2's digits are split one by
one before the text is, which moves white space that stands before a number) and merges within words that Llama 3's
vocabulary holds whole.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from slpo_jax.checkpoints.gguf_header import Header
from slpo_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTROL, USER_DEFINED = 3, 4
ADVICE = "name the model's own tokenizer in config.tokenizer"
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
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
GPT2_NAMES = ("gpt-2", "default")


def build_tokenizer(header: Header, vocab_size: int, max_length: int) -> "PreTrainedTokenizerFast":
    """Build the tokenizer of a GGUF file.

    Args:
        header: of the file.
        vocab_size: rows of the model's embedding.
        max_length: positions of the model.
    Returns:
        a fast tokenizer with the file's ids. Control tokens are special; user-defined ones are found whole.
    Raises:
        UserError: it's no byte-level BPE, its pre-tokenizer is unknown, or its fields are missing or don't fit.
    """
    path, fields = header.path, header.fields
    if (kind := fields.get("tokenizer.ggml.model")) != "gpt2":
        raise UserError(f"{path}: tokenizer.ggml.model {kind!r} isn't supported, byte-level BPE (gpt2) is; {ADVICE}")
    tokens, merges = _strings(header, "tokens"), _strings(header, "merges")
    if len(tokens) != vocab_size or len(vocab := {token: i for i, token in enumerate(tokens)}) != len(tokens):
        raise UserError(f"{path}: tokenizer.ggml.tokens isn't {vocab_size} different tokens; {ADVICE}")
    pre = fields.get("tokenizer.ggml.pre")
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in LLAMA3_NAMES))
    except Exception as error:  # the library raises a bare one for a merge whose parts are no tokens
        raise UserError(f"{path}: tokenizer.ggml.merges don't fit tokenizer.ggml.tokens; {ADVICE}") from error
    backend.pre_tokenizer = _pre_tokenizer(pre, path)
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, header, tokens)
    named: dict[str, str | None] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = token_id(header, key, vocab_size)
        named[name] = None if index is None else tokens[index]
    backend.post_processor = _post_processor(header, named, vocab, begins=pre in LLAMA3_NAMES)
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=fields.get("tokenizer.chat_template"),
        **{f"{name}_token": token for name, token in named.items()},
    )


def token_id(header: Header, key: str, vocab_size: int) -> int | None:
    """The id that the file names as its "bos", "eos", "eot", "eom", "unknown" or "padding" token, or None.

    Raises:
        UserError: it's no token's id.
    """
    index = header.fields.get(f"tokenizer.ggml.{key}_token_id")
    if index is not None and (type(index) is not int or not 0 <= index < vocab_size):
        raise UserError(f"{header.path}: tokenizer.ggml.{key}_token_id {index} is no token's id; fetch the file again")
    return index


def _strings(header: Header, key: str) -> list[str]:
    values = header.fields.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(f"{header.path}: tokenizer.ggml.{key} is no list of strings; {ADVICE}")
    return values


def _pre_tokenizer(name: Any, path: Path) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in GPT2_NAMES:
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in LLAMA3_NAMES:
        split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(("smollm", *LLAMA3_NAMES, *GPT2_NAMES))
    raise UserError(f"{path}: tokenizer.ggml.pre {name!r} isn't supported, only {known}; {ADVICE}")


def _add_tokens(backend: Tokenizer, header: Header, tokens: list[str]) -> None:
    kinds = header.fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise UserError(f"{header.path}: tokenizer.ggml.token_type isn't one number for each token; {ADVICE}")
    # As it goes by the text, each keeps the id that it has.
    for kind, add, special in ((CONTROL, backend.add_special_tokens, True), (USER_DEFINED, backend.add_tokens, False)):
        chosen = [token for token, its_kind in zip(tokens, kinds, strict=True) if its_kind == kind]
        add([AddedToken(token, special=special, normalized=False) for token in chosen])


def _post_processor(header: Header, named: dict[str, str | None], vocab: dict[str, int], begins: bool) -> Any:
    """What puts bos and eos around a text; `begins`: whether it starts with bos where the file doesn't say."""
    pieces, used = ["$A:0"], []
    for name, default in (("bos", begins), ("eos", False)):
        if header.fields.get(f"tokenizer.ggml.add_{name}_token", default):
            token = named[name]
            if token is None:
                raise UserError(f"{header.path}: tokenizer.ggml.{name}_token_id is missing, and needed; {ADVICE}")
            pieces = [f"{token}:0", *pieces] if name == "bos" else [*pieces, f"{token}:0"]
            used.append((token, vocab[token]))
    if not used:
        return processors.ByteLevel(trim_offsets=False)
    pair = [*pieces, *(piece.replace("$A:0", "$B:1").replace(":0", ":1") for piece in pieces)]
    return processors.TemplateProcessing(single=pieces, pair=pair, special_tokens=used)

"""The tokenizer that a GGUF file's fields describe, where it's a byte-level BPE of SmolLM2's or Llama 3's kind.

transformers converts these too, but needs torch for it, takes no note of "smollm" (SmolLM2's digits are split one by
one before the text is, which moves white space that stands before a number) and merges within words that Llama 3's
vocabulary holds whole.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from slpo_jax.errors import UserError, key_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_IS_SPECIAL = {3: True, 4: False}  # of the format's kinds of token control and user-defined, which are found whole
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
    "smollm": (pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": (
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
}


def token_id(path: Path, fields: dict[str, Any], key: str, vocab_size: int) -> int | None:
    """The id that a file names as its "bos", "eos", "eot", "eom", "unknown" or "padding" token, or None.

    Raises:
        UserError: it's no token's id.
    """
    index = fields.get(f"tokenizer.ggml.{key}_token_id")
    if index is not None and (type(index) is not int or not 0 <= index < vocab_size):
        raise UserError(f"{path}: tokenizer.ggml.{key}_token_id {index} is no token's id; fetch the file again")
    return index


def build_tokenizer(path: Path, fields: dict[str, Any], vocab_size: int, max_length: int) -> "PreTrainedTokenizerFast":
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
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UserError(f"{path}: tokenizer.ggml.model {model!r} with tokenizer.ggml.pre {pre!r} isn't supported, only "
                        f"byte-level BPE ('gpt2') with {known}; {advice}")  # fmt: skip
    begins = pre == "llama-bpe"  # with bos, where the file doesn't say
    try:
        tokens, merges = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        vocab = {token: index for index, token in enumerate(tokens)}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=begins))
    except Exception as error:  # the library raises a bare one for a merge whose parts are no tokens
        raise UserError(f"{path}: tokenizer.ggml.tokens and tokenizer.ggml.merges don't fit; {advice}") from error
    if len(vocab) != vocab_size:
        raise UserError(f"{path}: tokenizer.ggml.tokens isn't {vocab_size} different tokens; {advice}")
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([*PRE_TOKENIZERS[pre]]), decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    # As it goes by the text, each keeps the id that it has.
    whole = [(token, _IS_SPECIAL[kind]) for token, kind in zip(tokens, kinds, strict=False) if kind in _IS_SPECIAL]
    backend.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in whole])
    named: dict[str, str | None] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = token_id(path, fields, key, vocab_size)
        named[f"{name}_token"] = None if index is None else tokens[index]
    bos, eos = (
        [token] if fields.get(f"tokenizer.ggml.add_{name}", default) and (token := named[name]) else []
        for name, default in (("bos_token", begins), ("eos_token", False))
    )
    specials = [(token, vocab[token]) for token in (*bos, *eos)]
    backend.post_processor = processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=specials)
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=fields.get("tokenizer.chat_template"),
        **named,
    )

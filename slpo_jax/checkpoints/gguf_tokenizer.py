"""The tokenizer that a GGUF file's fields describe, where it's a byte-level BPE of SmolLM2's or Llama 3's kind.

transformers converts these too, but needs torch for it, takes no note of "smollm" (SmolLM2's digits are split one by
one before the text is, which moves white space that stands before a number) and merges within words that Llama 3's
vocabulary holds whole.
"""

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from slpo_jax.checkpoints.gguf import Header, token_id
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
PRE_TOKENIZERS = {
    "smollm": (pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": (
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
}


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
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UserError(f"{path}: tokenizer.ggml.model {kind!r} with tokenizer.ggml.pre {pre!r} isn't supported, only "
                        f"byte-level BPE ('gpt2') with {known}; {ADVICE}")  # fmt: skip
    begins = pre == "llama-bpe"  # with bos, where the file doesn't say
    try:
        tokens, merges = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        vocab = {token: index for index, token in enumerate(tokens)}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=begins))
    except Exception as error:  # the library raises a bare one for a merge whose parts are no tokens
        raise UserError(f"{path}: tokenizer.ggml.tokens and tokenizer.ggml.merges don't fit; {ADVICE}") from error
    if len(vocab) != vocab_size:
        raise UserError(f"{path}: tokenizer.ggml.tokens isn't {vocab_size} different tokens; {ADVICE}")
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([*PRE_TOKENIZERS[pre]]), decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    # As it goes by the text, each keeps the id that it has.
    for chosen, special in ((CONTROL, True), (USER_DEFINED, False)):
        found = [token for token, its_kind in zip(tokens, kinds, strict=False) if its_kind == chosen]
        added = [AddedToken(token, special=special, normalized=False) for token in found]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    named: dict[str, str | None] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = token_id(header, key, vocab_size)
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

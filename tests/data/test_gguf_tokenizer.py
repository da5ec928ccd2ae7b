"""Tokenizers out of GGUF files against slow BPE, one regex and one merge after the other."""

import json

import pytest
import transformers

from slpo_jax.checkpoints.gguf import open_gguf
from slpo_jax.data.tokenizer import token_bytes
from tiny_gguf import SPECIALS, TEXTS, SlowBPE, bpe, refused, tiny_file


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_tokenizer_against_slow_bpe(tmp_path, pre):
    tokenizer = open_gguf(tiny_file(tmp_path, {"tokenizer.ggml.pre": pre})).tokenizer()
    slow = SlowBPE(pre)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == slow(text)
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == len(bpe()[0])
    assert tokenizer.model_max_length == 64


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "Ġb", "ĠĠ", "5", "ĠĠ", "Ġ(", "c", "'", "REd"]),
        ("llama-bpe", ["a", "Ġ", "123", "4", "Ġb", "Ġ", "Ġ", "5", "ĠĠ", "Ġ(", "c", "'RE", "d"]),
    ],
)
def test_what_a_word_is(tmp_path, pre, words):
    """By hand: digits one by one, in threes, or as one word with the space before it."""
    tokenizer = open_gguf(tiny_file(tmp_path, {"tokenizer.ggml.pre": pre})).tokenizer()
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 1234 b  5   (c'REd")
    assert [word for word, _ in split] == words


def test_llama3_takes_a_word_that_is_a_token_whole(tmp_path):
    tokens, merges = bpe()
    tokens = [*tokens[:-1], "xyzzy"]  # which no merges lead to
    merges = [merge for merge in merges if merge.replace(" ", "") in tokens]
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    whole = open_gguf(tiny_file(tmp_path, fields | {"tokenizer.ggml.pre": "llama-bpe"})).tokenizer()
    assert whole("xyzzy", add_special_tokens=False)["input_ids"] == [len(tokens) - 1]
    parts = open_gguf(tiny_file(tmp_path, fields)).tokenizer()
    assert len(parts("xyzzy")["input_ids"]) == 5


def test_special_and_user_defined_tokens(tmp_path):
    tokens, _ = bpe()
    kinds = [3 if token in SPECIALS else 1 for token in tokens]
    tokens = [*tokens]
    tokens[300], kinds[300] = "two words", 4
    merges = [m for m in bpe()[1] if all(part in tokens for part in (*m.split(" "), m.replace(" ", "")))]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges}
    tokenizer = open_gguf(tiny_file(tmp_path, changes)).tokenizer()
    ids = tokenizer("<|im_end|>two words")["input_ids"]
    assert ids == [2, 300]
    assert tokenizer.decode(ids) == "<|im_end|>two words"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "two words"
    assert tokenizer.special_tokens_map == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"
    }  # fmt: skip
    assert token_bytes(tokenizer)[300] == b"two words"


@pytest.mark.parametrize(
    ("changes", "start", "end"),
    [
        ({}, [], []),
        ({"tokenizer.ggml.add_bos_token": True}, [1], []),
        ({"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "llama-bpe"}, [1], []),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [1], [2]),
    ],
)
def test_a_texts_first_and_last_token(tmp_path, changes, start, end):
    tokenizer = open_gguf(tiny_file(tmp_path, changes)).tokenizer()
    plain = tokenizer("the 12 pears", add_special_tokens=False)["input_ids"]
    assert tokenizer("the 12 pears")["input_ids"] == start + plain + end


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_a_saved_tokenizer_opens_as_the_same(tmp_path, pre):
    changes = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ x }}"}
    opened = open_gguf(tiny_file(tmp_path, changes))
    opened.tokenizer().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(
        json.dumps({k: v for k, v in opened.config.items() if v is not None})
    )
    saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert saved["clean_up_tokenization_spaces"] is False  # which older versions would do unless told
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.chat_template == "{{ x }}"
    slow = SlowBPE(pre)
    for text in TEXTS:
        assert again(text)["input_ids"] == [1, *slow(text)]


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("model", "llama", "model 'llama'"),
        ("pre", "qwen2", "pre 'qwen2'"),
        ("tokens", None, "tokens and tokenizer.ggml.merges"),
        ("tokens", [*bpe()[0], "one more"], "tokens isn't"),
        ("merges", ["a b c"], "merges don't fit"),
        ("merges", ["xx yy"], "merges don't fit"),
        ("unknown_token_id", 100000, "unknown_token_id"),
    ],
)
def test_tokenizers_that_cannot_be_built(tmp_path, key, value, part):
    refused(tiny_file(tmp_path, {f"tokenizer.ggml.{key}": value}), f"tokenizer.ggml.{part}", tokenizer=True)

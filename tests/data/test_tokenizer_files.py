"""Tokenizer files against the tokenizers library, which reads tokenizer.json alone; those of GGUF against slow BPE."""

import errno
import json
from types import SimpleNamespace

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from slpo_jax.architectures.architecture import Text
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.checkpoints.checkpoint import Checkpoint
from slpo_jax.checkpoints.description import Description, write_description
from slpo_jax.checkpoints.gguf import open_gguf
from slpo_jax.data.tokenizer import load_tokenizer, token_bytes
from slpo_jax.data.tokenizer_files import save_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.models.gpt2 import GPT2Config
from tiny_gguf import SPECIALS, TEXTS, SlowBPE, bpe, refused, tiny_file

WRITTEN = ["<think>\nOkay", " don't 12345\n\n x <|eos|>two words", "  12 + 345 na\u00efve"]
SETTINGS = {
    "bos_token": "<|bos|>", "eos_token": "<|eos|>", "additional_special_tokens": ["<|im_end|>"], "model_max_length": 77,
    "padding_side": "left", "add_bos_token": False, "chat_template": "{{ messages[0].content }}",
}  # fmt: skip
CLASSES = [
    "GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "RobertaTokenizer",
    "CodeGenTokenizer", "WhisperTokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast", "NobodysTokenizer", None,
]  # fmt: skip


def _whole() -> Tokenizer:
    """A byte-level BPE that keeps marks with the line end after them, and up to three digits, as Llama-3's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["12", "th", "in", "thin", "think", "Ok", "Oka", "Okay", ">\u010a", "<think"]
    pairs = [("1", "2"), ("t", "h"), ("i", "n"), ("th", "in"), ("thin", "k"), ("O", "k"), ("Ok", "a"), ("Oka", "y")]
    pairs += [(">", "\u010a"), ("<", "think")]
    vocab = {token: index for index, token in enumerate([*alphabet, *merged])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    names = ("<|bos|>", "<|eos|>", "<|im_end|>", "<|endoftext|>")
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    backend.add_tokens([AddedToken("two words", normalized=False)])
    bos = ("<|bos|>", backend.token_to_id("<|bos|>"))
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    return backend


def _write(folder, **settings) -> Tokenizer:
    """As a fine-tune's folder has it, with GPT-2's config.json."""
    backend = _whole()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return backend


def _model(tokenizer) -> GPT2Config:
    return GPT2Config(vocab_size=len(tokenizer), n_positions=8, n_embd=4, n_layer=1, n_head=1)


def _ids(tokenizer, texts=WRITTEN) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("name", CLASSES)
def test_tokenizer_json_decides_over_the_class(tmp_path, name):
    backend = _write(tmp_path, **SETTINGS, **({"tokenizer_class": name} if name else {}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert _ids(tokenizer) == [backend.encode(text).ids for text in WRITTEN]
    # By hand: bos, three tokens; GPT-2's pre-tokenizer would keep ">" and the line end apart.
    assert tokenizer.convert_ids_to_tokens(_ids(tokenizer)[0]) == ["<|bos|>", "<think", ">\u010a", "Okay"]


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "RobertaTokenizer"])
def test_tokenizer_json_decides_in_what_is_saved(tmp_path, name):
    """For transformers 5, and with what 4.57 takes: its class, and its name for the tokens."""
    (tmp_path / "read").mkdir()
    (tmp_path / "saved").mkdir()
    backend = _write(tmp_path / "read", **SETTINGS, tokenizer_class=name)
    ids = [backend.encode(text).ids for text in WRITTEN]
    read = load_tokenizer(str(tmp_path / "read"))
    template = Coconut().template(read)
    Checkpoint(Description(Coconut(), _model(read)), template).write(tmp_path / "saved")
    saved = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert [saved.encode(text).ids for text in WRITTEN] == ids
    settings = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|im_end|>"]
    assert "extra_special_tokens" not in settings  # a list is an error there
    for load in (transformers.AutoTokenizer.from_pretrained, load_tokenizer):
        again = load(str(tmp_path / "saved"))
        assert _ids(again) == ids
        assert (again.bos_token, again.eos_token, again.pad_token) == ("<|bos|>", "<|eos|>", "<|eos|>")
        assert (again.padding_side, again.model_max_length, again.extra_special_tokens) == ("left", 77, ["<|im_end|>"])
        assert again.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi"
        assert again.decode([template.start_id, *ids[0]], skip_special_tokens=True) == WRITTEN[0]


def test_a_full_disk_is_the_system_s_error(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_whole())
    with pytest.raises(OSError, match="No space left on device") as raised:
        save_tokenizer(tokenizer, tmp_path)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "tokenizer.json"))


def test_tokenizer_json_with_a_prefix_space_is_saved_with_it(tmp_path):
    """transformers 4.57 sets the pre-tokenizer's to that of tokenizer_config.json, without one to false."""
    (tmp_path / "saved").mkdir()
    backend = _whole()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.save(str(tmp_path / "tokenizer.json"))
    read = load_tokenizer(str(tmp_path))
    template = SimpleNamespace(tokenizer=read, start_id=None, closing_ids=(), latent_id=None, eos_id=0, pad_id=0)
    write_description(tmp_path / "saved", Description(Text(), _model(read)), template)
    assert json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())["add_prefix_space"] is True


def test_tokens_that_no_file_names_are_the_class_s_own(tmp_path):
    """As the hub's GPT-2 has it; a token that the vocabulary lacks is not made up."""
    backend = _write(tmp_path, model_max_length=1024)
    size = len(backend.get_vocab())
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|endoftext|>", None)
    _write(tmp_path, tokenizer_class="RobertaTokenizer")
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.eos_token, len(tokenizer)) == (None, size)


@pytest.mark.parametrize("named", [["own.Own", None], {"AutoTokenizer": [None, "own.Own"]}])
def test_tokenizer_s_own_code_is_never_run(tmp_path, monkeypatch, caplog, named):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # what asks is answered
    backend = _write(tmp_path, **SETTINGS, tokenizer_class="Own", auto_map=named)
    code = f"from transformers import PreTrainedTokenizerFast as Own\nopen({str(tmp_path / 'ran')!r}, 'w')\n"
    (tmp_path / "own.py").write_text(code)
    assert _ids(load_tokenizer(str(tmp_path))) == [backend.encode(text).ids for text in WRITTEN]
    assert caplog.messages == [f"tokenizer {tmp_path}: its own code is not run; its files are taken as they are"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(UserError, match=r"Own .*vocab\.json.*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


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

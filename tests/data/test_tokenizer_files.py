"""Tokenizer files: held against the `tokenizers` library, which reads tokenizer.json alone, and ids by hand."""

import json
from types import SimpleNamespace

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from slpo_jax.architectures.architecture import Text
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.checkpoints.checkpoint import Checkpoint
from slpo_jax.checkpoints.description import Description, write_description
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.models.gpt2 import GPT2Config

TEXTS = ["<think>\nOkay", " don't 12345\n\n x <|eos|>two words", "  12 + 345 na\u00efve"]
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


def _ids(tokenizer, texts=TEXTS) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("name", CLASSES)
def test_tokenizer_json_decides_over_the_class(tmp_path, name):
    backend = _write(tmp_path, **SETTINGS, **({"tokenizer_class": name} if name else {}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert _ids(tokenizer) == [backend.encode(text).ids for text in TEXTS]
    # By hand: bos, three tokens; GPT-2's pre-tokenizer would keep ">" and the line end apart.
    assert tokenizer.convert_ids_to_tokens(_ids(tokenizer)[0]) == ["<|bos|>", "<think", ">\u010a", "Okay"]


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "RobertaTokenizer"])
def test_tokenizer_json_decides_in_what_is_saved(tmp_path, name):
    """For transformers 5, and with what 4.57 takes: its class, and its name for the tokens."""
    (tmp_path / "read").mkdir()
    (tmp_path / "saved").mkdir()
    backend = _write(tmp_path / "read", **SETTINGS, tokenizer_class=name)
    ids = [backend.encode(text).ids for text in TEXTS]
    read = load_tokenizer(str(tmp_path / "read"))
    template = Coconut().template(read)
    Checkpoint(Description(Coconut(), _model(read)), template).write(tmp_path / "saved")
    saved = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert [saved.encode(text).ids for text in TEXTS] == ids
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
        assert again.decode([template.start_id, *ids[0]], skip_special_tokens=True) == TEXTS[0]


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
    assert _ids(load_tokenizer(str(tmp_path))) == [backend.encode(text).ids for text in TEXTS]
    assert caplog.messages == [f"tokenizer {tmp_path}: its own code is not run; its files are taken as they are"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(UserError, match=r"Own doesn't say how text is cut for vocab\.json; add a tokenizer\.json$"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()

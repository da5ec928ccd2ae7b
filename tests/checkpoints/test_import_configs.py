"""A config.json that leaves something out, isn't whole, or is of a model that ours can't be."""

import functools

import pytest
import transformers

from broken import to_be_broken
from published_bases import LLAMA3_ROPE, base_gpt2, base_llama
from slpo_jax.checkpoints.hf_config import from_hugging_face


@pytest.fixture
def checkpoint(tmp_path):
    """(writer, options) -> a checkpoint to be spoilt."""
    return functools.partial(to_be_broken, tmp_path)


@pytest.mark.parametrize(
    ("write", "changes", "parts"),
    [
        (base_gpt2, {"activation_function": "relu"}, ("activation_function", "relu")),
        (base_gpt2, {"model_type": "gpt_neox"}, ("model_type", "gpt_neox")),
        (base_gpt2, {"n_head": None}, ("n_head", "missing")),
        (base_gpt2, {"n_head": "two"}, ("n_head", "two")),
        (base_gpt2, {"tie_word_embeddings": False}, ("lm_head.weight", "missing")),
        (base_llama, {"attention_bias": True}, ("attention_bias",)),
        (base_llama, {"model_type": "qwen2"}, ("self_attn.k_proj.bias", "missing")),
        (base_llama, {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, ("layer_types",)),
        (base_llama, {"model_type": "qwen3"}, ("self_attn.k_norm.weight", "missing")),
        (base_llama, {"model_type": "qwen3", "use_sliding_window": True}, ("use_sliding_window",)),
        (base_llama, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ("yarn",)),
        (base_llama, {"rope_parameters": LLAMA3_ROPE | {"factor": None}}, ("factor", "missing")),
        (base_llama, {"rope_parameters": 8}, ("rope_parameters", "8")),
        (base_llama, dict.fromkeys(("head_dim", "num_key_value_heads")) | {"num_attention_heads": 3}, ("heads: 3",)),
        (base_llama, {"num_key_value_heads": 3}, ("num_key_value_heads", "3")),
        (base_llama, {"tie_word_embeddings": True}, ("lm_head.weight", "differs")),
    ],
)
def test_config_of_another_model(checkpoint, write, changes, parts):
    broken = checkpoint(write)
    broken.edit("config.json", **changes)
    if str(changes.get("model_type")).startswith("qwen"):
        broken.settings["reasoner"] = f"coconut_{changes['model_type']}"
    broken.refused(str(broken.init), *parts)


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\x00\xff"])
def test_a_config_that_is_no_json(checkpoint, text):
    broken = checkpoint(base_gpt2)
    (broken.folder / "config.json").write_text(text, encoding="latin-1")
    broken.refused(str(broken.folder / "config.json"), "JSON")


_LLAMA = dict(hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8)


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("gpt2", dict(n_positions=8, n_embd=4, n_layer=1, n_head=2)),
        ("llama", _LLAMA),
        ("qwen2", _LLAMA),
        ("qwen3", _LLAMA),
    ],
)
def test_what_is_left_out_is_transformers_default(kind, shapes):
    found = from_hugging_face({"model_type": kind, "vocab_size": 5, **shapes}, "config.json")
    default = transformers.AutoConfig.for_model(kind, vocab_size=5, **shapes)
    assert found.norm_epsilon == (default.layer_norm_epsilon if kind == "gpt2" else default.rms_norm_eps)
    assert found.tied == default.tie_word_embeddings
    if kind != "gpt2":
        rope = getattr(default, "rope_parameters", None) or {"rope_theta": default.rope_theta}  # 5 has the first
        assert (found.rope_theta, found.n_kv_head) == (rope["rope_theta"], 2)
        assert found.head_dim == (default.head_dim if hasattr(default, "head_dim") else 2)


@pytest.mark.parametrize("rope", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None}])
def test_the_base_of_rope_s_frequencies_is_in_either_place(rope):
    """In the second since transformers 5."""
    found = from_hugging_face({"model_type": "llama", "vocab_size": 5, **_LLAMA, **rope}, "config.json")
    assert found.rope_theta == 5e5

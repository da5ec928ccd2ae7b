"""Checkpoints that can't be used end in one line that names the file, tensor or key, and leave nothing behind."""

import functools
from pathlib import Path

import pytest
import transformers

from broken import to_be_broken
from published import (
    coconut_hugging_face,
    coconut_original,
    codi_hugging_face,
    codi_original,
    tokenizer,
    torch,
)
from published_bases import LLAMA3_ROPE, base_gguf, base_gpt2, base_llama
from slpo_jax.checkpoints.description import from_hugging_face
from slpo_jax.checkpoints.external import fitting
from slpo_jax.errors import UserError


@pytest.fixture
def checkpoint(tmp_path):
    """(writer, options) -> a checkpoint to be spoilt."""
    return functools.partial(to_be_broken, tmp_path)


# How tensors are spoilt, and what is said of them.


def _missing(name, said=""):
    return lambda state: state.pop(name), (said or name, "missing")


def _unexpected(name, *shape):
    return lambda state: state.update({name: torch.ones(shape or 16)}), (
        f"tensor {name} is unexpected",
    )


def _reshaped(name, *shape):
    said = f"tensor {name} has shape {list(shape)}", "says ["
    return lambda state: state.update({name: torch.ones(shape)}), said


def _changed(name):
    def change(state):
        state[name] = state[name].clone()
        state[name][3, 4] += 1e-3

    return change, (name, "differs")


WTE = "transformer.wte.weight"
C_FC = "transformer.h.1.mlp.c_fc.weight"
COCONUT = (coconut_hugging_face,)
OUR_GPT2 = (coconut_original, "gpt2")
OUR_LLAMA = (coconut_original, "llama")
CODI = (codi_original, "llama")
LLAMA = (base_llama,)
QWEN2 = (base_llama, "qwen2")
EVALUATE = {"stages": ("evaluate",)}
# Settings of another checkpoint than that which is there.
ASKED = [
    (LLAMA, {"reasoner": "coconut_gpt2"}, ("reasoner: is coconut_gpt2", "is a coconut_llama checkpoint")),
    (OUR_LLAMA, {"reasoner": "coconut_gpt2"}, ("reasoner: is coconut_gpt2", "is a coconut_llama checkpoint")),
    (CODI, {"reasoner": "coconut_llama"}, ("reasoner: is coconut_llama", "is a codi_llama checkpoint")),
    ((codi_hugging_face,), {"reasoner": "coconut_gpt2"}, ("reasoner: is coconut_gpt2", "is a codi_gpt2 checkpoint")),
    (COCONUT, {"reasoner": "codi_gpt2"}, ("base model", "projector")),
    (COCONUT, {"gate.enabled": True}, ("config.gate.enabled", "cold_start")),
    (CODI, {"lora_alpha": None}, ("config.lora_alpha",)),
    ((base_gpt2,), EVALUATE, ("base model", "special tokens", "imitate")),
    ((base_gpt2,), EVALUATE | {"reasoner": "codi_gpt2"}, ("base model", "imitate")),
    ((base_gguf,), EVALUATE, ("base model", "special tokens", "imitate")),
    ((base_gguf,), EVALUATE | {"reasoner": "codi_llama"}, ("base model", "imitate")),
]  # fmt: skip


@pytest.mark.parametrize(("write", "settings", "parts"), ASKED)
def test_another_checkpoint_than_the_settings_ask_for(
    checkpoint, write, settings, parts
):
    broken = checkpoint(*write)
    broken.settings |= settings
    broken.refused(str(broken.init), *parts)


def test_truncated_files(checkpoint):
    broken = checkpoint(coconut_hugging_face, "sharded")
    shard = sorted(broken.init.glob("model-*"))[2].name
    broken.cut(shard)
    broken.refused(shard, "truncated or corrupt")
    (broken.init / shard).unlink()
    broken.refused(shard, "No such file")


K_PROJ = "base_causallm.model.layers.1.self_attn.k_proj.weight"
OUR = "base_causallm"
LORA = "codi.base_model.model"
UP = "model.layers.1.mlp.up_proj"
# Of masks only the causal constant that older transformers stored may be left out; a head is no embedding.
SPOILT = [
    (COCONUT, *_missing(C_FC)),
    (OUR_LLAMA, *_missing(K_PROJ, "k_proj.weight")),
    (CODI, *_missing("prj.ln.bias", "projector.4.bias")),
    (
        CODI,
        *_missing(f"{LORA}.{UP}.lora_A.default.weight", f"{UP}.lora_A.default.weight"),
    ),
    (
        CODI,
        *_missing(f"{LORA}.{UP}.lora_B.default.weight", f"{UP}.lora_B.default.weight"),
    ),
    (CODI, *_missing(f"{LORA}.{UP}.base_layer.weight", f"{UP}.base_layer.weight")),
    (QWEN2, *_missing("model.norm.weight")),
    (LLAMA, *_missing("model.embed_tokens.weight")),
    (COCONUT, *_unexpected("transformer.h.2.ln_1.weight")),
    (COCONUT, *_unexpected("transformer.h.0.attn.bias", 1, 1, 96, 96)),
    (OUR_GPT2, *_unexpected(f"{OUR}.transformer.h.0.attn.extra")),
    (OUR_GPT2, *_unexpected("gate.weight")),
    (CODI, *_unexpected("teacher.weight")),
    (CODI, *_unexpected("prj.5.weight")),
    (
        CODI,
        _unexpected(f"{LORA}.{UP}.lora_A.other.weight", 8, 16)[0],
        ("up_proj.lora_A.other.weight", "unexpected"),
    ),
    (COCONUT, *_reshaped(C_FC, 40, 16)),
    (CODI, *_reshaped("prj.ln.weight", 20)),
    (CODI, *_reshaped("codi.base_model.model.model.norm.weight", 1, 16)),
    (
        CODI,
        _reshaped(f"{LORA}.{UP}.lora_B.default.weight", 24, 7)[0],
        ("lora_B.default.weight", "don't fit"),
    ),
    (OUR_GPT2, *_changed("embedding.weight")),
    (OUR_GPT2, *_changed(f"{OUR}.lm_head.weight")),
]


@pytest.mark.parametrize(("write", "change", "parts"), SPOILT)
def test_a_tensor_that_is_missing_unexpected_or_another(
    checkpoint, write, change, parts
):
    broken = checkpoint(*write)
    if write[0] is base_llama:
        broken.gather_shards()
    broken.tensors(change)
    broken.refused(str(broken.init), *parts)


def test_rows_that_do_not_fit_the_vocabulary(checkpoint):
    broken = checkpoint(coconut_hugging_face)
    broken.tensors(lambda state: state.update({WTE: state[WTE][:-1]}))
    broken.edit("config.json", vocab_size=323)
    broken.refused(str(broken.init), WTE, "323 rows", "tokenizer 324")


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (("config.gate.hidden", "is 3"), "config.gate.hidden: is 3"),
        (("f.bin: is cut",), "config.base: B doesn't fit: f.bin: is cut"),
    ],
)
def test_a_key_that_is_at_fault_itself_is_no_fault_of_the_base_s(said, line):
    with pytest.raises(UserError) as error, fitting("B"):
        raise UserError(*said)
    assert str(error.value) == line


@pytest.mark.parametrize("write", [coconut_original, codi_original])
def test_a_wrong_base_is_named_by_its_key(checkpoint, write):
    """With tokens that are too many, of another size, of another family, or of one that is not known."""
    broken = checkpoint(write, "gpt2")
    base = broken.folder / "base"
    init = str(broken.init)
    config = (base / "config.json").read_text()
    fits = f"config.base: {base} doesn't fit"
    llama = dict(
        model_type="llama",
        hidden_size=16,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=24,
    )
    for more, changes, parts in (
        (
            2,
            {"vocab_size": 323},
            ("has 324 rows, config.base 323 (+ 3 for the reasoner's tokens)",),
        ),
        (
            0,
            {"vocab_size": 321, "n_embd": 8},
            (fits, init, "wte.weight has shape [324, 16]", "[324, 8]"),
        ),
        (0, {"n_layer": 3}, (fits, "transformer.h.2.")),
        (0, {"n_layer": 1}, (fits, "transformer.h.1.")),
        (0, llama | {"max_position_embeddings": 96}, (fits, "is of a llama model")),
        (0, {"model_type": "qwen3_moe"}, (fits, "qwen3_moe")),
        (
            5,
            {},
            (f"config.base: {base}", "tokens" if write is codi_original else "rows"),
        ),
    ):
        texts = tokenizer("gpt2").backend_tokenizer
        texts.add_tokens(["another", "vocabulary", "of", "more", "tokens"][:more])
        texts.save(str(base / "tokenizer.json"))
        (base / "config.json").write_text(config)
        broken.edit("base/config.json", **changes)
        broken.refused(*parts)


def test_an_unknown_prefix_says_what_the_file_holds(tmp_path):
    stored = {
        f"llm.model.layers.{i}.mlp.up_proj.weight": torch.ones(2, 3) for i in range(5)
    }
    stored |= {
        "latent_head.mean.weight": torch.ones(3),
        "latent_head.mean.bias": torch.ones(3),
    }
    stored["step"] = torch.ones(1)
    torch.save(stored, tmp_path / "x.bin")
    broken = to_be_broken(tmp_path, coconut_original, "gpt2")
    broken.settings["init"] = str(tmp_path / "x.bin")
    broken.refused(f"{tmp_path / 'x.bin'}: neither", "8 tensors, e.g. ")


def test_no_base(checkpoint):
    broken = checkpoint(coconut_original, "gpt2")
    base = broken.settings.pop("base")
    broken.refused("config.base: not set", str(broken.init))
    broken.settings["base"] = str(broken.folder / "nowhere" / "else" / "x")
    broken.refused("config.base", "nowhere")
    (Path(base) / "tokenizer.json").unlink()
    broken.settings["base"] = base
    broken.refused("config.base", "without a tokenizer")
    (Path(base) / "config.json").unlink()
    broken.refused(str(Path(base) / "config.json"), "no such file")


def test_hub_ids_without_a_network(checkpoint, monkeypatch):
    def unreachable(*_: object) -> None:
        raise OSError("no name service")

    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    broken = checkpoint(coconut_original, "gpt2")
    broken.settings["base"] = "nobody-at-all/no-such-model"
    broken.refused("config.base: nobody-at-all/no-such-model", "network")
    broken.settings["init"] = "nobody-at-all/no-such-model"
    broken.refused("config.init: nobody-at-all/no-such-model", "network")


# A config.json that leaves something out, isn't whole, or is of a model that ours can't be.


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
        (
            base_llama,
            {
                "model_type": "qwen2",
                "layer_types": ["full_attention", "sliding_attention"],
            },
            ("layer_types",),
        ),
        (
            base_llama,
            {"model_type": "qwen3_moe"},
            ("model_type 'qwen3_moe' is not supported",),
        ),
        (base_llama, {"model_type": "qwen3"}, ("self_attn.k_norm.weight", "missing")),
        (
            base_llama,
            {"model_type": "qwen3", "use_sliding_window": True},
            ("use_sliding_window",),
        ),
        (
            base_llama,
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            ("yarn",),
        ),
        (
            base_llama,
            {"rope_parameters": LLAMA3_ROPE | {"factor": None}},
            ("factor", "missing"),
        ),
        (base_llama, {"rope_parameters": 8}, ("rope_parameters", "8")),
        (
            base_llama,
            dict.fromkeys(("head_dim", "num_key_value_heads"))
            | {"num_attention_heads": 3},
            ("heads: 3",),
        ),
        (base_llama, {"num_key_value_heads": 3}, ("num_key_value_heads", "3")),
        (base_llama, {"tie_word_embeddings": True}, ("lm_head.weight", "differs")),
    ],
)
def test_config_of_another_model(checkpoint, write, changes, parts):
    broken = checkpoint(write)
    broken.edit("config.json", **changes)
    if str(changes.get("model_type")).startswith("qwen"):
        broken.settings["reasoner"] = (
            f"coconut_{changes['model_type'].removesuffix('_moe')}"
        )
    broken.refused(str(broken.init), *parts)


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\x00\xff"])
def test_a_config_that_is_no_json(checkpoint, text):
    broken = checkpoint(base_gpt2)
    (broken.folder / "config.json").write_text(text, encoding="latin-1")
    broken.refused(str(broken.folder / "config.json"), "JSON")


_LLAMA = dict(
    hidden_size=4,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=8,
)


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
    found = from_hugging_face(
        {"model_type": kind, "vocab_size": 5, **shapes}, "config.json"
    )
    default = transformers.AutoConfig.for_model(kind, vocab_size=5, **shapes)
    assert found.norm_epsilon == (
        default.layer_norm_epsilon if kind == "gpt2" else default.rms_norm_eps
    )
    assert found.tied == default.tie_word_embeddings
    if kind != "gpt2":
        rope = getattr(default, "rope_parameters", None) or {
            "rope_theta": default.rope_theta
        }  # 5 has the first
        assert (found.rope_theta, found.n_kv_head) == (rope["rope_theta"], 2)
        assert found.head_dim == (
            default.head_dim if hasattr(default, "head_dim") else 2
        )


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None}],
)
def test_the_base_of_rope_s_frequencies_is_in_either_place(rope):
    """In the second since transformers 5."""
    found = from_hugging_face(
        {"model_type": "llama", "vocab_size": 5, **_LLAMA, **rope}, "config.json"
    )
    assert found.rope_theta == 5e5

"""Checkpoints that can't be used end in one line that names the file, tensor or key, and leave nothing behind."""

import functools
from pathlib import Path

import pytest

from broken import to_be_broken
from published import (
    coconut_hugging_face,
    coconut_original,
    codi_hugging_face,
    codi_original,
    safetensors,
    tokenizer,
    torch,
)
from published_bases import base_gguf, base_gpt2, base_llama


@pytest.fixture
def checkpoint(tmp_path):
    """(writer, options) -> a checkpoint to be spoilt."""
    return functools.partial(to_be_broken, tmp_path)


WTE, C_FC = "transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize(
    ("write", "options", "reasoner", "part"),
    [
        (base_llama, (), "coconut_gpt2", "coconut_llama"),
        (coconut_original, ("llama",), "coconut_gpt2", "coconut_llama"),
        (codi_original, ("llama",), "coconut_llama", "codi_llama"),
        (codi_hugging_face, (), "coconut_gpt2", "codi_gpt2"),
    ],
)
def test_another_reasoner_than_the_files(checkpoint, write, options, reasoner, part):
    broken = checkpoint(write, *options)
    broken.settings["reasoner"] = reasoner
    broken.refused(f"config.reasoner: is {reasoner}", str(broken.init), f"is a {part} checkpoint")


def test_a_coconut_directory_is_no_codi(checkpoint):
    broken = checkpoint(coconut_hugging_face)
    broken.settings["reasoner"] = "codi_gpt2"
    broken.refused(str(broken.init), "base model", "projector")


def test_truncated_files(checkpoint):
    broken = checkpoint(coconut_hugging_face, "sharded")
    shard = sorted(broken.init.glob("model-*"))[2].name
    broken.cut(shard)
    broken.refused(shard, "truncated or corrupt")
    (broken.init / shard).unlink()
    broken.refused(shard, "No such file")


@pytest.mark.parametrize(
    ("write", "options", "name", "named"),
    [
        (coconut_hugging_face, (), C_FC, C_FC),
        (coconut_original, ("llama",), "base_causallm.model.layers.1.self_attn.k_proj.weight", "k_proj.weight"),
        (codi_original, ("llama",), "prj.ln.bias", "projector.4.bias"),
        (base_llama, ("qwen2",), "model.norm.weight", "model.norm.weight"),
    ],
)
def test_a_missing_tensor(checkpoint, write, options, name, named):
    broken = checkpoint(write, *options)
    if write is base_llama:
        broken.gather_shards()
    broken.tensors(lambda state: state.pop(name))
    broken.refused(str(broken.init), named, "missing")


def test_a_missing_embedding_of_an_untied_model(checkpoint):
    """The head that is there must not be taken for it."""
    broken = checkpoint(base_llama)
    broken.gather_shards()
    broken.tensors(lambda state: state.pop("model.embed_tokens.weight"))
    broken.refused(str(broken.init), "model.embed_tokens.weight", "missing")


@pytest.mark.parametrize(
    ("write", "options", "name"),
    [
        (coconut_hugging_face, (), "transformer.h.2.ln_1.weight"),
        (coconut_original, ("gpt2",), "base_causallm.transformer.h.0.attn.extra"),
        (coconut_original, ("gpt2",), "gate.weight"),
        (codi_original, ("llama",), "teacher.weight"),
        (codi_original, ("llama",), "prj.5.weight"),
    ],
)
def test_an_extra_tensor(checkpoint, write, options, name):
    broken = checkpoint(write, *options)
    broken.tensors(lambda state: state.update({name: torch.ones(16)}))
    broken.refused(str(broken.init), f"tensor {name} is unexpected")


def test_a_mask_that_is_not_causal(checkpoint):
    """Only the constant that older transformers stored may be left out."""
    broken = checkpoint(coconut_hugging_face)
    name = "transformer.h.0.attn.bias"
    broken.tensors(lambda state: state.update({name: torch.ones(1, 1, 96, 96)}))
    broken.refused(str(broken.init), f"tensor {name} is unexpected")


@pytest.mark.parametrize(
    ("write", "options", "name", "shape"),
    [
        (coconut_hugging_face, (), C_FC, (40, 16)),
        (codi_original, ("llama",), "prj.ln.weight", (20,)),
        (codi_original, ("llama",), "codi.base_model.model.model.norm.weight", (1, 16)),
    ],
)
def test_a_wrong_shape(checkpoint, write, options, name, shape):
    broken = checkpoint(write, *options)
    broken.tensors(lambda state: state.update({name: torch.ones(shape)}))
    broken.refused(str(broken.init), f"tensor {name} has shape {list(shape)}", "says [")


def test_rows_that_do_not_fit_the_vocabulary(checkpoint):
    broken = checkpoint(coconut_hugging_face)
    broken.tensors(lambda state: state.update({WTE: state[WTE][:-1]}))
    broken.edit("config.json", vocab_size=323)
    broken.refused(str(broken.init), WTE, "323 rows", "tokenizer 324")


@pytest.mark.parametrize("write", [coconut_original, codi_original])
def test_the_base_of_another_checkpoint(checkpoint, write):
    broken = checkpoint(write, "gpt2")
    base = broken.folder / "base"
    smaller = tokenizer("gpt2").backend_tokenizer
    smaller.add_tokens(["another", "vocabulary"])
    smaller.save(str(base / "tokenizer.json"))
    broken.edit("base/config.json", vocab_size=323)
    broken.refused("has 324 rows, config.base 323 (+ 3 for the reasoner's tokens)")
    broken.edit("base/config.json", vocab_size=321, n_embd=8)
    tokenizer("gpt2").backend_tokenizer.save(str(base / "tokenizer.json"))
    broken.refused(f"config.base: {base} doesn't fit", str(broken.init), "wte.weight has shape [324, 16]", "[324, 8]")


@pytest.mark.parametrize("write", [coconut_original, codi_original])
def test_a_wrong_base_is_named_by_its_key(checkpoint, write):
    """Of another depth, of another family, of a family that is not known, or with a tokenizer of too many tokens."""
    broken = checkpoint(write, "gpt2")
    base = broken.folder / "base"
    config, texts = (base / "config.json").read_text(), (base / "tokenizer.json").read_text()
    llama = dict(model_type="llama", hidden_size=16, num_attention_heads=4, num_hidden_layers=2, intermediate_size=24)
    for changes, part in (
        ({"n_layer": 3}, "transformer.h.2."),
        ({"n_layer": 1}, "transformer.h.1."),
        (llama | {"max_position_embeddings": 96}, "is of a llama model"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe"),
    ):
        (base / "config.json").write_text(config)
        broken.edit("base/config.json", **changes)
        broken.refused(f"config.base: {base} doesn't fit: ", part)
    (base / "config.json").write_text(config)
    more = tokenizer("gpt2")
    more.add_tokens(["another", "vocabulary", "of", "more", "tokens"])
    more.backend_tokenizer.save(str(base / "tokenizer.json"))
    broken.refused(f"config.base: {base}", "tokens" if write is codi_original else "rows")
    (base / "tokenizer.json").write_text(texts)


def test_an_unknown_prefix_says_what_the_file_holds(tmp_path):
    stored = {f"llm.model.layers.{i}.mlp.up_proj.weight": torch.ones(2, 3) for i in range(5)}
    stored |= {"latent_head.mean.weight": torch.ones(3), "latent_head.mean.bias": torch.ones(3)}
    stored["step"] = torch.ones(1)
    safetensors.torch.save_file(stored, tmp_path / "x.safetensors")
    broken = to_be_broken(tmp_path, coconut_original, "gpt2")
    broken.settings["init"] = str(tmp_path / "x.safetensors")
    broken.refused(f"{tmp_path / 'x.safetensors'}: neither", "8 tensors, e.g. ")


def test_lora(checkpoint):
    broken = checkpoint(codi_original, "llama")
    place = "codi.base_model.model.model.layers.1.mlp.up_proj"
    alpha, broken.settings["lora_alpha"] = broken.settings["lora_alpha"], None
    broken.refused(str(broken.init), "config.lora_alpha")
    broken.settings["lora_alpha"] = alpha
    taken = {}
    for part in ("lora_B.default.weight", "lora_A.default.weight", "base_layer.weight"):
        name = f"{place}.{part}"
        broken.tensors(lambda state, name=name: taken.update({name: state.pop(name)}))
        broken.refused(str(broken.init), place.removeprefix("codi.base_model.model."), part, "missing")
        broken.tensors(lambda state: state.update(taken))
    rank = {f"{place}.lora_B.default.weight": torch.ones(24, 7)}
    broken.tensors(lambda state: state.update(rank))
    broken.refused(str(broken.init), "up_proj.lora_B.default.weight", "[24, 7]", "don't fit")
    broken.tensors(lambda state: state.update(taken | {f"{place}.lora_A.other.weight": torch.ones(8, 16)}))
    broken.refused(str(broken.init), "up_proj.lora_A.other.weight", "unexpected")


@pytest.mark.parametrize("name", ["embedding.weight", "base_causallm.lm_head.weight"])
def test_copies_that_differ(checkpoint, name):
    broken = checkpoint(coconut_original, "gpt2")

    def change(state):
        state[name] = state[name].clone()
        state[name][3, 4] += 1e-3

    broken.tensors(change)
    broken.refused(str(broken.init), name, "differs")


def test_a_base_model_evaluated_as_a_reasoner(checkpoint):
    for write in (base_gpt2, base_gguf):
        broken = checkpoint(write)
        broken.settings["stages"] = ("evaluate",)
        broken.refused(str(broken.init), "base model", "special tokens", "imitate")
        broken.settings["reasoner"] = broken.settings["reasoner"].replace("coconut", "codi")
        broken.refused(str(broken.init), "base model", "imitate")


def test_no_gate(checkpoint):
    broken = checkpoint(coconut_hugging_face)
    broken.settings["gate.enabled"] = True
    broken.refused("config.gate.enabled", str(broken.init), "cold_start")


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
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    def unreachable(*_: object) -> None:
        raise OSError("no name service")

    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    broken = checkpoint(coconut_original, "gpt2")
    broken.settings["base"] = "nobody-at-all/no-such-model"
    broken.refused("config.base: nobody-at-all/no-such-model", "network")
    broken.settings["init"] = "nobody-at-all/no-such-model"
    broken.refused("config.init: nobody-at-all/no-such-model", "network")

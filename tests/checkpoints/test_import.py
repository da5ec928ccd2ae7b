"""Parameters, ids and texts of published checkpoints arrive as the programs that wrote them have them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from broken import Broken
from published import (
    QUESTIONS,
    coconut_hugging_face,
    coconut_original,
    codi_hugging_face,
    codi_original,
    random_model,
    tokenizer,
    torch,
)
from published_bases import base_gguf, base_gpt2, base_llama, config_of, copied, written
from slpo_jax.checkpoints.checkpoint import Checkpoint, find_checkpoint
from slpo_jax.config import read_config
from slpo_jax.config.registry import read_config_file
from slpo_jax.models.gpt2 import GPT2Config
from tiny import load_hf
from tiny_llama import load_hf_llama

CASES = {
    "COCONUT in Hugging Face's layout": (coconut_hugging_face,),
    "COCONUT, sharded": (coconut_hugging_face, "sharded"),
    "COCONUT, pytorch_model.bin": (coconut_hugging_face, "bin"),
    "COCONUT's own, GPT-2": (coconut_original, "gpt2"),
    "COCONUT's own, Llama": (coconut_original, "llama"),
    "COCONUT's own, safetensors": (coconut_original, "gpt2", True),
    "COCONUT's own, padded base": (coconut_original, "llama", False, 9),
    "CODI in Hugging Face's layout": (codi_hugging_face,),
    "CODI's own, GPT-2": (codi_original, "gpt2"),
    "CODI's own, Llama": (codi_original, "llama"),
    "CODI's own, safetensors": (codi_original, "llama", True),
    "CODI's own, padded base": (codi_original, "gpt2", False, 9),
    "GPT-2": (base_gpt2,),
    "GPT-2 as on the hub": (base_gpt2, True),
    "Llama": (base_llama,),
    "Qwen2": (base_llama, "qwen2"),
    "Qwen3": (base_llama, "qwen3"),
    "GGUF": (base_gguf,),
}


def open_case(settings, folder: Path, **changes) -> Checkpoint:
    return find_checkpoint(read_config(config_of(settings | changes, folder)))


SHIPPED = {
    "codi_gpt2": "codi_gpt2",
    "codi_llama": "codi_llama1b",
    "coconut_gpt2": "coconut_gpt2",
}


def shipped_config(case):
    """The config of such a checkpoint that comes along, with its base where this has no need of one."""
    config = read_config_file(SHIPPED.get(case.settings["reasoner"], "coconut_llama1b"))
    config.update_from_flattened_dict({"gate.enabled": False, **case.settings})
    return read_config(config)


def assert_arrived(checkpoint: Checkpoint, state, tolerance: float = 0.0) -> None:
    """The language model, as transformers' state dict."""
    model = checkpoint.description.model
    load = load_hf if isinstance(model, GPT2Config) else load_hf_llama
    found = load(checkpoint.read()["reasoner"], model).state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        np.testing.assert_allclose(
            found[name], tensor, rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.mark.parametrize("name", CASES)
def test_everything_arrives(name, monkeypatch):
    """With the shipped config, and without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write, *options = CASES[name]
    case = written(write, *options)
    checkpoint = find_checkpoint(shipped_config(case))
    state = {
        key: value
        for key, value in case.model.state_dict().items()
        if not key.startswith("projector.")
    }
    # Adapters are added, and rows averaged, in another order of summation.
    assert_arrived(
        checkpoint, state, 1e-6 if write in (codi_original, base_gguf) else 0.0
    )
    template = checkpoint.template
    assert (template.start_id, template.closing_ids, template.eos_id) == (
        case.start,
        (case.end,),
        case.eos,
    )
    assert template.banned_ids == case.banned
    assert [template.prompt(question) for question in QUESTIONS] == [
        case.prompt(q) for q in QUESTIONS
    ]
    assert bool(checkpoint.lacks) == name.startswith(("GPT-2", "Llama", "Qwen", "GGUF"))
    assert checkpoint.read()["reasoner"].keys() == (
        {"backbone", "projector"} if "CODI" in name else {"backbone"}
    )


def test_what_older_programs_left_in_their_files(tmp_path):
    case = copied(tmp_path / "gpt2", coconut_original, "gpt2")
    mask = torch.ones(1, 1, 96, 96, dtype=torch.uint8).tril()

    def add(state):
        state["base_causallm.transformer.h.1.attn.bias"] = mask
        state["base_causallm.transformer.h.1.attn.masked_bias"] = torch.tensor(-10000.0)
        for name in list(state):
            state[f"module.{name}"] = state.pop(name)

    Broken(tmp_path, case.settings).tensors(add)
    assert_arrived(open_case(case.settings, tmp_path), case.model.state_dict())
    case = copied(tmp_path / "llama", coconut_original, "llama")
    add_one = {
        "base_causallm.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)
    }
    Broken(tmp_path, case.settings).tensors(lambda state: state.update(add_one))
    assert_arrived(open_case(case.settings, tmp_path), case.model.state_dict())


def test_pefts_own_word_on_the_scale_goes_first(tmp_path):
    case = copied(tmp_path, codi_original, "llama")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"lora_alpha": 16, "r": 8})
    )
    settings = case.settings | {"init": str(tmp_path), "lora_alpha": 77.0}
    assert_arrived(open_case(settings, tmp_path), case.model.state_dict(), 1e-6)


def test_an_original_state_dict_with_its_base_s_files_beside_it(tmp_path):
    """They stand for a base that is not named; with one the config is the base's, and the tokenizer still its own."""
    case = copied(tmp_path, coconut_original, "gpt2", True)
    base = Path(case.settings["base"])
    own = tmp_path / "own"
    shutil.copytree(base, own)
    shutil.copy(case.settings["init"], own / "model.safetensors")
    settings = {**case.settings, "init": str(own), "base": ""}
    assert_arrived(open_case(settings, tmp_path), case.model.state_dict())
    (own / "config.json").write_text("{}")
    (base / "tokenizer.json").write_text("{}")
    opened = open_case(settings | {"base": str(base)}, tmp_path)
    assert_arrived(opened, case.model.state_dict())
    assert (opened.template.start_id, opened.template.closing_ids) == (
        case.start,
        (case.end,),
    )


def test_padded_base_models(tmp_path):
    """COCONUT's tokens follow the tokenizer's, as in its program; CODI's follow the model's vocabulary."""
    texts = tokenizer("gpt2")
    model = random_model("gpt2", len(texts) + 9)
    model.save_pretrained(tmp_path)
    texts.save_pretrained(tmp_path)
    settings = {
        "init": str(tmp_path),
        "reasoner": "coconut_gpt2",
        "stages": ("imitate",),
    }
    coconut = open_case(settings, tmp_path)
    assert (coconut.template.start_id, coconut.description.model.vocab_size) == (
        len(texts),
        len(texts) + 9,
    )
    assert_arrived(coconut, model.state_dict())
    codi = open_case(settings | {"reasoner": "codi_gpt2"}, tmp_path)
    own = codi.template
    assert (own.pad_id, own.start_id, *own.closing_ids) == tuple(
        range(len(texts) + 9, len(texts) + 12)
    )
    assert (
        codi.description.model.vocab_size
        == len(codi.template.tokenizer)
        == len(texts) + 12
    )

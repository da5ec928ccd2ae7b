"""Weights that are NaN or infinite: one line, with tensor and file, however a checkpoint is opened."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import slpo_jax as slpo
from asked import run_params, workdir
from slpo_jax.api.conversion import export_checkpoint
from slpo_jax.checkpoints.checkpoint import find_checkpoint
from slpo_jax.errors import UserError
from slpo_jax.io.orbax import save_params
from tiny_folder import WIDTH, config_for, lora_pair, peft_folder, tiny_folder
from tiny_gguf import tiny_file, tiny_tensors


def _spoilt(array, value=np.nan):
    array = np.array(array)
    array.flat[-1] = value
    return array


def _hugging_face(folder, value):
    tiny_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.h.1.mlp.c_fc.bias"
    save_file(
        tensors | {name: _spoilt(tensors[name], value)}, folder / "model.safetensors"
    )
    return config_for(folder, "text_gpt2"), folder / "model.safetensors", name


def _torch(folder, value):
    torch = pytest.importorskip("torch")
    config, file, name = _hugging_face(folder, value)
    tensors = {each: torch.from_numpy(array) for each, array in load_file(file).items()}
    tensors[name] = tensors[name].to(torch.bfloat16)
    torch.save(tensors, folder / "pytorch_model.bin")
    file.unlink()
    return config, folder / "pytorch_model.bin", name


def _adapters(folder, value):
    """The base is whole, its adapter is not."""
    tiny_folder(folder / "base")
    pair = lora_pair("transformer.h.1.attn.c_proj", WIDTH, WIDTH)
    (name,) = (name for name in pair if "lora_B" in name)
    file = peft_folder(folder, pair | {name: _spoilt(pair[name], value)})
    return config_for(folder, "text_gpt2", base=str(folder / "base")), file, name


def _gguf(folder, value):
    name = "blk.1.ffn_gate.weight"
    file = tiny_file(
        folder, tensors=tiny_tensors() | {name: _spoilt(tiny_tensors()[name], value)}
    )
    return config_for(file, "text_llama"), file, name


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("written", [_hugging_face, _torch, _adapters, _gguf])
def test_a_tensor_that_is_not_finite_is_named_with_its_file(tmp_path, written, value):
    config, file, name = written(tmp_path, value)
    with pytest.raises(UserError) as caught:
        find_checkpoint(config).read()
    assert (
        str(caught.value)
        == f"{file}: {name} holds values that are not finite; give a checkpoint that is whole"
    )


def test_a_run_and_an_export_with_a_gate_of_nan_are_not_opened(tmp_path):
    work = workdir("coconut_gpt2", tmp_path / "work")
    stage = work / "checkpoints" / "cold_start"
    export_checkpoint(stage, tmp_path / "exported")
    side = load_file(tmp_path / "exported" / "reasoner.safetensors")
    save_file(
        side | {"gate.out.bias": side["gate.out.bias"] * np.nan},
        tmp_path / "exported" / "reasoner.safetensors",
    )
    with pytest.raises(
        UserError, match=r"exported/reasoner\.safetensors: gate\.out\.bias .*finite"
    ):
        slpo.load(tmp_path / "exported")
    params = run_params("coconut_gpt2")
    shutil.rmtree(stage / "0")
    save_params(
        stage, params | {"gate": jax.tree.map(lambda x: x * np.nan, params["gate"])}
    )
    remedy = f"{stage}/0/params: is damaged (gate/out/bias holds values that are not finite); delete "
    for act in (
        lambda: slpo.load(work),
        lambda: export_checkpoint(stage, tmp_path / "new"),
    ):
        with pytest.raises(UserError) as caught:
            act()
        assert str(caught.value).startswith(remedy)
    assert not (tmp_path / "new").exists()

"""Tensors out of files that safetensors, torch, transformers and huggingface_hub wrote."""

import json
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from refused import one_line
from slpo_jax.architectures.tensors import open_tensors
from slpo_jax.errors import UserError

RNG = np.random.default_rng(0)


def values(*shape):
    return RNG.normal(size=shape).astype(np.float32)


STATE = {
    "wte.weight": values(5, 4),
    "h.0.ln.bias": values(3).astype(np.float16),
    "h.0.proj": values(2, 3, 4).astype(ml_dtypes.bfloat16),
    "scalar": np.array(2.5, ml_dtypes.bfloat16),
    "positions": np.arange(4),
    "transposed": values(3, 5).T,
}


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def to_torch(state=STATE):
    """The same as tensors, strides included; numpy's bfloat16 is none that torch knows."""
    torch = pytest.importorskip("torch")
    half = {name: array.dtype == ml_dtypes.bfloat16 for name, array in state.items()}
    tensors = {
        name: torch.from_numpy(array.astype("f") if half[name] else array)
        for name, array in state.items()
    }
    return {
        name: tensor.to(torch.bfloat16) if half[name] else tensor
        for name, tensor in tensors.items()
    }


def check(tensors, state=STATE):
    """The same names, types, shapes and bits as the state dict."""
    assert set(tensors) == set(state)
    assert len(tensors) == len(state)
    for name, array in state.items():
        found = tensors[name].read()
        assert found.dtype == array.dtype
        assert tensors[name].shape == found.shape == array.shape
        np.testing.assert_array_equal(
            found.astype(np.float64), array.astype(np.float64)
        )
        assert tensors[name].name == name


def refused(path, *parts):
    one_line(lambda: open_tensors(path), *parts)


def save_safetensors(path, state=None):
    contiguous = {
        name: np.array(array, order="C") for name, array in (state or STATE).items()
    }
    safetensors.numpy.save_file(contiguous, path, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    "name", ["model.safetensors", "weights.safetensors", "checkpoint_3"]
)
def test_a_safetensors_file_of_any_name(tmp_path, name):
    check(open_tensors(save_safetensors(tmp_path / name)))


def test_nothing_is_read_before_it_is_asked_for(tmp_path):
    """What is refused as it is read can be opened."""
    state = {"good": values(2), "bad": values(3) * np.nan}
    opened = open_tensors(save_safetensors(tmp_path / "model.safetensors", state))
    assert [each.shape for each in opened.values()] == [
        state[name].shape for name in opened
    ]
    np.testing.assert_array_equal(opened["good"].read(), state["good"])
    with pytest.raises(UserError, match=r"bad .*finite"):
        opened["bad"].read()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "a.pt", "a.pth", "checkpoint_12"]
)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_checkpoint_of_any_name(tmp_path, name, zipped, torch):
    torch.save(to_torch(), tmp_path / name, _use_new_zipfile_serialization=zipped)
    opened = open_tensors(tmp_path / name)
    check(opened)
    changed = opened["wte.weight"].read()
    changed += 1  # its own copy
    np.testing.assert_array_equal(opened["wte.weight"].read(), STATE["wte.weight"])


@pytest.mark.parametrize("size", [100, "1GB"])
def test_pickles_of_huggingface_hub(tmp_path, size):
    hub = pytest.importorskip("huggingface_hub")
    hub.save_torch_state_dict(
        to_torch(), tmp_path, safe_serialization=False, max_shard_size=size
    )
    assert (len(list(tmp_path.glob("*.bin"))) > 1) == (size == 100)
    check(open_tensors(tmp_path))


def test_safetensors_go_before_pickles(tmp_path, torch):
    torch.save({"old": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert set(open_tensors(tmp_path)) == {"old"}
    save_safetensors(tmp_path / "model.safetensors")
    check(open_tensors(tmp_path))


def test_torch_is_needed_for_pickles_alone(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}.")
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(tmp_path / "a.pt", "a.pt", "pip install torch")
    check(open_tensors(save_safetensors(tmp_path / "model.safetensors")))


def test_what_is_not_there(tmp_path):
    refused(tmp_path / "nothing", "nothing", "No such file")
    refused(tmp_path, str(tmp_path), "model.safetensors", "pytorch_model.bin")
    (tmp_path / "empty.bin").touch()
    refused(tmp_path / "empty.bin", "empty.bin", "is empty")
    (tmp_path / "model.safetensors").touch()
    refused(tmp_path, "model.safetensors", "is empty")


def test_files_of_another_kind(tmp_path, torch):
    (tmp_path / "weights").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    refused(
        tmp_path / "weights",
        "neither safetensors nor a torch checkpoint",
        "git lfs pull",
    )
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("readme.txt", "no weights")
    refused(tmp_path / "a.pt", "a.pt", "another kind of archive")
    safetensors.numpy.save_file({}, tmp_path / "a.safetensors")
    refused(tmp_path / "a.safetensors", "a.safetensors", "no tensors")
    torch.save({}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "a.pt", "no tensors")


def test_a_type_that_numpy_lacks(tmp_path, torch):
    state = {"tiny": values(4).astype(ml_dtypes.float8_e4m3fn)}
    refused(
        save_safetensors(tmp_path / "a.safetensors", state),
        "a.safetensors",
        "tiny",
        "F8_E4M3",
    )
    torch.save({"tiny": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "a.pt", "tiny", "float8_e4m3fn")


class Anything:
    """What a pickle of a whole model has in it."""


@pytest.mark.parametrize(
    ("saved", "parts"),
    [
        (lambda torch: {"w": torch.ones(2), "config": {"n": 1}}, ["config", "dict"]),
        (
            lambda torch: {"state_dict": {"w": torch.ones(2), "step": 3}},
            ["step", "int"],
        ),
        (lambda torch: [torch.ones(2)], ["list"]),
        (lambda torch: {"w": torch.ones(2, 2).to_sparse()}, ["w", "plain"]),
        (lambda torch: torch.nn.Linear(2, 2), ["Python objects"]),
        (lambda torch: {"w": torch.ones(2), "args": Anything()}, ["Python objects"]),
    ],
)
def test_pickles_of_more_than_tensors(tmp_path, saved, parts, torch):
    torch.save(saved(torch), tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "a.pt", *parts)


def sharded(tmp_path):
    """(index, shards) as transformers writes them (tests/checkpoints/test_import.py opens its own)."""
    shards = [tmp_path / f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    shard_of = {}
    for i, path in enumerate(shards):
        part = {name: STATE[name] for name in list(STATE)[i::3]}
        save_safetensors(path, part)
        shard_of |= dict.fromkeys(part, path.name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    check(open_tensors(tmp_path))
    return index, shards


def test_an_index_and_shards_that_disagree(tmp_path):
    index, shards = sharded(tmp_path)
    listed = json.loads(index.read_text())["weight_map"]
    less = {key: shard for key, shard in listed.items() if key != "h.0.ln.bias"}
    for other, name in (
        (less, "h.0.ln.bias"),
        (listed | {"h.9.weight": shards[0].name}, "h.9.weight"),
    ):
        index.write_text(json.dumps({"weight_map": other}))
        refused(tmp_path, index.name, f"{name} isn't where it says")
    index.write_text(json.dumps({"weight_map": listed}))
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    refused(tmp_path, shards[0].name, "truncated or corrupt")
    shards[0].unlink()
    refused(tmp_path, shards[0].name, "No such file")


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "\xff"]
)
def test_an_index_that_is_none(tmp_path, text):
    index, _ = sharded(tmp_path)
    index.write_text(text, encoding="latin-1")
    refused(tmp_path, index.name)


def save(path, kind: str):
    """Writes the file and returns its bytes; `kind` is "safetensors", or "zip" or "pickle" of torch's."""
    if kind == "safetensors":
        save_safetensors(path)
    else:
        pytest.importorskip("torch").save(
            to_torch(), path, _use_new_zipfile_serialization=kind == "zip"
        )
    return path.read_bytes()


@pytest.mark.parametrize("kind", ["safetensors", "zip", "pickle"])
def test_a_truncated_file_is_always_refused(tmp_path, kind):
    path = tmp_path / "weights"
    whole = save(path, kind)
    for size in (
        1,
        5,
        9,
        40,
        len(whole) // 3,
        len(whole) // 2,
        len(whole) - 30,
        len(whole) - 1,
    ):
        path.write_bytes(whole[:size])
        refused(path, "weights")

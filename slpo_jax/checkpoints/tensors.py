"""The tensors of a checkpoint, whatever it's stored as: safetensors or torch pickles, in one file or in shards.

Nothing is read before it's asked for (a torch pickle is mapped into memory), nothing is cast, and what isn't whole is
refused when it's opened. torch is needed for torch pickles only.
"""

import collections
import functools
import importlib.util
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from slpo_jax.errors import UserError, first_line

# In the order in which they're looked for in a directory.
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_TORCH = (b"PK\x03\x04", b"\x80")
WRAPPERS = ("state_dict", "model", "model_state_dict")
SAFETENSORS_DTYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}
AGAIN = "it is truncated or corrupt; fetch it again"


class Stored(NamedTuple):
    """A tensor that has not been read yet.

    Attributes:
        name: its own name in its file, for messages.
        shape: its shape there.
        read: gives the array, in the type that it is stored in, bfloat16 as ml_dtypes' type; anew each time.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def open_tensors(path: Path) -> dict[str, Stored]:
    """Open a checkpoint's weights.

    Args:
        path: a safetensors file or a torch pickle, of any name; or a directory with model.safetensors or
            pytorch_model.bin, whole or in shards with an index. safetensors go before pickles. A state dict that a
            pickle holds under "state_dict", "model" or "model_state_dict" is taken from there.
    Returns:
        the tensors, under their names in the file.
    Raises:
        UserError: there's nothing there, it's no such file, it's truncated or corrupt, the index and its shards
            disagree, a pickle holds something else than tensors, or torch is needed and missing.
    """
    path = Path(path)
    if path.is_dir():
        found = weights_file(path)
        if found is None:
            torches = [each for each in path.iterdir() if each.is_file() and _is_torch(each)]
            remedy = f"; give {torches[0]} if that is the checkpoint" if len(torches) == 1 else ""
            raise UserError(f"{path}: has no weights; it needs one of {', '.join(WEIGHT_FILES)}{remedy}")
        return _open_shards(found) if found.suffix == ".json" else _open_file(found)
    return _open_file(path)


def finite(path: Path, name: str, read: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    """`read`, of a tensor of this name in this file, which refuses NaN and infinities: a model would say nonsense."""

    def checked() -> np.ndarray:
        array = read()
        if not np.isfinite(array).all():
            raise UserError(f"{path}: {name} holds values that are not finite; give a checkpoint that is whole")
        return array

    return checked


def _is_torch(path: Path) -> bool:
    """Whether a file begins as torch's two formats do: a zip archive, or a pickle of protocol 2 and later."""
    with path.open("rb") as file:
        return file.read(4).startswith(_TORCH)


def weights_file(folder: Path) -> Path | None:
    """A directory's weights or their index; None if it has none."""
    return next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)


def read_start(path: Path, size: int) -> bytes:
    """The file's first bytes.

    Raises:
        UserError: there's no such file, it can't be read or it's empty.
    """
    try:
        with path.open("rb") as file:
            start = file.read(size)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; give a checkpoint's path") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}); give a readable checkpoint file") from error
    if not start:
        raise UserError(f"{path}: is empty; fetch it again")
    return start


def _open_file(path: Path) -> dict[str, Stored]:
    start = read_start(path, 64)
    if start.startswith(b"version https://git-lfs"):
        raise UserError(f"{path}: is a git-lfs pointer, not the weights; run `git lfs pull` where it came from")
    if start.startswith(b"GGUF"):
        raise UserError(f"{path}: is a GGUF file where safetensors or a torch checkpoint are due; give one of those")
    if start.startswith(_TORCH) and path.suffix != ".safetensors":
        entries = _open_torch(path)
    elif path.suffix == ".safetensors" or start[8:9] == b"{":
        entries = _open_safetensors(path)
    else:
        raise UserError(f"{path}: is neither safetensors nor a torch checkpoint; give one of those, or fetch it again")
    if not entries:
        raise UserError(f"{path}: holds no tensors; give a checkpoint with weights")
    return entries


def _open_shards(index: Path) -> dict[str, Stored]:
    shard_of = _weight_map(index)
    entries: dict[str, Stored] = {}
    for shard in dict.fromkeys(shard_of.values()):
        path = index.parent / shard
        if not path.is_file():
            raise UserError(f"{path}: this shard of {index.name} is missing; fetch it too")
        tensors = _open_file(path)
        listed = {name for name in shard_of if shard_of[name] == shard}
        if lost := sorted(listed - set(tensors)):
            raise UserError(f"{path}: lacks {lost[0]}, which {index.name} says is there; fetch both again")
        if extra := sorted(set(tensors) - listed):
            raise UserError(f"{path}: holds {extra[0]}, which {index.name} doesn't say is there; fetch both again")
        entries |= tensors
    return {name: entries[name] for name in shard_of}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        plain = bool(shard_of) and all(Path(shard).name == shard for shard in shard_of.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: is no index of shards ({first_line(error)}); fetch it again") from error
    if not plain:
        raise UserError(f"{index}: its weight_map doesn't map tensors to files beside it; fetch it again")
    return shard_of


def _open_safetensors(path: Path) -> dict[str, Stored]:
    try:
        file = safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: can't be opened as safetensors ({first_line(error)}); {AGAIN}") from error
    entries = {}
    for name in file.keys():  # noqa: SIM118 - it's no dict
        view = file.get_slice(name)
        if view.get_dtype() not in SAFETENSORS_DTYPES:
            raise UserError(f"{path}: {name} is stored as {view.get_dtype()}; convert it to a float of 16 or 32 bits")
        read = functools.partial(file.get_tensor, name)
        entries[name] = Stored(name, tuple(view.get_shape()), finite(path, name, read))
    return entries


def _open_torch(path: Path) -> dict[str, Stored]:
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"{path}: is a torch checkpoint, which torch alone can read; `pip install torch`")
    import torch  # nothing else needs it

    state = _state_dict(_unpickle(path), path)
    entries = {}
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise UserError(f"{path}: its key {name!r} is no string; save model.state_dict()")
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise UserError(f"{path}: {name} is of type {kind}, not a tensor; save model.state_dict() alone")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex() or tensor.is_meta:
            raise UserError(f"{path}: {name} is not a plain dense tensor; save it as one")
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 2:
            raise UserError(f"{path}: {name} is stored as {tensor.dtype}; convert it to a float of 16 or 32 bits")
        entries[name] = Stored(name, tuple(tensor.shape), finite(path, name, functools.partial(_to_numpy, tensor)))
    return entries


def _unpickle(path: Path) -> Any:
    import torch

    try:
        zipped = zipfile.is_zipfile(path)
        if zipped and not _is_torch_archive(path):
            raise UserError(f"{path}: is a zip archive, but no torch checkpoint; give the checkpoint in it")
        with torch.serialization.safe_globals(_inert(path) if zipped and path.suffix == ".ckpt" else []):
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=zipped)
    except UserError:
        raise
    except Exception as error:  # whatever a pickle and an archive can fail with
        if "Unsupported global" in str(error) or "Unsupported class" in str(error):
            raise UserError(
                f"{path}: holds Python objects beside tensors, which can run code; save model.state_dict() alone"
            ) from error
        if "TorchScript" in str(error):
            raise UserError(f"{path}: is a TorchScript program; save its state_dict() with torch.save") from error
        raise UserError(f"{path}: can't be opened as a torch checkpoint; {AGAIN}") from error


def _inert(path: Path) -> list[Any]:
    """For the objects beside the tensors of a Lightning checkpoint, hyper-parameters mostly, classes that do nothing.

    None of their own code is run, nor looked for: each is an empty dictionary to be filled.
    """
    import torch

    def nothing(cls, *args, **kwargs):
        return collections.OrderedDict()  # of few other types torch lets one be filled

    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return [(type("Inert", (), {"__new__": nothing}), name) for name in names]


def _is_torch_archive(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())


def _state_dict(loaded: Any, path: Path) -> Mapping[Any, Any]:
    if not isinstance(loaded, Mapping):
        raise UserError(f"{path}: holds a {type(loaded).__name__}, not a state dict; save model.state_dict()")
    wrappers = [key for key in WRAPPERS if isinstance(loaded.get(key), Mapping)]
    if len(wrappers) > 1:
        raise UserError(f"{path}: holds both {wrappers[0]} and {wrappers[1]}; save one state dict alone")
    return loaded[wrappers[0]] if wrappers else loaded


def _to_numpy(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # which numpy itself lacks
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return tensor.numpy().copy()

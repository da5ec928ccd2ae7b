"""The tensors of a checkpoint, whatever it's stored as: safetensors or torch pickles, in one file or in shards.

Nothing is read before it's asked for (a torch pickle is mapped into memory), nothing is cast, and what isn't whole is
refused when it's opened. torch is needed for torch pickles only.
"""

import collections
import functools
import importlib.util
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_WRAPPERS = ("state_dict", "model", "model_state_dict")


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
    file = weights_file(path) if path.is_dir() else path
    if file is None:
        files = ", ".join(WEIGHT_FILES)
        raise UserError(
            f"{path}: has no weights; it needs one of {files}, or of a run a stage that is finished"
        )
    entries = (
        _open_shards(file) if file.name.endswith(".index.json") else _open_file(file)
    )
    if not entries:
        raise UserError(f"{file}: holds no tensors; give a checkpoint with weights")
    return entries


def stored(
    path: Path, name: str, shape: Iterable[int], read: Callable[[], np.ndarray]
) -> Stored:
    """Wrap a tensor of a file, which refuses NaN and infinities when it is read: a model would say nonsense."""

    def checked() -> np.ndarray:
        array = read()
        if not np.isfinite(array).all():
            raise UserError(
                f"{path}: {name} holds values that are not finite; give a checkpoint that is whole"
            )
        return array

    return Stored(name, tuple(shape), checked)


def weights_file(folder: Path, names: Sequence[str] = WEIGHT_FILES) -> Path | None:
    """Return a directory's weights or their index, the first of these names; None if it has none."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_start(path: Path, size: int) -> bytes:
    """Return the file's first bytes.

    Raises:
        UserError: there's no such file, it can't be read or it's empty.
    """
    try:
        with path.open("rb") as file:
            start = file.read(size)
    except OSError as error:
        raise UserError(
            f"{path}: can't be read ({error.strerror}); give a checkpoint's path"
        ) from error
    if not start:
        raise UserError(f"{path}: is empty; fetch it again")
    return start


def _open_file(path: Path) -> dict[str, Stored]:
    start = read_start(path, 9)
    if start.startswith(_TORCH) and path.suffix != ".safetensors":
        return _open_torch(path)
    if path.suffix == ".safetensors" or start[8:] == b"{":
        return _open_safetensors(path)
    raise UserError(
        f"{path}: is neither safetensors nor a torch checkpoint; give one of those, or fetch it again (of git-lfs's "
        "pointers, `git lfs pull`)"
    )


def _open_shards(index: Path) -> dict[str, Stored]:
    try:
        shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = {shard: index.parent / Path(shard).name for shard in shard_of.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index}: is no index of shards ({first_line(error)}); fetch it again"
        ) from error
    contents = {shard: _open_file(path) for shard, path in shards.items()}
    holder_of = {name: shard for shard, tensors in contents.items() for name in tensors}
    for name in holder_of.keys() | shard_of.keys():
        if holder_of.get(name) != shard_of.get(name):
            raise UserError(
                f"{index}: {name} isn't where it says, but in {holder_of.get(name, 'no shard')}; fetch both again"
            )
    return {name: contents[shard][name] for name, shard in shard_of.items()}


def _open_safetensors(path: Path) -> dict[str, Stored]:
    try:
        file = safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: can't be opened as safetensors ({first_line(error)}); it is truncated or corrupt; fetch it again"
        ) from error
    entries = {}
    for name in file.keys():  # noqa: SIM118 - it's no dict
        view = file.get_slice(name)
        if view.get_dtype().startswith(("F8", "F4", "F6")):
            raise _too_few_bits(path, name, view.get_dtype())
        entries[name] = stored(
            path, name, view.get_shape(), functools.partial(file.get_tensor, name)
        )
    return entries


def _too_few_bits(path: Path, name: str, dtype: Any) -> UserError:
    return UserError(
        f"{path}: {name} is stored as {dtype}; convert it to a float of 16 or 32 bits"
    )


def _open_torch(path: Path) -> dict[str, Stored]:
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            f"{path}: is a torch checkpoint, which torch alone can read; `pip install torch`"
        )
    import torch  # nothing else needs it

    whole = _unpickle(path)
    state: Mapping[str, Any] = whole if isinstance(whole, Mapping) else {"it": whole}
    state = next(
        (state[key] for key in _WRAPPERS if isinstance(state.get(key), Mapping)), state
    )
    entries = {}
    for name, tensor in state.items():
        if (
            not isinstance(name, str)
            or not isinstance(tensor, torch.Tensor)
            or tensor.layout != torch.strided
        ):
            kind = type(tensor).__name__
            raise UserError(
                f"{path}: {name} is a {kind}, no plain tensor with a name; save model.state_dict() alone"
            )
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 2:
            raise _too_few_bits(path, name, tensor.dtype)
        entries[name] = stored(
            path, name, tensor.shape, functools.partial(_to_numpy, tensor)
        )
    return entries


def _unpickle(path: Path) -> Any:
    import torch

    try:
        zipped = zipfile.is_zipfile(path)
        with torch.serialization.safe_globals(
            _inert(path) if zipped and path.suffix == ".ckpt" else []
        ):
            return torch.load(
                str(path), map_location="cpu", weights_only=True, mmap=zipped
            )
    except Exception as error:  # whatever a pickle and an archive can fail with
        if "Unsupported global" in str(error) or "Unsupported class" in str(error):
            raise UserError(
                f"{path}: holds Python objects beside tensors, which can run code; save model.state_dict() alone"
            ) from error
        raise UserError(
            f"{path}: can't be opened as a torch checkpoint; it is truncated, corrupt or another kind of archive; "
            "fetch it again, or save model.state_dict()"
        ) from error


def _inert(path: Path) -> list[Any]:
    """Return classes that do nothing, for a Lightning checkpoint's objects beside the tensors (hyper-parameters).

    None of their own code is run, nor looked for: each is an empty dictionary to be filled.
    """
    import torch

    def nothing(cls, *args, **kwargs):
        return collections.OrderedDict()  # of few other types torch lets one be filled

    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return [(type("Inert", (), {"__new__": nothing}), name) for name in names]


def _to_numpy(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # which numpy itself lacks
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return tensor.numpy().copy()

"""Open the tensors of a checkpoint: safetensors or torch pickles, in one file or in shards.

Nothing is read before it is asked for (a torch pickle is mapped into memory), nothing is cast, and a damaged file is
refused when it is opened. Only torch pickles need torch.
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
        read: reads the array, in the type that it is stored in, bfloat16 as ml_dtypes' type. It keeps nothing.
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
        UserError: there is no such file, it is of another kind, it is truncated or corrupt, the index and its shards
            disagree, a pickle holds something else than tensors, or torch is needed and missing.
    """
    file = weights_file(path) if path.is_dir() else path
    if file is None:
        files = ", ".join(WEIGHT_FILES)
        raise UserError(
            f"{path}: has no weights; it needs one of {files}, or of a run a stage that is finished"
        )
    is_index = file.name.endswith(".index.json")
    entries = _open_shards(file) if is_index else _open_file(file)
    if not entries:
        raise UserError(f"{file}: holds no tensors; give a checkpoint with weights")
    return entries


def wrap_tensor(
    path: Path, name: str, shape: Iterable[int], read: Callable[[], np.ndarray]
) -> Stored:
    """Wrap a tensor of a file; reading it refuses NaN and infinities, with which a model would write nonsense."""

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
        UserError: there is no such file, it can't be read, or it is empty.
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
    """Open one file, of a kind that its first bytes tell."""
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
    """Open the shards of an index, which must list exactly the tensors that they hold."""
    try:
        shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = {shard: index.parent / Path(shard).name for shard in shard_of.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index}: is no index of shards ({first_line(error)}); fetch it again"
        ) from error

    contents = {shard: _open_file(path) for shard, path in shards.items()}
    holder_of = dict[str, str]()
    for shard, tensors in contents.items():
        holder_of |= dict.fromkeys(tensors, shard)
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
        read = functools.partial(file.get_tensor, name)
        entries[name] = wrap_tensor(path, name, view.get_shape(), read)
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

    # Find the state dict, which a training program may have wrapped.
    whole = _unpickle(path)
    state: Mapping[str, Any] = whole if isinstance(whole, Mapping) else {"it": whole}
    for key in _WRAPPERS:
        if isinstance(state.get(key), Mapping):
            state = state[key]
            break

    # It may hold plain tensors alone.
    entries = {}
    for name, tensor in state.items():
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not is_plain or not isinstance(name, str):
            kind = type(tensor).__name__
            raise UserError(
                f"{path}: {name} is a {kind}, no plain tensor with a name; save model.state_dict() alone"
            )
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 2:
            raise _too_few_bits(path, name, tensor.dtype)
        read = functools.partial(_to_numpy, tensor)
        entries[name] = wrap_tensor(path, name, tensor.shape, read)
    return entries


def _unpickle(path: Path) -> Any:
    import torch

    try:
        zipped = zipfile.is_zipfile(path)
        is_lightning = zipped and path.suffix == ".ckpt"
        with torch.serialization.safe_globals(_inert(path) if is_lightning else []):
            return torch.load(
                str(path), map_location="cpu", weights_only=True, mmap=zipped
            )
    except Exception as error:
        # A pickle or an archive can fail with any exception.
        if "Unsupported global" in str(error) or "Unsupported class" in str(error):
            raise UserError(
                f"{path}: holds Python objects beside tensors, which can run code; save model.state_dict() alone"
            ) from error
        raise UserError(
            f"{path}: can't be opened as a torch checkpoint; it is truncated, corrupt or another kind of archive; "
            "fetch it again, or save model.state_dict()"
        ) from error


def _inert(path: Path) -> list[Any]:
    """Make classes that do nothing, for a Lightning checkpoint's objects beside the tensors (hyper-parameters).

    Their own code is neither run nor looked for: each object becomes an empty dictionary, which torch fills.
    """
    import torch

    def nothing(cls, *args, **kwargs):
        # torch fills instances of few types, and this is one of them.
        return collections.OrderedDict()

    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return [(type("Inert", (), {"__new__": nothing}), name) for name in names]


def _to_numpy(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # which numpy itself lacks
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return tensor.numpy().copy()

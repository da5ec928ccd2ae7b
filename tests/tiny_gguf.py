"""A tiny Llama in a GGUF file, written by the `gguf` package the way that llama.cpp's converter does, and slow BPE."""

import functools
import itertools
import json

import gguf
import numpy as np
import pytest
import regex
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from refused import one_line
from slpo_jax.checkpoints.gguf import open_gguf

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "Tom had 1234 apples and  56 pears.\n\nHe's sold 7.5 of them; they'll cost $12,000!",
    "   leading and trailing   ",
    "\ttabs\r\nand\n\n\n  lines 3\n 4",
    "naïve café 数字 ١٢٣ ½ 🙂🙂 o'clock I'M",
    "<|im_start|>user\n7+8=15<|im_end|>\n<|endoftext|>",
    "no , clean up ! of spaces . it 's n't done ?",
    "",
]
CORPUS = [
    *TEXTS,
    "the sold apples cost them 12 and they had the pears in the café",
    "and and  the  the 1 2 3 ",
]
GPT2_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def bpe() -> tuple[list[str], list[str]]:
    """Tokens by id (the special ones first) and merges, trained on the texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        min_frequency=1,
        special_tokens=SPECIALS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [
        " ".join(pair) for pair in model["merges"]
    ]


def spelled(text: str) -> str:
    """The characters that byte-level BPE writes for the text's bytes."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in visible}
    extra = 0
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + extra)
            extra += 1
    return "".join(table[byte] for byte in text.encode())


PATTERNS = {"smollm": [r"\p{N}|[^\p{N}]+", GPT2_PATTERN], "llama-bpe": [LLAMA3_PATTERN]}


class SlowBPE:
    """Byte-level BPE as llama.cpp does it: one regex after the other, then the best merge again and again."""

    def __init__(self, pre):
        tokens, merges = bpe()
        self.patterns = PATTERNS[pre]
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {
            tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)
        }
        self.whole = pre == "llama-bpe"

    def __call__(self, text: str) -> list[int]:
        between = "(" + "|".join(regex.escape(token) for token in SPECIALS) + ")"
        ids = []
        for piece in regex.split(between, text):
            ids += [self.ids[piece]] if piece in SPECIALS else self._plain(piece)
        return ids

    def _plain(self, text: str) -> list[int]:
        words = [text]
        for pattern in self.patterns:
            words = [part for word in words for part in regex.findall(pattern, word)]
        assert "".join(words) == text
        return [index for word in words for index in self._word(spelled(word))]

    def _word(self, word: str) -> list[int]:
        if self.whole and word in self.ids:
            return [self.ids[word]]
        parts = list(word)
        while True:
            ranked = [
                (self.ranks.get(pair, np.inf), place)
                for place, pair in enumerate(itertools.pairwise(parts))
            ]
            rank, place = min(ranked, default=(np.inf, 0))
            if rank == np.inf:
                return [self.ids[part] for part in parts]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]


def llama_config(**changes) -> transformers.LlamaConfig:
    """Of a Llama whose rotary halves, heads and groups all differ in size."""
    sizes = dict(
        vocab_size=len(bpe()[0]), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.2,
        tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaConfig(**sizes | changes)


def llama_state(config: transformers.LlamaConfig) -> dict[str, np.ndarray]:
    """transformers' state dict with random weights, a tied head left out."""
    rng = np.random.default_rng(0)
    width = config.hidden_size
    hidden = config.intermediate_size
    own, shared = (
        heads * config.head_dim
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    shapes = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        block = {
            "self_attn.q_proj": (own, width), "self_attn.k_proj": (shared, width), "self_attn.v_proj": (shared, width),
            "self_attn.o_proj": (width, own), "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width),
            "mlp.down_proj": (width, hidden), "input_layernorm": (width,), "post_attention_layernorm": (width,),
        }  # fmt: skip
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in block.items()
        }
    shapes["model.norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    draws = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    draws = {
        name: 1 + 0.3 * draw if draw.ndim == 1 else 0.2 * draw
        for name, draw in draws.items()
    }
    return {name: draw.astype(np.float32) for name, draw in draws.items()}


def llama_model(config: transformers.LlamaConfig):
    """transformers' Llama with these weights."""
    torch = pytest.importorskip("torch")
    state = {name: torch.tensor(weight) for name, weight in llama_state(config).items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


@functools.cache
def tiny_tensors() -> dict[str, np.ndarray]:
    return tensors_of(llama_config())


def fields_of(config, pre: str = "smollm") -> dict:
    """What llama.cpp's converter writes for this LlamaConfig."""
    tokens, merges = bpe()
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "llama.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            3 if token in SPECIALS else 1 for token in tokens
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i + s of a head is its row i of half s: llama.cpp's order."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for half in range(2):
            for pair in range(size // 2):
                out[head * size + 2 * pair + half] = weight[
                    head * size + half * (size // 2) + pair
                ]
    return out


def tensors_of(config: transformers.LlamaConfig) -> dict[str, np.ndarray]:
    """The model's tensors under the file's names and in its order of rows."""
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    out = {}
    for name, weight in llama_state(config).items():
        parts = name.split(".")
        if name.startswith("model.layers."):
            if parts[4] in ("q_proj", "k_proj"):
                heads = (
                    config.num_attention_heads
                    if parts[4] == "q_proj"
                    else config.num_key_value_heads
                )
                weight = interleaved(weight, heads)
            out[f"blk.{parts[2]}.{names['.'.join(parts[3:-1])]}.weight"] = weight
        else:
            out[
                {
                    "embed_tokens": "token_embd",
                    "norm": "output_norm",
                    "lm_head": "output",
                }[parts[-2]]
                + ".weight"
            ] = weight
    return out


def write_gguf(path, fields, tensors, kinds=None, architecture: str = "llama"):
    """Writes the file.

    `kinds`: name of ggml's type for the matrices, else float32; norms and `rope_freqs` stay as they are.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
               list: writer.add_array}[type(value)]  # fmt: skip
        add(key, value)
    for name, weight in tensors.items():
        if kinds is None or weight.ndim != 2:
            writer.add_tensor(name, weight)
        else:
            kind = gguf.GGMLQuantizationType[kinds]
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_file(tmp_path, changes=None, tensors=None, **options):
    """The tiny model's file with changed fields (None leaves one out) and, if given, other tensors."""
    fields = fields_of(llama_config()) | (changes or {})
    fields = {key: value for key, value in fields.items() if value is not None}
    return write_gguf(
        tmp_path / "tiny.gguf", fields, tensors or tiny_tensors(), **options
    )


def refused(path, *parts, tokenizer=False):
    """The error of opening the file: one line that names the file, has these parts and a remedy."""
    one_line(
        lambda: open_gguf(path).tokenizer() if tokenizer else open_gguf(path),
        str(path),
        *parts,
    )

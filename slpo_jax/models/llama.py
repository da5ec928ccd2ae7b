"""Llama in Linen (Touvron et al., 2023; Llama 3.2's shapes): RMSNorm, rotary positions, grouped queries, SwiGLU.

Qwen2 (Yang et al., 2024) is the same with biases of queries, keys and values, Qwen3 (Yang et al., 2025) with an RMSNorm
of each head's queries and keys.
"""

import dataclasses
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.models import backbone
from slpo_jax.models.backbone import Context, split_heads
from slpo_jax.models.layers import dense
from slpo_jax.models.xla_cpu import remat
from slpo_jax.settings import Checked, FieldError, setting


@dataclasses.dataclass(frozen=True)
class RopeScaling(Checked):
    """The "llama3" change of rotary frequencies for contexts longer than those of pretraining.

    Attributes:
        factor: slow frequencies are divided by it.
        low_freq_factor: a frequency with fewer turns than this in the original context is slow.
        high_freq_factor: one with more turns than this is kept; those in between are interpolated.
        original_max_position_embeddings: the original context, in positions.
    """

    factor: float = setting(32.0, above=0)
    low_freq_factor: float = setting(1.0, above=0)
    high_freq_factor: float = setting(4.0, above=0)
    original_max_position_embeddings: int = setting(8192, least=1)


@dataclasses.dataclass(frozen=True)
class LlamaConfig(Checked):
    """Shapes of a Llama, in units of parameters' axes; the defaults are Llama 3.2 1B.

    Attributes:
        model_type: Hugging Face's name of such models.
        qkv_bias: queries, keys and values have biases.
        qk_norm: queries and keys have norms, one for all heads each, before they are rotated.
        n_kv_head: heads of keys and values, each shared by n_head / n_kv_head consecutive query heads.
        head_dim: Dh, the width of a head.
        n_inner: width of the feed-forward layer.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None for the plain ones.
        tied: the head is the token embedding; else it is a parameter of its own.
        dtype: of activations; parameters are float32.
        remat: recompute each block in the backward pass instead of keeping its activations.
        scan_layers: layers are a loop over one block, which is compiled once.
    """

    model_type: ClassVar = "llama"
    title: ClassVar = "Llama"
    qkv_bias: ClassVar = False
    qk_norm: ClassVar = False
    # The output of the down projection: Llama has no dropout of its own.
    dropout_sites: ClassVar = ("mlp",)

    vocab_size: int = setting(128256, least=1)
    n_positions: int = setting(131072, least=1)
    n_embd: int = setting(2048, least=1)
    n_layer: int = setting(16, least=1)
    n_head: int = setting(32, least=1)
    n_kv_head: int = setting(8, least=1)
    head_dim: int = setting(64, least=1)
    n_inner: int = setting(8192, least=1)
    norm_epsilon: float = setting(1e-5, above=0)
    rope_theta: float = setting(500000.0, above=0)
    rope_scaling: RopeScaling | None = RopeScaling()
    tied: bool = True
    dtype: Any = jnp.float32
    remat: bool = False
    scan_layers: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_head % self.n_kv_head:
            raise FieldError(
                self,
                "n_kv_head",
                f"it has to divide the number of heads, {self.n_head}",
            )
        if self.head_dim % 2:
            raise FieldError(
                self, "head_dim", "rotary positions turn pairs: it has to be even"
            )


class Qwen2Config(LlamaConfig):
    """Shapes of a Qwen2."""

    model_type: ClassVar = "qwen2"
    title: ClassVar = "Qwen2"
    qkv_bias: ClassVar = True


class Qwen3Config(LlamaConfig):
    """Shapes of a Qwen3."""

    model_type: ClassVar = "qwen3"
    title: ClassVar = "Qwen3"
    qk_norm: ClassVar = True


LLAMAS: dict[str, type[LlamaConfig]] = {
    config.model_type: config for config in (LlamaConfig, Qwen2Config, Qwen3Config)
}
"""What `Llama` computes, by `model_type`."""


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Return radians a position, float32 [Dh/2], from the fastest to the slowest."""
    # An angle far out is many turns: a frequency that is wrong in its last bit moves the answers there. So each step
    # is rounded to float32 where checkpoints' own programs round it, and the power, alone, is taken in float64.
    units = np.arange(
        0,
        config.head_dim,
        2,
        dtype=np.float32,
    )
    exponents = units / np.float32(config.head_dim)
    periods = np.power(config.rope_theta, exponents, dtype=np.float64)
    frequencies = 1.0 / periods.astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies

    # Slow frequencies are divided by the factor, fast ones are kept, and those in between are interpolated.
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    between = scaling.high_freq_factor - scaling.low_freq_factor
    share = (turns - scaling.low_freq_factor) / between
    share = np.clip(share, 0.0, 1.0)
    return (1.0 - share) * frequencies / scaling.factor + share * frequencies


def rotate(x_BHLD: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn each pair (unit i, unit i + Dh/2) by its position's angle; in float32."""
    cos, sin = rotation
    first, second = jnp.split(
        x_BHLD.astype(jnp.float32),
        2,
        axis=-1,
    )
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    turned = jnp.concatenate([turned_first, turned_second], axis=-1)
    return turned.astype(x_BHLD.dtype)


def _dense(
    config: LlamaConfig, features: int, name: str, use_bias: bool = False
) -> nn.Dense:
    return dense(features, config.dtype, 0.02, name, use_bias)


class Attention(nn.Module):
    """Causal self-attention of grouped queries, rotated with their keys before the cache is written."""

    config: LlamaConfig
    layer: int

    @nn.compact
    def __call__(self, x_BLD, context: Context):
        c = self.config

        def project(heads, name):
            dense = _dense(
                c,
                heads * c.head_dim,
                name,
                c.qkv_bias,
            )
            return split_heads(dense(x_BLD), heads)

        # Queries and keys have their norms before they are rotated.
        q_BHLD = project(c.n_head, "q_proj")
        k_BGLD = project(c.n_kv_head, "k_proj")
        if c.qk_norm:
            q_BHLD = _norm(c, "q_norm")(q_BHLD)
            k_BGLD = _norm(c, "k_norm")(k_BGLD)
        q_BHLD = rotate(q_BHLD, context.rotation)
        k_BGLD = rotate(k_BGLD, context.rotation)
        v_BGLD = project(c.n_kv_head, "v_proj")
        out_BLE, kv = context.attend(
            self.layer,
            q_BHLD,
            k_BGLD,
            v_BGLD,
        )
        return _dense(c, c.n_embd, "o_proj")(out_BLE), kv


class MLP(nn.Module):
    """SwiGLU: a gated projection up, and one down."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BLD):
        c = self.config
        gate = _dense(c, c.n_inner, "gate_proj")(x_BLD)
        up = _dense(c, c.n_inner, "up_proj")(x_BLD)
        return _dense(c, c.n_embd, "down_proj")(_apply_gate(gate, up))


@remat
def _apply_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Gate in float32, rounded once; only the two are kept for a backward pass."""
    activation = nn.silu(gate.astype(jnp.float32))
    product = activation * up.astype(jnp.float32)
    return product.astype(gate.dtype)


class Norm(nn.Module):
    """`nn.RMSNorm` over the last axis, whose input alone is kept for a backward pass."""

    epsilon: float
    dtype: Any

    @nn.compact
    def __call__(self, x):
        # Linen takes the mean of squares, and multiplies, in float32, whatever the dtype of the result.
        plain = nn.RMSNorm(
            epsilon=self.epsilon,
            dtype=self.dtype,
            parent=None,
        )
        scale = self.param(
            "scale",
            nn.initializers.ones,
            x.shape[-1:],
        )

        @remat
        def normalise(x, scale):
            return plain.apply({"params": {"scale": scale}}, x)

        return normalise(x, scale)


def _norm(config: LlamaConfig, name: str) -> Norm:
    return Norm(epsilon=config.norm_epsilon, dtype=config.dtype, name=name)


class Block(backbone.Block):
    """Llama's parts of a block."""

    def setup(self):
        self.norm_1 = _norm(self.config, "input_layernorm")
        self.attention = Attention(self.config, self.layer, name="self_attn")
        self.norm_2 = _norm(self.config, "post_attention_layernorm")
        self.feed_forward = MLP(self.config, name="mlp")


class Llama(backbone.Backbone):
    """The backbone, with rotary positions."""

    config: LlamaConfig
    block_type = Block

    def setup(self):
        c = self.config
        init = nn.initializers.normal(0.02)
        self.table = self.param(
            "embed_tokens", init, (c.vocab_size, c.n_embd), jnp.float32
        )
        self.blocks = [
            Block(c, layer, name=f"layers_{layer}") for layer in range(c.n_layer)
        ]
        self.final_norm = _norm(c, "norm")
        self.head = self.table
        if not c.tied:
            shape = (c.vocab_size, c.n_embd)
            self.head = self.param("lm_head", init, shape, jnp.float32)

    def enter(self, inputs_BLD, positions_BL):
        positions_B1L1 = positions_BL[:, None, :, None].astype(jnp.float32)
        frequencies_F = rope_frequencies(self.config)
        angles_B1LF = positions_B1L1 * frequencies_F[None, None, None]
        return inputs_BLD, (jnp.cos(angles_B1LF), jnp.sin(angles_B1LF))

"""GPT-2 in Linen: the backbone of Radford et al. (2019), with an explicit cache and per-position MC-dropout."""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp

from slpo_jax.models import backbone
from slpo_jax.models.backbone import Context, split_heads
from slpo_jax.models.layers import dense
from slpo_jax.settings import Checked, FieldError, setting


@dataclasses.dataclass(frozen=True)
class GPT2Config(Checked):
    """Shapes of a GPT-2, in units of parameters' axes; the defaults are the 124M model.

    Attributes:
        n_inner: width of the feed-forward layer; 0 is 4 * n_embd.
        tied: the head is the token embedding; else it is a parameter of its own.
        dtype: of activations; parameters are float32.
        remat: recompute each block in the backward pass instead of keeping its activations.
        scan_layers: layers are a loop over one block, which is compiled once.
    """

    model_type: ClassVar = "gpt2"
    title: ClassVar = "GPT-2"
    # GPT-2's residual dropout.
    dropout_sites: ClassVar = ("attention", "mlp")

    vocab_size: int = setting(50257, least=1)
    n_positions: int = setting(1024, least=1)
    n_embd: int = setting(768, least=1)
    n_layer: int = setting(12, least=1)
    n_head: int = setting(12, least=1)
    n_inner: int = setting(0, least=0)
    norm_epsilon: float = setting(1e-5, above=0)
    tied: bool = True
    dtype: Any = jnp.float32
    remat: bool = False
    scan_layers: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_embd % self.n_head:
            raise FieldError(
                self, "n_head", f"it has to divide the width, {self.n_embd}"
            )

    @property
    def n_kv_head(self) -> int:
        """Heads of keys and values."""
        return self.n_head

    @property
    def head_dim(self) -> int:
        """Dh, the width of a head."""
        return self.n_embd // self.n_head


def _dense(
    config: GPT2Config, features: int, name: str, residual: bool = False
) -> nn.Dense:
    std = 0.02 / (2 * config.n_layer) ** 0.5 if residual else 0.02
    return dense(features, config.dtype, std, name, use_bias=True)


class Attention(nn.Module):
    """Causal self-attention: fused projection, cache write, attention over prefix and own slots, output projection."""

    config: GPT2Config
    layer: int

    @nn.compact
    def __call__(self, x_BLD, context: Context):
        c = self.config
        projected_BLE = _dense(c, 3 * c.n_embd, "c_attn")(x_BLD)
        # Split behind the heads' transpose: XLA:GPU (jaxlib 0.10) fuses the gradient of a split before it into a
        # product that it then has no tiles for.
        heads_BHLD = split_heads(projected_BLE, 3 * c.n_head)
        q_BHLD, k_BHLD, v_BHLD = jnp.split(
            heads_BHLD,
            3,
            axis=1,
        )
        out_BLD, kv = context.attend(
            self.layer,
            q_BHLD,
            k_BHLD,
            v_BHLD,
        )
        return _dense(c, c.n_embd, "c_proj", residual=True)(out_BLD), kv


class MLP(nn.Module):
    """Two projections around GPT-2's tanh-approximated GELU."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x_BLD):
        c = self.config
        up = _dense(
            c,
            c.n_inner or 4 * c.n_embd,
            "c_fc",
        )
        down = _dense(c, c.n_embd, "c_proj", residual=True)
        return down(nn.gelu(up(x_BLD)))


class Block(backbone.Block):
    """GPT-2's parts of a block."""

    def setup(self):
        c = self.config
        self.norm_1 = nn.LayerNorm(
            epsilon=c.norm_epsilon,
            dtype=c.dtype,
            name="ln_1",
        )
        self.attention = Attention(c, self.layer, name="attn")
        self.norm_2 = nn.LayerNorm(
            epsilon=c.norm_epsilon,
            dtype=c.dtype,
            name="ln_2",
        )
        self.feed_forward = MLP(c, name="mlp")


class GPT2(backbone.Backbone):
    """The backbone, with learned absolute positions."""

    config: GPT2Config
    block_type = Block

    def setup(self):
        c = self.config
        init = nn.initializers.normal(0.02)
        self.table = self.param(
            "wte",
            init,
            (c.vocab_size, c.n_embd),
            jnp.float32,
        )
        init_positions = nn.initializers.normal(0.01)
        shape = (c.n_positions, c.n_embd)
        self.wpe = self.param("wpe", init_positions, shape, jnp.float32)
        self.blocks = [Block(c, layer, name=f"h_{layer}") for layer in range(c.n_layer)]
        self.final_norm = nn.LayerNorm(
            epsilon=c.norm_epsilon, dtype=c.dtype, name="ln_f"
        )
        self.head = self.table
        if not c.tied:
            shape = (c.vocab_size, c.n_embd)
            self.head = self.param("lm_head", init, shape, jnp.float32)

    def enter(self, inputs_BLD, positions_BL):
        positions_BLD = self.wpe[positions_BL].astype(self.config.dtype)
        return inputs_BLD + positions_BLD, None

"""GPT-2 in Linen: the backbone of Radford et al. (2019), with an explicit cache and per-position MC-dropout."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from slpo_jax.models.attention import KVCache, attend, empty_cache, own_mask, write
from slpo_jax.models.dropout import Dropout, drop, site_number


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Shapes of a GPT-2, in units of parameters' axes; the defaults are the 124M model.

    Attributes:
        dropout_sites: which of `dropout.SITES` exist; the default is GPT-2's residual dropout.
        dtype: of activations; parameters are float32.
        remat: recompute each block in the backward pass instead of keeping its activations.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    layer_norm_epsilon: float = 1e-5
    dropout_sites: tuple[str, ...] = ("attention", "mlp")
    dtype: Any = jnp.float32
    remat: bool = False


def _dense(config: GPT2Config, features: int, name: str, residual: bool = False) -> nn.Dense:
    std = 0.02 / (2 * config.n_layer) ** 0.5 if residual else 0.02
    return nn.Dense(features, dtype=config.dtype, kernel_init=nn.initializers.normal(std), name=name)


class Attention(nn.Module):
    """Causal self-attention: fused projection, cache write, attention over prefix and own slots, output projection."""

    config: GPT2Config
    layer: int

    @nn.compact
    def __call__(self, x_BLD, mask_BLS, prefix, cache, start):
        c = self.config
        shape = (*x_BLD.shape[:2], c.n_head, c.n_embd // c.n_head)
        parts = jnp.split(_dense(c, 3 * c.n_embd, "c_attn")(x_BLD), 3, axis=-1)
        q, k, v = (part.reshape(shape).swapaxes(1, 2) for part in parts)
        if cache is not None:
            k, v = write(cache, self.layer, k, v, start)
        before = None if prefix is None else (prefix.keys[self.layer], prefix.values[self.layer], prefix.valid)
        out_BLD = attend(q, k, v, mask_BLS, before).swapaxes(1, 2).reshape(x_BLD.shape)
        return _dense(c, c.n_embd, "c_proj", residual=True)(out_BLD), (k, v)


class MLP(nn.Module):
    """Two projections around GPT-2's tanh-approximated GELU."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x_BLD):
        c = self.config
        hidden = nn.gelu(_dense(c, 4 * c.n_embd, "c_fc")(x_BLD), approximate=True)
        return _dense(c, c.n_embd, "c_proj", residual=True)(hidden)


class Block(nn.Module):
    """Pre-norm transformer block with residual dropout at the configured sites."""

    config: GPT2Config
    layer: int

    @nn.compact
    def __call__(self, x_BLD, mask_BLS, prefix, cache, start, dropout):
        c = self.config

        def maybe_drop(y_BLD, site):
            return drop(y_BLD, dropout, site_number(self.layer, site)) if site in c.dropout_sites else y_BLD

        def norm(name):
            return nn.LayerNorm(epsilon=c.layer_norm_epsilon, dtype=c.dtype, name=name)

        y_BLD, kv = Attention(c, self.layer, name="attn")(norm("ln_1")(x_BLD), mask_BLS, prefix, cache, start)
        x_BLD = x_BLD + maybe_drop(y_BLD, "attention")
        y_BLD = MLP(c, name="mlp")(norm("ln_2")(x_BLD))
        return x_BLD + maybe_drop(y_BLD, "mlp"), kv


class GPT2(nn.Module):
    """The backbone: embeddings in, hidden states after the final norm out."""

    config: GPT2Config

    def setup(self):
        c = self.config
        init = nn.initializers.normal(0.02)
        self.wte = self.param("wte", init, (c.vocab_size, c.n_embd), jnp.float32)
        self.wpe = self.param("wpe", nn.initializers.normal(0.01), (c.n_positions, c.n_embd), jnp.float32)
        block = nn.remat(Block) if c.remat else Block
        self.blocks = [block(c, layer, name=f"h_{layer}") for layer in range(c.n_layer)]
        self.ln_f = nn.LayerNorm(epsilon=c.layer_norm_epsilon, dtype=c.dtype)

    def embed(self, tokens_BL: jax.Array) -> jax.Array:
        """Input embeddings [B, L, D] of token ids, before positions are added."""
        return self.wte[tokens_BL].astype(self.config.dtype)

    def logits(self, hidden_BLD: jax.Array) -> jax.Array:
        """Float32 logits [B, L, V] through the tied embedding."""
        wte = self.wte.astype(self.config.dtype)
        return jnp.einsum("bld,vd->blv", hidden_BLD, wte, preferred_element_type=jnp.float32)

    def empty_cache(self, rows: int, slots: int) -> KVCache:
        """A `KVCache` of this model's shapes with no valid slot."""
        c = self.config
        return empty_cache(c.n_layer, rows, slots, c.n_head, c.n_embd // c.n_head, c.dtype)

    def __call__(
        self,
        inputs_BLD: jax.Array,
        positions_BL: jax.Array,
        valid_BL: jax.Array,
        prefix: KVCache | None = None,
        cache: KVCache | None = None,
        start: int | jax.Array = 0,
        dropout: Dropout | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Run L positions of B rows.

        Args:
            inputs_BLD: embeddings or latents.
            positions_BL: int position ids, which count real tokens only.
            valid_BL: bool; an invalid position is seen by nobody and its output means nothing.
            prefix: slots that come before, read only, shared by B / rows(prefix) consecutive rows.
            cache: the rows' own slots; the L new ones are written at start .. start+L-1. None: the L positions
                are all the own slots there are.
            start: first slot to write (may be traced).
            dropout: the pass's noise, None for a deterministic pass.
        Returns:
            hidden states [B, L, D] after the final norm, and the own slots' `KVCache`.
        """
        c = self.config
        x_BLD = inputs_BLD.astype(c.dtype) + self.wpe[jnp.maximum(positions_BL, 0)].astype(c.dtype)
        if "embedding" in c.dropout_sites:
            x_BLD = drop(x_BLD, dropout, site_number(0, "embedding"))
        valid_BS = valid_BL
        if cache is not None:
            valid_BS = jax.lax.dynamic_update_slice_in_dim(cache.valid, valid_BL, start, axis=1)
        mask_BLS = own_mask(valid_BS, x_BLD.shape[1], start if cache is not None else 0)
        layers = []
        for block in self.blocks:
            x_BLD, kv = block(x_BLD, mask_BLS, prefix, cache, start, dropout)
            layers.append(kv)
        keys, values = zip(*layers, strict=True)
        return self.ln_f(x_BLD), KVCache(keys, values, valid_BS)

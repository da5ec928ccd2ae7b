"""Backbones: the walk of a forward pass through pre-norm blocks, its masks, its cache and the head."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.attention import KVCache, attend, own_mask, write
from slpo_jax.models.layers import KEPT, SITE_NUMBERS, Dropout, drop, head_logits, site_number, updated
from slpo_jax.models.likelihood import token_log_probs
from slpo_jax.models.packing import Packing
from slpo_jax.models.xla_cpu import made_again

LAYERS = "layers"
"""The parameters of all blocks in one tree, see `Backbone.stacked`."""


@struct.dataclass
class Context:
    """The constants of one forward pass, which all blocks have in common.

    Attributes:
        mask_BLS: bool, which own slots each query sees.
        before: slots that are seen and not written: a prefix, and where layers are a loop, the row's own so far.
        cache, start, dropout, packing: see `Backbone.run`.
        rotation: float32 cosines and sines [B, 1, L, Dh/2] of the positions' angles; None without rotary positions.
        first_site: added to the blocks' site numbers; not 0 where one block stands for all layers in turn.
        last: how many of the last positions go on after attention; 0 is all. Keys and values are made of all.
    """

    mask_BLS: jax.Array
    before: tuple[KVCache, ...]
    cache: KVCache | None
    start: int | jax.Array
    dropout: Dropout | None
    rotation: Any = None
    packing: Packing | None = None
    first_site: int | jax.Array = 0
    last: int = struct.field(pytree_node=False, default=0)

    def only_last(self, last: int) -> "Context":
        """Return the context of a block of which only so many of the last positions are wanted."""
        context = dataclasses.replace(self, mask_BLS=self.mask_BLS[:, -last:], last=last)
        return dataclasses.replace(context, dropout=jax.tree.map(context.going_on, self.dropout))

    def of_layer(self, layer: int) -> "Context":
        """Return the context of a block that stands for this layer, with the layer's keys and values alone."""

        def own(cache: KVCache) -> KVCache:
            return KVCache((cache.keys[layer],), (cache.values[layer],), cache.valid)

        before, cache = tuple(map(own, self.before)), self.cache and own(self.cache)
        return dataclasses.replace(self, before=before, cache=cache, first_site=layer * SITE_NUMBERS)

    def going_on(self, x_BL: jax.Array) -> jax.Array:
        """Return [B, L, ..] -> what belongs to the positions that go on after attention."""
        if self.last and self.packing is not None:
            x_BL = self.packing.unpacked(x_BL)
        return x_BL[:, -self.last :]

    def attend(self, layer: int, q_BHLD, k_BGLD, v_BGLD) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Write the new keys and values of G key-value heads, then attend over own slots and those before.

        Returns:
            outputs [B, L, H*Dh], the heads side by side, and the layer's own keys and values [B, G, S, Dh].
        """
        if self.packing is not None:
            q_BHLD, k_BGLD, v_BGLD = (
                self.packing.unpacked(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q_BHLD, k_BGLD, v_BGLD)
            )
        q_BHLD = q_BHLD[:, :, -self.last :]
        k_BGSD, v_BGSD = k_BGLD, v_BGLD
        if self.cache is not None:
            k_BGSD, v_BGSD = write((self.cache.keys[layer], self.cache.values[layer]), (k_BGLD, v_BGLD), self.start)
        before = [(cache.keys[layer], cache.values[layer], cache.valid) for cache in self.before]
        out_BLHD = attend(q_BHLD, k_BGSD, v_BGSD, self.mask_BLS, *before).swapaxes(1, 2)
        if self.packing is not None and not self.last:
            out_BLHD = self.packing.packed(out_BLHD)
        return out_BLHD.reshape(*out_BLHD.shape[:2], -1), (k_BGSD, v_BGSD)


def split_heads(x_BLE: jax.Array, heads: int) -> jax.Array:
    """Return [B, L, H*Dh] -> [B, H, L, Dh]."""
    return x_BLE.reshape(*x_BLE.shape[:2], heads, -1).swapaxes(1, 2)


class Block(nn.Module):
    """Pre-norm transformer block with MC-dropout at the configured sites.

    A subclass's `setup` makes `norm_1`, `attention` ((x, context) -> (y, (keys, values))), `norm_2` and `feed_forward`.
    """

    config: Any
    layer: int

    def __call__(self, x_BLD, context: Context):
        def maybe_drop(y_BLD, site):
            if site not in self.config.dropout_sites:
                return y_BLD
            return drop(y_BLD, context.dropout, context.first_site + site_number(self.layer, site))

        y_BLD, kv = self.attention(self.norm_1(x_BLD), context)
        x_BLD = context.going_on(x_BLD) + maybe_drop(y_BLD, "attention")
        y_BLD = self.feed_forward(self.norm_2(x_BLD))
        return x_BLD + maybe_drop(y_BLD, "mlp"), kv


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_block(block: type[Block], config, params, x_BLD: jax.Array, context: Context):
    """Run a block whose layer is the context's, recomputed in the backward pass if `config.remat`.

    jax traces and lowers it once for all layers and passes of the same shapes.
    """

    def run(params, x_BLD, context):
        return block(config, 0, parent=None).apply({"params": params}, x_BLD, context)

    return (jax.checkpoint(run) if config.remat else made_again(run, KEPT))(params, x_BLD, context)


class Backbone(nn.Module):
    """Embeddings in, hidden states after the final norm out.

    A subclass has `block_type`, and its `setup` makes `table` (the embedding [V, D]), `blocks`, `final_norm`, and
    `head` ([V, D]), which is the table itself where the two are tied.
    """

    config: Any
    block_type: ClassVar[type[Block]]

    @staticmethod
    def stacked(params: Mapping[str, Any]) -> dict[str, Any]:
        """Stack parameters as a loop over layers reads them: those of all blocks as one, `LAYERS`, the layers first."""
        blocks = {int(match[1]): name for name in params if (match := re.fullmatch(r"\w+_(\d+)", name))}
        if not blocks:
            return dict(params)
        layers = [params[blocks[layer]] for layer in range(len(blocks))]
        rest = {name: tree for name, tree in params.items() if name not in blocks.values()}
        return rest | {LAYERS: jax.tree.map(lambda *x: jnp.stack(x), *layers)}

    def enter(self, inputs_BLD, positions_BL) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Return the first block's input before dropout, and `Context.rotation`; no `positions_BL` is negative here."""
        raise NotImplementedError

    def embed(self, tokens_BL: jax.Array) -> jax.Array:
        """Return input embeddings [B, L, D] of token ids, before positions are added."""
        return self.table[tokens_BL].astype(self.config.dtype)

    def logits(self, hidden_BLD: jax.Array) -> jax.Array:
        """Return float32 logits [B, L, V]."""
        return head_logits(hidden_BLD, self.head)

    def logits_of(self, hidden_BLD: jax.Array, tokens_M: jax.Array) -> jax.Array:
        """Return float32 logits [B, L, M] of a few tokens alone."""
        return head_logits(hidden_BLD, self.head[tokens_M])

    def log_probs(self, hidden, tokens, *args, **kwargs) -> tuple[jax.Array, jax.Array | None]:
        """Return `token_log_probs` with this head."""
        return token_log_probs(hidden, self.head, tokens, *args, **kwargs)

    def empty_cache(self, rows: int, slots: int) -> KVCache:
        """Return a `KVCache` of zeros of this model's shapes, with no valid slot."""
        c = self.config
        shape, valid = (rows, c.n_kv_head, slots, c.head_dim), jnp.zeros((rows, slots), bool)
        if c.scan_layers:
            return KVCache(jnp.zeros((c.n_layer, *shape), c.dtype), jnp.zeros((c.n_layer, *shape), c.dtype), valid)
        zeros = tuple(jnp.zeros(shape, c.dtype) for _ in range(c.n_layer))
        return KVCache(zeros, zeros, valid)

    def run(
        self,
        inputs_BLD: jax.Array,
        positions_BL: jax.Array,
        valid_BL: jax.Array,
        *,
        prefix: KVCache | None = None,
        cache: KVCache | None = None,
        start: int | jax.Array = 0,
        dropout: Dropout | None = None,
        owner_BL: jax.Array | None = None,
        last: int = 0,
        packing: Packing | None = None,
        sees_BLL: jax.Array | None = None,
        at_B: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache, list[jax.Array]]:
        """Run L positions of B rows.

        Args:
            inputs_BLD: embeddings or latents.
            positions_BL: int position ids, which count real tokens only.
            valid_BL: bool; an invalid position is seen by nobody and its output means nothing.
            prefix: slots that come before, read only, shared by B / rows(prefix) consecutive rows.
            cache: the rows' own slots; the L new ones are written at start .. start+L-1. None: those L are all.
            start: first slot to write (may be traced).
            dropout: the pass's noise, None for a deterministic pass.
            owner_BL: int, without a cache: several sequences side by side in one row, each of which sees only itself
                (and the prefix). None: a row is one sequence.
            last: how many of the last positions' hidden states are wanted, 0 for all; the others then cost nothing
                beyond the last block's keys and values. Noise has to cover all positions.
            packing: without a cache: B sequences of L slots laid end to end in one row of S packed slots. Inputs,
                positions and noise are then those of the packed slots, [1, S]; `valid_BL` and all that is returned are
                the sequences'. Only attention works on slots. Needs `last`; without a prefix and owners.
            sees_BLL: bool, without a cache: which of the slots up to its own a query sees; None: all.
            at_B: int, a position of each row among the L of this call, of which levels are wanted.
        Returns:
            hidden states [B, L, D] (or [B, last, D]) after the final norm, the own slots' `KVCache`, and the hidden
            states of all n_layer + 1 levels at `at_B`, [B, D] each: the input of the first block, then the outputs of
            the blocks, the last one's after the final norm; none without `at_B`.
        """
        assert packing is None or (last and cache is None and prefix is None and owner_BL is None)
        assert sees_BLL is None or (packing is None and cache is None)
        looped, before = self.config.scan_layers and not self.is_initializing(), () if prefix is None else (prefix,)
        x_BLD, rotation = self.enter(inputs_BLD.astype(self.config.dtype), jnp.maximum(positions_BL, 0))
        valid_BS, seen_BS, written = valid_BL, valid_BL, None
        if cache is not None:
            valid_BS = jax.lax.dynamic_update_slice_in_dim(cache.valid, valid_BL, start, axis=1)
            if looped:
                known_BS = cache.valid & (jnp.arange(cache.slots) < start)[None]
                before = (*before, dataclasses.replace(cache, valid=known_BS))
            else:
                seen_BS, written = valid_BS, cache
        mask_BLS = own_mask(seen_BS, valid_BL.shape[1], 0 if written is None else start, owner_BL)
        mask_BLS = mask_BLS if sees_BLL is None else mask_BLS & sees_BLL
        context = Context(mask_BLS, before, written, start, dropout, rotation, packing)
        x_BLD, slots, levels = (self._stacked if looped else self._one_by_one)(x_BLD, context, at_B, last)
        if looped and cache is not None:  # once for all layers, in place
            slots = write((cache.keys, cache.values), slots, start)  # type: ignore[arg-type]
        hidden_BLD = self.final_norm(x_BLD)
        return hidden_BLD, KVCache(slots[0], slots[1], valid_BS), [*levels, *_level(hidden_BLD, at_B)]

    def __call__(self, *args, **kwargs) -> tuple[jax.Array, KVCache]:
        """Return `run` without levels: hidden states, and the own slots' `KVCache`."""
        return self.run(*args, **kwargs)[:2]

    def trace(self, *args, **kwargs) -> tuple[jax.Array, KVCache, jax.Array]:
        """Return `run` at a position `at_B`, with the levels as one, [B, M, D], M = n_layer + 1."""
        hidden_BLD, slots, levels = self.run(*args, **kwargs)
        return hidden_BLD, slots, jnp.stack(levels, axis=1)

    def _one_by_one(self, x_BLD, context: Context, at_B, last: int):
        """Return (outputs, keys and values by layer, the blocks' inputs at `at_B`)."""
        layers, levels = list[tuple[jax.Array, jax.Array]](), list[jax.Array]()
        for block in self.blocks:
            levels += _level(x_BLD, at_B)
            if last and block is self.blocks[-1]:
                context = context.only_last(last)
            if self.is_initializing():
                x_BLD, kv = block(x_BLD, context)
            else:
                block_context = context.of_layer(block.layer)
                x_BLD, kv = run_block(self.block_type, self.config, block.variables["params"], x_BLD, block_context)
            layers.append(kv)
        return x_BLD, tuple(zip(*layers, strict=True)), levels

    def _stacked(self, x_BLD, context: Context, at_B, last: int):
        """Return `_one_by_one` by a loop over one block, compiled once; of the last block all positions are made."""
        block, params = self.block_type(self.config, 0, parent=None), self.stacked(self.variables["params"])[LAYERS]

        def body(x_BLD, layer):
            number, params, slots = layer
            before = [KVCache((k,), (v,), cache.valid) for (k, v), cache in zip(slots, context.before, strict=True)]
            layer_context = dataclasses.replace(context, before=tuple(before), first_site=number * SITE_NUMBERS)
            y_BLD, kv = block.apply({"params": updated(params)}, x_BLD, layer_context)
            return y_BLD, (kv, _level(x_BLD, at_B))

        keeps = None if self.config.remat else jax.checkpoint_policies.save_only_these_names(KEPT)
        body = jax.checkpoint(body, prevent_cse=False, policy=keeps)
        slots = [(cache.keys, cache.values) for cache in context.before]
        x_BLD, (kv, levels) = jax.lax.scan(body, x_BLD, (jnp.arange(self.config.n_layer), params, slots))
        return dataclasses.replace(context, last=last).going_on(x_BLD), kv, [x for level in levels for x in level]


def _level(x_BLD: jax.Array, at_B: jax.Array | None) -> list[jax.Array]:
    """Return [B, D] of one position of each row, alone in a list; none without positions."""
    return [] if at_B is None else [jnp.take_along_axis(x_BLD, at_B[:, None, None], axis=1)[:, 0]]

"""Backbones: a forward pass through pre-norm blocks, its masks, its cache and the head."""

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
from slpo_jax.models.layers import (
    KEPT,
    SITE_NUMBERS,
    Dropout,
    add_low_rank,
    drop,
    head_logits,
    site_number,
)
from slpo_jax.models.likelihood import token_log_probs
from slpo_jax.models.packing import Packing
from slpo_jax.models.xla_cpu import remat_but

LAYERS = "layers"
"""The parameters of all blocks in one tree, see `Backbone.stack`."""


@struct.dataclass
class Context:
    """The constants of one forward pass, which all blocks have in common.

    Attributes:
        mask_BLS: bool, which own slots each query sees.
        before: slots that are read and not written: a prefix and, where layers are a loop, the row's own so far.
        cache, start, dropout, packing: see `Backbone.run`.
        rotation: float32 cosines and sines [B, 1, L, Dh/2] of the positions' angles; None without rotary positions.
        first_site: added to the blocks' site numbers; not 0 where one block stands for all layers in turn.
        last: the number of last positions that go on after attention; 0 is all. Keys and values are made of all.
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
        """Return the context of a block that only the `last` last positions are wanted of."""
        mask_BLS = self.mask_BLS[:, -last:]
        context = dataclasses.replace(self, mask_BLS=mask_BLS, last=last)
        dropout = jax.tree.map(context.select_last, self.dropout)
        return dataclasses.replace(context, dropout=dropout)

    def of_layer(self, layer: int) -> "Context":
        """Return the context of a block that stands for this layer, with the layer's keys and values alone."""

        def own(cache: KVCache) -> KVCache:
            return KVCache(
                (cache.keys[layer],),
                (cache.values[layer],),
                cache.valid,
            )

        return dataclasses.replace(
            self,
            before=tuple(map(own, self.before)),
            cache=None if self.cache is None else own(self.cache),
            first_site=layer * SITE_NUMBERS,
        )

    def select_last(self, x_BL: jax.Array) -> jax.Array:
        """Select from [B, L, ..] the positions that go on after attention."""
        if self.last and self.packing is not None:
            x_BL = self.packing.unpack(x_BL)
        return x_BL[:, -self.last :]

    def attend(
        self, layer: int, q_BHLD, k_BGLD, v_BGLD
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Write the new keys and values of G key-value heads, then attend over own slots and those before.

        Returns:
            outputs [B, L, H*Dh], the heads side by side, and the layer's own keys and values [B, G, S, Dh].
        """
        # Attention is over a sequence's own slots, so packed rows become sequences again.
        if self.packing is not None:
            q_BHLD = self._unpack_heads(q_BHLD)
            k_BGLD = self._unpack_heads(k_BGLD)
            v_BGLD = self._unpack_heads(v_BGLD)

        # Only the positions that go on ask; all of them have keys and values.
        q_BHLD = q_BHLD[:, :, -self.last :]
        k_BGSD = k_BGLD
        v_BGSD = v_BGLD
        if self.cache is not None:
            slots = (self.cache.keys[layer], self.cache.values[layer])
            k_BGSD, v_BGSD = write(
                slots,
                (k_BGLD, v_BGLD),
                self.start,
            )

        # Attend, and lay the heads side by side.
        before = []
        for cache in self.before:
            before.append((cache.keys[layer], cache.values[layer], cache.valid))
        out_BHLD = attend(q_BHLD, k_BGSD, v_BGSD, self.mask_BLS, *before)
        out_BLHD = out_BHLD.swapaxes(1, 2)
        if self.packing is not None and not self.last:
            out_BLHD = self.packing.pack(out_BLHD)
        out_BLE = out_BLHD.reshape(*out_BLHD.shape[:2], -1)
        return out_BLE, (k_BGSD, v_BGSD)

    def _unpack_heads(self, x_BHLD: jax.Array) -> jax.Array:
        """Return [1, H, S, Dh] of packed slots -> [B, H, L, Dh]."""
        assert self.packing is not None
        return self.packing.unpack(x_BHLD.swapaxes(1, 2)).swapaxes(1, 2)


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
            number = context.first_site + site_number(self.layer, site)
            return drop(y_BLD, context.dropout, number)

        # Attention, then the feed-forward layer; behind attention only some positions may go on.
        y_BLD, kv = self.attention(self.norm_1(x_BLD), context)
        x_BLD = context.select_last(x_BLD) + maybe_drop(y_BLD, "attention")
        y_BLD = self.feed_forward(self.norm_2(x_BLD))
        return x_BLD + maybe_drop(y_BLD, "mlp"), kv


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_block(
    block: type[Block],
    config,
    params,
    x_BLD: jax.Array,
    context: Context,
):
    """Run a block whose layer is the context's, recomputed in the backward pass if `config.remat`.

    jax traces and lowers it once for all layers and passes of the same shapes.
    """

    def run(params, x_BLD, context):
        module = block(config, 0, parent=None)
        return module.apply({"params": params}, x_BLD, context)

    run = jax.checkpoint(run) if config.remat else remat_but(run, KEPT)
    return run(params, x_BLD, context)


class Backbone(nn.Module):
    """Embeddings in, hidden states after the final norm out.

    A subclass has `block_type`, and its `setup` makes `table` (the embedding [V, D]), `blocks`, `final_norm`, and
    `head` ([V, D]), which is the table itself where the two are tied.
    """

    config: Any
    block_type: ClassVar[type[Block]]

    @staticmethod
    def stack(params: Mapping[str, Any]) -> dict[str, Any]:
        """Stack parameters as a loop over layers reads them: those of all blocks as one, `LAYERS`, the layers first."""
        # The names of blocks end with their layer, as in h_3 or layers_3.
        blocks = {}
        others = {}
        for name, tree in params.items():
            match = re.fullmatch(r"\w+_(\d+)", name)
            if match:
                blocks[int(match[1])] = tree
            else:
                others[name] = tree
        if not blocks:
            return others
        layers = [blocks[layer] for layer in range(len(blocks))]
        others[LAYERS] = jax.tree.map(
            lambda *x: jnp.stack(x),
            *layers,
        )
        return others

    def enter(
        self, inputs_BLD, positions_BL
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Return the first block's input before dropout, and `Context.rotation`; no position is negative here."""
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

    def log_probs(
        self, hidden, tokens, *args, **kwargs
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return `token_log_probs` with this head."""
        return token_log_probs(hidden, self.head, tokens, *args, **kwargs)

    def empty_cache(self, rows: int, slots: int) -> KVCache:
        """Return a `KVCache` of zeros of this model's shapes, with no valid slot."""
        c = self.config
        shape = (rows, c.n_kv_head, slots, c.head_dim)
        valid = jnp.zeros((rows, slots), bool)
        if c.scan_layers:
            keys = jnp.zeros((c.n_layer, *shape), c.dtype)
            values = jnp.zeros((c.n_layer, *shape), c.dtype)
            return KVCache(keys, values, valid)
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
            last: the number of last positions whose hidden states are wanted, 0 for all; the others then cost nothing
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
        if packing is not None:
            assert last
            assert cache is None
            assert prefix is None
            assert owner_BL is None
        if sees_BLL is not None:
            assert packing is None
            assert cache is None
        looped = self.config.scan_layers and not self.is_initializing()
        inputs_BLD = inputs_BLD.astype(self.config.dtype)
        x_BLD, rotation = self.enter(inputs_BLD, jnp.maximum(positions_BL, 0))

        # Find the slots that attention reads: a layer by itself writes its cache and then reads all of it; a loop
        # reads the slots so far beside the new ones, and writes those of all layers once at the end.
        before = () if prefix is None else (prefix,)
        valid_BS = valid_BL
        seen_BS = valid_BL
        written = None
        if cache is not None:
            valid_BS = jax.lax.dynamic_update_slice_in_dim(
                cache.valid, valid_BL, start, axis=1
            )
            if looped:
                is_known_S = jnp.arange(cache.slots) < start
                known_BS = cache.valid & is_known_S[None]
                known = dataclasses.replace(cache, valid=known_BS)
                before = (*before, known)
            else:
                seen_BS = valid_BS
                written = cache

        # Make the mask of a row's own slots.
        first = 0 if written is None else start
        mask_BLS = own_mask(seen_BS, valid_BL.shape[1], first, owner_BL)
        if sees_BLL is not None:
            mask_BLS = mask_BLS & sees_BLL

        # Run the blocks and the final norm.
        context = Context(mask_BLS, before, written, start, dropout, rotation, packing)
        run_blocks = self._run_loop if looped else self._run_one_by_one
        x_BLD, slots, levels = run_blocks(x_BLD, context, at_B, last)
        if looped and cache is not None:
            slots = write((cache.keys, cache.values), slots, start)  # type: ignore[arg-type]
        hidden_BLD = self.final_norm(x_BLD)
        levels = [*levels, *_level(hidden_BLD, at_B)]
        return hidden_BLD, KVCache(slots[0], slots[1], valid_BS), levels

    def __call__(self, *args, **kwargs) -> tuple[jax.Array, KVCache]:
        """Return `run` without levels: hidden states, and the own slots' `KVCache`."""
        return self.run(*args, **kwargs)[:2]

    def trace(self, *args, **kwargs) -> tuple[jax.Array, KVCache, jax.Array]:
        """Return `run` at a position `at_B`, with the levels as one, [B, M, D], M = n_layer + 1."""
        hidden_BLD, slots, levels = self.run(*args, **kwargs)
        return hidden_BLD, slots, jnp.stack(levels, axis=1)

    def _run_one_by_one(self, x_BLD, context: Context, at_B, last: int):
        """Run one block after the other: (outputs, keys and values by layer, the blocks' inputs at `at_B`)."""
        layers = list[tuple[jax.Array, jax.Array]]()
        levels = list[jax.Array]()
        for block in self.blocks:
            levels += _level(x_BLD, at_B)
            # The last block's other positions would be computed for nothing.
            if last and block is self.blocks[-1]:
                context = context.only_last(last)
            # Parameters are made by the module itself; later one compiled program serves all blocks.
            if self.is_initializing():
                x_BLD, kv = block(x_BLD, context)
            else:
                x_BLD, kv = run_block(
                    self.block_type,
                    self.config,
                    block.variables["params"],
                    x_BLD,
                    context.of_layer(block.layer),
                )
            layers.append(kv)
        return x_BLD, tuple(zip(*layers, strict=True)), levels

    def _run_loop(self, x_BLD, context: Context, at_B, last: int):
        """Run a loop over one block, compiled once, as `_run_one_by_one`; the last block runs at all positions."""
        block = self.block_type(self.config, 0, parent=None)
        params = self.stack(self.variables["params"])[LAYERS]

        def run_layer(x_BLD, layer):
            number, params, slots = layer
            before = []
            for (keys, values), cache in zip(slots, context.before, strict=True):
                before.append(
                    KVCache(
                        (keys,),
                        (values,),
                        cache.valid,
                    )
                )
            layer_context = dataclasses.replace(
                context,
                before=tuple(before),
                first_site=number * SITE_NUMBERS,
            )
            variables = {"params": add_low_rank(params)}
            y_BLD, kv = block.apply(variables, x_BLD, layer_context)
            return y_BLD, (kv, _level(x_BLD, at_B))

        # The backward pass recomputes a block from its input, and without `remat` from the products' results too.
        policy = None
        if not self.config.remat:
            policy = jax.checkpoint_policies.save_only_these_names(KEPT)
        run_layer = jax.checkpoint(run_layer, prevent_cse=False, policy=policy)

        # Each layer reads its parameters, and its own slots of the caches.
        slots = [(cache.keys, cache.values) for cache in context.before]
        layers = (jnp.arange(self.config.n_layer), params, slots)
        x_BLD, (kv, levels) = jax.lax.scan(
            run_layer,
            x_BLD,
            layers,
        )
        x_BLD = dataclasses.replace(context, last=last).select_last(x_BLD)
        # Without `at_B` there is no array of levels; otherwise there is one, of all layers.
        levels_by_layer = []
        for level_MBD in levels:
            levels_by_layer.extend(level_MBD)
        return x_BLD, kv, levels_by_layer


def _level(x_BLD: jax.Array, at_B: jax.Array | None) -> list[jax.Array]:
    """Return [B, D] of one position of each row, alone in a list; an empty list without positions."""
    if at_B is None:
        return []
    level_B1D = jnp.take_along_axis(
        x_BLD,
        at_B[:, None, None],
        axis=1,
    )
    return [level_B1D[:, 0]]

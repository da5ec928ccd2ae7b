"""Problems to roll out, how their prompts are encoded, and what decides on their answers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.attention import KVCache
from slpo_jax.models.packing import pack
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy import noise
from slpo_jax.policy.policy import RolloutConfig


@struct.dataclass
class Prompts:
    """Left-padded prompts: tokens int [N, P], valid bool [N, P]; of numpy on the host, of jax inside jit.

    Attributes:
        capacity: if not 0, the prompts of one device's batch (or micro-batch) are encoded end to end, in one row of so
            many slots, which have to be enough for all their tokens: see `data.batches.end_to_end`.
    """

    tokens: Any
    valid: Any
    capacity: int = struct.field(pytree_node=False, default=0)

    @property
    def lengths(self) -> jax.Array:
        """Real tokens of each row, int [N]."""
        return self.valid.sum(axis=1)


@struct.dataclass
class PromptedBatch:
    """Problems to roll out.

    Attributes:
        prompts: of B rows.
        references: encoded for the verifier, uint8 [B, R].
        index: int [B], what randomness is drawn by: `data.batches.draw_numbers`.
        answers: int [B, A], the reference answers' tokens up to and including eos, then pad; None where no objective
            asks for them.
    """

    prompts: Prompts
    references: Any
    index: Any
    answers: Any = None


def repeat_rows(tree, copies: int):
    """Each row `copies` times in a row."""
    return jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), tree)


def encode_prompts(reasoner: Reasoner, params, prompts: Prompts, dropout) -> tuple[jax.Array, KVCache]:
    """Prefill: the hidden states [N, D] of the last prompt positions and the prompts' cache.

    Args:
        params: all parts.
    """
    tokens, positions, packing = prompts.tokens, jnp.cumsum(prompts.valid, axis=1) - 1, None
    if prompts.capacity:
        packing = pack(prompts.valid, prompts.valid.shape[0], prompts.capacity)
        tokens, positions, dropout = jax.tree.map(packing.packed, (tokens, positions, dropout))
    hidden_N1D, prefix = reasoner.forward(
        params,
        reasoner.embed(params, tokens),
        positions,
        prompts.valid,
        dropout=dropout,
        last=1,
        packing=packing,
    )
    return hidden_N1D[:, 0], prefix


def encode_for_rollouts(reasoner, params, prompts: Prompts, keys_N, config: RolloutConfig) -> tuple[jax.Array, KVCache]:
    """`encode_prompts` for N/B rollouts a prompt, a prompt's in a row: hidden states of N rows, a prefix of B or N.

    Prompts without noise are encoded once for all their rollouts; else each rollout has masks of its own, and vmap lets
    them share what no noise has reached yet: embeddings and the first attention.
    """
    rows, rollouts = prompts.tokens.shape[0], keys_N.shape[0]

    def encode(keys_B):
        dropout = noise.prompt_dropout(keys_B, prompts.valid, config.dropout_rate, config.dropout_where)
        return encode_prompts(reasoner, params, prompts, dropout)

    if not noise.reaches_prompts(config.dropout_rate, config.dropout_where):
        hidden_BD, prefix = encode(keys_N[:rows])
        return repeat_to(hidden_BD, rollouts), prefix
    axes = 0, reasoner.empty_cache(1, 1).rows_axes
    encoded = jax.vmap(encode, in_axes=1, out_axes=jax.tree.map(lambda axis: axis + 1, axes))(keys_N.reshape(rows, -1))
    axes = jax.tree.broadcast(axes, encoded)
    return jax.tree.map(lambda x, axis: x.reshape(*x.shape[:axis], rollouts, *x.shape[axis + 2 :]), encoded, axes)


def repeat_to(x_B: jax.Array, rollouts: int) -> jax.Array:
    """[B, ..] -> [N, ..], each row N/B times in a row."""
    return jnp.repeat(x_B, rollouts // x_B.shape[0], axis=0)

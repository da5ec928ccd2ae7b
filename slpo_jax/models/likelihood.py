"""Log-likelihoods of tokens after hidden states, without an array of all their logits where these are many.

The logits are computed in tiles of some positions and a part of the vocabulary, and recomputed in the backward pass
(as Wijmans et al., 2024, do within a kernel), where each part of the head's gradient is written once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from slpo_jax.models import xla_cpu
from slpo_jax.models.layers import head_logits, sums, sums_over_rows

# The logits that are computed at once, and kept for the backward pass: 128 MiB.
WHOLE = 2**25

# A tile has at most 4096 positions and 4096 tokens, 64 MiB, and multiples of these, as products are faster then.
ROWS = 4096
COLUMNS = 4096
EVEN_ROWS = 16
EVEN_COLUMNS = 128


def token_log_probs(
    hidden: jax.Array,
    head_VD: jax.Array,
    tokens: jax.Array,
    mask: jax.Array | None = None,
    likeliest: bool = False,
    impossible: tuple[int, ...] = (),
) -> tuple[jax.Array, jax.Array | None]:
    """Return the log-probabilities of the given tokens.

    Args:
        hidden: [.., D].
        head_VD: in the precision of `hidden`, or in float32: then its gradient is not rounded.
        tokens: int [..], or fewer of the last axes.
        mask: bool as `tokens`, the positions that are used; None: all. Of many, time is spent on these alone.
        likeliest: whether the likeliest tokens are returned too.
        impossible: ids of tokens whose probability is 0; the other probabilities add up to 1.
    Returns:
        float32 [..], and int [..], the first of the likeliest tokens, or None; finite, but without a meaning, where
        the mask is False.
    """
    shape = hidden.shape[:-1]
    vocabulary, width = head_VD.shape
    tokens = jnp.broadcast_to(tokens, shape)

    # Few logits are computed at once.
    if tokens.size * vocabulary <= WHOLE:
        product = head_logits
        # Each of several passes has its own product, so that sums have the order that they have in a vmap of passes.
        if hidden.ndim >= 4:
            product = jax.vmap(head_logits, (0, None))
        logits = without_tokens(product(hidden, head_VD), impossible)
        log_probs = log_probs_of(logits, tokens)
        ids = jnp.argmax(logits, axis=-1) if likeliest else None
        return log_probs, ids

    # Many logits are computed in tiles, of consecutive positions.
    mask_N = jnp.ones(tokens.size, bool)
    if mask is not None:
        mask_N = jnp.broadcast_to(mask, shape).reshape(-1)
    hidden_ND = hidden.reshape(-1, width)
    values = _in_tiles(
        likeliest,
        impossible,
        hidden_ND,
        head_VD,
        tokens.reshape(-1),
        mask_N,
    )
    log_probs, ids = jax.tree.map(
        lambda x_N: x_N.reshape(shape),
        values,
    )
    return log_probs, ids


def without_tokens(logits: jax.Array, impossible: tuple[int, ...]) -> jax.Array:
    """Return logits [.., V] that are -inf at these ids."""
    if not impossible:
        return logits
    return logits.at[..., jnp.array(impossible)].set(-jnp.inf)


@jax.custom_vjp
def log_probs_of(logits_BLV: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    """Return float32 [B, L]: log softmax(logits) at the given tokens."""
    return _log_probs_of(logits_BLV, tokens_BL)[0]


def _log_probs_of(logits_BLV: jax.Array, tokens_BL: jax.Array):
    chosen_BL = jnp.take_along_axis(
        logits_BLV,
        tokens_BL[..., None],
        axis=-1,
    )[..., 0]
    whole_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    return chosen_BL - whole_BL, (logits_BLV, tokens_BL, whole_BL)


def _cotangent(
    logits_BLV: jax.Array, tokens_BL: jax.Array, whole_BL: jax.Array, g_BL: jax.Array
) -> jax.Array:
    """Return the cotangent of the logits in one pass, where autodiff keeps exponentials, and scatters."""
    is_token_BLV = jax.nn.one_hot(tokens_BL, logits_BLV.shape[-1])
    probability_BLV = jnp.exp(logits_BLV - whole_BL[..., None])
    return g_BL[..., None] * (is_token_BLV - probability_BLV)


def _log_probs_backward(residuals, g_BL: jax.Array):
    logits_BLV, tokens_BL, whole_BL = residuals
    return _cotangent(logits_BLV, tokens_BL, whole_BL, g_BL), None


log_probs_of.defvjp(_log_probs_of, _log_probs_backward)


class _Columns(NamedTuple):
    """A slice of the vocabulary from `start` on; columns before `first` belong to the slice before it."""

    head_ED: jax.Array
    start: jax.Array
    first: jax.Array


def _parts(
    size: int,
    most: int,
    multiple: int,
) -> tuple[int, int]:
    """Divide `size` into equal parts of about `most` at most.

    Returns:
        the number of parts, and the size of each, rounded up to a multiple.
    """
    parts = -(-size // most)
    multiples = -(-size // (parts * multiple))
    part_size = multiples * multiple
    return -(-size // part_size), part_size


def _over_columns(
    head_VD: jax.Array, dtype: Any, function: Callable[[_Columns, Any], Any], carry: Any
) -> Any:
    """Run function(part of the vocabulary, carry) -> carry for one part after the other, the head in `dtype`."""
    vocabulary = head_VD.shape[0]
    parts, columns = _parts(vocabulary, COLUMNS, EVEN_COLUMNS)
    columns = min(columns, vocabulary)

    def run_part(part, carry):
        # The last part starts early enough to have as many columns as the others.
        start = jnp.minimum(part * columns, vocabulary - columns)
        head_ED = jax.lax.dynamic_slice_in_dim(head_VD, start, columns)
        part_columns = _Columns(
            head_ED.astype(dtype),
            start,
            part * columns,
        )
        return function(part_columns, carry)

    return jax.lax.fori_loop(0, parts, run_part, carry)


def _tile(
    hidden_RD: jax.Array,
    tokens_R: jax.Array,
    columns: _Columns,
    impossible: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Return the logits of a tile, and where in it the given tokens are.

    Returns:
        logits [R, E], -inf in columns of an earlier tile and of impossible tokens, and int [R] the token's column, -1
        where the token is not in the tile.
    """
    logits_RE = sums("nd,vd->nv", hidden_RD, columns.head_ED)
    tokens_E = columns.start + jnp.arange(logits_RE.shape[1])
    is_here_R = (tokens_R >= columns.first) & (tokens_R <= tokens_E[-1])
    is_possible_E = tokens_E >= columns.first
    for token in impossible:
        is_possible_E &= tokens_E != token
    logits_RE = jnp.where(
        is_possible_E,
        logits_RE,
        -jnp.inf,
    )
    column_R = jnp.where(
        is_here_R,
        tokens_R - columns.start,
        -1,
    )
    return logits_RE, column_R


class _Order(NamedTuple):
    """N positions as C chunks of R, the used positions first; the first `used` chunks have all of these."""

    chunks: int
    rows: int
    order_N: jax.Array
    used: jax.Array

    def split(self, x_N: jax.Array) -> jax.Array:
        """Return [N, ..] -> [C, R, ..]."""
        widths = [(0, 0)] * x_N.ndim
        widths[0] = (0, self.chunks * self.rows - len(x_N))
        x_N = jnp.pad(x_N[self.order_N], widths)
        return x_N.reshape(self.chunks, self.rows, *x_N.shape[1:])

    def restore(self, x_CR: jax.Array) -> jax.Array:
        """Return [C, R, ..] -> [N, ..]."""
        x_N = x_CR.reshape(-1, *x_CR.shape[2:])
        return x_N[jnp.argsort(self.order_N)]

    def loop_over_used(
        self, function: Callable[[jax.Array, Any], Any], carry: Any
    ) -> Any:
        """Run function(chunk, carry) -> carry for one used chunk after the other."""

        def goes_on(state):
            chunk, _ = state
            # No more chunks are used than there are: the second condition only shows that bound in the program.
            return (chunk < self.used) & (chunk < self.chunks)

        def run_chunk(state):
            chunk, carry = state
            return chunk + 1, function(chunk, carry)

        _, carry = jax.lax.while_loop(
            goes_on,
            run_chunk,
            (jnp.int32(0), carry),
        )
        return carry


def _order(mask_N: jax.Array) -> _Order:
    """Order the positions for tiles, those of the mask first."""
    chunks, rows = _parts(
        mask_N.size,
        xla_cpu.fewer(ROWS),
        EVEN_ROWS,
    )
    order_N = jnp.argsort(~mask_N, stable=True)
    used = -(-mask_N.sum(dtype=jnp.int32) // rows)
    return _Order(chunks, rows, order_N, used)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_tiles(
    likeliest: bool,
    impossible: tuple[int, ...],
    hidden_ND,
    head_VD,
    tokens_N,
    mask_N,
) -> tuple[jax.Array, jax.Array | None]:
    """Return `token_log_probs` of N positions."""
    outputs, _ = _in_tiles_forward(
        likeliest, impossible, hidden_ND, head_VD, tokens_N, mask_N
    )
    return outputs


def _in_tiles_forward(
    likeliest: bool,
    impossible: tuple[int, ...],
    hidden_ND,
    head_VD,
    tokens_N,
    mask_N,
):
    order = _order(mask_N)
    hidden_CRD = order.split(hidden_ND)
    tokens_CR = order.split(tokens_N)

    # A tile updates its chunk's sum of exponentials, the logit of its tokens and, if asked for, the likeliest tokens.
    def read_tile(columns, c, carry):
        logits_RE, column_R = _tile(
            hidden_CRD[c],
            tokens_CR[c],
            columns,
            impossible,
        )
        place_R1 = jnp.maximum(column_R, 0)[:, None]
        chosen_R = jnp.take_along_axis(
            logits_RE,
            place_R1,
            axis=1,
        )[:, 0]
        whole_before_R = carry["whole"][c]
        whole_R = jax.nn.logsumexp(logits_RE, axis=1)
        tile = {
            "whole": jnp.logaddexp(whole_before_R, whole_R),
            "chosen": jnp.where(column_R >= 0, chosen_R, carry["chosen"][c]),
        }
        if likeliest:
            top_R = logits_RE.max(axis=1)
            top_before_R = carry["top"][c]
            id_R = columns.start + jnp.argmax(logits_RE, axis=1)
            tile["top"] = jnp.maximum(top_R, top_before_R)
            tile["id"] = jnp.where(
                top_R > top_before_R,
                id_R,
                carry["id"][c],
            )
        return {name: carry[name].at[c].set(x_R) for name, x_R in tile.items()}

    def read_columns(columns, carry):
        return order.loop_over_used(functools.partial(read_tile, columns), carry)

    # All used chunks are read under one part of the vocabulary before the next part is.
    nothing_CR = jnp.full(tokens_CR.shape, -jnp.inf)
    carry = {"whole": nothing_CR, "chosen": jnp.zeros(tokens_CR.shape)}
    if likeliest:
        carry["top"] = nothing_CR
        carry["id"] = jnp.zeros(tokens_CR.shape, jnp.int32)
    carry = _over_columns(head_VD, hidden_CRD.dtype, read_columns, carry)

    # Chunks that are not used were never read: their positions get 0.
    whole_CR = carry["whole"]
    is_unread_CR = whole_CR == -jnp.inf
    log_probs_CR = jnp.where(
        is_unread_CR,
        0.0,
        carry["chosen"] - whole_CR,
    )
    ids_N = order.restore(carry["id"]) if likeliest else None
    residuals = (hidden_CRD, head_VD, tokens_CR, mask_N, whole_CR)
    return (order.restore(log_probs_CR), ids_N), residuals


def _in_tiles_backward(likeliest: bool, impossible: tuple[int, ...], residuals, g):
    hidden_CRD, head_VD, tokens_CR, mask_N, whole_CR = residuals
    order = _order(mask_N)
    dtype = hidden_CRD.dtype
    g_CR = order.split(g[0])

    # A tile recomputes its logits and adds its share to both gradients.
    def add_tile(columns, c, gradients):
        of_hidden_CRD, of_head_ED = gradients
        logits_RE, column_R = _tile(
            hidden_CRD[c],
            tokens_CR[c],
            columns,
            impossible,
        )
        g_RE = _cotangent(logits_RE, column_R, whole_CR[c], g_CR[c]).astype(dtype)
        of_hidden_RD = sums("nv,vd->nd", g_RE, columns.head_ED)
        of_hidden_CRD = of_hidden_CRD.at[c].add(of_hidden_RD)
        of_head_ED += sums_over_rows("nd,nv->vd", hidden_CRD[c], g_RE)
        return of_hidden_CRD, of_head_ED

    # One part of the head's gradient is summed over all used chunks before it is written.
    def add_columns(columns, gradients):
        of_hidden_CRD, of_head_VD = gradients
        zeros_ED = jnp.zeros(columns.head_ED.shape)
        of_hidden_CRD, of_head_ED = order.loop_over_used(
            functools.partial(add_tile, columns), (of_hidden_CRD, zeros_ED)
        )
        # Columns of the part before, which the last part may have too, have 0 here.
        of_head_ED += jax.lax.dynamic_slice_in_dim(
            of_head_VD, columns.start, len(of_head_ED)
        )
        of_head_VD = jax.lax.dynamic_update_slice_in_dim(
            of_head_VD, of_head_ED, columns.start, 0
        )
        return of_hidden_CRD, of_head_VD

    zeros = (jnp.zeros(hidden_CRD.shape), jnp.zeros(head_VD.shape))
    of_hidden_CRD, of_head_VD = _over_columns(head_VD, dtype, add_columns, zeros)
    of_hidden_ND = order.restore(of_hidden_CRD.astype(dtype))
    return of_hidden_ND, of_head_VD.astype(head_VD.dtype), None, None


_in_tiles.defvjp(_in_tiles_forward, _in_tiles_backward)

"""Log-likelihoods of tokens after hidden states, without an array of all their logits where these are many.

They are made in tiles, of some positions and a part of the vocabulary, and made again in the backward pass (as Wijmans
et al., 2024, do within a kernel), where each part of the head's gradient is written once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from slpo_jax.models import xla_cpu
from slpo_jax.models.layers import head_logits, sums, sums_over_rows

WHOLE = 2**25  # logits that are made at once, and kept for the backward pass: 128 MiB
ROWS, COLUMNS = 4096, 4096  # of a tile, at most: 64 MiB
EVEN_ROWS, EVEN_COLUMNS = 16, 128  # are multiples, as products are faster then


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
        mask: bool as `tokens`, the positions that anybody looks at; None: all. Of many, time is spent on these alone.
        likeliest: whether the likeliest tokens are returned too.
        impossible: ids of tokens whose probability is 0; the other probabilities add up to 1.
    Returns:
        float32 [..], and int [..], the first of the likeliest tokens, or None; finite, but without a meaning, where
        nobody looks.
    """
    shape, (vocabulary, width) = hidden.shape[:-1], head_VD.shape
    tokens = jnp.broadcast_to(tokens, shape)
    if tokens.size * vocabulary <= WHOLE:
        # Of several passes each has its own product, so that sums have the order that they have in a vmap of passes.
        product = head_logits if hidden.ndim < 4 else jax.vmap(head_logits, (0, None))
        logits = without_tokens(product(hidden, head_VD), impossible)
        return log_probs_of(logits, tokens), jnp.argmax(logits, axis=-1) if likeliest else None
    mask_N = jnp.ones(tokens.size, bool) if mask is None else jnp.broadcast_to(mask, shape).reshape(-1)
    values = _in_tiles(likeliest, impossible, hidden.reshape(-1, width), head_VD, tokens.reshape(-1), mask_N)
    log_probs, likeliest_ids = jax.tree.map(lambda x_N: x_N.reshape(shape), values)
    return log_probs, likeliest_ids


def without_tokens(logits: jax.Array, impossible: tuple[int, ...]) -> jax.Array:
    """Return logits [.., V] that are -inf at these ids."""
    return logits.at[..., jnp.array(impossible)].set(-jnp.inf) if impossible else logits


@jax.custom_vjp
def log_probs_of(logits_BLV: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    """Return float32 [B, L]: log softmax(logits) at the given tokens."""
    return _log_probs_of(logits_BLV, tokens_BL)[0]


def _log_probs_of(logits_BLV: jax.Array, tokens_BL: jax.Array):
    chosen_BL = jnp.take_along_axis(logits_BLV, tokens_BL[..., None], axis=-1)[..., 0]
    whole_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    return chosen_BL - whole_BL, (logits_BLV, tokens_BL, whole_BL)


def _cotangent(logits_BLV: jax.Array, tokens_BL: jax.Array, whole_BL: jax.Array, g_BL: jax.Array) -> jax.Array:
    """Return the cotangent of the logits, in one pass, where autodiff keeps exponentials, and scatters."""
    is_token_BLV = jax.nn.one_hot(tokens_BL, logits_BLV.shape[-1])
    return g_BL[..., None] * (is_token_BLV - jnp.exp(logits_BLV - whole_BL[..., None]))


def _log_probs_backward(residuals, g_BL: jax.Array):
    logits_BLV, tokens_BL, whole_BL = residuals
    return _cotangent(logits_BLV, tokens_BL, whole_BL, g_BL), None


log_probs_of.defvjp(_log_probs_of, _log_probs_backward)


class _Columns(NamedTuple):
    """A slice of the vocabulary, from `start` on; columns before `first` are the part's before it."""

    head_ED: jax.Array
    start: jax.Array
    first: jax.Array


def _parts(size: int, most: int, multiple: int) -> tuple[int, int]:
    """Divide into parts of at most so many: how many parts, and the size of each, rounded up to a multiple."""
    columns = -(-size // (-(-size // most) * multiple)) * multiple
    return -(-size // columns), columns


def _over_columns(head_VD: jax.Array, dtype: Any, function: Callable[[_Columns, Any], Any], carry: Any) -> Any:
    """Run function(part of the vocabulary, carry) -> carry for one part after the other, the head in `dtype`."""
    vocabulary = head_VD.shape[0]
    parts, columns = _parts(vocabulary, COLUMNS, EVEN_COLUMNS)
    columns = min(columns, vocabulary)

    def one(part, carry):
        start = jnp.minimum(part * columns, vocabulary - columns)
        head_ED = jax.lax.dynamic_slice_in_dim(head_VD, start, columns).astype(dtype)
        return function(_Columns(head_ED, start, part * columns), carry)

    return jax.lax.fori_loop(0, parts, one, carry)


def _tile(
    hidden_RD: jax.Array, tokens_R: jax.Array, columns: _Columns, impossible: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return logits [R, E], -inf in columns that were there before or are impossible, and int [R] the token's column.

    The column is -1 where the token is not in the tile.
    """
    logits_RE = sums("nd,vd->nv", hidden_RD, columns.head_ED)
    tokens_E = columns.start + jnp.arange(logits_RE.shape[1])
    is_here_R = (tokens_R >= columns.first) & (tokens_R <= tokens_E[-1])
    is_possible_E = tokens_E >= columns.first
    for token in impossible:
        is_possible_E &= tokens_E != token
    return jnp.where(is_possible_E, logits_RE, -jnp.inf), jnp.where(is_here_R, tokens_R - columns.start, -1)


class _Order(NamedTuple):
    """N positions as C chunks of R, those that are asked for first, and only the first `used` chunks have one."""

    chunks: int
    rows: int
    order_N: jax.Array
    used: jax.Array

    def cut(self, x_N: jax.Array) -> jax.Array:
        """Return [N, ..] -> [C, R, ..]."""
        x_N = jnp.pad(x_N[self.order_N], ((0, self.chunks * self.rows - len(x_N)), *((0, 0) for _ in x_N.shape[1:])))
        return x_N.reshape(self.chunks, self.rows, *x_N.shape[1:])

    def back(self, x_CR: jax.Array) -> jax.Array:
        """Return [C, R, ..] -> [N, ..]."""
        return x_CR.reshape(-1, *x_CR.shape[2:])[jnp.argsort(self.order_N)]

    def over_used(self, function: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """Run function(chunk, carry) -> carry for one used chunk after the other."""

        def goes_on(state):
            return (state[0] < self.used) & (state[0] < self.chunks)  # the latter tells a reader the most

        return jax.lax.while_loop(goes_on, lambda state: (state[0] + 1, function(*state)), (jnp.int32(0), carry))[1]


def _ordered(mask_N: jax.Array) -> _Order:
    chunks, rows = _parts(mask_N.size, xla_cpu.fewer(ROWS), EVEN_ROWS)
    return _Order(chunks, rows, jnp.argsort(~mask_N, stable=True), -(-mask_N.sum(dtype=jnp.int32) // rows))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_tiles(
    likeliest: bool, impossible: tuple[int, ...], hidden_ND, head_VD, tokens_N, mask_N
) -> tuple[jax.Array, jax.Array | None]:
    """Return `token_log_probs` of N positions."""
    return _in_tiles_forward(likeliest, impossible, hidden_ND, head_VD, tokens_N, mask_N)[0]


def _in_tiles_forward(likeliest: bool, impossible: tuple[int, ...], hidden_ND, head_VD, tokens_N, mask_N):
    order = _ordered(mask_N)
    hidden_CRD, tokens_CR = order.cut(hidden_ND), order.cut(tokens_N)

    def of_tile(columns, c, carry):
        logits_RE, column_R = _tile(hidden_CRD[c], tokens_CR[c], columns, impossible)
        chosen_R = jnp.take_along_axis(logits_RE, jnp.maximum(column_R, 0)[:, None], axis=1)[:, 0]
        tile = {
            "whole": jnp.logaddexp(carry["whole"][c], jax.nn.logsumexp(logits_RE, axis=1)),
            "chosen": jnp.where(column_R >= 0, chosen_R, carry["chosen"][c]),
        }
        if likeliest:
            top_R, before_R = logits_RE.max(axis=1), carry["top"][c]
            id_R = columns.start + jnp.argmax(logits_RE, axis=1)
            tile |= {"top": jnp.maximum(top_R, before_R), "id": jnp.where(top_R > before_R, id_R, carry["id"][c])}
        return {name: carry[name].at[c].set(x_R) for name, x_R in tile.items()}

    def of_columns(columns, carry):
        return order.over_used(functools.partial(of_tile, columns), carry)

    nothing_CR = jnp.full(tokens_CR.shape, -jnp.inf)
    carry = {"whole": nothing_CR, "chosen": jnp.zeros(tokens_CR.shape)}
    if likeliest:
        carry |= {"top": nothing_CR, "id": jnp.zeros(tokens_CR.shape, jnp.int32)}
    carry = _over_columns(head_VD, hidden_CRD.dtype, of_columns, carry)
    log_probs_CR = jnp.where(carry["whole"] == -jnp.inf, 0.0, carry["chosen"] - carry["whole"])
    ids_N = order.back(carry["id"]) if likeliest else None
    return (order.back(log_probs_CR), ids_N), (hidden_CRD, head_VD, tokens_CR, mask_N, carry["whole"])


def _in_tiles_backward(likeliest: bool, impossible: tuple[int, ...], residuals, g):
    hidden_CRD, head_VD, tokens_CR, mask_N, whole_CR = residuals
    order, dtype = _ordered(mask_N), hidden_CRD.dtype
    g_CR = order.cut(g[0])

    def of_tile(columns, c, gradients):
        of_hidden_CRD, of_head_ED = gradients
        logits_RE, column_R = _tile(hidden_CRD[c], tokens_CR[c], columns, impossible)
        g_RE = _cotangent(logits_RE, column_R, whole_CR[c], g_CR[c]).astype(dtype)
        of_hidden_CRD = of_hidden_CRD.at[c].add(sums("nv,vd->nd", g_RE, columns.head_ED))
        return of_hidden_CRD, of_head_ED + sums_over_rows("nd,nv->vd", hidden_CRD[c], g_RE)

    def of_columns(columns, gradients):
        of_hidden_CRD, of_head_VD = gradients
        start = of_hidden_CRD, jnp.zeros(columns.head_ED.shape)
        of_hidden_CRD, of_head_ED = order.over_used(functools.partial(of_tile, columns), start)
        # Columns that were there before have 0 here.
        of_head_ED += jax.lax.dynamic_slice_in_dim(of_head_VD, columns.start, len(of_head_ED))
        return of_hidden_CRD, jax.lax.dynamic_update_slice_in_dim(of_head_VD, of_head_ED, columns.start, 0)

    zeros = jnp.zeros(hidden_CRD.shape), jnp.zeros(head_VD.shape)
    of_hidden_CRD, of_head_VD = _over_columns(head_VD, dtype, of_columns, zeros)
    return order.back(of_hidden_CRD.astype(dtype)), of_head_VD.astype(head_VD.dtype), None, None


_in_tiles.defvjp(_in_tiles_forward, _in_tiles_backward)

"""Texts with latents among their tokens, as Latent-SFT lays them out: positions, who sees whom, and targets."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.data.batches import SuffixBatch
from slpo_jax.data.templates import Ids


@struct.dataclass
class Slots:
    """B texts, right-padded, with latents among their tokens; all int [B, L].

    Attributes:
        tokens: their ids; anything at a latent.
        positions: -1 where there is nothing.
        latents: n at the n-th latent, from 1; else 0.
        spans: n at a token that goes on from the n-th latent; else 0.
    """

    tokens: Any
    positions: Any
    latents: Any
    spans: Any


class Cell(NamedTuple):
    """One slot of a text, see `Slots`."""

    token: int
    position: int
    latent: int = 0
    span: int = 0


class Row(NamedTuple):
    """A text, slot by slot, and how many of its slots come before what is learned."""

    cells: list[Cell]
    given: int

    @property
    def latents(self) -> int:
        """The number of latents."""
        return max(cell.latent for cell in self.cells)

    @property
    def positions(self) -> int:
        """The number of positions."""
        last = max(cell.position for cell in self.cells)
        return last + 1


def laid_out(prompt: Ids, spans: Sequence[Ids], suffix: Ids) -> Row:
    """Lay out a prompt, latents with a span of tokens after each, and a suffix.

    Latents take consecutive positions after the prompt, as the rest does after them; a span goes on from its latent.
    """
    cells: list[Cell] = []
    for position, token in enumerate(prompt):
        cells.append(Cell(token, position))
    first = len(prompt)
    # Spans don't push the next latent away: they stand beside it, and only their own latent is before them.
    for n, span in enumerate(spans, 1):
        position = first + n - 1
        latent = Cell(0, position, latent=n)
        cells.append(latent)
        for at, token in enumerate(span, position + 1):
            cells.append(Cell(token, at, span=n))
    # The suffix goes on behind the last latent.
    after = first + len(spans)
    for position, token in enumerate(suffix, after):
        cells.append(Cell(token, position))
    return Row(cells, first)


def seen_by(text: Slots) -> jax.Array:
    """Mark the visible slots, bool [B, L, L]: a span's token sees its span and its latent, others see no span."""
    span_BL1 = text.spans[:, :, None]
    span_B1L = text.spans[:, None]
    latent_B1L = text.latents[:, None]
    is_same_span_BLL = span_BL1 == span_B1L
    has_latent_BL1 = span_BL1 > 0
    is_of_latent_BLL = span_BL1 == latent_B1L
    is_own_latent_BLL = has_latent_BL1 & is_of_latent_BLL
    return is_same_span_BLL | is_own_latent_BLL


def seen_by_encoder(read: Slots) -> jax.Array:
    """Mark the encoder's visible slots, bool [B, L, L]: a compress token is seen by itself alone."""
    _, slots = read.latents.shape
    is_itself_LL = jnp.eye(slots, dtype=bool)
    is_token_BL = read.latents == 0
    is_token_B1L = is_token_BL[:, None]
    return is_token_B1L | is_itself_LL[None]


def take_before_latents(
    x_BLD: jax.Array, slots: Slots, before: int, most: int
) -> jax.Array:
    """Take the vectors [B, N, D] that stand `before` slots before each latent.

    A row with fewer than `most` latents has anything in the places of those that it lacks.
    """
    numbers_N = jnp.arange(1, most + 1)
    latents_B1L = slots.latents[:, None]
    numbers_1N1 = numbers_N[None, :, None]
    is_latent_BNL = latents_B1L == numbers_1N1
    places_BN = jnp.argmax(is_latent_BNL, axis=-1)
    at_BN = jnp.maximum(places_BN - before, 0)
    return jnp.take_along_axis(x_BLD, at_BN[..., None], axis=1)


def pad(rows: Sequence[Row], slots: int) -> tuple[Slots, SuffixBatch]:
    """Pad B texts, whose last token is a target alone, and their targets: all tokens but those that are given."""
    shape_BL = (len(rows), slots + 1)
    tokens_BL = np.zeros(shape_BL, np.int32)
    positions_BL = np.full(shape_BL, -1, np.int32)
    latents_BL = np.zeros(shape_BL, np.int32)
    spans_BL = np.zeros(shape_BL, np.int32)
    weights_BL = np.zeros(shape_BL, np.float32)
    for b, row in enumerate(rows):
        length = len(row.cells)
        cells_L4 = np.array(row.cells, np.int32)
        tokens, positions, latents, spans = cells_L4.T
        tokens_BL[b, :length] = tokens
        # The last token is a target alone, and is not fed.
        fed = length - 1
        positions_BL[b, :fed] = positions[:fed]
        latents_BL[b, :length] = latents
        spans_BL[b, :length] = spans
        # A slot's target is the next one, which is learned if it is a token and wasn't given.
        slots_L = np.arange(length)
        is_learned = slots_L >= row.given
        is_token = latents == 0
        weights_BL[b, :length] = is_learned & is_token
    text = Slots(
        tokens=tokens_BL[:, :-1],
        positions=positions_BL[:, :-1],
        latents=latents_BL[:, :-1],
        spans=spans_BL[:, :-1],
    )
    rows_BL = SuffixBatch(
        tokens=text.tokens,
        targets=tokens_BL[:, 1:],
        weights=weights_BL[:, 1:],
    )
    return text, rows_BL

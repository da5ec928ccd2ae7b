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


class Row(NamedTuple):
    """One text, as (token, position, latent, span) of each of its slots, and how many come before what is learned."""

    cells: list[tuple[int, int, int, int]]
    given: int

    @property
    def latents(self) -> int:
        """How many there are."""
        return max(latent for _, _, latent, _ in self.cells)

    @property
    def positions(self) -> int:
        """How many it takes."""
        return 1 + max(position for _, position, *_ in self.cells)


def laid_out(prompt: Ids, spans: Sequence[Ids], rest: Ids) -> Row:
    """A prompt, latents with a span of tokens after each, and the rest.

    Latents take consecutive positions after the prompt, as the rest does after them; a span goes on from its latent.
    """
    first = len(prompt)
    cells = [(token, at, 0, 0) for at, token in enumerate(prompt)]
    for n, span in enumerate(spans, 1):
        at = first + n - 1
        cells += [(0, at, n, 0), *((token, place, 0, n) for place, token in enumerate(span, at + 1))]
    return Row([*cells, *((token, at, 0, 0) for at, token in enumerate(rest, first + len(spans)))], first)


def seen_by(text: Slots) -> jax.Array:
    """bool [B, L, L]: a span's token sees its own span and the latent before it alone; others see no span."""
    query, key = text.spans[:, :, None], text.spans[:, None]
    return (query == key) | ((query > 0) & (query == text.latents[:, None]))


def seen_by_encoder(read: Slots) -> jax.Array:
    """bool [B, L, L]: none sees another's compress token."""
    itself = jnp.eye(read.latents.shape[1], dtype=bool)[None]
    return (read.latents[:, None] == 0) | itself


def at_latents(x_BLD: jax.Array, slots: Slots, before: int, most: int) -> jax.Array:
    """[B, N, D]: what is `before` slots before each latent; anything where a row has fewer than `most`."""
    numbers_N = jnp.arange(1, most + 1)
    at_BN = jnp.argmax(slots.latents[:, None] == numbers_N[None, :, None], axis=-1) - before
    return jnp.take_along_axis(x_BLD, jnp.maximum(at_BN, 0)[..., None], axis=1)


def padded(rows: Sequence[Row], slots: int) -> tuple[Slots, SuffixBatch]:
    """B texts, whose last token is a target alone, and their targets: all tokens but those that are given."""
    cells = np.zeros((len(rows), slots + 1, 4), np.int32)
    cells[..., 1] = -1
    weights = np.zeros((len(rows), slots), np.float32)
    for b, row in enumerate(rows):
        used = len(row.cells)
        cells[b, :used] = row.cells
        weights[b, : used - 1] = (np.arange(1, used) >= row.given) & (cells[b, 1:used, 2] == 0)
        cells[b, used - 1, 1] = -1  # the last is not fed
    tokens, *others = np.moveaxis(cells, -1, 0)
    return Slots(tokens[:, :-1], *(x[:, :-1] for x in others)), SuffixBatch(tokens[:, :-1], tokens[:, 1:], weights)

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
    """A text: (token, position, latent, span) of each of its slots, and how many come before what is learned."""

    cells: list[tuple[int, int, int, int]]
    given: int

    @property
    def latents(self) -> int:
        """The number of latents."""
        return max(latent for _, _, latent, _ in self.cells)

    @property
    def positions(self) -> int:
        """The number of positions."""
        return 1 + max(position for _, position, *_ in self.cells)


def laid_out(prompt: Ids, spans: Sequence[Ids], suffix: Ids) -> Row:
    """Lay out a prompt, latents with a span of tokens after each, and a suffix.

    Latents take consecutive positions after the prompt, as the rest does after them; a span goes on from its latent.
    """
    first = len(prompt)
    cells = [(token, at, 0, 0) for at, token in enumerate(prompt)]

    # Each latent, and the tokens that go on from it.
    for n, span in enumerate(spans, 1):
        at = first + n - 1
        cells.append((0, at, n, 0))
        for place, token in enumerate(span, at + 1):
            cells.append((token, place, 0, n))

    # The suffix goes on from the last latent's position.
    for at, token in enumerate(suffix, first + len(spans)):
        cells.append((token, at, 0, 0))
    return Row(cells, first)


def seen_by(text: Slots) -> jax.Array:
    """Mark, bool [B, L, L], what is seen: by a span's token its span and the latent before it, by others no span."""
    query = text.spans[:, :, None]
    key = text.spans[:, None]
    return (query == key) | ((query > 0) & (query == text.latents[:, None]))


def seen_by_encoder(read: Slots) -> jax.Array:
    """Mark, bool [B, L, L], what the encoder sees: no token another's compress token."""
    itself = jnp.eye(read.latents.shape[1], dtype=bool)[None]
    return (read.latents[:, None] == 0) | itself


def at_latents(x_BLD: jax.Array, slots: Slots, before: int, most: int) -> jax.Array:
    """Take [B, N, D]: what is `before` slots before each latent; anything where a row has fewer than `most`."""
    numbers_N = jnp.arange(1, most + 1)
    is_latent_BNL = slots.latents[:, None] == numbers_N[None, :, None]
    at_BN = jnp.argmax(is_latent_BNL, axis=-1) - before
    return jnp.take_along_axis(x_BLD, jnp.maximum(at_BN, 0)[..., None], axis=1)


def padded(rows: Sequence[Row], slots: int) -> tuple[Slots, SuffixBatch]:
    """Pad B texts, whose last token is a target alone, and their targets: all tokens but those that are given."""
    cells = np.zeros((len(rows), slots + 1, 4), np.int32)
    cells[..., 1] = -1
    weights = np.zeros((len(rows), slots), np.float32)
    for b, row in enumerate(rows):
        length = len(row.cells)
        cells[b, :length] = row.cells

        # Targets are all tokens but those that are given; a latent is none.
        is_learned = np.arange(1, length) >= row.given
        is_token = cells[b, 1:length, 2] == 0
        weights[b, : length - 1] = is_learned & is_token
        cells[b, length - 1, 1] = -1  # the last is not fed

    tokens, positions, latents, spans = np.moveaxis(cells, -1, 0)
    inputs = tokens[:, :-1]
    fed = Slots(inputs, positions[:, :-1], latents[:, :-1], spans[:, :-1])
    return fed, SuffixBatch(inputs, tokens[:, 1:], weights)

"""Drawing tokens: their law, and what truncation leaves of it, against a loop by hand and transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from slpo_jax.policy import noise
from slpo_jax.policy.noise import draw_tokens, most_likely
from tiny import compiled

DRAWS = 20_000
SIGMAS = 4.5
LOGITS = np.array(
    [0.0, 1.0, -1.0, 2.0, 1.5, -3.0],
    np.float32,
)
CUTS = [
    (0, 1.0),
    (3, 1.0),
    (1, 1.0),
    (99, 1.0),
    (0, 0.8),
    (0, 1e-6),
    (4, 0.7),
    (0, 0.9999),
]
draw = compiled(draw_tokens, static=("temperature", "top_k", "top_p"))


def _law(temperature, top_k, top_p):
    """Token by token: the likeliest first, until there are enough of them or they are likely enough together."""
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    order = np.argsort(-weights)[: top_k or None]
    together = np.cumsum(weights[order]) - weights[order]
    law = np.zeros(len(LOGITS))
    kept = order[together < top_p * weights[order].sum()]
    law[kept] = weights[kept] / weights[kept].sum()
    return law


def _assert_drawn(tokens, law):
    counts = np.bincount(tokens, minlength=len(law))
    assert (
        np.abs(counts - DRAWS * law) <= SIGMAS * np.sqrt(DRAWS * law * (1 - law))
    ).all()


@pytest.fixture(scope="module")
def keys():
    return noise.token_keys(
        noise.row_keys(jax.random.key(0), jnp.arange(DRAWS)), jnp.int32(0)
    )


@pytest.mark.parametrize(("top_k", "top_p"), CUTS)
def test_tokens_follow_the_truncated_tempered_softmax(keys, top_k, top_p):
    tokens = draw(
        keys, jnp.broadcast_to(LOGITS, (DRAWS, len(LOGITS))), 0.5, top_k, top_p
    )
    _assert_drawn(tokens, _law(0.5, top_k, top_p))


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3)])
def test_top_p_keeps_the_fewest_that_have_it_together(top_p, kept):
    """To the last bit: of four equal tokens two have one half."""
    left, _ = most_likely(
        jnp.zeros((1, 4)),
        0,
        top_p,
    )
    assert np.isfinite(left).sum() == kept


def test_nothing_to_cut_is_the_untruncated_draw(keys):
    """To the last bit: the same keys give the same tokens."""
    logits = jnp.broadcast_to(LOGITS, (DRAWS, len(LOGITS)))
    expected = jax.vmap(jax.random.categorical)(keys, logits / 0.5)
    np.testing.assert_array_equal(draw(keys, logits, 0.5, 0, 1.0), expected)
    np.testing.assert_array_equal(
        draw(keys, logits, 0.5, len(LOGITS), 1.0),
        expected,
    )


def test_draws_from_blocks_have_the_same_law(keys, monkeypatch):
    """Two blocks of which one is not full; a third has nothing that may be drawn."""
    monkeypatch.setattr(noise, "BLOCK", 4)
    monkeypatch.setattr(noise, "LARGE", len(LOGITS) + 6)
    logits = np.concatenate([LOGITS, np.full(6, -np.inf, np.float32)])
    logits[1] = -np.inf
    logits = np.broadcast_to(logits, (DRAWS, len(logits)))
    tokens = compiled(draw_tokens, static=("temperature",))(
        keys, logits, temperature=0.5
    )
    _assert_drawn(
        tokens,
        special.softmax(logits[0].astype(np.float64) / 0.5),
    )
    plain = jax.vmap(jax.random.categorical)(keys, logits / 0.5)
    assert (plain != tokens).any()


def test_no_temperature_is_greedy_whatever_is_cut(keys):
    logits = jnp.stack([jnp.roll(LOGITS, shift) for shift in range(3)])
    np.testing.assert_array_equal(
        draw(keys[:3], logits, 0.0, 2, 0.5),
        [3, 4, 5],
    )


def test_no_two_draws_of_a_row_share_a_key():
    """Over kinds of noise and places; nor do the stages' streams and steps share the key that they begin with."""
    rows = noise.row_keys(jax.random.key(0), jnp.arange(2))
    places = jnp.arange(40)
    seen = jnp.ones((2, 40), bool)
    made = [
        noise.prompt_dropout(rows, seen, 0.1, "all").keys_BL,
        noise.latent_dropout(rows, places, seen, 0.1, "all").keys_BL,
        noise.answer_dropout(rows, places, 0.1, "all").keys_BL,
        noise.gate_dropout(rows, places, 0.1).keys_BL,
        noise.draw_keys(rows, places),
        jnp.stack([noise.token_keys(rows, place) for place in places], axis=1),
    ]
    uniforms = [jax.vmap(jax.vmap(jax.random.uniform))(keys) for keys in made]
    uniforms.append(
        jnp.stack([noise.stop_uniforms(rows, place) for place in places], axis=1)
    )
    assert (
        len(np.unique(uniforms)) >= 2 * 40 * len(uniforms) - 2
    )  # in 2^23 numbers, a pair by chance
    streams = [
        noise.stream_key(jax.random.key(0), name, step)
        for name in noise.STREAMS
        for step in range(4)
    ]
    different = np.unique([jax.random.key_data(key) for key in streams], axis=0)
    assert len(noise.STREAMS) > 1
    assert len(different) == 4 * len(noise.STREAMS)


def test_truncation_is_transformers():
    torch = pytest.importorskip("torch")
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = np.random.default_rng(0).normal(size=(50, 200)).astype(np.float32) * 3
    for top_k, top_p in ((30, 0.95), (10, 1.0), (0, 0.5)):
        warpers = [
            TemperatureLogitsWarper(0.7),
            *([TopKLogitsWarper(top_k)] if top_k else []),
            TopPLogitsWarper(top_p),
        ]
        expected = LogitsProcessorList(warpers)(
            torch.zeros(50, 1, dtype=torch.long), torch.tensor(logits)
        ).numpy()
        kept, ids = most_likely(
            jnp.array(logits) / 0.7,
            top_k,
            top_p,
        )
        found = np.full_like(logits, -np.inf)
        np.put_along_axis(
            found,
            np.asarray(ids),
            np.asarray(kept),
            axis=1,
        )
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
        np.testing.assert_allclose(found, expected, rtol=1e-5)

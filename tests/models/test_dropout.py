"""MC-dropout masks: their law, their independence, and where they are left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.models.dropout import SITES, Dropout, drop, site_number
from slpo_jax.policy import noise
from tiny import compiled

RATE, WIDTH, ROWS, LENGTH = 0.1, 64, 40, 50
SIGMAS = 4.5  # two-sided p of 7e-6 a comparison
fast_drop = compiled(drop)
row_keys = compiled(noise.row_keys)
prompt_dropout = compiled(noise.prompt_dropout, static=("rate", "where"))
latent_dropout = compiled(noise.latent_dropout, static=("rate", "where"))
answer_dropout = compiled(noise.answer_dropout, static=("rate", "where"))


def _noise(rows=ROWS, length=LENGTH, seed=0, rate=RATE, active=True) -> Dropout:
    keys = jax.random.split(jax.random.key(seed), (rows, length))
    return Dropout(keys, jnp.full((rows, length), active), rate)


def _kept(dropout, site=0, width=WIDTH) -> np.ndarray:
    return np.asarray(fast_drop(jnp.ones((*dropout.keys_BL.shape, width)), dropout, site)) > 0


def _correlation(a, b) -> float:
    """Of two arrays of dropped/kept, in standard deviations of what independence gives."""
    a, b = (np.where(x, RATE, RATE - 1.0).ravel() for x in (a, b))  # mean 0 for keep rate 1 - RATE
    return float((a * b).sum() / np.sqrt(a.size) / (RATE * (1 - RATE)))


def _within(count, expected, rate):
    return abs(count - expected * rate) < SIGMAS * np.sqrt(expected * rate * (1 - rate))


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.9])
def test_kept_share_is_binomial(rate):
    kept = _kept(_noise(rate=rate))
    assert _within(kept.sum(), kept.size, 1 - rate)
    for axis in (0, 1, 2):  # each row, each position and each unit by itself
        others = tuple(a for a in range(3) if a != axis)
        counts = kept.sum(axis=others)
        assert all(_within(count, kept.size // counts.size, 1 - rate) for count in counts)
    spread = kept.sum(axis=2).var() / (WIDTH * rate * (1 - rate))  # masks are neither too equal nor too different
    assert abs(spread - 1) < SIGMAS * np.sqrt(2 / (ROWS * LENGTH))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_are_zero_or_scaled(dtype):
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH)).astype(dtype)
    y = drop(x, _noise(), site=3)
    assert y.dtype == dtype
    scaled = x * jnp.asarray(1 / 0.9, dtype)
    np.testing.assert_array_equal(y, jnp.where(y == 0, 0, scaled))
    assert 0 < (y == 0).mean() < 0.2


def test_units_are_independent():
    kept = _kept(_noise())
    pairs = np.where(kept, RATE, RATE - 1.0).reshape(-1, WIDTH)
    correlations = pairs.T @ pairs / np.sqrt(len(pairs)) / (RATE * (1 - RATE))
    off_diagonal = correlations[np.triu_indices(WIDTH, 1)]
    assert np.abs(off_diagonal).max() < 5.5  # of 2,016 pairs
    assert abs(off_diagonal.std() - 1) < 0.1


def test_positions_rows_sites_and_keys_are_independent():
    dropout = _noise()
    kept = _kept(dropout)
    assert abs(_correlation(kept[:, 1:], kept[:, :-1])) < SIGMAS
    assert abs(_correlation(kept[1:], kept[:-1])) < SIGMAS
    assert abs(_correlation(kept, _kept(_noise(seed=1)))) < SIGMAS
    for site in range(1, 12):
        other = _kept(dropout, site)
        assert abs(_correlation(kept, other)) < SIGMAS
        # a site is no shifted copy of its neighbour's stream either
        assert abs(_correlation(kept[..., 1:], other[..., :-1])) < SIGMAS
        assert abs(_correlation(kept[..., :-1], other[..., 1:])) < SIGMAS


def test_keys_that_were_folded_from_neighbouring_numbers_are_independent():
    """As the policy makes them: nearby positions, steps, examples and rollouts."""
    rows = row_keys(jax.random.key(0), jnp.arange(2000) // 8, jnp.arange(2000) % 8)
    latent = _kept(latent_dropout(rows, jnp.arange(1, 5), jnp.zeros((2000, 4), bool), rate=RATE, where="thought"))
    prompt = _kept(prompt_dropout(rows, jnp.ones((2000, 4), bool), rate=RATE, where="thought"))
    answer = _kept(answer_dropout(rows, jnp.arange(4), rate=RATE, where="all"))
    for a, b in ((latent, prompt), (latent, answer), (prompt, answer)):
        assert abs(_correlation(a, b)) < SIGMAS
        assert abs(_correlation(a[:, 1:], b[:, :-1])) < SIGMAS
        assert abs(_correlation(a, b[:, ::-1])) < SIGMAS
    for kept in (latent, prompt, answer):
        assert _within(kept.sum(), kept.size, 1 - RATE)
        assert abs(_correlation(kept[:, 1:], kept[:, :-1])) < SIGMAS
        assert abs(_correlation(kept[1:], kept[:-1])) < SIGMAS
        assert abs(_correlation(kept[8:], kept[:-8])) < SIGMAS


@pytest.mark.parametrize("change", [(1, 0), (0, 1), (1, -1), (1 << 16, -(1 << 16))])
def test_each_bit_of_the_key_counts(change):
    """Keys that differ in little, in one word or so that the sum of both stays, have independent masks."""
    words = np.random.default_rng(0).integers(0, 2**32, size=(ROWS, LENGTH, 2), dtype=np.uint32)
    changed = words + np.array(change).astype(np.uint32)
    keys, others = (jax.random.wrap_key_data(jnp.asarray(x)) for x in (words, changed))
    dropout = _noise()
    assert abs(_correlation(_kept(dropout.replace(keys_BL=keys)), _kept(dropout.replace(keys_BL=others)))) < SIGMAS


def test_a_mask_depends_on_its_position_s_key_alone():
    dropout = _noise()
    kept = _kept(dropout, site=2)
    order = np.random.default_rng(0).permutation(ROWS)
    np.testing.assert_array_equal(_kept(Dropout(dropout.keys_BL[order], dropout.active_BL, RATE), site=2), kept[order])
    one = Dropout(dropout.keys_BL[3:4, 5:6], dropout.active_BL[:1, :1], RATE)
    np.testing.assert_array_equal(_kept(one, site=2)[0, 0], kept[3, 5])


def test_prompt_noise_counts_from_the_end():
    keys = row_keys(jax.random.key(0), jnp.arange(3))
    small = prompt_dropout(keys, jnp.ones((3, 4), bool), rate=RATE, where="thought")
    large = prompt_dropout(keys, jnp.arange(7)[None] >= jnp.full((3, 1), 3), rate=RATE, where="thought")
    np.testing.assert_array_equal(_kept(small), _kept(large)[:, 3:])
    assert _kept(large)[:, :3].all(), "pads carry no noise"


def test_inactive_and_uncovered_positions_are_untouched():
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH + 3, WIDTH))
    active = jnp.asarray(np.random.default_rng(0).random((ROWS, LENGTH)) < 0.5)
    dropout = _noise().replace(active_BL=active)
    y = np.asarray(drop(x, dropout, site=1))
    np.testing.assert_array_equal(y[:, LENGTH:], x[:, LENGTH:])
    np.testing.assert_array_equal(y[:, :LENGTH][~active], x[:, :LENGTH][~active])
    np.testing.assert_array_equal(y[:, :LENGTH][active], drop(x[:, :LENGTH], _noise(), site=1)[active])


def test_sites_have_distinct_numbers():
    numbers = [site_number(layer, name) for layer in range(6) for name in SITES]
    assert len(set(numbers)) == len(numbers)

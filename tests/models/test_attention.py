"""What precision attention has where activations are bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from slpo_jax.models.attention import attend

ROWS, HEADS, GROUPS, LENGTH, WIDTH = 2, 4, 2, 3, 16


def _bfloat16(rng, *shape):
    return jnp.asarray(4 * rng.normal(size=shape), jnp.bfloat16)


def _scores(q_BHLD, k_BGSD):
    """Exact products of the rounded queries and keys, which a quarter (16 ** -0.5) rounds no further."""
    q, k = (np.asarray(x, np.float64) for x in (q_BHLD, k_BGSD))
    return np.einsum("bhld,bhsd->bhls", q / WIDTH**0.5, np.repeat(k, HEADS // GROUPS, axis=1))


def _slots(first, last, total):
    """Values that show each slot's weight, [B, G, last - first, total]."""
    eye = np.eye(total, dtype=np.float32)[first:last]
    return jnp.asarray(np.broadcast_to(eye, (ROWS, GROUPS, *eye.shape)), jnp.bfloat16)


@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_scores_are_float32_where_activations_are_bfloat16(before):
    """Scores of 16 to 32 in bfloat16 are off by up to 1/16, and weights by 6%."""
    rng, own = np.random.default_rng(0), 7
    total = before + own
    q, k = _bfloat16(rng, ROWS, HEADS, LENGTH, WIDTH), _bfloat16(rng, ROWS, GROUPS, own, WIDTH)
    scores, prefix = _scores(q, k), None
    if before:
        k_before = jnp.broadcast_to(_bfloat16(rng, 1, GROUPS, before, WIDTH), (ROWS, GROUPS, before, WIDTH))
        scores = np.concatenate([_scores(q, k_before), scores], axis=-1)
        prefix = (k_before[:1], _slots(0, before, total)[:1], jnp.ones((1, before), bool))
    seen = jnp.ones((ROWS, LENGTH, own), bool)
    weights = np.asarray(attend(q, k, _slots(before, total, total), seen, prefix), np.float64)
    expected = special.softmax(scores, axis=-1)
    matters = expected > 1e-3
    assert ((expected > 0.05).sum(axis=-1) > 1).sum() >= 3, "several slots must have weight"
    assert np.abs(scores[matters]).max() > 32
    np.testing.assert_allclose(weights[matters], expected[matters], rtol=2**-8)

"""Attention beside its definition: values, gradients, and what precision it has where activations are bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from slpo_jax.models import attention
from slpo_jax.models.attention import attend, own_mask

ROWS = 2
HEADS = 4
GROUPS = 2
LENGTH = 3
WIDTH = 16


def _bfloat16(rng, *shape):
    return jnp.asarray(
        4 * rng.normal(size=shape),
        jnp.bfloat16,
    )


def _scores(q_BHLD, k_BGSD):
    """Exact products of the rounded queries and keys, which a quarter (16 ** -0.5) rounds no further."""
    q, k = (np.asarray(x, np.float64) for x in (q_BHLD, k_BGSD))
    return np.einsum(
        "bhld,bhsd->bhls", q / WIDTH**0.5, np.repeat(k, HEADS // GROUPS, axis=1)
    )


def _slots(first, last, total):
    """Values that show each slot's weight, [B, G, last - first, total]."""
    eye = np.eye(
        total,
        dtype=np.float32,
    )[first:last]
    return jnp.asarray(
        np.broadcast_to(eye, (ROWS, GROUPS, *eye.shape)),
        jnp.bfloat16,
    )


@pytest.mark.slow
@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_scores_are_float32_where_activations_are_bfloat16(before):
    """Scores of 16 to 32 in bfloat16 are off by up to 1/16, and weights by 6%."""
    rng = np.random.default_rng(0)
    own = 7
    total = before + own
    q = _bfloat16(rng, ROWS, HEADS, LENGTH, WIDTH)
    k = _bfloat16(rng, ROWS, GROUPS, own, WIDTH)
    scores = _scores(q, k)
    prefix = []
    if before:
        k_before = jnp.broadcast_to(
            _bfloat16(rng, 1, GROUPS, before, WIDTH), (ROWS, GROUPS, before, WIDTH)
        )
        scores = np.concatenate(
            [_scores(q, k_before), scores],
            axis=-1,
        )
        prefix = [
            (k_before[:1], _slots(0, before, total)[:1], jnp.ones((1, before), bool))
        ]
    seen = jnp.ones((ROWS, LENGTH, own), bool)
    weights = np.asarray(
        attend(q, k, _slots(before, total, total), seen, *prefix), np.float64
    )
    expected = special.softmax(scores, axis=-1)
    matters = expected > 1e-3
    assert ((expected > 0.05).sum(axis=-1) > 1).sum() >= 3, (
        "several slots must have weight"
    )
    assert np.abs(scores[matters]).max() > 32
    np.testing.assert_allclose(
        weights[matters], expected[matters], rtol=3 * 2**-9
    )  # rounded, summed, rounded


OWN = 5
BEFORE = 6


def _plain(q_BHLD, k_BGSD, v_BGSD, mask_BLS, k_CGUD, v_CGUD, valid_CU):
    """Each row's prefix and its own slots one after the other, and softmax over them."""

    def side_by_side(x_CGUD, x_BGSD):
        before = jnp.repeat(
            x_CGUD,
            x_BGSD.shape[0] // x_CGUD.shape[0],
            axis=0,
        )
        return jnp.repeat(
            jnp.concatenate([before, x_BGSD], axis=2),
            q_BHLD.shape[1] // x_BGSD.shape[1],
            axis=1,
        )

    rows, length = mask_BLS.shape[:2]
    seen_BLU = jnp.broadcast_to(
        jnp.repeat(valid_CU, rows // len(valid_CU), 0)[:, None], (rows, length, BEFORE)
    )
    scores = (
        jnp.einsum("bhld,bhsd->bhls", q_BHLD, side_by_side(k_CGUD, k_BGSD))
        / q_BHLD.shape[-1] ** 0.5
    )
    scores = jnp.where(
        jnp.concatenate([seen_BLU, mask_BLS], axis=-1)[:, None], scores, -jnp.inf
    )
    return jnp.einsum(
        "bhls,bhsd->bhld", jax.nn.softmax(scores, axis=-1), side_by_side(v_CGUD, v_BGSD)
    )


def _inputs(rows_of_valid):
    """Of 4 rows on 2 prefixes, 4 query heads on 2 of keys; the values are those that bfloat16 has."""
    rng = np.random.default_rng(1)
    q, k, v, before_k, before_v, g = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32)
        for shape in (
            (4, 4, 3, 8),
            (4, 2, OWN, 8),
            (4, 2, OWN, 8),
            (2, 2, BEFORE, 8),
            (2, 2, BEFORE, 8),
            (4, 4, 3, 8),
        )
    )
    valid = jnp.asarray(rng.random((rows_of_valid, BEFORE)) < 0.7)
    mask = own_mask(
        jnp.asarray(rng.random((4, OWN)) < 0.8),
        3,
        2,
    )
    assert not valid.all()
    assert not mask.all()
    return (q, k, v, before_k, before_v), (mask, valid), g


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-6), ("bfloat16", 0.03)])
@pytest.mark.parametrize(
    ("rows_of_valid", "in_turn"), [(2, False), (4, False), (2, True), (4, True)]
)
def test_values_and_gradients_are_the_definition_s(
    rows_of_valid, in_turn, dtype, most, monkeypatch
):
    """Of all heads at once, and where there are many scores, of one head of keys after the other."""
    monkeypatch.setattr(
        attention,
        "SCORES",
        4 * 4 * 3 * BEFORE - in_turn,
    )
    arrays, (mask, valid), g = _inputs(rows_of_valid)

    @jax.jit
    def ours(arrays, g):
        def attended(q, k, v, before_k, before_v):
            return attend(q, k, v, mask, (before_k, before_v, valid))

        out, pull = jax.vjp(attended, *arrays)
        return out, pull(g)

    def plain(arrays, g):
        def attended(q, k, v, before_k, before_v):
            return _plain(q, k, v, mask, before_k, before_v, valid)

        with jax.enable_x64(True):
            out, pull = jax.vjp(
                attended, *(jnp.asarray(x, jnp.float64) for x in arrays)
            )
            return out, pull(jnp.asarray(g, jnp.float64))

    given = [x.astype(dtype) for x in arrays], g.astype(dtype)
    assert str(jax.make_jaxpr(ours)(*given)).count("scan[") == (2 if in_turn else 0)
    found = ours(*given)
    for one, other in zip(
        *map(jax.tree.leaves, (found, plain(arrays, g))), strict=True
    ):
        assert one.dtype == dtype
        assert np.abs(other).max() > 0.5
        np.testing.assert_allclose(
            np.asarray(one, np.float64),
            other,
            atol=most,
        )


@pytest.mark.slow
def test_a_query_that_sees_nothing_is_finite_and_moves_nothing():
    (q, k, v, before_k, before_v), _, g = _inputs(2)
    sees = jnp.arange(4) > 0
    mask = jnp.broadcast_to(
        sees[:, None, None],
        (4, 3, OWN),
    )
    valid = jnp.broadcast_to(
        sees[:, None],
        (4, BEFORE),
    )
    out, pull = jax.vjp(
        lambda *x: attend(*x[:3], mask, (*x[3:], valid)), q, k, v, before_k, before_v
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((out, pull(g))))
    none = [np.abs(np.asarray(x[0])).max() for x in pull(g.at[0].set(0))[:3]]
    assert none == [0, 0, 0]

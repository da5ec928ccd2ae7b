"""Log-probabilities of tokens in tiles, beside scipy in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from slpo_jax.models import likelihood
from slpo_jax.models.likelihood import token_log_probs
from slpo_jax.training import rl_loss, rollouts
from small_steps import (
    GROUP,
    OBJECTIVE,
    POLICY,
    STAGES,
    imitation_batch,
    prompted_batch,
    rigged_reward,
    small_params,
)
from tiny import CONFIG, assert_close

V = CONFIG.vocab_size
D = 16
SIZES = {  # of a tile: rows, columns, what they are multiples of; and up to how many logits there are no tiles
    "both cut": (5, 24, 1, 8),
    "even": (7, 61, 7, 1),
    "one tile": (64, 64, 4, 64),
    "rows alone": (4, 100, 2, 128),
    "columns alone": (64, 9, 1, 1),
    "whole": (64, 64, 4, 64, 2**20),
}


@pytest.fixture
def tiles(monkeypatch):
    """Sets the sizes of tiles."""

    def choose(rows, columns, even_rows, even_columns, whole=0):
        monkeypatch.setattr(likelihood.xla_cpu, "fewer", lambda rows: rows)
        sizes = {
            "WHOLE": whole,
            "ROWS": rows,
            "COLUMNS": columns,
            "EVEN_ROWS": even_rows,
            "EVEN_COLUMNS": even_columns,
        }
        for name, size in sizes.items():
            monkeypatch.setattr(likelihood, name, size)

    return choose


def _work(dtype, head_dtype=jnp.float32, shape=(3, 7)):
    """(hidden, head, tokens, asked, what is seen of each), and the first two in float64 as a product takes them."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(
        3 * rng.normal(size=(*shape, D)),
        dtype,
    )
    head = jnp.asarray(rng.normal(size=(V, D)), head_dtype)
    tokens = rng.integers(0, V, shape)
    tokens.flat[:3] = 0, V - 1, V - 8
    asked = rng.random(shape) < 0.6
    seen = np.where(asked, rng.normal(size=shape), 0).astype(np.float32)
    exact = [np.asarray(x, np.float64) for x in (hidden, head.astype(dtype))]
    return (
        hidden,
        head,
        jnp.asarray(tokens),
        jnp.asarray(asked),
        jnp.asarray(seen),
    ), exact


def _oracle(hidden, head, tokens, seen):
    """Log-probabilities, the likeliest tokens, and the gradients of both operands."""
    logits = hidden @ head.T
    log_p = special.log_softmax(logits, axis=-1)
    g = seen[..., None] * (np.eye(V)[tokens] - np.exp(log_p))
    chosen = np.take_along_axis(
        log_p,
        tokens[..., None],
        axis=-1,
    )[..., 0]
    return (
        chosen,
        logits.argmax(-1),
        g @ head,
        np.tensordot(g, hidden, [range(g.ndim - 1)] * 2),
    )


def _gradients(hidden, head, tokens, asked, seen):
    def loss(hidden, head):
        found = token_log_probs(hidden, head, tokens, asked, likeliest=True)
        return jnp.sum(found[0] * seen), found

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, head)


@pytest.mark.parametrize(
    "dtypes", ["float32 float32", "bfloat16 float32", "bfloat16 bfloat16"]
)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_scipy_s(tiles, size, dtypes):
    tiles(*SIZES[size])
    dtype, head_dtype = dtypes.split()
    work, exact = _work(dtype, head_dtype)
    (_, found), gradients = _gradients(*work)
    tokens, asked, seen = map(np.asarray, work[2:])
    *values, of_hidden, of_head = _oracle(*exact, tokens, seen)
    for ours, expected in zip(found, values, strict=True):
        np.testing.assert_allclose(
            np.asarray(ours)[asked], expected[asked], rtol=1e-5, atol=1e-5
        )
    assert np.isfinite(found[0]).all()
    for ours, expected, given in zip(
        gradients, (of_hidden, of_head), work[:2], strict=True
    ):
        assert ours.dtype == given.dtype
        rounding = (
            1e-5 if dtype == "float32" else 2**-7
        )  # of the cotangent, and of a result in bfloat16
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), expected, rtol=rounding, atol=2 * rounding
        )
    assert np.abs(of_head).max() > 1


@pytest.mark.parametrize("size", ["both cut", "columns alone", "whole"])
def test_impossible_tokens_have_no_share(tiles, size):
    """The others' probabilities and gradients are scipy's over the others alone, in one tile and in several."""
    tiles(*SIZES[size])
    (hidden, head, tokens, asked, seen), (hidden_64, head_64) = _work(jnp.float32)
    impossible = (9, 41, 57)
    tokens = jnp.where(jnp.isin(tokens, jnp.array(impossible)), 4, tokens)

    def loss(hidden, head):
        found = token_log_probs(
            hidden, head, tokens, asked, likeliest=True, impossible=impossible
        )
        return jnp.sum(found[0] * seen), found

    (_, found), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        hidden, head
    )
    logits = hidden_64 @ head_64.T
    assert np.isin(logits.argmax(-1), impossible).any()
    logits[..., list(impossible)] = -np.inf
    log_p = special.log_softmax(logits, axis=-1)
    g = np.asarray(seen)[..., None] * (np.eye(V)[np.asarray(tokens)] - np.exp(log_p))
    chosen = np.take_along_axis(log_p, np.asarray(tokens)[..., None], axis=-1)[..., 0]
    asked = np.asarray(asked)
    np.testing.assert_allclose(
        np.asarray(found[0])[asked], chosen[asked], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(np.asarray(found[1])[asked], logits.argmax(-1)[asked])
    np.testing.assert_allclose(gradients[0], g @ head_64, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(
        gradients[1], np.tensordot(g, hidden_64, [range(2)] * 2), rtol=1e-5, atol=2e-5
    )


def test_passes_of_a_vmap_are_theirs_without(tiles):
    tiles(*SIZES["both cut"])
    hidden, head, tokens, asked, seen = _work(jnp.float32)[0]

    def loss(hidden, head):
        one = lambda *args: token_log_probs(args[0], head, *args[1:], likeliest=True)  # noqa: E731
        found = jax.vmap(one)(hidden, tokens, asked)
        return jnp.sum(found[0] * seen), found

    (_, expected), gradients = _gradients(
        hidden,
        head,
        tokens,
        asked,
        seen,
    )
    (_, found), ours = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        hidden, head
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            one[asked],
            other[asked],
            atol=1e-5,
        )
    assert_close(ours, gradients, atol=1e-5)


@pytest.mark.parametrize("size", ["both cut", "columns alone", "whole"])
def test_of_equals_the_first_is_the_likeliest(tiles, size):
    """As is the case with tokens that were added with one embedding; in one tile, and in several."""
    tiles(*SIZES[size])
    hidden, head, tokens, *_ = _work(jnp.float32)[0]
    head = head.at[jnp.array([5, 12, 20, 40, V - 1])].set(2 * head[5])
    likeliest = token_log_probs(hidden, head, tokens, likeliest=True)[1]
    expected = np.asarray(hidden @ head.T).argmax(-1)
    assert 5 in expected
    np.testing.assert_array_equal(likeliest, expected)


def test_no_time_is_spent_on_what_nobody_asks_for(tiles):
    """What is not finite there would be so in the head's gradient."""
    tiles(2, 24, 1, 8)
    hidden, head, tokens, asked, seen = _work(jnp.float32)[0]
    unseen = np.flatnonzero(~np.asarray(asked))[2:]
    hidden = hidden.reshape(-1, D).at[unseen].set(jnp.nan).reshape(hidden.shape)
    (_, found), gradients = _gradients(
        hidden,
        head,
        tokens,
        asked,
        seen,
    )
    assert all(np.isfinite(x).all() for x in (*found, *gradients))


def test_what_is_not_a_number_is_not_hidden(tiles):
    """So that a step with such a loss changes nothing."""
    tiles(*SIZES["both cut"])
    hidden, head, tokens, *_ = _work(jnp.float32)[0]
    found, _ = token_log_probs(
        hidden.at[1, 2, 3].set(jnp.nan),
        head,
        tokens,
    )
    assert np.argwhere(np.isnan(found)).tolist() == [[1, 2]]


def test_a_frozen_head_has_no_product_of_its_own(tiles):
    tiles(*SIZES["both cut"])
    hidden, head, tokens, asked, seen = _work(jnp.float32)[0]

    def loss(hidden, head):
        return jnp.sum(token_log_probs(hidden, head, tokens, asked)[0] * seen)

    def products(argnums):
        return len(
            re.findall(
                r" dot\(",
                jax.jit(jax.grad(loss, argnums))
                .lower(hidden, head)
                .compile()
                .as_text(),
            )
        )

    assert (products((0, 1)), products(0)) == (4, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", ["rl", pytest.param("imitate", marks=pytest.mark.slow)]
)
def test_no_logits_of_a_step_are_whole(tiles, stage):
    """Not of all answers of all passes. A rollout's are those of one position of each row."""
    params = small_params()
    key = jax.random.key(3)
    if stage == "rl":
        loss = rl_loss.make_rollout_loss(POLICY, OBJECTIVE)
        batch = prompted_batch()
        batch = (
            batch,
            *jax.eval_shape(
                lambda: rollouts.roll_out(
                    POLICY, params, batch, rigged_reward, GROUP, key
                )
            ),
        )
    else:
        loss = STAGES[stage][0]()
        batch = imitation_batch()

    gradient = jax.grad(
        lambda params, batch: loss(params, batch, key),
        has_aux=True,
    )
    whole = re.compile(rf"f32\[[\d,]*\b{V}\]")
    assert whole.search(str(jax.make_jaxpr(gradient)(params, batch))), (
        "the test must see them"
    )
    tiles(*SIZES["both cut"])
    jax.clear_caches()
    assert not whole.search(str(jax.make_jaxpr(gradient)(params, batch)))

"""Layers beside numpy in float64; MC-dropout masks: their law, their independence, and where they are left out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.models.layers import (
    SITES,
    Dropout,
    dense,
    drop,
    float_product,
    head_logits,
    product,
    site_number,
    sums,
)
from slpo_jax.policy import noise
from tiny import compiled


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (0, 3)])
def test_a_layer_and_its_gradients_are_numpy_s(leading):
    rng = np.random.default_rng(0)
    x, kernel, bias, seen = (
        rng.normal(size=size) for size in ((*leading, 4), (4, 5), (5,), (*leading, 5))
    )
    layer = dense(5, jnp.float32, 0.02, "layer", use_bias=True)

    def loss(params, x):
        return jnp.sum(layer.apply({"params": params}, x) * seen)

    params = {
        "kernel": jnp.asarray(kernel, jnp.float32),
        "bias": jnp.asarray(bias, jnp.float32),
    }
    got = layer.apply(
        {"params": params},
        jnp.asarray(x, jnp.float32),
    )
    of_params, of_x = jax.grad(loss, (0, 1))(params, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(
        got,
        x @ kernel + bias,
        rtol=1e-5,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        of_params["kernel"], np.tensordot(x, seen, [range(len(leading))] * 2), atol=1e-5
    )
    np.testing.assert_allclose(
        of_params["bias"],
        seen.reshape(-1, 5).sum(0),
        atol=1e-5,
    )
    np.testing.assert_allclose(
        of_x,
        seen @ kernel.T,
        atol=1e-5,
    )


def test_a_layer_begins_as_it_says():
    kernel = dense(400, jnp.float32, 0.5, "layer", use_bias=False).init(
        jax.random.key(0), jnp.ones((1, 300))
    )
    assert set(kernel["params"]) == {"kernel"}
    assert np.std(kernel["params"]["kernel"]) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("rows", [1, 6, 7])
def test_gradients_of_parameters_are_not_rounded(rows):
    """Kernels and heads are float32, and in low precision are rounded where they are used."""
    rng = np.random.default_rng(4)
    (x, x_exact), kernel = (
        low(rng.normal(size=(rows, 16))),
        rng.normal(size=(16, 5)).astype(np.float32),
    )
    g, g_exact = low(rng.normal(size=(rows, 5)))
    _, kernel_exact = low(kernel)
    layer = dense(5, jnp.bfloat16, 0.02, "layer", use_bias=False)
    for function, matrix, wide in (
        (
            lambda x, kernel: layer.apply({"params": {"kernel": kernel}}, x),
            kernel,
            1e-2,
        ),
        (lambda x, kernel: head_logits(x, kernel.T), kernel, 1e-5),
    ):
        got, pull = jax.vjp(
            function,
            x,
            jnp.asarray(matrix),
        )
        np.testing.assert_allclose(
            np.asarray(got, np.float64), x_exact @ kernel_exact, rtol=wide, atol=wide
        )
        of_x, of_kernel = pull(g.astype(got.dtype))
        assert (of_x.dtype, of_kernel.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_allclose(
            of_kernel,
            x_exact.T @ g_exact,
            rtol=1e-5,
            atol=1e-5,
        )
        np.testing.assert_allclose(
            np.asarray(of_x, np.float64), g_exact @ kernel_exact.T, rtol=1e-2, atol=1e-2
        )


def test_logits_of_no_positions():
    """A thought of no steps, as `solve` shows it for written chains of thought."""
    assert head_logits(jnp.ones((1, 0, 4)), jnp.ones((7, 4))).shape == (1, 0, 7)


def low(array):
    """In bfloat16, and what that holds in float64."""
    rounded = jnp.asarray(array, jnp.bfloat16)
    return rounded, np.asarray(rounded, np.float64)


def exact_gradients(spec, a, b, g):
    """Of both operands, in float64."""
    first, second, out = spec.replace("->", ",").split(",")
    return np.einsum(f"{out},{second}->{first}", g, b), np.einsum(
        f"{first},{out}->{second}", a, g
    )


def assert_rounded_once(got, expected):
    """Half a unit in the last of 8 places, and what float32 sums are off."""
    for given, exact in zip(got, expected, strict=True):
        assert given.dtype == jnp.bfloat16
        np.testing.assert_array_less(
            np.abs(np.asarray(given, np.float64) - exact),
            np.abs(exact) * 2**-7.9 + 1e-4,
        )


@pytest.mark.parametrize(
    ("function", "spec", "a", "b"),
    [
        (product, "nd,dv->nv", (6, 512), (512, 5)),
        (product, "nd,vd->nv", (6, 512), (5, 512)),
        (product, "bgqs,bgsd->bgqd", (2, 3, 4, 512), (2, 3, 512, 5)),
        (
            float_product,
            "nd,vd->nv",
            (6, 16),
            (40, 16),
        ),  # a cotangent in blocks of columns, the last of them not full
        (float_product, "nd,vd->nv", (5, 64), (64, 64)),
        (float_product, "nd,vd->nv", (0, 16), (40, 16)),
        (float_product, "bgqd,bgsd->bgqs", (2, 3, 5, 64), (2, 3, 7, 64)),
    ],
)
def test_low_products_and_their_gradients_are_rounded_once(function, spec, a, b):
    """Or not at all, where results are float32."""
    rng = np.random.default_rng(2)
    (a, a_exact), (b, b_exact) = (low(rng.normal(size=size)) for size in (a, b))
    got, pull = jax.vjp(
        functools.partial(function, spec),
        a,
        b,
    )
    expected = np.einsum(spec, a_exact, b_exact)
    if function is product:
        assert_rounded_once((got,), (expected,))
    else:
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, atol=1e-4)
    g, g_exact = low(rng.normal(size=got.shape))
    assert_rounded_once(
        pull(g.astype(got.dtype)), exact_gradients(spec, a_exact, b_exact, g_exact)
    )


def test_low_layers_ask_for_sums_in_float32():
    """What XLA:CPU multiplies natively; asked for bfloat16 it casts both operands up first."""

    def products(x, kernel):
        program = jax.make_jaxpr(
            jax.grad(
                lambda *of: product("nd,dv->nv", *of).astype(jnp.float32).sum(), (0, 1)
            )
        )
        return [
            line
            for line in str(program(x, kernel)).splitlines()
            if "dot_general" in line
        ]

    lines = products(
        jnp.ones((4, 8), jnp.bfloat16),
        jnp.ones((8, 3), jnp.bfloat16),
    )
    assert len(lines) == 3
    assert all(":f32[" in line for line in lines)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(jnp.float32, "HIGHEST"), (jnp.bfloat16, "DEFAULT")]
)
def test_float32_is_summed_as_the_run_asks(dtype, expected):
    """On accelerators a run asks for all of float32; products of fewer bits have nothing to gain by it."""
    with jax.default_matmul_precision("highest"):
        jaxpr = str(
            jax.make_jaxpr(lambda a, b: sums("nd,dv->nv", a, b))(
                *(jnp.ones((2, 2), dtype),) * 2
            )
        )
    assert f"Precision.{expected}" in jaxpr


RATE = 0.1
WIDTH = 64
ROWS = 40
LENGTH = 50
SIGMAS = 4.5  # two-sided p of 7e-6 a comparison
fast_drop = compiled(drop)
row_keys = compiled(noise.row_keys)
prompt_dropout = compiled(noise.prompt_dropout, static=("rate", "where"))
latent_dropout = compiled(noise.latent_dropout, static=("rate", "where"))
answer_dropout = compiled(noise.answer_dropout, static=("rate", "where"))


def _noise(
    rows=ROWS,
    length=LENGTH,
    seed=0,
    rate=RATE,
    active=True,
) -> Dropout:
    keys = jax.random.split(
        jax.random.key(seed),
        (rows, length),
    )
    return Dropout(
        keys,
        jnp.full((rows, length), active),
        rate,
    )


def _kept(dropout, site=0, width=WIDTH) -> np.ndarray:
    return (
        np.asarray(fast_drop(jnp.ones((*dropout.keys_BL.shape, width)), dropout, site))
        > 0
    )


def _correlation(a, b) -> float:
    """Of two arrays of dropped/kept, in standard deviations of what independence gives."""
    a, b = (
        np.where(x, RATE, RATE - 1.0).ravel() for x in (a, b)
    )  # mean 0 for keep rate 1 - RATE
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
        assert all(
            _within(count, kept.size // counts.size, 1 - rate) for count in counts
        )
    spread = kept.sum(axis=2).var() / (
        WIDTH * rate * (1 - rate)
    )  # masks are neither too equal nor too different
    assert abs(spread - 1) < SIGMAS * np.sqrt(2 / (ROWS * LENGTH))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_are_zero_or_scaled(dtype):
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH)).astype(dtype)
    y = drop(x, _noise(), site=3)
    assert y.dtype == dtype
    scaled = x * jnp.asarray(1 / 0.9, dtype)
    np.testing.assert_array_equal(
        y,
        jnp.where(y == 0, 0, scaled),
    )
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
    rows = row_keys(
        jax.random.key(0),
        jnp.arange(2000) // 8,
        jnp.arange(2000) % 8,
    )
    latent = _kept(
        latent_dropout(
            rows,
            jnp.arange(1, 5),
            jnp.zeros((2000, 4), bool),
            rate=RATE,
            where="thought",
        )
    )
    prompt = _kept(
        prompt_dropout(rows, jnp.ones((2000, 4), bool), rate=RATE, where="thought")
    )
    answer = _kept(
        answer_dropout(
            rows,
            jnp.arange(4),
            rate=RATE,
            where="all",
        )
    )
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
    words = np.random.default_rng(0).integers(
        0, 2**32, size=(ROWS, LENGTH, 2), dtype=np.uint32
    )
    changed = words + np.array(change).astype(np.uint32)
    keys, others = (jax.random.wrap_key_data(jnp.asarray(x)) for x in (words, changed))
    dropout = _noise()
    assert (
        abs(
            _correlation(
                _kept(dropout.replace(keys_BL=keys)),
                _kept(dropout.replace(keys_BL=others)),
            )
        )
        < SIGMAS
    )


def test_a_mask_depends_on_its_position_s_key_alone():
    dropout = _noise()
    kept = _kept(dropout, site=2)
    order = np.random.default_rng(0).permutation(ROWS)
    np.testing.assert_array_equal(
        _kept(Dropout(dropout.keys_BL[order], dropout.active_BL, RATE), site=2),
        kept[order],
    )
    one = Dropout(
        dropout.keys_BL[3:4, 5:6],
        dropout.active_BL[:1, :1],
        RATE,
    )
    np.testing.assert_array_equal(
        _kept(one, site=2)[0, 0],
        kept[3, 5],
    )


def test_prompt_noise_counts_from_the_end():
    keys = row_keys(
        jax.random.key(0),
        jnp.arange(3),
    )
    small = prompt_dropout(
        keys,
        jnp.ones((3, 4), bool),
        rate=RATE,
        where="thought",
    )
    large = prompt_dropout(
        keys, jnp.arange(7)[None] >= jnp.full((3, 1), 3), rate=RATE, where="thought"
    )
    np.testing.assert_array_equal(
        _kept(small),
        _kept(large)[:, 3:],
    )
    assert _kept(large)[:, :3].all(), "pads carry no noise"


def test_inactive_and_uncovered_positions_are_untouched():
    x = jax.random.normal(
        jax.random.key(1),
        (ROWS, LENGTH + 3, WIDTH),
    )
    active = jnp.asarray(np.random.default_rng(0).random((ROWS, LENGTH)) < 0.5)
    dropout = _noise().replace(active_BL=active)
    y = np.asarray(drop(x, dropout, site=1))
    np.testing.assert_array_equal(
        y[:, LENGTH:],
        x[:, LENGTH:],
    )
    np.testing.assert_array_equal(
        y[:, :LENGTH][~active],
        x[:, :LENGTH][~active],
    )
    np.testing.assert_array_equal(
        y[:, :LENGTH][active], drop(x[:, :LENGTH], _noise(), site=1)[active]
    )


def test_sites_have_distinct_numbers():
    numbers = [site_number(layer, name) for layer in range(6) for name in SITES]
    assert len(set(numbers)) == len(numbers)

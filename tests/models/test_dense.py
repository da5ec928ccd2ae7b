"""Rows by a matrix, beside numpy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.models.dense import dense, float_product, head_logits, product, sums


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (0, 3)])
def test_a_layer_and_its_gradients_are_numpy_s(leading):
    rng = np.random.default_rng(0)
    x, kernel, bias, seen = (rng.normal(size=size) for size in ((*leading, 4), (4, 5), (5,), (*leading, 5)))
    layer = dense(5, jnp.float32, 0.02, "layer", use_bias=True)

    def loss(params, x):
        return jnp.sum(layer.apply({"params": params}, x) * seen)

    params = {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}
    got = layer.apply({"params": params}, jnp.asarray(x, jnp.float32))
    of_params, of_x = jax.grad(loss, (0, 1))(params, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, x @ kernel + bias, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_params["kernel"], np.tensordot(x, seen, [range(len(leading))] * 2), atol=1e-5)
    np.testing.assert_allclose(of_params["bias"], seen.reshape(-1, 5).sum(0), atol=1e-5)
    np.testing.assert_allclose(of_x, seen @ kernel.T, atol=1e-5)


def test_a_layer_begins_as_it_says():
    kernel = dense(400, jnp.float32, 0.5, "layer", use_bias=False).init(jax.random.key(0), jnp.ones((1, 300)))
    assert set(kernel["params"]) == {"kernel"}
    assert np.std(kernel["params"]["kernel"]) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("rows", [1, 6, 7])
def test_gradients_of_parameters_are_not_rounded(rows):
    """Kernels and heads are float32, and in low precision are rounded where they are used."""
    rng = np.random.default_rng(4)
    (x, x_exact), kernel = low(rng.normal(size=(rows, 16))), rng.normal(size=(16, 5)).astype(np.float32)
    g, g_exact = low(rng.normal(size=(rows, 5)))
    _, kernel_exact = low(kernel)
    layer = dense(5, jnp.bfloat16, 0.02, "layer", use_bias=False)
    for function, matrix, wide in (
        (lambda x, kernel: layer.apply({"params": {"kernel": kernel}}, x), kernel, 1e-2),
        (lambda x, kernel: head_logits(x, kernel.T), kernel, 1e-5),
    ):
        got, pull = jax.vjp(function, x, jnp.asarray(matrix))
        np.testing.assert_allclose(np.asarray(got, np.float64), x_exact @ kernel_exact, rtol=wide, atol=wide)
        of_x, of_kernel = pull(g.astype(got.dtype))
        assert (of_x.dtype, of_kernel.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_allclose(of_kernel, x_exact.T @ g_exact, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.asarray(of_x, np.float64), g_exact @ kernel_exact.T, rtol=1e-2, atol=1e-2)


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
    return np.einsum(f"{out},{second}->{first}", g, b), np.einsum(f"{first},{out}->{second}", a, g)


def assert_rounded_once(got, expected):
    """Half a unit in the last of 8 places, and what float32 sums are off."""
    for given, exact in zip(got, expected, strict=True):
        assert given.dtype == jnp.bfloat16
        np.testing.assert_array_less(np.abs(np.asarray(given, np.float64) - exact), np.abs(exact) * 2**-7.9 + 1e-4)


@pytest.mark.parametrize(
    ("function", "spec", "a", "b"),
    [
        (product, "nd,dv->nv", (6, 512), (512, 5)),
        (product, "nd,vd->nv", (6, 512), (5, 512)),
        (product, "bgqs,bgsd->bgqd", (2, 3, 4, 512), (2, 3, 512, 5)),
        (float_product, "nd,vd->nv", (6, 16), (40, 16)),  # a cotangent in blocks of columns, the last of them not full
        (float_product, "nd,vd->nv", (5, 64), (64, 64)),
        (float_product, "nd,vd->nv", (0, 16), (40, 16)),
        (float_product, "bgqd,bgsd->bgqs", (2, 3, 5, 64), (2, 3, 7, 64)),
    ],
)
def test_low_products_and_their_gradients_are_rounded_once(function, spec, a, b):
    """Or not at all, where results are float32."""
    rng = np.random.default_rng(2)
    (a, a_exact), (b, b_exact) = (low(rng.normal(size=size)) for size in (a, b))
    got, pull = jax.vjp(functools.partial(function, spec), a, b)
    expected = np.einsum(spec, a_exact, b_exact)
    if function is product:
        assert_rounded_once((got,), (expected,))
    else:
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, atol=1e-4)
    g, g_exact = low(rng.normal(size=got.shape))
    assert_rounded_once(pull(g.astype(got.dtype)), exact_gradients(spec, a_exact, b_exact, g_exact))


def test_low_layers_ask_for_sums_in_float32():
    """What XLA:CPU multiplies natively; asked for bfloat16 it casts both operands up first."""

    def products(x, kernel):
        program = jax.make_jaxpr(jax.grad(lambda *of: product("nd,dv->nv", *of).astype(jnp.float32).sum(), (0, 1)))
        return [line for line in str(program(x, kernel)).splitlines() if "dot_general" in line]

    lines = products(jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16))
    assert len(lines) == 3
    assert all(":f32[" in line for line in lines)


@pytest.mark.parametrize(("dtype", "expected"), [(jnp.float32, "HIGHEST"), (jnp.bfloat16, "DEFAULT")])
def test_float32_is_summed_as_the_run_asks(dtype, expected):
    """On accelerators a run asks for all of float32; products of fewer bits have nothing to gain by it."""
    with jax.default_matmul_precision("highest"):
        jaxpr = str(jax.make_jaxpr(lambda a, b: sums("nd,dv->nv", a, b))(*(jnp.ones((2, 2), dtype),) * 2))
    assert f"Precision.{expected}" in jaxpr

"""What a backward pass makes again: its gradients beside numpy in float64, and what it keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.models.xla_cpu import after, remade


def _waves(x, scale):
    for _ in range(4):
        x = jnp.sin(x) * scale[None]
    return x


def test_gradients_are_numpy_s():
    rng = np.random.default_rng(0)
    x, scale, g = rng.normal(size=(3, 5)), rng.normal(size=5), rng.normal(size=(3, 5))
    _, pull = jax.vjp(remade(_waves), *(jnp.asarray(each, jnp.float32) for each in (x, scale)))
    of_x, of_scale = pull(jnp.asarray(g, jnp.float32))

    value, by_x, by_scale = x, np.ones_like(x), np.zeros_like(x)
    for _ in range(4):
        by_scale = np.sin(value) + scale * np.cos(value) * by_scale
        by_x, value = scale * np.cos(value) * by_x, np.sin(value) * scale
    np.testing.assert_allclose(of_x, g * by_x, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(of_scale, (g * by_scale).sum(0), rtol=1e-4, atol=1e-5)


def _scratch(function, layers):
    """Bytes that the gradient of so many layers, one after the other, needs for a moment."""

    def loss(x, scales):
        return functools.reduce(lambda x, scale: function(x, scale) @ jnp.eye(256), scales, x).sum()

    args = jnp.ones((512, 256)), [jnp.ones(256) + layer for layer in range(layers)]
    return jax.jit(jax.grad(loss, (0, 1))).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_arguments_alone_are_kept():
    x_bytes = 4 * 512 * 256
    slope = (_scratch(remade(_waves), 24) - _scratch(remade(_waves), 12)) / 12
    assert x_bytes <= slope < 1.5 * x_bytes
    assert (_scratch(_waves, 24) - _scratch(_waves, 12)) / 12 > 2 * x_bytes, "the test must see what is kept"


def test_second_derivatives_are_not_lost():
    def slope(function):
        return jax.grad(lambda x: jax.grad(lambda x: jnp.sum(function(x, 1 + x[0]) ** 2))(x).sum())

    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, 5)), jnp.float32)
    np.testing.assert_allclose(slope(remade(_waves))(x), slope(_waves)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_comes_after_is_the_same_bit_for_bit(dtype):
    x = jnp.array([1.0, -0.0, 0.0, jnp.inf, -3e-39, 257.0], dtype)
    for first in (jnp.array([[-2.0, jnp.nan]]), jnp.array(jnp.inf), jnp.ones(3, jnp.bfloat16)):
        got = jax.jit(after)(first, {"x": x})["x"]
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(x).view(np.uint8))


def test_rounding_is_not_taken_back():
    """Under jit XLA would cast what is added up to float32 and leave out the rounding between."""

    def twice(x, g):
        return after(g, x.astype(jnp.bfloat16)).astype(jnp.float32)

    x = jnp.asarray(np.random.default_rng(1).normal(size=64), jnp.float32)
    np.testing.assert_array_equal(jax.jit(twice)(x, x), np.asarray(x.astype(jnp.bfloat16), np.float32))

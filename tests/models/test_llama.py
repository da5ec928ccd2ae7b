"""What Llama alone has: rotary frequencies, grouped queries and its norm. test_backbones.py has the rest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.models.attention import attend
from slpo_jax.models.llama import LlamaConfig, Norm, RopeScaling, rope_frequencies
from tiny_llama import SCALED, hf_llama_config

LLAMA_1B = LlamaConfig()
FREQUENCIES = {
    "llama 3.2 1b": LLAMA_1B,
    "llama 3.1 8b": dataclasses.replace(
        LLAMA_1B,
        n_embd=4096,
        head_dim=128,
        rope_scaling=dataclasses.replace(RopeScaling(), factor=8.0),
    ),
    "smollm2": dataclasses.replace(LLAMA_1B, rope_theta=100000.0, rope_scaling=None),
    "llama 2": dataclasses.replace(
        LLAMA_1B, head_dim=128, rope_theta=10000.0, rope_scaling=None
    ),
    "tiny": SCALED,
}


@pytest.mark.parametrize("config", FREQUENCIES.values(), ids=FREQUENCIES)
def test_frequencies_are_transformers_to_the_last_bit(config):
    """At position 100,000 the last bit of a frequency is an angle of 0.005."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    expected = llama.LlamaRotaryEmbedding(hf_llama_config(config)).inv_freq.numpy()
    np.testing.assert_array_equal(rope_frequencies(config), expected)
    assert rope_frequencies(config).dtype == np.float32


def test_grouped_queries_never_copy_their_keys():
    """No value of the program is as large as the keys would be with one copy a query head, or a row of the prefix."""
    heads = 8
    groups = 2
    rows = 6
    shared = 2
    own = 40
    before = 50
    width = 16
    shapes = (
        [(rows, heads, 1, width)]
        + [(rows, groups, own, width)] * 2
        + [(shared, groups, before, width)] * 2
    )
    q, k, v, prefix_k, prefix_v = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes
    )
    mask = jax.ShapeDtypeStruct((rows, 1, own), bool)
    valid = jax.ShapeDtypeStruct((shared, before), bool)
    jaxpr = jax.make_jaxpr(attend)(q, k, v, mask, (prefix_k, prefix_v, valid))
    sizes = [
        int(np.prod(out.aval.shape))
        for equation in jaxpr.eqns
        for out in equation.outvars
    ]
    assert max(sizes) < rows * groups * own * width
    assert max(sizes) < rows * groups * before * width


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_norms_and_their_gradients_are_numpy_s(dtype, most):
    rng = np.random.default_rng(3)
    x, g = (
        np.asarray(jnp.asarray(rng.normal(size=(2, 3, 16)), dtype), np.float64)
        for _ in range(2)
    )
    scale = rng.normal(size=16).astype(np.float32)
    epsilon = 1e-5
    norm = Norm(epsilon=epsilon, dtype=jnp.dtype(dtype))
    assert jax.tree.map(jnp.shape, norm.init(jax.random.key(0), x)) == {
        "params": {"scale": (16,)}
    }

    @jax.jit
    def run(x, scale, g):
        value, pull = jax.vjp(
            lambda x, scale: norm.apply({"params": {"scale": scale}}, x), x, scale
        )
        return value, *pull(g)

    got, of_x, of_scale = run(
        jnp.asarray(x, dtype), jnp.asarray(scale), jnp.asarray(g, dtype)
    )
    size = np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    scaled = g * scale
    along = (scaled * x).mean(-1, keepdims=True)
    assert (got.dtype, of_x.dtype, of_scale.dtype) == (dtype, dtype, "float32")
    np.testing.assert_allclose(
        np.asarray(got, np.float64),
        x / size * scale,
        atol=most,
    )
    np.testing.assert_allclose(
        np.asarray(of_x, np.float64), scaled / size - x * along / size**3, atol=most
    )
    np.testing.assert_allclose(
        of_scale,
        (g * x / size).sum((0, 1)),
        atol=most,
    )

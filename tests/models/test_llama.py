"""What Llama alone has: rotary frequencies, grouped queries and its real shapes. test_backbones.py has the rest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import compiled
from tiny_llama import LLAMA, SCALED, hf_llama_config, random_tree

from slpo_jax.checkpoints.architectures.coconut import Coconut
from slpo_jax.errors import UserError
from slpo_jax.models.attention import attend
from slpo_jax.models.llama import LlamaConfig, Norm, RopeScaling, rope_frequencies, rotate

LLAMA_1B = LlamaConfig()
FREQUENCIES = {
    "llama 3.2 1b": LLAMA_1B,
    "llama 3.1 8b": dataclasses.replace(
        LLAMA_1B, n_embd=4096, head_dim=128, rope_scaling=dataclasses.replace(RopeScaling(), factor=8.0)
    ),
    "smollm2": dataclasses.replace(LLAMA_1B, rope_theta=100000.0, rope_scaling=None),
    "llama 2": dataclasses.replace(LLAMA_1B, head_dim=128, rope_theta=10000.0, rope_scaling=None),
    "tiny": SCALED,
}


@pytest.mark.parametrize("config", FREQUENCIES.values(), ids=FREQUENCIES)
def test_frequencies_are_transformers_to_the_last_bit(config):
    """At position 100,000 the last bit of a frequency is an angle of 0.005."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    expected = llama.LlamaRotaryEmbedding(hf_llama_config(config)).inv_freq.numpy()
    np.testing.assert_array_equal(rope_frequencies(config), expected)
    assert rope_frequencies(config).dtype == np.float32


def test_llama3_scaling_keeps_interpolates_and_slows_down():
    """By hand: 32 positions hold 5.1, 1.6, 0.51 and 0.16 turns; more than 4 are kept, less than 1 divided by 8."""
    plain = np.array([1.0, 10**-0.5, 0.1, 10**-1.5])
    kept = (32 * plain[1] / (2 * np.pi) - 1) / 3
    factors = np.array([1.0, kept + (1 - kept) / 8, 1 / 8, 1 / 8])
    np.testing.assert_allclose(rope_frequencies(SCALED), factors * plain, rtol=1e-6)


def test_scaling_matters_far_out():
    """Or else the comparison with transformers at positions beyond the original context would show nothing."""
    inputs = np.random.default_rng(0).normal(size=(1, 10, LLAMA.n_embd)).astype(np.float32)
    positions, valid = 60_000 + 3 * np.arange(10)[None], np.ones((1, 10), bool)
    configs = [dataclasses.replace(LLAMA, n_layer=1, rope_scaling=scaling) for scaling in (None, SCALED.rope_scaling)]
    params = random_tree(Coconut().on(configs[0]))
    plain, scaled = (compiled(Coconut().on(c).forward)(params, inputs, positions, valid)[0] for c in configs)
    assert np.abs(plain - scaled).max() > 0.3


def test_grouped_queries_never_copy_their_keys():
    """No value of the program is as large as the keys would be with one copy a query head, or a row of the prefix."""
    heads, groups, rows, shared, own, before, width = 8, 2, 6, 2, 40, 50, 16
    shapes = [(rows, heads, 1, width)] + [(rows, groups, own, width)] * 2 + [(shared, groups, before, width)] * 2
    q, k, v, prefix_k, prefix_v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    mask, valid = jax.ShapeDtypeStruct((rows, 1, own), bool), jax.ShapeDtypeStruct((shared, before), bool)
    jaxpr = jax.make_jaxpr(attend)(q, k, v, mask, (prefix_k, prefix_v, valid))
    sizes = [int(np.prod(out.aval.shape)) for equation in jaxpr.eqns for out in equation.outvars]
    assert max(sizes) < rows * groups * own * width
    assert max(sizes) < rows * groups * before * width


def test_real_shapes():
    """Llama 3.2 1B has 1,235,814,400 parameters, without allocating one of them."""
    tree = jax.eval_shape(Coconut().on(LLAMA_1B).init, jax.random.key(0))["backbone"]
    assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == 1_235_814_400
    assert set(tree) == {"embed_tokens", "norm"} | {f"layers_{i}" for i in range(16)}
    shapes = jax.tree.map(lambda leaf: leaf.shape, tree["layers_15"])
    assert shapes == {
        "input_layernorm": {"scale": (2048,)},
        "self_attn": {
            "q_proj": {"kernel": (2048, 2048)},
            "k_proj": {"kernel": (2048, 512)},
            "v_proj": {"kernel": (2048, 512)},
            "o_proj": {"kernel": (2048, 2048)},
        },
        "post_attention_layernorm": {"scale": (2048,)},
        "mlp": {
            "gate_proj": {"kernel": (2048, 8192)},
            "up_proj": {"kernel": (2048, 8192)},
            "down_proj": {"kernel": (8192, 2048)},
        },
    }
    untied = jax.eval_shape(Coconut().on(dataclasses.replace(LLAMA_1B, tied=False)).init, jax.random.key(0))["backbone"]
    assert untied["lm_head"].shape == (128256, 2048)
    assert {leaf.dtype for leaf in jax.tree.leaves(untied)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"n_kv_head": 3}, "n_kv_head: 3 is not .* heads, 4"), ({"head_dim": 5}, "head_dim: 5 is not .* even")],
)
def test_shapes_that_cannot_be(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(LLAMA, **change)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_s_gradient_is_its_transpose(dtype):
    """<rotate(x), g> = <x, gradient>, as a rotation is linear, and it keeps lengths."""
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.normal(size=(2, 3, 5, 8)), dtype) for _ in range(2))
    angles = jnp.asarray(rng.uniform(0, 6, (2, 1, 5, 4)), jnp.float32)
    rotation = jnp.cos(angles), jnp.sin(angles)
    turned, pull = jax.vjp(lambda x: rotate(x, rotation), x)
    x, g, turned, back = (np.asarray(each, np.float64) for each in (x, g, turned, pull(g)[0]))
    np.testing.assert_allclose(np.sum(turned * g), np.sum(x * back), rtol=0.02 if dtype == "bfloat16" else 1e-5)
    np.testing.assert_allclose(np.sum(back**2), np.sum(g**2), rtol=0.02 if dtype == "bfloat16" else 1e-5)
    assert np.abs(back - g).max() > 0.5


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_norms_and_their_gradients_are_numpy_s(dtype, most):
    rng = np.random.default_rng(3)
    x, g = (np.asarray(jnp.asarray(rng.normal(size=(2, 3, 16)), dtype), np.float64) for _ in range(2))
    scale, epsilon = rng.normal(size=16).astype(np.float32), 1e-5
    norm = Norm(epsilon=epsilon, dtype=jnp.dtype(dtype))
    assert jax.tree.map(jnp.shape, norm.init(jax.random.key(0), x)) == {"params": {"scale": (16,)}}
    apply = jax.jit(
        lambda x, scale, g: _value_and_pull(lambda *of: norm.apply({"params": {"scale": of[1]}}, of[0]), x, scale, g)
    )
    got, of_x, of_scale = apply(jnp.asarray(x, dtype), jnp.asarray(scale), jnp.asarray(g, dtype))
    size = np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    scaled = g * scale
    along = (scaled * x).mean(-1, keepdims=True)
    assert (got.dtype, of_x.dtype, of_scale.dtype) == (dtype, dtype, "float32")
    np.testing.assert_allclose(np.asarray(got, np.float64), x / size * scale, atol=most)
    np.testing.assert_allclose(np.asarray(of_x, np.float64), scaled / size - x * along / size**3, atol=most)
    np.testing.assert_allclose(of_scale, (g * x / size).sum((0, 1)), atol=most)


def _value_and_pull(function, x, scale, g):
    value, pull = jax.vjp(function, x, scale)
    return value, *pull(g)

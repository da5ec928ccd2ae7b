"""What GPT-2 alone has, and a plain one; real shapes. test_backbones.py compares it with transformers' model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.architectures.coconut import Coconut
from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.models.llama import LlamaConfig
from tiny import CONFIG, SlowReasoner, compiled, load_hf, random_params


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (GPT2Config(), 124_439_808),
        (GPT2Config(n_embd=1024, n_layer=24, n_head=16), 354_823_168),
        (GPT2Config(tied=False), 124_439_808 + 50257 * 768),
        (GPT2Config(n_inner=768), 124_439_808 - 12 * (3 * 768 * (2 * 768 + 1))),
        (LlamaConfig(), 1_235_814_400),
        (LlamaConfig(tied=False), 1_235_814_400 + 128_256 * 2048),
    ],
    ids=["124m", "355m", "untied", "narrow", "llama 3.2 1b", "llama untied"],
)
def test_real_shapes(config, parameters):
    """The published models' numbers of parameters, without allocating one of them."""
    tree = jax.eval_shape(
        Coconut().on(config).init,
        jax.random.key(0),
    )["backbone"]
    assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == parameters
    assert ("lm_head" in tree) == (not config.tied)
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype("float32")}


def test_projections_into_the_residual_stream_begin_narrower():
    """By the root of how many are added up, two a layer (Radford et al., 2019)."""
    reasoner = Coconut().on(
        dataclasses.replace(
            CONFIG,
            n_embd=64,
            n_layer=8,
        )
    )
    block = compiled(lambda key: reasoner.init(key)["backbone"]["h_0"])(
        jax.random.key(0)
    )
    for part, name, root in (
        ("attn", "c_attn", 1),
        ("attn", "c_proj", 4),
        ("mlp", "c_fc", 1),
        ("mlp", "c_proj", 4),
    ):
        assert np.std(block[part][name]["kernel"]) == pytest.approx(
            0.02 / root, rel=0.1
        ), (part, name)


def test_the_plain_one_is_transformers():
    """The oracle of the tests that do without torch."""
    model = load_hf(random_params())
    slow = SlowReasoner()
    torch = pytest.importorskip("torch")
    inputs = np.random.default_rng(0).normal(size=(9, CONFIG.n_embd)).astype(np.float32)
    with torch.no_grad():
        expected = model(inputs_embeds=torch.tensor(inputs)[None]).logits[0].numpy()
    assert np.abs(expected).max() > 2
    np.testing.assert_allclose(
        slow.logits(slow.hidden(inputs)), expected, rtol=0, atol=1e-4
    )

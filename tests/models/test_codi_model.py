"""CODI's transition against torch's modules, and the reasoners' parameter trees."""

import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.architectures.codi import Codi
from tiny import compiled, load_projector, random_tree
from tiny_llama import LLAMA

HIDDEN = 24
BIASES = {"fc_in": HIDDEN, "fc_out": LLAMA.n_embd}


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["usual", "small"])
def test_transition_is_torch_s_projector(scale):
    """Small inputs without biases make the norm's epsilon matter; usual ones tell the exact GELU from tanh's."""
    torch = pytest.importorskip("torch")
    codi = Codi(HIDDEN).on(LLAMA)
    params = random_tree(codi)
    if scale < 1.0:
        without = {
            name: params["projector"][name] | {"bias": jnp.zeros(size)}
            for name, size in BIASES.items()
        }
        params = params | {"projector": params["projector"] | without}
    hidden = scale * np.random.default_rng(0).normal(size=(3, 5, LLAMA.n_embd)).astype(
        np.float32
    )
    expected = load_projector(params)(torch.tensor(hidden)).detach().numpy()
    np.testing.assert_allclose(
        compiled(codi.transition)(params, hidden), expected, rtol=0, atol=2e-6
    )

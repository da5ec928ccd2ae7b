"""CODI's transition against torch's modules, and the reasoners' parameter trees."""

import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.checkpoints.architectures.codi import Codi
from tiny import compiled, random_tree
from tiny_llama import LLAMA

HIDDEN = 24
BIASES = {"fc_in": HIDDEN, "fc_out": LLAMA.n_embd}


@pytest.fixture(scope="module")
def codi_params():
    return random_tree(Codi(HIDDEN).on(LLAMA))


def _torch_projector(params):
    torch = pytest.importorskip("torch")
    nn, width = torch.nn, LLAMA.n_embd
    projector = nn.Sequential(
        nn.Dropout(0.0), nn.Linear(width, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, width), nn.LayerNorm(width)
    )
    ours = params["projector"]
    with torch.no_grad():
        for module, name in ((projector[1], "fc_in"), (projector[3], "fc_out")):
            module.weight.copy_(torch.tensor(np.asarray(ours[name]["kernel"]).T))
            module.bias.copy_(torch.tensor(np.asarray(ours[name]["bias"])))
        projector[4].weight.copy_(torch.tensor(np.asarray(ours["norm"]["scale"])))
        projector[4].bias.copy_(torch.tensor(np.asarray(ours["norm"]["bias"])))
        return lambda x: projector(torch.tensor(x)).detach().numpy()


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["usual", "small"])
def test_transition_is_torch_s_projector(codi_params, scale):
    """Small inputs without biases make the norm's epsilon matter; usual ones tell the exact GELU from tanh's."""
    params = codi_params
    if scale < 1.0:
        without = {name: params["projector"][name] | {"bias": jnp.zeros(size)} for name, size in BIASES.items()}
        params = params | {"projector": params["projector"] | without}
    hidden = scale * np.random.default_rng(0).normal(size=(3, 5, LLAMA.n_embd)).astype(np.float32)
    latents = compiled(Codi(HIDDEN).on(LLAMA).transition)(params, hidden)
    np.testing.assert_allclose(latents, _torch_projector(params)(hidden), rtol=0, atol=2e-6)

"""GPT-2 of transformers with our weights, and MC-dropout by position, for `benchmarks.witness.step`."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from slpo_jax.models.gpt2 import GPT2Config


class CompileError(RuntimeError):
    """torch.compile can't work on this machine."""


@dataclasses.dataclass
class Noise:
    """The noise of the current forward pass, which all dropout sites of a model read.

    Attributes:
        rate: the probability p of dropping a unit.
        active: which positions are noisy: all (True), none (False), or bool [N, L].
    """

    rate: float
    active: bool | torch.Tensor = False


class PositionDropout(torch.nn.Module):
    """Dropout of the noisy positions."""

    def __init__(self, noise: Noise):
        super().__init__()
        self.noise = noise

    def forward(self, x_NLD: torch.Tensor) -> torch.Tensor:
        """[N, L, D]: noisy where active, x itself elsewhere."""
        active = self.noise.active
        rate = self.noise.rate
        if not isinstance(active, torch.Tensor):
            return F.dropout(x_NLD, rate) if active else x_NLD
        # On a CPU a third of the time of torch.where(active, F.dropout(x), x), forward and backward together.
        rate_NL1 = torch.where(active, rate, 0.0)[..., None]
        uniform_NLD = torch.rand(x_NLD.shape, device=x_NLD.device)
        return x_NLD * uniform_NLD.ge_(rate_NL1).mul_(1 / (1 - rate_NL1)).to(
            x_NLD.dtype
        )


def _hf_config(config: GPT2Config) -> transformers.GPT2Config:
    """The shapes for transformers. Its "gelu_pytorch_tanh" is GPT-2's activation as one fused kernel."""
    names = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    return transformers.GPT2Config(
        **{name: getattr(config, name) for name in names},
        n_inner=config.n_inner or None,
        layer_norm_epsilon=config.norm_epsilon,
        activation_function="gelu_pytorch_tanh",
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


def _hf_weights(backbone, layers: int, device: str) -> dict[str, torch.Tensor]:
    """Our backbone's parameters under transformers' names; its Conv1D has our kernels' [in, out]."""
    weights = {
        "transformer.wte.weight": backbone["wte"],
        "transformer.wpe.weight": backbone["wpe"],
    }
    parts = {"ln_1": ("ln_1",), "ln_2": ("ln_2",), "attn.c_attn": ("attn", "c_attn")}
    parts |= {
        "attn.c_proj": ("attn", "c_proj"),
        "mlp.c_fc": ("mlp", "c_fc"),
        "mlp.c_proj": ("mlp", "c_proj"),
    }
    modules = {"transformer.ln_f": backbone["ln_f"]}
    for layer in range(layers):
        for name, path in parts.items():
            module = backbone[f"h_{layer}"]
            for key in path:
                module = module[key]
            modules[f"transformer.h.{layer}.{name}"] = module
    for name, module in modules.items():
        weights[f"{name}.weight"] = (
            module["kernel"] if "kernel" in module else module["scale"]
        )
        weights[f"{name}.bias"] = module["bias"]
    copied = {
        name: torch.tensor(np.asarray(value), device=device)
        for name, value in weights.items()
    }
    return copied | {"lm_head.weight": copied["transformer.wte.weight"]}


def make_models(params: Any, config: GPT2Config, noise: Noise, device: str):
    """transformers' GPT-2, with `noise` at our dropout sites, and the linear gate.

    Args:
        params: all parts of COCONUT on a GPT-2 with tied embeddings, numpy or jax arrays.
    Raises:
        ValueError: another kind of model.
    """
    if not config.tied or set(params["gate"]) != {"out"}:
        raise ValueError(
            "only a GPT-2 with tied embeddings, residual dropout and a linear gate has a torch reference"
        )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(_hf_config(config)).eval()
        gate = torch.nn.Linear(config.n_embd, 1)
    weights = _hf_weights(params["reasoner"]["backbone"], config.n_layer, device)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    for block in model.transformer.h:
        block.attn.resid_dropout = PositionDropout(noise)
        block.mlp.dropout = PositionDropout(noise)
    out = params["gate"]["out"]
    gate_weights = {
        "weight": np.asarray(out["kernel"]).T,
        "bias": np.asarray(out["bias"]),
    }
    gate.load_state_dict(
        {name: torch.tensor(x, device=device) for name, x in gate_weights.items()},
        assign=True,
    )
    return model, gate


@contextlib.contextmanager
def noise_at(noise: Noise, active: bool | torch.Tensor) -> Iterator[None]:
    """`active` positions for the forward passes inside."""
    noise.active = active if noise.rate else False
    try:
        yield
    finally:
        noise.active = False


def check_compiler(device: str) -> None:
    """Compiles a small function and its gradient.

    Raises:
        CompileError: that doesn't work.
    """

    def function(x):
        return (x.sin() * 2).sum()

    try:
        torch.compile(function)(
            torch.ones(8, device=device, requires_grad=True)
        ).backward()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise CompileError(f"torch.compile: not available here ({reason})") from None

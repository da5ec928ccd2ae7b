"""The section `config.model`: the shapes of a model from random weights, and how a model is run."""

import dataclasses
from typing import Any, Literal

from slpo_jax.settings import Checked, setting


def activation_type(name: str) -> Any:
    """The jax type that `ModelConfig.dtype` stands for, on the devices that there are."""
    import jax

    from slpo_jax.models import xla_cpu

    if name == "auto":
        name = "float32" if xla_cpu.on_cpu() else "bfloat16"
    return jax.numpy.dtype(name)


def is_loop(scan_layers: bool | None, layers: int) -> bool:
    """Whether layers are a loop, as `ModelConfig.scan_layers` says: a program of 12 that aren't takes a TPU's compiler
    20 minutes. XLA:CPU copies each layer's parameters out of those of all in every pass, and compiles in one.
    """
    from slpo_jax.models import xla_cpu

    return layers > 1 and not xla_cpu.on_cpu() if scan_layers is None else scan_layers


@dataclasses.dataclass(frozen=True)
class ModelConfig(Checked):
    """Shapes, for both backbones; where `config.init` names a checkpoint, they are the checkpoint's.

    Attributes:
        n_layer: blocks.
        n_head: attention heads (of queries).
        n_embd: D, the width of hidden states and latents.
        n_positions: positions of a sequence: prompt, latents and answer.
        n_inner: width of the feed-forward layer; 0 is 4 * n_embd.
        n_kv_head: Llama's heads of keys and values; 0 is n_head.
        rope_theta: base of Llama's rotary frequencies.
        tied: the head is the token embedding.
        projector: hidden width of CODI's projector and of CoLaR's head; 0 is n_embd.
        scale: unit of CoLaR's latents, a standard deviation of embeddings; None: published for this width (GPT-2:
            0.12), or 0.018.
        dtype: type of activations; auto is bfloat16 on accelerators and float32 on CPUs.
        remat: recompute activations in the backward pass.
        scan_layers: layers are a loop over one block, which is compiled once; None: on accelerators.
    """

    n_layer: int = setting(12, least=1)
    n_head: int = setting(12, least=1)
    n_embd: int = setting(768, least=1)
    n_positions: int = setting(1024, least=1)
    n_inner: int = setting(0, least=0, note="0 is 4 * n_embd")
    n_kv_head: int = setting(0, least=0, note="0 is n_head")
    rope_theta: float = setting(10_000.0, above=0)
    tied: bool = True
    projector: int = setting(0, least=0, note="0 is n_embd")
    scale: float | None = setting(None, above=0, note="None: the published one")
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", affects="parameters")
    remat: bool = setting(False, affects="nothing")
    scan_layers: bool | None = setting(None, note="None: on accelerators", affects="nothing")

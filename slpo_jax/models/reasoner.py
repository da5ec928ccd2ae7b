"""A reasoner: a backbone and a transition from hidden state to next input (paper section 3).

The modules are Linen; the rest of the project sees only `Reasoner`, a bundle of pure functions of a parameter tree.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from slpo_jax.models import xla_cpu
from slpo_jax.models.attention import KVCache
from slpo_jax.models.backbone import LAYERS, Backbone
from slpo_jax.models.gpt2 import GPT2, GPT2Config
from slpo_jax.models.layers import add_low_rank
from slpo_jax.models.likelihood import without_tokens
from slpo_jax.models.llama import LLAMAS, Llama, LlamaConfig
from slpo_jax.models.parts import REASONER, reads, writes
from slpo_jax.settings import Checked, setting

Params = Any
BACKBONE = "backbone"
BackboneConfig = GPT2Config | LlamaConfig
BACKBONES: dict[str, type[BackboneConfig]] = {
    GPT2Config.model_type: GPT2Config,
    **LLAMAS,
}


class LatentLaw(NamedTuple):
    """A head's law of the next latent: its mean or, with a standard deviation, a diagonal Gaussian.

    Attributes:
        mean, std: float32 [B, L, D], in multiples of `Reasoner.unit`; std is 0 where the head has none.
    """

    mean: jax.Array
    std: jax.Array


class LatentReasoner(nn.Module):
    """A language model that feeds its own hidden states back to itself, as they are."""

    backbone: Backbone

    def transition(self, hidden_BLD: jax.Array) -> jax.Array:
        """Return the latent fed at the next slot, from the hidden state (after the final norm) at this one."""
        return hidden_BLD

    def of_backbone(self, name: str, *args, **kwargs):
        """Call a method of the backbone."""
        return getattr(self.backbone, name)(*args, **kwargs)

    def initialise(self, tokens_BL):
        """Touch every parameter once."""
        inputs_BLD = self.backbone.embed(tokens_BL)
        hidden_BLD, _ = self.backbone(
            inputs_BLD,
            tokens_BL,
            tokens_BL >= 0,
        )
        return self.transition(hidden_BLD), self.backbone.logits(hidden_BLD)


class StepProjector(nn.Module):
    """Linear, GroupNorm, GELU, Linear, GroupNorm of one group; in float32, each step by itself.

    It maps the code of a step of a written solution to the latent that stands for it (ReGuLaR, Wang et al., 2026).

    Attributes:
        width: D.
    """

    width: int

    @nn.compact
    def __call__(self, code_ND):
        draw = nn.initializers.xavier_uniform()
        # 1280 channels have 32 groups; no group may be one channel, whose norm would always be 0.
        groups = math.gcd(32, max(1, self.width // 8))
        x_ND = nn.Dense(self.width, kernel_init=draw)(code_ND.astype(jnp.float32))
        x_ND = nn.GroupNorm(groups, epsilon=1e-5)(x_ND)
        x_ND = nn.gelu(x_ND, approximate=False)
        x_ND = nn.Dense(self.width, kernel_init=draw)(x_ND)
        return nn.GroupNorm(1, epsilon=1e-5)(x_ND)


@dataclasses.dataclass(frozen=True)
class Reasoner:
    """The pure functions that policy, training and evaluation see: of its own parameters, or `in_tree`.

    Attributes:
        config: the backbone's shapes.
        init: key -> params.
        forward: (params, inputs_BLD, positions_BL, valid_BL, **more) -> (hidden_BLD, KVCache); see `Backbone.run`.
        trace: the same with `at_B` -> (hidden_BLD, KVCache, levels_BMD); see `Backbone.trace`.
        embed: (params, tokens_BL) -> [B, L, D].
        transition: (params, hidden_BLD) -> latents [B, L, D].
        law: (params, hidden_BLD) -> `LatentLaw` of which they are the mean; None where no head predicts them.
        logits: (params, hidden_BLD) -> float32 [B, L, V]; of few positions.
        logits_of: (params, hidden_BLD, tokens_M) -> float32 [B, L, M], of a few tokens.
        log_probs: (params, hidden_BLD, tokens_BL, asked_BL, likeliest) -> (float32 [B, L], int [B, L] or None); see
            `models.likelihood.token_log_probs`.
        stack: params -> params as programs read them; where layers are a loop, those of all layers as one, once a
            program and not in each pass. Their gradient is that of the given ones.
        cast: params -> params as loops without a gradient read them; see `_cast`.
        empty_cache: (rows, slots) -> KVCache.
        gaussian: whether the law has a standard deviation.
        unit: the factor from the law's numbers to a latent.
    """

    config: BackboneConfig
    init: Callable[[jax.Array], Params]
    forward: Callable[..., tuple[jax.Array, KVCache]]
    trace: Callable[..., tuple[jax.Array, KVCache, jax.Array]]
    embed: Callable[[Params, jax.Array], jax.Array]
    transition: Callable[[Params, jax.Array], jax.Array]
    logits: Callable[[Params, jax.Array], jax.Array]
    logits_of: Callable[[Params, jax.Array, jax.Array], jax.Array]
    log_probs: Callable[..., tuple[jax.Array, jax.Array | None]]
    stack: Callable[[Params], Params]
    cast: Callable[[Params], Params]
    empty_cache: Callable[[int, int], KVCache]
    law: Callable[[Params, jax.Array], LatentLaw] | None = None
    gaussian: bool = False
    unit: float = 1.0

    @property
    def width(self) -> int:
        """D, the width of a latent."""
        return self.config.n_embd

    def in_tree(self, part: str = REASONER) -> "Reasoner":
        """Return the reasoner as functions of the whole parameter tree, but for `init`."""
        return dataclasses.replace(
            self,
            forward=reads(part, self.forward),
            trace=reads(part, self.trace),
            embed=reads(part, self.embed),
            transition=reads(part, self.transition),
            logits=reads(part, self.logits),
            logits_of=reads(part, self.logits_of),
            log_probs=reads(part, self.log_probs),
            law=None if self.law is None else reads(part, self.law),
            stack=writes(part, self.stack),
            cast=writes(part, self.cast),
        )

    def never_saying(self, tokens: tuple[int, ...]) -> "Reasoner":
        """Return the reasoner for which these tokens have the probability 0; `logits_of` gives theirs all the same."""
        if not tokens:
            return self

        def logits(params, hidden_BLD):
            return without_tokens(self.logits(params, hidden_BLD), tokens)

        log_probs = functools.partial(self.log_probs, impossible=tokens)
        return dataclasses.replace(self, logits=logits, log_probs=log_probs)


def _stack(config: BackboneConfig, params: Params) -> Params:
    if not config.scan_layers:
        return params
    return {**params, BACKBONE: Backbone.stack(params[BACKBONE])}


def _cast(config: BackboneConfig, params: Params) -> Params:
    """Stack as `Reasoner.stack`, and cast matrices to the activations' type, as every use takes them: once."""

    def cast(tree: Params, axes: int) -> Params:
        """Cast the arrays that have at least this number of axes."""

        def cast_array(x):
            return x.astype(config.dtype) if x.ndim >= axes else x

        return jax.tree.map(cast_array, tree)

    layers = params[BACKBONE].get(LAYERS)
    if layers is None:
        return _stack(config, cast(params, 2))

    # In a stack of layers vectors have two axes and matrices three.
    backbone_params = cast(params[BACKBONE], 2)
    backbone_params[LAYERS] = cast(add_low_rank(layers), 3)
    return {**params, BACKBONE: backbone_params}


def as_functions(module: LatentReasoner) -> Reasoner:
    """Return the pure functions of a reasoner module."""

    config = module.backbone.config

    def method(name, *first):
        def call(params, *args, **kwargs):
            variables = {"params": params}
            return module.apply(
                variables,
                *first,
                *args,
                **kwargs,
                method=name,
            )

        return call

    def of_backbone(name):
        return method("of_backbone", name)

    def init(key):
        token_11 = jnp.zeros((1, 1), jnp.int32)
        return module.init(key, token_11, method="initialise")["params"]

    return Reasoner(
        config=config,
        init=init,
        forward=of_backbone("__call__"),
        trace=of_backbone("trace"),
        embed=of_backbone("embed"),
        logits=of_backbone("logits"),
        logits_of=of_backbone("logits_of"),
        log_probs=of_backbone("log_probs"),
        transition=method("transition"),
        stack=functools.partial(_stack, config),
        cast=functools.partial(_cast, config),
        empty_cache=module.backbone.empty_cache,
        law=method("law") if hasattr(module, "law") else None,
        gaussian=getattr(module, "gaussian", False),
        unit=getattr(module, "scale", 1.0),
    )


def vocabulary_rows(tree: Params) -> int:
    """Count the token embeddings in a backbone's parameters."""
    table = tree["wte"] if "wte" in tree else tree["embed_tokens"]
    return table.shape[0]


def backbone(config: BackboneConfig) -> Backbone:
    """Return the backbone that the config's class stands for."""
    return GPT2(config) if isinstance(config, GPT2Config) else Llama(config)


def activation_type(name: str) -> Any:
    """Return the jax type that `ModelConfig.dtype` stands for on these devices."""
    if name == "auto":
        name = "float32" if xla_cpu.on_cpu() else "bfloat16"
    return jax.numpy.dtype(name)


def is_loop(scan_layers: bool | None, layers: int) -> bool:
    """Return whether layers are a loop, as `ModelConfig.scan_layers` says.

    A program of 12 layers that are not a loop takes a TPU's compiler 20 minutes. XLA:CPU would copy each layer's
    parameters out of those of all in every pass, and compiles without a loop in one minute.
    """
    if scan_layers is not None:
        return scan_layers
    return layers > 1 and not xla_cpu.on_cpu()


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
    scale: float | None = setting(
        None,
        above=0,
        note="None: the published one",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    remat: bool = False
    scan_layers: bool | None = setting(None, note="None: on accelerators")

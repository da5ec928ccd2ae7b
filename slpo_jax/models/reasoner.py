"""A reasoner: a backbone and a transition from hidden state to next input (SPEC section 1).

The modules are Linen; the rest of the project sees only `Reasoner`, a bundle of pure functions of a parameter tree.
A new reasoner is one subclass of `LatentReasoner`.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from slpo_jax.models.attention import KVCache
from slpo_jax.models.gpt2 import GPT2, GPT2Config

Params = Any


class LatentReasoner(nn.Module):
    """A language model that can feed its own hidden states back to itself."""

    backbone: nn.Module

    @abc.abstractmethod
    def transition(self, hidden_BLD: jax.Array) -> jax.Array:
        """The latent fed at the next slot, from the hidden state (after the final norm) at this one."""

    def __call__(self, *args, **kwargs):
        return self.backbone(*args, **kwargs)

    def embed(self, tokens_BL):
        return self.backbone.embed(tokens_BL)

    def logits(self, hidden_BLD):
        return self.backbone.logits(hidden_BLD)

    def initialise(self, tokens_BL):
        """Touch every parameter once."""
        hidden_BLD, _ = self(self.embed(tokens_BL), tokens_BL, tokens_BL >= 0)
        return self.transition(hidden_BLD), self.logits(hidden_BLD)


class Coconut(LatentReasoner):
    """COCONUT (Hao et al., 2024): the last hidden state itself is the next input embedding."""

    def transition(self, hidden_BLD):
        return hidden_BLD


@dataclasses.dataclass(frozen=True)
class Reasoner:
    """The pure functions that policy, training and evaluation see.

    Attributes:
        width: D, the width of a latent.
        init: key -> params.
        forward: (params, inputs_BLD, positions_BL, valid_BL, prefix, cache, start, dropout) -> (hidden_BLD, KVCache);
            see `GPT2.__call__`.
        embed: (params, tokens_BL) -> [B, L, D].
        transition: (params, hidden_BLD) -> latents [B, L, D].
        logits: (params, hidden_BLD) -> float32 [B, L, V].
        empty_cache: (rows, slots) -> KVCache.
    """

    width: int
    init: Callable[[jax.Array], Params]
    forward: Callable[..., tuple[jax.Array, KVCache]]
    embed: Callable[[Params, jax.Array], jax.Array]
    transition: Callable[[Params, jax.Array], jax.Array]
    logits: Callable[[Params, jax.Array], jax.Array]
    empty_cache: Callable[[int, int], KVCache]


def as_functions(module: LatentReasoner) -> Reasoner:
    """The pure functions of a reasoner module."""

    def method(name):
        return lambda params, *args, **kwargs: module.apply({"params": params}, *args, **kwargs, method=name)

    def init(key):
        return module.init(key, jnp.zeros((1, 1), jnp.int32), method="initialise")["params"]

    return Reasoner(
        width=module.backbone.config.n_embd,
        init=init,
        forward=method("__call__"),
        embed=method("embed"),
        transition=method("transition"),
        logits=method("logits"),
        empty_cache=module.backbone.empty_cache,
    )


def coconut_gpt2(config: GPT2Config) -> Reasoner:
    """COCONUT on GPT-2."""
    return as_functions(Coconut(GPT2(config)))

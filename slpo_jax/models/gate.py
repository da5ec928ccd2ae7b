"""The stopping gate: its head, and the distribution of the first stop (paper section 4.1)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from slpo_jax.models.layers import Dropout, drop
from slpo_jax.models.parts import GATE, reads
from slpo_jax.settings import Checked, setting


@dataclasses.dataclass(frozen=True)
class GateConfig(Checked):
    """The section `config.gate`.

    Attributes:
        enabled: False: there is no gate, and thought always has T latents.
        hidden: width of the MLP's hidden layer; 0 is a linear head.
        dropout: dropout rate of the head, while it trains in the cold start.
        detached: keep the gate's gradient from the latents.
    """

    enabled: bool = True
    hidden: int = setting(0, least=0, note="0 is a linear head")
    dropout: float = setting(0.1, least=0, below=1)
    detached: bool = True


class GateHead(nn.Module):
    """Dropout, then a linear map (or a one-hidden-layer MLP) from a latent to the stop logit g(h)."""

    hidden: int = 0

    @nn.compact
    def __call__(self, h_BLD, dropout: Dropout | None = None):
        x_BLD = drop(h_BLD.astype(jnp.float32), dropout, site=0)
        if self.hidden:
            x_BLD = nn.gelu(nn.Dense(self.hidden, name="hidden")(x_BLD))
        return nn.Dense(1, name="out")(x_BLD)[..., 0]


@dataclasses.dataclass(frozen=True)
class Gate:
    """The gate as pure functions: of its own parameters, or `in_tree`.

    Attributes:
        init: key -> params.
        logits: (params, h_BLD, dropout=None) -> float32 [B, L], the logits of rho_t.
    """

    init: Callable[[jax.Array], Any]
    logits: Callable[..., jax.Array]

    def in_tree(self) -> "Gate":
        """Return the gate as a function of the whole parameter tree."""
        return dataclasses.replace(self, logits=reads(GATE, self.logits))


def stopping_gate(width: int, hidden: int = 0, detached: bool = True) -> Gate:
    """Return the gate for latents of `width`.

    Args:
        hidden: width of the MLP's hidden layer; 0 is the linear head.
        detached: keep the gate's gradient from reaching the latents.
    """
    module = GateHead(hidden)

    def logits(params, h_BLD, dropout=None):
        h_BLD = jax.lax.stop_gradient(h_BLD) if detached else h_BLD
        return module.apply({"params": params}, h_BLD, dropout)

    return Gate(lambda key: module.init(key, jnp.zeros((1, 1, width)))["params"], logits)


def first_stop_log_probs(logits_T: jax.Array, forced: bool) -> jax.Array:
    """Return log P(tau = t) for t = 1..T of one trajectory (paper section 4.1).

    P(tau = t) = rho_t * prod_{k<t} (1 - rho_k), the product from k = 1.

    Args:
        logits_T: the logits of rho_1 .. rho_T.
        forced: True for the law that makes the samples, where a trajectory whose gate never fired stops at T:
            P(tau = T) = prod_{k<T} (1 - rho_k), and the T probabilities sum to one. False: as printed.
    Returns:
        [T] float32 log-probabilities.
    """
    survive_T = jax.nn.log_sigmoid(-logits_T)
    before_T = jnp.cumsum(survive_T) - survive_T
    stop_T = jax.nn.log_sigmoid(logits_T)
    if forced:
        stop_T = stop_T.at[-1].set(0.0)
    return before_T + stop_T


def stop_log_likelihood(logits_T: jax.Array, length) -> jax.Array:
    """Return log P(tau = length) of one trajectory under the gate's logits, by its own law (paper section 4.1)."""
    return first_stop_log_probs(logits_T, forced=True)[length - 1]


def stop_set_loss(logits_T: jax.Array, in_set_T: jax.Array) -> jax.Array:
    """Return -log sum over t in V of P(tau = t): the cold start's loss for one trajectory (paper section 4.1, L_stop).

    Args:
        logits_T: the logits of rho_1 .. rho_T.
        in_set_T: bool, the answer-valid stopping set V. An empty set gives 0 and must be left out of the mean.
    Returns:
        scalar float32.
    """
    log_probs_T = first_stop_log_probs(logits_T, forced=False)
    any_valid = in_set_T.any()
    # where() on both sides keeps the gradient finite when the set is empty.
    safe_T = jnp.where(in_set_T | ~any_valid, log_probs_T, -jnp.inf)
    return jnp.where(any_valid, -jax.nn.logsumexp(safe_T), 0.0)

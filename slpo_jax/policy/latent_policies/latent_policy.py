"""A latent policy: the law of one step of thought, as pure functions."""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import chex
import jax
import jax.numpy as jnp

from slpo_jax.errors import UserError, key_name
from slpo_jax.models.gate import Gate
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.settings import Checked

Params = Any
Action = Any
"""The choice at a step of thought: a pytree of arrays [B, L, ..]."""


@dataclass(frozen=True)
class LatentPolicy:
    """The law of one step of thought: the action after a hidden state, and the vector that it is fed as.

    Every function takes the whole parameter tree first (see `models.parts`), and arrays of B rows of L positions.

    Attributes:
        init: key -> the latent policy's own parameters, {} where it has none.
        draw: (params, hidden [B, L, D], keys [B, L] or None) -> action. The hidden state is that of the position before
            the one that the action is fed at. None: without the latent policy's noise (its mean, or its likeliest
            action).
        feed: (params, action) -> inputs [B, L, D].
        stop_logits: (params, action, dropout=None) -> float32 [B, L], the logits of rho, the probability to stop here.
        log_prob: (params, hidden [B, L, D], action) -> float32 [B, L], differentiable in the hidden state; None where
            the law is intractable, so that a surrogate or a replay has to stand in.
        signed: whether it may be given advantages [B, L] too, on whose sign its gradient depends (objective grpo).
        ends: (params, action) -> bool [B, L], whether the action is its thought's last, whatever the stopping rule
            says; None where that alone decides.
        halts: (params, action) -> bool [B, L], whether the thought has ended before this action, which then is not fed
            and is none of its steps: a thought may have 0. None where only `ends` and the stopping rule decide.
        halting_log_prob: (params, hidden [B, L, D]) -> float32 [B, L], of the choice to halt after these positions;
            None: halting has no likelihood.
        halts_as_answers: whether that is at the temperature of the answers' likelihood too, as if halting were the
            answer's first token (Latent-GRPO); else it is of the law that `halts` is drawn from, whatever answers are.
        least: steps that a thought has before `halts` is asked.
        says: (params, action) -> int [B, L], the token that a step is written down as, as part of the completion;
            None where thought is silent. A step that says eos is its thought's last, and no answer follows.
        rates: (name, factor): learning rates of its own parameters, by their top-level names, as multiples of
            `Objective.latent_policy_learning_rate`; 1 for other names.
    """

    init: Callable[[jax.Array], Params]
    draw: Callable[[Params, jax.Array, jax.Array | None], Action]
    feed: Callable[[Params, Action], jax.Array]
    stop_logits: Callable[..., jax.Array]
    log_prob: Callable[..., jax.Array] | None = None
    signed: bool = False
    ends: Callable[[Params, Action], jax.Array] | None = None
    halts: Callable[[Params, Action], jax.Array] | None = None
    halting_log_prob: Callable[[Params, jax.Array], jax.Array] | None = None
    halts_as_answers: bool = False
    least: int = 0
    says: Callable[[Params, Action], jax.Array] | None = None
    rates: tuple[tuple[str, float], ...] = ()

    def known_last(self, last: jax.Array) -> jax.Array:
        """Return which of the last steps are known to be the last when they are fed: none where thought may halt.

        Those are fed without dropout's noise (`noise.latent_dropout`).
        """
        if self.halts is None:
            return last
        return jnp.zeros_like(last)

    @classmethod
    def seen_as_fed(
        cls,
        gate: Gate,
        draw: Callable[..., Action],
        feed: Callable = lambda params, x: x,
        **law,
    ) -> Self:
        """Make a law whose gate sees the vector that is fed, by default the action itself.

        Args:
            law: the other attributes; without `init` it has no parameters of its own.
        """

        def stop_logits(params, action, dropout=None):
            return gate.logits(params, feed(params, action), dropout)

        law.setdefault("init", lambda key: {})
        law.setdefault("stop_logits", stop_logits)
        return cls(draw=draw, feed=feed, **law)

    def not_halting(self) -> Self:
        """Return the law for thoughts of known length: `halts` fires nowhere."""

        def never(params, action):
            first_leaf = jax.tree.leaves(action)[0]
            return jnp.zeros(first_leaf.shape[:2], bool)

        return replace(self, halts=None if self.halts is None else never)


def token_log_prob(
    reasoner: Reasoner, token: int | None
) -> Callable[[Params, jax.Array], jax.Array] | None:
    """Return `LatentPolicy.halting_log_prob` where halting is the choice of a token; None without one."""
    if token is None:
        return None

    def log_prob(params, hidden_BLD):
        return reasoner.log_probs(
            params, hidden_BLD, jnp.full(hidden_BLD.shape[:-1], token)
        )[0]

    return log_prob


def standard_normal(keys_BL: jax.Array, like_BLD: jax.Array) -> jax.Array:
    """Draw [B, L, D] of the type of `like_BLD`, with one key for each position."""

    def draw(key):
        return jax.random.normal(
            key,
            like_BLD.shape[-1:],
            like_BLD.dtype,
        )

    return jax.vmap(jax.vmap(draw))(keys_BL)


def gaussian_log_prob(
    h_D: jax.Array, mu_D: jax.Array, variance: float | jax.Array
) -> jax.Array:
    """Return log N(h; mu, variance * I), summed over D (paper section 4.2).

    Args:
        h_D, mu_D: [.., D].
        variance: scalar.
    Returns:
        float32 [..]: -D/2 log(2 pi variance) - ||h - mu||^2 / (2 variance).
    """
    chex.assert_equal_shape([h_D, mu_D])
    log: Callable[..., Any] = math.log if isinstance(variance, float) else jnp.log
    offset_D = (h_D - mu_D).astype(jnp.float32)
    constant = -0.5 * offset_D.shape[-1] * log(2 * math.pi * variance)
    distance = jnp.sum(jnp.square(offset_D), axis=-1)
    return constant - distance / (2 * variance)


def gaussian_latent_policy(
    mean: Callable[[Params, jax.Array], jax.Array],
    sigma: Callable[[Params], float | jax.Array],
    gate: Gate,
) -> LatentPolicy:
    """Make the law mean + sigma n, n standard normal: the action is the noisy input, which the gate sees too.

    Args:
        mean: (params, hidden [B, L, D]) -> [B, L, D].
        sigma: params -> standard deviation of each coordinate.
    """

    def draw(params, hidden_BLD, keys_BL=None):
        mean_BLD = mean(params, hidden_BLD)
        if keys_BL is None:
            return mean_BLD
        noise_BLD = sigma(params) * standard_normal(keys_BL, mean_BLD)
        return mean_BLD + noise_BLD.astype(mean_BLD.dtype)

    def log_prob(params, hidden_BLD, x_BLD):
        mean_BLD = mean(params, hidden_BLD)
        variance = sigma(params) ** 2
        return gaussian_log_prob(x_BLD, mean_BLD, variance)

    return LatentPolicy.seen_as_fed(gate, draw, log_prob=log_prob)


@dataclass(frozen=True)
class LatentPolicySettings(Checked, abc.ABC):
    """A latent policy's settings, a frozen dataclass that is its own config section; calling it makes the policy."""

    of_latents: ClassVar[bool] = False
    """Whether it feeds the reasoner's own latents; a text reasoner has none."""
    of_architecture: ClassVar[str] = ""
    """The only architecture that it is for; "" is for others too."""
    writes: ClassVar[bool] = False
    """Whether it has `says`: a latent reasoner writes only after its thought."""
    has_parameters: ClassVar[bool] = False
    """Whether it has parameters of its own, which every checkpoint has then."""
    is_the_reasoners: ClassVar[bool] = False
    """Whether without noise it feeds just the reasoner's own latents, so that exports think in PyTorch too."""
    has_likelihood: ClassVar[bool] = False
    """Whether it has `log_prob`, and so noise of its own."""

    @property
    def stop_token(self) -> str:
        """The text of one token that ends a thought, of a field `end_text`; "" is none. With one there is `end_id`."""
        return getattr(self, "end_text", "")

    @property
    def ended_by(self) -> tuple[str, int]:
        """The token that ends a thought as the likeliest, and `LatentPolicy.least`, for exports."""
        return self.stop_token, 0

    @property
    def goes_on_by(self) -> str:
        """The token that alone competes with the one that ends a thought, for exports; "" is all tokens."""
        return ""

    @property
    def mixed(self) -> int | None:
        """The number of tokens that it mixes, always the likeliest, 0 being all; None where it draws."""
        return None

    def with_ids(
        self, token: Callable[[str], int], closing_ids: tuple[int, ...]
    ) -> Self:
        """Return the settings in a vocabulary: `config.prompt.closing`, if it is there, ends thoughts by `halt_id`.

        Args:
            token: the id of a text that is one token.
            closing_ids: of `config.prompt.closing`, () without.
        Raises:
            UserError: `stop_token` is not one token.
        """
        ids: dict[str, Any] = {}
        if closing_ids and hasattr(self, "halt_id"):
            ids["halt_id"] = closing_ids[0]
        elif self.stop_token:
            ids["end_id"] = token(self.stop_token)
        return replace(self, **ids)

    def check(
        self,
        name: str,
        architecture: Any,
        reasoner: str,
        max_latents: int,
        closing: str,
    ) -> None:
        """Refuse a run that the latent policy can't be used in.

        Args:
            name: its own.
            architecture: of the reasoner.
            reasoner: its name.
            max_latents: T.
            closing: of `config.prompt`.
        Raises:
            UserError: one line with the key and the remedy.
        """
        name_key = key_name("config.latent_policy.name")
        latents_key = key_name("config.max_latents")
        ends_by_text = bool(not self.of_latents and self.stop_token)
        in_words = self.writes or ends_by_text

        # The reasoner has to be one that it is for.
        if self.of_latents and max_latents and not architecture.has_latents:
            raise UserError(
                f"{latents_key}: {max_latents}, but {reasoner} has no latents for "
                f"{name_key}={name}; set it to 0, or use another latent policy"
            )
        for_another = self.of_architecture not in ("", architecture.name)
        if for_another or (in_words and architecture.has_latents):
            form = name if self.writes or not in_words else f"{name} with an end_text"
            raise UserError(
                f"{name_key}: {form} is for a {self.of_architecture or 'text'} reasoner, "
                f"not {reasoner}; use another"
            )

        # Thoughts in words have an end of their own, and at least one step.
        if in_words and closing:
            raise UserError(
                f"config.prompt.closing: {closing!r} ends thoughts in soft tokens, and config.latent_policy.{name} "
                "writes them, or has an end_text of its own; leave one of them out"
            )
        if self.writes and not max_latents:
            raise UserError(
                f"{latents_key}: 0, but {name_key}={name} writes in "
                "its thought alone; give at least 1, or another latent policy"
            )
        _, least = self.ended_by
        if 0 < max_latents < least:
            raise UserError(
                f"config.latent_policy.{name}.least: {least} steps before a thought may end are more than "
                f"{latents_key} ({max_latents}); lower it or raise that"
            )

    @abc.abstractmethod
    def __call__(self, reasoner: Reasoner, gate: Gate) -> LatentPolicy:
        """Make the latent policy on this reasoner."""

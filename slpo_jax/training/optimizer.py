"""Optimizers and learning rate schedules: Adafactor as the Hugging Face trainer's (paper, appendix A), and AdamW."""

from dataclasses import dataclass
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import optax

from slpo_jax.settings import Checked, FieldError, setting


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """What `make_optimizer` builds: the section `config.STAGE.optimizer`. Values are checked on construction.

    Attributes:
        name: the paper's is adafactor, for reinforcement learning and the gate.
        learning_rate: the rate after warm-up.
        warmup_steps: optimizer steps in which the rate climbs linearly from 0; the first of them has rate 0.
        schedule: after warm-up; "linear" and "cosine" fall to `final_fraction * learning_rate` at the last step.
        final_fraction: what is left of the rate at the end of a falling schedule, and after it.
        clip_norm: largest global norm of the gradient; None leaves it unclipped.
        weight_decay: decoupled, multiplied by the scheduled rate, as torch's AdamW and transformers' Adafactor do.
        decay_vectors: also decay biases and norm scales, as COCONUT's own training does.
        total_steps: optimizer steps of the whole run, warm-up included; None where they are not known yet. It is the
            stage's, no key of the section.
    Raises:
        UserError: A value is out of its range, or the warm-up is longer than the run.
    """

    name: Literal["adafactor", "adamw"] = "adafactor"
    learning_rate: float = setting(1e-6, above=0)
    warmup_steps: int = setting(0, least=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = setting(0.0, least=0, most=1)
    clip_norm: float | None = setting(
        1.0, above=0, note="None leaves gradients unclipped"
    )
    weight_decay: float = setting(0.0, least=0)
    decay_vectors: bool = False
    total_steps: int | None = setting(None, least=1, in_config=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_steps is None:
            return
        # A rate that falls has at least one step to fall in.
        most = self.total_steps
        if self.schedule != "constant":
            most -= 1
        if self.warmup_steps > most:
            remedy = f"a {self.schedule} schedule of {self.total_steps} steps in all has room for {most}: lower it, or "
            raise FieldError(
                self,
                "warmup_steps",
                remedy + "give that more steps (where it begins anew, its phase)",
            )


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Return the learning rate by step, as Hugging Face's "constant_with_warmup", "linear" and "cosine".

    Args:
        config: what to build.
    Returns:
        a function from the number of optimizer steps already taken (an int or an int array, []) to the rate of the
        next one (float32 array, []): `step / warmup_steps * learning_rate` while step < warmup_steps.
    """
    warmup = config.warmup_steps
    span = 1
    final = 1.0
    if config.schedule != "constant":
        assert config.total_steps is not None
        span = config.total_steps - warmup
        final = config.final_fraction

    def schedule(step: chex.Numeric) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        climb = jnp.float32(1.0)
        if warmup:
            climb = jnp.minimum(step / warmup, 1.0)
        after_warmup = (step - warmup) / span
        progress = jnp.clip(after_warmup, 0.0, 1.0)
        if config.schedule == "cosine":
            angle = jnp.pi * progress
            progress = (1.0 - jnp.cos(angle)) / 2
        decay = 1.0 - progress * (1.0 - final)
        return config.learning_rate * climb * decay

    return schedule


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Chain global-norm clip and Adafactor or AdamW under the config's schedule.

    Adafactor equals `transformers.Adafactor(scale_parameter=False, relative_step=False, clip_threshold=1.0,
    decay_rate=-0.8, beta1=None)`: second moments factored for every matrix, whatever its size, and whole for vectors
    and scalars, update clipped to RMS 1 for each array. So the result depends on how parameters are cut into arrays:
    layers stacked for a scan would share one RMS and have their biases factored.

    Args:
        config: what to build.
    Returns:
        a transformation whose `update(gradients, state, params)` gives what `optax.apply_updates` adds to the
        parameters. The number of steps taken, which the schedule follows, is part of its state.
    """
    mask = None if config.decay_vectors else _matrices
    schedule = make_schedule(config)
    if config.name == "adafactor":
        # Without a rate, optax's own decay is left unscaled; the rate that comes last multiplies both.
        scale = optax.adafactor(
            min_dim_size_to_factor=1,
            multiply_by_parameter_scale=False,
            weight_decay_rate=config.weight_decay or None,
            weight_decay_mask=mask,
        )
        rate = optax.scale_by_learning_rate(schedule, flip_sign=False)
        descent = optax.chain(scale, rate)
    else:
        descent = optax.adamw(schedule, weight_decay=config.weight_decay, mask=mask)
    if config.clip_norm is None:
        return descent
    clip = _clip(config.clip_norm)
    return optax.chain(clip, descent)


def steps_taken(opt_state: chex.ArrayTree) -> jax.Array:
    """Count the steps, int32, that an optimizer of `make_optimizer` has taken, which its schedule goes by."""
    counts = optax.tree.get_all_with_path(opt_state, "count")
    _, first = counts[0]
    return first


def _clip(most: float) -> optax.GradientTransformation:
    """Clip as `optax.clip_by_global_norm`, by one factor: XLA would keep all its quotients, a sixth more memory."""

    def clip(updates: chex.ArrayTree, params: chex.ArrayTree | None) -> chex.ArrayTree:
        norm = optax.tree.norm(updates)
        factor = jnp.minimum(1.0, most / norm)

        def scale(gradient):
            own_factor = factor.astype(gradient.dtype)
            return gradient * own_factor

        return jax.tree.map(scale, updates)

    return optax.stateless(clip)


def scale_rates(
    optimizer: optax.GradientTransformation, factors: chex.ArrayTree
) -> optax.GradientTransformation:
    """Return the optimizer with learning rates of their own for some parameters.

    Schedules, decoupled weight decay and whatever comes before the rate are in proportion to it, so that this is what
    torch's parameter groups do; the gradient's norm is clipped over all of them together.

    Args:
        optimizer: from `make_optimizer`.
        factors: of the learning rate, a tree that the parameters' begins with: a number for all parameters under it.
    """

    def scale(updates: chex.ArrayTree, params: chex.ArrayTree | None) -> chex.ArrayTree:
        def scale_part(factor, part):
            return jax.tree.map(lambda x: factor * x, part)

        return jax.tree.map(scale_part, factors, updates)

    return optax.chain(optimizer, optax.stateless(scale))


def _matrices(params: chex.ArrayTree) -> chex.ArrayTree:
    """Mark parameters with two axes: embeddings and kernels, not biases or norm scales."""
    return jax.tree.map(lambda param: jnp.ndim(param) >= 2, params)

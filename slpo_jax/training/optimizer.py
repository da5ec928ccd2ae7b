"""Optimizers and learning rate schedules: Adafactor as the Hugging Face trainer's (paper, appendix A), and AdamW."""

import math
from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args

import chex
import jax
import jax.numpy as jnp
import optax

from slpo_jax.errors import UserError

OptimizerName = Literal["adafactor", "adamw"]
ScheduleName = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class OptimizerConfig:
    """What `make_optimizer` builds. Values are checked on construction.

    Attributes:
        name: "adafactor" (the paper's, for SLPO and the gate) or "adamw".
        learning_rate: the rate after warm-up.
        warmup_steps: optimizer steps in which the rate climbs linearly from 0; the first of them has rate 0.
        schedule: after warm-up, "constant", or down to `final_fraction * learning_rate` at `total_steps`, in a
            "linear" way or along half a "cosine".
        total_steps: optimizer steps of the whole run, warm-up included; the constant schedule doesn't read it.
        final_fraction: what is left of the rate at the end of a falling schedule, and after it.
        clip_norm: largest global norm of the gradient; None leaves it unclipped.
        weight_decay: decoupled, multiplied by the scheduled rate, as torch's AdamW and transformers' Adafactor do.
        decay_vectors: also decay biases and norm scales, as an optimizer given all of a model's parameters does
            (COCONUT's own training); the Hugging Face trainer leaves them out, and so does False.
        b1: AdamW's decay of the first moment. Adafactor has none.
        b2: AdamW's decay of the second moment. Adafactor's is 1 - step^-0.8.
        key: where these values stand in the run's config, for error messages.
    Raises:
        UserError: A value is out of its range; the message names the config key.
    """

    name: OptimizerName = "adafactor"
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: ScheduleName = "constant"
    total_steps: int | None = None
    final_fraction: float = 0.0
    clip_norm: float | None = 1.0
    weight_decay: float = 0.0
    decay_vectors: bool = False
    b1: float = 0.9
    b2: float = 0.999
    key: str = "config.optimizer"

    def __post_init__(self) -> None:
        def check(ok: bool, field: str, remedy: str) -> None:
            if not ok:
                raise UserError(f"{self.key}.{field}: {getattr(self, field)!r} is not valid; {remedy}")

        check(self.name in get_args(OptimizerName), "name", f"use one of {', '.join(get_args(OptimizerName))}")
        check(self.schedule in get_args(ScheduleName), "schedule", f"use one of {', '.join(get_args(ScheduleName))}")
        check(_is_number(self.learning_rate) and self.learning_rate > 0, "learning_rate", "give a number above 0")
        check(_is_count(self.warmup_steps), "warmup_steps", "give a whole number of steps, 0 or more")
        if self.schedule != "constant":
            total = self.total_steps
            check(_is_count(total), "total_steps", f"a {self.schedule} schedule needs the number of all steps")
            remedy = f"the stage has {total} steps in all: lower it, or give the stage more"
            check(total is not None and total > self.warmup_steps, "warmup_steps", remedy)
        fraction = self.final_fraction
        check(_is_number(fraction) and 0 <= fraction <= 1, "final_fraction", "give a number from 0 to 1")
        clip = self.clip_norm
        check(clip is None or (_is_number(clip) and clip > 0), "clip_norm", "give a number above 0, or None")
        check(_is_number(self.weight_decay) and self.weight_decay >= 0, "weight_decay", "give a number, 0 or more")
        for field in ("b1", "b2"):
            value = getattr(self, field)
            check(_is_number(value) and 0 <= value < 1, field, "give a number from 0 up to, but not, 1")


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by optimizer step, as the Hugging Face trainer's "constant_with_warmup", "linear" and "cosine".

    Args:
        config: what to build.
    Returns:
        a function from the number of optimizer steps already taken (an int or an int array, []) to the rate of the
        next one (float32 array, []): `step / warmup_steps * learning_rate` while step < warmup_steps.
    """
    warmup = config.warmup_steps
    if config.schedule != "constant":
        assert config.total_steps is not None  # checked by OptimizerConfig
        span, final = config.total_steps - warmup, config.final_fraction
    else:
        span, final = 1, 1.0

    def schedule(step: chex.Numeric) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        climb = jnp.minimum(step / max(warmup, 1), 1.0) if warmup else jnp.float32(1.0)
        done = jnp.clip((step - warmup) / span, 0.0, 1.0)
        if config.schedule == "cosine":
            done = (1.0 - jnp.cos(jnp.pi * done)) / 2
        return config.learning_rate * climb * (1.0 - done * (1.0 - final))

    return schedule


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Global-norm clip, then Adafactor or AdamW under the config's schedule.

    Adafactor equals `transformers.Adafactor(scale_parameter=False, relative_step=False, clip_threshold=1.0,
    decay_rate=-0.8, beta1=None)`: second moments factored for every matrix, whatever its size, and whole for vectors
    and scalars, update clipped to RMS 1 for each array. So the result depends on how parameters are cut into arrays:
    layers stacked for a scan would share one RMS and have their biases factored.

    Args:
        config: what to build.
    Returns:
        a transformation whose `update(gradients, state, params)` gives what `optax.apply_updates` adds to the
        parameters. The number of steps taken, which the schedule follows, is part of its state.
    Raises:
        ValueError: on `init`, for Adafactor, when an array has more than two axes: optax factors the two longest axes
            and the reference the last two, so that the two would differ without a word.
    """
    mask = None if config.decay_vectors else _matrices
    if config.name == "adafactor":
        # Without a rate, optax's own decay is left unscaled; the rate that comes last multiplies both.
        scale = _only_matrices_and_vectors(
            optax.adafactor(
                learning_rate=None,
                min_dim_size_to_factor=1,
                decay_rate=0.8,
                multiply_by_parameter_scale=False,
                clipping_threshold=1.0,
                momentum=None,
                weight_decay_rate=config.weight_decay or None,
                eps=1e-30,
                weight_decay_mask=mask,
            )
        )
        descent = optax.chain(scale, optax.scale_by_learning_rate(make_schedule(config), flip_sign=False))
    else:
        descent = optax.adamw(
            make_schedule(config), b1=config.b1, b2=config.b2, eps=1e-8, weight_decay=config.weight_decay, mask=mask
        )
    if config.clip_norm is None:
        return descent
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), descent)


def _only_matrices_and_vectors(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation, refusing on `init` parameters with more than two axes."""

    def init(params: chex.ArrayTree) -> chex.ArrayTree:
        for path, param in jax.tree_util.tree_leaves_with_path(params):
            if jnp.ndim(param) > 2:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(f"{name}: Adafactor takes arrays of at most 2 axes, not shape {jnp.shape(param)}")
        return transformation.init(params)

    return optax.GradientTransformation(init, transformation.update)


def _matrices(params: chex.ArrayTree) -> chex.ArrayTree:
    """Which parameters have two axes: embeddings and kernels, not biases or norm scales."""
    return jax.tree.map(lambda param: jnp.ndim(param) >= 2, params)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

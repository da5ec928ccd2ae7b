"""Both sides of `xla_cpu`: a CPU has its forms, and accelerators' plain ones the same numbers; what is made again."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.architectures.coconut import Coconut
from slpo_jax.models import xla_cpu
from slpo_jax.models.xla_cpu import after, remat
from slpo_jax.training import rl_loss
from slpo_jax.training.objectives import OBJECTIVES
from small_steps import (
    GROUP,
    ROLLOUT,
    STAGES,
    batch_of,
    prompted_batch,
    rigged_reward,
    small_params,
    step_of,
)
from tiny import policy_of, random_tree
from tiny_llama import LLAMA

WORDS = Coconut().on(dataclasses.replace(LLAMA, dtype=jnp.bfloat16))
WRITTEN = policy_of(
    dataclasses.replace(ROLLOUT, max_latents=0, stopping="length", dropout_rate=0.0),
    WORDS,
)
FORMS = {name for name in vars(xla_cpu) if name.startswith("cpu_")}


def _step(stage):
    """(the step, its arguments); the GRPO step is a Llama's, in bfloat16."""
    params = small_params()
    batch = prompted_batch() if stage == "grpo" else batch_of(stage)
    if stage == "grpo":
        params["reasoner"] = random_tree(WORDS)
        loss = rl_loss.make_rollout_and_loss(
            WRITTEN, OBJECTIVES["grpo"](), rigged_reward, GROUP
        )
        trained = ("reasoner",)
    else:
        make, trained = STAGES[stage]
        loss = make()
    return step_of(
        loss,
        params,
        trained,
        batch,
        "rl" if stage == "grpo" else stage,
    )


@pytest.fixture
def accelerator(monkeypatch):
    """The package as it is where `on_cpu` says no; jax keeps nothing that was traced on the other side."""

    def choose(yes: bool):
        monkeypatch.setattr(xla_cpu, "on_cpu", lambda: not yes)
        jax.clear_caches()

    yield choose
    jax.clear_caches()


def _forms(text: str) -> set[str]:
    return set(re.findall(r"\bcpu_\w+", text))


@pytest.mark.slow
def test_a_cpu_has_every_form(accelerator):
    accelerator(False)
    step, arguments = _step("grpo")
    assert _forms(step.lower(*arguments).as_text(debug_info=True)) == FORMS


@pytest.mark.parametrize(
    ("stage", "most"),
    [
        pytest.param("rl", 1e-4, marks=pytest.mark.slow),
        pytest.param("cold_start", 1e-4, marks=pytest.mark.nightly),
        pytest.param("imitate", 1e-4, marks=pytest.mark.nightly),
        pytest.param("grpo", 0.03, marks=pytest.mark.nightly),
    ],
)
def test_both_sides_have_the_same_numbers(accelerator, stage, most):
    """The gradient and the metrics of a step; of what bfloat16 rounds, within its rounding."""
    found = []
    for yes in (True, False):
        accelerator(yes)
        step, arguments = _step(stage)
        state, metrics = step(*arguments)
        found.append(
            jax.tree.map(
                lambda x: np.asarray(x, np.float64), (state.opt_state[0].trace, metrics)
            )
        )
    for plain, ours in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(
            plain, ours, rtol=most, atol=most * max(1e-3, np.abs(ours).max())
        )


# What a backward pass makes again: its gradients beside numpy in float64, and what it keeps.


def _waves(x, scale):
    for _ in range(4):
        x = jnp.sin(x) * scale[None]
    return x


def test_gradients_are_numpy_s():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5))
    scale = rng.normal(size=5)
    g = rng.normal(size=(3, 5))
    _, pull = jax.vjp(
        remat(_waves), *(jnp.asarray(each, jnp.float32) for each in (x, scale))
    )
    of_x, of_scale = pull(jnp.asarray(g, jnp.float32))

    value = x
    by_x = np.ones_like(x)
    by_scale = np.zeros_like(x)
    for _ in range(4):
        by_scale = np.sin(value) + scale * np.cos(value) * by_scale
        by_x = scale * np.cos(value) * by_x
        value = np.sin(value) * scale
    np.testing.assert_allclose(
        of_x,
        g * by_x,
        rtol=1e-4,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        of_scale,
        (g * by_scale).sum(0),
        rtol=1e-4,
        atol=1e-5,
    )


def _scratch(function, layers):
    """Bytes that the gradient of so many layers, one after the other, needs for a moment."""

    def loss(x, scales):
        return functools.reduce(
            lambda x, scale: function(x, scale) @ jnp.eye(256), scales, x
        ).sum()

    args = jnp.ones((512, 256)), [jnp.ones(256) + layer for layer in range(layers)]
    return (
        jax.jit(jax.grad(loss, (0, 1)))
        .lower(*args)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )


@pytest.mark.slow
def test_arguments_alone_are_kept():
    x_bytes = 4 * 512 * 256
    slope = (_scratch(remat(_waves), 24) - _scratch(remat(_waves), 12)) / 12
    assert x_bytes <= slope < 1.5 * x_bytes
    assert (_scratch(_waves, 24) - _scratch(_waves, 12)) / 12 > 2 * x_bytes, (
        "the test must see what is kept"
    )


def test_second_derivatives_are_not_lost():
    def slope(function):
        return jax.grad(
            lambda x: jax.grad(lambda x: jnp.sum(function(x, 1 + x[0]) ** 2))(x).sum()
        )

    x = jnp.asarray(
        np.random.default_rng(2).normal(size=(3, 5)),
        jnp.float32,
    )
    np.testing.assert_allclose(
        slope(remat(_waves))(x), slope(_waves)(x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_comes_after_is_the_same_bit_for_bit(dtype):
    x = jnp.array(
        [1.0, -0.0, 0.0, jnp.inf, -3e-39, 257.0],
        dtype,
    )
    for first in (
        jnp.array([[-2.0, jnp.nan]]),
        jnp.array(jnp.inf),
        jnp.ones(3, jnp.bfloat16),
    ):
        got = jax.jit(after)(first, {"x": x})["x"]
        assert got.dtype == dtype
        np.testing.assert_array_equal(
            np.asarray(got).view(np.uint8), np.asarray(x).view(np.uint8)
        )


def test_rounding_is_not_taken_back():
    """Under jit XLA would cast what is added up to float32 and leave out the rounding between."""

    def twice(x, g):
        return after(g, x.astype(jnp.bfloat16)).astype(jnp.float32)

    x = jnp.asarray(
        np.random.default_rng(1).normal(size=64),
        jnp.float32,
    )
    np.testing.assert_array_equal(
        jax.jit(twice)(x, x), np.asarray(x.astype(jnp.bfloat16), np.float32)
    )

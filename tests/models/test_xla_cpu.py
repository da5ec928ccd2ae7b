"""Both sides of `xla_cpu`: a CPU has its forms, and accelerators' plain ones the same numbers."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.checkpoints.architectures.coconut import Coconut
from slpo_jax.models import xla_cpu
from slpo_jax.training import rl
from slpo_jax.training.objectives import OBJECTIVES
from small_steps import GROUP, ROLLOUT, STAGES, batch_of, prompted_batch, rigged_reward, small_params, step_of
from tiny import policy_of, random_tree
from tiny_llama import LLAMA

WORDS = Coconut().on(dataclasses.replace(LLAMA, dtype=jnp.bfloat16))
WRITTEN = policy_of(dataclasses.replace(ROLLOUT, max_latents=0, stopping="length", dropout_rate=0.0), WORDS)
FORMS = {name for name in vars(xla_cpu) if name.startswith("cpu_")}


def _step(stage):
    """(the step, its arguments); the GRPO step is a Llama's, in bfloat16."""
    params, batch = small_params(), prompted_batch() if stage == "grpo" else batch_of(stage)
    if stage == "grpo":
        params["reasoner"] = random_tree(WORDS)
        loss, trained = rl.make_loss(WRITTEN, OBJECTIVES["grpo"](), rigged_reward, GROUP), ("reasoner",)
    else:
        make, trained = STAGES[stage]
        loss = make()
    return step_of(loss, params, trained, batch, "rl" if stage == "grpo" else stage)


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
        found.append(jax.tree.map(lambda x: np.asarray(x, np.float64), (state.opt_state[0].trace, metrics)))
    for plain, ours in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(plain, ours, rtol=most, atol=most * max(1e-3, np.abs(ours).max()))

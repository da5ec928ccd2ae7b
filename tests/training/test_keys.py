"""Noise keys are used once each, as jax's own checker of keys sees the step."""

import jax
import pytest
from small_steps import GROUP, OBJECTIVE, POLICY, prompted_batch, rigged_reward, small_params

from slpo_jax.training.rl import make_loss


@pytest.mark.slow
def test_a_step_uses_no_key_twice():
    loss = make_loss(POLICY, OBJECTIVE, rigged_reward, GROUP)
    with jax.debug_key_reuse(True):
        gradient = jax.jit(jax.grad(lambda params, key: loss(params, prompted_batch(), key)[0]))
        gradient.lower(small_params(), jax.random.key(0)).compile()


def test_the_checker_sees_a_key_that_is():
    def twice(key):
        return jax.random.normal(key) + jax.random.uniform(key)

    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        jax.jit(twice)(jax.random.key(0))

"""Activations of fewer bits: the same rollouts, of weights that are cast once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import tiny
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.models.reasoner import activation_type
from slpo_jax.policy.rollout import sample
from tiny import FAST, ROLLOUT, both_params, keys_of, policy_of, random_prompts

REASONER = Coconut().on(dataclasses.replace(tiny.CONFIG, dtype=jnp.bfloat16))
UNCAST = dataclasses.replace(REASONER, cast=lambda params: params)
LENGTHS = (4, 7, 2)
BY_LENGTH = dataclasses.replace(ROLLOUT, stopping="length")


def _rollout(reasoner=REASONER):
    """A function that jax has not traced yet."""

    def rolled_out(params, prompts):
        policy = policy_of(BY_LENGTH, reasoner)
        return sample(
            policy, params, prompts, keys_of(len(LENGTHS)), jnp.array([3, 1, 2])
        )

    return rolled_out


def _rolled_out(reasoner=REASONER):
    arguments = both_params(), random_prompts(LENGTHS, max(LENGTHS))
    return (
        jax.jit(_rollout(reasoner))
        .lower(*arguments)
        .compile(compiler_options=FAST)(*arguments)
    )


@pytest.mark.slow
def test_weights_that_are_cast_once_make_the_same_rollouts():
    ours = _rolled_out()
    theirs = _rolled_out(UNCAST)
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_array_equal(
        ours.actions.astype(np.float32), theirs.actions.astype(np.float32)
    )
    assert ours.actions.dtype == jnp.bfloat16
    assert len(np.unique(np.asarray(ours.tokens))) > 2


def _casts(jaxpr, in_loop=False):
    """Shapes of what is made bfloat16 in a loop."""
    for equation in jaxpr.eqns:
        if in_loop and str(equation.params.get("new_dtype")) == "bfloat16":
            yield equation.invars[0].aval.shape
        for inner in jaxprs_in_params(equation.params):
            yield from _casts(inner, in_loop or equation.primitive.name == "while")


def test_no_loop_casts_a_matrix():
    matrices = {
        x.shape for x in jax.tree.leaves(both_params()["reasoner"]) if x.ndim >= 2
    }

    def found(reasoner=REASONER):
        jaxpr = jax.make_jaxpr(_rollout(reasoner))(
            both_params(), random_prompts(LENGTHS, max(LENGTHS))
        )
        return (matrices | {shape[::-1] for shape in matrices}) & set(
            _casts(jaxpr.jaxpr)
        )

    assert not found()
    assert found(UNCAST)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")],
)
def test_accelerators_have_bfloat16_by_default(monkeypatch, backend, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert activation_type("auto") == jnp.dtype(expected)
    assert activation_type("float32") == jnp.float32

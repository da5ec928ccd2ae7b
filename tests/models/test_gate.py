"""The gate's head against numpy, and the first-stop law against its enumeration."""

import itertools

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from slpo_jax.models.gate import first_stop_log_probs, stop_set_loss, stopping_gate
from slpo_jax.models.layers import Dropout, drop
from tiny import compiled

STEPS = 6
WIDTH = 8
logits_lists = hypothesis.extra.numpy.arrays(
    np.float32, STEPS, elements=st.floats(-20, 20, width=32)
)
few = hypothesis.settings(max_examples=60)
law = compiled(first_stop_log_probs, static=("forced",))
loss_and_gradient = compiled(jax.value_and_grad(stop_set_loss))


def _paths(logits, forced: bool) -> np.ndarray:
    """P(tau = t), t = 1..T, by going through every outcome of all T decisions to stop (1) or go on (0)."""
    rho = special.expit(np.asarray(logits, np.float64))
    probs = np.zeros(len(rho))
    for decisions in itertools.product((0, 1), repeat=len(rho)):
        chances = np.where(decisions, rho, 1 - rho)
        probability = np.prod(chances)
        if any(decisions):
            probs[decisions.index(1)] += probability
        elif forced:
            probs[-1] += probability
    return probs


def _hidden(seed=0):
    return jax.random.normal(
        jax.random.key(seed),
        (3, 5, WIDTH),
    )


@pytest.mark.parametrize("size", [0, 4])
def test_head_is_a_linear_map_with_or_without_a_hidden_layer(size):
    gate = stopping_gate(WIDTH, hidden=size)
    params = compiled(gate.init)(jax.random.key(0))
    x = np.asarray(_hidden())
    assert jax.tree.map(jnp.shape, params["out"]) == {
        "kernel": (size or WIDTH, 1),
        "bias": (1,),
    }
    params["out"]["bias"] = jnp.array([0.7])
    if size:
        kernel = np.asarray(params["hidden"]["kernel"])
        bias = np.asarray(params["hidden"]["bias"])
        x = x @ kernel + bias
        angle = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        x = 0.5 * x * (1 + np.tanh(angle))
    kernel = np.asarray(params["out"]["kernel"])[:, 0]
    expected = x @ kernel + 0.7
    found = gate.logits(params, _hidden())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("detached", [True, False])
def test_gradient_reaches_the_latents_only_if_asked(detached):
    gate = stopping_gate(WIDTH, detached=detached)
    params = compiled(gate.init)(jax.random.key(0))

    def total(params, h):
        return gate.logits(params, h).sum()

    to_params, to_latents = jax.grad(total, argnums=(0, 1))(params, _hidden())
    kernel = np.asarray(params["out"]["kernel"])[:, 0]
    expected = np.zeros(WIDTH) if detached else kernel
    expected = np.broadcast_to(expected, to_latents.shape)
    np.testing.assert_allclose(to_latents, expected, rtol=1e-6)
    to_kernel = to_params["out"]["kernel"][:, 0]
    expected = _hidden().sum((0, 1))
    np.testing.assert_allclose(to_kernel, expected, rtol=1e-4, atol=1e-4)


def test_dropout_comes_before_the_linear_map_and_logits_are_float32():
    gate = stopping_gate(WIDTH)
    params = compiled(gate.init)(jax.random.key(0))
    keys = jax.random.split(
        jax.random.key(1),
        (3, 5),
    )
    noise = Dropout(
        keys,
        jnp.ones((3, 5), bool),
        0.5,
    )
    noisy = gate.logits(params, _hidden(), noise)
    expected = gate.logits(params, drop(_hidden(), noise, 0))
    np.testing.assert_allclose(noisy, expected, rtol=1e-6)
    plain = gate.logits(params, _hidden())
    assert np.abs(noisy - plain).max() > 0.01
    rounded = _hidden().astype(jnp.bfloat16)
    assert gate.logits(params, rounded).dtype == jnp.float32


@few
@hypothesis.given(logits_lists, st.booleans())
def test_law_is_the_enumeration_of_all_stop_paths(logits, forced):
    probs = np.exp(law(logits, forced=forced))
    expected = _paths(logits, forced)
    np.testing.assert_allclose(probs, expected, rtol=1e-3, atol=1e-7)


def test_forced_stop_sends_no_gradient_to_the_last_decision():
    logits = jnp.linspace(-1, 1, STEPS)
    gradient = jax.grad(lambda x: first_stop_log_probs(x, True)[-1])(logits)
    np.testing.assert_allclose(
        gradient,
        [*(-special.expit(logits[:-1])), 0],
        rtol=1e-5,
    )
    gradient = jax.grad(lambda x: first_stop_log_probs(x, False)[2])(logits)
    np.testing.assert_allclose(
        gradient,
        [*(-special.expit(logits[:2])), special.expit(-logits[2]), 0, 0, 0],
        atol=1e-6,
    )


@few
@hypothesis.given(logits_lists, st.integers(1, 2**STEPS - 1))
def test_stop_set_loss_by_enumeration(logits, bits):
    in_set = np.array(
        [bits >> t & 1 for t in range(STEPS)],
        bool,
    )
    loss, gradient = loss_and_gradient(logits, in_set)
    rho = np.asarray(logits, np.float64)
    survived = np.cumsum(special.log_expit(-rho))
    before = np.concatenate([[0], survived[:-1]])
    log_probs = before + special.log_expit(rho)
    expected = -special.logsumexp(log_probs[in_set])
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(gradient).all()
    if np.abs(logits).max() < 5:
        probability = _paths(logits, forced=False)[in_set].sum()
        expected = -np.log(probability)
        assert float(loss) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_empty_set_gives_nothing():
    for logits in (
        np.zeros(STEPS, np.float32),
        np.full(STEPS, 80, np.float32),
        np.full(STEPS, -80, np.float32),
    ):
        loss, gradient = loss_and_gradient(logits, np.zeros(STEPS, bool))
        assert loss == 0
        np.testing.assert_array_equal(gradient, np.zeros(STEPS))


def test_large_logits_stay_finite():
    for signs in itertools.product((-80.0, 0.0, 80.0), repeat=3):
        logits = np.array([*signs, *signs], np.float32)
        for forced in (True, False):
            assert np.isfinite(law(logits, forced=forced)).all()
        for in_set in np.eye(STEPS, dtype=bool):
            loss, gradient = loss_and_gradient(logits, in_set)
            assert np.isfinite(loss)
            assert np.isfinite(gradient).all()

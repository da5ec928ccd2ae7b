"""The objective: Props. 1 and 5 of the paper, its terms and its loss by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats

from slpo_jax.models.gate import stop_log_likelihood
from slpo_jax.policy.surrogate import gaussian_log_prob, latent_log_likelihood, moments
from slpo_jax.training.objectives.objective import policy_gradient_loss
from tiny import CONFIG, ROLLOUT, compiled

K, T, D = 3, ROLLOUT.max_latents, CONFIG.n_embd

log_likelihood = compiled(latent_log_likelihood, static=("reduction",))


def _example(seed=0, width=5):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(x, jnp.float32) for x in (rng.normal(size=(T, width)), rng.normal(size=(K, T, width))))


def _toy(theta, t):
    """K samples of a transition as a smooth function of 4 parameters: [K, 5]."""
    grid, noise_K1 = jnp.arange(1.0, 6.0)[None], jnp.array([[0.3], [-0.5], [0.9]])
    return jnp.sin(theta[0] * grid + theta[1] * noise_K1) + theta[2] * t + theta[3] * noise_K1 * grid


@pytest.mark.parametrize("advantage", [0.7, -1.3])
def test_proposition_1_on_a_function(advantage):
    """-A grad log pi~(h) = A / sigma^2 (mu - h)^T grad mu, where the variance is held fixed."""
    theta, h = jnp.array([0.4, -0.2, 0.1, 0.3]), jnp.array([[0.5, -0.1, 0.3, 0.8, -0.6]])

    def loss(theta, detach_variance):
        return -advantage * latent_log_likelihood(h, _toy(theta, 1)[:, None], 1, detach_variance=detach_variance)[0]

    mu, variance = moments(_toy(theta, 1))
    to_mu = compiled(jax.jacobian(lambda theta: _toy(theta, 1).mean(axis=0)))(theta)
    mean_path = advantage / variance * (mu - h[0]) @ to_mu
    gradient = compiled(jax.grad(loss), static=("detach_variance",))
    np.testing.assert_allclose(gradient(theta, detach_variance=True), mean_path, rtol=1e-4, atol=1e-5)

    # With the variance differentiated its path comes on top: d/dv of d/2 log v + |h - mu|^2 / (2 v).
    to_variance = compiled(jax.jacobian(lambda theta: jnp.var(_toy(theta, 1), axis=0).mean()))(theta)
    slope = 5 / (2 * variance) - jnp.sum((h[0] - mu) ** 2) / (2 * variance**2)
    whole = mean_path + advantage * slope * to_variance
    np.testing.assert_allclose(gradient(theta, detach_variance=False), whole, rtol=1e-4, atol=1e-5)
    assert np.abs(whole - mean_path).max() > 0.1


def test_proposition_5_by_numerical_optimisation():
    """sup over mu and sigma^2 >= eps is -d/2 log(2 pi eps), at mu = h and sigma^2 = eps."""
    h, epsilon = np.array([0.3, -1.2, 2.0, 0.7]), 0.05
    density = jax.jit(jax.value_and_grad(lambda x: -gaussian_log_prob(jnp.asarray(h, jnp.float32), x[:-1], x[-1])))
    best = -2 * np.log(2 * np.pi * epsilon)
    for seed in range(3):
        start = np.append(np.random.default_rng(seed).normal(size=4), 1.0)
        bounds = [(None, None)] * 4 + [(epsilon, None)]
        found = optimize.minimize(
            lambda x: [np.asarray(y, np.float64) for y in density(jnp.asarray(x, jnp.float32))],
            start,
            jac=True,
            bounds=bounds,
        )
        np.testing.assert_allclose(found.x, np.append(h, epsilon), atol=2e-3)
        assert -found.fun == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize(("length", "reduction"), [(1, "sum"), (3, "mean"), (T, "sum")])
def test_latent_term_is_the_sum_over_the_steps_taken(length, reduction):
    h, z = _example()
    ours, variance = log_likelihood(h, z, length, epsilon=0.1, reduction=reduction)
    expected, variances = 0.0, []
    for t in range(length):
        sample = np.asarray(z[:, t], np.float64)
        variances.append(np.var(sample, axis=0).mean() + 0.1)
        expected += stats.multivariate_normal(sample.mean(axis=0), variances[-1] * np.eye(5)).logpdf(np.asarray(h[t]))
    np.testing.assert_allclose(ours, expected / (5 if reduction == "mean" else 1), rtol=1e-4)
    np.testing.assert_allclose(variance, np.mean(variances), rtol=1e-5)


def test_realised_latents_are_constants_and_later_samples_do_not_count():
    h, z = _example()
    value = compiled(jax.grad(lambda h, z: latent_log_likelihood(h, z, 2)[0], argnums=(0, 1)))
    to_h, to_z = value(h, z)
    np.testing.assert_array_equal(to_h, jnp.zeros_like(h))
    np.testing.assert_array_equal(to_z[:, 2:], jnp.zeros((K, T - 2, 5)))
    assert (jnp.abs(to_z[:, :2]).max(axis=(0, 2)) > 0.1).all()


def test_stop_term():
    logits = jnp.array([0.5, -1.0, 2.0, -0.3, 0.1])
    rho = special.expit(np.asarray(logits))
    for length in range(1, T + 1):
        probability = np.prod(1 - rho[: length - 1]) * (1 if length == T else rho[length - 1])
        assert stop_log_likelihood(logits, length) == pytest.approx(np.log(probability), rel=1e-4)


def _terms() -> list[jnp.ndarray]:
    return [jnp.array(x) for x in ([1.0, 2, 3, 4], [-1.0, 0, 1, 2], [0.5, 0.5, -1, 1])]


def _loss(terms, advantages, weights=(1.0, 1.0, 1.0)):
    return policy_gradient_loss(list(zip(weights, terms, strict=True)), advantages)


def test_loss_by_hand():
    advantages = jnp.array([[1.0, -1.0], [0.5, -0.5]])
    # (1 - 1 + .5) - (2 + 0 + .5) = -2; .5 (3 + 1 - 1) - .5 (4 + 2 + 1) = -2; -(1/G) of the sum over both prompts.
    assert _loss(_terms(), advantages) == pytest.approx(2.0)
    weights = (0.1, 2.0, 10.0)
    # .1 * (1 - 2) + 2 * (-1 - 0) + 10 * 0 = -2.1; .5 (.1 * -1 + 2 * -1 + 10 * -2) = -11.05
    assert _loss(_terms(), advantages, weights) == pytest.approx(13.15 / 2)
    latent, _, stop = jax.grad(_loss)(_terms(), advantages, weights)
    np.testing.assert_allclose(latent, -0.1 / 2 * advantages.reshape(-1), rtol=1e-6)
    np.testing.assert_allclose(stop, -10 / 2 * advantages.reshape(-1), rtol=1e-6)
    assert policy_gradient_loss([None, (1.0, _terms()[0]), None], advantages) == pytest.approx(0.75)
    assert policy_gradient_loss([(1.0, jnp.arange(6.0))], jnp.ones((3, 2))) == pytest.approx(-15 / 2)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_term_of_weight_zero_is_left_out(place):
    """Its gradient is zero and not even its NaNs come through; the others are what they were."""
    advantages = jnp.array([[1.0, -1.0], [0.5, -0.5]])
    weights, terms = [1.0, 1.0, 1.0], _terms()
    weights[place], terms[place] = 0.0, jnp.full(4, jnp.nan)
    assert np.isfinite(_loss(terms, advantages, weights))
    gradient, whole = jax.grad(_loss)(terms, advantages, weights), jax.grad(_loss)(_terms(), advantages)
    for number, (ours, all_on) in enumerate(zip(gradient, whole, strict=True)):
        np.testing.assert_array_equal(ours, np.zeros(4) if number == place else all_on)

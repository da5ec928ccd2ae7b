"""The objective: Props. 1 and 5 of the paper, its terms and its loss by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats
from tiny import CONFIG, GATE, PAD, ROLLOUT, compiled, keys_of, policy_of, random_gate, random_params, random_prompts

from slpo_jax.checkpoints.architectures.coconut import Coconut
from slpo_jax.policy import noise
from slpo_jax.policy.rollout import Trajectories
from slpo_jax.policy.score import PassKeys, score
from slpo_jax.policy.surrogate import gaussian_log_prob, latent_log_likelihood, moments
from slpo_jax.training.objectives.objective import policy_gradient_loss, stop_log_likelihood

K, T, D = 3, ROLLOUT.max_latents, CONFIG.n_embd
SHALLOW = Coconut().on(dataclasses.replace(CONFIG, n_layer=1))

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


@pytest.mark.slow
def test_proposition_1_through_the_model():
    """The same, from the loss of a trajectory of tau < T latents back to every parameter of GPT-2."""
    rng = np.random.default_rng(0)
    tau, advantage = 3, 0.7
    prompts = random_prompts((4,), 7)
    latents = jnp.asarray(rng.normal(size=(1, T, D)), jnp.float32)
    realised = Trajectories(latents, jnp.array([tau]), jnp.full((1, ROLLOUT.answer_slots), PAD), keys_of(1))
    pass_keys, policy = jax.random.split(jax.random.key(1), K), policy_of(ROLLOUT, SHALLOW)

    def sample(params):  # [K, T, D]
        def one(key):
            keys = noise.row_keys(key, jnp.arange(2))
            return score(policy, {"reasoner": params}, prompts, realised, PassKeys(keys[:1], keys[1:])).actions[0]

        return jax.vmap(one)(pass_keys)  # one layer is enough, and compiles in half the time

    def ours(params):
        return -advantage * latent_log_likelihood(latents[0], sample(params), tau, detach_variance=True)[0]

    def both(params):
        mu, pullback, z = jax.vjp(lambda p: (lambda z: (z.mean(axis=0), z))(sample(p)), params, has_aux=True)
        variance = jnp.var(z, axis=0).mean(axis=-1) + 1e-6
        weight = jnp.where(jnp.arange(T) < tau, advantage / variance, 0)
        return jax.grad(ours)(params), pullback(weight[:, None] * (mu - latents[0]))[0]

    gradient, expected = compiled(both)(random_params())
    gradient, expected = ({k: v for k, v in tree["backbone"].items() if k != "h_1"} for tree in (gradient, expected))
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    assert scale > 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * scale), gradient, expected)


def test_proposition_1_pulls_towards_good_latents_and_away_from_bad_ones():
    h, z = _example()
    gradient = compiled(jax.grad(lambda z, sign: -sign * latent_log_likelihood(h, z, T, detach_variance=True)[0]))
    for sign in (1.0, -1.0):
        step = gradient(z, sign)
        mu = z.mean(axis=0)
        towards = -jnp.sum(step.mean(axis=0) * (h - mu), axis=-1)  # descent of the loss, projected on h - mu
        assert (sign * towards > 0).all()


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


def test_proposition_5_optimum_is_unique_and_lies_on_the_floor():
    h, _ = _example(width=8)
    h, epsilon = h[0], 1e-6
    best = gaussian_log_prob(h, h, jnp.float32(epsilon))
    np.testing.assert_allclose(best, -4 * np.log(2 * np.pi * epsilon), rtol=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(50):
        step = jnp.asarray(10.0 ** rng.uniform(-3, 1) * rng.normal(size=8), jnp.float32)
        variance = jnp.float32(epsilon * 10 ** rng.uniform(0, 4))
        assert gaussian_log_prob(h, h + step, variance) < gaussian_log_prob(h, h, variance) <= best
    below = [gaussian_log_prob(h, h, jnp.float32(epsilon / 10**n)) for n in range(4)]
    assert np.all(np.diff(below) > 9), "without the floor there is no optimum"


@pytest.mark.parametrize("length", [1, 3, T])
def test_latent_term_is_the_sum_over_the_steps_taken(length):
    h, z = _example()
    ours, variance = log_likelihood(h, z, length, epsilon=0.1)
    expected, variances = 0.0, []
    for t in range(length):
        sample = np.asarray(z[:, t], np.float64)
        variances.append(np.var(sample, axis=0).mean() + 0.1)
        expected += stats.multivariate_normal(sample.mean(axis=0), variances[-1] * np.eye(5)).logpdf(np.asarray(h[t]))
    np.testing.assert_allclose(ours, expected, rtol=1e-4)
    np.testing.assert_allclose(variance, np.mean(variances), rtol=1e-5)


def test_mean_over_the_width_is_the_sum_divided():
    h, z = _example()
    total, _ = log_likelihood(h, z, 3)
    mean, _ = log_likelihood(h, z, 3, reduction="mean")
    np.testing.assert_allclose(mean, total / 5, rtol=1e-5)


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


def test_stop_term_reaches_the_gate_alone():
    """The default gate is detached: the gradient of its term is the gate's, by hand, and nobody else's."""
    h, _ = _example(width=D)
    gate = random_gate()

    def stop(gate, h):
        return stop_log_likelihood(GATE.logits(gate, h[None])[0], 3)

    to_gate, to_h = jax.grad(stop, argnums=(0, 1))(gate, h)
    rho = special.expit(np.asarray(GATE.logits(gate, h[None])[0]))
    scores = np.array([-rho[0], -rho[1], 1 - rho[2]])
    np.testing.assert_allclose(to_gate["out"]["kernel"][:, 0], scores @ np.asarray(h[:3]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(to_gate["out"]["bias"][0], scores.sum(), rtol=1e-4)
    np.testing.assert_array_equal(to_h, jnp.zeros_like(h))

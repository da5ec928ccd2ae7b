"""The objectives beside SLPO against loops over prompts and rollouts, gradients against finite differences."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from frozen import ADDITIVE, BATCH, KEY, POLICY, SIGMA, Frozen
from slow_policy import (
    as_float64,
    assert_is_gradient,
    factors_of,
    normal_log_prob,
    spoken,
    teacher_forced,
    think,
)
from slpo_jax.policy.noise import pass_keys
from slpo_jax.policy.rollout import replay
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.objectives.pathwise import pass_at_k_log_prob
from slpo_jax.training.rollouts import roll_out
from small_steps import GROUP, REASONER, ROLLOUT, rigged_reward, small_params
from tiny import USUAL, SlowReasoner, compiled


@pytest.fixture(scope="module")
def frozen():
    """Rollouts whose noise is dropout's."""
    return Frozen(POLICY)


@pytest.fixture(scope="module")
def additive():
    """Rollouts whose noise is the latent policy's own."""
    return Frozen(ADDITIVE)


# pathwise


@pytest.mark.parametrize(
    "probabilities",
    [
        (0.2, 0.7, 0.4),
        (0.5, 0.01, 0.9, 0.1),
        (1e-3, 1e-4, 2e-3, 1e-3),
        (0.9995, 0.3, 0.02),
    ],
)
def test_pass_at_k_is_the_probability_that_one_is_right(probabilities):
    scores = np.log(probabilities)
    value, gradient = jax.value_and_grad(pass_at_k_log_prob)(
        jnp.asarray(scores, jnp.float32)
    )
    assert value == pytest.approx(np.log(1 - np.prod(1 - np.exp(scores))), rel=1e-3)
    for i in range(len(scores)):
        up, down = (
            np.exp(scores + step * (np.arange(len(scores)) == i))
            for step in (1e-5, -1e-5)
        )
        slope = (np.log(1 - np.prod(1 - up)) - np.log(1 - np.prod(1 - down))) / 2e-5
        assert gradient[i] == pytest.approx(slope, rel=2e-3)


@pytest.mark.parametrize("score", [0.0, -1e-8, -1e-5, -200.0])
def test_pass_at_k_is_finite_at_the_ends(score):
    for scores in ([score], [score, -0.5], [score, score, -200.0]):
        value, gradient = jax.value_and_grad(pass_at_k_log_prob)(jnp.array(scores))
        assert -np.inf < value <= 0
        assert ((gradient >= 0) & np.isfinite(gradient)).all()


@pytest.mark.parametrize("far", [-15.9, -16.1, -200.0])
def test_pass_at_k_of_an_answer_that_is_hardly_ever_given_still_has_a_gradient(far):
    """There the probability is the sum of the p_i, and its logarithm's gradient their shares of it."""
    scores = far + np.array([0.0, -1.0, -2.5])
    value, gradient = jax.value_and_grad(pass_at_k_log_prob)(
        jnp.asarray(scores, jnp.float32)
    )
    assert value == pytest.approx(far + np.log(np.exp(scores - far).sum()), rel=1e-5)
    np.testing.assert_allclose(gradient, special.softmax(scores), rtol=1e-4)


def _references():
    return [spoken(row) for row in np.repeat(BATCH.answers, GROUP, axis=0)]


def _slow_pathwise(frozen, estimator, params, added):
    """The loss with every latent made again under `params`; the stop term has the rollout's latents."""
    reasoner = SlowReasoner(params["reasoner"])
    scores = []
    answers = (
        [row.spoken for row in frozen.rollouts]
        if estimator == "reward"
        else _references()
    )
    for row, answer, factors, more in zip(
        frozen.rollouts, answers, frozen.factors, added, strict=True
    ):
        latents = think(reasoner, row, factors, more)
        scores.append(teacher_forced(reasoner, row, latents, answer, factors)[1])
    stop = frozen.weighted(frozen.stops(params))
    if estimator == "reward":
        return frozen.weighted(scores) + stop
    scores = np.array(scores).reshape(-1, GROUP)
    assert (np.exp(scores).sum(axis=1) > 1e-5).all()
    solved = np.log(1 - np.prod(1 - np.exp(scores), axis=1)).mean()
    weight = 1.0 if estimator == "pass_at_k" else 0.3
    return stop - (weight * solved + (1 - weight) * scores.mean())


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["reward", "mixture", "pass_at_k"])
def test_pathwise_gradient_is_the_finite_difference_through_the_rollout(
    frozen, estimator
):
    """Keys, lengths and answers are held fixed, the latents move with the parameters; Pass@k is the mixture's part."""
    loss, gradient, metrics = frozen.loss_and_gradient(
        OBJECTIVES["pathwise"](estimator=estimator, mixture_weight=0.3)
    )

    def value(params):
        return _slow_pathwise(frozen, estimator, params, [0.0] * len(frozen.rollouts))

    assert loss == pytest.approx(value(as_float64(frozen.params)), rel=1e-3)
    assert_is_gradient(gradient, value, frozen.params)
    if estimator != "reward":
        assert 0 < metrics["pass_at_k"] < 1


@pytest.mark.slow
def test_pathwise_on_additive_noise(additive):
    """The noise itself, of each step, is what stays fixed."""
    loss, gradient, _ = additive.loss_and_gradient(
        OBJECTIVES["pathwise"](estimator="reward")
    )
    reasoner = SlowReasoner()
    means = [
        teacher_forced(reasoner, row, row.latents, row.spoken, {})[0]
        for row in additive.rollouts
    ]
    added = [
        row.latents - mean for row, mean in zip(additive.rollouts, means, strict=True)
    ]

    def value(params):
        return _slow_pathwise(additive, "reward", params, added)

    assert loss == pytest.approx(value(as_float64(additive.params)), rel=1e-3)
    assert_is_gradient(gradient, value, additive.params)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [POLICY, ADDITIVE], ids=["dropout", "additive"])
def test_replay_is_the_rollout_to_the_last_bit(policy):
    params = small_params()
    rolled = compiled(
        lambda params: roll_out(policy, params, BATCH, rigged_reward, GROUP, KEY)[0],
        options=USUAL,
    )
    trajectories = rolled(params)
    again = compiled(
        lambda params: replay(policy, params, BATCH.prompts, trajectories).actions,
        options=USUAL,
    )
    np.testing.assert_array_equal(again(params), trajectories.actions)


# answer_only


@pytest.mark.slow
def test_answer_only_is_slpo_s_loss_without_the_latent_term(frozen):
    objective = OBJECTIVES["answer_only"](answer_weight=0.7, stop_weight=1.3)
    loss, gradient, metrics = frozen.loss_and_gradient(objective)
    keys_1 = pass_keys(
        jax.random.fold_in(KEY, 1), jnp.asarray(BATCH.draw_ids), GROUP, 1
    )
    keys = jax.tree.map(lambda x: x.squeeze(0), keys_1)
    factors = factors_of(
        frozen.rollouts, jnp.repeat(keys.prompts, GROUP), keys.trajectories, ROLLOUT
    )

    def value(params):
        reasoner = SlowReasoner(params["reasoner"])
        rows = zip(frozen.rollouts, factors, strict=True)
        answers = [
            teacher_forced(reasoner, row, row.latents, row.spoken, noise)[1]
            for row, noise in rows
        ]
        return frozen.weighted(
            0.7 * np.array(answers) + 1.3 * np.array(frozen.stops(params))
        )

    assert loss == pytest.approx(value(as_float64(frozen.params)), rel=1e-3)
    assert_is_gradient(gradient, value, frozen.params)
    assert set(metrics) == {"answer_log_likelihood", "stop_log_likelihood"}
    assert metrics["stop_log_likelihood"] == pytest.approx(
        np.mean(frozen.stops(as_float64(frozen.params))), rel=1e-4
    )


# exact


@pytest.mark.slow
def test_exact_on_additive_noise_is_reinforce(additive):
    """-1/G sum_i A_i (sum_t log N(h_t; mean of step t, sigma^2) + log pi(answer) + log P(tau)), row by row."""
    objective = OBJECTIVES["exact"](
        latent_weight=0.05, answer_weight=0.8, stop_weight=1.5
    )
    loss, gradient, metrics = additive.loss_and_gradient(objective)
    latent_terms = []

    def value(params):
        reasoner = SlowReasoner(params["reasoner"])
        log_probs = []
        latent_terms.clear()
        for row, stop in zip(additive.rollouts, additive.stops(params), strict=True):
            means, answer = teacher_forced(reasoner, row, row.latents, row.spoken, {})
            latent = sum(
                normal_log_prob(h, mean, SIGMA**2)
                for h, mean in zip(row.latents, means, strict=True)
            )
            latent_terms.append(latent)
            log_probs.append(0.05 * latent + 0.8 * answer + 1.5 * stop)
        return additive.weighted(log_probs)

    assert loss == pytest.approx(value(as_float64(additive.params)), rel=1e-3)
    assert metrics["latent_log_likelihood"] == pytest.approx(
        np.mean(latent_terms), rel=1e-3
    )
    assert_is_gradient(gradient, value, additive.params)


# slpo


@pytest.mark.parametrize("scored", [0, 2])
def test_slpo_scores_the_first_latents(scored):
    """log N(h_t; mu_t, sigma_t^2 I) of K passes, over t up to the last latent or the last that is scored."""
    rng = np.random.default_rng(0)
    most = ROLLOUT.max_latents
    lengths = np.array([1, 2, 3, 5])
    z_KNTD = rng.normal(size=(3, len(lengths), most, REASONER.width)).astype(np.float32)
    h_NTD = rng.normal(size=z_KNTD.shape[1:]).astype(np.float32)
    trajectories = types.SimpleNamespace(actions=h_NTD, lengths=lengths)
    objective = OBJECTIVES["slpo"](scored_latents=scored, epsilon=0.1)
    found, variance = objective._latent_terms(POLICY, {}, trajectories, z_KNTD)
    for n, length in enumerate(lengths):
        steps = range(min(length, scored or most))
        mu = z_KNTD[:, n].mean(axis=0)
        sigma2 = z_KNTD[:, n].var(axis=0).mean(axis=-1) + 0.1
        assert found[n] == pytest.approx(
            sum(normal_log_prob(h_NTD[n, t], mu[t], sigma2[t]) for t in steps), rel=1e-4
        )
        assert variance[n] == pytest.approx(
            np.mean([sigma2[t] for t in steps]), rel=1e-4
        )

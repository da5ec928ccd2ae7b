"""The SLPO step against a loop over prompts, rollouts and passes (paper Prop. 2), and its metrics as they were."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slow_policy
import small_steps
from slow_policy import as_float64, assert_is_gradient, factors_of, normal_log_prob, rollouts_of, teacher_forced
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer
from slpo_jax.training.rl_loss import roll_out
from small_steps import BATCH, GROUP, PASSES, ROLLOUT, difference, prompted_batch, small_params, take_steps
from tiny import SlowReasoner, compiled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def first_step():
    return take_steps("rl", [prompted_batch()])


@pytest.fixture(scope="module")
def step_key():
    """Key 0 of the run, stream 2, step 0."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2), 0)


@pytest.fixture(scope="module")
def frozen(step_key):
    """The trajectories and rewards that the step sees, as constants."""
    policy, reward = small_steps.POLICY, small_steps.rigged_reward
    roll = compiled(lambda params, batch, key: roll_out(policy, params, batch, reward, GROUP, key))
    return roll(small_params(), prompted_batch(), step_key)


def _terms(params, rollout, factors_K):
    """Of one rollout: Gaussian latents, the mean of the passes' answers, a forced stop at T; and the mean variance."""
    reasoner, h = SlowReasoner(params["reasoner"]), rollout.latents
    passes = [teacher_forced(reasoner, rollout, h, rollout.spoken, factors) for factors in factors_K]
    z, answers = (np.stack(parts) for parts in zip(*passes, strict=True))
    mean = z.mean(axis=0)
    variances = ((z - mean) ** 2).sum(axis=(0, 2)) / (PASSES * h.shape[1]) + small_steps.OBJECTIVE.epsilon
    latent = sum(normal_log_prob(*step) for step in zip(h, mean, variances, strict=True))
    stop = slow_policy.stop_log_prob(params["gate"], h, ROLLOUT.max_latents)
    return latent, answers.mean(), stop, variances.mean()


def _slow_loss(params, rollouts, rewards, factors_N):
    """-1/B sum_x 1/G sum_i A_i l~(xi_i | x)."""
    rows = zip(rollouts, slow_policy.leave_one_out(rewards), factors_N, strict=True)
    scored = [a * sum(_terms(params, rollout, factors)[:3]) for rollout, a, factors in rows if a]
    return -sum(scored) / GROUP / BATCH


def _keys_of_pass(pass_key):
    """A prompt's key is number 0 of its example, its trajectories' are 1, 2, ..; both for each row."""
    found = []
    for example in prompted_batch().index:
        of_example = jax.random.fold_in(pass_key, example)
        found += [[jax.random.fold_in(of_example, number) for number in (0, 1 + g)] for g in range(GROUP)]
    return map(jnp.stack, zip(*found, strict=True))


def test_proposition_2_gradient(first_step, frozen, step_key):
    """The step's gradient is that of the empirical surrogate loss on the frozen batch: the rollout adds nothing."""
    trajectories, rewards = frozen
    rollouts = rollouts_of(prompted_batch().prompts, trajectories)
    pass_keys = jax.random.split(jax.random.fold_in(step_key, 1), PASSES)
    factors_K = [factors_of(rollouts, *_keys_of_pass(key), ROLLOUT) for key in pass_keys]
    factors_N = list(zip(*factors_K, strict=True))

    def value(params):
        return _slow_loss(params, rollouts, rewards, factors_N)

    params, metrics = as_float64(small_params()), first_step.metrics[0]
    assert metrics["loss"] == pytest.approx(value(params), rel=1e-3)
    terms = [_terms(params, *row) for row in zip(rollouts, factors_N, strict=True)]
    names = [f"{name}_log_likelihood" for name in ("latent", "answer", "stop")] + ["surrogate_variance"]
    assert [metrics[name] for name in names] == pytest.approx(np.mean(terms, axis=0), rel=2e-4)
    assert_is_gradient(first_step.gradient, value, small_params())
    for part in ("reasoner", "gate"):
        assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(first_step.gradient[part])) > 1e-2


@pytest.mark.parametrize("reference", [small_steps.ALWAYS, small_steps.NEVER])
def test_equal_rewards_change_nothing(reference):
    taken = take_steps("rl", [prompted_batch(references=(reference,) * BATCH)])
    assert taken.metrics[0]["reward"] == (reference == small_steps.ALWAYS)
    assert (taken.metrics[0]["mixed"], taken.metrics[0]["grad_norm"]) == (0, 0)
    assert difference(taken.params, small_params()) == 0
    for name in ("adafactor", "adamw"):  # and the optimizers make nothing of nothing
        params, optimizer = small_params(), make_optimizer(OptimizerConfig(name, learning_rate=0.1))
        update, _ = jax.jit(optimizer.update)(taken.gradient, optimizer.init(params), params)
        assert difference(optax.apply_updates(params, update), params) == 0


def test_metrics_are_what_they_were(first_step):
    """One step's numbers as they came out when the tests above were first true.

    Guards what those leave open: a change of the keys' derivation, of a default, or of the order in which randomness
    is drawn makes other trajectories, and so breaks reproduction of published runs, even where every law still holds.
    """
    recorded = {
        "loss": 5.07574, "reward": 0.5, "solved": 0.75, "mixed": 0.5, "latent_steps": 3.66667, "answer_tokens": 6.0,
        "cut": 1.0, "latent_log_likelihood": -60.0908, "answer_log_likelihood": -19.1902,
        "answer_entropy": 19.1902 / 6.0, "stop_log_likelihood": -0.841495, "surrogate_variance": 0.0971729,
        "grad_norm": 175.472,
    }  # fmt: skip
    # Loose enough for another version of XLA to round in its own way, far tighter than another draw would be.
    assert first_step.metrics[0] == pytest.approx(recorded, rel=5e-3)

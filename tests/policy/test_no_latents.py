"""T = 0, explicit text alone: rollouts, scores, replays and objectives without a single latent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_policy import as_float64, assert_is_gradient, factors_of, leave_one_out, rollouts_of, teacher_forced
from small_steps import GROUP, PROMPTS, ROLLOUT, prompted_batch, rigged_reward, small_params
from tiny import EOS, PAD, REASONER, SlowReasoner, compiled, policy_of

from slpo_jax.policy.answer_score import answer_after_replay
from slpo_jax.policy.rollout import replay
from slpo_jax.policy.score import pass_keys, score
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.rl import make_improvement, roll_out

CONFIG = dataclasses.replace(ROLLOUT, max_latents=0, stopping="length")
POLICY = policy_of(CONFIG)
pytestmark = pytest.mark.slow
KEY = jax.random.key(11)
ANSWERS = [[42, EOS], [EOS], [42, 42, EOS], [17, EOS]]
BATCH = prompted_batch().replace(
    answers=np.array([row + [PAD] * (CONFIG.answer_slots - len(row)) for row in ANSWERS], np.int32)
)


@pytest.fixture(scope="module")
def made():
    """Trajectories and rewards, and log-probabilities of the answers: of a noisy and a clean pass, and replayed."""

    @compiled
    def make(params):
        trajectories, rewards = roll_out(POLICY, params, BATCH, rigged_reward, GROUP, KEY)
        keys = jax.tree.map(lambda x: x.squeeze(0), pass_keys(KEY, jnp.asarray(BATCH.index), GROUP, 1))
        noisy, clean = (score(POLICY, params, BATCH.prompts, trajectories, each) for each in (keys, None))
        replayed = replay(POLICY, params, BATCH.prompts, trajectories)
        again = answer_after_replay(POLICY, params, replayed, trajectories, trajectories.tokens)
        return trajectories, rewards, keys, (noisy, clean, replayed, again)

    return make(small_params())


def test_nothing_is_thought(made):
    trajectories, rewards, _, (noisy, clean, replayed, _) = made
    for actions in (trajectories.actions, noisy.actions, clean.actions, replayed.actions):
        assert actions.shape == (len(PROMPTS) * GROUP, 0, REASONER.width)
    assert noisy.action_log_probs is None
    assert not np.any(trajectories.lengths)
    assert rewards.shape == (len(PROMPTS), GROUP)
    assert len(np.unique(trajectories.tokens, axis=0)) > len(PROMPTS)


def test_answers_have_the_plain_model_s_likelihood(made):
    """Of each pass under its own noise, which is on in the prompt."""
    trajectories, _, keys, (noisy, clean, _, again) = made
    rollouts, slow = rollouts_of(BATCH.prompts, trajectories), SlowReasoner(small_params()["reasoner"])
    own = factors_of(rollouts, trajectories.keys, trajectories.keys, CONFIG)
    of_pass = factors_of(rollouts, jnp.repeat(keys.prompts, GROUP), keys.trajectories, CONFIG)
    none = [{}] * len(rollouts)
    for found, factors in ((clean.answer_log_prob, none), (noisy.answer_log_prob, of_pass), (again, own)):
        for row, of_row, log_prob in zip(rollouts, factors, found, strict=True):
            assert log_prob == pytest.approx(teacher_forced(slow, row, row.latents, row.spoken, of_row)[1], abs=2e-4)
    assert np.abs(noisy.answer_log_prob - clean.answer_log_prob).max() > 0.1


EVERY = {
    "slpo": OBJECTIVES["slpo"](passes=2),
    "answer_only": OBJECTIVES["answer_only"](),
    "pathwise": OBJECTIVES["pathwise"](),
    "pathwise reward": OBJECTIVES["pathwise"](estimator="reward"),
}


@pytest.fixture(scope="module")
def losses(made):
    """Of the rollouts, with their gradients, by objective; and `exact`'s of its own, whose policy has no dropout."""
    clean = policy_of(dataclasses.replace(CONFIG, dropout_rate=0.0), REASONER, "additive")

    def of(params, policy, objective, rolled):
        return jax.value_and_grad(make_improvement(policy, objective), has_aux=True)(params, (BATCH, *rolled), KEY)

    @compiled
    def every(params, rolled):
        found = {name: of(params, POLICY, objective, rolled) for name, objective in EVERY.items()}
        again = roll_out(clean, params, BATCH, rigged_reward, GROUP, KEY)
        found["without dropout"] = of(params, POLICY.having(dropout_rate=0.0), EVERY["answer_only"], rolled)
        return found | {"exact": of(params, clean, OBJECTIVES["exact"](), again)}

    return every(small_params(), made[:2])


@pytest.mark.parametrize("name", [*EVERY, "exact"])
def test_every_objective_trains_the_reasoner(losses, name):
    (loss, metrics), gradient = losses[name]
    assert np.isfinite(loss)
    assert "latent_log_likelihood" not in metrics
    assert "stop_log_likelihood" not in metrics
    assert all(np.isfinite(total / count) for total, count in metrics.values())
    assert float(metrics["latent_steps"][0]) == 0
    sizes = {part: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient[part])) for part in gradient}
    assert np.isfinite(sizes["reasoner"])
    assert sizes["reasoner"] > 0
    assert sizes["gate"] == 0


def test_without_dropout_answer_only_is_reinforce_on_the_answer(made, losses):
    """Without a thought: -1/G sum_i A_i log pi(answer)."""
    trajectories, rewards, _, _ = made
    rollouts, advantages = rollouts_of(BATCH.prompts, trajectories), leave_one_out(rewards)

    def value(params):
        slow = SlowReasoner(params["reasoner"])
        found = [teacher_forced(slow, row, row.latents, row.spoken, {})[1] for row in rollouts]
        return -float(advantages @ np.array(found)) / GROUP

    params = as_float64(small_params())
    (loss, _), gradient = losses["without dropout"]
    assert loss == pytest.approx(value(params), rel=1e-3)
    assert_is_gradient(gradient, value, params)

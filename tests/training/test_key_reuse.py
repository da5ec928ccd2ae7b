"""No random key is used twice, as jax's own checker counts: every stage's step, every objective, and evaluation."""

import dataclasses

import jax
import pytest
from small_steps import GROUP, POLICY, ROLLOUT, STAGES, batch_of, prompted_batch, rigged_reward, small_params
from tiny import CONFIG, END, REASONER, policy_of

from slpo_jax.checkpoints.architectures.colar import Colar
from slpo_jax.policy.rollout import sample
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.rl import make_loss

POLICY = dataclasses.replace(POLICY, capacities=((1.0, 1.0),))  # each is traced, and uses the same keys
ADDITIVE = policy_of(dataclasses.replace(ROLLOUT, latent_policy_noise=True), REASONER, "additive")
GAUSSIAN = Colar(12, 0.4, gaussian=True).on(CONFIG)
COLAR = policy_of(
    dataclasses.replace(ROLLOUT, latent_policy_noise=True, stopping="length"), GAUSSIAN, "colar", end_id=END
)
EVERY = {
    "slpo": (POLICY, OBJECTIVES["slpo"](passes=2)),
    "answer_only": (POLICY, OBJECTIVES["answer_only"]()),
    "pathwise": (POLICY, OBJECTIVES["pathwise"](estimator="reward", temperature=1.0)),
    "exact": (ADDITIVE, OBJECTIVES["exact"]()),
    "slpo, additive": (ADDITIVE, OBJECTIVES["slpo"](passes=2)),
}


@pytest.fixture(autouse=True)
def _checked():
    with jax.debug_key_reuse(True):
        yield


def _traced(function, *arguments):
    """As the checker wants it: inside jit, and anew."""
    jax.eval_shape(jax.jit(lambda *args: function(*args)), *arguments)


def test_the_checker_sees_a_key_that_is_used_twice():
    def twice(key):
        return jax.random.normal(key) + jax.random.uniform(key)

    with pytest.raises(jax.errors.KeyReuseError):
        _traced(twice, jax.random.key(0))


@pytest.mark.parametrize("name", EVERY)
def test_a_step_of_reinforcement_learning(name):
    policy, objective = EVERY[name]
    loss = make_loss(policy, objective, rigged_reward, GROUP)
    _traced(jax.grad(loss, has_aux=True), small_params(), prompted_batch(), jax.random.key(0))


@pytest.mark.parametrize("stage", ["imitate", "cold_start"])
def test_a_step_of_the_other_stages(stage):
    _traced(jax.grad(STAGES[stage][0](), has_aux=True), small_params(), batch_of(stage), jax.random.key(0))


@pytest.mark.parametrize("policy", [POLICY, ADDITIVE, COLAR], ids=["latent", "additive", "colar"])
def test_a_rollout(policy):
    batch = prompted_batch()
    keys = jax.random.split(jax.random.key(0), len(batch.index))
    params = small_params() | {"reasoner": jax.eval_shape(policy.reasoner.init, keys[0])}
    rule = ROLLOUT.max_latents if policy is COLAR else None
    _traced(lambda params, keys: sample(policy, params, batch.prompts, keys, rule), params, keys)

"""The gradient through the latents and the one past them are the pathwise gradient; tables by hand."""

import dataclasses

import jax
import numpy as np
import pytest
from small_steps import GROUP, POLICY, difference, prompted_batch, rigged_reward, small_params
from tiny import compiled

from benchmarks import gradients
from benchmarks.measure.workload import ROOT
from slpo_jax.errors import UserError
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.rl import roll_out


@pytest.mark.slow
def test_both_parts_are_the_pathwise_gradient():
    """Whose own oracle are finite differences through the whole rollout."""
    policy = dataclasses.replace(POLICY, capacities=((1.0, 1.0),))
    batch, pathwise = prompted_batch(), OBJECTIVES["pathwise"](estimator="reward", stop_weight=0.0)

    @compiled
    def both(params):
        trajectories, rewards = roll_out(policy, params, batch, rigged_reward, GROUP, jax.random.key(1))
        drawn = gradients.Drawn(batch, trajectories, rewards, jax.random.key(2))

        def loss(params):
            return pathwise(policy, params, batch, trajectories, rewards, jax.random.key(2))[0]

        through, past = (of(policy, params, drawn) for of in (gradients.through_latents, gradients.past_latents))
        return through, past, jax.grad(loss)(params)

    through, past, whole = (part["reasoner"] for part in both(small_params()))
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(whole))
    total = jax.tree.map(np.add, through, past)
    assert difference(total, whole) < 1e-4 * largest
    for part in (through, past):
        assert difference(part, jax.tree.map(np.zeros_like, part)) > 0.05 * largest


def test_rows_by_hand():
    rows = gradients.compared({
        gradients.EXACT: np.array([[3.0, 0.0], [5.0, 0.0]]),
        "across": np.array([[0.0, 2.0], [0.0, 4.0]]),
        "half": np.array([[1.0, 1.0], [-1.0, 1.0]]),
    })  # fmt: skip
    exact, across, half = rows
    assert exact["norm"] == pytest.approx(np.sqrt(16 - 1))  # a variance of 2, half of which is left in the mean of two
    assert exact["noise"] == pytest.approx(np.sqrt(2 / 15))
    assert (exact["cosine"], exact["cosine_of_means"]) == (1, 1)
    assert (across["cosine"], across["cosine_of_means"]) == (0, 0)
    assert half["cosine"] == pytest.approx(0)
    assert half["cosine_se"] == pytest.approx(np.sqrt(0.5) * np.sqrt(2) / np.sqrt(2))
    assert (half["norm"], half["noise"]) == (0, float("inf"))
    assert half["cosine_if_unbiased"] == 0


def test_cosine_of_an_unbiased_estimator_is_what_its_noise_leaves():
    """Of made-up gradients: a common mean, and independent noise of two sizes."""
    draws, mean = np.random.default_rng(0), np.full(4000, 0.1)
    exact, other = (mean + draws.normal(0, size, (60, 4000)) for size in (0.2, 0.6))
    row = gradients.compared({gradients.EXACT: exact, "other": other})[1]
    assert row["noise"] == pytest.approx(6, rel=0.1)
    assert row["cosine_if_unbiased"] == pytest.approx(1 / np.sqrt(37 * 5), rel=0.1)
    assert row["cosine"] == pytest.approx(row["cosine_if_unbiased"], abs=3 * row["cosine_se"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["nowhere"], "nowhere: no such checkpoint"),
        ([str(ROOT), "--config", "configs/nowhere.py"], "--config: configs/nowhere.py is no file"),
        ([str(ROOT), "--passes", "0"], "--passes, --epsilons"),
        ([str(ROOT), "--epsilons", "-1"], "--passes, --epsilons"),
        ([str(ROOT), "--sigma", "-1"], "--sigma: -1.0"),
        ([str(ROOT), "--batches", "1"], "--batches: 1 is too few"),
    ],
)
def test_flags_that_can_not_be(flags, said):
    with pytest.raises(UserError, match=said):
        gradients.parse(["--config", "configs/twelve.py", *flags])

"""The gradient through the latents and the one past them are the pathwise gradient; tables by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_steps import GROUP, POLICY, difference, prompted_batch, rigged_reward, small_params
from tiny import compiled

from benchmarks import gradients
from benchmarks.measure import fits
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
    along = gradients.Direction(np.array([4.0, 3.0]), 20.0)
    rows = gradients.compared({
        gradients.EXACT: np.array([[3.0, 0.0], [5.0, 0.0]]),
        "across": np.array([[0.0, 2.0], [0.0, 4.0]]),
        "half": np.array([[1.0, 1.0], [-1.0, 1.0]]),
    }, {gradients.EXACT: along})  # fmt: skip
    exact, across, half = rows
    assert exact["norm"] == pytest.approx(np.sqrt(16 - 1))  # a variance of 2, half of which is left in the mean of two
    assert exact["noise"] == pytest.approx(np.sqrt(2 / 15))
    assert exact["cosine"] == 1
    assert exact["cosine_of_means"] == pytest.approx(4 / 5)
    assert (across["cosine"], across["cosine_of_means"]) == (0, pytest.approx(3 / 5))
    assert half["cosine"] == pytest.approx(0)
    assert half["cosine_se"] == pytest.approx(np.sqrt(0.5) * np.sqrt(2) / np.sqrt(2))
    assert (half["norm"], half["noise"]) == (0, float("inf"))
    assert [row["share"] for row in rows] == pytest.approx([16 / 20, 9 / 20, 3 / 20])
    assert half["noise_along"] == pytest.approx(np.std([7, -1], ddof=1) / 20)


def test_a_whole_is_set_beside_the_whole_of_the_reward():
    of_latents, whole = np.array([[1.0, 0.0]] * 3), np.array([[0.0, 2.0]] * 3)
    means = {gradients.EXACT: gradients.direction(of_latents), gradients.WHOLE: gradients.direction(whole)}
    rows = gradients.compared(
        {gradients.EXACT: of_latents, gradients.WHOLE: whole, "Pass@k, the whole": whole, "SLPO, K = 4": whole}, means
    )
    assert [row["cosine"] for row in rows] == [1, 1, 1, 0]
    assert [row["share"] for row in rows] == [1, 1, 1, 0]


def test_share_of_a_biased_estimator():
    """Of made-up gradients, over and over: what is in its mean, whatever noise it shares with the exact one."""
    draws, mean = np.random.default_rng(0), np.full(40, 0.3)
    shares, errors, squares = [], [], []
    for _ in range(200):
        along = gradients.direction(mean + draws.normal(0, 1, (300, 40)))
        exact = mean + draws.normal(0, 1, (30, 40))
        half = 0.5 * mean + 3 * (exact - mean) + draws.normal(0, 2, exact.shape)
        row = gradients.compared({gradients.EXACT: exact, "half": half}, {gradients.EXACT: along})[1]
        shares.append(row["share"])
        errors.append(row["noise_along"] / np.sqrt(30))
        squares.append(along.square)
    assert np.mean(squares) == pytest.approx(mean @ mean, abs=4 * np.std(squares) / np.sqrt(200))
    assert np.mean(shares) == pytest.approx(0.5, abs=4 * np.std(shares) / np.sqrt(200))
    assert np.median(errors) == pytest.approx(np.std(shares), rel=0.25)


def test_no_share_of_a_mean_that_does_not_show():
    found = np.array([[1.0], [-1.0]])
    row = gradients.compared({gradients.EXACT: found}, {gradients.EXACT: gradients.direction(found)})[0]
    assert (row["share"], row["noise_along"]) == (float("inf"), float("inf"))


@pytest.mark.slow
def test_other_gaussians():
    """The paper's own is SLPO's latent term; under its own prompt's masks a first latent is what it was."""
    policy = dataclasses.replace(POLICY, capacities=((1.0, 1.0),))
    batch, short = prompted_batch(), policy.having(max_latents=1)

    @compiled
    def found(params):
        def drawn(policy):
            trajectories, rewards = roll_out(policy, params, batch, rigged_reward, GROUP, jax.random.key(1))
            return gradients.Drawn(batch, trajectories, rewards, jax.random.key(2))

        paper = gradients.surrogate(passes=fits.PASSES, detach_variance=True)
        fresh, own = (fits.fitted(fits.isotropic, own_prompts=own) for own in (False, True))
        return (
            fresh(policy, params, drawn(policy)), paper(policy, params, drawn(policy)),
            fresh(short, params, drawn(short)), own(short, params, drawn(short)),
        )  # fmt: skip

    mine, papers, moved, still = (part["reasoner"] for part in found(small_params()))
    size = {name: max(np.abs(leaf).max() for leaf in jax.tree.leaves(tree)) for name, tree in
            {"paper": papers, "moved": moved, "still": still}.items()}  # fmt: skip
    assert difference(mine, papers) < 1e-4 * size["paper"]
    assert size["moved"] > 1 > size["still"] == 0


def test_fits_by_numpy():
    rng = np.random.default_rng(0)
    passes, rows, steps, width = 4, 50, 3, 5
    residual, z = (
        rng.normal(size=(rows, steps, width)),
        rng.normal(size=(passes, rows, steps, width)) @ np.diag(range(1, 6)),
    )
    spread, fed = z - z.mean(axis=0), rng.random((rows, steps)) < 0.7
    variance = z.var(axis=0, ddof=1)
    found = fits.per_dimension(*map(jnp.float32, (residual, spread)), fed)
    np.testing.assert_allclose(found, -(residual**2 / variance).sum(axis=-1) / 2, rtol=1e-4)

    pooled = np.einsum("kmd,kme->de", spread[:, fed], spread[:, fed]) / ((passes - 1) * fed.sum())
    inverse = np.linalg.inv(pooled)
    whitened = -np.einsum("ntd,de,nte->nt", residual, inverse, residual) / 2
    np.testing.assert_allclose(fits.leading(None)(*map(jnp.float32, (residual, spread)), fed), whitened, rtol=1e-3)
    size, axis = (part[..., -1] for part in np.linalg.eigh(pooled))
    first = fits.leading(1)(*map(jnp.float32, (residual, spread)), fed)
    np.testing.assert_allclose(first, -((residual @ axis) ** 2) / size / 2, rtol=1e-3, atol=1e-6)


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

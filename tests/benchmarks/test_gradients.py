"""The benchmark of the latent term's direction: what goes through latents, at tiny shapes."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import gradients
from slpo_jax.data.problem import Problem, Problems
from slpo_jax.errors import UserError
from small_steps import GROUP, POLICY, prompted_batch, rigged_reward, small_params
from tiny import compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("latents", "rate", "through", "surrogate"),
    [(0, 0.2, False, False), (3, 0.2, True, True), (3, 0.0, True, False)],
)
def test_the_exact_gradient_is_what_goes_through_latents(
    latents, rate, through, surrogate
):
    """Without latents it is nothing, to rounding of what goes past them; without noise the latent term has none."""
    policy = POLICY.with_config(
        stopping="length", dropout_rate=rate, max_latents=latents
    )
    take = compiled(
        functools.partial(gradients.gradients, policy), static=("verifier", "group")
    )
    found = take(small_params(), prompted_batch(), verifier=rigged_reward, group=GROUP,
                 key=jax.random.key(3))  # fmt: skip
    exact, past, latent = map(np.linalg.norm, np.asarray(found))
    assert past > 1e-2
    assert exact > 1e-2 if through else exact < 1e-4
    assert latent > 1e-2 if surrogate else latent < 1e-4


def test_problems_are_taken_by_their_right_answers():
    problems = [
        Problem(str(count), "1", (), columns={"solutions": count})
        for count in (2, 1, 2)
    ]
    encoded = gradients.EncodedProblems(
        Problems(problems),
        [
            [7],
            [8],
            [9],
        ],
        [[], [], []],
        [[1], [2], [3]],
        None,
    )
    assert gradients.with_answers(encoded, 2).prompts == [[7], [9]]
    assert gradients.with_answers(encoded, 0).answers == [
        [1],
        [2],
        [3],
    ]
    with pytest.raises(UserError, match=r"--right: .*5"):
        gradients.with_answers(encoded, 5)


def test_a_direction_is_compared_by_its_cosine():
    assert gradients.cosine(
        np.array([3.0, 4.0]), np.array([4.0, 3.0])
    ) == pytest.approx(0.96)
    assert gradients.cosine(np.zeros(2), np.ones(2)) == 0.0


def _checkpoint(recipe, demos, seed, columns):
    """What a reasoner is loaded as, with all that a row of the table depends on."""
    problem = Problem("1", "1", (), columns=columns)
    problems = gradients.EncodedProblems(Problems([problem]), [[7]], [[]], [[1]], None)
    setup = SimpleNamespace(
        config=SimpleNamespace(
            imitate=SimpleNamespace(recipe=recipe),
            dropout=SimpleNamespace(where="thought"),
        ),
        demos=[None] * demos,
        train=problems,
        tests=("easy", "hard"),
        policy=POLICY,
        reward=SimpleNamespace(on_device=rigged_reward),
        parts=[],
        seed=seed,
    )
    right = {"easy": 0.5, "hard": seed / 10}
    return SimpleNamespace(
        solver=SimpleNamespace(setup=setup),
        params={},
        evaluate=lambda name, samples: SimpleNamespace(summary={"acc": right[name]}),
    )


def _rows(monkeypatch, checkpoints, *flags):
    """The table's rows of these checkpoints, where the noise is the seed and all else is 0."""
    monkeypatch.setattr(gradients.slpo_jax, "load", checkpoints.__getitem__)
    zeros = dict.fromkeys(gradients.FIGURES, 0.0)
    monkeypatch.setattr(
        gradients,
        "measure",
        lambda setup, *_: zeros | {"noise": float(setup.seed)},
    )
    result = gradients.benchmark(gradients.parse([*checkpoints, *flags]))
    columns = result["tables"]["gradients"]["columns"]
    rows = [
        dict(zip(columns, row, strict=True))
        for row in result["tables"]["gradients"]["rows"]
    ]
    assert all(row[""] in gradients.markdown(result) for row in rows)
    return {row[""]: (row["noise"], row["Acc"]) for row in rows}


def test_checkpoints_that_differ_in_their_seed_are_one_row(monkeypatch):
    checkpoints = {
        "a": _checkpoint("simcot", 300, 1, {}),
        "b": _checkpoint("coconut", 300, 3, {}),
        "c": _checkpoint("simcot", 300, 3, {}),
    }
    assert _rows(monkeypatch, checkpoints) == {
        "simcot": ({"value": 2.0, "se": 1.0}, {"value": 35.0, "se": 5.0}),
        "coconut": (3.0, 40.0),
    }


def test_rows_are_named_by_what_they_differ_in(monkeypatch):
    """Where problems say how many right answers they have, by these; at places of dropout that are asked for."""
    one = {"a": _checkpoint("simcot", 2_000, 1, {})}
    names = _rows(monkeypatch, one, "--dropout=thought,latents")
    assert list(names) == ["dropout: thought", "dropout: latents"]
    assert list(_rows(monkeypatch, one)) == [
        "simcot, 2,000 demonstrations, dropout: thought, right answers: any number"
    ]
    says = {"a": _checkpoint("coconut", 300, 1, {"solutions": 2})}
    assert list(_rows(monkeypatch, says, "--right=0,2")) == [
        "right answers: any number",
        "right answers: 2",
    ]
    with pytest.raises(UserError, match="--right: no problem has 1 right answers"):
        _rows(monkeypatch, says)

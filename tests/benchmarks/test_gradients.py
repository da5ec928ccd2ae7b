"""The benchmark of the latent term's direction: what goes through latents, at tiny shapes."""

import functools

import jax
import numpy as np
import pytest

from benchmarks import gradients
from slpo_jax.data.problem import Problem
from slpo_jax.errors import UserError
from small_steps import GROUP, POLICY, prompted_batch, rigged_reward, small_params
from tiny import compiled


@pytest.mark.slow
@pytest.mark.parametrize("latents", [0, 3])
def test_the_exact_gradient_is_what_goes_through_latents(latents):
    """Of a thought without latents it is nothing, to rounding of what goes past them, and the latent term has none."""
    policy = POLICY.with_config(
        stopping="length", dropout_rate=0.2, max_latents=latents
    )
    take = compiled(
        functools.partial(gradients.gradients, policy), static=("verifier", "group")
    )
    exact, latent = map(np.asarray, take(small_params(), prompted_batch(), verifier=rigged_reward, group=GROUP,
                                         key=jax.random.key(3)))  # fmt: skip
    sizes = np.linalg.norm(exact), np.linalg.norm(latent)
    assert (sizes[0] > 1e-2, sizes[1] > 1e-2) == (latents > 0, latents > 0)
    assert latents or max(sizes) < 1e-4


def test_problems_are_taken_by_their_right_answers():
    problems = [
        Problem(str(count), "1", (), columns={"solutions": count})
        for count in (2, 1, 2)
    ]
    encoded = gradients.EncodedProblems(
        tuple(problems),
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

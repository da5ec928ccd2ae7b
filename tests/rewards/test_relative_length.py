"""The price of a thought, against AdaLR's published program."""

import numpy as np
import pytest

from slpo_jax.data.problem import Problem
from slpo_jax.rewards.relative_length import relative_lengths
from slpo_jax.rewards.reward import Reading, Reward

# Of each rollout its latents, and whether it is right; groups of four.
GROUPS = [
    [(6, 1), (6, 1), (3, 1), (1, 1)],
    [(6, 1), (2, 0), (3, 1), (4, 0)],
    [(5, 1)] * 4,
    [(1, 0), (2, 0), (3, 0), (4, 0)],
    [(2, 1), (9, 0), (0, 0), (1, 0)],
    [(0, 1), (6, 1), (5, 1), (2, 0)],
]
# What `RelativeLengthRewarder` of apning/adaptive-latent-reasoning at 4e7d7dd, src/rl/rewards.py, gives for these, by
# relative_length_penalty and relative_length_reward, with relative_length_accuracy_requirement=1, answer_reward=1,
# num_generations=4 and verifiers that read the rows above; its float32 as printed.
PUBLISHED = {
    (1e-4, 0.1): [
        [0.9999600052833557, 0.9999600052833557, 1.0000200271606445, 1.000059962272644],
        [1.0499999523162842, 0.0, 0.949999988079071, 0.0],
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
        [0.9388889074325562, 1.038888931274414, 1.0222222805023193, 0.0],
    ],
    (0.25, 0.5): [
        [0.8999999761581421, 0.8999999761581421, 1.0499999523162842, 1.149999976158142],
        [1.25, 0.0, 0.75, 0.0],
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
        [0.6944444179534912, 1.1944444179534912, 1.1111111640930176, 0.0],
    ],
}
ROWS = [
    (f"problem {number}", latents, bool(right))
    for number, group in enumerate(GROUPS)
    for latents, right in group
]


@pytest.mark.parametrize("settings", PUBLISHED)
def test_it_is_the_published_program_s(settings):
    # A group need not stand together
    order = np.random.default_rng(3).permutation(len(ROWS))
    questions, latents, right = zip(*(ROWS[place] for place in order), strict=True)
    found = np.array(relative_lengths(latents, right, questions, *settings)) + right
    np.testing.assert_allclose(found, np.ravel(PUBLISHED[settings])[order], atol=2e-7)


def test_behind_a_reward_of_right_answers_it_is_the_published_sum():
    """A truncated rollout is not right, so that its group's right ones earn by the bonus."""
    reward = Reward(
        (("correct", 1.0), ("relative_length", 1.0)), "texts", [b"x"], (0,), processes=2
    )
    problems = [
        problem
        for number in range(len(GROUPS))
        for problem in [Problem(f"{number}", (), "yes")] * 4
    ]
    readings = [
        Reading([], "", "yes" if right else "no", cut=False, latents=n)
        for _, n, right in ROWS
    ]
    found = reward.judge(readings, problems)
    np.testing.assert_allclose(found.total, np.ravel(PUBLISHED[1e-4, 0.1]), atol=2e-7)
    assert found.right.tolist() == [right for *_, right in ROWS]
    cut = reward.judge(
        [readings[0]._replace(cut=True, answer=None), *readings[1:4]], problems[:4]
    )
    assert cut.unjudged.tolist() == [True, False, False, False]
    np.testing.assert_allclose(
        cut.total[1:], 1 + 0.1 * (np.array([6, 3, 1]) - 10 / 3) / 5, rtol=1e-6
    )

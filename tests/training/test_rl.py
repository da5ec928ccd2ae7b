"""The step of reinforcement learning: where its rollouts stop, and what it says of them, by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.policy.rollout import Trajectories
from slpo_jax.policy.score import are_truncated
from slpo_jax.rewards.unjudged import Unjudged
from slpo_jax.training import rollouts
from slpo_jax.training.rl_loss import make_rollout_loss
from slpo_jax.training.rollouts import roll_out, rollout_sums
from small_steps import prompted_batch
from tiny import EOS, PAD, ROLLOUT, policy_of

ENDS = (4, 5)
# Answer tokens of three slots, padded with an end token's id, and whether there is no end in them.
ANSWERS = [
    ([0, 1, 4], False),
    ([0, 5, 4], False),
    ([4, 4, 4], False),
    ([0, 1, 0], True),
    ([3, 2, 1], True),
]


@pytest.mark.parametrize(
    ("stopping", "rule"),
    [("sample", None), ("threshold", 0.5), ("length", ROLLOUT.max_latents)],
)
def test_rollouts_stop_by_the_rule(stopping, rule, monkeypatch):
    asked = []
    monkeypatch.setattr(
        rollouts,
        "sample",
        lambda policy, params, prompts, keys_N, rule: asked.append(rule),
    )
    policy = policy_of(dataclasses.replace(ROLLOUT, stopping=stopping))
    assert roll_out(policy, None, prompted_batch(), None, 4, jax.random.key(7)) == (
        None,
        None,
    )
    assert asked == [rule]


@pytest.mark.parametrize("is_written", [False, True])
def test_metrics_by_hand(is_written):
    """Thoughts of 2, 1, 2 and 1 steps, the second of which says eos where it is written; one prompt is solved."""
    policy = policy_of(dataclasses.replace(ROLLOUT, max_latents=2, answer_slots=3))
    tokens = jnp.array([[5, 6, 7], [PAD] * 3, [5, EOS, PAD], [EOS, PAD, PAD]])
    said = jnp.array([[9, 8], [EOS, 0], [9, 8], [9, 0]]) if is_written else None
    made = Trajectories(None, jnp.array([2, 1, 2, 1]), tokens, None, said=said)
    rollout_loss = make_rollout_loss(
        policy,
        lambda *_: (
            jnp.float32(3.0),
            2,
            {"own": (2.0, 8.0), "answer_log_likelihood": (-6.0, 4)},
        ),
    )
    loss, found = rollout_loss(
        {"reasoner": {}},
        (None, made, jnp.array([[0.0, 1.0], [0.0, 0.0]])),
        jax.random.key(0),
    )
    expected = {
        "loss": (3, 2), "reward": (1, 4), "solved": (1, 2), "mixed": (1, 2), "latent_steps": (6, 4), "own": (2, 8),
        # An answer of pads alone was never spoken after a written eos; after a silent thought it is three tokens.
        "answer_tokens": (6 + 3 + 0 + 2 + 1 if is_written else 3 + 3 + 2 + 1, 4),
        "answer_entropy": (6, 3 + 0 + 2 + 1 if is_written else 3 + 3 + 2 + 1),
    }  # fmt: skip
    assert loss == 3
    assert {name: tuple(map(float, found[name])) for name in expected} == expected


def test_solved_is_a_share_whatever_rewards_are():
    """Of problems with a rollout that counts as right, 1 or more as in an evaluation; not the mean of the best."""
    policy = policy_of(dataclasses.replace(ROLLOUT, max_latents=2, answer_slots=3))
    made = Trajectories(None, jnp.ones(8, int), jnp.full((8, 3), EOS), None)
    rewards_BG = jnp.array([[0.5, 0.2], [2.0, -1.0], [1.0, 1.0], [-3.0, 0.0]])
    found = rollout_sums(policy, made, rewards_BG)
    assert [tuple(map(float, found[name])) for name in ("solved", "mixed")] == [
        (2, 4),
        (3, 4),
    ]
    assert float(found["reward"][0]) == pytest.approx(0.7)


def test_what_is_masked_is_in_no_sum():
    policy = policy_of(dataclasses.replace(ROLLOUT, max_latents=2, answer_slots=3))
    made = Trajectories(None, jnp.ones(6, int), jnp.full((6, 3), EOS), None)
    found = rollout_sums(
        policy, made, jnp.array([[1.0, jnp.nan], [jnp.nan, jnp.nan], [0.5, -1.0]])
    )
    sums = {
        name: tuple(map(float, found[name])) for name in ("reward", "solved", "mixed")
    }
    assert sums == {"reward": (0.5, 3), "solved": (1, 3), "mixed": (1, 3)}


@pytest.mark.parametrize(
    ("rule", "earned"),
    [(Unjudged(), 0), (Unjudged("value", -2.0), -2), (Unjudged("masked"), None)],
)
def test_what_a_truncated_rollout_earns_on_the_device(monkeypatch, rule, earned):
    policy = policy_of(dataclasses.replace(ROLLOUT, max_latents=2, answer_slots=3))
    tokens = jnp.array([[1, 2, 3], [EOS, PAD, PAD], [1, EOS, PAD], [3, 2, 1]])
    made = Trajectories(None, jnp.ones(4, int), tokens, None)
    monkeypatch.setattr(rollouts, "sample", lambda *_: made)

    def reward(tokens, references):
        return (tokens == EOS).any(axis=1)

    _, rewards_BG = roll_out(
        policy, None, prompted_batch(), reward, 2, jax.random.key(7), rule
    )
    cut = np.nan if earned is None else earned
    np.testing.assert_array_equal(rewards_BG, [[cut, 1], [1, cut]])


def test_unjudged_ones_earn_the_lowest_of_their_batch_and_never_more_than_0():
    unjudged = jnp.array([True, False, False])
    assert Unjudged().fill(jnp.array([0.0, -3.0, -5.0]), unjudged).tolist() == [
        -5,
        -3,
        -5,
    ]
    assert Unjudged().fill(jnp.array([0.0, 1.0, 1.0]), unjudged).tolist() == [
        0,
        1,
        1,
    ]
    assert Unjudged().fill(jnp.array([0.0, 0.0]), jnp.array([True, True])).tolist() == [
        0,
        0,
    ]


def test_answers_cut_at_the_limit_are_those_without_an_end():
    policy = policy_of(
        dataclasses.replace(ROLLOUT, eos_ids=ENDS, pad_id=ENDS[0], answer_slots=3)
    )
    tokens = jnp.array([row for row, *_ in ANSWERS])
    lengths = jnp.full(len(ANSWERS), 2)
    silent = Trajectories(jnp.zeros((len(ANSWERS), 2, 1)), lengths, tokens, keys=None)
    expected = np.array([row[1] for row in ANSWERS])
    assert are_truncated(policy, silent).tolist() == expected.tolist()
    # A thought whose last word is an end has its end, whatever is in the answer's slots.
    said = jnp.array([[0, 5 if row % 2 else 0] for row in range(len(ANSWERS))])
    written = dataclasses.replace(silent, said=said)
    assert (
        are_truncated(policy, written).tolist()
        == (expected & (np.arange(len(ANSWERS)) % 2 == 0)).tolist()
    )

"""What the stage rl counts of its rollouts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import ROLLOUT, policy_of

from slpo_jax.policy.ending import StopStrings
from slpo_jax.policy.rollout import Trajectories
from slpo_jax.text.stopping import stop_tables
from slpo_jax.training.rl import are_cut

PIECES = [b"a", b"b", b"ab", b"c", b"", b""]
EOS = (4, 5)
# Answer tokens of three slots, padded with an end token's id, and whether there is no end in them: with end tokens
# alone, and with the stop string "bc".
ANSWERS = [
    ([0, 1, 4], False, False), ([0, 5, 4], False, False), ([4, 4, 4], False, False), ([0, 1, 0], True, True),
    ([1, 3, 0], True, False), ([0, 2, 3], True, False), ([3, 1, 0], True, True),
]  # fmt: skip


@pytest.mark.parametrize("stop", [(), ("bc",)])
def test_answers_cut_at_the_limit_are_those_without_an_end(stop):
    stops = StopStrings(**stop_tables(stop, PIECES)[0]) if stop else None
    policy = policy_of(dataclasses.replace(ROLLOUT, eos_ids=EOS, pad_id=EOS[0], answer_slots=3, stops=stops))
    tokens = jnp.array([row for row, *_ in ANSWERS])
    lengths = jnp.full(len(ANSWERS), 2)
    silent = Trajectories(jnp.zeros((len(ANSWERS), 2, 1)), lengths, tokens, keys=None)
    expected = np.array([row[1 + bool(stop)] for row in ANSWERS])
    assert are_cut(policy, silent).tolist() == expected.tolist()
    # A thought whose last word is an end has its end, whatever is in the answer's slots.
    said = jnp.array([[0, 5 if row % 2 else 0] for row in range(len(ANSWERS))])
    written = dataclasses.replace(silent, said=said)
    assert are_cut(policy, written).tolist() == (expected & (np.arange(len(ANSWERS)) % 2 == 0)).tolist()

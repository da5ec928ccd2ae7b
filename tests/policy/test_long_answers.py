"""Answers that end at any of several tokens, in a cache that grows, and are scored in tiles."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.models import likelihood
from slpo_jax.policy import decoding
from slpo_jax.policy.decoding import cache_sizes
from slpo_jax.policy.rollout import sample
from slpo_jax.policy.score import score
from tiny import (
    EOS,
    PAD,
    ROLLOUT,
    SlowReasoner,
    both_params,
    compiled,
    keys_of,
    padded,
    policy_of,
    random_prompts,
)

PROMPTS = random_prompts((3, 7, 5, 2, 6, 4, 1, 8), 8)
SLOTS = 20
EOS_IDS = (PAD, EOS)


def _policy(**changes):
    settings = {
        "closing_ids": (),
        "max_latents": 0,
        "stopping": "length",
        "answer_slots": SLOTS,
        "eos_ids": EOS_IDS,
    }
    config = dataclasses.replace(ROLLOUT, dropout_rate=0.0, **settings | changes)
    return dataclasses.replace(policy_of(config), layout="rows")


@pytest.fixture(scope="module")
def made():
    """Greedy answers with caches of 4, 8 and 20 slots, and their scores, in tiles of logits."""
    policy = _policy()

    @compiled
    def make(params):
        out = sample(
            policy,
            params,
            PROMPTS,
            keys_of(8),
            jnp.zeros(8, jnp.int32),
        )
        return out.tokens, score(policy, params, PROMPTS, out, None).answer_log_prob

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "FIRST_SLOTS", 4)
        for name, size in {
            "WHOLE": 0,
            "ROWS": 64,
            "COLUMNS": 16,
            "EVEN_COLUMNS": 1,
        }.items():
            patch.setattr(likelihood, name, size)
        assert cache_sizes(SLOTS) == [4, 8, 20]
        return make(both_params())


@pytest.mark.slow
def test_answers_and_scores_are_the_slow_loop_s(made):
    slow = SlowReasoner()
    lengths = set()
    last = set()
    for row, (answer, log_prob) in enumerate(zip(*map(np.asarray, made), strict=True)):
        before = slow.prompt(PROMPTS, row)
        tokens = slow.says(before, SLOTS, EOS_IDS)
        assert answer.tolist() == padded(tokens, SLOTS)
        assert log_prob == pytest.approx(slow.log_probs(before, tokens).sum(), rel=1e-4)
        lengths.add(len(tokens))
        last.add(tokens[-1])
    # Within each size of the cache, and over the budget.
    assert {*lengths} >= {1, 4, SLOTS}
    assert EOS in last
    assert len(last) > 2


def test_cache_sizes():
    sizes = (
        [1],
        [64],
        [95],
        [64, 96],
        [64, 191],
        [64, 128, 192],
        [64, 128, 256, 700],
        [64, 128, 256, 512, 1024, 2048],
    )
    assert [cache_sizes(each[-1]) for each in sizes] == [*sizes]

"""Answers that end at any of several tokens or at a text, in a cache that grows, and are scored in pieces."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from tiny import (
    CONFIG,
    EOS,
    PAD,
    REASONER,
    ROLLOUT,
    SlowReasoner,
    both_params,
    compiled,
    keys_of,
    policy_of,
    random_prompts,
    real_tokens,
)

from slpo_jax.policy import answer_score as scoring
from slpo_jax.policy import decoding
from slpo_jax.policy.answer_score import answer_log_probs
from slpo_jax.policy.decoding import cache_sizes
from slpo_jax.policy.rollout import sample
from slpo_jax.policy.score import score
from slpo_jax.rewards.ending import StopStrings
from slpo_jax.rewards.stopping import stop_tables

PROMPTS = random_prompts((3, 7, 5, 2, 6, 4, 1, 8), 8)
SLOTS, EOS_IDS = 20, (PAD, EOS)
PIECES = [bytes([97 + token % 3, 97 + token % 7]) for token in range(EOS)] + [b"", b""]
STOP = ("ccb", "fa")


def _policy(stop=STOP, **changes):
    stops = StopStrings(**stop_tables(stop, PIECES)[0]) if stop else None
    settings = {"end_id": None, "max_latents": 0, "stopping": "length", "answer_slots": SLOTS, "eos_ids": EOS_IDS}
    config = dataclasses.replace(ROLLOUT, dropout_rate=0.0, stops=stops, **settings | changes)
    return dataclasses.replace(policy_of(config), layout="rows")


@pytest.fixture(scope="module")
def made():
    """Greedy answers with caches of 4, 8 and 20 slots, and their scores, 5 tokens at a time."""
    policy = _policy()

    @compiled
    def make(params):
        out = sample(policy, params, PROMPTS, keys_of(8), jnp.zeros(8, jnp.int32))
        return out.tokens, score(policy, params, PROMPTS, out, None).answer_log_prob

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "FIRST_SLOTS", 4)
        patch.setattr(scoring, "LOGITS_OF_A_ROW", 0)
        patch.setattr(scoring, "LOGITS_AT_ONCE", 5 * CONFIG.vocab_size + 1)
        assert cache_sizes(SLOTS) == [4, 8, 20]
        return make(both_params())


def _slow(row: int):
    """The answer of one row and its log-probability, by whole passes over ever longer rows."""
    slow, prompt, tokens = SlowReasoner(both_params()["reasoner"]), real_tokens(PROMPTS, row), []
    total, text = 0.0, ""
    while len(tokens) < SLOTS and not (tokens and tokens[-1] in EOS_IDS) and not any(each in text for each in STOP):
        logits = slow.logits(slow.hidden(slow.embed([*prompt, *tokens]))[-1:])[0]
        tokens.append(int(logits.argmax()))
        total += special.log_softmax(logits)[tokens[-1]]
        text += PIECES[tokens[-1]].decode()
    return tokens, total


def test_answers_and_scores_are_the_slow_loop_s(made):
    lengths, last = set(), set()
    for row, (answer, log_prob) in enumerate(zip(*map(np.asarray, made), strict=True)):
        tokens, expected = _slow(row)
        assert answer.tolist() == tokens + [PAD] * (SLOTS - len(tokens))
        assert log_prob == pytest.approx(expected, rel=1e-4)
        lengths.add(len(tokens))
        last.add(tokens[-1])
    # Within each size of the cache, over the budget, ended by a token and by a text.
    assert {*lengths} >= {1, 4, 12, SLOTS}
    assert EOS in last
    assert len(last) > 2


def test_cache_sizes():
    found = {budget: cache_sizes(budget) for budget in (1, 64, 95, 96, 191, 192, 700, 2048)}
    assert found == {
        1: [1],
        64: [64],
        95: [95],
        96: [64, 96],
        191: [64, 191],
        192: [64, 128, 192],
        700: [64, 128, 256, 700],
        2048: [64, 128, 256, 512, 1024, 2048],
    }


def test_pieces_have_the_gradient_of_the_whole(monkeypatch):
    """Of 2 x 7 tokens, 4 at a time; the values are scipy's."""
    rng, reasoner = np.random.default_rng(0), both_params()["reasoner"]
    hidden, tokens = rng.normal(size=(2, 7, CONFIG.n_embd)), rng.integers(0, CONFIG.vocab_size, (2, 7))
    weights = jnp.asarray(rng.normal(size=(2, 7)), jnp.float32)

    def weighted(params, hidden):
        log_probs = answer_log_probs(REASONER, params, hidden, jnp.asarray(tokens))
        return jnp.sum(weights * log_probs), log_probs

    def measured():
        gradient = jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)
        program = jax.jit(lambda *args: gradient(*args)).lower(reasoner, jnp.asarray(hidden, jnp.float32))
        ((_, log_probs), gradients) = program.compile()(reasoner, jnp.asarray(hidden, jnp.float32))
        return program.as_text(), log_probs, gradients

    whole, expected, gradients = measured()
    monkeypatch.setattr(scoring, "LOGITS_OF_A_ROW", 7 * CONFIG.vocab_size - 1)
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 5 * CONFIG.vocab_size)
    monkeypatch.setattr(scoring, "ALIGNED", 2)
    pieces, found, ours = measured()
    assert "tensor<2x7x61xf32>" in whole
    assert "x7x61x" not in pieces
    assert re.search(r"tensor<(1x)?4x61xf32>", pieces)
    assert not re.search(r"tensor<4x(1x)?4x61xf32>", pieces), "no piece's logits are kept for the backward pass"
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 100 * CONFIG.vocab_size)
    one_piece, alike, _ = measured()
    assert "14x61xf32" in one_piece
    assert "100x61xf32" not in one_piece, "nothing is padded to what would fit"
    np.testing.assert_allclose(alike, found, atol=1e-5)
    logits = SlowReasoner(reasoner).logits(hidden)
    oracle = np.take_along_axis(special.log_softmax(logits, axis=-1), tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found, oracle, rtol=1e-5)
    np.testing.assert_allclose(expected, oracle, rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (ours, gradients)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert float(jnp.abs(gradients[1]).max()) > 0.1

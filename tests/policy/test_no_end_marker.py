"""Thoughts that go over into the answer without a marker, and trajectories scored in a row each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from slpo_jax.policy.answer_score import answer_after_replay
from slpo_jax.policy.rollout import replay, sample
from slpo_jax.policy.score import pass_keys, score
from tiny import (
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

LENGTHS, GROUP = (3, 7), 2
PROMPTS = random_prompts(LENGTHS, 8)
THOUGHTS = jnp.array([3, 1, 2, 3])
NOISE = jax.tree.map(lambda x: x.squeeze(0), pass_keys(jax.random.key(5), jnp.arange(2), GROUP, 1))


def _policy(latents: int, dropout=0.0, temperature=0.0, layout="packed"):
    config = dataclasses.replace(
        ROLLOUT, closing_ids=(), max_latents=latents, stopping="length", dropout_rate=dropout, temperature=temperature
    )
    return dataclasses.replace(policy_of(config), layout=layout)


@pytest.fixture(scope="module", params=[pytest.param(0, marks=pytest.mark.slow), 3], ids=["no latents", "latents"])
def made(request):
    """Greedy rollouts without noise, their scores and those of sampled ones under noise, in both layouts."""

    @compiled
    def make(params):
        lengths_N, out = THOUGHTS * (request.param > 0), {}
        clean = _policy(request.param)
        greedy = sample(clean, params, PROMPTS, keys_of(4), lengths_N)
        replayed = replay(clean, params, PROMPTS, greedy)
        again = answer_after_replay(clean, params, replayed, greedy, greedy.tokens)
        drawn = sample(_policy(request.param, 0.2, 1.0), params, PROMPTS, keys_of(4, 1), lengths_N)
        for layout in ("packed", "rows"):
            noisy = _policy(request.param, 0.2, 1.0, layout)

            def total(params, noisy=noisy):
                scores = score(noisy, params, PROMPTS, drawn, NOISE)
                return scores.answer_log_prob.sum() + (scores.actions**2).sum(), scores

            out[layout] = score(noisy, params, PROMPTS, greedy, None), jax.grad(total, has_aux=True)(params)
        return greedy, drawn, again, out

    return request.param, *make(both_params())


def _oracle(latents: int, row: int):
    """Slow reasoner, and the inputs before the answer of a row's prompt and noiseless thought."""
    slow, prompt = SlowReasoner(both_params()["reasoner"]), real_tokens(PROMPTS, row // GROUP)
    length = int(THOUGHTS[row]) if latents else 0
    return slow, np.concatenate([slow.embed(prompt), slow.think(prompt, length)])


def test_greedy_answers_are_the_slow_loop_s(made):
    """The first token comes out of the last position of thought."""
    latents, greedy, *_ = made
    answers = np.asarray(greedy.tokens).tolist()
    assert len({tuple(answer) for answer in answers}) > 1
    for row, answer in enumerate(answers):
        (slow, before), tokens = _oracle(latents, row), []
        while len(tokens) < ROLLOUT.answer_slots and EOS not in tokens:
            inputs = np.concatenate([before, slow.embed(tokens)]) if tokens else before
            tokens.append(int(slow.logits(slow.hidden(inputs)[-1:]).argmax()))
        assert answer == tokens + [PAD] * (ROLLOUT.answer_slots - len(tokens))


def test_scores_and_replays_are_the_slow_loop_s(made):
    latents, greedy, _, again, out = made
    for row, answer in enumerate(np.asarray(greedy.tokens).tolist()):
        slow, before = _oracle(latents, row)
        tokens = answer[: answer.index(EOS) + 1] if EOS in answer else answer
        hidden = slow.hidden(np.concatenate([before, slow.embed(tokens)]))[len(before) - 1 : -1]
        expected = special.log_softmax(slow.logits(hidden), axis=-1)[np.arange(len(tokens)), tokens].sum()
        for found in (again, out["packed"][0].answer_log_prob, out["rows"][0].answer_log_prob):
            assert float(found[row]) == pytest.approx(expected, rel=1e-4)


def test_a_row_each_is_all_in_one_row(made):
    """Under noise: what is drawn, what is said and every gradient."""
    latents, _, drawn, _, out = made
    assert len(np.unique(drawn.tokens, axis=0)) == 4
    (_, (gradient, scores)), (_, (expected, theirs)) = out["rows"], out["packed"]
    np.testing.assert_allclose(scores.answer_log_prob, theirs.answer_log_prob, rtol=1e-5)
    used = np.arange(1, latents + 1)[None] <= np.asarray(drawn.lengths)[:, None]
    np.testing.assert_allclose(scores.actions[used], theirs.actions[used], atol=1e-5)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected["reasoner"]))
    for ours, each in zip(*map(jax.tree.leaves, (gradient["reasoner"], expected["reasoner"])), strict=True):
        np.testing.assert_allclose(ours, each, atol=1e-5 * largest)
    assert largest > 0.1
    assert REASONER.width == scores.actions.shape[-1]

"""Markers of several tokens or none between thought and answer, and thoughts that end before a step that is not fed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from slpo_jax.policy.noise import PassKeys
from slpo_jax.policy.rollout import replay, sample
from slpo_jax.policy.score import answer_after_replay, score
from tiny import (
    ROLLOUT,
    SlowReasoner,
    assert_close,
    both_params,
    compiled,
    keys_of,
    padded,
)

LENGTHS = (3, 7, 5, 4, 6, 2, 5, 3)
PROMPTS = tiny.random_prompts(LENGTHS, 8)
KEYS = keys_of(len(LENGTHS), 1)
MARKERS = {
    "none": (),
    "one": (58,),
    "three": (11, 12, 58),
}


def _plain(marker, **changes):
    """COCONUT's latents."""
    changes = {"stopping": "length", "dropout_rate": 0.2} | changes
    return tiny.policy_of(dataclasses.replace(ROLLOUT, closing_ids=marker, **changes))


def _halts(logits):
    """At which hidden states a thought is over."""
    return logits.argmax(-1) % 3 == 0


def _halting(marker, least=0):
    """COCONUT's latents, of which one whose hidden state `_halts` says to is dropped."""
    policy = _plain(marker)
    latent_policy = policy.latent_policy
    reasoner = policy.reasoner

    def draw(params, hidden_BLD, keys_BL=None):
        over_BL = _halts(reasoner.logits(params, hidden_BLD))
        return {"of": latent_policy.draw(params, hidden_BLD, keys_BL), "over": over_BL}

    halting = dataclasses.replace(
        latent_policy, draw=draw, feed=lambda params, action: action["of"], least=least,
        stop_logits=lambda params, action, dropout=None: latent_policy.stop_logits(params, action["of"], dropout),
        halts=lambda params, action: action["over"],
    )  # fmt: skip
    return dataclasses.replace(policy, latent_policy=halting)


def _slow(row: int, marker, least: int, config):
    """A row's latents, answer and its log-probability, by full forwards; noise is on prompt and all latents."""
    slow = SlowReasoner()
    prompt = tiny.real_tokens(PROMPTS, row)
    latents = []

    def thought():
        everywhere = dataclasses.replace(config, dropout_where="all", answer_slots=8)
        factors = tiny.slow_factors(
            KEYS[row], KEYS[row], len(prompt), len(latents), everywhere
        )
        quiet = np.arange(len(prompt) + len(latents) + 8)[:, None] >= len(prompt) + len(
            latents
        )
        slow.factors = {
            site: np.where(quiet, 1, each) for site, each in factors.items()
        }
        return np.concatenate(
            [slow.embed(prompt), *(latent[None] for latent in latents)]
        )

    while len(latents) < config.max_latents:
        last = slow.hidden(thought())[-1]
        if len(latents) >= least and _halts(slow.logits(last[None]))[0]:
            break
        latents.append(last)
    before = np.concatenate([thought(), slow.embed(marker)])
    tokens = slow.says(before)
    return latents, tokens, slow.log_probs(before, tokens).sum()


@pytest.mark.slow
@pytest.mark.parametrize("least", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("marker", MARKERS)
def test_rollouts_replays_and_scores_are_the_slow_loop_s(marker, least):
    """Packed or in a row each, under the rollout's own noise, which the last latent has too."""
    marker = MARKERS[marker]
    policy = _halting(marker, least)

    @compiled
    def make(params):
        made = sample(
            policy, params, PROMPTS, KEYS, jnp.full(len(LENGTHS), ROLLOUT.max_latents)
        )
        again = replay(policy, params, PROMPTS, made)
        found = [answer_after_replay(policy, params, again, made, made.tokens)]
        for layout in ("packed", "rows"):
            laid_out = dataclasses.replace(policy, layout=layout)
            scores = score(laid_out, params, PROMPTS, made, PassKeys(KEYS, KEYS))
            found.append(scores.answer_log_prob)
        return made, again.actions["of"], scores, found

    made, again, scores, found = make(both_params())
    lengths = np.asarray(made.lengths)
    T = ROLLOUT.max_latents
    assert {least, T} <= set(lengths.tolist())
    for row in range(len(LENGTHS)):
        latents, tokens, total = _slow(row, marker, least, policy.config)
        assert lengths[row] == len(latents)
        assert np.asarray(made.tokens[row]).tolist() == padded(tokens)
        for actions in (made.actions["of"], again, scores.actions["of"]):
            np.testing.assert_allclose(
                actions[row, : len(latents)], np.reshape(latents, (-1, 16)), atol=2e-4
            )
        assert [float(each[row]) for each in found] == pytest.approx(
            [total] * 3, rel=1e-4
        )


@pytest.mark.slow
def test_a_row_each_is_all_in_one_row():
    """Without a marker and under noise: what is drawn, what is said and every gradient."""
    policy = _plain((), max_latents=3, temperature=1.0)
    thoughts = np.array([3, 1, 2, 3])
    prompts = tiny.take_rows(PROMPTS, [0, 1])
    noise = PassKeys(keys_of(2, 2), keys_of(4, 3))

    @compiled
    def make(params):
        drawn = sample(policy, params, prompts, keys_of(4, 1), thoughts)

        def total(params, layout):
            scores = score(
                dataclasses.replace(policy, layout=layout),
                params,
                prompts,
                drawn,
                noise,
            )
            actions = jnp.where(
                (np.arange(3) < thoughts[:, None])[..., None], scores.actions, 0
            )
            return scores.answer_log_prob.sum() + (actions**2).sum(), (
                scores.answer_log_prob,
                actions,
            )

        return drawn.tokens, [
            jax.grad(total, has_aux=True)(params, layout)
            for layout in ("packed", "rows")
        ]

    tokens, ((expected, theirs), (gradient, scores)) = make(both_params())
    assert len(np.unique(tokens, axis=0)) == 4
    assert_close(scores, theirs, rtol=1e-5, atol=1e-5)
    largest = max(
        float(jnp.abs(x).max()) for x in jax.tree.leaves(expected["reasoner"])
    )
    assert_close(
        gradient["reasoner"],
        expected["reasoner"],
        atol=1e-5 * largest,
    )
    assert largest > 0.1

"""Beam search over latents: one beam of one candidate is a plain rollout; otherwise a slow search of one prompt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from slpo_jax.policy import noise
from slpo_jax.policy.rollout import Trajectories, sample
from slpo_jax.policy.scorers import beam_search, init_reward_model, latent_scores
from tiny import (
    CONFIG,
    ROLLOUT,
    both_params,
    compiled,
    policy_of,
    random_params,
    random_prompts,
    take_rows,
)

T = ROLLOUT.max_latents
KEY = jax.random.key(3)
LENGTHS = (4, 7, 3, 5, 6, 2)
INDEX = jnp.arange(len(LENGTHS))
BY_THRESHOLD = dataclasses.replace(ROLLOUT, stopping="threshold", dropout_rate=0.3)
BY_LENGTH = dataclasses.replace(BY_THRESHOLD, stopping="length")


@pytest.fixture(scope="module")
def params():
    kernel = np.random.default_rng(1).normal(size=(CONFIG.n_embd, 1)).astype(np.float32)
    model = init_reward_model({"reasoner": random_params(9)}, CONFIG.n_embd)
    return both_params() | {
        "latent_rm": model
        | {"classifier": {"kernel": kernel, "bias": np.zeros(1, np.float32)}}
    }


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS, 7)


def searched(params, prompts, config, rule, beams, candidates):
    def search(params):
        return beam_search(
            policy_of(config), params, prompts, KEY, INDEX, rule, beams, candidates
        )

    return compiled(search)(params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "rule"),
    [(BY_THRESHOLD, 0.6), pytest.param(BY_LENGTH, 3, marks=pytest.mark.slow)],
)
def test_one_beam_of_one_candidate_is_a_plain_rollout(params, prompts, config, rule):
    rule = jnp.full(len(LENGTHS), rule)
    found = searched(params, prompts, config, rule, 1, 1)
    keys = noise.row_keys(KEY, INDEX, jnp.zeros_like(INDEX))
    plain = compiled(
        lambda params: sample(policy_of(config), params, prompts, keys, rule)
    )(params)
    assert found.lengths.tolist() == plain.lengths.tolist()
    assert found.tokens.tolist() == plain.tokens.tolist()
    np.testing.assert_allclose(found.actions, plain.actions, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "rule"),
    [(BY_THRESHOLD, 0.55), pytest.param(BY_LENGTH, 3, marks=pytest.mark.slow)],
)
def test_a_search_is_the_slow_one_s(params, prompts, config, rule):
    """One prompt at a time: every candidate for each beam's next latent, of these the best by the sum so far.

    A thought that has ended is one candidate and not several; under a gate it keeps its last score.
    """
    beams = 3
    candidates = 2
    rows = len(LENGTHS)
    steps = 4
    config = dataclasses.replace(config, max_latents=steps)
    width = beams * candidates
    found = searched(
        params,
        prompts,
        config,
        jnp.full(rows, rule),
        beams,
        candidates,
    )
    fixed = policy_of(dataclasses.replace(config, stopping="length"))
    gate = params["gate"]["out"]
    roll_out = compiled(
        lambda params, prompt, keys, until, prefix: (
            sample(fixed, params, prompt, keys, until, given=prefix).actions
        )
    )
    score = compiled(
        lambda params, prompt, *of: latent_scores(
            fixed, params["latent_rm"], prompt, *of
        )
    )
    by_gate = config.stopping == "threshold"
    repeated = 0
    for row in range(rows):
        prompt = take_rows(prompts, [row])
        keys = noise.row_keys(
            KEY,
            jnp.full(width, row),
            jnp.arange(width),
        )
        h = np.zeros((width, steps, CONFIG.n_embd), np.float32)
        lengths = np.zeros(width, int)
        ended = lengths > 0
        for step in range(1, steps + 1):
            begun = np.where(ended, lengths, step - 1)
            lengths = np.where(ended, lengths, step)
            h = np.asarray(
                roll_out(
                    params,
                    prompt,
                    keys,
                    lengths,
                    Trajectories(h, begun, tokens=None, keys=None),
                )
            )
            until = step if by_gate else min(step, rule)
            total = np.asarray(score(params, prompt, h, lengths))[:, :until].sum(axis=1)
            once = [n for n in range(width) if not ended[n] or n % candidates == 0]
            repeated += len(once) < width
            best = sorted(
                once,
                key=lambda n, total=total: -total[n],
            )[:beams]
            gates = special.expit(h[:, step - 1] @ gate["kernel"][:, 0] + gate["bias"])
            ended = ended | ((gates if by_gate else step) >= rule)
            h, lengths, ended = (
                np.repeat(x[best], candidates, axis=0) for x in (h, lengths, ended)
            )
        assert found.lengths[row] == lengths[0]
        np.testing.assert_allclose(
            found.actions[row, : lengths[0]], h[0, : lengths[0]], atol=1e-5
        )
    assert repeated

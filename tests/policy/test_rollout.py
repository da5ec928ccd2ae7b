"""Rollouts against a slow loop on a plain GPT-2, their independence of padding, replays, candidates and stops."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import tiny
from slpo_jax.policy import noise
from slpo_jax.policy.explain import NEAREST, probe
from slpo_jax.policy.rollout import sample
from slpo_jax.training.gate_training import decode_candidates
from tiny import (
    EOS,
    ROLLOUT,
    SlowReasoner,
    keys_of,
    padded,
    random_prompts,
    real_tokens,
    run_rollout,
    take_rows,
)

LENGTHS = (4, 7, 2, 6, 3, 7)  # of the prompts
THOUGHTS = np.array([1, 5, 3, 2, 4, 5], np.int32)
ROWS = len(LENGTHS)
SLOTS = max(LENGTHS)
T = ROLLOUT.max_latents
BY_LENGTH = dataclasses.replace(ROLLOUT, stopping="length")
BY_THRESHOLD = dataclasses.replace(ROLLOUT, stopping="threshold")


@pytest.fixture(scope="module")
def params():
    return tiny.both_params()


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS, SLOTS)


@pytest.fixture
def slow():
    return SlowReasoner()


def _clean(config):
    return dataclasses.replace(config, dropout_rate=0.0)


def _asked(slow, prompt, latents):
    """What is fed before the answer."""
    return np.concatenate([slow.embed(prompt), latents, slow.embed([tiny.END])])


def _assert_same_rows(ours, theirs, atol=1e-5):
    """Two `Trajectories`, whose numbers of slots may differ."""
    np.testing.assert_array_equal(ours.lengths, theirs.lengths)
    steps = min(ours.actions.shape[1], theirs.actions.shape[1])
    np.testing.assert_allclose(
        ours.actions[:, :steps], theirs.actions[:, :steps], rtol=0, atol=atol
    )
    assert not np.any(ours.actions[:, steps:])
    assert not np.any(theirs.actions[:, steps:])
    slots = min(ours.tokens.shape[1], theirs.tokens.shape[1])
    np.testing.assert_array_equal(
        ours.tokens[:, :slots],
        theirs.tokens[:, :slots],
    )


def _stop_probabilities(params, latents):
    out = jax.tree.map(np.asarray, params["gate"]["out"])
    return special.expit(latents @ out["kernel"][:, 0] + out["bias"])


@pytest.mark.parametrize(
    "where",
    [
        "clean",
        *(
            pytest.param(where, marks=pytest.mark.slow)
            for where in ("thought", "latents", "rollout", "all")
        ),
    ],
)
def test_rollout_is_the_slow_loop_s(params, prompts, slow, where):
    config = (
        _clean(BY_LENGTH)
        if where == "clean"
        else dataclasses.replace(BY_LENGTH, dropout_where=where)
    )
    keys = keys_of(ROWS, seed=1 if where == "rollout" else 0)
    result = run_rollout(params, prompts, keys, config=config, stop_rule=THOUGHTS)
    np.testing.assert_array_equal(result.lengths, THOUGHTS)
    for row, length in enumerate(THOUGHTS):
        prompt = real_tokens(prompts, row)
        slow.factors = tiny.slow_factors(
            keys[row], keys[row], len(prompt), int(length), config
        )
        latents = slow.think(prompt, length)
        np.testing.assert_allclose(
            result.actions[row, :length], latents, rtol=0, atol=1e-4
        )
        assert not np.any(result.actions[row, length:])
        assert result.tokens[row].tolist() == padded(
            slow.says(_asked(slow, prompt, latents))
        )
    ended = (np.asarray(result.tokens) == EOS).any(axis=1)
    assert 0 < ended.sum() < ROWS, "the answers must end both ways"
    assert len(np.unique(result.tokens)) > 6


def test_banned_tokens_are_never_said(params, prompts, slow):
    """The likeliest other is, each time: three bans of tokens that would be said, eos among them."""
    config = _clean(BY_LENGTH)
    free = np.asarray(
        run_rollout(
            params, prompts, keys_of(ROWS), config=config, stop_rule=THOUGHTS
        ).tokens
    )
    said, counts = np.unique(
        free[free < tiny.PAD],
        return_counts=True,
    )
    banned = (
        EOS,
        *[int(token) for token in said[np.argsort(-counts)] if token != EOS][:2],
    )
    config = dataclasses.replace(config, banned_ids=banned)
    found = run_rollout(
        params, prompts, keys_of(ROWS), config=config, stop_rule=THOUGHTS
    )
    allowed = np.delete(np.arange(tiny.CONFIG.vocab_size), banned)
    for row, length in enumerate(THOUGHTS):
        prompt = real_tokens(prompts, row)
        asked = _asked(slow, prompt, slow.think(prompt, length))
        assert found.tokens[row].tolist() == slow.says(
            asked, choose=lambda logits: allowed[logits[allowed].argmax()]
        )
    assert set(banned) <= set(free.ravel().tolist())


def test_sampled_tokens_are_drawn_each_by_its_slot_s_key(params, prompts, slow):
    """From the tempered softmax of the slow loop's logits; no slot's key draws another slot's token."""
    config = dataclasses.replace(_clean(BY_LENGTH), temperature=1.5)
    keys = keys_of(ROWS)
    found = run_rollout(params, prompts, keys, config=config, stop_rule=THOUGHTS)
    said = 0
    for row, length in enumerate(THOUGHTS):
        prompt = real_tokens(prompts, row)
        slots = itertools.count()

        def draw(logits, row=row, slots=slots):
            (key,) = noise.token_keys(
                keys[row : row + 1],
                next(slots),
            )
            return jax.random.categorical(key, jnp.asarray(logits / 1.5, jnp.float32))

        tokens = slow.says(
            _asked(slow, prompt, slow.think(prompt, length)), choose=draw
        )
        assert found.tokens[row].tolist() == padded(tokens)
        said += len(tokens)
    assert said > 2 * ROWS


def test_threshold_stops_at_the_first_probability_at_or_above(params, prompts, slow):
    config = _clean(BY_THRESHOLD)
    threshold = 0.5
    result = run_rollout(
        params, prompts, keys_of(ROWS), config=config, stop_rule=threshold
    )
    for row in range(ROWS):
        latents = slow.think(real_tokens(prompts, row), T)
        above = _stop_probabilities(params, latents) >= threshold
        assert result.lengths[row] == (above.argmax() + 1 if above.any() else T)
    assert len(np.unique(result.lengths)) >= 3, "the rows must differ"
    for threshold, length in ((0.0, 1), (1.1, T)):
        assert (
            run_rollout(
                params, prompts, keys_of(ROWS), config=config, stop_rule=threshold
            ).lengths
            == length
        ).all()


def test_a_probability_equal_to_the_threshold_stops(params, prompts):
    even = {
        "out": {"kernel": jnp.zeros((tiny.CONFIG.n_embd, 1)), "bias": jnp.zeros(1)}
    }  # rho = 1/2 everywhere
    result = run_rollout(
        {**params, "gate": even},
        prompts,
        keys_of(ROWS),
        config=_clean(BY_THRESHOLD),
        stop_rule=0.5,
    )
    assert (result.lengths == 1).all()


@pytest.mark.slow
def test_a_row_does_not_know_its_company(params, prompts):
    """With stops that are drawn; with lengths that are given, each row is the slow loop's, which knows no other."""
    keys = keys_of(ROWS)
    config = ROLLOUT
    rule = jnp.asarray(THOUGHTS)
    together = run_rollout(params, prompts, keys, config=config, stop_rule=rule)

    order = np.array([3, 0, 5, 4, 1, 2])
    shuffled = run_rollout(
        params,
        take_rows(prompts, order),
        keys[order],
        config=config,
        stop_rule=rule[order],
    )
    _assert_same_rows(shuffled, jax.tree.map(lambda x: x[order], together))

    for row in (1, 2):
        one = slice(row, row + 1)
        alone = run_rollout(
            params,
            take_rows(prompts, [row]),
            keys[one],
            config=config,
            stop_rule=rule[one],
        )
        _assert_same_rows(
            alone,
            jax.tree.map(lambda x, one=one: x[one], together),
        )

    bucket = tiny.pad_left(
        [real_tokens(prompts, row) for row in range(ROWS)], SLOTS + 5
    )
    _assert_same_rows(
        run_rollout(params, bucket, keys, config=config, stop_rule=rule), together
    )

    larger = dataclasses.replace(
        config, max_latents=T + 3, answer_slots=ROLLOUT.answer_slots + 2
    )
    roomy = run_rollout(params, prompts, keys, config=larger, stop_rule=rule)
    free = np.flatnonzero(
        np.asarray(together.lengths) < T
    )  # the others were stopped at T
    assert len(free) >= 3
    _assert_same_rows(
        *(jax.tree.map(lambda x: x[free], result) for result in (roomy, together))
    )


@pytest.mark.parametrize(
    ("where", "rate", "temperature"),
    [
        ("thought", 0.0, 0.0),
        *(
            pytest.param(*of, marks=pytest.mark.slow)
            for of in (("thought", 0.4, 1.0), ("rollout", 0.4, 0.0))
        ),
        pytest.param("all", 0.1, 1.0, marks=pytest.mark.slow),
    ],
)
def test_candidates_are_the_rollouts_that_stop_there(
    params, prompts, where, rate, temperature
):
    config = dataclasses.replace(
        ROLLOUT, dropout_rate=rate, dropout_where=where, temperature=temperature
    )
    keys = keys_of(ROWS, seed=2)
    shortest = 2
    decode = tiny.compiled(
        decode_candidates, tiny.policy_of(config), static=("min_latents",)
    )
    latents, tokens = decode(params, prompts, keys, min_latents=shortest)
    assert tokens.shape == (ROWS, T - shortest + 1, config.answer_slots)
    stop = dataclasses.replace(config, stopping="length")
    for i, length in enumerate(range(shortest, T + 1)):
        rule = np.full(ROWS, length, np.int32)
        alone = run_rollout(params, prompts, keys, config=stop, stop_rule=rule)
        np.testing.assert_allclose(
            latents[:, :length], alone.actions[:, :length], rtol=0, atol=1e-5
        )
        np.testing.assert_array_equal(tokens[:, i], alone.tokens)
    assert (np.asarray(tokens[:, 0]) != np.asarray(tokens[:, -1])).any(
        axis=1
    ).sum() >= 3, "lengths must matter"
    assert (np.asarray(tokens) == tiny.PAD).any()


@pytest.mark.slow
def test_sampled_stops_are_drawn_each_by_its_step_s_key(params, prompts):
    """Against the stop probabilities of the rollout's own latents, whatever the masks were; at T there is no choice."""
    many = take_rows(prompts, [5] * 300)
    keys = keys_of(300)
    stops = run_rollout(params, many, keys).lengths
    full = run_rollout(
        params, many, keys, config=BY_LENGTH, stop_rule=np.full(300, T, np.int32)
    )
    rho_NT = _stop_probabilities(params, np.asarray(full.actions, np.float64))
    fires_NT = (
        np.stack([noise.stop_uniforms(keys, step) for step in range(1, T + 1)], axis=1)
        < rho_NT
    )
    fires_NT[:, -1] = True
    np.testing.assert_array_equal(stops, fires_NT.argmax(axis=1) + 1)
    assert {*stops.tolist()} == {*range(1, T + 1)}


def _continued(params, prompts, keys, made, steps, rule, config=ROLLOUT):
    prefix = dataclasses.replace(made, lengths=jnp.minimum(made.lengths, steps))
    return sample(
        tiny.policy_of(config),
        params,
        prompts,
        keys,
        rule,
        given=prefix,
    )


continued = tiny.compiled(_continued, static=("config",))


@pytest.mark.slow
def test_with_its_own_noise_every_prefix_of_a_rollout_goes_on_as_it_did(
    params, prompts
):
    keys = keys_of(ROWS)
    made = run_rollout(params, prompts, keys)
    assert len({*made.lengths.tolist()}) > 1
    for steps in range(T + 1):
        again = continued(params, prompts, keys, made, steps, None)
        assert again.lengths.tolist() == made.lengths.tolist()
        assert again.tokens.tolist() == made.tokens.tolist()
        np.testing.assert_allclose(again.actions, made.actions, atol=1e-5)
    other = continued(
        params,
        prompts,
        keys_of(ROWS, 1),
        made,
        2,
        None,
    )
    np.testing.assert_array_equal(
        other.actions[:, :1],
        made.actions[:, :1],
    )
    eager = continued(
        params, prompts, keys, made, 3, 0.0, config=BY_THRESHOLD
    )  # but for the steps that are given
    np.testing.assert_array_equal(eager.lengths, np.minimum(made.lengths, 3))
    assert np.abs(other.actions[:, 2:] - made.actions[:, 2:]).max() > 0.01


def test_a_foreign_prefix_is_gone_on_from(params, prompts, slow):
    """Any vectors are fed as they are, and thought about further, as in a slow loop."""
    rng = np.random.default_rng(0)
    steps = np.array([2, 0, 1, 3, 2, 1])
    config = _clean(BY_LENGTH)
    made = run_rollout(
        params,
        prompts,
        keys_of(ROWS),
        config=config,
        stop_rule=np.full(ROWS, 3, np.int32),
    )
    given = dataclasses.replace(
        made, actions=jnp.asarray(rng.normal(size=made.actions.shape), jnp.float32)
    )
    ours = continued(
        params, prompts, keys_of(ROWS), given, steps, jnp.full(ROWS, 3), config=config
    )
    for row, kept in enumerate(steps):
        prompt = real_tokens(prompts, row)
        inputs = np.concatenate([slow.embed(prompt), given.actions[row, :kept]])
        while len(inputs) < len(prompt) + 3:
            inputs = np.concatenate([inputs, slow.hidden(inputs)[-1:]])
        latents = inputs[len(prompt) :]
        np.testing.assert_allclose(
            ours.actions[row, :3],
            latents,
            atol=1e-5,
        )
        assert ours.tokens[row].tolist() == padded(
            slow.says(_asked(slow, prompt, latents))
        )
    assert EOS in np.asarray(ours.tokens)


def test_the_likeliest_tokens_of_a_latent_are_of_the_state_that_made_it(
    params, prompts, slow
):
    latents = (
        np.random.default_rng(0)
        .normal(size=(ROWS, T, tiny.CONFIG.n_embd))
        .astype(np.float32)
    )
    _, probability, token = tiny.compiled(probe, tiny.policy_of())(
        params, prompts, latents, THOUGHTS
    )
    for row, length in enumerate(THOUGHTS):
        hidden = slow.hidden(
            np.concatenate([slow.prompt(prompts, row), latents[row, :length]])
        )
        law = special.softmax(
            slow.logits(hidden[-length - 1 : -1]),
            axis=-1,
        )
        np.testing.assert_array_equal(
            token[row, :length], np.argsort(-law, axis=1)[:, :NEAREST]
        )
        np.testing.assert_allclose(
            probability[row, :length], -np.sort(-law, axis=1)[:, :NEAREST], rtol=1e-3
        )

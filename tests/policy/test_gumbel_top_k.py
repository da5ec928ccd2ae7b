"""Soft tokens of the highest noisy scores: draws, likelihoods and gradients by loops, and whole rollouts that halt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from slow_policy import spoken
from slpo_jax.errors import UserError
from slpo_jax.policy.latent_policies import LATENT_POLICIES
from slpo_jax.policy.policy import PromptedBatch, repeat_rows
from slpo_jax.policy.rollout import sample
from slpo_jax.policy.score import score
from slpo_jax.training.objectives import OBJECTIVES
from tiny import (
    REASONER,
    ROLLOUT,
    SlowReasoner,
    both_params,
    compiled,
    keys_of,
    policy_of,
    random_prompts,
)

TopK = LATENT_POLICIES["gumbel_top_k"]
SOFT_GRPO = {
    "top_k": 5,
    "least": 1,
    "most": 5,
    "shift": 0.0,
    "tau": 0.1,
    "likelihood": "clipped",
}


def _drawer(**settings):
    """(logits [N, V], keys [N] or None) -> the action after them, leaves [N, ..]: hidden states that are the logits."""
    reasoner = dataclasses.replace(REASONER, logits=lambda params, hidden: hidden)
    latent_policy = TopK(**settings)(reasoner, None)

    def draw(logits_NV, keys_N=None):
        action = latent_policy.draw(
            {}, logits_NV[:, None], None if keys_N is None else keys_N[:, None]
        )
        return jax.tree.map(lambda x: x[:, 0], action)

    return compiled(draw)


def _slow_draw(
    logits,
    noise,
    *,
    top_k=0,
    top_p=0.95,
    least=10,
    most=10,
    low=-1.5,
    high=3.0,
    shift=1.5,
    soft=False,
):
    """(ids, scores) of one position; `noise` [V] is that of the likeliest, the second, .."""
    log_p = special.log_softmax(np.asarray(logits, np.float64))
    order = np.argsort(-log_p, kind="stable")[: top_k or None]
    share = special.softmax(log_p[order])
    found = []
    inside = (np.cumsum(share) - share < top_p) | (np.arange(len(order)) < least)
    whole = share[inside].sum()
    for place, token in enumerate(order):
        base = (
            log_p[token]
            if not soft
            else np.log(share[place] / whole * inside[place] + 1e-6)
        )
        if inside[place] or soft:
            found.append((base + min(max(noise[place], low), high) + shift, token))
    found.sort(key=lambda each: -each[0])
    scores, ids = zip(*found[:most], strict=True)
    return list(ids), scores


@pytest.mark.parametrize(
    ("settings", "soft"),
    [({}, False), ({"top_p": 0.5, "least": 4, "most": 3}, False), (SOFT_GRPO, True)],
)
def test_scores_are_a_loop_s(settings, soft):
    logits = np.random.default_rng(0).normal(size=(60, 40)).astype(np.float32) * 2
    keys = keys_of(60)
    width = settings.get("top_k") or 40
    noise = np.asarray(jax.vmap(lambda key: jax.random.gumbel(key, (width,)))(keys))
    found = jax.device_get(_drawer(**settings)(logits, keys))
    known = {
        name: value
        for name, value in settings.items()
        if name not in ("tau", "likelihood")
    }
    reordered = 0
    for row in range(60):
        ids, scores = _slow_draw(
            logits[row],
            noise[row],
            soft=soft,
            **known,
        )
        assert found["ids"][row].tolist() == ids
        np.testing.assert_allclose(
            found["scores"][row],
            scores,
            rtol=1e-4,
            atol=1e-5,
        )
        reordered += ids[0] != logits[row].argmax()
    assert 5 < reordered < 60
    clean = jax.device_get(_drawer(**settings)(logits))
    assert (clean["ids"][:, 0] == logits.argmax(axis=1)).all()
    assert (np.diff(clean["scores"], axis=1) <= 0).all()


def _finite_differences(value, x):
    steps = 1e-5 * np.eye(len(x))
    return np.array([(value(x + step) - value(x - step)) / 2e-5 for step in steps])


@pytest.mark.parametrize("advantage", [1.0, 0.0, -2.0])
def test_the_gradient_depends_on_the_advantage_s_sign(advantage):
    """The value never does. d is -1.1, -0.2, 0.3 and 2: of both signs."""
    log_p = np.log([0.4, 0.3, 0.2, 0.1])
    d = np.array([-1.1, -0.2, 0.3, 2.0])
    scores = (log_p + d).astype(np.float32)
    likelihood = TopK(least=4, most=4).log_prob

    def value(log_p, turned=False):
        d = scores.astype(np.float64) - log_p
        return np.mean(
            np.where(
                turned & (d < 0),
                d - np.exp(d),
                -d - np.exp(-d),
            )
        )

    found, gradient = jax.value_and_grad(
        lambda log_p: likelihood(scores, log_p, jnp.float32(advantage))
    )(jnp.asarray(log_p, jnp.float32))
    assert found == pytest.approx(value(log_p), rel=1e-5)
    turned = advantage <= 0
    np.testing.assert_allclose(
        gradient, _finite_differences(lambda x: value(x, turned), log_p), rtol=1e-3
    )
    plain = jax.grad(lambda log_p: likelihood(scores, log_p))(
        jnp.asarray(log_p, jnp.float32)
    )
    np.testing.assert_allclose(plain, _finite_differences(value, log_p), rtol=1e-3)


def test_soft_grpo_s_likelihood_is_a_loop_s():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(
        np.full(8, 0.4),
        size=40,
    )[:, :5]
    scores = rng.normal(size=(40, 5)) * 3 - 2
    found = TopK(**SOFT_GRPO).log_prob(
        jnp.asarray(scores, jnp.float32), jnp.log(jnp.asarray(p, jnp.float32) + 1e-30)
    )
    left_out = cut = 0
    for row in range(40):
        terms = []
        for token in range(5):
            log_q = np.log(p[row, token] / p[row].sum() + 1e-6)
            d = scores[row, token] - log_q
            held = min(max(d, -1.5), 3.0)
            if log_q > -3:
                terms.append(-held - np.exp(-held))
                cut += held != d
        left_out += 5 - len(terms)
        assert found[row] == pytest.approx(np.mean(terms), rel=1e-3)
    assert left_out > 20
    assert cut > 20


END = 7


def test_a_thought_halts_at_the_likeliest_token_or_the_highest_score():
    """Without noise at the first alone."""
    logits = np.zeros((300, 30), np.float32)
    logits[:100, END] = 4
    logits[100:200, END] = -20
    logits[100:, 3] = 1.0
    found = jax.device_get(_drawer(halt_id=END)(logits, keys_of(300)))
    highest = found["ids"][:, 0] == END
    assert 0 < highest[:100].sum() < 100
    assert found["halts"][:100].all()
    assert not found["halts"][100:200].any()
    np.testing.assert_array_equal(
        found["halts"][200:],
        highest[200:],
    )
    assert 0 < highest[200:].sum() < 100
    clean = jax.device_get(_drawer(halt_id=END)(logits))
    np.testing.assert_array_equal(clean["halts"], np.arange(300) < 100)


CLOSING = (END, 23, 24)
T = 4
A = 3
CONFIG = dataclasses.replace(
    ROLLOUT,
    closing_ids=CLOSING,
    max_latents=T,
    answer_slots=A,
    stopping="length",
    dropout_rate=0.0,
    temperature=0.6,
)
PROMPTS = random_prompts((3, 7, 5, 4), 8)


@pytest.mark.slow
def test_rollouts_and_their_likelihoods_are_a_loop_s():
    """Thoughts of 0 to T steps, whose end and all of whose tokens' likelihoods are at the answers' temperature."""
    policy = policy_of(CONFIG, REASONER, "gumbel_top_k", halt_id=END)
    params = both_params()
    prompts = repeat_rows(PROMPTS, 12)
    advantages = jnp.asarray(
        np.random.default_rng(0).normal(size=(48, T)),
        jnp.float32,
    )

    @compiled
    def run(params):
        made = sample(policy, params, prompts, keys_of(48), T)
        how = {"advantages_NT": advantages, "likelihood_temperature": 0.6}
        return (
            made,
            score(policy, params, PROMPTS, made, None, **how),
            score(policy, params, PROMPTS, made, None),
        )

    made, scores, plain = run(params)
    slow = SlowReasoner()
    assert set(np.asarray(made.lengths).tolist()) >= {0, 1, T}
    np.testing.assert_allclose(
        plain.action_log_probs, scores.action_log_probs, atol=1e-5
    )
    for row in range(48):
        length = int(made.lengths[row])
        inputs = slow.prompt(prompts, row)
        for step in range(length):
            log_p = special.log_softmax(slow.logits(slow.hidden(inputs)[-1]))
            ids = made.actions["ids"][row, step]
            values = np.asarray(
                made.actions["scores"][row, step],
                np.float64,
            )
            g = values - log_p[np.asarray(ids)]
            assert -1e-4 < g.min() < g.max() < 4.5 + 1e-4
            assert END not in (log_p.argmax(), ids[0])
            expected = np.mean(-g - np.exp(-g))
            assert float(scores.action_log_probs[row, step]) == pytest.approx(
                expected, abs=2e-4
            )
            inputs = np.concatenate(
                [inputs, (special.softmax(values) @ slow.embed(ids))[None]]
            )
        said = spoken(made.tokens[row])
        ended, *between = slow.log_probs(
            inputs,
            [*CLOSING, *said],
            0.6,
        )
        assert float(scores.halting_log_prob[row]) == pytest.approx(ended, abs=2e-4)
        expected = between[len(CLOSING) - 1 :]
        np.testing.assert_allclose(
            scores.token_log_probs[row, : len(said)], expected, atol=2e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("first_choice", ["all", "best"])
def test_thoughts_without_a_weight_need_no_advantages(first_choice):
    """The words' loss and gradient: the same, whether the thought's likelihood is signed or not."""
    batch = PromptedBatch(PROMPTS, np.zeros((4, 0), np.uint8), np.arange(4))
    rewards = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    grpo = OBJECTIVES["grpo"](latent_weight=0.0, first_choice=first_choice)
    policies = {
        likelihood: policy_of(CONFIG, REASONER, "gumbel_top_k", likelihood=likelihood)
        for likelihood in ("signed", "clipped")
    }

    @compiled
    def run(params):
        prompts = repeat_rows(PROMPTS, 2)
        made = sample(policies["signed"], params, prompts, keys_of(8), T)
        before = grpo.compute_old_log_probs(policies["signed"], params, batch, made)
        made = made.replace(old_log_probs=before)

        def loss(params, policy):
            return grpo(policy, params, batch, made, rewards, jax.random.key(0))[0]

        return {
            name: jax.value_and_grad(loss)(params, policy)
            for name, policy in policies.items()
        }

    found = run(both_params())
    signed = jax.tree.leaves(found["signed"])
    for x, y in zip(signed, jax.tree.leaves(found["clipped"]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    assert max(float(jnp.abs(x).max()) for x in signed[1:]) > 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"most": 11}, "most: .*only 10 tokens are sure to have a score"),
        ({"top_k": 5}, "most: .*only 5 tokens"),
    ],
)
def test_settings_that_have_no_likelihood_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        TopK(**settings)

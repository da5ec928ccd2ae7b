"""Thoughts in soft tokens: their laws by a loop over tokens, their densities, and whole rollouts of a text reasoner."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special, stats

import tiny
from slpo_jax.architectures import colar
from slpo_jax.policy.latent_policies import LATENT_POLICIES
from slpo_jax.policy.latent_policies.soft_tokens import concrete_log_prob
from slpo_jax.policy.rollout import replay, sample
from slpo_jax.policy.score import score
from tiny import (
    CONFIG,
    GATE,
    REASONER,
    SlowReasoner,
    both_params,
    compiled,
    keys_of,
    padded,
    policy_of,
    take_rows,
)

PROMPTS = tiny.random_prompts((3, 7, 5), 8)
STEPS = 3
V = CONFIG.vocab_size
HARD = {"top_k": 1, "top_p": 1.0, "min_p": 0.0, "most": 0}
CUTS = [
    {
        "temperature": 0.6,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.001,
        "most": 10,
    },  # Soft Thinking's
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "most": 0},
    {"temperature": 2.0, "top_k": 0, "top_p": 0.7, "min_p": 0.3, "most": 0},
    {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "most": 4},
    {"temperature": 0.5, "top_k": 8, "top_p": 1.0, "min_p": 0.05, "most": 0},
]


def _config(steps=STEPS, **changes):
    own = {
        "closing_ids": (),
        "max_latents": steps,
        "stopping": "length",
        "dropout_rate": 0.0,
    }
    return dataclasses.replace(tiny.ROLLOUT, **own | changes)


def _law(logits, temperature, top_k, top_p, min_p, most):
    """Weights [V] of one position, cut after cut, each of what the one before left."""
    weights = special.softmax(np.asarray(logits, np.float64) / temperature)
    order = np.argsort(-weights, kind="stable")[: top_k or None]
    weights[np.setdiff1d(np.arange(V), order)] = 0
    weights /= weights.sum()
    together = np.cumsum(weights[order]) - weights[order]
    weights[order[together >= top_p]] = 0
    weights /= weights.sum()
    weights[weights < min_p * weights.max()] = 0
    if most:
        weights[order[most:]] = 0
    return weights / weights.sum()


@pytest.mark.slow
@pytest.mark.parametrize("cuts", CUTS)
def test_soft_thoughts_are_the_slow_loop_s(cuts):
    """Every mixture, what is answered after the block, and the same once more."""
    params = both_params()
    policy = policy_of(_config(), REASONER, "soft", **cuts)
    run = compiled(lambda params: sample(policy, params, PROMPTS, keys_of(3), STEPS))
    found = run(params)
    slow = SlowReasoner()
    for row in range(3):
        inputs = slow.prompt(PROMPTS, row)
        for step in range(STEPS):
            x = (
                _law(slow.logits(slow.hidden(inputs)[-1]), **cuts)
                @ slow.params["backbone"]["wte"]
            )
            np.testing.assert_allclose(
                found.actions[row, step],
                x,
                atol=2e-4,
            )
            inputs = np.concatenate([inputs, x[None]])
        assert found.tokens[row].tolist() == padded(slow.says(inputs))
    jax.tree.map(
        np.testing.assert_array_equal,
        run(params).actions,
        found.actions,
    )


@pytest.mark.parametrize("name", LATENT_POLICIES)
def test_a_policy_says_whether_its_thought_has_a_likelihood(name):
    reasoner = REASONER if name != "colar" else colar.Colar(4, gaussian=True).on(CONFIG)
    assert (
        LATENT_POLICIES[name]()(reasoner, GATE).log_prob is not None
    ) == LATENT_POLICIES[name].has_likelihood


@pytest.fixture(scope="module")
def noisy():
    """Rollouts of many keys of one prompt, and scores."""
    settings = {
        "noisy_soft": {"scale": 0.5},
        "gumbel": {"top_k": 4, "top_p": 1.0, "tau": 0.4},
    }
    prompts = jax.tree.map(
        lambda x: jnp.repeat(x[:1], 2000, axis=0),
        PROMPTS,
    )
    out = {}
    for name, each in settings.items():
        policy = policy_of(
            _config(2, answer_slots=2),
            REASONER,
            name,
            **each,
        )

        def run(params, policy=policy):
            drawn = sample(policy, params, prompts, keys_of(2000), 2)
            return drawn, score(policy, params, prompts, drawn, None)

        out[name] = compiled(run)(both_params())
    return out


@pytest.mark.slow
def test_noisy_mixtures_have_their_density(noisy):
    drawn, scores = noisy["noisy_soft"]
    slow = SlowReasoner()
    table = slow.params["backbone"]["wte"]
    inputs = slow.prompt(PROMPTS, 0)
    sigma = 0.5 * np.sqrt((table**2).mean())
    first = special.softmax(slow.logits(slow.hidden(inputs)[-1]) / 0.5) @ table
    away = (np.asarray(drawn.actions[:, 0]) - first) / sigma
    assert stats.kstest(away.ravel(), "norm").pvalue > 1e-3
    for row in range(3):
        after = slow.hidden(np.concatenate([inputs, drawn.actions[row, :1]]))[-1]
        second = special.softmax(slow.logits(after) / 0.5) @ table
        for step, mean in enumerate((first, second)):
            expected = stats.norm(mean, sigma).logpdf(drawn.actions[row, step]).sum()
            assert float(scores.action_log_probs[row, step]) == pytest.approx(
                expected, rel=1e-4
            )


def _latent_policy(name, **settings):
    """With parameters of which the embeddings' mean is far from 0, and some hidden states [1, 4, D]."""
    params = both_params()
    backbone = params["reasoner"]["backbone"]
    params["reasoner"] = {"backbone": backbone | {"wte": backbone["wte"] + 0.5}}
    hidden = (
        np.random.default_rng(0).normal(size=(1, 4, CONFIG.n_embd)).astype(np.float32)
    )
    return (
        policy_of(_config(), REASONER, name, **settings).latent_policy,
        params,
        hidden,
    )


def test_noise_is_a_share_of_the_embeddings_root_mean_square_and_a_constant():
    """At the mean the density has no gradient but that of sigma, and what is added to it has none but sigma's."""
    latent_policy, params, hidden = _latent_policy("noisy_soft", scale=0.5)
    keys = keys_of(4)[None]

    @compiled
    def at_the_mean(params):
        mean = jax.lax.stop_gradient(latent_policy.draw(params, hidden))

        def added(params):
            return jnp.sum(
                latent_policy.draw(params, hidden, keys)
                - latent_policy.draw(params, hidden)
            )

        def density(params):
            return latent_policy.log_prob(params, hidden, mean).sum()

        return (
            latent_policy.log_prob(params, hidden, mean),
            jax.grad(added)(params),
            jax.grad(density)(params),
        )

    log_prob, *gradients = at_the_mean(params)
    sigma = 0.5 * np.sqrt(
        np.square(np.asarray(params["reasoner"]["backbone"]["wte"], np.float64)).mean()
    )
    np.testing.assert_allclose(
        log_prob,
        np.full((1, 4), stats.norm(0, sigma).logpdf(0) * CONFIG.n_embd),
        rtol=1e-4,
    )
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradients)) < 1e-3


@pytest.mark.parametrize("likelihood", ["cross_entropy", "concrete"])
def test_gumbel_likelihoods_and_temperatures(likelihood):
    """Cross-entropy is with the law of all tokens at temperature 1; weights and their density are of the kept ones'.

    Without noise a weight is the softmax at tau of the law's logarithm.
    """
    temperature = 2.0
    tau = 0.6
    latent_policy, params, hidden = _latent_policy(
        "gumbel",
        temperature=temperature,
        top_k=3,
        top_p=1.0,
        tau=tau,
        likelihood=likelihood,
    )

    @compiled
    def run(params):
        drawn = latent_policy.draw(params, hidden, keys_of(4)[None])
        return (
            latent_policy.draw(params, hidden),
            drawn,
            latent_policy.log_prob(params, hidden, drawn),
        )

    quiet, drawn, found = jax.tree.map(np.asarray, run(params))
    for step in range(4):
        logits = SlowReasoner(params["reasoner"]).logits(np.float64(hidden[0, step]))
        law = _law(logits, temperature, 3, 1.0, 0.0, 0)
        ids = drawn["ids"][0, step]
        np.testing.assert_allclose(
            quiet["weights"][0, step],
            special.softmax(np.log(law[ids]) / tau),
            rtol=1e-3,
        )
        weights = drawn["weights"][0, step].astype(np.float64)
        expected = weights @ special.log_softmax(logits)[ids]
        if likelihood == "concrete":
            expected = _integrated(weights, np.log(law[ids]), tau)
        assert float(found[0, step]) == pytest.approx(expected, rel=1e-3)


def test_gumbel_weights_follow_the_law(noisy):
    """The largest weight is a token of the kept ones' law; the recorded likelihood is the cross-entropy."""
    drawn, scores = noisy["gumbel"]
    slow = SlowReasoner()
    logits = slow.logits(slow.hidden(slow.prompt(PROMPTS, 0))[-1])
    ids = np.asarray(drawn.actions["ids"][:, 0])
    weights = np.asarray(drawn.actions["weights"][:, 0])
    law = _law(logits, 1.0, 4, 1.0, 0.0, 0)
    assert set(ids.ravel()) == set(np.flatnonzero(law))
    winners = np.take_along_axis(
        ids,
        weights.argmax(axis=1)[:, None],
        axis=1,
    )[:, 0]
    counts = np.bincount(winners, minlength=V)
    assert (np.abs(counts - 2000 * law) <= 4.5 * np.sqrt(2000 * law * (1 - law))).all()
    np.testing.assert_allclose(
        weights.sum(axis=1),
        1,
        rtol=1e-5,
    )
    by_token = np.take_along_axis(weights, ids.argsort(axis=1), axis=1)[:, :2].astype(
        np.float64
    )
    apart = 0.4 * np.log(np.maximum(by_token, 1e-300)) - np.log(
        law[np.sort(ids[0])[:2]]
    )
    assert (
        stats.kstest(apart[:, 0] - apart[:, 1], "logistic").pvalue > 1e-3
    )  # the difference of two Gumbels
    log_p = special.log_softmax(logits)
    expected = (weights * log_p[ids]).sum(axis=1)
    np.testing.assert_allclose(
        scores.action_log_probs[:, 0],
        expected,
        rtol=1e-4,
    )


def _integrated(y, log_pi, tau):
    """Over the common offset c of n Gumbel variables whose softmax the weights are, times the Jacobian."""
    x = tau * np.log(y)
    value = integrate.quad(
        lambda c: np.exp(stats.gumbel_r(log_pi).logpdf(x + c).sum()), -40, 40, limit=200
    )[0]
    return np.log(value) + len(y) * np.log(tau) - np.log(y).sum() - np.log(tau)


@pytest.mark.slow
def test_concrete_density_is_the_integral_over_the_gumbels():
    log_pi = np.log([0.5, 0.3, 0.2])
    tau = 0.6
    for y in ([0.2, 0.5, 0.3], [0.98, 0.01, 0.01], [1 / 3] * 3):
        found = concrete_log_prob(
            jnp.array(y),
            jnp.asarray(log_pi + 1.7),
            tau,
        )
        assert float(found) == pytest.approx(
            _integrated(np.array(y), log_pi, tau), rel=1e-4
        )
        padded = concrete_log_prob(
            jnp.array([*y, 0.0]),
            jnp.array([*log_pi, 5.0]),
            tau,
        )
        assert float(padded) == pytest.approx(float(found), rel=1e-5)
    gradient = jax.grad(
        lambda logits: concrete_log_prob(jnp.array([0.2, 0.8, 0.0]), logits, tau)
    )(jnp.ones(3))
    assert np.isfinite(gradient).all()


@pytest.mark.slow
def test_a_thought_ends_where_its_likeliest_token_is_the_end():
    """That step is fed as the token itself and has no likelihood; words follow; a replay ends there as well."""
    end = 0
    params = both_params()
    rows = 12
    steps = 4
    policy = policy_of(
        _config(steps, answer_slots=2), REASONER, "noisy_soft", scale=1.0, end_id=end
    )
    prompts = take_rows(PROMPTS, np.arange(rows) % 3)

    @compiled
    def run(params):
        made = sample(policy, params, prompts, keys_of(rows), steps)
        again = replay(policy, params, prompts, made)
        fed = policy.latent_policy.feed(params, made.actions)
        return (
            made.replace(keys=None),
            score(policy, params, prompts, made, None),
            fed,
            again.actions,
            again.before,
        )

    made, scores, fed, again, before = jax.tree.map(
        np.asarray,
        run(params),
    )
    slow = SlowReasoner()
    (e_end,) = slow.embed([end])
    sigma = np.sqrt((slow.params["backbone"]["wte"] ** 2).mean())
    for row, length in enumerate(made.lengths):
        inputs = slow.prompt(prompts, row)
        for step in range(length):
            logits = slow.logits(slow.hidden(inputs)[-1])
            ends = logits.argmax() == end
            assert ends == (step == length - 1 < steps - 1) or step == steps - 1
            x = e_end if ends else fed[row, step]
            np.testing.assert_allclose(
                fed[row, step],
                x,
                rtol=1e-6,
            )
            mean = special.softmax(logits / 0.5) @ slow.params["backbone"]["wte"]
            expected = 0.0 if ends else stats.norm(mean, sigma).logpdf(x).sum()
            assert float(scores.action_log_probs[row, step]) == pytest.approx(
                expected, rel=1e-4
            )
            inputs = np.concatenate([inputs, x[None]])
        assert made.tokens[row].tolist() == padded(slow.says(inputs, 2), 2)
        assert made.said is None
        np.testing.assert_array_equal(
            again["ends"][row, :length], made.actions["ends"][row, :length]
        )
        np.testing.assert_allclose(
            again["of"][row, :length], made.actions["of"][row, :length], atol=1e-5
        )
        assert before[row] == len(inputs)
    assert len(set(made.lengths)) > 2
    ended = {
        name: kind(end_id=3)
        for name, kind in LATENT_POLICIES.items()
        if "end_id" in kind.__dataclass_fields__
    }
    of = (REASONER.in_tree(), GATE.in_tree())
    assert {name for name, law in ended.items() if law(*of).ends} == {
        "soft",
        "noisy_soft",
        "gumbel",
        "hybrid",
    }


@pytest.mark.slow
@pytest.mark.parametrize("latent_policy", ["soft", "gumbel"])
def test_a_thought_that_halts_is_greedy_decoding(latent_policy):
    """Of one token a mixture, up to the first of the closing text, which is then fed whole, as it is at the limit."""
    slow = SlowReasoner()
    steps = 6
    closing = (slow.says(slow.prompt(PROMPTS, 0), 3, ())[-1], 4, 9)
    config = _config(steps, closing_ids=closing, temperature=0.0)
    policy = policy_of(
        config,
        REASONER,
        latent_policy,
        halt_id=closing[0],
        **HARD,
    )
    made = compiled(sample, policy)(
        both_params(), PROMPTS, keys_of(3), jnp.full(3, steps)
    )
    lengths = []
    for row in range(3):
        thought = slow.says(
            slow.prompt(PROMPTS, row),
            steps,
            closing[:1],
        )
        lengths.append(len(thought) - (thought[-1] == closing[0]))
        fed = slow.embed([*thought[: lengths[-1]], *closing])
        answer = slow.says(np.concatenate([slow.prompt(PROMPTS, row), fed]))
        assert np.asarray(made.tokens[row]).tolist() == padded(answer)
    assert np.asarray(made.lengths).tolist() == lengths
    assert lengths[0] < 3
    assert max(lengths) == steps

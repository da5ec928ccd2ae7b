"""Hybrid thoughts: their law, inputs, ends and completions by a slow loop, and their gradient by differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import tiny
from slpo_jax.policy.latent_policies.hybrid import Hybrid, mix
from slpo_jax.policy.policy import Policy, PromptedBatch
from slpo_jax.policy.rollout import NO_TOKEN, Trajectories, sample
from slpo_jax.policy.score import score, used_slots
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.objectives.grpo import with_detached_inputs
from tiny import (
    CONFIG,
    EOS,
    REASONER,
    SlowReasoner,
    both_params,
    compiled,
    keys_of,
    padded,
    policy_of,
    take_rows,
)

T = 4
A = 3
V = CONFIG.vocab_size
D = CONFIG.n_embd
ROWS = 600
SHOWN = 15
MARK = 7
TOP_K = 6
TEMPERATURE = 1.5
PROMPTS = take_rows(
    tiny.random_prompts((5, 3, 7), 8),
    np.arange(ROWS) % 3,
)


def _policy(steps=T, **changes) -> Policy:
    changes = {"closing_ids": (), "stopping": "length", "dropout_rate": 0.0} | changes
    config = dataclasses.replace(
        tiny.ROLLOUT, max_latents=steps, answer_slots=A, **changes
    )
    policy = policy_of(
        config, REASONER, "hybrid", temperature=TEMPERATURE, top_k=TOP_K, end_id=MARK
    )
    return dataclasses.replace(policy, layout="rows")


def _params():
    """Gates and a decay in which everything matters."""
    rng = np.random.default_rng(1)
    own = {
        name: {"kernel": rng.normal(size=(D, D)), "bias": rng.normal(size=D)}
        for name in ("recurrence", "input")
    }
    own["decay"] = rng.uniform(
        -1,
        4,
        size=D,
    )
    return both_params() | {"latent_policy": jax.tree.map(np.float32, own)}


@pytest.fixture(scope="module")
def made():
    """Rollouts, their scores, the gradient of all log-likelihoods, and what they are compared with."""

    @compiled
    def make(params):
        policy = _policy()
        drawn = sample(policy, params, PROMPTS, keys_of(ROWS), T)

        def total(params):
            scores = score(policy, params, PROMPTS, drawn, None)
            used_NT, _ = used_slots(policy, drawn)
            thought_N = jnp.sum(scores.action_log_probs, axis=1, where=used_NT)
            return jnp.sum((thought_N + scores.answer_log_prob)[:SHOWN]), scores

        batch = PromptedBatch(
            take_rows(PROMPTS, range(SHOWN)),
            None,
            jnp.arange(SHOWN),
        )
        shown = jax.tree.map(
            lambda x: x[:SHOWN],
            drawn,
        )
        start = OBJECTIVES["grpo"](kl_weight=1.0).compute_ref_log_probs(
            policy, params, batch, shown
        )
        return (
            drawn.replace(keys=None),
            jax.grad(total, has_aux=True)(params),
            drawn.completions,
            start,
        )

    return jax.tree.map(np.asarray, make(_params()))


def _fed(own, e, s):
    def gate(name):
        return special.expit(e @ own[name]["kernel"] + own[name]["bias"])

    decay = np.asarray(own["decay"], np.float64)
    slowness = 8 * np.log1p(np.exp(-decay))
    a = np.exp(-slowness * gate("recurrence"))
    share = np.sqrt(1 - a**2 + 1e-8)
    return a * e + share * gate("input") * s


def _law(logits):
    """Weights [V] of the kept tokens."""
    kept = np.argsort(-logits, kind="stable")[:TOP_K]
    law = np.zeros(V)
    law[kept] = special.softmax(logits[kept] / TEMPERATURE)
    return law


def _walk(slow, own, drawn, row, mixtures=None):
    """Of a row, step by step: laws, mixtures s, and log-likelihoods of what it says, thought and answer."""
    said = drawn.said[row][: int(drawn.lengths[row])].tolist()
    answer = drawn.tokens[row]
    inputs = slow.prompt(PROMPTS, row)
    laws = []
    made = []
    likelihoods = []
    for step, token in enumerate(said):
        logits = slow.logits(slow.hidden(inputs)[-1])
        laws.append(_law(logits))
        likelihoods.append(special.log_softmax(logits)[token])
        table = slow.params["backbone"]["wte"]
        s = laws[-1] @ table / np.linalg.norm(laws[-1])
        if mixtures is not None:
            s = mixtures[step]
        made.append(s)
        (e,) = slow.embed([token])
        fed = e if token == MARK else _fed(own, e, s)
        inputs = np.concatenate([inputs, [fed]])
    thought = sum(likelihoods)
    spoken = []
    while said[-1] != EOS and len(spoken) < A and EOS not in spoken:
        log_p = special.log_softmax(slow.logits(slow.hidden(inputs)[-1]))
        spoken.append(int(answer[len(spoken)]))
        likelihoods.append(log_p[spoken[-1]])
        assert mixtures is not None or spoken[-1] == log_p.argmax()
        inputs = np.concatenate([inputs, slow.embed(spoken[-1:])])
    return said, spoken, laws, made, thought, sum(likelihoods) - thought


@pytest.mark.slow
def test_rollouts_are_the_slow_loop_s(made):
    """Ends, completions, likelihoods; some end at the mark, some at eos in the thought, some at T."""
    drawn, (_, scores), completions, _ = made
    slow = SlowReasoner()
    own = _params()["latent_policy"]
    ends = set()
    for row in range(SHOWN):
        said, spoken, laws, _, thought, answer = _walk(
            slow,
            own,
            drawn,
            row,
        )
        assert not {MARK, EOS} & set(said[:-1])
        has_end = said[-1] in (MARK, EOS)
        assert len(said) == T or has_end
        ends.add((said[-1], len(said) == T) if has_end else "T")
        assert drawn.tokens[row].tolist() == padded(spoken, A)
        words = said + spoken
        written = completions[row].tolist()
        assert written[: len(words)] == words
        if EOS not in words:
            assert set(written[len(words) :]) <= {NO_TOKEN}
        for step, (token, law) in enumerate(zip(said, laws, strict=True)):
            ids = drawn.actions["ids"][row, step]
            kept = np.zeros(V)
            kept[ids] = drawn.actions["weights"][row, step]
            np.testing.assert_allclose(kept, law, atol=1e-5)
            assert law[token] > 0
        found = float(scores.action_log_probs[row, : len(said)].sum())
        assert found == pytest.approx(thought, rel=1e-4)
        found = float(scores.answer_log_prob[row])
        assert found == pytest.approx(answer, rel=1e-4)
    assert {"T", (MARK, False), (EOS, False)} <= ends


def test_it_is_compared_with_plain_words(made):
    """The reference of `grpo`: what was said, in thought and answer, by the model that is fed the tokens alone."""
    drawn, *_, start_NC = made
    slow = SlowReasoner()
    own = _params()["latent_policy"]
    mixed_in = []
    for row in range(SHOWN):
        said, spoken, *_, thought, answer = _walk(
            slow,
            own,
            drawn,
            row,
        )
        expected = slow.log_probs(
            slow.prompt(PROMPTS, row),
            said + spoken,
        )
        found = np.concatenate(
            [start_NC[row, : len(said)], start_NC[row, T : T + len(spoken)]]
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        mixed_in.append(abs(expected.sum() - thought - answer))
    assert np.median(mixed_in) > 0.05


def test_tokens_are_drawn_by_their_law(made):
    drawn = made[0]
    slow = SlowReasoner()
    law = _law(slow.logits(slow.hidden(slow.prompt(PROMPTS, 0))[-1]))
    counts = np.bincount(
        drawn.said[::3, 0],
        minlength=V,
    )
    kept = law > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept], counts.sum() * law[kept]).pvalue > 1e-3


def test_the_gradient_goes_through_the_gates_and_not_through_the_mixture(made):
    """Along one direction of all gates and embeddings, by differences of the slow loop with s held."""
    drawn, (gradient, _), *_ = made
    params = jax.tree.map(
        lambda x: np.asarray(x, np.float64),
        _params(),
    )
    rng = np.random.default_rng(2)
    own = params["latent_policy"]
    backbone = params["reasoner"]["backbone"]
    slow = SlowReasoner(params["reasoner"])
    held = [_walk(slow, own, drawn, row)[3] for row in range(SHOWN)]
    gates = jax.tree.map(
        lambda x: rng.normal(size=x.shape),
        own,
    )
    table = rng.normal(size=backbone["wte"].shape)

    def total(step, gates, table):
        moved = jax.tree.map(
            lambda x, d: x + step * d,
            own,
            gates,
        )
        slow = SlowReasoner(
            {"backbone": {**backbone, "wte": backbone["wte"] + step * table}}
        )
        likelihood = 0
        for row in range(SHOWN):
            *_, thought, answer = _walk(
                slow,
                moved,
                drawn,
                row,
                held[row],
            )
            likelihood += thought + answer
        return likelihood

    still = jax.tree.map(np.zeros_like, gates)
    for along in ((gates, 0 * table), (still, table)):
        expected = (total(1e-5, *along) - total(-1e-5, *along)) / 2e-5
        parts = (gradient["latent_policy"], gradient["reasoner"]["backbone"]["wte"])
        products = jax.tree.map(
            lambda g, d: float((g * d).sum()),
            parts,
            along,
        )
        found = sum(jax.tree.leaves(products))
        assert found == pytest.approx(expected, rel=2e-3)
        assert abs(expected) > 0.5


def test_at_the_start_it_is_nearly_the_token():
    wide = dataclasses.replace(
        REASONER,
        config=dataclasses.replace(CONFIG, n_embd=256),
    )
    rng = np.random.default_rng(0)
    e, s = 0.02 * rng.normal(size=(2, 1, 5, 256)).astype(np.float32)

    @compiled
    def start(e, s):
        params = Hybrid()(wide, None).init(jax.random.key(0))
        return params, mix(params, e, s)

    params, x = start(e, s)
    decay = np.asarray(params["decay"], np.float64)
    u = np.exp(-8 * np.log1p(np.exp(-decay)))
    assert stats.kstest(u, stats.uniform(0.99, 0.009).cdf).pvalue > 1e-3
    away = np.linalg.norm(x - e, axis=-1)
    of_e = np.linalg.norm(e, axis=-1)
    of_s = np.linalg.norm(s, axis=-1)
    assert (away <= 0.0051 * of_e + 0.0501 * of_s).all()
    assert (away > 0.01 * of_s).all()


def test_slots_after_a_thought_that_said_eos_are_free():
    """Its answer is no token at all, not even where pad is eos."""
    policy = _policy(2, pad_id=EOS)
    said = np.array([[9, EOS], [EOS, 0], [9, 8]])
    lengths = np.array([2, 1, 2])
    tokens = np.array([[EOS] * 3, [EOS] * 3, [5, 6, 7]])

    @compiled
    def slots(said, lengths, tokens):
        made = Trajectories(None, lengths, tokens, None, said=said)
        return *used_slots(policy, made), made.completions

    fed, spoken, completions = map(
        np.asarray,
        slots(said, lengths, tokens),
    )
    assert fed.sum(axis=1).tolist() == [2, 1, 2]
    assert spoken.sum(axis=1).tolist() == [0, 0, 3]
    assert completions.tolist() == [
        [9, *[EOS] * 4],
        [*[EOS] * 4, NO_TOKEN],
        [9, 8, 5, 6, 7],
    ]


@pytest.mark.slow
def test_detached_inputs_leave_the_gates_their_gradient():
    """Of what is fed: none for the embeddings, the whole one for the latent policy's own parameters."""
    policy = _policy()
    rng = np.random.default_rng(2)
    action = {
        "token": jnp.array([[3, 5]]),
        "ids": jnp.array([[[3, 4], [5, 6]]]),
    }
    action["weights"] = jnp.array([[[0.6, 0.4], [0.9, 0.1]]])
    ahead_BLD = jnp.asarray(
        rng.normal(size=(1, 2, D)),
        jnp.float32,
    )

    def slopes(policy):
        return jax.grad(
            lambda params: jnp.sum(
                ahead_BLD * policy.latent_policy.feed(params, action)
            )
        )(_params())

    whole = slopes(policy)
    detached = slopes(with_detached_inputs(policy))
    jax.tree.map(
        np.testing.assert_array_equal, detached["latent_policy"], whole["latent_policy"]
    )
    assert np.any(whole["latent_policy"]["input"]["kernel"])
    assert np.any(whole["reasoner"]["backbone"]["wte"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(detached["reasoner"]))

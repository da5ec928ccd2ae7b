"""AdaLR's thought against a loop over positions in float64: how often it stops, and the likelihood of its choices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import tiny
from slow_policy import assert_is_gradient, spoken
from slpo_jax.architectures.adalr import Adalr
from slpo_jax.policy.policy import PromptedBatch
from slpo_jax.policy.rollout import sample
from slpo_jax.policy.score import score
from slpo_jax.training.objectives import OBJECTIVES
from tiny import (
    CONFIG,
    END,
    SlowReasoner,
    both_params,
    compiled,
    keys_of,
    policy_of,
    random_prompts,
    take_rows,
)

CONTINUE = 17
STOP = 23
IMPOSSIBLE = (17, 23, END)
HEAT = 0.7
ANSWER_HEAT = 0.6  # of the answers alone: the thought's choices are drawn at HEAT
T = tiny.ROLLOUT.max_latents
ROWS = 400
REASONER = Adalr().on(CONFIG)
CLEAN = dataclasses.replace(
    tiny.ROLLOUT, dropout_rate=0.0, stopping="length", answer_slots=2
)
PROMPTS = take_rows(random_prompts((5,), 5), [0] * ROWS)


def _policy(**changes):
    policy = policy_of(
        CLEAN, REASONER, "adalr", temperature=HEAT, continue_id=CONTINUE, stop_id=STOP
    )
    return dataclasses.replace(
        policy, reasoner=policy.reasoner.never_saying(IMPOSSIBLE)
    ).with_config(**changes)


@pytest.fixture(scope="module")
def params():
    """The tiny reasoner with a filter; its thoughts end at once, late and not at all."""
    params = both_params()
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(REASONER.init, jax.random.key(0))["projector"]
    own = jax.tree.map(
        lambda x: jnp.asarray(
            rng.normal(size=x.shape) / x.shape[0] ** 0.5, jnp.float32
        ),
        shapes,
    )
    backbone = params["reasoner"]["backbone"]
    near = backbone["wte"][CONTINUE] + 0.05 * jnp.asarray(
        rng.normal(size=CONFIG.n_embd), jnp.float32
    )
    table = backbone["wte"].at[STOP].set(near)
    return params | {
        "reasoner": {"backbone": backbone | {"wte": table}, "projector": own}
    }


@pytest.fixture(scope="module")
def rolled(params):
    def run(params, keys):
        policy = _policy(temperature=1.0)
        out = sample(policy, params, PROMPTS, keys, T)
        scores = score(
            policy, params, PROMPTS, out, None, likelihood_temperature=ANSWER_HEAT
        )
        return out, scores

    return compiled(run)(params, keys_of(ROWS))


class _Slow:
    """The log-probabilities of a thought's choices and of its answer, in float64."""

    def __init__(self, params):
        self.reasoner = SlowReasoner(params["reasoner"])
        self.filter = jax.tree.map(
            lambda x: np.asarray(x, np.float64), params["reasoner"]["projector"]
        )
        self.prompt = self.reasoner.prompt(PROMPTS, 0)

    def latent(self, hidden_D):
        x = hidden_D @ self.filter["fc_in"]["kernel"] + self.filter["fc_in"]["bias"]
        x = (
            x * special.ndtr(x) @ self.filter["fc_out"]["kernel"]
            + self.filter["fc_out"]["bias"]
        )
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
        return x * self.filter["norm"]["scale"] + self.filter["norm"]["bias"]

    def thought(self, tau: int):
        """The inputs up to latent tau, and the hidden states after the prompt and each latent."""
        inputs = self.prompt
        for _ in range(tau):
            inputs = np.concatenate(
                [inputs, self.latent(self.reasoner.hidden(inputs)[-1])[None]]
            )
        return inputs, self.reasoner.hidden(inputs)[len(self.prompt) - 1 :]

    def choices(self, hidden_LD):
        """[L, 2]: going on, and stopping."""
        return special.log_softmax(
            self.reasoner.logits(hidden_LD)[:, [CONTINUE, STOP]] / HEAT, axis=-1
        )

    def answer(self, inputs, said: list[int], heat: float = 1.0):
        table = self.reasoner.embed([END, *said[:-1]])
        logits = self.reasoner.logits(
            self.reasoner.hidden(np.concatenate([inputs, table]))[len(inputs) :]
        )
        logits[:, IMPOSSIBLE] = -np.inf
        return special.log_softmax(logits / heat, axis=-1)[np.arange(len(said)), said]


@pytest.mark.slow
def test_it_stops_as_often_as_the_two_tokens_say(params, rolled):
    """Of all thoughts, which are one prompt's, by their length."""
    lengths = np.asarray(rolled[0].lengths)
    log_p = _Slow(params).choices(_Slow(params).thought(T)[1])
    going_on = np.concatenate([[0.0], np.cumsum(log_p[:, 0])])
    stopping = np.concatenate([log_p[:T, 1], [0.0]])  # after the last one it is made to
    expected = np.exp(going_on[: T + 1] + stopping)
    assert expected.sum() == pytest.approx(1.0)
    assert (expected > 0.02).sum() >= 4
    counts = np.bincount(lengths, minlength=T + 1)
    assert (
        np.abs(counts - ROWS * expected)
        < 4 * np.sqrt(ROWS * expected * (1 - expected)) + 1
    ).all()


def test_without_noise_it_stops_at_the_likelier_token(params):
    out = compiled(
        lambda params, keys: sample(
            _policy().without_noise(), params, take_rows(PROMPTS, [0]), keys, T
        )
    )(params, keys_of(1))
    log_p = _Slow(params).choices(_Slow(params).thought(T)[1])
    stops = np.flatnonzero(log_p[:T, 1] > log_p[:T, 0])
    assert int(out.lengths[0]) == (stops[0] if len(stops) else T)


def test_likelihood_is_that_of_the_choices_and_of_the_answer(params, rolled):
    out, scores = rolled
    slow = _Slow(params)
    lengths = np.asarray(out.lengths)
    for tau in range(T + 1):
        row = int(np.flatnonzero(lengths == tau)[0])
        inputs, hidden = slow.thought(tau)
        np.testing.assert_allclose(
            out.actions["of"][row, :tau], inputs[len(slow.prompt) :], atol=1e-4
        )
        log_p = slow.choices(hidden)
        np.testing.assert_allclose(
            scores.action_log_probs[row, :tau], log_p[:tau, 0], atol=1e-4
        )
        assert float(scores.halting_log_prob[row]) == pytest.approx(
            log_p[tau, 1], abs=1e-4
        )
        said = spoken(out.tokens[row])
        assert not {*said} & {*IMPOSSIBLE}
        np.testing.assert_allclose(
            scores.token_log_probs[row, : len(said)],
            slow.answer(inputs, said, ANSWER_HEAT),
            atol=1e-4,
        )


@pytest.mark.slow
def test_exact_is_the_gradient_of_the_choices_and_the_answer(params, rolled):
    """On thoughts of no latent, of two and of T; the latents that were fed are constants."""
    lengths = np.asarray(rolled[0].lengths)
    rows = np.concatenate([np.flatnonzero(lengths == tau)[:1] for tau in (0, T)])
    made = jax.tree.map(lambda x: x[rows], rolled[0])
    policy = _policy(temperature=1.0)
    objective = OBJECTIVES["exact"]()
    batch = PromptedBatch(
        take_rows(PROMPTS, [0]), np.zeros((1, 0), np.uint8), np.zeros(1, np.int32)
    )
    rewards = jnp.array([[1.0, 0.0]])
    advantages = (1, -1)

    def value(params):
        slow = _Slow(params)
        total = 0.0
        for row, advantage in enumerate(advantages):
            tau = int(lengths[rows[row]])
            latents = np.asarray(made.actions["of"][row, :tau], np.float64)
            inputs = np.concatenate([slow.prompt, latents])
            log_p = slow.choices(slow.reasoner.hidden(inputs)[len(slow.prompt) - 1 :])
            total += advantage * (
                log_p[:tau, 0].sum() + (log_p[tau, 1] if tau < T else 0.0)
            )
            total += advantage * slow.answer(inputs, spoken(made.tokens[row])).sum()
        return -total / 2

    gradient = compiled(
        jax.grad(
            lambda params: objective(
                policy, params, batch, made, rewards, jax.random.key(0)
            )[0]
        )
    )(params)
    assert_is_gradient(
        {"reasoner": gradient["reasoner"]}, value, {"reasoner": params["reasoner"]}
    )

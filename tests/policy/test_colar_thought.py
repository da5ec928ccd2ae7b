"""CoLaR's thought against scipy, and a loop over positions in float64: its draws, its density and its stop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import tiny
from slow_policy import assert_is_gradient, colar_law, spoken
from slpo_jax.architectures.colar import Colar
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

SCALE = 0.4
HEAT = 0.7
ANSWER_HEAT = 0.6  # of the answers: thoughts are drawn at HEAT, and their end at 1
T = tiny.ROLLOUT.max_latents
D = CONFIG.n_embd
ROWS = 400
REASONER, MEAN_ONLY = (
    Colar(12, SCALE, gaussian=gaussian).on(CONFIG) for gaussian in (True, False)
)
CLEAN = dataclasses.replace(
    tiny.ROLLOUT, dropout_rate=0.0, stopping="length", answer_slots=2
)
MARK_LIKE = 19  # a likely token, which the mark is made likelier than
PROMPTS = take_rows(random_prompts((5,), 5), [0] * ROWS)
KEY = jax.random.key(0)


def _policy(reasoner=REASONER, **settings):
    return policy_of(
        CLEAN, reasoner, "colar", **dict(end_id=END, temperature=HEAT) | settings
    )


@pytest.fixture(scope="module")
def params():
    """The tiny reasoner with a head; its thoughts end early, late and not at all."""
    rng = np.random.default_rng(1)
    params = both_params()
    shapes = jax.eval_shape(REASONER.init, jax.random.key(0))["head"]
    head = jax.tree.map(
        lambda x: jnp.asarray(
            rng.normal(size=x.shape) / x.shape[0] ** 0.5, jnp.float32
        ),
        shapes,
    )
    backbone = params["reasoner"]["backbone"]
    table = backbone["wte"].at[END].set(1.2 * backbone["wte"][MARK_LIKE])
    return params | {"reasoner": {"backbone": backbone | {"wte": table}, "head": head}}


def _rolled(policy, params, rows=ROWS, **changes):
    policy = policy.with_config(**changes)
    prompts = take_rows(PROMPTS, range(rows))

    def run(params, keys):
        out = sample(policy, params, prompts, keys, T)
        scores = score(
            policy, params, prompts, out, None, likelihood_temperature=ANSWER_HEAT
        )
        return out, scores

    return compiled(run)(params, keys_of(rows))


@pytest.fixture(scope="module")
def rolled(params):
    return _rolled(_policy(), params)


@pytest.fixture(scope="module")
def laws(params, rolled):
    """By row, of each step: the law of the latent, and the probability that the thought ends before it."""
    slow = SlowReasoner(params["reasoner"])
    found = []
    prompt = slow.prompt(PROMPTS, 0)
    for latents, tau in zip(rolled[0].actions["of"], rolled[0].lengths, strict=True):
        hidden = slow.hidden(np.concatenate([prompt, latents[: int(tau)]]))[
            len(prompt) - 1 :
        ]
        ends = special.softmax(
            slow.logits(hidden),
            axis=-1,
        )[:, END]
        found.append(
            [(*colar_law(params, h), p) for h, p in zip(hidden, ends, strict=True)]
        )
    return found


@pytest.mark.slow
def test_draws_are_the_head_s_gaussian_and_end_where_the_mark_is_drawn(rolled, laws):
    out, _ = rolled
    lengths = np.asarray(out.lengths)
    assert lengths.min() == 1  # one at least, as in its own program
    assert (lengths == T).any()
    latents = np.asarray(out.actions["of"], np.float64) / SCALE
    noise = []
    chances = []
    for row, tau in enumerate(lengths):
        for step, (mean, std, _) in enumerate(laws[row][:tau]):
            noise.append((latents[row, step] - mean) / (HEAT * std))
        may_end = [p for *_, p in laws[row][1:T]]
        chances.append(may_end[:tau])
    assert stats.kstest(np.concatenate(noise), "norm").pvalue > 1e-4
    # Of all draws that could have ended a thought, as many did as the probabilities add up to.
    chances = np.concatenate(chances)
    ended = (lengths < T).sum()
    sigma = np.sqrt((chances * (1 - chances)).sum())
    assert sigma > 5
    assert abs(ended - chances.sum()) < 4 * sigma


def test_likelihood_is_scipy_s(rolled, laws):
    """Of u / s, at the temperature, and of the mark after the last latent."""
    out, scores = rolled
    assert len({*np.asarray(out.lengths).tolist()}) > 2
    for row in range(0, ROWS, 40):
        tau = int(out.lengths[row])
        of_row = [
            stats.norm.logpdf(np.asarray(u, np.float64) / SCALE, mean, HEAT * std)
            for u, (mean, std, _) in zip(
                out.actions["of"][row, :tau], laws[row], strict=False
            )
        ]
        np.testing.assert_allclose(
            scores.action_log_probs[row, :tau],
            [each.mean() for each in of_row],
            rtol=2e-4,
            atol=2e-4,
        )
        if tau < T:
            assert float(scores.halting_log_prob[row]) == pytest.approx(
                np.log(laws[row][tau][2]), rel=1e-3
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [("exact", {}), ("grpo", {"advantage": "rloo", "reduction": "sum"})],
)
def test_objectives_are_of_latents_mark_and_answer(params, rolled, name, settings):
    """The gradient on thoughts of two latents and of T, whose advantages are 1 and -1, is that of a loop in float64."""
    lengths = np.asarray(rolled[0].lengths)
    rows = np.concatenate([np.flatnonzero(lengths == tau)[:1] for tau in (2, T)])
    made = jax.tree.map(lambda x: x[rows], rolled[0])
    policy = _policy().with_config(temperature=1.0)
    objective = OBJECTIVES[name](**settings)
    batch = PromptedBatch(
        take_rows(PROMPTS, [0]), np.zeros((1, 0), np.uint8), np.zeros(1, np.int32)
    )
    rewards = jnp.array([[1.0, 0.0]])
    advantages = (1, -1)

    def value(params):
        slow = SlowReasoner(params["reasoner"])
        total = 0.0
        prompt = slow.prompt(PROMPTS, 0)
        for row, advantage in enumerate(advantages):
            tau = int(lengths[rows[row]])
            said = [END, *spoken(made.tokens[row])]
            latents = np.asarray(
                made.actions["of"][row, :tau],
                np.float64,
            )
            thought = np.concatenate([prompt, latents])
            for u, hidden in zip(
                latents, slow.hidden(thought)[len(prompt) - 1 :], strict=False
            ):
                mean, std = colar_law(params, hidden)
                total += (
                    advantage * stats.norm.logpdf(u / SCALE, mean, HEAT * std).mean()
                )
            total += (
                advantage * slow.log_probs(thought, said)[tau == T :].sum()
            )  # at T no mark is drawn
        return -total / 2

    gradient = compiled(
        jax.grad(lambda params: objective(policy, params, batch, made, rewards, KEY)[0])
    )(params)
    own = {"reasoner": gradient["reasoner"]}
    assert_is_gradient(own, value, {"reasoner": params["reasoner"]})


@pytest.mark.slow
def test_without_noise_it_is_the_mean_until_the_mark_is_the_likeliest(params):
    """As LatentTTS's program with least=0, where the first latent may be left out too."""
    slow = SlowReasoner(params["reasoner"])
    prompts = random_prompts(
        (5, 4, 7, 6, 3, 5, 6, 4),
        7,
        seed=3,
    )
    rows = len(prompts.tokens)
    lengths = {}
    for least in (0, 1):
        policy = _policy(least=least).without_noise()
        out = compiled(sample, policy)(
            params, prompts, keys_of(rows), jnp.full(rows, T)
        )
        lengths[least] = np.asarray(out.lengths).tolist()
        for row in range(rows):
            inputs = slow.prompt(prompts, row)
            tau = 0
            while True:
                hidden = slow.hidden(inputs)[-1]
                if tau == T or (tau >= least and slow.logits(hidden).argmax() == END):
                    break
                inputs = np.concatenate(
                    [inputs, SCALE * colar_law(params, hidden)[0][None]]
                )
                tau = tau + 1
            assert lengths[least][row] == tau
            np.testing.assert_allclose(
                out.actions["of"][row, :tau],
                inputs[len(inputs) - tau :],
                rtol=1e-3,
                atol=1e-4,
            )
    assert 0 in lengths[0]
    assert len({*lengths[1]}) > 1, lengths


@pytest.mark.slow
def test_no_deviation_gives_the_thoughts_of_the_mean(params):
    """sd -> 0, a head without it, and the latent policy `latent` with the head's mean are one."""
    head = params["reasoner"]["head"]
    still = head | {
        "log_std": {
            "kernel": 0 * head["log_std"]["kernel"],
            "bias": head["log_std"]["bias"] - 60,
        }
    }
    bare = {name: part for name, part in head.items() if name != "log_std"}
    of = lambda own: params | {"reasoner": params["reasoner"] | {"head": own}}  # noqa: E731
    drawn, _ = _rolled(
        _policy(end_id=None),
        of(still),
        8,
    )
    mean, scores = _rolled(
        _policy(MEAN_ONLY, end_id=None),
        of(bare),
        8,
    )
    plain, _ = _rolled(
        policy_of(CLEAN, MEAN_ONLY, "latent"),
        of(bare),
        8,
    )
    assert scores.action_log_probs is None
    np.testing.assert_allclose(
        drawn.actions["of"],
        mean.actions["of"],
        atol=1e-6,
    )
    np.testing.assert_allclose(
        plain.actions,
        mean.actions["of"],
        atol=1e-6,
    )

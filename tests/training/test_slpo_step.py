"""The SLPO step against a loop over prompts, rollouts and passes (paper Prop. 2), and its metrics as they were."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_gpt2 import dropout_factors, plain_hidden
from small_steps import (
    ALWAYS,
    BATCH,
    CONFIG,
    GROUP,
    NEVER,
    OBJECTIVE,
    PASSES,
    POLICY,
    ROLLOUT,
    difference,
    prompted_batch,
    rigged_reward,
    small_params,
    take_steps,
)
from tiny import END, EOS, compiled, real_tokens, slow_noise

from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer
from slpo_jax.training.rl import roll_out


@pytest.fixture(scope="module")
def first_step():
    return take_steps("rl", [prompted_batch()])


@pytest.fixture(scope="module")
def step_key():
    """Key 0 of the run, stream 2, step 0."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2), 0)


def _roll_out(params, batch, key):
    return roll_out(POLICY, params, batch, rigged_reward, GROUP, key)


@pytest.fixture(scope="module")
def frozen(step_key):
    """The trajectories and rewards that the step sees, as constants."""
    trajectories, rewards = compiled(_roll_out)(small_params(), prompted_batch(), step_key)
    return jax.tree.map(np.array, trajectories.replace(keys=None)), np.array(rewards)


def _pass(params, prompt, h, spoken, factors):
    """One noisy pass over a frozen trajectory: z_1 .. z_tau and the answer's log-probability."""
    wte = params["reasoner"]["backbone"]["wte"]
    hidden = plain_hidden(
        params["reasoner"], jnp.concatenate([wte[prompt], h, wte[np.array([END, *spoken[:-1]])]]), factors
    )
    first = len(prompt) - 1  # the position that produces h_1
    log_probs = jax.nn.log_softmax(hidden[first + len(h) + 1 :] @ wte.T)
    return hidden[first : first + len(h)], sum(log_probs[a, token] for a, token in enumerate(spoken))


def _score(params, prompt, prompt_keys, keys, h, spoken):
    """l~(xi | x) of one trajectory: Gaussian latents, mean answer, forced stop at T."""
    z, answers = [], []
    for prompt_key, key in zip(prompt_keys, keys, strict=True):
        noise = slow_noise(prompt_key, key, len(prompt), len(h), ROLLOUT)
        z_t, answer = _pass(params, prompt, h, spoken, dropout_factors(noise, CONFIG.n_embd, CONFIG.n_layer))
        z.append(z_t)
        answers.append(answer)
    latent, width = 0.0, CONFIG.n_embd
    for t in range(len(h)):
        mu = sum(z_k[t] for z_k in z) / PASSES
        variance = sum(((z_k[t] - mu) ** 2).sum() for z_k in z) / (PASSES * width) + OBJECTIVE.epsilon
        latent += -width / 2 * jnp.log(2 * jnp.pi * variance) - ((h[t] - mu) ** 2).sum() / (2 * variance)
    gate = params["gate"]["out"]
    rho = jax.nn.sigmoid(h @ gate["kernel"][:, 0] + gate["bias"][0])
    stop = sum(jnp.log(1 - rho[t]) for t in range(len(h) - 1))
    if len(h) < ROLLOUT.max_latents:
        stop += jnp.log(rho[-1])
    return latent + sum(answers) / PASSES + stop


def _keys_of_pass(pass_key, example, rollout):
    """A prompt's key is number 0 of its example, its trajectories' are 1, 2, .."""
    of_example = jax.random.fold_in(pass_key, example)
    return jax.random.fold_in(of_example, 0), jax.random.fold_in(of_example, 1 + rollout)


def _slow_loss(params, batch, trajectories, rewards, step_key):
    """-1/B sum_x 1/G sum_i A_i l~(xi_i | x), with nothing batched or padded."""
    pass_keys = jax.random.split(jax.random.fold_in(step_key, 1), PASSES)
    total = 0.0
    for b in range(BATCH):
        prompt = real_tokens(batch.prompts, b)
        for g in range(GROUP):
            row = b * GROUP + g
            tau, tokens = trajectories.lengths[row], trajectories.tokens[row].tolist()
            spoken = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
            advantage = rewards[b, g] - (rewards[b].sum() - rewards[b, g]) / (GROUP - 1)
            if advantage == 0:
                continue
            keys = zip(*(_keys_of_pass(key, batch.index[b], g) for key in pass_keys), strict=True)
            score = _score(params, prompt, *keys, trajectories.actions[row, :tau], spoken)
            total -= advantage * score / GROUP
    return total / BATCH


def test_proposition_2_gradient(first_step, frozen, step_key):
    """The step's gradient is that of the empirical surrogate loss on the frozen batch: the rollout adds nothing."""
    batch = prompted_batch()
    slow = compiled(jax.value_and_grad(lambda params: _slow_loss(params, batch, *frozen, step_key)))
    loss, gradient = slow(small_params())
    assert first_step.metrics[0]["loss"] == pytest.approx(float(loss), rel=1e-3)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient))
    assert scale > 1
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=1e-4 * scale),
        first_step.gradient,
        gradient,
    )
    for part in ("reasoner", "gate"):
        assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient[part])) > 1e-2


def test_metrics_are_means_over_the_frozen_batch(first_step, frozen):
    trajectories, rewards = frozen
    metrics = first_step.metrics[0]
    assert metrics["reward"] == pytest.approx(rewards.mean())
    assert metrics["solved"] == pytest.approx((rewards.max(axis=1) > 0).mean())
    assert metrics["mixed"] == pytest.approx(np.mean([0 < row.mean() < 1 for row in rewards]))
    assert metrics["latent_steps"] == pytest.approx(trajectories.lengths.mean())
    squares = sum(float((g**2).sum()) for g in jax.tree.leaves(first_step.gradient))
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(squares), rel=1e-5)
    assert 0 < metrics["mixed"] <= metrics["solved"] < 1


@pytest.mark.parametrize("reference", [ALWAYS, NEVER])
def test_equal_rewards_change_nothing(reference):
    taken = take_steps("rl", [prompted_batch(references=(reference,) * BATCH)])
    assert taken.metrics[0]["reward"] == (reference == ALWAYS)
    assert (taken.metrics[0]["mixed"], taken.metrics[0]["grad_norm"]) == (0, 0)
    assert difference(taken.params, small_params()) == 0
    for name in ("adafactor", "adamw"):  # and the optimizers make nothing of nothing
        params, optimizer = small_params(), make_optimizer(OptimizerConfig(name, learning_rate=0.1))
        update, _ = jax.jit(optimizer.update)(taken.gradient, optimizer.init(params), params)
        assert difference(optax.apply_updates(params, update), params) == 0


def test_metrics_are_what_they_were(first_step):
    """One step's numbers as they came out when the tests above were first true.

    Guards what those leave open: a change of the keys' derivation, of a default, or of the order in which randomness
    is drawn makes other trajectories, and so breaks reproduction of published runs, even where every law still holds.
    """
    recorded = {
        "loss": -6.3248,
        "reward": 0.5,
        "solved": 0.75,
        "mixed": 0.75,
        "latent_steps": 2.75,
        "latent_log_likelihood": -58.3175,
        "answer_log_likelihood": -17.2970,
        "stop_log_likelihood": -0.97383,
        "surrogate_variance": 0.0788425,
        "grad_norm": 248.748,
    }
    # Loose enough for another version of XLA to round in its own way, far tighter than another draw would be.
    assert first_step.metrics[0] == pytest.approx(recorded, rel=5e-3)

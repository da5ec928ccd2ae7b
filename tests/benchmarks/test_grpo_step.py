"""The benchmark of GRPO's step at tiny shapes: torch's loss and gradient are ours, and the figures add up."""

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import grpo as benchmark
from benchmarks.measure.words import export, make_work
from slpo_jax.architectures.weights import backbone_weights, write_tree
from slpo_jax.errors import UserError
from slpo_jax.policy.policy import Prompts
from slpo_jax.policy.rollout import NO_TOKEN
from slpo_jax.training.rl_loss import make_rollout_loss
from slpo_jax.training.rollouts import roll_out
from tiny import random_tree

torch = pytest.importorskip("torch")

from benchmarks.witness.grpo import make_sequences  # noqa: E402 - after the check that torch is there

PROMPTS = 4
GROUP = 3
TOKENS = 6
ROUNDS = 2
FLAGS = [
    "synthetic:train",
    *f"--prompts {PROMPTS} --samples {GROUP} --tokens {TOKENS} --rounds {ROUNDS}".split(),
]
TINY = {
    "model.n_embd": 16,
    "rl.optimizer.warmup_steps": 0,
    "data.synthetic.train_size": 20,
}


def flags(*more: str) -> argparse.Namespace:
    return benchmark.parse([*FLAGS, *more])


@pytest.fixture(scope="module")
def work(cpu_devices):
    made = make_work(flags(), TINY, "configs/soft_quickstart.py:grpo")
    params = {
        **made.params,
        "reasoner": random_tree(made.setup.reasoner),
    }
    return dataclasses.replace(made, params=params)


@pytest.fixture(scope="module")
def folder(work, tmp_path_factory):
    made = tmp_path_factory.mktemp("exported") / "model"
    export(work.setup, work.params, made)
    return made


@pytest.fixture(scope="module")
def ours(work):
    return benchmark.Ours(work)


REWARDS = np.array(
    [
        [1, 0, 1],
        [0, 0, 1],
        [0, 0, 0],
        [1, 0, 0],
    ],
    np.float32,
)


@pytest.mark.nightly
def test_torch_s_loss_and_gradient_are_ours(work, folder):
    """On the same prompts and completions, of all lengths, and the same rewards; under transformers' names."""
    policy = work.parts.policy
    batch = work.batch(0)
    valid = batch.prompts.valid & (
        np.cumsum(batch.prompts.valid, axis=1) > np.arange(PROMPTS)[:, None]
    )
    batch = batch.replace(prompts=Prompts(batch.prompts.tokens, valid))
    completions = np.random.default_rng(3).integers(5, 30, (PROMPTS * GROUP, TOKENS))
    for row, tokens in enumerate(completions[1:]):
        tokens[row % TOKENS] = policy.config.eos_ids[0]
        tokens[row % TOKENS + 1 :] = policy.config.pad_id

    def rolled_out(params):
        return roll_out(
            policy,
            params,
            batch,
            None,
            GROUP,
            jax.random.key(0),
        )[0].replace(keys=None)

    given = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(rolled_out, work.params)
    )
    keys = jax.random.split(jax.random.key(0), len(completions))
    given = given.replace(tokens=jnp.asarray(completions, jnp.int32), keys=keys)
    rollout_loss = make_rollout_loss(policy, work.parts.objective)

    @jax.jit
    def mean(params):
        total, metrics = rollout_loss(
            params, (batch, given, jnp.asarray(REWARDS)), jax.random.key(1)
        )
        return total / metrics["loss"][1], metrics["log_likelihood"][0]

    (value, likelihood), gradient = jax.value_and_grad(mean, has_aux=True)(work.params)
    theirs = benchmark.Theirs(work, folder)
    found = theirs.witness.accumulate(batch.prompts, torch.tensor(completions), REWARDS)
    assert found == pytest.approx(float(value), abs=1e-6)
    model = work.setup.checkpoint.description.model
    expected = write_tree(backbone_weights(model), gradient["reasoner"]["backbone"])
    grads = {
        name: p.grad.numpy() for name, p in theirs.witness.model.named_parameters()
    }
    assert set(expected) == set(grads)
    largest = max(abs(x).max() for x in expected.values())
    for name, value in expected.items():
        assert abs(value).max() > 1e-3 * largest, name
        np.testing.assert_allclose(
            grads[name], value, atol=2e-5 * largest, err_msg=name
        )
    sequences = make_sequences(
        batch.prompts, torch.tensor(completions), policy.config.eos_ids, multiple=8
    )
    log_probs = theirs.witness.log_probs(sequences)
    assert float(log_probs[sequences.made].sum().detach()) == pytest.approx(
        float(likelihood), rel=1e-5
    )


@pytest.mark.nightly
def test_both_sides_write_as_many_tokens_and_change_the_weights(work, folder, ours):
    """No end among them, whatever is sampled, half of the rewards are 1, and AdamW's first step is the rate."""
    theirs = benchmark.Theirs(work, folder)
    start = jax.tree.map(np.array, ours.state.params["reasoner"])
    for side in (ours, theirs):
        seconds = side.measure(0)
        assert side.sampled.shape == (PROMPTS * GROUP, TOKENS)
        assert not np.isin(
            side.sampled, [*work.parts.policy.config.eos_ids, NO_TOKEN]
        ).any()
        assert len({tuple(row) for row in side.sampled.tolist()}) > PROMPTS
        assert sum(
            seconds[name] for name in ("rollout", "gradient", "other")
        ) == pytest.approx(seconds["step"])
    metrics = ours.metrics
    rate = work.optimizer_config.learning_rate
    assert (metrics["answer_tokens"], metrics["mixed"]) == (TOKENS, 1)
    assert metrics["grad_norm"] > 0
    weights = backbone_weights(work.setup.checkpoint.description.model)
    before, after = (
        write_tree(weights, tree["backbone"])
        for tree in (start, ours.state.params["reasoner"])
    )
    for name, parameter in theirs.witness.model.named_parameters():
        for moved in (after[name], parameter.detach().numpy()):
            assert 0.5 * rate < abs(moved - before[name]).max() < 1.1 * rate


@pytest.mark.nightly
def test_report_has_every_number(work, ours, monkeypatch):
    """Of both sides, in turns."""
    monkeypatch.setattr(benchmark, "Ours", lambda work: ours)  # compiled once
    tried = ("--caches", "dynamic", "static", "--losses", "eager")
    result = benchmark.benchmark(flags(*tried), {"float32": work})
    assert json.loads(json.dumps(result)) == result
    choices = ("dynamic cache", "static cache", "eager loss")
    assert set(result["tried"]) == {
        f"{what} in {dtype}" for what in choices for dtype in ("float32", "bfloat16")
    }
    mine = result["sides"]["slpo_jax, float32"]
    theirs = result["sides"]["torch"]
    ratios = result["ratios"]["slpo_jax, float32"]
    for what in benchmark.PARTS:
        ratio = np.array(theirs[what]["values"]) / mine[what]["values"]
        assert len(ratio) == ROUNDS  # without warm-up
        np.testing.assert_allclose(ratios[what]["values"], ratio)
    tokens = np.array(mine["tokens_per_second"]["values"]) * mine["step"]["values"]
    np.testing.assert_allclose(tokens, PROMPTS * GROUP * TOKENS)
    row = f"| ratio, slpo_jax, float32 | {ratios['step']['median']:.2f} ("
    assert row in benchmark.markdown(result)


def test_prompts_must_fit_the_devices(cpu_devices):
    with pytest.raises(UserError, match=r"--prompts: 3 .* 4 "):
        make_work(flags("--prompts", "3"), TINY, "configs/soft_quickstart.py:grpo")

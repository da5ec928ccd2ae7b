"""The PyTorch implementation that the benchmarks compare with does the same step as slpo_jax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from benchmarks.measure.workload import ending_answers
from slpo_jax.policy.policy import PromptedBatch, Prompts
from slpo_jax.policy.rollout import Trajectories, sample
from slpo_jax.training.objectives.slpo import Slpo, latent_log_likelihood
from slpo_jax.training.optimizer import OptimizerConfig
from tiny import CONFIG, EOS, PAD, ROLLOUT, both_params, compiled, keys_of, policy_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.witness import model as torch_model  # noqa: E402 - after the check that torch is there
from benchmarks.witness import objective as torch_objective  # noqa: E402
from benchmarks.witness.step import Witness  # noqa: E402

PROMPTS = (4, 7, 2)  # lengths; 9 slots
GROUP = 3
PASSES = 2
STEPS = ROLLOUT.max_latents
LENGTHS = np.array(
    [5, 1, 3, 2, 4, 2, 1, 3, 4]
)  # tau, the longest of the last prompts below T
ANSWERS = (6, 2, 1, 3, 5, 2, 4, 1, 3)  # eos included; the first row has no eos
OBJECTIVE = Slpo(passes=PASSES, epsilon=1e-2)
CLEAN = dataclasses.replace(ROLLOUT, dropout_rate=0.0)
NOISY = dataclasses.replace(ROLLOUT, dropout_rate=0.5)
BIAS = -1.0  # of the gate: some rows of a clean rollout stop early and some at T


def witness(
    config=CLEAN, objective=OBJECTIVE, optimizer="adafactor", policy=None, **kwargs
) -> Witness:
    learning = OptimizerConfig(optimizer, learning_rate=1e-3)
    return Witness(
        both_params(bias=BIAS),
        policy or policy_of(config),
        objective,
        GROUP,
        learning,
        **kwargs,
    )


def prompts():
    return jax.tree.map(np.asarray, tiny.random_prompts(PROMPTS, slots=9))


def to_torch(trajectories: Trajectories):
    latents, lengths, tokens = (
        np.array(x)
        for x in (trajectories.actions, trajectories.lengths, trajectories.tokens)
    )
    return torch_objective.Trajectories(
        torch.tensor(latents),
        torch.tensor(lengths, dtype=torch.long),
        torch.tensor(tokens, dtype=torch.long),
    )


@pytest.fixture(scope="module")
def trajectories() -> Trajectories:
    """Latents that no pass of the model would give, thoughts and answers of all lengths."""
    rng = np.random.default_rng(4)
    steps = np.arange(1, STEPS + 1) <= LENGTHS[:, None]
    latents = rng.normal(size=(len(LENGTHS), STEPS, CONFIG.n_embd)) * steps[..., None]
    tokens = rng.integers(0, EOS - 1, size=(len(LENGTHS), ROLLOUT.answer_slots))
    for row, length in zip(tokens[1:], ANSWERS[1:], strict=True):
        row[length - 1 :] = [EOS] + [PAD] * (len(row) - length)
    keys = keys_of(len(LENGTHS))
    return Trajectories(
        jnp.asarray(latents, jnp.float32),
        jnp.asarray(LENGTHS),
        jnp.asarray(tokens, jnp.int32),
        keys,
    )


REWARDS = np.array(
    [
        [1, 0, 1],
        [0, 0, 1],
        [1, 0, 0],
    ],
    np.float32,
)


@pytest.fixture(scope="module")
def expected(trajectories):
    """Our loss by advantage, mean over prompts, and RLOO's gradient."""
    batch = PromptedBatch(prompts(), None, np.arange(len(PROMPTS)))

    def loss(params, advantage):
        objective = dataclasses.replace(OBJECTIVE, advantage=advantage)
        return objective(
            policy_of(CLEAN), params, batch, trajectories, REWARDS, jax.random.key(0)
        )[0] / len(PROMPTS)

    def both(params):
        value, gradient = jax.value_and_grad(loss)(params, "rloo")
        return {
            "rloo": value,
            "grpo": loss(params, "grpo"),
        }, gradient

    return jax.tree.map(np.asarray, compiled(both)(both_params(bias=BIAS)))


@pytest.mark.nightly
def test_loss_is_ours(expected, trajectories):
    """Without noise, for thoughts and answers of several lengths and padded prompts; nearly so in bfloat16."""
    for changes, wanted, rtol in (
        ({"objective": OBJECTIVE}, "rloo", 1e-5),
        ({"objective": dataclasses.replace(OBJECTIVE, advantage="grpo")}, "grpo", 1e-5),
        ({"dtype": torch.bfloat16}, "rloo", 0.03),
    ):
        loss = witness(**changes).loss(prompts(), to_torch(trajectories), REWARDS)
        np.testing.assert_allclose(loss.item(), expected[0][wanted], rtol=rtol)


@pytest.mark.nightly
def test_gradient_is_ours(expected, trajectories):
    made = witness()
    made.loss(prompts(), to_torch(trajectories), REWARDS).backward()
    backbone = expected[1]["reasoner"]["backbone"]
    model = made.model.transformer
    pairs = {
        "wte": (model.wte.weight, backbone["wte"]),
        "wpe": (model.wpe.weight, backbone["wpe"]),
        "c_attn": (
            model.h[1].attn.c_attn.weight,
            backbone["h_1"]["attn"]["c_attn"]["kernel"],
        ),
        "c_fc": (model.h[0].mlp.c_fc.bias, backbone["h_0"]["mlp"]["c_fc"]["bias"]),
        "ln_f": (model.ln_f.weight, backbone["ln_f"]["scale"]),
        "gate": (made.gate.weight, expected[1]["gate"]["out"]["kernel"].T),
    }
    for name, (theirs, wanted) in pairs.items():
        np.testing.assert_allclose(
            theirs.grad,
            wanted,
            rtol=1e-3,
            atol=1e-4 * np.abs(wanted).max(),
            err_msg=name,
        )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"latent_reduction": "mean"},
        {"detach_variance": True},
    ],
    ids=str,
)
def test_latent_term_is_ours(trajectories, changes):
    """Value and gradient with passes that differ: noise-free passes have no variance."""
    z = (
        np.random.default_rng(0)
        .normal(size=(PASSES, *trajectories.actions.shape))
        .astype(np.float32)
    )
    config = dataclasses.replace(OBJECTIVE, **changes)

    def term(z_KNTD):
        settings = (config.epsilon, config.latent_reduction, config.detach_variance)
        likelihood = jax.vmap(
            lambda h, z, length: latent_log_likelihood(
                h,
                z,
                length,
                *settings,
            ),
            in_axes=(0, 1, 0),
        )
        return likelihood(trajectories.actions, z_KNTD, trajectories.lengths)[0]

    tensors = to_torch(trajectories)
    given = torch.tensor(z, requires_grad=True)
    value_N = torch_objective.latent_log_likelihood(
        tensors.latents, given, tensors.lengths, config
    )
    value_N.sum().backward()
    np.testing.assert_allclose(value_N.detach(), term(z), rtol=1e-5)
    np.testing.assert_allclose(
        given.grad, jax.grad(lambda z: term(z).sum())(z), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("stopping", ["threshold", "length"])
def test_rollout_is_ours(stopping):
    config = dataclasses.replace(CLEAN, stopping=stopping)
    rows = jax.tree.map(lambda x: np.repeat(x, GROUP, axis=0), prompts())
    rule = 0.5 if stopping == "threshold" else LENGTHS
    wanted = tiny.run_rollout(
        both_params(bias=BIAS),
        rows,
        keys_of(len(LENGTHS)),
        config=config,
        stop_rule=rule,
    )
    made = witness().rollout(
        prompts(),
        GROUP,
        **({"rule": 0.5} if stopping == "threshold" else {"lengths_N": LENGTHS}),
    )
    assert len(set(np.asarray(wanted.lengths))) > 1
    np.testing.assert_array_equal(made.lengths, wanted.lengths)
    np.testing.assert_array_equal(made.tokens, wanted.tokens)
    np.testing.assert_allclose(made.latents, wanted.actions, atol=2e-5)


def record_noise(made: Witness) -> list:
    """What each dropout layer multiplies with from now on, call by call: [N, L, D]."""
    factors = []
    for module in made.model.modules():
        if isinstance(module, torch_model.PositionDropout):
            module.register_forward_hook(
                lambda _, inputs, out: factors.append(
                    (out / inputs[0]).detach().numpy()
                )
            )
    return factors


def check_factors(factors, noisy_NL):
    """Noise of rate 1/2 at these positions, which differs from row to row, and none elsewhere."""
    assert (factors[~noisy_NL] == 1).all()
    if noisy_NL.any():
        assert set(np.unique(factors[noisy_NL])) == {0, 2}
        assert abs(factors[noisy_NL].mean() - 1) < 5 / factors[noisy_NL].size ** 0.5
        # Of 16 features' noise one pair of positions in 2**16 is alike by chance; shared noise would halve the number.
        assert len(np.unique(factors[noisy_NL], axis=0)) > 0.9 * noisy_NL.sum()


def test_scoring_noise_ends_before_the_last_latent(trajectories):
    made = witness(NOISY)
    factors = record_noise(made)
    made.loss(prompts(), to_torch(trajectories), REWARDS)
    assert len(factors) == 2 * CONFIG.n_layer
    until_N = np.repeat(PROMPTS, GROUP) + LENGTHS - 1
    for site in factors:
        assert site.shape[:2] == (PASSES * len(LENGTHS), (until_N + 1 + ANSWERS).max())
        check_factors(
            site, np.arange(site.shape[1]) < np.tile(until_N, PASSES)[:, None]
        )


@pytest.mark.parametrize("sort_by_length", [False, True])
def test_passk_is_its_rollouts(sort_by_length):
    made = witness()
    batch = prompts()
    rule = 0.5
    rows = [tiny.real_tokens(batch, i) for i in range(len(PROMPTS))]
    tokens, lengths = made.passk(
        rows,
        2,
        4,
        rule,
        sort_by_length,
    )
    assert tokens.shape == (len(PROMPTS), 2, ROLLOUT.answer_slots)
    for i, row in enumerate(rows):
        alone = made.rollout(
            Prompts(row[None], np.ones((1, len(row)), bool)), 1, rule=rule
        )
        np.testing.assert_array_equal(tokens[i], alone.tokens.expand(2, -1))
        np.testing.assert_array_equal(lengths[i], alone.lengths.expand(2))


@pytest.mark.nightly
def test_answers_end_where_the_workload_ends_them():
    at = 2
    params = both_params(bias=BIAS)
    config = dataclasses.replace(CLEAN, stopping="threshold")
    reasoner = ending_answers(tiny.REASONER, EOS, STEPS + at)
    wanted = compiled(sample, policy_of(config, reasoner))(
        params, prompts(), keys_of(len(PROMPTS)), 0.5
    ).tokens
    made = witness(end_answers_at=at).rollout(prompts(), 1, rule=0.5).tokens
    assert (made[:, at] == EOS).any()
    assert (made[:, at + 1 :] == PAD).all()
    np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_step_learns(optimizer):
    """Rewarded trajectories become likelier, and the parts of the step take all of its time."""
    made = witness(ROLLOUT, optimizer=optimizer)
    before = [parameter.detach().clone() for parameter in made.parameters]
    seen = []

    def verify(tokens, references):
        seen.append((tokens, references))
        return np.arange(len(tokens)) % 2 == 0

    seconds = made.step(prompts(), "references", verify, LENGTHS)
    np.testing.assert_array_equal(seen[0][0], made.sampled.tokens)
    np.testing.assert_array_equal(made.sampled.lengths, LENGTHS)
    assert seen[0][1] == "references"
    assert set(seconds) == {"rollout", "surrogate", "backward", "other", "step"}
    assert sum(seconds.values()) == pytest.approx(2 * seconds["step"])
    gradient = torch.cat([parameter.grad.flatten() for parameter in made.parameters])
    assert gradient.norm() == pytest.approx(1.0, rel=1e-4)  # clipped
    change = torch.cat(
        [
            (new - old).flatten()
            for new, old in zip(made.parameters, before, strict=True)
        ]
    )
    assert (change * gradient).sum() < 0
    assert 0 < change.square().mean() ** 0.5 <= 1.01e-3


LACKING = {
    "temperature": {"config": dataclasses.replace(CLEAN, temperature=1.0)},
    "dropout_where": {"config": dataclasses.replace(CLEAN, dropout_where="all")},
    "advantage": {"objective": dataclasses.replace(OBJECTIVE, advantage="pkpo")},
    "policy": {"policy": policy_of(CLEAN, latent_policy="additive", sigma=0.1)},
}


@pytest.mark.parametrize("what", LACKING)
def test_what_is_missing_is_refused(what):
    with pytest.raises(ValueError, match="torch reference"):
        witness(**LACKING[what])

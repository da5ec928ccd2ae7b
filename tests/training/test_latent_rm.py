"""LatentRM: scores of latents against a slow loop and torch, the loss against a loop, labels that need no model."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy import special

import tiny
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.architectures.codi import Codi
from slpo_jax.checkpoints.description import Description
from slpo_jax.checkpoints.identity import read_reward_model
from slpo_jax.errors import UserError
from slpo_jax.policy.policy import PromptedBatch, repeat_to
from slpo_jax.policy.rollout import Trajectories, sample
from slpo_jax.policy.scorers import (
    init_reward_model,
    latent_rm,
    latent_scores,
    thought_scores,
)
from slpo_jax.training import latent_rm_loss as training
from slpo_jax.training.latent_rm_loss import (
    LabelledBatch,
    complete,
    draw_thoughts,
    make_loss,
    rank_loss,
)
from tiny import (
    CONFIG,
    REASONER,
    ROLLOUT,
    SlowReasoner,
    both_params,
    compiled,
    load_hf,
    policy_of,
    random_params,
)

LENGTHS = (4, 6)
THOUGHTS = np.array([3, 5, 1, 2], np.int32)
T = ROLLOUT.max_latents
D = CONFIG.n_embd
RNG = np.random.default_rng(0)
LATENTS = RNG.normal(size=(len(THOUGHTS), T, D)).astype(np.float32)
HEAD = RNG.normal(size=(D, 1)).astype(np.float32)
BIAS = np.float32(0.3)


def reward_model(reasoner):
    return init_reward_model({"reasoner": reasoner}, D) | {
        "classifier": {"kernel": HEAD, "bias": np.full(1, BIAS)}
    }


PROMPTS = tiny.random_prompts(LENGTHS, max(LENGTHS))
ASKED = PromptedBatch(PROMPTS, jnp.zeros((2, 0), jnp.uint8), jnp.arange(2))


def slow_scores(reasoner, transition=lambda hidden_LD: hidden_LD):
    """[N, T], one thought at a time; one that has ended keeps its last score."""
    slow = SlowReasoner(reasoner)
    found = np.zeros((len(THOUGHTS), T))
    for row, length in enumerate(THOUGHTS):
        hidden = slow.hidden(
            np.concatenate([slow.prompt(PROMPTS, row // 2), LATENTS[row, :length]])
        )
        found[row, :length] = transition(hidden[-length:]) @ HEAD[:, 0] + BIAS
        found[row, length:] = found[row, length - 1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["coconut", "codi"])
def test_a_latent_s_score_is_the_slow_loop_s(architecture):
    """CODI's after its projector; under a gate a thought's score has T terms, without as many as it has latents."""
    reasoner = random_params()
    module = REASONER
    expected = slow_scores(reasoner)
    if architecture == "codi":
        module = Codi(24).on(CONFIG)
        reasoner = {**reasoner, "projector": tiny.random_tree(module)["projector"]}
        transition = compiled(module.transition, reasoner)
        expected = slow_scores(reasoner, lambda h: np.asarray(transition(h[None]))[0])
    policy = policy_of(ROLLOUT, module)
    found = compiled(latent_scores, policy)(
        reward_model(reasoner), PROMPTS, LATENTS, THOUGHTS
    )
    np.testing.assert_allclose(found, expected, atol=3e-5)
    thoughts = Trajectories(LATENTS, jnp.asarray(THOUGHTS), None, None)
    whole = {"latent_rm": reward_model(reasoner), **both_params()}
    until_a_step = compiled(thought_scores, policy)
    for until in (1, 3, T):
        found = until_a_step(whole, PROMPTS, thoughts, until)
        np.testing.assert_allclose(found, expected[:, :until].sum(axis=1), atol=1e-4)
    own = [each[:length].sum() for each, length in zip(expected, THOUGHTS, strict=True)]
    fixed = compiled(latent_rm, policy.with_config(stopping="length"))(
        whole, PROMPTS, thoughts
    )
    np.testing.assert_allclose(fixed, own, atol=1e-4)


def test_the_loss_is_a_loop_s():
    scores = RNG.normal(size=(8, T)).astype(np.float32)
    shares = RNG.random((8, T)).astype(np.float32)
    ranked = [
        -float(shares[:, t] @ special.log_softmax(scores[:, t].astype(float)))
        for t in range(T)
    ]
    assert float(rank_loss(scores, shares)) == pytest.approx(np.mean(ranked), rel=1e-5)


def test_a_step_s_loss_is_the_sum_over_problems():
    shares = RNG.random((2, 2, T)).astype(np.float32)
    batch = LabelledBatch(
        PROMPTS, LATENTS.reshape(2, 2, T, D), THOUGHTS.reshape(2, 2), shares
    )
    loss, metrics = compiled(make_loss(policy_of()))(
        reward_model(random_params()), batch, None
    )
    scores = slow_scores(random_params()).reshape(2, 2, T)
    expected = sum(
        float(rank_loss(each, share))
        for each, share in zip(scores, shares, strict=True)
    )
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    chosen = [
        share[score.sum(axis=1).argmax(), -1]
        for score, share in zip(scores, shares, strict=True)
    ]
    assert float(metrics["chosen_share"][0]) == pytest.approx(sum(chosen), rel=1e-5)
    assert float(metrics["thought_share"][0]) == pytest.approx(
        shares[:, :, -1].mean(axis=1).sum(), rel=1e-5
    )


def labels_of(policy, rule, count: int):
    """Two thoughts a prompt and what is said after each of their beginnings."""
    params = both_params()
    key = jax.random.key(5)
    drawn = compiled(lambda: draw_thoughts(policy, params, ASKED, rule, key, 2))()
    said = compiled(
        lambda: complete(
            policy, params, ASKED, drawn.actions, drawn.lengths, rule, key, count
        )
    )()
    completions, latents = map(np.asarray, said)
    begun = np.minimum(drawn.lengths[:, None, None], 1 + np.arange(T)[None, :, None])
    assert (latents >= begun).all()
    return drawn, completions


@pytest.mark.slow
def test_without_noise_thoughts_and_completions_are_the_greedy_run():
    clean = policy_of(
        dataclasses.replace(ROLLOUT, stopping="threshold", dropout_rate=0.0)
    )
    drawn, said = labels_of(clean, 0.6, 3)
    greedy = sample(clean, both_params(), PROMPTS, tiny.keys_of(2), 0.6)
    assert said.shape == (4, T, 3, ROLLOUT.answer_slots)
    assert drawn.lengths.tolist() == repeat_to(greedy.lengths, 4).tolist()
    np.testing.assert_array_equal(
        said, np.broadcast_to(repeat_to(greedy.tokens, 4)[:, None, None], said.shape)
    )


def test_completions_of_every_beginning_have_noise_of_their_own(monkeypatch):
    def said(policy, params, prompts, keys_N, rule, given):
        return SimpleNamespace(
            completions=jax.random.key_data(keys_N), lengths=given.lengths
        )

    monkeypatch.setattr(training, "sample", said)
    batch = PromptedBatch(None, None, jnp.array([7, 2]))
    thoughts = jnp.zeros((4, T, D))
    count = 3
    found, _ = complete(
        policy_of(),
        None,
        batch,
        thoughts,
        jnp.full(4, T),
        0.6,
        jax.random.key(5),
        count,
    )
    assert len(np.unique(found.reshape(-1, 2), axis=0)) == 4 * T * count


@pytest.mark.slow
def test_completions_go_on_from_as_many_latents_as_they_are_labels_of():
    """Where these are all, what is said is the thought's own answer, which has no noise; before, latents are drawn."""
    config = dataclasses.replace(ROLLOUT, stopping="length", dropout_rate=0.0)
    length = 3
    drawn, said = labels_of(
        policy_of(config, latent_policy="additive", sigma=2.0), length, 4
    )
    own = np.broadcast_to(drawn.tokens[:, None, None], said.shape)
    np.testing.assert_array_equal(said[:, length - 1 :], own[:, length - 1 :])
    assert all(not np.array_equal(said[:, at], own[:, at]) for at in range(length - 1))


def published(folder, reasoner, rows: int = CONFIG.vocab_size, **more):
    """The authors' layout, key for key: a GPT-2 without head under `transformer.`, and `classifier`."""
    tensors = {
        name: tensor.detach().numpy().copy()
        for name, tensor in load_hf(reasoner).state_dict().items()
    }
    del tensors["lm_head.weight"]
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"][:rows]
    tensors |= {
        "classifier.weight": HEAD.T.copy(),
        "classifier.bias": np.full(1, BIAS),
    } | more
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_a_published_reward_model_is_read(tmp_path):
    """Its scores are those of torch."""
    torch = pytest.importorskip("torch")
    model = read_reward_model(
        published(tmp_path / "rm", random_params()),
        Description(Coconut(), CONFIG),
        None,
    )
    assert jax.tree.map(jnp.shape, model) == jax.tree.map(
        jnp.shape, reward_model(random_params())
    )
    found = compiled(latent_scores, policy_of())(model, PROMPTS, LATENTS, THOUGHTS)
    gpt2 = load_hf(random_params()).transformer
    for row, length in enumerate(THOUGHTS):
        tokens = torch.tensor(tiny.real_tokens(PROMPTS, row // 2).copy())
        inputs = torch.cat([gpt2.wte(tokens), torch.tensor(LATENTS[row, :length])])[
            None
        ]
        hidden = gpt2(inputs_embeds=inputs).last_hidden_state[0, len(tokens) :]
        expected = (hidden @ torch.tensor(HEAD))[:, 0].detach() + BIAS
        np.testing.assert_allclose(found[row, :length], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "of", "fault"),
    [
        ({"rows": 60}, {}, r"tensor transformer\.wte\.weight has shape \[60, 16\]"),
        (
            {},
            {"n_embd": 32},
            r"has shape \[61, 16\], the model's config says \[61, 32\]",
        ),
        ({}, {"n_layer": 3}, r"tensor transformer\.h\.2\.\S+ is missing"),
        ({}, {"n_layer": 1}, r"tensor transformer\.h\.1\.\S+ is unexpected"),
        (
            {"classifier.weight": np.zeros((2, D), np.float32)},
            {},
            r"classifier\.weight has shape \[2, 16\]",
        ),
    ],
)
def test_one_of_another_reasoner_is_one_line(tmp_path, changes, of, fault):
    source = published(tmp_path / "rm", random_params(), **changes)
    said = rf"^config\.evaluate\.reward_model: is no reward model of this reasoner: {re.escape(source)}: .*{fault}.*$"
    with pytest.raises(UserError, match=said):
        read_reward_model(
            source, Description(Coconut(), dataclasses.replace(CONFIG, **of)), None
        )

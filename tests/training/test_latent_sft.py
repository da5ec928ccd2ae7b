"""Latent-SFT against a plain GPT-2 with masks and positions written out row by row."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import tiny
from plain_gpt2 import plain_hidden
from slow_policy import as_float64
from slpo_jax.architectures.architecture import Text
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import task_tokenizer
from slpo_jax.models.parts import REASONER
from slpo_jax.policy import noise
from slpo_jax.policy.policy import RolloutConfig
from slpo_jax.training.recipes import imitate_config, latent_sft, recipe_of
from slpo_jax.training.recipes.latent_rows import laid_out
from slpo_jax.training.recipes.latent_sft import COMPRESS, ENCODER, LatentSft
from tiny import compiled, policy_of

STEPS = (
    ("2 + 3 = 5",),
    ("4 - 1 = 3", "3 + 2 = 5"),
    (),
    ("1 + 1 = 2", "2 + 5 = 7", "7 - 4 = 3"),
)
PROBLEMS = tuple(
    Problem(f"Tom has {n} pens .", steps, "5") for n, steps in enumerate(STEPS)
)
PROMPT = PromptConfig(format="{question}\n<think>", closing="</ think >")
RATIO = 4
TOP_K = 3


def test_positions_are_the_published_example_s():
    row = laid_out([9, 9, 9], [[1, 2], [3, 4], []], [5, 6, 7])
    _, positions, latents, _ = map(list, zip(*row.cells, strict=True))
    assert positions == [0, 1, 2, 3, 4, 5, 4, 5, 6, 5, 6, 7, 8]
    assert latents == [0, 0, 0, 1, 0, 0, 2, 0, 0, 3, 0, 0, 0]
    assert (row.positions, row.latents) == (9, 3)


def test_labels_that_are_the_model_s_own_are_no_distance():
    """All of its tokens; of fewer the divergence is that of probabilities that are 0 elsewhere."""
    logits = np.random.default_rng(0).normal(size=(2, 3, 11)).astype(np.float32)
    ids = np.argsort(-logits, axis=-1)
    own = np.take_along_axis(special.softmax(logits, axis=-1), ids, axis=-1)
    np.testing.assert_allclose(latent_sft.divergence(own, ids, logits), 0, atol=1e-6)
    few = special.softmax(np.random.default_rng(1).normal(size=(2, 3, 4)), axis=-1)
    whole = np.zeros_like(logits)
    np.put_along_axis(whole, ids[..., :4], few, axis=-1)
    expected = special.rel_entr(whole, special.softmax(logits, axis=-1)).sum(-1)
    np.testing.assert_allclose(
        latent_sft.divergence(few, ids[..., :4], logits), expected, rtol=1e-4
    )


def test_noise_never_makes_the_closing_token_the_likeliest():
    """Of latents that are there; and each weight's logarithm moves within the noise's clamps."""
    q = jnp.array([[0.5, 0.3, 0.2], [0.4, 0.35, 0.25]])
    ids = jnp.array([[7, 8, 9], [8, 7, 9]])
    keys = jax.random.split(jax.random.key(0), 200)
    draw = compiled(lambda key, there: latent_sft.perturb(key, q, ids, there, 8))
    both = np.array([draw(key, jnp.array([True, True])) for key in keys])
    first = np.array([draw(key, jnp.array([True, False])) for key in keys])
    closes = (
        np.take_along_axis(np.asarray(ids)[None], both.argmax(-1)[..., None], -1)[
            ..., 0
        ]
        == 8
    )
    assert not closes.any()
    assert (first[:, 1].argmax(-1) == 0).any()
    assert (first[:, 0].argmax(-1) != 1).all()
    moved = np.log(both) - np.log(q)[None]
    assert 3 < np.ptp(moved, axis=-1).max() <= 4.5 + 1e-4
    np.testing.assert_allclose(both.sum(-1), 1, rtol=1e-5)


@pytest.fixture(scope="module")
def case():
    template = Text().template(task_tokenizer("synthetic", 20), prompt=PROMPT)
    config = dataclasses.replace(
        tiny.CONFIG, vocab_size=len(template.tokenizer), n_positions=64
    )
    rng = np.random.default_rng(0)
    reasoner = Text().on(config)
    shapes = jax.eval_shape(reasoner.init, jax.random.key(0))

    def draw():
        return jax.tree.map(
            lambda x: np.float32(0.3 * rng.normal(size=x.shape)), shapes
        )

    params = {
        REASONER: draw(),
        ENCODER: draw(),
        COMPRESS: {"embedding": np.float32(rng.normal(size=16))},
    }
    rollout = RolloutConfig(
        8, 4, template.closing_ids, template.eos_ids, template.pad_id, dropout_rate=0.0
    )
    policy = policy_of(rollout, reasoner)
    problems = encode_problems(template, PROBLEMS)
    key = jax.random.key(0)
    settings = dataclasses.replace(
        imitate_config(), recipe="latent_sft", cot_steps=2, stage_steps=2, final_steps=2, batch_size=4,
        latent_sft=LatentSft(ratio=RATIO, top_k=TOP_K),
    )  # fmt: skip
    recipe = recipe_of(settings, "curriculum")
    phases = {phase.name: phase for phase in recipe.phases(problems, 8)}
    return SimpleNamespace(**locals())


def _batch(case, recipe, phase):
    return recipe.batch(
        case.problems, phase, 0, 1, 4, (24,), recipe.slots(case.problems, phase)
    )


def _slow(case, phase: str, index: int, moved=0.0):
    """Sums of a problem's cross-entropies and of its divergences, and their numbers.

    Args:
        moved: what the reasoner's embeddings are other than they are, where they are not mixed.
    """
    template = case.template
    decoder, encoder = (as_float64(case.params[name]) for name in (REASONER, ENCODER))
    mixed = decoder["backbone"]["wte"]
    own = encoder["backbone"]["wte"]
    table = mixed + moved
    prompt = case.problems.prompts[index]
    written = [token for step in case.problems.steps[index] for token in step]
    rest = [*template.closing_ids, *case.problems.answers[index], template.eos_id]
    chunks = (
        [written[at : at + RATIO] for at in range(0, len(written), RATIO)]
        if phase != "cot"
        else []
    )
    inputs = list[np.ndarray]()
    compress = list[int]()
    inputs += [own[token] for token in prompt]
    for chunk in chunks:
        inputs += [own[token] for token in chunk] + [case.params[COMPRESS]["embedding"]]
        compress.append(len(inputs) - 1)
    seen = np.tri(len(inputs), dtype=bool)
    for at in compress:
        seen[at + 1 :, at] = False
    read = (
        plain_hidden(encoder, np.array(inputs), {}, case.config.n_head, sees_LL=seen)[
            compress
        ]
        @ own.T
    )
    ids = np.argsort(-read, axis=-1)[:, :TOP_K]
    labels = special.softmax(np.take_along_axis(read, ids, -1), axis=-1)

    # (input, token or None, position, kind); a kind is "main" or the number of a span.
    slots = [(table[token], None, at, "main") for at, token in enumerate(prompt)]
    latents = []
    for n in range(len(chunks)):
        latents.append(len(slots))
        at = len(prompt) + n
        slots.append((labels[n] @ mixed[ids[n]], None, at, "main"))
        span = chunks[n + 1] if phase == "union" and n + 1 < len(chunks) else []
        slots += [(table[token], token, at + 1 + i, n) for i, token in enumerate(span)]
    text = ([*written] if phase == "cot" else []) + rest
    slots += [
        (table[token], token, len(prompt) + len(chunks) + i, "main")
        for i, token in enumerate(text)
    ]
    kinds = [kind for *_, kind in slots]
    seen = np.array([[k <= q and (kinds[q] == kinds[k] if kinds[q] == "main" else
                                  kinds[k] == kinds[q] or latents[kinds[q]] == k)
                      for k in range(len(slots))] for q in range(len(slots))])  # fmt: skip
    inputs, tokens, positions = zip(*(slot[:3] for slot in slots), strict=True)
    hidden = plain_hidden(
        decoder, np.array(inputs), {}, case.config.n_head, np.array(positions), seen
    )
    log_p = special.log_softmax(hidden @ table.T, axis=-1)
    learned = [at for at, token in enumerate(tokens) if token is not None]
    entropy = -sum(log_p[at - 1, tokens[at]] for at in learned)
    away = [
        np.sum(q * (np.log(q) - log_p[at - 1][i]))
        for q, i, at in zip(labels, ids, latents, strict=True)
    ]
    return entropy, len(learned), np.mean(away) if away else 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "same"), [("union", False), ("final", True)])
def test_labels_alone_are_made_without_dropout(case, phase, same):
    batch = _batch(case, case.recipe, case.phases[phase])
    keys = noise.row_keys(case.key, jnp.arange(4))
    made = [
        case.settings.latent_sft.mixtures(
            policy, case.params, case.params[ENCODER], batch, keys
        )[0]
        for policy in (case.policy, case.policy.with_config(dropout_rate=0.5))
    ]
    assert np.array_equal(*made) == same


@pytest.mark.parametrize("phase", ["cot", "union", "final"])
def test_loss_is_the_slow_loop_s(case, phase, monkeypatch):
    """A problem without steps has no latents; labels are as the encoder makes them."""
    monkeypatch.setattr(latent_sft, "perturb", lambda key, q_NM, *rest, closing: q_NM)
    batch = _batch(case, case.recipe, case.phases[phase])
    total, sums = compiled(case.recipe.loss_of(case.policy))(
        case.params, batch, case.key
    )
    found = [_slow(case, phase, int(index) % 4) for index in batch.draw_ids]
    count = sum(number for _, number, _ in found)
    expected = sum(entropy for entropy, *_ in found)
    if phase == "final":
        expected += count * np.mean([away for *_, away in found])
    assert float(sums["loss"][1]) == count
    assert float(total) == pytest.approx(expected, rel=2e-4)


def test_mixed_embeddings_are_constants(case):
    """Along one direction of all embeddings, by differences of the slow loop with those held that are mixed."""
    batch = _batch(case, case.recipe, case.phases["union"])
    along = np.random.default_rng(3).normal(
        size=case.params[REASONER]["backbone"]["wte"].shape
    )

    def total(step):
        return sum(
            _slow(case, "union", int(index) % 4, step * along)[0]
            for index in batch.draw_ids
        )

    grads, _ = compiled(jax.grad(case.recipe.loss_of(case.policy), has_aux=True))(
        case.params, batch, case.key
    )
    expected = (total(1e-5) - total(-1e-5)) / 2e-5
    assert float(np.sum(grads[REASONER]["backbone"]["wte"] * along)) == pytest.approx(
        expected, rel=1e-3
    )


@pytest.mark.slow
def test_phases_train_their_parts(case):
    """With adapters, which are the encoder's own and the reasoner's."""
    only = (REASONER,)
    reading = (ENCODER, COMPRESS)
    trains = {
        "cot": only,
        "encoder": reading,
        "reasoner": only,
        "union": (*only, *reading),
        "final": only,
    }
    assert {name: phase.trains for name, phase in case.phases.items()} == trains
    copies = {name: phase.copies for name, phase in case.phases.items() if phase.copies}
    assert copies == {"encoder": ((ENCODER, REASONER),)}
    adapted = dataclasses.replace(
        case.settings, lora=dataclasses.replace(case.settings.lora, rank=2)
    )
    recipe = recipe_of(adapted, "curriculum")
    trained = {
        part for phase in recipe.phases(case.problems, 8) for part in phase.trains
    }
    assert trained == {"adapter", "encoder_adapter", COMPRESS}
    params = {REASONER: case.params[REASONER]}
    own = recipe.init(jax.random.key(0), case.policy, params)
    assert set(own) == trained | {ENCODER}
    batch = _batch(case, recipe, recipe.phases(case.problems, 8)[3])

    def loss(own):
        return recipe.loss_of(case.policy)(
            {**jax.tree.map(jnp.asarray, params), **own}, batch, case.key
        )[0]

    grads = compiled(jax.grad(loss))(own)
    assert {
        name
        for name, tree in grads.items()
        if any(jnp.any(leaf) for leaf in jax.tree.leaves(tree))
    } >= trained

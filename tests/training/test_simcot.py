"""SIM-CoT against a loop over rows and thoughts, on COCONUT and on CODI; and without weight it is the recipe's own."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import tiny
from codi_run import new_tokenizer
from plain_gpt2 import plain_hidden
from slow_policy import as_float64
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.architectures.codi import Codi
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import task_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.policy import noise
from slpo_jax.policy.policy import RolloutConfig
from slpo_jax.training.recipes import imitate_config, recipe_of
from slpo_jax.training.recipes.simcot import DECODER
from tiny import SlowReasoner, compiled, policy_of, real_tokens

LONG = ("1 + 1 = 2", "2 + 5 = 7", "7 - 4 = 3", "3 + 1 = 4", "4 + 4 = 8", "8 - 2 = 6")
STEPS = (("2 + 3 = 5",), ("4 - 1 = 3", "3 + 2 = 5"), LONG[:3], LONG)
PROBLEMS = tuple(
    Problem(f"Tom has {n} pens .", steps, steps[-1].split()[-1])
    for n, steps in enumerate(STEPS)
)
LATENTS = 4
WEIGHT = 0.7
KEY = jax.random.key(0)
# Of each problem: what its thoughts say, by hand. COCONUT's have two latents each, CODI's one, and there is one more.
SAID = {
    "curriculum": [
        ["2 + 3 = 5", "### 5"],
        ["4 - 1 = 3", "3 + 2 = 5"],
        ["1 + 1 = 2", "2 + 5 = 7 \n 7 - 4 = 3"],
        ["1 + 1 = 2", " \n ".join(LONG[1:])],
    ],
    "distil": [
        ["2 + 3 = 5"],
        ["4 - 1 = 3", " 3 + 2 = 5"],
        ["1 + 1 = 2", " 2 + 5 = 7", " 7 - 4 = 3"],
        ["1 + 1 = 2", " 2 + 5 = 7", " 7 - 4 = 3", " 3 + 1 = 4", " 4 + 4 = 8 8 - 2 = 6"],
    ],
}


def _settings(name: str, **changes):
    own = {
        "curriculum": dict(c_thought=2, max_latent_stage=2),
        "distil": dict(c_thought=1, max_latent_stage=LATENTS),
    }
    few = dict(cot_steps=0, stage_steps=0, final_steps=3, batch_size=4)
    return dataclasses.replace(imitate_config(), **few | own[name] | changes)


@pytest.fixture(scope="module", params=sorted(SAID))
def case(request, tmp_path_factory):
    """A reasoner that feeds its hidden states back, the recipe's own and SIM-CoT's loss, and a batch of four rows."""
    name = request.param
    coconuts = name == "curriculum"
    texts = (
        task_tokenizer("synthetic", 20)
        if coconuts
        else new_tokenizer(tmp_path_factory, digits=False)
    )
    template = (Coconut() if coconuts else Codi(1)).template(texts)
    config = dataclasses.replace(
        tiny.CONFIG, vocab_size=len(template.tokenizer), n_positions=64
    )
    rng = np.random.default_rng(0)
    reasoner = Coconut().on(config)
    shapes = jax.eval_shape(reasoner.init, jax.random.key(0))

    def draw():
        return jax.tree.map(
            lambda x: np.float32(0.3 * rng.normal(size=x.shape)), shapes
        )

    params = {"reasoner": draw(), "gate": tiny.random_gate(), DECODER: draw()}
    rollout = RolloutConfig(
        LATENTS,
        4,
        template.closing_ids,
        template.eos_ids,
        template.pad_id,
        dropout_rate=0.0,
    )
    problems = encode_problems(template, PROBLEMS)
    policy = policy_of(rollout, reasoner)
    settings = _settings(name)
    recipe = recipe_of(dataclasses.replace(settings, recipe="simcot"), name)
    (phase,) = recipe.phases(problems, LATENTS)
    batch = recipe.batch(problems, phase, 0, 1, 4, (24,), recipe.slots(problems, phase))
    return SimpleNamespace(**locals())


def _explained(case) -> float:
    """What SIM-CoT adds to the loss, thought by thought."""
    slow = SlowReasoner(case.params["reasoner"], case.config)
    found = {}
    coconuts = case.coconuts
    tokenizer = case.template.tokenizer
    backbone = as_float64(case.params[DECODER]["backbone"])
    own = case.batch.base if coconuts else case.batch.base.student
    for row, index in enumerate(own.draw_ids % len(PROBLEMS)):
        prompt = real_tokens(own.prompts, row)
        latents = slow.think(prompt, LATENTS + 1)
        for place, text in enumerate(SAID[case.name][index]):
            ids = [
                *tokenizer(text, add_special_tokens=False)["input_ids"],
                case.template.eos_id,
            ]
            thought = (
                latents[2 * place : 2 * place + 2]
                if coconuts
                else latents[place : place + 1]
            )
            inputs = np.concatenate(
                [thought, slow.embed(ids[:-1]).reshape(-1, thought.shape[1])]
            )
            shifted = {
                "backbone": backbone
                | {"wpe": backbone["wpe"][1:] if coconuts else backbone["wpe"]}
            }
            hidden = plain_hidden(shifted, inputs, {}, case.config.n_head)
            logits = hidden[len(thought) - 1 :] @ backbone["wte"].T
            log_probs = special.log_softmax(logits, axis=-1)
            found.setdefault(place, []).append(
                [-log_probs[at, token] for at, token in enumerate(ids)]
            )
    if coconuts:  # the sum over tokens, divided by the rows; the mean over thoughts
        return np.mean([sum(map(sum, texts)) / 4 for texts in found.values()])
    return np.mean(
        [np.mean(np.concatenate(texts)) for texts in found.values()]
    )  # over tokens, then over thoughts


def _weighted(case, weight: float):
    """SIM-CoT's recipe."""
    simcot = type(case.settings.simcot)(weight=weight)
    return recipe_of(
        dataclasses.replace(case.settings, recipe="simcot", simcot=simcot), case.name
    )


@pytest.mark.slow
def test_explanations_are_the_slow_loop_s(case):
    total, sums = compiled(_weighted(case, WEIGHT).loss_of(case.policy))(
        case.params, case.batch, KEY
    )
    plain = recipe_of(case.settings, case.name)
    base, own = compiled(plain.loss_of(case.policy))(case.params, case.batch.base, KEY)
    explained, count = map(float, sums["explained"])
    assert count == float(own["loss"][1])
    assert explained / count == pytest.approx(_explained(case), rel=2e-4)
    assert float(total) == pytest.approx(float(base) + WEIGHT * explained, rel=1e-5)


@pytest.mark.parametrize("case", ["curriculum"], indirect=True)  # CODI has no stages
def test_a_stage_s_thoughts_say_the_steps_that_they_replace(case):
    """And no other, in the last stage too; where no step is written the last thought says all that are left."""
    settings = dataclasses.replace(case.settings, recipe="simcot", stage_steps=2)
    recipe = recipe_of(settings, case.name)
    said = []
    for phase in recipe.phases(case.problems, LATENTS):
        batch = recipe.batch(
            case.problems, phase, 0, 1, 4, (24,), recipe.slots(case.problems, phase)
        )
        row = [index % len(PROBLEMS) for index in batch.base.draw_ids].index(3)
        texts = zip(batch.texts.targets[row], batch.texts.weights[row], strict=True)
        said.append(
            [
                case.template.tokenizer.decode(text[weight > 0][:-1])
                for text, weight in texts
            ]
        )
    assert said == [[LONG[0]], [LONG[0], LONG[1]], SAID["curriculum"][3]]


@pytest.mark.parametrize("case", ["curriculum"], indirect=True)
@pytest.mark.parametrize(
    ("final_latents", "stages"),
    [("published", 2), ("published", 6), ("steps", 2), ("steps", 6), ("random", 6)],
)
def test_texts_have_as_many_slots_as_some_row_needs(case, final_latents, stages):
    """Not those of a number of latents that no problem has: the decoder would read padding alone."""
    settings = dataclasses.replace(
        case.settings,
        recipe="simcot",
        c_thought=1,
        max_latent_stage=stages,
        final_latents=final_latents,
    )
    recipe = recipe_of(settings, case.name)
    (phase,) = recipe.phases(case.problems, stages)
    slots = recipe.slots(case.problems, phase)
    batch = recipe.batch(case.problems, phase, 0, 1, 64, (24,), slots)
    used = batch.texts.weights.any(axis=(0, 1)).sum()
    assert used == batch.texts.weights.shape[-1]


@pytest.mark.parametrize("case", ["distil"], indirect=True)
def test_thoughts_that_say_nothing_are_no_part_of_codi_s_mean(case):
    problems = encode_problems(
        case.template, PROBLEMS[:2]
    )  # of two steps at most, for five thoughts
    batch = case.recipe.batch(
        problems, case.phase, 0, 1, 4, (24,), case.recipe.slots(problems, case.phase)
    )
    half = batch.base.student.suffix.weights.sum() / 2
    np.testing.assert_allclose(
        batch.texts.weights.sum(axis=(0, 2)), [half, half, 0, 0, 0], rtol=1e-6
    )


def test_positions_are_those_of_the_decoder_too(case):
    """Of a short question with long steps the decoder needs more than the reasoner."""
    long = [step for _ in range(6) for step in LONG]
    problem = dataclasses.replace(PROBLEMS[3], question="pens .", steps=tuple(long))
    problems = encode_problems(case.template, [problem])
    ((positions, *_, count, longest),) = case.recipe.needs(problems, case.phase)
    recipe = recipe_of(case.settings, case.name)
    ((own_positions, *_),) = recipe.needs(problems, case.phase)
    batch = case.recipe.batch(
        problems, case.phase, 0, 1, 4, (24,), case.recipe.slots(problems, case.phase)
    )
    rows, most, slots = batch.texts.tokens.shape
    assert (rows, most, slots) == (4, count, longest)
    first, latents = (1, 2) if case.coconuts else (0, 1)
    decoder_positions = first + latents + slots - 1
    assert positions == max(own_positions, decoder_positions)
    if case.coconuts:
        assert decoder_positions > own_positions, "else nothing is tested"


@pytest.mark.parametrize("case", ["curriculum"], indirect=True)
def test_a_row_s_mean_is_over_its_own_thoughts(case):
    """Of a number of latents that is drawn for each row: every token weighs 1 over rows and the row's thoughts."""
    recipe = recipe_of(
        dataclasses.replace(case.settings, recipe="simcot", final_latents="random"),
        case.name,
    )
    (phase,) = recipe.phases(case.problems, LATENTS)
    batch = recipe.batch(
        case.problems, phase, 0, 1, 16, (24,), recipe.slots(case.problems, phase)
    )
    total = batch.base.suffix.weights.sum()
    counts = batch.base.latents // 2
    assert {1, 2} <= set(counts)
    for count, weights in zip(counts, batch.texts.weights, strict=True):
        assert (weights.max(axis=-1) > 0).sum() == count
        np.testing.assert_allclose(
            weights[weights > 0], total / (16 * max(1, count)), rtol=1e-6
        )


@pytest.mark.slow
def test_the_second_model_has_dropout_where_the_published_one_has(case):
    """CODI's; COCONUT's is never in training mode. The reasoner's states are one vector, whatever is dropped."""
    flat = jax.tree.map(np.zeros_like, case.params["reasoner"])
    flat["backbone"]["ln_f"]["bias"] += np.linspace(
        -1, 1, case.config.n_embd, dtype=np.float32
    )
    params = case.params | {"reasoner": flat}
    found = []
    for rate in (0.0, 0.5):
        policy = case.policy.with_config(dropout_rate=rate)
        sums = compiled(case.recipe.loss_of(policy))(params, case.batch, KEY)[1]
        found.append(float(sums["explained"][0]))
    assert (found[0] == found[1]) == (case.name == "curriculum")


@pytest.mark.parametrize("case", ["distil"], indirect=True)
def test_no_two_forwards_share_a_row_s_key(case, monkeypatch):
    """CODI's of the student and of the teacher, and of each thought the decoder's."""
    rows = []
    row_keys = noise.row_keys

    def kept(*of):
        rows.append(row_keys(*of))
        return rows[-1]

    def keys(params, key):
        case.recipe.loss_of(case.policy)(params, case.batch, key)
        return [jax.random.key_data(each) for each in rows]

    monkeypatch.setattr(noise, "row_keys", kept)
    found = compiled(keys)(case.params, KEY)
    thoughts = case.batch.texts.targets.shape[1]
    assert [len(each) for each in found] == [4, 4, 4 * thoughts]
    assert len(np.unique(jnp.concatenate(found), axis=0)) == 4 * (2 + thoughts)


@pytest.mark.slow
def test_without_weight_it_is_the_recipe_s_own(case):
    """Loss and gradient; with weight, the gradient of the explanations reaches the reasoner through the latents."""

    def gradient(recipe, batch):
        graded = compiled(jax.value_and_grad(recipe.loss_of(case.policy), has_aux=True))
        (_, sums), grads = graded(case.params, batch, KEY)
        return sums["loss"], grads

    own = gradient(recipe_of(case.settings, case.name), case.batch.base)
    jax.tree.map(
        np.testing.assert_array_equal, gradient(_weighted(case, 0.0), case.batch), own
    )
    _, weighted = gradient(case.recipe, case.batch)
    assert all(np.any(x) for x in jax.tree.leaves(weighted[DECODER]))
    kernel, plain = (
        tree["reasoner"]["backbone"]["h_0"]["mlp"]["c_fc"]["kernel"]
        for tree in (weighted, own[1])
    )
    assert np.abs(kernel - plain).max() > 1e-4


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("curriculum", dict(c_thought=0), "c_thought"),
        ("distil", dict(final_latents="random"), "final_latents"),
    ],
)
def test_what_can_not_be_explained(name, changes, key):
    with pytest.raises(UserError, match=rf"^config\.imitate\.{key}: "):
        recipe_of(_settings(name, recipe="simcot", **changes), name)

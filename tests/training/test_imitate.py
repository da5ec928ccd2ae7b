"""The COCONUT curriculum by hand, and its loss against a loop that feeds latents back one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from slow_policy import as_float64, assert_is_gradient
from small_steps import (
    CONFIG,
    IMITATION,
    PROMPTS,
    difference,
    imitation_batch,
    small_params,
    take_steps,
)
from tiny import SlowReasoner, compiled, real_tokens, slow_factors

from slpo_jax.checkpoints.architectures.coconut import Coconut
from slpo_jax.data.batches import batch_indices, encode_problems
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import arithmetic_tokenizer
from slpo_jax.training.recipes import ImitateSettings, Phase, curriculum

STEPS = (("2 + 3 = 5",), ("4 - 1 = 3", "3 x 2 = 6"), ("1 + 1 = 2", "2 + 5 = 7", "7 - 4 = 3"))
RECIPE = curriculum.Curriculum()(ImitateSettings())
PROBLEMS = tuple(Problem(f"Tom has {n} pens .", steps, steps[-1].split()[-1]) for n, steps in enumerate(STEPS))


@pytest.fixture(scope="module")
def problems():
    return encode_problems(Coconut().template(arithmetic_tokenizer(20)), PROBLEMS)


def _phases(**changes):
    settings = dict(
        cot_steps=10, stage_steps=5, final_steps=20, c_thought=2, max_latent_stage=3, final_latents="published",
    )  # fmt: skip
    plan = curriculum.phases(ImitateSettings(**settings | changes), 8)
    assert {(each.rise, each.trains) for each in plan} <= {(0, ())}
    return [dataclasses.astuple(each)[:6] for each in plan]


def test_phases_of_coconut():
    assert _phases() == [
        ("cot", 0, 10, 0, 0, 0),
        ("stage_1", 10, 15, 1, 2, 2),
        ("stage_2", 15, 20, 2, 4, 4),
        ("stage_3", 20, 25, 3, 6, 6),
        ("final", 25, 45, None, 6, 6),
    ]


def test_phases_that_draw_the_last_latents():
    assert _phases(final_latents="random", max_latent_stage=1) == [
        ("cot", 0, 10, 0, 0, 0),
        ("stage_1", 10, 15, 1, 2, 2),
        ("final", 15, 35, None, None, 8),
    ]


@pytest.mark.parametrize("final_latents", ["published", "random"])
def test_phases_without_thoughts_drop_steps_alone(final_latents):
    assert _phases(c_thought=0, max_latent_stage=2, final_latents=final_latents) == [
        ("cot", 0, 10, 0, 0, 0),
        ("stage_1", 10, 15, 1, 0, 0),
        ("stage_2", 15, 20, 2, 0, 0),
        ("final", 20, 40, None, 0, 0),
    ]


def test_phases_of_no_steps_are_left_out():
    assert _phases(cot_steps=0, stage_steps=0) == [("final", 0, 20, None, 6, 6)]
    assert _phases(cot_steps=0, stage_steps=0, final_steps=0) == []


def _words(problems, ids):
    """Ids as words, the line break shown."""
    return " ".join(problems.template.tokenizer.convert_ids_to_tokens([int(i) for i in ids])).replace("\n", "|")


SUFFIXES = {
    0: ("2 + 3 = 5 | ### 5", "4 - 1 = 3 | 3 x 2 = 6 | ### 6", "1 + 1 = 2 | 2 + 5 = 7 | 7 - 4 = 3 | ### 3"),
    1: ("### 5", "3 x 2 = 6 | ### 6", "2 + 5 = 7 | 7 - 4 = 3 | ### 3"),
    2: ("### 5", "### 6", "7 - 4 = 3 | ### 3"),
    None: ("### 5", "### 6", "### 3"),
}


@pytest.mark.parametrize(("dropped", "latents"), [(0, 0), (1, 2), (2, 4), (None, 6)])
def test_batch_by_hand(problems, dropped, latents):
    phase = Phase("x", 0, 9, dropped, latents, latents)
    ((slots,),) = RECIPE.slots(problems, phase)
    longest = max(len(suffix.split()) for suffix in SUFFIXES[dropped]) + 1  # eos; the end marker is an input alone
    assert longest <= slots < longest + 4
    assert slots % 4 == 0
    batch = RECIPE.batch(problems, phase, 7, 3, 5, (12, 9), ((slots,),))
    np.testing.assert_array_equal(batch.index % 3, batch_indices(3, 7, 3, 5))
    assert len(set(batch.index.tolist())) == 5  # an example that comes again has noise of its own
    np.testing.assert_array_equal(batch.latents, np.full(5, latents))
    assert batch.prompts.tokens.shape == (5, 9)  # six words, a line break and the start marker fit the smaller bucket
    for row, example in enumerate(batch.index % 3):
        prompt = real_tokens(batch.prompts, row)
        assert _words(problems, prompt) == f"Tom has {example} pens . | <|start-latent|>"
        kept = batch.suffix.weights[row] > 0
        text = SUFFIXES[dropped][example]
        assert _words(problems, batch.suffix.tokens[row][kept]) == f"<|end-latent|> {text}"
        assert _words(problems, batch.suffix.targets[row][kept]) == f"{text} <eos>"
        assert kept.tolist() == [True] * (len(text.split()) + 1) + [False] * (slots - len(text.split()) - 1)


def test_drawn_latents_lie_between_the_steps_and_t(problems):
    phase, seen = Phase("final", 0, 9, None, None, 4), {0: [], 1: [], 2: []}
    for step in range(100):
        batch = RECIPE.batch(problems, phase, step, 0, 6, (12,), ((4,),))
        for example, latents in zip(batch.index % 3, batch.latents, strict=True):
            seen[int(example)].append(int(latents))
    for example, drawn in seen.items():
        least = len(STEPS[example])
        assert set(drawn) == set(range(least, 5))
        share = 1 / (5 - least)  # each is as likely as the others; 200 draws, five standard errors
        for latents in range(least, 5):
            spread = 5 * (share * (1 - share) / 200) ** 0.5
            assert np.mean(np.array(drawn) == latents) == pytest.approx(share, abs=spread)
    again = RECIPE.batch(problems, phase, 17, 0, 6, (12,), ((4,),))
    np.testing.assert_array_equal(RECIPE.batch(problems, phase, 17, 0, 6, (12,), ((4,),)).latents, again.latents)


def test_latents_by_steps_are_as_many_as_are_dropped(problems):
    plan = curriculum.phases(ImitateSettings(c_thought=2, max_latent_stage=2, final_latents="steps"), 8)
    for phase, most in zip(plan, (0, 1, 2, 2), strict=True):
        batch = RECIPE.batch(problems, phase, 3, 0, 6, (12,), RECIPE.slots(problems, phase))
        assert batch.latents.tolist() == [2 * min(len(STEPS[example]), most) for example in batch.index % 3]
    assert {len(steps) for steps in STEPS} >= {1, 2}


def test_a_problem_without_steps_has_a_latent_at_least(problems):
    """And a place for each that it can have, where their number is drawn."""
    bare = encode_problems(problems.template, [Problem("Tom has 3 pens .", (), "3")])
    phase = Phase("final", 0, 9, None, None, 3)
    drawn = {int(RECIPE.batch(bare, phase, step, 0, 1, (12,), ((4,),)).latents[0]) for step in range(60)}
    assert drawn == {1, 2, 3}
    # Prompt, latents, and what is fed after them: the end marker, ### and 3.
    assert curriculum.needs(bare, phase) == [(len(bare.prompts[0]) + 3 + 3, 3)]


def test_a_batch_takes_the_smallest_bucket_that_holds_it(problems):
    phase = Phase("cot", 0, 9, 0, 0, 0)
    ((longest,),) = RECIPE.slots(problems, phase)
    needed = {index: len(problems.suffix(index, 0)) - 1 for index in range(len(problems))}
    small = min(needed.values())
    assert small < max(needed.values()) <= longest
    buckets = RECIPE.slots(problems, phase, (longest + 1, small))
    assert buckets == ((small, longest),)
    sizes = set()
    for step in range(6):
        batch = RECIPE.batch(problems, phase, step, 0, 1, (12,), buckets)
        sizes.add(batch.suffix.tokens.shape[1])
        assert batch.suffix.tokens.shape[1] == (small if needed[int(batch.index[0])] <= small else longest)
    assert sizes == {small, longest}


def test_more_steps_than_slots_takes_all_slots(problems):
    phase = Phase("final", 0, 9, None, None, 2)
    batch = RECIPE.batch(problems, phase, 0, 0, 3, (12,), ((4,),))
    assert batch.latents[list(batch.index).index(2)] == 2


def _factors(batch, key, latents_B):
    """Each row's noise, which is on everywhere: factors by site."""
    found = []
    for row, prompt in enumerate(PROMPTS):
        used = int(batch.suffix.weights[row].sum())
        layout = IMITATION.having(dropout_where="all", answer_slots=used).config
        row_key = jax.random.fold_in(key, batch.index[row])
        found.append(slow_factors(row_key, row_key, prompt, int(latents_B[row]), layout))
    return found


def _slow_loss(params, batch, factors_B, latents_B, thoughts_B=None):
    """Mean cross-entropy of the suffixes' tokens, row by row, without padding, and what was thought.

    Args:
        thoughts_B: latents to take as they are; None makes them.
    """
    reasoner, total, count, thoughts = SlowReasoner(params["reasoner"]), 0.0, 0, []
    for row, factors in enumerate(factors_B):
        reasoner.factors = factors
        prompt, used = real_tokens(batch.prompts, row), int(batch.suffix.weights[row].sum())
        fed, targets = batch.suffix.tokens[row, :used], batch.suffix.targets[row, :used]
        thoughts.append(reasoner.think(prompt, latents_B[row]) if thoughts_B is None else thoughts_B[row])
        inputs = np.concatenate([reasoner.embed(prompt), thoughts[row], reasoner.embed(fed)])
        log_probs = special.log_softmax(reasoner.logits(reasoner.hidden(inputs)[-used:]), axis=-1)
        total -= sum(log_probs[a, target] for a, target in enumerate(targets))
        count += used
    return total / count, thoughts


@pytest.fixture(scope="module")
def step_key():
    """Key 0 of the run, stream 0, step 0."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 0)


@pytest.mark.slow
def test_loss_and_gradient_are_the_slow_loop_s(step_key):
    batch = imitation_batch()
    taken = take_steps("imitate", [batch])
    factors = _factors(batch, step_key, batch.latents)
    params = as_float64(small_params())
    loss, thoughts = _slow_loss(params, batch, factors, batch.latents)
    assert taken.metrics[0]["loss"] == pytest.approx(loss, rel=1e-4)
    assert set(taken.gradient) == {"reasoner"}

    def value(reasoner, thoughts=None):
        return _slow_loss({"reasoner": reasoner}, batch, factors, batch.latents, thoughts)[0]

    assert_is_gradient(taken.gradient["reasoner"], value, params["reasoner"])
    # The gradient through the latents is no small part of it.
    with pytest.raises(AssertionError, match="is not"):
        assert_is_gradient(taken.gradient["reasoner"], lambda p: value(p, thoughts), params["reasoner"], rel=0.1)
    assert difference(taken.params["gate"], small_params()["gate"]) == 0


@pytest.mark.slow
def test_loss_without_latents_is_the_slow_loop_s(step_key):
    """Stage 0: every step written out, no latent slots at all."""
    batch = imitation_batch()
    loss_fn = curriculum.Curriculum()(ImitateSettings()).loss_of(IMITATION.having(max_latents=0))
    none = np.zeros(len(batch.index), np.int32)
    total, sums = compiled(loss_fn)(small_params(), batch.replace(latents=none), step_key)
    factors = _factors(batch, step_key, none)
    expected, _ = _slow_loss(as_float64(small_params()), batch, factors, none)
    assert float(total / sums["loss"][1]) == pytest.approx(expected, rel=1e-4)
    assert float(sums["loss"][1]) == batch.suffix.weights.sum()


def test_accuracy_counts_rows_of_which_every_token_is_right(step_key):
    """A model that puts all weight on one token, by a final norm without scale."""
    params, batch = small_params(), imitation_batch()
    backbone = params["reasoner"]["backbone"]
    token = int(batch.suffix.targets[2, 0])
    backbone["ln_f"] = {"scale": jnp.zeros(CONFIG.n_embd), "bias": 100 * jnp.eye(CONFIG.n_embd)[0]}
    backbone["wte"] = backbone["wte"].at[:, 0].set(0.0).at[token, 0].set(1.0)
    targets = batch.suffix.targets.copy()
    targets[2], targets[0, 0] = token, token  # row 2 is right; row 0 in its first token only
    batch = batch.replace(suffix=batch.suffix._replace(targets=targets), latents=np.zeros(4, np.int32))
    loss_fn = curriculum.Curriculum()(ImitateSettings()).loss_of(IMITATION.having(max_latents=0))
    _, sums = compiled(loss_fn)(params, batch, step_key)
    assert [float(x) for x in sums["accuracy"]] == [1, 4]

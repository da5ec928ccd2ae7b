"""The COCONUT curriculum by hand, and its loss against a loop that feeds latents back one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from slow_policy import as_float64, assert_is_gradient
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.data.batches import batch_indices, encode_problems
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import byte_tokenizer, task_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.run.imitation_plan import left_out
from slpo_jax.run.train_imitation import as_ended, to_save
from slpo_jax.training.loop import WINDOW, AccuracyWindow
from slpo_jax.training.recipes import (
    ImitateSettings,
    Phase,
    check_ends,
    curriculum,
    imitate_config,
    recipe_of,
)
from small_steps import (
    CONFIG,
    IMITATION,
    PROMPTS,
    difference,
    imitation_batch,
    small_params,
    take_steps,
)
from tiny import SlowReasoner, assert_close, compiled, real_tokens, slow_factors

STEPS = (
    ("2 + 3 = 5",),
    ("4 - 1 = 3", "3 x 2 = 6"),
    ("1 + 1 = 2", "2 + 5 = 7", "7 - 4 = 3"),
)
STEP_KEY = jax.random.fold_in(
    jax.random.fold_in(jax.random.key(0), 0), 0
)  # of the run's key 0, stream 0, step 0
RECIPE = curriculum.Curriculum()(ImitateSettings())
PROBLEMS = encode_problems(
    Coconut().template(task_tokenizer("synthetic", 20)),
    [
        Problem(f"Tom has {n} pens .", steps, steps[-1].split()[-1])
        for n, steps in enumerate(STEPS)
    ],
)


SHORT = {
    "cot_steps": 10,
    "stage_steps": 5,
    "final_steps": 20,
    "c_thought": 2,
    "max_latent_stage": 3,
}


@pytest.mark.parametrize("c_thought", [0, 2])
@pytest.mark.parametrize("final_latents", ["published", "random"])
def test_phases_of_coconut(c_thought, final_latents):
    """Without thoughts steps are dropped alone; a drawn number of latents has no fixed one, nor a least."""
    settings = ImitateSettings(
        **SHORT | {"c_thought": c_thought, "final_latents": final_latents}
    )
    plan = curriculum.phases(settings, 8)
    assert {(each.rise, each.trains) for each in plan} <= {(0, ())}
    last = (
        (None, 8) if final_latents == "random" and c_thought else (3 * c_thought,) * 2
    )
    assert [dataclasses.astuple(each)[:6] for each in plan] == [
        ("cot", 0, 10, 0, 0, 0),
        *(
            (f"stage_{n}", 5 + 5 * n, 10 + 5 * n, n, n * c_thought, n * c_thought)
            for n in (1, 2, 3)
        ),
        ("final", 25, 45, None, *last),
    ]


def test_each_cause_of_what_is_not_imitated_has_its_number():
    rows = [
        ("7", 1),
        ("", 1),
        ("", 9),
        ("-3", 1),
        ("-3", 9),
        ("5", 9),
        ("5", 9),
    ]  # an answer, and steps
    found = [
        Problem("Tom has 2 pens .", ("2 + 3 = 5",) * steps, answer)
        for answer, steps in rows
    ]
    problems = encode_problems(Coconut().template(byte_tokenizer()), found)
    assert left_out(problems, 1, 60, "distil") == (
        "2 without an answer, 3 longer than config.imitate.max_tokens=60, "
        "1 that distil leaves out, as CODI does negative answers"
    )
    assert left_out(problems, 5, 0, "curriculum") == "2 without an answer"
    assert left_out(PROBLEMS, 3, 0, "curriculum") == ""


def _words(ids):
    """Ids as words, the line break shown."""
    return " ".join(
        PROBLEMS.template.tokenizer.convert_ids_to_tokens([int(i) for i in ids])
    ).replace("\n", "|")


SUFFIXES = {
    0: (
        "2 + 3 = 5 | ### 5",
        "4 - 1 = 3 | 3 x 2 = 6 | ### 6",
        "1 + 1 = 2 | 2 + 5 = 7 | 7 - 4 = 3 | ### 3",
    ),
    1: ("### 5", "3 x 2 = 6 | ### 6", "2 + 5 = 7 | 7 - 4 = 3 | ### 3"),
    2: ("### 5", "### 6", "7 - 4 = 3 | ### 3"),
    None: ("### 5", "### 6", "### 3"),
}


@pytest.mark.parametrize(("dropped", "latents"), [(0, 0), (1, 2), (2, 4), (None, 6)])
def test_batch_by_hand(dropped, latents):
    phase = Phase("x", 0, 9, dropped, latents, latents)
    ((slots,),) = RECIPE.slots(PROBLEMS, phase)
    longest = (
        max(len(suffix.split()) for suffix in SUFFIXES[dropped]) + 1
    )  # eos; the end marker is an input alone
    assert longest <= slots < longest + 4
    assert slots % 4 == 0
    batch = RECIPE.batch(PROBLEMS, phase, 7, 3, 5, (12, 9), ((slots,),))
    np.testing.assert_array_equal(batch.draw_ids % 3, batch_indices(3, 7, 3, 5))
    assert (
        len(set(batch.draw_ids.tolist())) == 5
    )  # an example that comes again has noise of its own
    np.testing.assert_array_equal(batch.latents, np.full(5, latents))
    assert batch.prompts.tokens.shape == (
        5,
        9,
    )  # six words, a line break and the start marker fit the smaller bucket
    for row, example in enumerate(batch.draw_ids % 3):
        prompt = real_tokens(batch.prompts, row)
        assert _words(prompt) == f"Tom has {example} pens . | <|start-latent|>"
        kept = batch.suffix.weights[row] > 0
        text = SUFFIXES[dropped][example]
        assert _words(batch.suffix.tokens[row][kept]) == f"<|end-latent|> {text}"
        assert _words(batch.suffix.targets[row][kept]) == f"{text} <eos>"
        assert kept.tolist() == [True] * (len(text.split()) + 1) + [False] * (
            slots - len(text.split()) - 1
        )


def test_drawn_latents_lie_between_the_steps_and_t():
    phase = Phase("final", 0, 9, None, None, 4)
    seen = {0: [], 1: [], 2: []}
    for step in range(100):
        batch = RECIPE.batch(PROBLEMS, phase, step, 0, 6, (12,), ((4,),))
        for example, latents in zip(batch.draw_ids % 3, batch.latents, strict=True):
            seen[int(example)].append(int(latents))
    for example, drawn in seen.items():
        least = len(STEPS[example])
        counts = np.bincount(drawn, minlength=5)
        assert not counts[:least].any()
        assert (
            stats.chisquare(counts[least:5]).pvalue > 1e-4
        )  # each is as likely as the others
    again = RECIPE.batch(PROBLEMS, phase, 17, 0, 6, (12,), ((4,),))
    np.testing.assert_array_equal(
        RECIPE.batch(PROBLEMS, phase, 17, 0, 6, (12,), ((4,),)).latents, again.latents
    )


def test_latents_by_steps_are_as_many_as_are_dropped():
    plan = curriculum.phases(
        ImitateSettings(c_thought=2, max_latent_stage=2, final_latents="steps"), 8
    )
    for phase, most in zip(plan, (0, 1, 2, 2), strict=True):
        batch = RECIPE.batch(
            PROBLEMS, phase, 3, 0, 6, (12,), RECIPE.slots(PROBLEMS, phase)
        )
        assert batch.latents.tolist() == [
            2 * min(len(STEPS[example]), most) for example in batch.draw_ids % 3
        ]
    assert {len(steps) for steps in STEPS} >= {1, 2}


def test_a_problem_without_steps_has_a_latent_at_least():
    """And a place for each that it can have, where their number is drawn."""
    bare = encode_problems(PROBLEMS.template, [Problem("Tom has 3 pens .", (), "3")])
    phase = Phase("final", 0, 9, None, None, 3)
    drawn = {
        int(RECIPE.batch(bare, phase, step, 0, 1, (12,), ((4,),)).latents[0])
        for step in range(60)
    }
    assert drawn == {1, 2, 3}
    # Prompt, latents, and what is fed after them: the end marker, ### and 3.
    assert curriculum.needs(bare, phase) == [(len(bare.prompts[0]) + 3 + 3, 3)]


def test_a_batch_takes_the_smallest_bucket_that_holds_it():
    phase = Phase("cot", 0, 9, 0, 0, 0)
    ((longest,),) = RECIPE.slots(PROBLEMS, phase)
    needed = {
        index: len(PROBLEMS.suffix(index, 0)) - 1 for index in range(len(PROBLEMS))
    }
    small = min(needed.values())
    assert small < max(needed.values()) <= longest
    buckets = RECIPE.slots(PROBLEMS, phase, (longest + 1, small))
    assert buckets == ((small, longest),)
    sizes = set()
    for step in range(6):
        batch = RECIPE.batch(PROBLEMS, phase, step, 0, 1, (12,), buckets)
        sizes.add(batch.suffix.tokens.shape[1])
        assert batch.suffix.tokens.shape[1] == (
            small if needed[int(batch.draw_ids[0])] <= small else longest
        )
    assert sizes == {small, longest}


def _factors(batch):
    """Each row's noise, which is on everywhere: factors by site."""
    found = []
    for row, prompt in enumerate(PROMPTS):
        used = int(batch.suffix.weights[row].sum())
        layout = IMITATION.with_config(dropout_where="all", answer_slots=used).config
        row_key = jax.random.fold_in(STEP_KEY, batch.draw_ids[row])
        found.append(
            slow_factors(row_key, row_key, prompt, int(batch.latents[row]), layout)
        )
    return found


def _slow_loss(params, batch, factors_B, thoughts_B=None):
    """Mean cross-entropy of the suffixes' tokens, row by row, without padding, and what was thought.

    Args:
        thoughts_B: latents to take as they are; None makes them.
    """
    reasoner = SlowReasoner(params["reasoner"])
    total = 0.0
    count = 0
    thoughts = []
    for row, factors in enumerate(factors_B):
        reasoner.factors = factors
        prompt = real_tokens(batch.prompts, row)
        used = int(batch.suffix.weights[row].sum())
        fed = batch.suffix.tokens[row, :used]
        targets = batch.suffix.targets[row, :used]
        thoughts.append(
            reasoner.think(prompt, batch.latents[row])
            if thoughts_B is None
            else thoughts_B[row]
        )
        before = np.concatenate(
            [reasoner.embed(prompt), thoughts[row], reasoner.embed(fed[:1])]
        )
        assert fed[1:].tolist() == targets[:-1].tolist()
        total -= reasoner.log_probs(before, targets).sum()
        count += used
    return total / count, thoughts


@pytest.mark.slow
def test_loss_and_gradient_are_the_slow_loop_s():
    batch = imitation_batch()
    taken = take_steps("imitate", [batch])
    factors = _factors(batch)
    params = as_float64(small_params())
    loss, thoughts = _slow_loss(params, batch, factors)
    assert taken.metrics[0]["loss"] == pytest.approx(loss, rel=1e-4)
    assert set(taken.gradient) == {"reasoner"}

    def value(reasoner, thoughts=None):
        return _slow_loss({"reasoner": reasoner}, batch, factors, thoughts)[0]

    assert_is_gradient(taken.gradient["reasoner"], value, params["reasoner"])
    # The gradient through the latents is no small part of it.
    with pytest.raises(AssertionError, match="is not"):
        assert_is_gradient(
            taken.gradient["reasoner"],
            lambda p: value(p, thoughts),
            params["reasoner"],
            rel=0.1,
        )
    assert difference(taken.params["gate"], small_params()["gate"]) == 0


def test_accuracy_counts_rows_of_which_every_token_is_right():
    """A model that puts all weight on one token, by a final norm without scale."""
    params = small_params()
    batch = imitation_batch()
    backbone = params["reasoner"]["backbone"]
    token = int(batch.suffix.targets[2, 0])
    backbone["ln_f"] = {
        "scale": jnp.zeros(CONFIG.n_embd),
        "bias": 100 * jnp.eye(CONFIG.n_embd)[0],
    }
    backbone["wte"] = backbone["wte"].at[:, 0].set(0.0).at[token, 0].set(1.0)
    targets = batch.suffix.targets.copy()
    targets[2] = token
    targets[0, 0] = token  # row 2 is right; row 0 in its first token only
    batch = batch.replace(
        suffix=batch.suffix._replace(targets=targets), latents=np.zeros(4, np.int32)
    )
    loss_fn = curriculum.Curriculum()(ImitateSettings()).loss_of(
        IMITATION.with_config(max_latents=0)
    )
    _, sums = compiled(loss_fn)(params, batch, STEP_KEY)
    assert [float(x) for x in sums["accuracy"]] == [1, 4]


# Stages that end when they are learned, and rows of earlier stages.


def _settings(**changes):
    return dataclasses.replace(imitate_config(), **{**SHORT, **changes})


def _recipe(default="curriculum", **changes):
    return recipe_of(_settings(**changes), default)


@pytest.mark.parametrize("until", [0.5, 0.7, 1.0])
def test_a_stage_is_learned_at_the_first_window_that_is_right(until):
    """Of rows that get better by fits and starts."""
    rng = np.random.default_rng(0)
    accuracies = np.clip(
        np.linspace(0, 1.2, 80) + rng.normal(scale=0.2, size=80), 0, 1
    ).tolist()
    window = AccuracyWindow()
    learned = []
    for step, accuracy in enumerate(accuracies, start=1):
        window.add({"accuracy": accuracy, "loss": 1.0})
        if window.is_learned(until):
            learned.append(step)
    windows = {
        step: np.mean(accuracies[step - WINDOW : step]) for step in range(WINDOW, 81)
    }
    assert learned == [step for step, mean in windows.items() if mean >= until]
    assert (not learned) == (until == 1.0)


def test_later_stages_begin_where_earlier_ones_ended():
    plan = [
        Phase("cot", 0, 50, 0, 0, 0),
        Phase("stage_1", 50, 90, 1, 1, 1),
        Phase("final", 90, 150, None, 1, 1),
    ]
    ends = {}
    spans = []
    for number, length in enumerate(
        (30, 60, 25)
    ):  # the second takes all of its steps, and those that the first left
        phase = as_ended(plan, ends)[number]
        if length < phase.end - phase.start:
            ends = ends | {phase.name: phase.start + length}
        assert to_save(ends, [0.25]) == {"ends": ends, "accuracies": [0.25]}
        spans.append((phase.start, phase.end))
    assert spans == [(0, 50), (30, 90), (90, 150)]
    assert to_save(ends) == {"ends": {"cot": 30, "final": 115}}
    assert [(phase.start, phase.end) for phase in as_ended(plan, ends, 7)] == [
        (0, 30),
        (30, 90),
        (90, 122),
    ]


@pytest.mark.parametrize(
    ("default", "changes", "said"),
    [
        ("distil", {"mix": 0.1}, "config.imitate.mix: 0.1, but distil has no earlier stages"),
        ("curriculum", {"mix": 0.1, "recipe": "simcot"}, "config.imitate.mix: 0.1, but simcot has no"),
        ("curriculum", {"stage_until": 0.9, "recipe": "icot", "c_thought": 0}, "stage_until: 0.9, but icot says"),
        ("curriculum", {"stage_until": 0.9, "reset_optimizer": False, "schedule": "linear"},
         "config.imitate.optimizer.schedule: linear goes by the steps of all stages"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(default, changes, said):
    changes = dict(changes)
    optimizer = dataclasses.replace(
        _settings().optimizer, schedule=changes.pop("schedule", "constant")
    )
    settings = _settings(optimizer=optimizer, final_steps=1000, **changes)
    recipe = recipe_of(settings, default)
    plan = recipe.phases(PROBLEMS, 0 if changes.get("recipe") == "icot" else 6)
    with pytest.raises(UserError, match=said):
        check_ends(settings, recipe, plan)
    off = dataclasses.replace(settings, stage_until=0.0, mix=0.0)
    check_ends(off, recipe_of(off, default), plan)


@pytest.mark.slow
@pytest.mark.parametrize("latents", [0, 2])
def test_loss_and_gradient_in_a_mixed_batch_are_the_row_s_stage_s_own(latents):
    """Of rows without latents too; with noise, which goes by the positions. The slots beyond hold nothing."""
    rows = imitation_batch().replace(latents=np.full(4, latents, np.int32))
    padded = rows.replace(
        suffix=type(rows.suffix)(
            *(np.pad(array, ((0, 0), (0, 3))) for array in rows.suffix)
        )
    )
    found = []
    for recipe, batch, slots in (
        (_recipe(), rows, latents),
        (_recipe(mix=0.5), padded, 3),
    ):
        loss_fn = recipe.loss_of(IMITATION.with_config(max_latents=slots))
        gradient = compiled(jax.value_and_grad(loss_fn, has_aux=True))
        (loss, sums), grads = gradient(small_params(), batch, jax.random.key(5))
        found.append((loss, sums, grads["reasoner"]))
    (loss, sums, grads), (own_loss, own_sums, own_grads) = found[::-1]
    assert float(loss) == pytest.approx(float(own_loss), rel=1e-6)
    assert jax.tree.map(float, sums["accuracy"]) == jax.tree.map(
        float, own_sums["accuracy"]
    )
    near = 1e-5 * max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(own_grads))
    assert_close(grads, own_grads, rtol=1e-5, atol=near)


def test_a_mixed_batch_has_rows_of_earlier_stages():
    """A share of them, each stage as often, and each row as the stage writes it; the first stage has none."""
    recipe = _recipe(mix=0.3)
    plan = {phase.name: phase for phase in recipe.phases(PROBLEMS, 6)}
    for name, before in (("cot", 0), ("stage_2", 2), ("final", 4)):
        phase = plan[name]
        counts = dict.fromkeys(range(-1, before), 0)
        slots = recipe.slots(PROBLEMS, phase)
        for step in range(60):
            batch = recipe.batch(PROBLEMS, phase, step, 2, 20, (9,), slots)
            for row, example in enumerate(batch_indices(2, step, 3, 20)):
                text = batch.suffix.targets[row][batch.suffix.weights[row] > 0].tolist()
                latents = int(batch.latents[row])
                stage = latents // 2 if latents < phase.latents else -1
                if (
                    name == "final"
                    and latents == 6
                    and text != PROBLEMS.suffix(example, None)[1:]
                ):
                    stage = 3
                assert (
                    text
                    == PROBLEMS.suffix(example, phase.dropped if stage < 0 else stage)[
                        1:
                    ]
                )
                counts[stage] += 1
        total = sum(counts.values())
        assert total == 1200
        least_own = counts[-1] / total
        if (
            name == "final"
        ):  # where no problem has more than three steps, the last stage is the final one
            assert counts[3] == 0
            least_own -= 0.3 / 4
        assert least_own == pytest.approx(0.7 if before else 1.0, abs=0.06)
        for stage in range(min(before, 3)):
            assert counts[stage] / total == pytest.approx(0.3 / before, abs=0.05)
    again = recipe.batch(PROBLEMS, plan["final"], 3, 2, 20, (9,), slots)
    jax.tree.map(
        np.testing.assert_array_equal,
        again,
        recipe.batch(PROBLEMS, plan["final"], 3, 2, 20, (9,), slots),
    )

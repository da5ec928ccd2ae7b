"""A stage that ends when it is learned, and batches with rows of earlier stages, against those stages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_steps import IMITATION, imitation_batch, small_params
from tiny import compiled

from slpo_jax.checkpoints.architectures.coconut import Coconut
from slpo_jax.data.batches import batch_indices, encode_problems
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import arithmetic_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.run.stage_ends import StageEnds, check_ends
from slpo_jax.training.loop import WINDOW, Learning
from slpo_jax.training.recipes import Phase, curriculum, imitate_config, recipe_of

STEPS = (("2 + 3 = 5",), ("4 - 1 = 3", "3 x 2 = 6"), ("1 + 1 = 2", "2 + 5 = 7", "7 - 4 = 3"))
PROBLEMS = tuple(Problem(f"Tom has {n} pens .", steps, steps[-1].split()[-1]) for n, steps in enumerate(STEPS))
SHORT = {"cot_steps": 10, "stage_steps": 5, "final_steps": 20, "c_thought": 2, "max_latent_stage": 3}


@pytest.fixture(scope="module")
def problems():
    return encode_problems(Coconut().template(arithmetic_tokenizer(20)), PROBLEMS)


def _settings(**changes):
    return dataclasses.replace(imitate_config(), **{**SHORT, **changes})


def _recipe(default="curriculum", **changes):
    return recipe_of(_settings(**changes), default)


def _run(accuracies, until, first, most):
    """The step after which a stage ends, by hand: that after the first window whose mean is at least `until`."""
    for step in range(max(first, WINDOW + 1), most):
        if sum(accuracies[step - 1 - WINDOW : step - 1]) / WINDOW >= until:
            return step
    return None


@pytest.mark.parametrize("first", [1, 30, 57])
@pytest.mark.parametrize("until", [0.5, 0.7, 1.0])
def test_a_stage_ends_after_the_first_window_that_is_right(first, until):
    """Of rows that get better by fits and starts; what a step did is known while the next one runs."""
    rng = np.random.default_rng(0)
    accuracies = np.clip(np.linspace(0, 1.2, 80) + rng.normal(scale=0.2, size=80), 0, 1).tolist()
    learning = Learning(until, first, [])
    ended = None
    for step in range(1, 80):
        if step > 1:
            learning.add({"accuracy": accuracies[step - 2], "loss": 1.0})
        if ended is None and learning.ends_after(step):
            ended = step
    assert ended == learning.end == _run(accuracies, until, first, 80)
    assert (ended is None) == (until == 1.0)


def test_a_stage_ends_where_all_rows_of_a_window_are_right():
    learning = Learning(1.0, 1, [])
    for _ in range(WINDOW):
        assert not learning.ends_after(1)
        learning.add({"accuracy": 1.0})
    assert learning.ends_after(WINDOW + 1)


def test_a_stage_without_accuracies_takes_its_steps():
    learning = Learning(0.1, 1, [])
    for step in range(1, 60):
        learning.add({"loss": 1.0})
        assert not learning.ends_after(step)


def test_later_stages_begin_where_earlier_ones_ended(caplog):
    plan = [Phase("cot", 0, 50, 0, 0, 0), Phase("stage_1", 50, 90, 1, 1, 1), Phase("final", 90, 150, None, 1, 1)]
    settings, spans = _settings(stage_until=0.5, stage_least=1), []
    ends, saved = StageEnds("imitate", settings, plan, 0, {}), []
    for number, length in enumerate((30, 60, 25)):  # the second takes all of its steps, and those that the first left
        phase = ends.phases()[number]
        ends.begin(phase, phase.start)
        ends.learning.accuracies = [0.25] * WINDOW
        if length < phase.end - phase.start:
            ends.learning.accuracies = [0.75] * WINDOW
            ends.learning.ends_after(phase.start + length)
            ends.learning.accuracies = [0.25] * WINDOW  # the step that was under way may be worse
        saved.append(ends.saved())
        with caplog.at_level("WARNING", logger="absl"):
            ends.finish(phase.start + length)
        spans.append((phase.start, phase.end))
    assert spans == [(0, 50), (30, 90), (90, 150)]
    assert saved[-1]["ends"] == ends.saved()["ends"] == {"cot": 30, "final": 115}
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "imitate: cot learned after 30 steps",
        "imitate: stage 1 not learned in its 60 steps",
        "imitate: final learned after 25 steps",
    ]
    control = StageEnds("imitate", settings, plan, 7, ends.saved())
    assert [(phase.start, phase.end) for phase in control.phases()] == [(0, 30), (30, 90), (90, 122)]
    control.begin(control.phases()[-1], 115)
    assert control.learning is None


@pytest.mark.parametrize(
    ("default", "changes", "said"),
    [
        ("distil", {"mix": 0.1}, "config.imitate.mix: 0.1, but distil has no earlier stages"),
        ("curriculum", {"mix": 0.1, "recipe": "simcot"}, "config.imitate.mix: 0.1, but simcot has no"),
        (
            "curriculum",
            {"stage_until": 0.9, "recipe": "icot", "c_thought": 0},
            "stage_until: 0.9, but icot says",
        ),
        (
            "curriculum",
            {"stage_until": 0.9, "reset_optimizer": False, "schedule": "linear"},
            "config.imitate.optimizer.schedule: linear goes by the steps of all stages",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(problems, default, changes, said):
    changes = dict(changes)
    optimizer = dataclasses.replace(_settings().optimizer, schedule=changes.pop("schedule", "constant"))
    settings = _settings(optimizer=optimizer, final_steps=1000, **changes)
    recipe = recipe_of(settings, default)
    plan = recipe.phases(problems, 0 if changes.get("recipe") == "icot" else 6)
    with pytest.raises(UserError, match=said):
        check_ends(settings, recipe, plan)
    off = dataclasses.replace(settings, stage_until=0.0, mix=0.0)
    check_ends(off, recipe_of(off, default), plan)


@pytest.mark.parametrize("value", [-0.1, 1.1])
@pytest.mark.parametrize("key", ["stage_until", "mix"])
def test_shares_are_from_0_to_1(key, value):
    with pytest.raises(UserError, match=f"{key}: {value} is not valid; give a number from 0"):
        _settings(**{key: value})


@pytest.mark.slow
@pytest.mark.parametrize("latents", [0, 2])
def test_loss_and_gradient_in_a_mixed_batch_are_the_row_s_stage_s_own(latents):
    """Of rows without latents too; with noise, which goes by the positions. The slots beyond hold nothing."""
    rows = imitation_batch().replace(latents=np.full(4, latents, np.int32))
    padded = rows.replace(suffix=type(rows.suffix)(*(np.pad(array, ((0, 0), (0, 3))) for array in rows.suffix)))
    found = []
    for recipe, batch, slots in ((_recipe(), rows, latents), (_recipe(mix=0.5), padded, 3)):
        loss_fn = recipe.loss_of(IMITATION.having(max_latents=slots))
        gradient = compiled(jax.value_and_grad(loss_fn, has_aux=True))
        (loss, sums), grads = gradient(small_params(), batch, jax.random.key(5))
        found.append((loss, sums, grads["reasoner"]))
    (loss, sums, grads), (own_loss, own_sums, own_grads) = found[::-1]
    assert float(loss) == pytest.approx(float(own_loss), rel=1e-6)
    assert jax.tree.map(float, sums["accuracy"]) == jax.tree.map(float, own_sums["accuracy"])
    near = 1e-5 * max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(own_grads))
    jax.tree.map(lambda ours, own: np.testing.assert_allclose(ours, own, rtol=1e-5, atol=near), grads, own_grads)


def test_a_mixed_batch_has_rows_of_earlier_stages(problems):
    """A share of them, each stage as often, and each row as the stage writes it; the first stage has none."""
    recipe = _recipe(mix=0.3)
    plan = {phase.name: phase for phase in recipe.phases(problems, 6)}
    for name, before in (("cot", 0), ("stage_2", 2), ("final", 4)):
        phase, counts = plan[name], dict.fromkeys(range(-1, before), 0)
        slots = recipe.slots(problems, phase)
        for step in range(60):
            batch = recipe.batch(problems, phase, step, 2, 20, (9,), slots)
            for row, example in enumerate(batch_indices(2, step, 3, 20)):
                text = batch.suffix.targets[row][batch.suffix.weights[row] > 0].tolist()
                latents = int(batch.latents[row])
                stage = latents // 2 if latents < phase.latents else -1
                if name == "final" and latents == 6 and text != problems.suffix(example, None)[1:]:
                    stage = 3
                assert text == problems.suffix(example, phase.dropped if stage < 0 else stage)[1:]
                counts[stage] += 1
        total = sum(counts.values())
        assert total == 1200
        least_own = counts[-1] / total
        if name == "final":  # where no problem has more than three steps, the last stage is the final one
            assert counts[3] == 0
            least_own -= 0.3 / 4
        assert least_own == pytest.approx(0.7 if before else 1.0, abs=0.06)
        for stage in range(min(before, 3)):
            assert counts[stage] / total == pytest.approx(0.3 / before, abs=0.05)
    again = recipe.batch(problems, plan["final"], 3, 2, 20, (9,), slots)
    jax.tree.map(np.testing.assert_array_equal, again, recipe.batch(problems, plan["final"], 3, 2, 20, (9,), slots))


def test_without_mix_it_is_the_published_curriculum():
    recipe = _recipe(stage_until=0.9)
    assert (recipe.loss, recipe.rows, recipe.needs) == (curriculum.loss, curriculum.imitation_batch, curriculum.needs)

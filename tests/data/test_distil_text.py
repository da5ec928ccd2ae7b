"""What CODI's teacher and student are given to write, by hand: texts, targets, the distilled position, buckets."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from codi_run import PHASE, PROBLEMS, RECIPE, ROWS, WAY, new_tokenizer
from slpo_jax.architectures.codi import Codi
from slpo_jax.checkpoints.gguf import bundled_gguf, open_gguf
from slpo_jax.data.batches import batch_indices, encode_problems
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.training.recipes import ImitateSettings, Phase, distil, recipe


@pytest.fixture(scope="module", params=[False, True], ids=["numbers", "digits"])
def case(request, tmp_path_factory):
    """The problems in tokens of either kind."""
    template = Codi(1).template(new_tokenizer(tmp_path_factory, request.param))
    return SimpleNamespace(
        template=template,
        problems=encode_problems(template, PROBLEMS),
        digits=request.param,
    )


def _words(template, ids) -> str:
    return template.tokenizer.decode([int(i) for i in ids])


@pytest.mark.parametrize("last_step", [False, True])
def test_texts_by_hand(case, last_step):
    recipe = dataclasses.replace(WAY, last_step=last_step)(ImitateSettings())
    batch = recipe.batch(
        case.problems, PHASE, 3, 5, 6, (24,), recipe.slots(case.problems, PHASE, (32,))
    )
    np.testing.assert_array_equal(batch.draw_ids % 4, batch_indices(5, 3, 4, 6))
    for row, index in enumerate(batch.draw_ids % 4):
        question, steps, answer = ROWS[index]
        question = question.strip().replace("  ", " ")
        written = (
            " ".join(steps if last_step else steps[:-1]) + f"The answer is: {answer}"
        )
        used = batch.valid[row].sum()
        assert (
            _words(case.template, batch.text.tokens[row, :used]) == question + written
        )
        assert not batch.valid[row, used:].any()
        learned = batch.text.targets[row][batch.text.weights[row] > 0]
        assert (
            _words(case.template, learned)
            == written + case.template.tokenizer.eos_token
        )
        before = "The answer is:" + (" " if case.digits else "")
        assert _words(
            case.template, batch.text.tokens[row, : batch.at[row] + 1]
        ).endswith(before)
        suffix = batch.student.suffix
        at = batch.student_at[row]
        assert (
            _words(case.template, suffix.tokens[row, : at + 1])
            == f"<|end-latent|>{before}"
        )
        assert _words(
            case.template, suffix.targets[row][suffix.weights[row] > 0]
        ).endswith(f": {answer}<|endoftext|>")
        prompt = batch.student.prompts.tokens[row][batch.student.prompts.valid[row]]
        assert _words(case.template, prompt) == f"{question}<|start-latent|>"
        assert max(1, len(steps)) <= batch.student.latents[row] <= 3


def test_texts_come_in_the_smallest_bucket(case):
    recipe = RECIPE
    sizes = set()
    phase = Phase("codi", 0, 9, None, 2, 2)
    texts = [len(WAY._text(case.problems, i)[0]) - 1 for i in range(4)]
    slots = recipe.slots(case.problems, phase, (min(texts), 1000))
    assert slots[0] == (min(texts), -(-max(texts) // 4) * 4)
    for step in range(4):
        batch = recipe.batch(case.problems, phase, step, 0, 1, (24,), slots)
        sizes.add((int(batch.draw_ids[0]), batch.text.tokens.shape[1]))
        assert batch.student.latents.tolist() == [2]
    assert sizes == {
        (i, slots[0][0] if size <= slots[0][0] else slots[0][1])
        for i, size in enumerate(texts)
    }
    prompts = [len(prompt) for prompt in case.problems.prompts]
    # The end marker is fed, eos is not.
    suffixes = [len(case.problems.answers[i]) + 1 for i in range(4)]
    needed = [need[0] for need in recipe.needs(case.problems, phase)]
    assert needed == [
        max(t, p + s + 2) for t, p, s in zip(texts, prompts, suffixes, strict=True)
    ]
    assert recipe.needs(case.problems, Phase("cot", 0, 9, 0, 0, 0)) == [
        (size, size) for size in texts
    ]


def test_phases():
    def plan(**changes):
        settings = dict(
            cot_steps=10, stage_steps=5, final_steps=20, c_thought=2, max_latent_stage=3, final_latents="published",
        )  # fmt: skip
        return WAY(ImitateSettings(**settings | changes)).phases(None, 8)

    assert plan() == [Phase("cot", 0, 10, 0, 0, 0), Phase("codi", 10, 30, None, 6, 6)]
    assert plan(cot_steps=0, final_latents="random") == [
        Phase("codi", 0, 20, None, None, 8)
    ]
    assert plan(cot_steps=0, final_steps=0) == []


def test_usable_problems(case):
    """Lengths by the tokenizer; CODI leaves out negative answers, COCONUT keeps them."""
    tokenizer = case.template.tokenizer
    problems = encode_problems(
        case.template, (*PROBLEMS, Problem("Tom?", ("<<1-3=-2>>",), "-2"))
    )
    sizes = [
        len(tokenizer(question.strip().replace("  ", " "))["input_ids"])
        + len(tokenizer(" ".join(steps))["input_ids"])
        + len(tokenizer(f"The answer is: {answer}")["input_ids"])
        for question, steps, answer in ROWS
    ]
    assert distil.usable(problems, 0) == [0, 1, 2, 3]
    assert recipe.usable(problems, 0) == [0, 1, 2, 3, 4]
    for most in (min(sizes), min(sizes) - 1, max(sizes), max(sizes) - 1):
        assert distil.usable(problems, most) == [
            i for i, size in enumerate(sizes) if size <= most
        ]
        assert [i for i in recipe.usable(problems, most) if i < 4] == distil.usable(
            problems, most
        )
    chosen = problems.subset([2, 0])
    assert (chosen.problems, chosen.prompts) == (
        (PROBLEMS[2], PROBLEMS[0]),
        [problems.prompts[2], problems.prompts[0]],
    )
    assert chosen.suffix(1) == problems.suffix(0)


ANSWERS = ("7", "72", "1450000", "-5", "0.25")


def _check_positions(template, digits: bool):
    for answer, ids in zip(ANSWERS, template.answer_ids(ANSWERS), strict=True):
        at = template.distilled_position(ids, answer)
        before, after = (
            template.tokenizer.decode(part) for part in (ids[: at + 1], ids[at + 1 :])
        )
        assert before.rstrip() == "The answer is:"
        assert (before + after) == f"The answer is: {answer}"
        assert before.endswith(" ") == (digits and not answer.startswith("-"))


@pytest.mark.parametrize("digits", [False, True])
def test_distilled_position(tmp_path_factory, digits):
    template = Codi(1).template(new_tokenizer(tmp_path_factory, digits))
    for answer, ids in zip(ANSWERS, template.answer_ids(ANSWERS), strict=True):
        at = template.distilled_position(ids, answer)
        ends = [len(template.tokenizer.decode(ids[: n + 1])) for n in range(len(ids))]
        assert ends[at] <= len("The answer is: ") < ends[at + 1]


def test_distilled_position_of_gpt2(shared_data):
    _check_positions(
        Codi(1).template(load_tokenizer(str(shared_data / "gpt2_tokenizer"))),
        digits=False,
    )


def test_distilled_position_of_smollm2():
    pytest.importorskip("gguf")
    try:
        tokenizer = open_gguf(bundled_gguf()).tokenizer()
    except UserError as error:
        pytest.skip(str(error))
    _check_positions(Codi(1).template(tokenizer), digits=True)

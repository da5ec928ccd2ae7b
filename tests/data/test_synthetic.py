"""The generated sets: an independent reader solves the questions, and the sets keep apart."""

import subprocess
import sys
from dataclasses import replace

import pytest

from refused import one_line
from slpo_jax.data import synthetic
from slpo_jax.data.synthetic import (
    NAMES,
    SyntheticConfig,
    synthetic_problems,
    vocabulary,
)
from slpo_jax.errors import UserError

SMALL = SyntheticConfig(train_size=3000, valid_size=200, test_size=300)
LARGE = SyntheticConfig(
    max_value=99, max_steps=4, train_size=2000, valid_size=100, test_size=300, seed=3
)
ADDS = {"buys", "finds", "wins", "gets", "came", "arrived", "appeared", "joined"}
TAKES = {"loses", "sells", "drops", "uses", "left", "went", "vanished", "broke"}
FACTORS = {"doubles": 2, "triples": 3, "doubled": 2, "tripled": 3}


def _solve(question: str) -> tuple[list[int], list[int], list[str]]:
    """Operands, values and operators of a question, by reading its words one sentence at a time."""
    operands = []
    values = []
    operators = []
    for sentence in question.replace("?", ".").split("."):
        words = sentence.split()
        numbers = [int(word) for word in words if word.isdecimal()]
        if not words or words[0] == "How":
            continue
        if not values:
            (start,) = numbers
            operands.append(start)
            values.append(start)
        elif factor := next((FACTORS[word] for word in words if word in FACTORS), None):
            values.append(values[-1] * factor)
            operators.append("x")
        else:
            (operand,) = numbers
            (sign,) = [
                1 if word in ADDS else -1 for word in words if word in ADDS | TAKES
            ]
            operands.append(operand)
            values.append(values[-1] + sign * operand)
            operators.append("+" if sign > 0 else "-")
    return operands, values, operators


def test_a_share_of_the_training_solutions_is_the_answer_alone():
    full, half = (
        synthetic_problems("train", replace(SMALL, written_share=share))
        for share in (1.0, 0.5)
    )
    assert [(a.question, a.answer) for a in half] == [
        (b.question, b.answer) for b in full
    ]
    assert {
        (a.steps == b.steps) or a.steps == () for a, b in zip(half, full, strict=True)
    } == {True}
    assert all(b.steps for b in full)
    # Four standard errors.
    assert abs(sum(bool(a.steps) for a in half) / len(half) - 0.5) < 0.04
    assert not any(
        a.steps for a in synthetic_problems("train", replace(SMALL, written_share=0.0))
    )
    held_out = [
        synthetic_problems("test", replace(SMALL, written_share=share))
        for share in (1.0, 0.0)
    ]
    assert held_out[0] == held_out[1]


@pytest.mark.parametrize("config", [SMALL, LARGE, SyntheticConfig(6, 2, 300, 40, 40)])
@pytest.mark.parametrize("name", NAMES)
def test_question_steps_and_answer_tell_the_same(name, config):
    for problem in synthetic_problems(name, config):
        _, values, operators = _solve(problem.question)
        assert problem.answer == str(values[-1])
        assert len(problem.steps) == len(operators)
        for step, before, operator, after in zip(
            problem.steps, values, operators, values[1:], strict=False
        ):
            left, sign, operand, equals, result = step.split()
            assert (int(left), sign, equals, int(result)) == (
                before,
                operator,
                "=",
                after,
            )
            assert {
                "+": before + int(operand),
                "-": before - int(operand),
                "x": before * int(operand),
            }[sign] == after
        assert all(0 <= value <= config.max_value for value in values)


@pytest.mark.parametrize("config", [SMALL, LARGE])
def test_sets_have_their_sizes_and_share_no_question(config):
    questions = {
        name: [problem.question for problem in synthetic_problems(name, config)]
        for name in NAMES
    }
    sizes = {name: len(found) for name, found in questions.items()}
    assert sizes == {
        "train": config.train_size,
        "valid": config.valid_size,
    } | dict.fromkeys(["test", "large", "template"], config.test_size)
    everything = [question for found in questions.values() for question in found]
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize("config", [SMALL, LARGE])
def test_large_has_large_operands_only(config):
    for problem in synthetic_problems("large", config):
        operands, _, _ = _solve(problem.question)
        assert min(operands) > config.max_value // 3
        assert problem.question.endswith("How many now ?")


def test_template_set_is_puzzles_with_two_steps_and_more():
    problems = synthetic_problems("template", LARGE)
    assert all(problem.question.startswith("How many") for problem in problems)
    assert {len(problem.steps) for problem in problems} == {2, 3, 4}


def test_shares_of_the_training_distribution():
    train = synthetic_problems("train", replace(SMALL, train_size=6000))
    small = [max(_solve(problem.question)[0]) <= 10 for problem in train]
    # A problem from the whole range has small operands alone now and then, so the share is a little above 0.8;
    # rejected duplicates are mostly small ones, which takes some back.
    assert 0.77 < sum(small) / len(small) < 0.9
    puzzles = [problem for problem in train if problem.question.startswith("How many")]
    assert 0.17 < len(puzzles) / len(train) < 0.23
    assert (
        0.03 < sum(len(problem.steps) > 1 for problem in puzzles) / len(puzzles) < 0.12
    )
    stories = [
        len(problem.steps)
        for problem in train
        if not problem.question.startswith("How many")
    ]
    assert all(
        0.28 < stories.count(length) / len(stories) < 0.39 for length in (1, 2, 3)
    )
    assert {problem.steps[0].split()[1] for problem in train} == {"+", "-", "x"}


def test_training_teaches_every_word_of_every_set():
    known = {
        word
        for problem in synthetic_problems("train", SMALL)
        for word in problem.question.split()
    }
    for name in ("valid", "test", "large", "template"):
        assert {
            word
            for problem in synthetic_problems(name, SMALL)
            for word in problem.question.split()
        } <= known
    words = {word for word in known if not word.isdecimal()}
    steps = {
        word
        for problem in synthetic_problems("train", SMALL)
        for step in problem.steps
        for word in step.split()
    }
    assert words | {word for word in steps if not word.isdecimal()} == set(vocabulary())
    assert len(vocabulary()) == len(set(vocabulary()))


def test_a_smaller_training_set_is_the_beginning_of_a_larger_one():
    assert (
        synthetic_problems("train", replace(SMALL, train_size=500))
        == synthetic_problems("train", SMALL)[:500]
    )


def test_pure_function_of_name_and_config():
    # Another process, so that neither the cache nor the hash seed can hide a difference.
    code = (
        "from slpo_jax.data.synthetic import *; "
        "print(repr(synthetic_problems('valid', SyntheticConfig(train_size=3000, valid_size=200, test_size=300))))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == repr(synthetic_problems("valid", SMALL))
    assert synthetic_problems("valid", replace(SMALL, seed=1)) != synthetic_problems(
        "valid", SMALL
    )


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({"max_value": 5}, "train", "SyntheticConfig.max_value: 5"),
        ({"max_steps": 1}, "train", "SyntheticConfig.max_steps: 1"),
        ({"test_size": 0}, "train", "SyntheticConfig.test_size: 0"),
        ({"seed": -1}, "train", "SyntheticConfig.seed: -1"),
        ({"written_share": 1.5}, "train", "SyntheticConfig.written_share: 1.5"),
    ],
)
def test_bad_settings_are_one_line(change, name, expected):
    one_line(lambda: synthetic_problems(name, replace(SMALL, **change)), expected)


def test_too_few_different_problems_are_an_error(monkeypatch):
    monkeypatch.setattr(synthetic, "_OBJECTS", ("apples",))
    monkeypatch.setattr(synthetic, "_PEOPLE", {"Tom": "He"})
    with pytest.raises(UserError, match=r"^synthetic:large: .*\d+ .*1000"):
        synthetic_problems(
            "large", SyntheticConfig(max_value=6, max_steps=2, test_size=1000)
        )

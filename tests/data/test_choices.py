"""Questions with choices in the layouts that are published and usual, against problems written out by hand."""

import pytest

from data_sets import write_jsonl
from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import load_problems
from slpo_jax.data.record_fields import FieldsConfig
from slpo_jax.errors import UserError

BELOW = "Which?\nA. 54\nB. 80 pens\nC. None"
TEXTS = ["54", "80 pens", "None"]
CHOICES = [
    (dict(zip("ABC", TEXTS, strict=True)) | {"answer": "B"}, "B"),
    (dict(zip("ABC", TEXTS, strict=True)) | {"answer": "80 pens"}, "80 pens"),
    (dict(zip(("Option_A", "Option_B", "Option_C"), TEXTS, strict=True)) | {"Answer": "(B)"}, "B"),
    (dict(zip(("opa", "opb", "opc", "opd"), [*TEXTS, None], strict=True)) | {"cop": 1}, "B"),
    ({"choices": TEXTS, "answer": 1.0}, "B"),
    ({"choices": str(TEXTS), "label": "1"}, "B"),
    ({"options": ["A) 54", "B) 80 pens", "C) None"], "correct": "b"}, "B"),
    ({"choices": {"text": TEXTS, "label": ["A", "B", "C"]}, "answerKey": "B."}, "B"),
    ({"options": {"A": "54", "B": "80 pens", "C": "None", "D": None}, "answer": "80 pens"}, "80 pens"),
]


@pytest.mark.parametrize(("record", "answer"), CHOICES)
def test_choices_are_written_below_the_question(record, answer):
    read = load_problems([{"question": "Which?", **record}], answers="texts")
    assert read == (Problem(BELOW, (), answer),)


GPQA = {"Question": "Which?", "Correct Answer": "80 pens\n", "Incorrect Answer 1": "54", "Incorrect Answer 2": "None",
        "Incorrect Answer 3": "7"}  # fmt: skip
SCIQ = {"question": "Which?", "correct_answer": "80 pens", "distractor1": "54", "distractor2": "None",
        "distractor3": "7"}  # fmt: skip
OPEN_TDB = {"question": "Which?", "correct_answer": "80 pens", "incorrect_answers": ["54", "None", "7"]}


@pytest.mark.parametrize("record", [GPQA, SCIQ, OPEN_TDB])
def test_wrong_answers_in_fields_of_their_own_are_choices_in_a_drawn_order(record):
    (problem,) = load_problems([record], answers="texts")
    question, *lines = problem.question.split("\n")
    choices = dict(line.split(". ") for line in lines)
    assert (question, sorted(choices)) == ("Which?", ["A", "B", "C", "D"])
    assert sorted(choices.values()) == ["54", "7", "80 pens", "None"]
    assert choices[problem.answer] == "80 pens"
    assert load_problems([record], answers="texts")[0] == problem
    # The right one is not always at the same place.
    name = "Question" if "Question" in record else "question"
    many = load_problems([record | {name: f"Which, {n}?"} for n in range(40)], answers="texts")
    assert {each.answer for each in many} == {"A", "B", "C", "D"}


def test_there_may_be_more_than_ten_choices():
    texts = {letter: f"text {letter}" for letter in "ABCDEFGHIJKL"}
    for record in (
        texts,
        {"options": [*texts.values()]},
        {f"option{n}": text for n, text in enumerate(texts.values())},
    ):
        (problem,) = load_problems([{"question": "Which?", **record, "answer": "L"}], answers="texts")
        assert problem.question.endswith("K. text K\nL. text L")
        assert problem.answer == "L"
    with pytest.raises(UserError, match="27 columns of choices; give at most 26"):
        load_problems([{"question": "?", **{f"option{n}": "x" for n in range(27)}, "answer": "A"}], answers="texts")


NAN = float("nan")
LACKING = [
    {"A": "54", "B": None, "C": "7", "D": NAN}, {"opa": "54", "opb": NAN, "opc": "7"}, {"choices": ["54", NAN, "7"]},
    {"choices": ["54", None, "7", ""]}, {"options": {"A": "54", "B": NAN, "C": "7"}}, {"A": "54", "B": "-", "C": "7"},
    {"choices": {"text": ["54", NAN, "7"], "label": ["A", "B", "C"]}},
    {"option1": "54", "option2": "N/A", "option3": 7},
]  # fmt: skip


@pytest.mark.parametrize("record", LACKING)
def test_a_choice_that_is_missing_is_none(record):
    asked = {"question": "Which?", **record}
    assert load_problems([asked | {"answer": "C"}], answers="texts") == (Problem("Which?\nA. 54\nC. 7", (), "C"),)
    with pytest.raises(UserError, match=r"record 1: .*'B'.*\(A, C\)"):
        load_problems([asked | {"answer": "B"}], answers="texts")


def test_a_dash_among_signs_is_a_choice():
    signs = dict(zip("ABCD", "+-*/", strict=True))
    asked = load_problems([{"question": "Which?", **signs, "answer": "B"}], answers="texts")
    assert asked == (Problem("Which?\nA. +\nB. -\nC. *\nD. /", (), "B"),)


MMLU, LABELS = {"choices": ["8", "2", "24", "120"]}, ["1", "2", "3", "4"]
KMMLU = dict(zip("ABCD", ("w", "x", "y", "z"), strict=True))
# (the choices, the answers of a set, as what they are read)
COUNTED = [
    (MMLU, [2], "C"), (MMLU, ["2", "0"], "CA"), (MMLU, ["24", 8, "2"], ["24", "8", "2"]), (MMLU, ["B", 2], "BC"),
    ({"choices": {"text": ["a", "b", "3", "d"], "label": LABELS}}, ["3", "2", 4], "324"),
    ({"choices": {"text": ["4", "3", "2", "1"], "label": [1, 2, 3, 4]}}, ["4", "1"], "41"),
    (KMMLU, [0, 3], "AD"), (KMMLU, ["1", "2"], "BC"), ({"option1": "p", "option2": "q"}, ["1", "2", "option1"], "ABA"),
    ({"choice1": "p", "choice2": "q"}, [0, 1], "AB"), ({"option_1": "p", "option_2": "q"}, [1], "A"),
    ({"ending0": "p", "ending1": "q"}, ["1"], "B"), ({"endings": ["p", "q"]}, ["1", 0], "BA"),
    ({"answerA": "p", "answerB": "q", "answerC": "r"}, ["answerC", "A"], "CA"),
    ({"sol1": "p", "sol2": "q"}, [0, 1], "AB"),
    ({"choices": ["3", "2", "1"]}, [3, 1], "31"),  # the choices themselves before indices from 1
]  # fmt: skip


@pytest.mark.parametrize(("choices", "answers", "expected"), COUNTED)
def test_what_counts_the_choices_is_told_by_all_of_a_set(choices, answers, expected, tmp_path):
    records = [{"question": "Which?", **choices, "answer": answer} for answer in answers]
    path = write_jsonl(tmp_path / "set.jsonl", records)
    for source in (records, path):
        assert [each.answer for each in load_problems(source, answers="texts")] == [*expected]


def test_choices_that_count_from_1_are_said_to():
    records = [{"question": "Which?", **KMMLU, "answer": answer} for answer in (1, 4, 3)]
    with pytest.raises(UserError, match=r"record 2: answer '4'"):
        load_problems(records, answers="texts")
    read = load_problems(records, answers="texts", fields=FieldsConfig(first_choice="1"))
    assert [each.answer for each in read] == ["A", "D", "C"]
    assert "answer (an index from 1) from answer" in read.field_use.lines()[0]
    others = [{"question": "Which?", **KMMLU, "answer": answer} for answer in (0, 3)]  # another set, from 0
    read = load_problems(others, role="test", answers="texts", fields=FieldsConfig(first_choice="1"))
    assert [each.answer for each in read] == ["A", "D"]
    with pytest.raises(UserError, match="answer '2'"):
        load_problems([{"question": "Which?", **MMLU, "answer": "2"}], answers="texts")


def test_the_field_of_the_choices_may_be_named():
    records = [{"question": "Which?", "candidates": ["p", "q"], "answer": "B"}]
    read = load_problems(records, answers="texts", fields=FieldsConfig(choices="candidates"))
    assert read == (Problem("Which?\nA. p\nB. q", (), "B"),)
    with pytest.raises(UserError, match=r"'chices' .*config\.data\.fields\.choices"):
        load_problems(records, answers="texts", fields=FieldsConfig(choices="chices"))


def test_numbers_of_a_problem_are_no_choices():
    for names in (("a", "b", "c"), ("A", "B"), ("A", "C", "D"), ("1", "2", "3")):
        assert load_problems([{"question": "Sum?", "answer": "8"} | dict.fromkeys(names, "4")])[0].question == "Sum?"

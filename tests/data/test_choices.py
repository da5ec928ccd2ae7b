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
    (
        dict(zip(("Option_A", "Option_B", "Option_C"), TEXTS, strict=True))
        | {"Answer": "(B)"},
        "B",
    ),
    (
        dict(zip(("opa", "opb", "opc", "opd"), [*TEXTS, None], strict=True))
        | {"cop": 1},
        "B",
    ),
    ({"choices": TEXTS, "answer": 1.0}, "B"),
    ({"choices": str(TEXTS), "label": "1"}, "B"),
    ({"options": ["A) 54", "B) 80 pens", "C) None"], "correct": "b"}, "B"),
    ({"choices": {"text": TEXTS, "label": ["A", "B", "C"]}, "answerKey": "B."}, "B"),
    (
        {
            "options": {"A": "54", "B": "80 pens", "C": "None", "D": None},
            "answer": "80 pens",
        },
        "80 pens",
    ),
]


@pytest.mark.parametrize(("record", "answer"), CHOICES)
def test_choices_are_written_below_the_question(record, answer):
    read = load_problems([{"question": "Which?", **record}], answers="texts")
    assert read == (Problem(BELOW, (), answer),)


GPQA = {"Question": "Which?", "Correct Answer": "80 pens\n", "Incorrect Answer 1": "54", "Incorrect Answer 2": "None",
        "Incorrect Answer 3": "7"}  # fmt: skip
SCIQ = {"question": "Which?", "correct_answer": "80 pens", "distractor1": "54", "distractor2": "None",
        "distractor3": "7"}  # fmt: skip
OPEN_TDB = {
    "question": "Which?",
    "correct_answer": "80 pens",
    "incorrect_answers": ["54", "None", "7"],
}


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
    many = load_problems(
        [record | {name: f"Which, {n}?"} for n in range(40)], answers="texts"
    )
    assert {each.answer for each in many} == {"A", "B", "C", "D"}


def test_there_may_be_more_than_ten_choices():
    texts = {letter: f"text {letter}" for letter in "ABCDEFGHIJKL"}
    for record in (
        texts,
        {"options": [*texts.values()]},
        {f"option{n}": text for n, text in enumerate(texts.values())},
    ):
        (problem,) = load_problems(
            [{"question": "Which?", **record, "answer": "L"}], answers="texts"
        )
        assert problem.question.endswith("K. text K\nL. text L")
        assert problem.answer == "L"
    with pytest.raises(UserError, match="27 columns of choices; give at most 26"):
        load_problems(
            [
                {
                    "question": "?",
                    **{f"option{n}": "x" for n in range(27)},
                    "answer": "A",
                }
            ],
            answers="texts",
        )


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
    assert load_problems([asked | {"answer": "C"}], answers="texts") == (
        Problem("Which?\nA. 54\nC. 7", (), "C"),
    )
    with pytest.raises(UserError, match=r"record 1: .*'B'.*\(A, C\)"):
        load_problems([asked | {"answer": "B"}], answers="texts")


def test_a_dash_among_signs_is_a_choice():
    signs = dict(zip("ABCD", "+-*/", strict=True))
    asked = load_problems(
        [{"question": "Which?", **signs, "answer": "B"}], answers="texts"
    )
    assert asked == (Problem("Which?\nA. +\nB. -\nC. *\nD. /", (), "B"),)


MMLU = {"choices": ["8", "2", "24", "120"]}
LABELS = ["1", "2", "3", "4"]
KMMLU = dict(zip("ABCD", ("w", "x", "y", "z"), strict=True))
NUMBERS = {"choices": [8, 2, 24, 1]}
PIQA = {"sol1": "p", "sol2": "q"}
SOCIAL_IQA = {"answerA": "p", "answerB": "q", "answerC": "r"}
OWN_LABELS = {"choices": {"text": ["a", "b", "3", "d"], "label": LABELS}}
NUMBERS_AS_LABELS = {"choices": {"text": ["4", "3", "2", "1"], "label": [1, 2, 3, 4]}}
# (the choices, an answer, as what it is read)
ANSWERS = [
    # A number beside texts is an index, from 0 unless the columns' names say otherwise.
    (MMLU, 2, "C"), (KMMLU, 0, "A"), (KMMLU, 3, "D"), ({"endings": ["p", "q"]}, 0, "A"),
    ({"option1": "p", "option2": "q"}, 2, "B"), ({"option_1": "p", "option_2": "q"}, 1, "A"),
    ({"choice1": "p", "choice2": "q"}, 0, "A"), (PIQA, 1, "B"), ({"ending0": "p", "ending1": "q"}, 1, "B"),
    (SOCIAL_IQA, 1, "A"), (SOCIAL_IQA, 3, "C"),
    # A number beside numbers is one of them.
    (NUMBERS, 24, "24"), (NUMBERS, 1, "1"),
    # A text may be either.
    (MMLU, "24", "24"), (MMLU, "0", "A"), (KMMLU, "1", "B"), ({"ending0": "p", "ending1": "q"}, "1", "B"),
    (MMLU, "B", "B"), (SOCIAL_IQA, "answerC", "C"), ({"option1": "p", "option2": "q"}, "option1", "A"),
    # Labels of the record's own come first.
    (OWN_LABELS, "3", "3"), (OWN_LABELS, 4, "4"), (NUMBERS_AS_LABELS, "4", "4"),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "answer", "expected"), ANSWERS)
def test_a_record_s_answer_is_told_by_itself(choices, answer, expected, tmp_path):
    record = {"question": "Which?", **choices, "answer": answer}
    path = write_jsonl(tmp_path / "set.jsonl", [record])
    for source in ([record], path):
        (problem,) = load_problems(source, answers="texts")
        assert problem.answer == expected


@pytest.mark.parametrize(
    ("choices", "answer"), [(MMLU, 8), (MMLU, "2"), (NUMBERS, 3), (KMMLU, 4), (PIQA, 2)]
)
def test_an_answer_that_may_be_two_choices_or_none_names_the_flag(choices, answer):
    records = [{"question": "Which?", **choices, "answer": answer}]
    flag = r"record 1: answer .*\(A, B.*config\.data\.fields\.first_choice="
    with pytest.raises(UserError, match=flag):
        load_problems(records, answers="texts")


def test_answers_that_are_indices_are_said_to_be():
    records = [{"question": "Which?", **KMMLU, "answer": n} for n in (1, 4, 3)]
    from_1 = FieldsConfig(first_choice="1")
    read = load_problems(records, answers="texts", fields=from_1)
    assert [each.answer for each in read] == ["A", "D", "C"]
    assert "answer (an index from 1) from answer" in read.field_use.lines()[0]
    # The texts of the choices are numbers too.
    records = [{"question": "Which?", **MMLU, "answer": "2"}]
    from_0 = FieldsConfig(first_choice="0")
    assert load_problems(records, answers="texts", fields=from_0)[0].answer == "C"
    assert load_problems(records, answers="texts", fields=from_1)[0].answer == "B"


def test_the_field_of_the_choices_may_be_named():
    records = [{"question": "Which?", "candidates": ["p", "q"], "answer": "B"}]
    read = load_problems(
        records, answers="texts", fields=FieldsConfig(choices="candidates")
    )
    assert read == (Problem("Which?\nA. p\nB. q", (), "B"),)
    with pytest.raises(UserError, match=r"'chices' .*config\.data\.fields\.choices"):
        load_problems(records, answers="texts", fields=FieldsConfig(choices="chices"))


def test_numbers_of_a_problem_are_no_choices():
    for names in (("a", "b", "c"), ("A", "B"), ("A", "C", "D"), ("1", "2", "3")):
        assert (
            load_problems(
                [{"question": "Sum?", "answer": "8"} | dict.fromkeys(names, "4")]
            )[0].question
            == "Sum?"
        )

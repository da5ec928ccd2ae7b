"""Questions with choices, in the layouts that they are published in, against problems written out by hand."""

import pandas
import pytest
from data_sets import write_jsonl

from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import load_problems
from slpo_jax.errors import UserError

TEXTS = ["54", "80 pens", "it's 'c'", "None"]
BELOW = "Which?\nA. 54\nB. 80 pens\nC. it's 'c'\nD. None"
_ARC = {"text": TEXTS, "label": ["A", "B", "C", "D"]}


def _columns(*names):
    return dict(zip(names, TEXTS, strict=True))


# (what a record has beside its question, the answer)
LAYOUTS = {
    "A, B, C, D": (_columns("A", "B", "C", "D") | {"answer": "B"}, "B"),
    "A, B, C, D and a text": (_columns("A", "B", "C", "D") | {"answer": "80 pens"}, "80 pens"),
    "a, b, c, d": (_columns("a", "b", "c", "d") | {"answer": "b"}, "B"),
    "option_a": (_columns("option_a", "option_b", "option_c", "option_d") | {"answer": "(B)"}, "B"),
    "Option A": (_columns("Option A", "Option B", "Option C", "Option D") | {"Answer": "B."}, "B"),
    "optionA": (_columns("optionA", "optionB", "optionC", "optionD") | {"correct_option": "B"}, "B"),
    "choice_a and an index": (_columns("choice_a", "choice_b", "choice_c", "choice_d") | {"answer": 1}, "B"),
    "MedMCQA": (_columns("opa", "opb", "opc", "opd") | {"cop": "b", "choice_type": "single"}, "B"),
    "a list": ({"choices": TEXTS, "answer": 1}, "B"),
    "ARC": ({"choices": _ARC, "answerKey": "B"}, "B"),
    "MedQA": (
        {"options": _columns("A", "B", "C", "D") | {"E": None}, "answer": "80 pens", "answer_idx": "B"},
        "80 pens",
    ),
    "MathQA": ({"options": "a ) 54 , b ) 80 pens , c ) it's 'c' , d ) None", "correct": "b"}, "B"),
    "lines": ({"options": "A. 54\nB. 80 pens\nC. it's 'c'\nD. None", "answer": "B"}, "B"),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_the_usual_layouts_of_options(name, kind, tmp_path):
    record, answer = LAYOUTS[name]
    path = tmp_path / "set.csv"
    if kind == "jsonl":
        path = write_jsonl(tmp_path / "set.jsonl", [{"question": "Which?", **record}])
    else:
        pandas.DataFrame([{"question": "Which?", **record}]).to_csv(path, index=False)
    (problem,) = load_problems(str(path), answers="texts")
    assert problem == Problem(BELOW, (), answer)


@pytest.mark.parametrize("cell", ['["54", "80"]', "['54', '80']", "['54' '80']", "[54, 80]", "[54 80]", "a) 54; b) 80"])
def test_a_cell_of_a_table_is_a_list(cell, tmp_path):
    pandas.DataFrame([{"question": "Which?", "choices": cell, "answer": "80"}]).to_csv(tmp_path / "set.csv")
    assert load_problems(str(tmp_path / "set.csv")) == (Problem("Which?\nA. 54\nB. 80", (), "80"),)


def test_options_with_numbers_as_labels_and_float_answers():
    records = [{"question": "_ is big.", "option1": "The ant", "option2": "The cow", "answer": "2"}]
    assert load_problems(records, answers="texts") == (Problem("_ is big.\n1. The ant\n2. The cow", (), "2"),)
    frame = pandas.DataFrame([{"question": "Q?", "A": 3, "B": 72, "C": 1.5, "answer": answer} for answer in (72.0, 0)])
    texts = load_problems(frame, answers="texts")
    assert [problem.answer for problem in texts] == ["72", "A"]
    assert texts[0].question == "Q?\nA. 3\nB. 72\nC. 1.5"


def test_the_last_options_may_be_missing():
    columns = {"question": "Q?", "A": "1", "B": "2", "C": "3", "answer": "C"}
    assert load_problems([columns | {"D": "NULL", "E": " "}], answers="texts")[0].question.endswith("C. 3")
    frame = pandas.DataFrame([columns, columns | {"D": "4", "E": "5", "answer": "E"}])
    questions = [problem.question for problem in load_problems(frame, answers="texts")]
    assert questions == ["Q?\nA. 1\nB. 2\nC. 3", "Q?\nA. 1\nB. 2\nC. 3\nD. 4\nE. 5"]
    with pytest.raises(UserError, match="record 1: field 'B' is no text of a choice; write it as a text"):
        load_problems([columns | {"B": None}], answers="texts")


def test_numbers_of_a_problem_are_no_options():
    for names in (("a", "b"), ("A", "B"), ("a", "b", "c"), ("x", "y", "z"), ("A", "C", "D"), ("1", "2", "3")):
        record = {"question": "Sum?", "answer": "8"} | dict.fromkeys(names, "4")
        assert load_problems([record]) == (Problem("Sum?", (), "8"),)
    with pytest.raises(UserError, match="record 1: answer 'E' is none of the choices"):
        load_problems([{"question": "Q?", "answer": "E"} | dict.fromkeys("ABCD", "4")], answers="texts")


@pytest.mark.parametrize(
    ("numbers", "letters"), [((0, 1, 3, -1), "ABD"), ((1, 4, 2), "ADB"), (("0.0", "2.0"), "AC"), (("a", "d"), "AD")]
)
def test_medmcqa_s_correct_option_counts_from_0_or_1_as_its_rows_say(numbers, letters):
    options = {"question": "Q?", "opa": "w", "opb": "x", "opc": "y", "opd": "z", "exp": "Because.", "id": "1"}
    problems = load_problems([options | {"cop": number} for number in numbers], answers="texts")
    assert [problem.answer for problem in problems] == list(letters)
    assert problems.left_out == len(numbers) - len(letters)
    for unknown in ([1, 2, 3], [0, 4]):
        with pytest.raises(UserError, match="record 1: field 'cop' counts from 0 or from 1, which no record says"):
            load_problems([options | {"cop": number} for number in unknown])


def test_fields_that_are_not_used_are_named_once_a_source(tmp_path):
    records = [
        {"id": "7", "question": "Q?", "context": "C.", "A": "1", "B": "2", "C": "3", "answer": "B", "subject": "S"},
        {"id": "8", "question": "R?", " Cot ": "So 2.", "A": "1", "B": "2", "C": "3", "answer": "B", "level": 5},
    ]
    columns = {"Unnamed: 0": "0", "": "0", "empty": None, "rationale": "Unused, as there is one above."}
    pandas.DataFrame([{**records[0], **columns}, {**columns, **records[1]}]).to_csv(tmp_path / "set.csv", index=False)
    read = load_problems(str(tmp_path / "set.csv"), answers="texts")
    assert read.reading.lines() == [
        "question from question, context; choices from A, B, C; answer from answer; steps from rationale, cot",
        "not used: id, subject, Unnamed: 0, level",
    ]
    assert load_problems([{"question": "Q?", "answer": "5"}]).reading.lines() == [
        "question from question; answer from answer"
    ]
    worked = {"problem": "Q?", "solution": "So.\n\\boxed{5}", "answer": None, "steps": [], "number": 0.5}
    assert load_problems([worked]).reading.lines() == [
        "question from problem; answer from solution; steps from solution",
        "not used: number",
    ]
    wide = {f"column_{n}": "1" for n in range(40)}
    assert len(load_problems([{"question": "Q?", "answer": "5", **wide}]).reading.unused) == 120


def test_labels_of_numbered_columns_count_from_0_where_the_rows_say_so():
    options = {"question": "Why?", "choice1": "The sun", "choice2": "The grass"}

    def said(*labels, field="label", **more):
        rows = [options | more | {field: label} for label in labels]
        return [problem.answer for problem in load_problems(rows, answers="texts")]

    for field in ("label", "answer"):
        assert said(0, 1, 0, field=field) == ["1", "2", "1"]
        assert said("1.0", "0.0", "-1", field=field) == ["2", "1"]
        assert said(1, 2, field=field) == ["1", "2"]
        assert said(1, 1, field=field) == ["1", "1"]  # no row says
        assert said("The sun", "2", field=field) == ["The sun", "2"]
    for labels, more in (((0, 1, 2), {}), ((0, 1), {"choice1": "1"})):
        with pytest.raises(UserError, match=r"record 1: answer '0' is none of the choices; give a label \(1, 2\) or a"):
            said(*labels, **more)

"""Layouts that users have beside the published ones, against problems written out by hand."""

import csv
import json
from pathlib import Path

import pytest
from data_sets import write_jsonl, write_parquet

from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import load_problems
from slpo_jax.data.record_fields import FieldsConfig
from slpo_jax.data.solutions import measured_number
from slpo_jax.errors import UserError


def _error(source: str) -> str:
    with pytest.raises(UserError) as caught:
        load_problems(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _one(folder: Path, record: dict, **options) -> Problem:
    (problem,) = load_problems(write_jsonl(folder / "one.jsonl", [record]), **options)
    return problem


SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q?"}
TOLD = {"role": "assistant", "content": "He has 2.\nHe gets 3.\n#### 5"}
STEPS = ("He has 2.", "He gets 3.")
SUMS, ANNOTATED = ("2 + 1 = 3", "3 + 2 = 5"), ("<<2+1=3>>", "<<3+2=5>>")
# (record, steps) of problems whose question is "Q?" and whose answer is 5.
SOLVED = {
    "lines": ({"question": "Q?", "answer": "He has 2.\n\nHe gets 3. \n#### 5"}, STEPS),
    "a line of sentences": ({"question": "Q?", "answer": "He has 2. He gets 3.\n#### 5"}, STEPS),
    "a title": (
        {"question": "Q?", "answer": "Mr. Fox has 2.5. He gets 2.5. #### 5"},
        ("Mr. Fox has 2.5.", "He gets 2.5."),
    ),
    "the last hashes": (
        {"question": "Q?", "answer": "#### 1 is a title.\nHe gets 3.\n#### 5"},
        ("#### 1 is a title.", "He gets 3."),
    ),
    "capitals and blanks": ({"Question": "Q?", " Steps ": "He has 2.\nHe gets 3.", "ANSWER": "5"}, STEPS),
    "a box in a line of its own": (
        {"problem": "Q?", "solution": "He has 2.\nHe gets 3.\n\\boxed{5}", "answer": "5"},
        STEPS,
    ),
    "rationale": ({"question": "Q?", "answer": "5", "rationale": "He has 2.\nHe gets 3."}, STEPS),
    "rationale with the answer": ({"question": "Q?", "answer": 5, "rationale": "He has 2.\nHe gets 3.\n#### 5"}, STEPS),
    "cot": (
        {"question": "Q?", "cot": "10/5=2 marbles a day. So 2+3=5.", "answer": "5"},
        ("10/5=2 marbles a day.", "So 2+3=5."),
    ),
    "cot with annotations in words": (
        {"question": "Q?", "cot": "He has 1+1 = <<1+1=2>>2 and 3.", "answer": "5"},
        ("<<1+1=2>>",),
    ),
    "solution": ({"question": "Q?", "answer": "5", "solution": "He has 2.\nHe gets 3."}, STEPS),
    "no cot, but a solution": ({"question": "Q?", "cot": "", "answer": "He has 2.\nHe gets 3.\n#### 5"}, STEPS),
    "steps come first": ({"question": "Q?", "steps": list(STEPS), "answer": "No.\n#### 5"}, STEPS),
    "steps as lines": ({"question": "Q?", "steps": "He has 2.\nHe gets 3.", "answer": "5"}, STEPS),
    "steps as sentences": ({"question": "Q?", "steps": "He has 2. He gets 3.", "answer": "5 pens"}, STEPS),
    "steps between semicolons": ({"question": "Q?", "steps": "2 + 1 = 3; 3 + 2 = 5", "answer": "5"}, SUMS),
    "steps as a table writes a list": ({"question": "Q?", "steps": "['2 + 1 = 3', '3 + 2 = 5']", "answer": "5"}, SUMS),
    "annotated steps as a text": ({"question": "Q?", "steps": "<<2+1=3>> <<3+2=5>>", "answer": "5"}, ANNOTATED),
    "reasoning": ({"query": "Q?", "reasoning": list(STEPS), "answer": "5"}, STEPS),
    "an explanation": ({"input": "Q?", "explanation": "He has 2. He gets 3.", "label": 5}, STEPS),
    "a chat of ShareGPT": (
        {
            "conversations": [
                {"from": "human", "value": "Q?"},
                {"from": "gpt", "value": "He has 2.\nHe gets 3.\nAnswer: 5"},
            ]
        },
        STEPS,
    ),
    "output with a unit": ({"instruction": "Q?", "output": "He has 2. He gets 3. The final answer is 5 pens."}, STEPS),
    "a unit": ({"question": "Q?", "answer": "5 red pens"}, ()),
    "a currency": ({"question": "Q?", "answer": "$5.00"}, ()),
    "null steps": ({"question": "Q?", "steps": None, "answer": "5"}, ()),
    "input, output": ({"input": "Q?", "output": "He has 2. He gets 3. The answer is 5."}, STEPS),
    "output alone": ({"input": "Q?", "output": "5"}, ()),
    "instruction, output": ({"instruction": "Q?", "input": "", "output": "He has 2.\nHe gets 3.\n#### 5"}, STEPS),
    "GSM-Hard": ({"input": "Q?", "code": "def solution(): ...", "target": 5.0}, ()),
    "final_answer": ({"problem": "Q?", "final_answer": "5", "solution": "He has 2.\nHe gets 3."}, STEPS),
    "MetaMathQA": (
        {"query": "Q?", "response": "He has 2.\nHe gets 3.\n#### 5\nThe answer is: 5", "type": "GSM"},
        STEPS,
    ),
    "MetaMathQA of MATH": (
        {"query": "Q?", "response": "So the answer is $\\boxed{5}$.\nThe answer is: 5"},
        ("So the answer is $\\boxed{5}$.",),
    ),
    "a box within a sentence": (
        {"problem": "Q?", "solution": "It is late.\nThus, the answer is $\\boxed{5}$, or five."},
        ("It is late.", "Thus, the answer is $\\boxed{5}$, or five."),
    ),
    "prompt, completion": ({"prompt": "Q?", "completion": "He has 2.\nHe gets 3.\n#### 5"}, STEPS),
    "prompt, completion as chats": ({"prompt": [SYSTEM, ASKED], "completion": [TOLD]}, STEPS),
    "messages": ({"messages": [SYSTEM, ASKED, TOLD]}, STEPS),
    "the user's message, wherever it is": ({"prompt": [ASKED, SYSTEM], "reward_model": {"ground_truth": 5}}, ()),
    "before an answer begun": ({"prompt": [ASKED, {"role": "assistant", "content": "<think>"}], "answer": "5"}, ()),
}


@pytest.mark.parametrize("name", SOLVED)
def test_worked_solutions_give_their_steps(name, tmp_path, warnings):
    record, steps = SOLVED[name]
    assert _one(tmp_path, record) == Problem("Q?", steps, "5")
    if name not in ("steps as sentences", "output with a unit", "a unit", "a currency"):  # math_verify reads those
        assert _one(tmp_path, record, answers="latex") == Problem("Q?", steps, "5")
    assert warnings == []


def test_rows_of_a_table_are_records_whose_numbers_stay_as_written(tmp_path):
    records = [{"prompt": 'Is a, or "b"?\nSay.', "notes": "2 + 1 = 3", "gold": "3244047.0999999996"}]
    records.append({"prompt": "Q?", "notes": "", "gold": "12345678901234567891"})
    fields = FieldsConfig("prompt", "gold", "notes")
    expected = [
        Problem(records[0]["prompt"], ("2 + 1 = 3",), records[0]["gold"]),
        Problem("Q?", (), records[1]["gold"]),
    ]
    for name, delimiter in (
        ("set.csv", ","),
        ("other.csv", ";"),
        ("tabs.csv", "\t"),
        ("set.tsv", "\t"),
        ("set/train.csv", ","),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(records)
        source = str(path.parent if name.startswith("set/") else path)
        assert load_problems(source, fields=fields) == tuple(expected)


def test_named_fields_have_to_be_there(tmp_path):
    path = write_jsonl(tmp_path / "set.jsonl", [{"prompt": "Q?", "gold": "5", "answer": "6", "cot": "So 6."}] * 2)
    assert load_problems(path, fields=FieldsConfig(answer="gold")) == (Problem("Q?", ("So 6.",), "5"),) * 2
    for fields, key in ((FieldsConfig("promt"), "question"), (FieldsConfig(steps="cots"), "steps")):
        with pytest.raises(UserError) as caught:
            load_problems(path, fields=fields)
        unknown = f"has no field '{getattr(fields, key)}' (config.data.fields.{key}), only prompt, gold, answer, cot"
        assert str(caught.value) == f"{path}, line 1: {unknown}; give one of these"
        # A set to evaluate on may be of another layout, if that is known.
        assert load_problems(path, role="test", fields=fields)[0].answer == "6"
    with pytest.raises(UserError, match="has no field 'promt'"):
        load_problems(write_jsonl(tmp_path / "b.jsonl", [{"a": "Q?"}]), role="test", fields=FieldsConfig("promt"))


@pytest.mark.parametrize(
    ("choices", "said", "answer"),
    [
        ({"choices": ["red", "blue"], "answer": 1}, "B", "blue"),
        ({"options": ["A) red", "B) blue"], "correct": "B"}, "B", "blue"),
        ({"choices": {"text": ["red", "blue"], "label": ["A", "B"]}, "answerKey": "(B)"}, "B", "blue"),
        ({"options": {"A": "red", "B": "blue"}, "answer": "blue"}, "blue", "blue"),
    ],
)
def test_choices_are_written_below_the_question(choices, said, answer, tmp_path):
    assert _one(tmp_path, {"question": "Which?"} | choices, answers="texts") == Problem(
        "Which?\nA. red\nB. blue", (), said
    )
    numbers = json.loads(json.dumps(choices).replace("red", "70").replace("blue", "80"))
    path = write_jsonl(tmp_path / "set.jsonl", [{"question": "Which?"} | numbers])
    if said == "B":
        assert "answer 'B' is no number" in _error(path)
    else:
        assert load_problems(path) == (Problem("Which?\nA. 70\nB. 80", (), "80"),)


def test_logical_sets_as_coconut_has_them_are_texts(tmp_path):
    prosqa = {"question": "Every a is a b. Is Tom a b or c?", "steps": ["Tom is a.", "Every a is a b."]}
    prosqa |= {"answer": "Tom is a b.", "idx_to_symbol": ["Tom", "a"], "edges": [[0, 1]], "root": 0, "target": 1}
    prontoqa = {"question": "True or false: Tom is b.", "steps": ["Tom is a."], "answer": True}
    path = write_jsonl(tmp_path / "set.jsonl", [prosqa, prontoqa])
    assert load_problems(path, answers="texts") == (
        Problem(prosqa["question"], tuple(prosqa["steps"]), "Tom is a b."),
        Problem(prontoqa["question"], ("Tom is a.",), "True"),
    )
    assert "answer 'Tom is a b.' is no number; write digits, e.g. 72 or -1,450.5, or compare texts" in _error(path)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("15 books", "15"), ("$15.00", "15"), ("-$1,450.5", "-1450.5"), ("$-3", "-3"), ("50%", "50"), ("72cm", "72"),
        ("5 m", "5"), ("60 km/h", "60"), ("3 red toy cars.", "3"), ("20 €", "20"), ("\\$7", "7"), (".5 kg", "0.5"),
        *((text, None) for text in (
            "2x", "5k", "5 million", "1/2", "15 or more", "3 dozen", "2 hours 30 minutes", "10:30", "3rd", "x=5",
            "1,45 m", "five", "5 plus x", "$x$", "1 2", "",
        )),
        ("45 m²", "45"), ("3 L", "3"), ("15 个", "15"), ("5 months", "5"), ("5 dollars a day", "5"),
        *((text, None) for text in (
            "3 ½", "3 ½ cups", "3 Ⅷ", "3万元", "2 lakh", "2 lakhs", "$2 crore", "5 bn", "5bn people", "2 mn", "2 M",
            "$2 B", "2 T", "2 K", "3 milliards", "2 gross", "3 tenths", "3 twelfths", "3 hundredths", "5 squared",
            "10 degrees below zero", "3 x", "3 n", "3 π", "2πr", "2 xy",
        )),
    ],
)  # fmt: skip
def test_a_number_with_a_unit_or_a_currency_is_the_number(text, number):
    assert measured_number(text) == number


@pytest.mark.parametrize(("annotated", "first"), [(2, "<<1+1=2>>"), (1, "It is 1+1 = 2.")])
def test_a_set_finds_its_steps_in_one_way(annotated, first, tmp_path):
    texts = ["It is 1+1 = <<1+1=2>>2.\n#### 2", *["It is 2.\n#### 2"] * 3]
    texts[1] = texts[0] if annotated == 2 else texts[1]
    path = write_jsonl(tmp_path / "set.jsonl", [{"question": "Q?", "answer": text} for text in texts])
    problems = load_problems(path)
    assert problems[0].steps == (first,)
    assert problems[3].steps == (() if annotated == 2 else ("It is 2.",))


@pytest.mark.parametrize("name", ["body", "context", "Body", "Context", "passage"])
def test_what_is_before_a_question_is_part_of_it(name, tmp_path):
    record = {name: "Tom has 2 pens.", "question": "How many?", "answer": "2"}
    assert _one(tmp_path, record).question == "Tom has 2 pens. How many?"
    assert _one(tmp_path, record | {name: None}).question == "How many?"
    record = {"instruction": "Solve it.", "input": "How many?", "output": "2"}
    assert _one(tmp_path, record).question == "Solve it.\nHow many?"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": [ASKED, TOLD, ASKED], "answer": "5"}, "field 'prompt' has 2 messages of the role user, not one"),
        ({"prompt": [SYSTEM], "answer": "5"}, "field 'prompt' has 0 messages of the role user, not one"),
        ({"messages": [ASKED]}, "field 'messages' has 0 messages of the role assistant"),
        ({"prompt": [{"role": "user", "content": [{"text": "Q?"}]}], "answer": "5"}, "field 'prompt' is no chat"),
        (
            {"question": "Q?", "choices": ["1", "5"], "answer": 1},
            "answer '1' is the text of choice A and means choice B",
        ),
        ({"question": "Q?", "options": ["1", "5"], "answer": "C"}, "answer 'C' is none of the choices; give a letter"),
        ({"question": "Q?", "options": [["1"]], "answer": "A"}, "field 'options' is no list of up to 26 texts"),
        ({"context": {"title": ["T"]}, "question": "Q?", "answer": "5"}, "field 'context' is dict, not a text"),
        ({"question": "Q?", "answer": None}, "no answer"),
        ({"problem": "Q?", "answer": None}, "no answer"),
        ({"input": "Q?", "output": "He has 5 of them."}, "no answer"),
        ({"question": "Q?", "answer": "<<1+1=2. #### 2"}, "a step opens with << and is not closed"),
        ({"task": "Q?", "answer": "1"}, "field 'question' is missing, only task, answer are there; name the one that"),
        ({"instruction": "Q?"}, "field 'answer' is missing, only instruction"),
        ({"Body": "B", "Question": "Q?"}, "field 'answer' is missing, only Body, Question"),
        ({"prompt": "Q?"}, "field 'answer' is missing"),
        ({"question": "Q?", "answer": True}, "answer 'True' is no number"),
        ({"question": "Q?", "answer": [1]}, "field 'answer' is list, not a text"),
        ({"question": "Q?", "answer": float("nan")}, "no answer; fill it in"),
        ({"question": "Q?", "cot": [[2]], "answer": "2"}, "field 'cot' is neither texts nor a text"),
        ({"question": "Q?", "final_ans": None}, "no answer"),
        ({"prompt": ["Q?"], "solution": "1"}, "field 'prompt' is no chat"),
        ({"prompt": [ASKED], "reward_model": {"style": "1"}}, "field 'reward_model' has no ground_truth"),
        ({"prompt": [ASKED], "reward_model": {"ground_truth": [1]}}, "field 'reward_model.ground_truth' is list, not"),
    ],
)
def test_what_can_not_be_read_names_the_record(record, expected, tmp_path):
    path = write_jsonl(tmp_path / "set.jsonl", [record])
    assert _error(path).startswith(f"{path}, line 1: {expected}")
    path = write_parquet(tmp_path / "set.parquet", [record])
    assert _error(path).startswith(f"{path}, row 1: {expected}")


@pytest.mark.parametrize("kind", ["numbers", "latex", "texts"])
def test_answers_that_are_not_there_or_not_finite_are_left_out(kind, tmp_path, warnings):
    answers = [5.0, float("nan"), float("inf"), None, float("-inf")]
    rows = [{"problem": "Q?", "answer": answer} for answer in answers]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"problem": "Q?", "answer": "NaN"}])
    (tmp_path / "set.jsonl").write_text(text)
    for path in (write_parquet(tmp_path / "set.parquet", rows), str(tmp_path / "set.jsonl")):
        problems = load_problems(path, answers=kind)
        assert ([problem.answer for problem in problems], problems.left_out) == (["5"], 4 + path.endswith("l"))
    assert [line.split(": ")[1] for line in warnings] == ["left out 4 of 5 problems", "left out 5 of 6 problems"]


def test_sentences_are_no_latex_but_texts(tmp_path, warnings):
    answers = ["He has 5 apples in all.", "So 24.\nThen 48 more, which makes 72.", r"5 \text{ apples}", "no real roots"]
    path = write_jsonl(tmp_path / "set.jsonl", [{"question": "Q?", "answer": answer} for answer in answers])
    assert [problem.answer for problem in load_problems(path, answers="latex")] == answers[2:]
    assert [problem.answer for problem in load_problems(path, answers="texts")] == answers
    (warning,) = warnings
    assert warning.startswith(f"{path}: left out 2 of 4 problems: {path}, line 1: answer 'He has 5 apples in all.'")


def test_bars_of_a_question_do_not_cut_it(tmp_path):
    lines = [
        "If a || b, or c||d, what is x?||<<1+1=2>> <<|2||1|=2>> #### 2",
        "Is |x|||<<1=1>> #### 1",
        "Shift 1<<2 || 3?|| #### 4",
        "Words?||He has 5. #### 5",
    ]
    (tmp_path / "set.txt").write_text("\n".join(lines))
    assert load_problems(str(tmp_path / "set.txt")) == (
        Problem("If a || b, or c||d, what is x?", ("<<1+1=2>>", "<<|2||1|=2>>"), "2"),
        Problem("Is |x|", ("<<1=1>>",), "1"),
        Problem("Shift 1<<2 || 3?", (), "4"),
        Problem("Words?", (), "5"),
    )
    (tmp_path / "set.txt").write_text("AB||CD?||AB is 5. #### 5")
    assert _error(str(tmp_path / "set.txt")).startswith(f"{tmp_path}/set.txt, line 1: which '||' ends the question?")

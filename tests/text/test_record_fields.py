"""Layouts that users have beside the published ones, against problems written out by hand."""

import json
from pathlib import Path

import pytest
from data_sets import write_jsonl, write_parquet

from slpo_jax.errors import UserError
from slpo_jax.text.problem import Problem
from slpo_jax.text.problems import load_problems


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
        {"problem": "Q?", "solution": "Thus, the answer is $\\boxed{5}$, or five."},
        ("Thus, the answer is $\\boxed{5}$, or five.",),
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
    assert _one(tmp_path, record, answers="latex") == Problem("Q?", steps, "5")
    assert warnings == []


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
        ({"question": "Q?", "choices": ["1", "5"], "answer": 1}, "field 'choices': can't verify a choice"),
        ({"context": {"title": ["T"]}, "question": "Q?", "answer": "5"}, "field 'context' is dict, not a text"),
        ({"question": "Q?", "answer": None}, "no answer"),
        ({"problem": "Q?", "answer": None}, "no answer"),
        ({"input": "Q?", "output": "He has 5 of them."}, "no answer"),
        ({"question": "Q?", "answer": "<<1+1=2. #### 2"}, "a step opens with << and is not closed"),
    ],
)
def test_what_can_not_be_read_names_the_record(record, expected, tmp_path):
    path = write_jsonl(tmp_path / "set.jsonl", [record])
    assert _error(path).startswith(f"{path}, line 1: {expected}")


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

"""Records in the layouts that are published and usual, against problems written out by hand."""

import datetime
import json
from decimal import Decimal

import numpy as np
import pandas
import pyarrow as pa
import pytest
from pyarrow import parquet

from data_sets import write_jsonl, write_parquet, write_set
from refused import one_line
from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import load_problems
from slpo_jax.data.record_fields import FieldsConfig
from slpo_jax.data.record_files import records_text
from slpo_jax.data.record_texts import split_mark
from slpo_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("datasets_cache")

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Q?"}
TOLD = {"role": "assistant", "content": "He has 2.\nHe gets 3.\n#### 5"}
SHARED = [
    {"from": "human", "value": "Q?"},
    {"from": "gpt", "value": "He has 2.\nHe gets 3.\nAnswer: 5"},
]
STEPS = ("He has 2.", "He gets 3.")
SUMS = ("2 + 1 = 3", "3 + 2 = 5")
ANNOTATED = ("<<2+1=3>>", "<<3+2=5>>")
_DAPO = {
    "data_source": "math_dapo",
    "reward_model": {"ground_truth": "5", "style": "rule"},
}
# (record, steps) of problems whose question is "Q?" and whose answer is 5; the first ones are published sets'.
SOLVED = {
    "whynlp/gsm8k-aug": ({"question": "Q?", "steps": list(ANNOTATED), "answer": "5"}, ANNOTATED),
    "zen-E/GSM8k-Aug": ({"question": "Q?", "cot": "<<2+1=3>> so <<3+2=5>>", "answer": "5"}, ANNOTATED),
    "openai/gsm8k": ({"question": "Q?", "answer": "So 2+1 = <<2+1=3>>3.\nThen <<3+2=5>>5.\n#### 5"}, ANNOTATED),
    "juyoung-trl/gsm-hard": ({"instruction": "Q?", "response": "5.0"}, ()),
    "reasoning-machines/gsm-hard": ({"input": "Q?", "code": "def solution(): ...", "target": 5.0}, ()),
    "ChilleD/MultiArith": ({"question": "Q?", "final_ans": "5"}, ()),
    "ChilleD/SVAMP": ({"ID": "1", "Body": "B", "Question": "C?", "Answer": "5.0", "question_concat": "Q?"}, ()),
    "MATH-500": ({"problem": "Q?", "solution": "He has 2.\nHe gets 3.\n$\\boxed{5}$.", "answer": "5"}, STEPS),
    "MATH without answers": ({"problem": "Q?", "solution": "No \\boxed{1}.\nBut \\boxed{ 5 }, or so.", "level": 1},
                             ("No \\boxed{1}.", "But \\boxed{ 5 }, or so.")),
    "DeepMath": ({"question": "Q?", "final_answer": "5"}, ()),
    "OpenMathInstruct": ({"problem": "Q?", "expected_answer": "5"}, ()),
    "open-r1/DAPO-Math-17k-Processed": ({"prompt": "Q?", "solution": "5", "source_prompt": [ASKED], **_DAPO}, ()),
    "DAPO as a chat": ({"prompt": [SYSTEM, ASKED], **_DAPO}, ()),
    "MathInstruct": ({"instruction": "Q?", "output": "He has 2. He gets 3. The answer is 5.", "source": "S"}, STEPS),
    "Alpaca": ({"instruction": "Q?", "input": "", "output": "He has 2.\nHe gets 3.\n#### 5"}, STEPS),
    "MetaMathQA": ({"query": "Q?", "response": "He has 2.\nHe gets 3.\n#### 5\nThe answer is: 5"}, STEPS),
    "prompt, completion": ({"prompt": "Q?", "completion": "He has 2.\nHe gets 3.\n#### 5"}, STEPS),
    "prompt, completion as chats": ({"prompt": [SYSTEM, ASKED], "completion": [TOLD]}, STEPS),
    "messages": ({"messages": [SYSTEM, ASKED, TOLD]}, STEPS),
    "messages as a text": ({"messages": str([SYSTEM, ASKED, TOLD])}, STEPS),
    "messages in JSON": ({"messages": json.dumps([SYSTEM, ASKED, TOLD])}, STEPS),
    "messages, and an answer": ({"messages": [ASKED], "answer": "5"}, ()),
    "an answer beside a chat": ({"messages": [ASKED, TOLD], "answer": "5"}, STEPS),
    "an answer beside a solution": ({"query": "Q?", "response": "He has 2. He gets 3.", "answer": "5"}, STEPS),
    "ShareGPT": ({"conversations": SHARED}, STEPS),
    "capitals and blanks": ({"QUESTION": "Q?", " Steps ": "He has 2.\nHe gets 3.", "Final_Answer": "5"}, STEPS),
    "rationale": ({"question": "Q?", "answer": 5, "rationale": "He has 2.\nHe gets 3.\n#### 5"}, STEPS),
    "no cot, but a solution": ({"question": "Q?", "cot": "", "answer": "He has 2.\nHe gets 3.\n#### 5"}, STEPS),
    "steps come first": ({"question": "Q?", "steps": list(STEPS), "answer": "No.\n#### 5"}, STEPS),
    "steps between semicolons": ({"question": "Q?", "steps": "2 + 1 = 3; 3 + 2 = 5", "answer": "5"}, SUMS),
    "steps as a table writes them": ({"question": "Q?", "steps": "['2 + 1 = 3', '3 + 2 = 5']", "answer": "5"}, SUMS),
    "null steps": ({"question": "Q?", "steps": None, "answer": "5"}, ()),
    # As COCONUT's files have it.
    "an empty step": ({"question": "Q?", "steps": [""], "answer": "5"}, ("",)),
    "listed marks": ({"question": "Q?", "steps": ["<think>" + STEPS[0], STEPS[1], "#### 5"], "answer": "5"}, STEPS),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "directory"])
def test_usual_layouts(kind, tmp_path):
    """In several kinds of source, in which no warning is given."""
    for number, (name, (record, steps)) in enumerate(SOLVED.items()):
        if kind == "jsonl":
            source = write_jsonl(tmp_path / f"{number}.jsonl", [record])
        elif kind == "parquet":
            source = write_parquet(tmp_path / f"{number}.parquet", [record])
        elif number < 10:
            source = write_set(tmp_path / f"set{number}", {"train": [record]})
        assert load_problems(source) == (Problem("Q?", steps, "5"),) or (
            kind == "directory" and number >= 10
        ), name
        if kind == "jsonl":
            assert load_problems(source, answers="latex") == (
                Problem("Q?", steps, "5"),
            ), name
        assert load_problems(source).warnings == ()


LINES = "He has 2.\nHe gets 3."
ANSWERED = [
    f"<think>\n{LINES}\n</think>\n\\boxed{{5}}", f"{LINES}\n</think>\n\nThe answer is \\boxed{{5}}.",
    f"<think>{LINES}\nThe answer is 5.</think>The answer is 5.", f"<Think>{LINES}</Think>\n5",
    f"<think>\n\n</think>\n\n{LINES}\n#### 5", f"<think>\n{LINES}\n#### 5",
    f"<think>{LINES}</think>\n<answer>The answer is 5.</answer>", f"{LINES} <answer>5</answer>",
    f"<think>{LINES}</think><answer> \\boxed{{5}}", f"{LINES}\n**Answer:** 5", f"{LINES}\nThe answer is **5**.",
    f"{LINES} The final answer is: 5", f"{LINES}\nSo the answer is 5.",
    f"<thinking>\n{LINES}\n</thinking>\n5", f"<reasoning>{LINES}</reasoning>\n<answer>$5$</answer>",
    f"<|begin_of_thought|>\n{LINES}\n<|end_of_thought|>\n\n<|begin_of_solution|>\nSo\n\\boxed{{5}}\n<|end_of_solution|>",
    f"[THINK]{LINES}[/THINK]5", f"\u25c1think\u25b7{LINES}\u25c1/think\u25b7**5**", f"{LINES}\n#### $5$",
    f"<start_working_out>{LINES}<end_working_out><SOLUTION>5</SOLUTION>", f"{LINES}\n#### Final Answer\n5",
    f"<thinking>{LINES}<reflection></reflection></thinking>\n<output>\n5\n</output>",
    f"{LINES}\n**Final Answer:** $5$", f"{LINES}\nThe answer is \\( 5 \\).", f"{LINES}\nThe answer is:\n\\[ 5 \\]",
    f"{LINES}\n**Final Answer**\n\\[\n5\n\\]", f"{LINES}\n**Answer**: 5", f"{LINES}\nThe correct answer is 5.",
    f"{LINES}\nAnswer = 5", f"{LINES}\nFinal Answer: The final answer is $5$. I hope it is correct.",
    f"{LINES}\n\\boxed 5", f"{LINES}\n\\fbox{{5}}", f"{LINES}\n## Final Answer\n5", f"{LINES}\n**The answer is: 5**",
]  # fmt: skip


@pytest.mark.parametrize("text", ANSWERED)
def test_marks_are_no_steps_and_the_answer_behind_them_is_read(text):
    found = [
        {"problem": "Q?", "solution": text},
        {"question": "Q?", "cot": text, "answer": "5"},
    ]
    ends = (
        "</think",
        "</reasoning",
        "end_of_thought",
        "/THINK",
        "/think",
        "end_working",
    )
    for record in found[: 1 + all(end not in text for end in ends)]:
        assert load_problems([record], answers="texts") == (Problem("Q?", STEPS, "5"),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Is **a** < b?", ("Is **a** < b?", None)), ("3+2=5, the answer is 5", ("3+2=5,", "5")),
        ("It is late.\nThus, the answer is $\\boxed{5}$.", ("It is late.", "5")), ("#### 5", ("", "5")),
        ("#### 1 is a title.\nHe gets 3.\n#### 5", ("#### 1 is a title.\nHe gets 3.\n", "5")),
        ("The answer is 5.", ("", "5")), (LINES, (LINES, "")),
        (f"<think>{LINES}</think>One.\nTwo.", (f"\n{LINES}", "")),
        ("\\begin{pmatrix}\n1\n\\end{pmatrix}", ("\\begin{pmatrix}\n1\n\\end{pmatrix}", None)),
    ],
)  # fmt: skip
def test_marked(text, expected):
    assert split_mark(text) == expected


def test_lines_without_a_mark_have_no_answer():
    records = [
        {"question": "Q?", "answer": text} for text in (LINES, f"{LINES}\n#### 5", "5")
    ]
    problems = load_problems(records, answers="texts")
    assert ([each.answer for each in problems], problems.left_out) == (["5", "5"], 1)
    why = "record 1: no answer, nor one behind a mark such as #### in its lines"
    assert problems.warnings == (f"records: left out 1 of 3 problems: {why}",)
    whole = "First.\nSecond."  # of a field that holds the answer alone
    assert (
        load_problems([{"question": "Q?", "final_answer": whole}], answers="texts")[
            0
        ].answer
        == whole
    )


def test_logical_sets_as_coconut_has_them_are_texts():
    prosqa = {"question": "Is Tom a b or c?", "steps": ["Tom is a."], "answer": "Tom is a b.", "edges": [[0, 1]],
              "root": 0, "target": 1}  # fmt: skip
    prontoqa = {"question": "Tom is b.", "steps": ["Tom is a."], "answer": True}
    answers = [
        problem.answer for problem in load_problems([prosqa, prontoqa], answers="texts")
    ]
    assert answers == ["Tom is a b.", "True"]


def test_what_is_around_a_question_is_part_of_it():
    for name in ("body", "Context", "passage"):
        record = {name: "Tom has 2 pens.", "question": "How many?", "answer": "2"}
        assert load_problems([record])[0].question == "Tom has 2 pens. How many?"
        assert load_problems([record | {name: None}])[0].question == "How many?"
    record = {"instruction": "Solve it.", "input": "How many?", "output": "2"}
    assert load_problems([record])[0].question == "Solve it.\nHow many?"


@pytest.mark.parametrize(
    ("annotated", "first"), [(2, "<<1+1=2>>"), (1, "It is 1+1 = 2.")]
)
def test_a_set_finds_its_steps_in_one_way(annotated, first):
    texts = ["It is 1+1 = <<1+1=2>>2.\n#### 2"] * annotated + ["It is 2.\n#### 2"] * (
        4 - annotated
    )
    problems = load_problems([{"question": "Q?", "answer": text} for text in texts])
    assert problems[0].steps == (first,)
    assert problems[3].steps == (() if annotated == 2 else ("It is 2.",))
    way = "between << and >> alone" if annotated == 2 else "lines"
    assert f"steps ({way}) from answer" in problems.field_use.lines()[0]


def test_named_fields_have_to_be_there(tmp_path):
    path = write_jsonl(
        tmp_path / "set.jsonl",
        [{"prompt": "Q?", "gold": "5", "answer": "6", "cot": "So 6."}] * 2,
    )
    assert (
        load_problems(path, fields=FieldsConfig(answer="gold"))
        == (Problem("Q?", ("So 6.",), "5"),) * 2
    )
    for fields, key in (
        (FieldsConfig("promt"), "question"),
        (FieldsConfig(steps="cots"), "steps"),
    ):
        with pytest.raises(UserError) as caught:
            load_problems(path, fields=fields)
        unknown = f"has no field '{getattr(fields, key)}' (config.data.fields.{key}), only prompt, gold, answer, cot"
        assert str(caught.value) == f"{path}, line 1: {unknown}; give one of these"
        # A set to evaluate on may be of another layout, if that is known.
        assert load_problems(path, role="test", fields=fields)[0].answer == "6"


NAN = float("nan")
# What stands for nothing, by the kind of source.
NOTHING = {"csv": ["", NAN, "N/A", "-"], "jsonl": [None, NAN], "parquet": [None, NAN],
           "records": [np.float32("nan"), pandas.NaT]}  # fmt: skip


@pytest.mark.parametrize("kind", NOTHING)
def test_a_missing_value_is_missing(kind, tmp_path):
    def source(records):
        path = tmp_path / f"set.{kind}"
        frame = pandas.DataFrame(records)
        if kind == "records":
            return records
        if kind == "jsonl":
            return write_jsonl(path, records)
        frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
        return str(path)

    for nothing in NOTHING[kind]:
        for field in (
            "steps",
            "context",
            "cot",
            "choices",
            "solution",
            "problem",
            "final_answer",
        ):
            records = [{"question": "Q?", "answer": "5", field: nothing}] * 2
            assert load_problems(source(records)) == (Problem("Q?", (), "5"),) * 2
        records = [
            {"problem": "P?", "answer": "5"},
            {"problem": nothing, "answer": "5"},
        ]
        with pytest.raises(UserError, match=r"(line|row|record) [23]: .*question"):
            load_problems(source(records))
        records = [
            {"problem": "P?", "answer": "5"},
            {"problem": "R?", "answer": nothing},
        ]
        problems = load_problems(source(records))
        assert (problems, problems.left_out) == ((Problem("P?", (), "5"),), 1)
        assert "left out 1 of 2 problems" in problems.warnings[-1]


def test_an_answer_may_be_a_list_or_a_word():
    for one in ("['42']", ["42"], [42], '["42"]'):
        assert (
            load_problems([{"question": "Q?", "answer": one}], answers="texts")[
                0
            ].answer
            == "42"
        )
    for code in ("00012", "1e5", "12E3"):
        assert (
            load_problems([{"question": "Q?", "answer": code}], answers="texts")[
                0
            ].answer
            == code
        )
    assert (
        load_problems([{"question": "['a'] is?", "answer": "[2, 5]"}], answers="latex")[
            0
        ].answer
        == "[2, 5]"
    )
    assert (
        load_problems([{"question": "Which?", "answer": "None"}], answers="texts")[
            0
        ].answer
        == "None"
    )
    assert load_problems([{"question": "Q?", "steps": "[3+2]*1=5", "answer": "5"}])[
        0
    ].steps == ("[3+2]*1=5",)


def test_fields_that_are_not_used_are_named_once_a_source():
    records = [
        {
            "id": "7",
            "question": "Q?",
            "context": "C.",
            "A": "1",
            "B": "2",
            "C": "3",
            "answer": "B",
            "subject": "S",
        },
        {
            "id": "8",
            "question": "R?",
            " Cot ": "So 2.",
            "A": "1",
            "B": "2",
            "C": "3",
            "answer": "B",
            "empty": None,
        },
    ]
    assert load_problems(records, answers="texts").field_use.lines() == [
        "question from question, context; choices from A, B, C; answer from answer; steps from cot",
        "not used: id, subject",
    ]
    worked = {
        "problem": "Q?",
        "solution": "So.\n\\boxed{5}",
        "answer": None,
        "number": 0.5,
    }
    assert load_problems([worked]).field_use.lines() == [
        "question from problem; answer from solution; steps from solution",
        "not used: number",
    ]
    wide = {f"column_{n}": "1" for n in range(40)}
    assert (
        len(load_problems([{"question": "Q?", "answer": "5", **wide}]).field_use.unused)
        == 120
    )


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": [ASKED, TOLD, ASKED], "answer": "5"}, "field 'prompt' is no chat with one message of the role"),
        ({"messages": [ASKED]}, "field 'messages' is no chat with one message of the role assistant"),
        ({"messages": "User: Q?"}, "field 'messages' is no chat"),
        ({"prompt": [{"role": "user", "content": [{"text": "Q?"}]}], "answer": "5"}, "field 'prompt' is no chat"),
        ({"question": "Q?", "choices": ["1", "5"], "answer": "1"}, "answer '1' is none of the choices, or one's text"),
        ({"question": "Q?", "options": ["1", "5"], "answer": "C"}, "answer 'C' is none of the choices"),
        ({"question": "Q?", "options": [["1"]], "answer": "A"}, "field 'options' is no list of up to 26 texts"),
        ({"question": "Q?", "options": 5, "answer": "A"}, "field 'options' is no list of up to 26 texts"),
        ({"context": {"title": ["T"]}, "question": "Q?", "answer": "5"}, "field 'context' is dict, not a text"),
        ({"question": "Q?", "answer": None}, "no answer"),
        ({"question": "Q?", "answer": "<<1+1=2. #### 2"}, "a step opens with << and is not closed"),
        ({"task": "Q?", "answer": "1"}, "field 'question' is missing, only task, answer are there; name the one"),
        ({"Body": "B", "Question": "Q?"}, "field 'answer' is missing, only Body, Question"),
        ({"question": 5, "answer": "1"}, "field 'question' is int, not a text"),
        ({"question": "Q?", "answer": [1, 2]}, "field 'answer' is list, not a text"),
        ({"question": "Q?", "answer": "5 pens"}, "answer '5 pens' is no number, nor is any of the 1; give a set"),
        ({"question": "Q?", "answer": float("inf")}, "answer 'inf' is no number"),
        ({"question": "Q?", "cot": [[2]], "answer": "2"}, "field 'cot' is neither texts nor a text"),
        ({"question": "Q?", "steps": "['a' 'b']", "answer": "2"}, "field 'steps' begins as a list and is none"),
        ({"prompt": [ASKED], "reward_model": {"style": "1"}}, "field 'reward_model' has no ground_truth"),
    ],
)  # fmt: skip
def test_what_can_not_be_read_names_the_record(record, expected, tmp_path):
    path = write_parquet(tmp_path / "set.parquet", [record])
    assert one_line(lambda: load_problems(path)).startswith(
        f"{path}, row 1: {expected}"
    )


def test_answers_that_can_not_be_compared_are_counted_out(tmp_path):
    answers = [
        "2",
        r"\frac{1}{2}",
        None,
        "1,000",
        "5}",
        "So he has 5 of them.",
        "1e999",
        "7" * 300,
    ]
    path = write_jsonl(
        tmp_path / "set.jsonl",
        [{"problem": "Q?", "answer": answer} for answer in answers],
    )
    none = f"{path}, line 3: no answer"
    long = f"2 like {path}, line 7: answer '1e999' is no number of at most 100"
    fraction = rf"3 like {path}, line 2: answer '\\frac{{1}}{{2}}' is no number"
    expected = {
        "numbers": (["2", "1000"], f"{fraction}; 1 like {none}; {long}"),
        "latex": (
            ["2", r"\frac{1}{2}", "1000", *answers[6:]],
            f"1 like {none}; 2 like {path}, line 5: answer '5}}'",
        ),
        "texts": (["2", r"\frac{1}{2}", "1000", *answers[4:]], none),
    }
    for kind, (kept, why) in expected.items():
        problems = load_problems(path, answers=kind)
        assert [problem.answer for problem in problems] == kept
        assert problems.left_out == 8 - len(kept)
        assert problems.warnings[0].startswith(
            f"{path}: left out {8 - len(kept)} of 8 problems: {why}"
        )
    with pytest.raises(UserError, match=r"line 1: answer '}\{'"):
        load_problems(
            write_jsonl(tmp_path / "bad.jsonl", [{"problem": "Q?", "answer": "}{"}]),
            answers="latex",
        )


# As they are written, and as canonical decimals: beyond 15 digits and beyond 2^63, where 64 bits end.
WRITTEN = {"5186630.5999999996": "5186630.5999999996", "9007199254740993": "9007199254740993",
           "123456789012345678901": "123456789012345678901", "-2.01e-06": "-0.00000201", "72.0": "72"}  # fmt: skip


def _columns(path, answers):
    parquet.write_table(
        pa.table(
            {"question": [f"Q{n}?" for n in range(len(answers))], "answer": answers}
        ),
        path,
    )
    return str(path)


def test_numbers_keep_the_text_that_was_written(tmp_path):
    lines = [
        f'{{"question": "Q{n}?", "answer": {text}}}' for n, text in enumerate(WRITTEN)
    ]
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    (tmp_path / "set.json").write_text(f"[{', '.join(lines)}]")
    pandas.DataFrame({"question": "Q?", "answer": list(WRITTEN)}).to_csv(
        tmp_path / "set.csv", sep=";"
    )
    _columns(tmp_path / "set.parquet", pa.array([Decimal(text) for text in WRITTEN]))
    for kind in ("jsonl", "json", "csv", "parquet"):
        answers = [
            problem.answer for problem in load_problems(str(tmp_path / f"set.{kind}"))
        ]
        assert answers == list(WRITTEN.values())


@pytest.mark.parametrize(
    ("dtype", "answers"),
    [
        (np.float64, ["0.1", "0.30000000000000004", "10000000000000000000000", "-3"]),
        (np.float32, ["0.1", "5186630.5", "27"]),
        (np.int64, ["-9007199254740993", "72"]),
    ],
)
def test_columns_of_numbers_are_the_shortest_decimals(dtype, answers, tmp_path):
    path = _columns(
        tmp_path / "set.parquet", pa.array([dtype(text) for text in answers])
    )
    assert [problem.answer for problem in load_problems(path)] == answers


def test_a_record_without_the_field_of_the_answer_is_counted_as_one_with_nothing_in_it(
    tmp_path,
):
    lacking = [
        {"question": "b"},
        {"question": "c", "answer": ""},
        {"question": "d", "answer": None},
    ]
    for records in (
        [{"question": "a", "answer": 1}, *lacking],
        [*lacking, {"question": "a", "answer": 1}],
    ):
        for source in (records, write_jsonl(tmp_path / "set.jsonl", records)):
            read = load_problems(source)
            assert ([each.question for each in read], read.left_out) == (["a"], 3)
    named = [{"question": "b"}, {"question": "a", "key": "1"}]
    read = load_problems(named, fields=FieldsConfig(answer="key"))
    assert ([each.question for each in read], read.left_out) == (["a"], 1)
    with pytest.raises(
        UserError,
        match=r"^record 1: field 'answer' is missing, only question, x are there",
    ):
        load_problems([{"question": "a", "x": 1}, {"question": "b"}])
    with pytest.raises(UserError, match=r"^record 1: has no field 'keys'"):
        load_problems(named, fields=FieldsConfig(answer="keys"))


def test_a_question_with_two_answers_is_said():
    records = [("a", 1), ("b", 2), ("a ", 1.0), ("b", 3), ("b", 4)]
    read = load_problems(
        [{"question": question, "answer": answer} for question, answer in records]
    )
    assert len(read) == 5
    (line,) = read.warnings
    assert line.startswith(
        "records: 1 of 2 questions come with different answers, such as 'b' with '2' and '3'"
    )


@pytest.mark.parametrize("value", [{"1"}, [frozenset("1")], {"a": b"1"}])
def test_what_json_lacks_is_not_written_as_a_text(value):
    record = {"question": "?", "answer": "1", "allowed": value}
    with pytest.raises(
        UserError, match=r"of type (set|frozenset|bytes), which JSON lacks; give a list"
    ):
        records_text([record])


@pytest.mark.parametrize("kind", ["records", "pandas", "arrow", "parquet", "file"])
def test_dates_are_the_same_texts_however_records_come(kind, tmp_path):
    """As a reward gets them in training, which writes records to a file, and in evaluation, which doesn't."""
    moment = datetime.datetime(2024, 2, 29, 12, 30)
    record = {
        "question": "?",
        "answer": "1",
        "day": moment.date(),
        "moment": moment,
        "more": {"noon": datetime.time(12)},
    }
    given = {
        "records": lambda: [record],
        "pandas": lambda: pandas.DataFrame([record]),
        "arrow": lambda: pa.Table.from_pylist([record]),
        "parquet": lambda: _written(tmp_path / "dates.parquet", [record]),
        "file": lambda: _written(tmp_path / "dates.jsonl", [record]),
    }[kind]()
    (problem,) = load_problems(given, columns=("day", "moment", "more"))
    assert problem.columns == {
        "day": "2024-02-29",
        "moment": "2024-02-29 12:30:00",
        "more": {"noon": "12:00:00"},
    }


def _written(path, records):
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text(records_text(records))
    return str(path)

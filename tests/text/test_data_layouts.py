"""Layouts that data sets are published in, in every kind of source, against problems written out by hand."""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from absl import logging
from data_sets import rows, write_jsonl, write_parquet, write_set
from pyarrow import parquet

from slpo_jax.errors import UserError
from slpo_jax.text.problem import Problem
from slpo_jax.text.problems import load_problems


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What is logged as a warning."""
    lines: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda message, *args: lines.append(message % args))
    return lines


def _answers(problems: tuple[Problem, ...]) -> list[str]:
    return [problem.answer for problem in problems]


def _error(source: str) -> str:
    with pytest.raises(UserError) as caught:
        load_problems(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# (what the set's owner publishes, what it says)
LAYOUTS = {
    "whynlp/gsm8k-aug": (
        [
            {"question": "Half of 48?", "steps": ["<<48/2=24>>", "<<24*1=24>>"], "answer": "24"},
            {"question": "One?", "steps": [], "answer": "1"},
        ],
        [Problem("Half of 48?", ("<<48/2=24>>", "<<24*1=24>>"), "24"), Problem("One?", (), "1")],
    ),
    "zen-E/GSM8k-Aug": (
        [
            {"question": "Gone?", "cot": "<<600*30/100=180>> <<600 - 180=420>>", "answer": "420"},
            {"question": "Words?", "cot": "<<1+1=2>> so <<2+2=4>>", "answer": "4"},
            {"question": "None?", "cot": "", "answer": "7"},
        ],
        [
            Problem("Gone?", ("<<600*30/100=180>>", "<<600 - 180=420>>"), "420"),
            Problem("Words?", ("<<1+1=2>>", "so", "<<2+2=4>>"), "4"),
            Problem("None?", (), "7"),
        ],
    ),
    "openai/gsm8k": (
        [{"question": "Clips?", "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nSo <<48+24=72>>72.\n#### 1,072"}],
        [Problem("Clips?", ("<<48/2=24>>", "<<48+24=72>>"), "1072")],
    ),
    "juyoung-trl/gsm-hard": (
        [
            {"instruction": "Eggs?", "response": "-9867630.0"},
            {"instruction": "Little?", "response": "2.01e-06"},
            {"instruction": "Much?", "response": "3244047.0999999996"},
        ],
        [
            Problem("Eggs?", (), "-9867630"),
            Problem("Little?", (), "0.00000201"),
            Problem("Much?", (), "3244047.0999999996"),
        ],
    ),
    "ChilleD/MultiArith": (
        [{"question": " In 4 groups? ", "final_ans": "7"}, {"question": "More?", "final_ans": "12"}],
        [Problem(" In 4 groups? ", (), "7"), Problem("More?", (), "12")],
    ),
    "ChilleD/SVAMP": (
        [
            {
                "ID": "chal-1",
                "Body": "A pack costs 76. It is 25 off",
                "Question": "How much is it?",
                "Equation": "( 76.0 - 25.0 )",
                "Answer": "51.0",
                "Type": "Subtraction",
                "question_concat": "A pack costs 76. It is 25 off. How much is it?",
            }
        ],
        [Problem("A pack costs 76. It is 25 off. How much is it?", (), "51")],
    ),
    "SVAMP as first published": (
        [
            {
                "ID": "chal-1",
                "Body": "A pack costs 76. It is 25 off",
                "Question": "How much is it?",
                "Equation": "( 76.0 - 25.0 )",
                "Answer": 51.0,
                "Type": "Subtraction",
            }
        ],
        [Problem("A pack costs 76. It is 25 off How much is it?", (), "51")],
    ),
    "HuggingFaceH4/MATH-500": (
        [
            {"problem": "$1+1$?", "solution": r"It is \boxed{2}.", "answer": "2", "level": 1},
            {"problem": "Big?", "solution": r"\boxed{1,450.50}", "answer": "1,450.50", "level": 5},
        ],
        [Problem("$1+1$?", (), "2"), Problem("Big?", (), "1450.5")],
    ),
    "MATH without answers": (
        [
            {"problem": "Last?", "solution": r"First \boxed{1}, or \boxed{ -3 }."},
            {"problem": "Null?", "solution": r"\boxed {8} \textbf{end}", "answer": None},
        ],
        [Problem("Last?", (), "-3"), Problem("Null?", (), "8")],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "kind",
    [
        "json",
        "jsonl",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("parquet", "directory", "directory of jsonl")),
    ],
)
def test_published_layouts(tmp_path, name, kind):
    records, expected = LAYOUTS[name]
    if kind == "json":
        (tmp_path / "set.json").write_text(json.dumps(records))
        source = str(tmp_path / "set.json")
    elif kind == "jsonl":
        source = write_jsonl(tmp_path / "set.jsonl", records)
    elif kind == "parquet":
        source = write_parquet(tmp_path / "set.parquet", records)
    elif kind == "directory":
        source = write_set(tmp_path / "set", {"train": records})
    else:
        source = str(Path(write_jsonl(tmp_path / "set" / "train.jsonl", records)).parent)
    assert load_problems(source) == tuple(expected)


def test_numbers_of_a_parquet_file_are_taken_exactly(tmp_path):
    whole = write_parquet(tmp_path / "int.parquet", rows(72, -9007199254740993))
    assert _answers(load_problems(whole)) == ["72", "-9007199254740993"]
    # repr, the shortest decimal that reads back as the same float: 0.1 + 0.2 isn't 0.3.
    floats = write_parquet(tmp_path / "float.parquet", rows(72.0, 0.1 + 0.2, 2.01e-06, 1e22))
    assert _answers(load_problems(floats)) == ["72", "0.30000000000000004", "0.00000201", "1" + "0" * 22]
    texts = write_parquet(tmp_path / "text.parquet", rows(" 1,450,000.0 ", "+5"))
    assert _answers(load_problems(texts)) == ["1450000", "5"]
    decimals = pa.table({"question": ["Q?"], "answer": pa.array(["12.50"]).cast(pa.decimal128(10, 2))})
    parquet.write_table(decimals, tmp_path / "decimal.parquet")
    assert _answers(load_problems(str(tmp_path / "decimal.parquet"))) == ["12.5"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "Q?", "answer": "1"}, "field 'question' is missing; the known layouts are question + answer;"),
        ({"instruction": "Q?"}, "field 'response' is missing"),
        ({"problem": "Q?"}, "field 'answer' is missing"),
        ({"Body": "B", "Question": "Q?"}, "field 'Answer' is missing"),
        ({"question": "Q?", "answer": True}, "field 'answer' is bool, not a text"),
        ({"question": "Q?", "answer": [1]}, "field 'answer' is list, not a text"),
        ({"question": 5, "answer": "1"}, "field 'question' is int, not a text"),
        ({"question": "Q?", "answer": float("nan")}, "answer 'nan' is no number"),
        ({"question": "Q?", "answer": float("-inf")}, "answer '-inf' is no number"),
        ({"question": "Q?", "cot": "<<1+1=2", "answer": "2"}, "a step opens with << and is not closed"),
        ({"question": "Q?", "cot": ["<<1+1=2>>"], "answer": "2"}, "field 'cot' is list, not a text"),
        ({"question": "Q?", "final_ans": None}, "field 'final_ans' is NoneType"),
        ({"problem": "Q?", "solution": 2}, "field 'solution' is int"),
    ],
)
def test_malformed_records_name_file_and_row(tmp_path, record, expected):
    path = write_parquet(tmp_path / "set.parquet", [record])
    assert _error(path).startswith(f"{path}, row 1: {expected}")


def test_answers_that_are_no_numbers_are_counted_out(tmp_path, warnings):
    answers = ["2", r"\frac{1}{2}", "x^2", "1,000", r"(3, \frac{\pi}{2})"]
    math = [{"problem": f"P{n}?", "solution": "So.", "answer": answer} for n, answer in enumerate(answers)]
    path = write_jsonl(tmp_path / "math.jsonl", math)
    assert load_problems(path) == (Problem("P0?", (), "2"), Problem("P3?", (), "1000"))
    assert warnings == [f"{path}: left out 3 of 5 problems: {path}, line 2: answer '\\\\frac{{1}}{{2}}' is no number"]
    # From the solution, up to the brace that closes it.
    boxed = [r"\boxed{\frac{7}{\sqrt{2}}}", r"\boxed{\}}", r"\boxed{5", "None.", r"\boxed{6}"]
    path = write_jsonl(tmp_path / "boxed.jsonl", [{"problem": "P?", "solution": text} for text in boxed])
    assert _answers(load_problems(path)) == ["6"]
    assert r"left out 4 of 5 problems: " in warnings[1]
    assert "answer '\\\\frac{7}{\\\\sqrt{2}}' is no number" in warnings[1]


def test_a_data_set_with_a_few_bad_answers_can_be_used_and_a_file_has_to_be_mended(tmp_path, warnings):
    directory = write_set(tmp_path / "set", {"train": rows("1", "many", "3")})
    assert _answers(load_problems(directory)) == ["1", "3"]
    assert warnings == [
        f"{directory}: left out 1 of 3 problems: {directory}, split train, row 2: answer 'many' is no number"
    ]
    path = write_parquet(tmp_path / "set.parquet", rows("1", "many", "3"))
    assert f"{path}, row 2: answer 'many' is no number; write digits" in _error(path)
    directory = write_set(tmp_path / "words", {"train": rows("few", "many")})
    assert "row 1: answer 'few' is no number, nor is any of the 2" in _error(directory)
    assert len(warnings) == 1


@pytest.mark.parametrize(("name", "size"), [("svamp", 1000), ("multiarith", 580), ("gsm_hard", 1318)])
def test_real_sets_in_every_kind_of_source(shared_data, tmp_path, name, size):
    records = json.loads((shared_data / f"{name}.json").read_text())
    problems = load_problems(str(shared_data / f"{name}.json"))
    assert len(problems) == size
    assert load_problems(write_parquet(tmp_path / "set.parquet", records)) == problems
    assert load_problems(write_set(tmp_path / "set", {"test": records}), role="test") == problems
    if name == "svamp":
        assert problems[0].answer == "51"
        assert problems[0].question.endswith("25 dollars on each pack How much do you have to pay to buy each pack?")

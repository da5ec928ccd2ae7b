"""Layouts that data sets are published in, in every kind of source, against problems written out by hand."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from data_sets import rows, write_jsonl, write_parquet, write_set
from pyarrow import parquet

from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import load_problems
from slpo_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("datasets_cache")


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
            Problem("Words?", ("<<1+1=2>>", "<<2+2=4>>"), "4"),
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
        [
            Problem("Last?", (r"First \boxed{1}",), "-3"),
            Problem("Null?", (), "8"),
        ],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "directory", "directory of jsonl"])
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


DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)
_REWARD = {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}
_CHAT = [{"content": DAPO.format("What is\n\n$30+4$?"), "role": "user"}]
_REST = {"data_source": "math_dapo", "ability": "MATH", "extra_info": {"index": "9a9b6eb4"}}
# (what the set's owner publishes, what it says in numbers, what it says in LaTeX)
IN_LATEX = {
    "HuggingFaceH4/MATH-500": (
        [
            {
                "problem": "Half?",
                "solution": r"\boxed{\frac12}",
                "answer": r" \frac{1}{2}",
                "subject": "Algebra",
                "level": 1,
            },
            {"problem": "Two?", "solution": r"\boxed{2}", "answer": "2", "subject": "Algebra", "level": 5},
        ],
        [Problem("Two?", (), "2")],
        [Problem("Half?", (), r"\frac{1}{2}"), Problem("Two?", (), "2")],
    ),
    "MATH without answers": (
        [
            {"problem": "Set?", "solution": r"\boxed{1}, no, \boxed{ \{1,2\} }."},
            {"problem": "One?", "solution": r"\boxed{1}"},
        ],
        [Problem("One?", (), "1")],
        [
            Problem("Set?", (r"\boxed{1}, no",), r"\{1,2\}"),
            Problem("One?", (), "1"),
        ],
    ),
    "zwhe99/amc23": (
        [{"id": 0, "question": "Miles?", "answer": 27.0, "url": "https://artofproblemsolving.com"}],
        [Problem("Miles?", (), "27")],
        [Problem("Miles?", (), "27")],
    ),
    "open-r1/DAPO-Math-17k-Processed": (
        [{"prompt": "What is $30+4$?", "solution": "34", "source_prompt": _CHAT, "reward_model": _REWARD, **_REST}],
        [Problem("What is $30+4$?", (), "34")],
        [Problem("What is $30+4$?", (), "34")],
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        [
            {"prompt": _CHAT, "reward_model": _REWARD, **_REST},
            {
                "prompt": [{"content": "Plain?", "role": "user"}],
                "reward_model": {"ground_truth": "-1", "style": ""},
                **_REST,
            },
        ],
        [Problem("What is\n\n$30+4$?", (), "34"), Problem("Plain?", (), "-1")],
        [Problem("What is\n\n$30+4$?", (), "34"), Problem("Plain?", (), "-1")],
    ),
}


@pytest.mark.parametrize("name", IN_LATEX)
def test_published_layouts_in_numbers_and_in_latex(tmp_path, name, warnings):
    records, numbers, latex = IN_LATEX[name]
    sources = [
        write_jsonl(tmp_path / "set.jsonl", records),
        write_parquet(tmp_path / "set.parquet", records),
        write_set(tmp_path / "set", {"train": records}),
    ]
    for source in sources:
        assert load_problems(source) == tuple(numbers)
        counted = len(warnings)
        assert load_problems(source, answers="latex") == tuple(latex)
        assert len(warnings) == counted, "in LaTeX, all of these are used"


def _aime(folder: Path) -> str:
    """As opencompass/AIME2025 is laid out."""
    configs = ""
    for number, part in enumerate(("I", "II")):
        records = [{"question": f"{part}-{n}?", "answer": str(100 * number + n)} for n in range(1, 3)]
        write_jsonl(folder / f"aime2025-{part}.jsonl", [*records, {"question": f"{part}-5?", "answer": r"336^\circ"}])
        configs += f"  - config_name: AIME2025-{part}\n    data_files:\n      - split: test\n"
        configs += f"        path: aime2025-{part}.jsonl\n"
    (folder / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{configs}---\n\n# AIME 2025 Dataset\n")
    return str(folder)


def test_both_parts_of_aime_are_one_source(tmp_path, warnings):
    both = _aime(tmp_path / "opencompass" / "AIME2025")
    in_latex = ["1", "2", r"336^\circ", "101", "102", r"336^\circ"]
    assert _answers(load_problems(both, role="test", answers="latex")) == in_latex
    assert _answers(load_problems(f"{both}:AIME2025-I+AIME2025-II@test", answers="latex")) == in_latex
    assert _answers(load_problems(f"{both}:AIME2025-II", role="test", answers="latex")) == in_latex[3:]
    assert warnings == []
    assert _answers(load_problems(both, role="test")) == ["1", "2", "101", "102"]
    where = f"{both}:AIME2025-I, split test, row 3: answer '336^\\\\circ' is no number"
    assert warnings == [f"{both}: left out 2 of 6 problems: {where}"]
    assert _error(both).startswith(f"{both}: has no split 'train', only test; name one, e.g. {both}:AIME2025-I@test")
    # Elsewhere a config has to be named.
    other = _aime(tmp_path / "other")
    assert _answers(load_problems(f"{other}:AIME2025-I+AIME2025-II", role="test", answers="latex")) == in_latex
    assert "Config name is missing" in _error(other)


def test_latex_that_can_not_be_compared_is_counted_out(tmp_path, warnings):
    answers = ["2", "", r"\frac{1}{2}", "5}", None]
    records = [{"problem": f"P{n}?", "solution": "none", "answer": answer} for n, answer in enumerate(answers)]
    path = write_jsonl(tmp_path / "math.jsonl", records)
    problems = load_problems(path, answers="latex")
    assert (_answers(problems), problems.left_out) == (["2", r"\frac{1}{2}"], 3)
    assert warnings == [f"{path}: left out 3 of 5 problems: {path}, line 2: answer '' is no LaTeX that can be compared"]
    path = write_jsonl(tmp_path / "bad.jsonl", rows("", "}{"))
    with pytest.raises(UserError) as caught:
        load_problems(path, answers="latex")
    assert str(caught.value) == (
        f"{path}, line 1: answer '' is no LaTeX that can be compared, nor is any of the 2; give a set with answers "
        "that math_verify reads"
    )


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


def test_numbers_of_columns_that_are_no_questions_or_answers(tmp_path):
    path = write_parquet(tmp_path / "set.parquet", [{"question": 5, "answer": "1"}])
    assert _error(path).startswith(f"{path}, row 1: field 'question' is int, not a text")
    path = write_parquet(tmp_path / "set.parquet", rows(float("-inf")))
    assert _error(path).startswith(f"{path}, row 1: answer '-inf' is no number")


def test_answers_that_are_no_numbers_are_counted_out(tmp_path, warnings):
    answers = ["2", r"\frac{1}{2}", "x^2", "1,000", r"(3, \frac{\pi}{2})"]
    math = [{"problem": f"P{n}?", "solution": "So.", "answer": answer} for n, answer in enumerate(answers)]
    path = write_jsonl(tmp_path / "math.jsonl", math)
    assert load_problems(path) == (Problem("P0?", ("So.",), "2"), Problem("P3?", ("So.",), "1000"))
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

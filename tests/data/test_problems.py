"""Readers: what each kind of file gives, and the one line that each kind of mistake gives."""

import json
from pathlib import Path

import pytest

from slpo_jax.data.problem import Problem, without
from slpo_jax.data.problems import load_problems
from slpo_jax.errors import UserError


def _write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def _error(source: str) -> str:
    with pytest.raises(UserError) as caught:
        load_problems(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_coconut_json(tmp_path):
    records = [
        {
            "question": " Two and  one? ",
            "steps": ["<<2+1=3>>", "<<3*1=3>>"],
            "answer": "3",
        },
        {"question": "A lot?", "answer": "1,450,000.0", "extra": None},
    ]
    assert load_problems(_write(tmp_path / "set.json", json.dumps(records))) == (
        Problem(" Two and  one? ", ("<<2+1=3>>", "<<3*1=3>>"), "3"),
        Problem("A lot?", (), "1450000"),
    )


def test_gsm8k_jsonl(tmp_path):
    solution = (
        "She has 2*3 = <<2*3=6>>6.\nThen #1 gives <<6+1000=1006>>1,006.\n#### 1,006"
    )
    lines = (
        json.dumps({"question": "Q\u2028?", "answer": solution}, ensure_ascii=False)
        + "\r\n\n"
    )
    lines += json.dumps({"question": "R?", "answer": "None to see.\n#### -4"}) + "\n"
    assert load_problems(_write(tmp_path / "train.jsonl", lines)) == (
        Problem("Q\u2028?", ("<<2*3=6>>", "<<6+1000=1006>>"), "1006"),
        Problem("R?", (), "-4"),
    )


def test_icot_txt(tmp_path):
    text = (
        "A | b #1?||<<600*30/100=180>> <<600 - 180=420>> #### 420\nNo steps?||#### 7.50"
    )
    assert load_problems(_write(tmp_path / "train.txt", text)) == (
        Problem("A | b #1?", ("<<600*30/100=180>>", "<<600 - 180=420>>"), "420"),
        Problem("No steps?", (), "7.5"),
    )


def test_words_between_annotations_are_no_steps(tmp_path):
    (problem,) = load_problems(
        _write(tmp_path / "train.txt", "Q?||<<1+1=2>> so <<2 + 2=4>> #### 4")
    )
    assert problem.steps == ("<<1+1=2>>", "<<2 + 2=4>>")


def test_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "set.txt"
    path.write_bytes(b"\xef\xbb\xbfQ?||#### 1\n")
    assert load_problems(str(path))[0].question == "Q?"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.json", "[]", "a.json: holds no problems"),
        ("a.jsonl", "\n\n", "a.jsonl: holds no problems"),
        ("a.txt", "", "a.txt: holds no problems"),
        ("a.csv", "question,answer", "a.csv: holds no problems"),
        (
            "a.csv",
            "question,answer\nQ?,",
            "a.csv, line 2: no answer, nor is any of the 1",
        ),
        (
            "a.csv",
            "question,answer,answer\nQ?,1,2",
            "a.csv: has two columns 'answer'; rename one",
        ),
        (
            "a.csv",
            'question,answer\n"Q,\nP?",1\n\n"R,\nS?",1,2',
            "a.csv, line 5: 3 field(s) for the header's 2 (quest",
        ),
        (
            "a.csv",
            "question,answer\nQ?",
            "a.csv, line 2: 1 field(s) for the header's 2 (question,answer); add what",
        ),
        (
            "a.csv",
            'question,answer\n"Q?,1\nR?,2\n',
            "a.csv, line 2: malformed CSV (unexpected end of data)",
        ),
        ("a.tsv", 'question\tanswer\n"Q?"x\t1', "a.tsv, line 2: malformed CSV"),
        ("a.xlsx", "question,answer", "a.xlsx: unknown kind of problem file"),
        (
            "a.json",
            '[\n{"question": "Q" "answer": 1}]',
            "a.json, line 2: malformed JSON",
        ),
        (
            "a.json",
            '[{"question": "Q", "answer": "1"}, {"answer": "1"}]',
            "a.json, record 2: field 'question' is missing",
        ),
        (
            "a.json",
            '[{"question": " ", "answer": "1"}]',
            "a.json, record 1: the question is empty",
        ),
        (
            "a.json",
            '[{"question": "Q", "answer": "1", "steps": {"1": 1}}]',
            "a.json, record 1: field 'steps' is neither",
        ),
        ("a.json", '["Q"]', "a.json, record 1: not a record"),
        ("a.json", '{\n"data": [{', "a.json, line 1: malformed JSON"),
        ("a.json", "[" * 100_000, "a.json, line 1: malformed JSON"),
        (
            "a.jsonl",
            '{"question": "Q", "answer": "#### 1"}\n\n{"question"',
            "a.jsonl, line 3: malformed JSON",
        ),
        (
            "a.jsonl",
            '{"question": "Q", "answer": "So five.\\n#### five"}',
            "a.jsonl, line 1: answer 'five' is no number",
        ),
        ("a.txt", "Q?||#### 1\nQ #### 2", "a.txt, line 2: malformed"),
        ("a.txt", "Q||<<1+1=2>> 2", "a.txt, line 1: malformed"),
        (
            "a.txt",
            "Q||<<1+1=2>> #### two\n",
            "a.txt, line 1: answer 'two' is no number",
        ),
        ("a.txt", "Q||<<1+1=2 #### 2", "a.txt, line 1: a step opens with <<"),
    ],
)
def test_one_line_names_file_and_place(tmp_path, name, text, expected):
    assert _error(_write(tmp_path / name, text)).startswith(str(tmp_path / expected))


def test_a_file_without_names_is_told_to_have_some(tmp_path):
    message = _error(_write(tmp_path / "a.csv", "Tom has 4 pens .,4\nAnn has 5 .,5"))
    assert message.endswith("or begin a table with a line of names")


def test_records_within_an_object_are_told_how_they_have_to_lie(tmp_path):
    message = _error(
        _write(tmp_path / "a.json", '{"data": [{"question": "Q", "answer": "1"}]}')
    )
    assert message.endswith(
        "or give the list of records alone where one of them holds that"
    )
    message = _error(_write(tmp_path / "a.json", '{\n"data": ['))
    assert message.endswith("a file is one list of records, or a record a line")


def test_files_that_cant_be_read(tmp_path):
    assert "none.json: no such file" in _error(str(tmp_path / "none.json"))
    (tmp_path / "folder.json").mkdir()
    assert "folder.json: can't be read" in _error(str(tmp_path / "folder.json"))
    (tmp_path / "latin.txt").write_bytes(b"Caf\xe9?||#### 1")
    assert "latin.txt: not UTF-8 text (byte 3)" in _error(str(tmp_path / "latin.txt"))
    assert "synthetic:nothing: no such set" in _error("synthetic:nothing")


def test_without_compares_questions_up_to_white_space():
    kept = Problem("Kept?", (), "1")
    same = Problem("The same?", (), "2")
    spaced = Problem(" One\n two ", (), "3")
    held_out = [
        Problem("The same?", ("a step",), "5"),
        Problem("One  two", (), "3"),
        Problem("kept?", (), "1"),
    ]
    assert without([kept, same, spaced], held_out) == (kept,)


def test_gsm8k_train_less_validation(shared_data):
    train = load_problems(str(shared_data / "gsm8k_train.jsonl"))
    valid = load_problems(str(shared_data / "gsm_valid.json"))
    assert (len(train), len(valid), len(without(train, valid))) == (7473, 500, 6973)
    assert train[0].steps == ("<<48/2=24>>", "<<48+24=72>>")
    assert train[0].answer == "72"
    # The two files tell the same problems: the readers have to agree on the answers.
    answers = {" ".join(problem.question.split()): problem.answer for problem in train}
    assert all(
        answers[" ".join(problem.question.split())] == problem.answer
        for problem in valid
    )


@pytest.mark.parametrize(
    ("name", "size", "first"),
    [
        ("gsm_test", 1319, "18"),
        ("gsm_hard", 1318, "-9867630"),
        ("multiarith", 580, "7"),
    ],
)
def test_real_test_sets(shared_data, name, size, first):
    problems = load_problems(str(shared_data / f"{name}.json"))
    assert len(problems) == size
    assert problems[0].answer == first
    assert (
        problems[0].question
        == json.loads((shared_data / f"{name}.json").read_text())[0]["question"]
    )

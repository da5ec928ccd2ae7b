"""How a file is understood, by `slpo.read` and `slpo data`: against lines and problems written out by hand."""

import dataclasses
import json
import subprocess
import sys

import pandas
import pytest

import slpo_jax as slpo
from slpo_jax.cli.reasoner_commands import data
from slpo_jax.data.problem import Problem

TABLE = """id,question,context,answer,rationale,subject
1,How many?,He has 2 pens.,5,"He has 2.
He gets 3.
#### 5",math
2,How much?,nan,6 pens,,math
3,Why?,,because,,math
"""
FOUND = (
    Problem("He has 2 pens. How many?", ("He has 2.", "He gets 3."), "5"),
    Problem("How much?", (), "6 pens"),
    Problem("Why?", (), "because"),
)
RECORDS = """{"question": "1 + 1", "answer": "2", "w": 5}
{"question": "2 + 2", "answer": ""}
"""
FIELDS = [
    "  question from question, context; answer from answer; steps from rationale",
    "  not used: id, subject",
]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "set.csv").write_text(TABLE)
    return tmp_path / "set.csv"


def test_what_is_read_says_how_it_was_understood(path, warnings):
    problems = slpo.read(path)
    assert [dataclasses.replace(each, columns={}) for each in problems] == [*FOUND]
    assert problems[0].columns["subject"] == "math", "what a reward may name"
    why = "2 of 3 answers are no numbers, '6 pens' for one; compared as texts"
    said = f"{path}: 3 problems, 0.7 steps each, 2 without steps, answers are texts ({why})"
    assert str(problems).splitlines() == [said, *FIELDS]
    assert (
        slpo.read(problems)[0].question == problems[0].question
    )  # what it gives, it takes
    assert slpo.read(problems)[0].columns["subject"] == "math"
    assert warnings == []
    path.write_text(TABLE.replace("answer", "final_answer").replace("because", "7"))
    assert str(slpo.read(path, answers="last_number")).splitlines() == [
        f"{path}: 2 problems, 1.0 steps each, 1 without steps, answers are numbers",
        *(line.replace("from answer", "from final_answer") for line in FIELDS),
        f"  {path}: left out 1 of 3 problems: {path}, line 5: answer '6 pens' is no number",
    ]


def test_records_and_generators_are_read_too():
    records = [{"task": "Q?", "gold": 5.0, "answer": 7}]
    problems = slpo.read(iter(records), fields={"question": "task", "answer": "gold"})
    assert problems == (
        Problem("Q?", (), "5", {"task": "Q?", "gold": 5.0, "answer": 7}),
    )
    said = "records: 1 problems, 0.0 steps each, 1 without steps, answers are numbers (1 of 1 answers are numbers)"
    assert str(problems).splitlines() == [
        said,
        "  question from task; answer from gold",
        "  not used: answer",
    ]
    assert (
        slpo.read(pandas.DataFrame(records), "boxed", {"question": "task"})[0].answer
        == "7"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"answers": "number"},
            "^answers: 'number' is not valid; .* last_number, boxed, texts, choice$",
        ),
        (
            {"fields": {"prompt": "Question"}},
            "^fields: .* is not valid; give texts as question, answer, steps and so",
        ),
        (
            {"fields": {"question": 5}},
            "^fields: .* is not valid; give texts as question, answer, steps and so",
        ),
        (
            {"fields": {"answer": "gold"}},
            r"has no field 'gold' \(config\.data\.fields\.answer\), only id, question, ",
        ),
    ],
)
def test_what_can_not_be_read_is_a_line_in_the_words_of_the_call(path, given, message):
    with pytest.raises(slpo.UserError, match=message) as error:
        slpo.read(path, **given)
    assert "\n" not in str(error.value)


def test_problems_are_not_written_over_a_file(tmp_path):
    """It may be the one that they are read from, which lacks what isn't read."""
    path = tmp_path / "set.jsonl"
    path.write_text(RECORDS)
    for arguments in ([str(path)], ["run", "test"]):
        with pytest.raises(slpo.UserError, match=r"^--out: .*set\.jsonl exists"):
            data([*arguments, f"--out={path}"])
    assert path.read_text() == RECORDS


def test_written_problems_keep_all_columns(tmp_path, capsys):
    (tmp_path / "set.jsonl").write_text(RECORDS)
    out = tmp_path / "other.jsonl"
    data([str(tmp_path / "set.jsonl"), f"--out={out}"])
    assert f"written: {out}, 2 problems" in capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["question"], row.get("w")) for row in rows] == [
        ("1 + 1", 5),
        ("2 + 2", None),
    ]


@pytest.mark.slow
def test_the_command_shows_the_first_problems(path):
    flags = ["--limit=2", "--answers=texts", "--config.data.fields.steps=rationale"]
    command = [sys.executable, "-m", "slpo_jax", "data", str(path), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{path}: 3 problems, 0.7 steps each, 2 without steps, answers are texts",
        *FIELDS,
        "  1  prompt  He has 2 pens. How many?",
        "     steps   He has 2.",
        "             He gets 3.",
        "     answer  5",
        "  2  prompt  How much?",
        "     steps   none",
        "     answer  6 pens",
    ]

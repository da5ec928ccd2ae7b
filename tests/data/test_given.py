"""Records as callers hold them are the same problems in every form, and what holds none is one line."""

import datasets
import jax.numpy as jnp
import numpy as np
import pandas
import pyarrow as pa
import pytest

import slpo_jax
from data_sets import write_jsonl, write_parquet
from slpo_jax.api.load_options import by_argument
from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import load_problems
from slpo_jax.data.record_readers import given_rows
from slpo_jax.errors import UserError

PROBLEMS = (
    Problem("Q?\nA. 3\nB. 72", ("1 + 2 = 3",), "72"),
    Problem("R?\nA. 3.5\nB. 4", (), "3.5"),
)
RECORDS = [
    {"question": "Q?", "steps": ["1 + 2 = 3"], "choices": [3, 72], "answer": 72.0},
    {"question": "R?", "steps": [], "choices": [3.5, 4], "answer": 3.5},
]


def _frame():
    """As a table of parquet is: arrays in cells."""
    frame = pandas.DataFrame(RECORDS)
    frame["steps"] = frame["steps"].map(np.array)
    frame["choices"] = frame["choices"].map(lambda texts: np.array(texts, dtype=object))
    return frame


FORMS = {
    "dicts": lambda: RECORDS,
    "a generator": lambda: iter(RECORDS),
    "problems": lambda: PROBLEMS,
    "a frame with arrays in its cells": _frame,
    "a series of dicts": lambda: pandas.Series(RECORDS),
    "an arrow table": lambda: pa.Table.from_pylist(RECORDS),
    "a data set": lambda: datasets.Dataset.from_list(RECORDS),
    "a polars frame": lambda: pytest.importorskip("polars").DataFrame(RECORDS),
}


@pytest.mark.parametrize("form", FORMS)
def test_problems_in_every_form_that_people_hold(form):
    assert load_problems(FORMS[form]()) == PROBLEMS


TENTHS = np.array([0.1, np.nan, 0.3], np.float32)
COLUMNS = {
    "pandas": lambda: pandas.DataFrame({"answer": TENTHS}),
    "pandas, half": lambda: pandas.DataFrame({"answer": TENTHS.astype(np.float16)}),
    "pandas, nullable": lambda: pandas.DataFrame(
        {"answer": pandas.array(TENTHS, "Float32")}
    ),
    "pandas, of arrow": lambda: pandas.DataFrame(
        {"answer": pandas.array([0.1, None, 0.3], "float32[pyarrow]")}
    ),
    "pandas, objects": lambda: pandas.DataFrame({"answer": [*TENTHS]}, dtype=object),
    "arrow": lambda: pa.table({"answer": TENTHS}),
    "arrow, half": lambda: pa.table({"answer": TENTHS.astype(np.float16)}),
    "arrow, structs": lambda: pa.chunked_array(
        [pa.array([{"answer": 0.1}, {}, {"answer": 0.3}], NESTED)]
    ),
    "polars": lambda: pytest.importorskip("polars").DataFrame({"answer": TENTHS}),
    "polars, structs": lambda: (
        pytest.importorskip("polars").DataFrame({"answer": TENTHS}).to_struct()
    ),
    "a data set": lambda: datasets.Dataset.from_dict({"answer": TENTHS}),
    "NumPy scalars": lambda: [{"answer": each} for each in TENTHS],
    "JAX scalars": lambda: [{"answer": each} for each in jnp.asarray(TENTHS)],
    "arrow scalars": lambda: [{"answer": each} for each in pa.array(TENTHS)],
    "lists in arrow": lambda: pa.table(
        {"answer": pa.array([[0.1], [np.nan], [0.3]], pa.list_(pa.float32()))}
    ),
    "arrays": lambda: [{"answer": TENTHS[n : n + 1]} for n in range(3)],
    "arrow columns": lambda: [
        {"answer": pa.chunked_array([TENTHS[n : n + 1]])} for n in range(3)
    ],
    "problem": lambda: [{"answer": {"ground_truth": each}} for each in TENTHS],
}
NESTED = pa.struct({"answer": pa.float32()})


@pytest.mark.parametrize("form", COLUMNS)
def test_numbers_of_every_width_are_their_shortest_decimals(form):
    records = [record for _, record in given_rows(COLUMNS[form]())]
    if form == "problem":
        records = [{"reward_model": record["answer"]} for record in records]
    read = load_problems([{"question": "Q?", **record} for record in records])
    assert [problem.answer for problem in read] == ["0.1", "0.3"]


def test_line_breaks_behind_questions_are_kept_and_said():
    """Published programs keep those of a data set."""
    rows = [{"question": f"{n} ?\n" if n else "0 ?", "answer": n} for n in range(3)]
    read = load_problems(rows)
    assert [problem.question for problem in read] == ["0 ?", "1 ?\n", "2 ?\n"]
    (line,) = read.warnings
    assert "2 of 3" in line


def test_a_class_is_read_by_its_name():
    """As the hub shows it; a number whose name is the number stays one, and -1 is none."""
    features = {
        "question": datasets.Value("string"),
        "answer": datasets.ClassLabel(names=["yes", "no"]),
        "level": datasets.ClassLabel(names=["0", "1"]),
    }
    rows = {"question": ["a", "b"], "answer": [1, 0], "level": [1, -1]}
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    columns = [dict(record) for _, record in given_rows(made)]
    assert [each["answer"] for each in columns] == ["no", "yes"]
    assert [each["level"] for each in columns] == [1, -1]


def test_whole_numbers_in_columns_of_floats_are_shown_as_such():
    columns = {"A": [1, 2], "B": [3, None], "C": np.float32([0.1, 0.2])}
    frame = pandas.DataFrame({"question": "Q?", **columns, "answer": "A"})
    for table in (frame, pa.Table.from_pandas(frame)):
        shown = [problem.question for problem in load_problems(table, answers="texts")]
        assert shown == ["Q?\nA. 1\nB. 3\nC. 0.1", "Q?\nA. 2\nC. 0.2"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (np.bool_(True), "True"),
        (jnp.array(False), "False"),
        (10**5000, "1" + "0" * 5000),
        (np.int8(-3), "-3"),
    ],
    ids=["NumPy's bool", "JAX's bool", "a long number", "a byte"],
)
def test_values_of_other_libraries_are_read(answer, expected):
    assert (
        load_problems([{"question": "Q?", "answer": answer}], answers="texts")[0].answer
        == expected
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "NoneType holds no records; give a file, a list of dicts, a DataFrame or a datasets.Dataset"),
        (b"Q?", "bytes holds no records"),
        ([], "records: holds no problems; give one with at least one"),
        (pandas.DataFrame(), "records: holds no problems"),
        (RECORDS[0], "dict holds no records"),
        (datasets.DatasetDict(test=datasets.Dataset.from_list(RECORDS)), "records: have no split 'train', only test"),
        (["Q?"], "record 1: not a record with fields"),
        ([{"task": 1, "answer": "5"}], "record 1: field 'question' is missing, .* --config.data.fields.question="),
        (pandas.DataFrame([["Q?", 5]]), "record 1: field 'question' is missing, only 0, 1 are there; name"),
        ([{"question": "Q?", "answer": np.datetime64("2020-01-01")}], "record 1: field 'answer' is datetime64, not a"),
        ([{"question": "Q?", "answer": np.timedelta64(3, "D")}], "record 1: field 'answer' is timedelta64, not a text"),
        ([{"question": jnp.ones(2), "answer": 1}], "record 1: field 'question' is list, not a text"),
        (np.array(3), "ndarray holds no records"),
        (pandas.DataFrame([["Q?", 5]], columns=["answer"] * 2), "records: has two columns 'answer'; rename one"),
        ([{"question": "Q?", "answer": object()}], "record 1: field 'answer' is object, not a text"),
    ],
)  # fmt: skip
def test_what_holds_no_problems_is_a_line(given, message):
    with pytest.raises(UserError, match=f"^{message}") as caught, by_argument():
        load_problems(given)
    assert "\n" not in str(caught.value)


TYPES = [3, -2.5, "04", True, None, [1, [2.0, "a"]], {"a": 1}]


@pytest.mark.parametrize("kind", ["jsonl", "records", "parquet"])
def test_a_reward_s_columns_have_the_types_that_they_were_given(kind, tmp_path):
    """And only those that it names are kept, whatever else they are to the problem; all are where it takes all."""
    values = TYPES if kind != "parquet" else [3, -2.5, "04", True, [1, 2], {"a": 1}]
    record = {"question": "Q?", "answer": "5", "id": 7} | {
        f"c{place}": value for place, value in enumerate(values)
    }
    source = [record]
    if kind == "jsonl":
        source = write_jsonl(tmp_path / "set.jsonl", [record])
    elif kind == "parquet":
        source = write_parquet(tmp_path / "set.parquet", [record])
    named = frozenset(record) - {"question", "answer", "id"}
    (problem,) = load_problems(source, columns=named)
    assert problem.columns == {name: record[name] for name in named}
    assert [type(problem.columns[f"c{place}"]) for place in range(len(values))] == list(
        map(type, values)
    )
    assert load_problems(source)[0].columns == {}
    assert load_problems(source, columns=None)[0].columns.keys() == record.keys()
    (again,) = load_problems([problem], columns=frozenset({"c0"}))
    assert again.columns == {"c0": 3}


def test_problems_without_an_answer_are_kept_where_none_is_needed():
    records = [
        {"question": "A?", "target": 24},
        {"question": "B?", "answer": "5"},
        {"question": "C?", "answer": None},
    ]
    kept = load_problems(
        records, answers="texts", columns=frozenset({"target"}), unanswered=True
    )
    assert [(each.answer, dict(each.columns)) for each in kept] == [
        ("", {"target": 24}),
        ("5", {}),
        ("", {}),
    ]
    assert [
        each.answer for each in load_problems(records, answers="texts", unanswered=True)
    ] == ["24", "5", ""]
    left = load_problems(records[1:], answers="texts")
    assert ([each.answer for each in left], left.left_out) == (["5"], 1)
    bad = load_problems(
        [*records[1:], {"question": "D?", "answer": "six"}], unanswered=True
    )
    assert ([each.answer for each in bad], bad.left_out) == (["5", ""], 1)


def test_streams_of_arrow_are_read():
    table = pa.Table.from_pylist(
        [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]
    )
    for read in (load_problems, slpo_jax.read):
        problems = read(
            pa.RecordBatchReader.from_batches(table.schema, table.to_batches())
        )
        assert [(each.question, each.answer) for each in problems] == [
            ("a", "1"),
            ("b", "2"),
        ]


def test_a_dict_of_splits_gives_the_split_of_the_role():
    rows = datasets.Dataset.from_list(
        [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]
    )
    splits = datasets.DatasetDict(train=rows, test=rows.select([1]))
    assert [each.answer for each in load_problems(splits)] == ["1", "2"]
    assert [each.answer for each in load_problems(splits, role="test")] == ["2"]
    assert (
        slpo_jax.read(splits).summary[0].startswith("records, split train: 2 problems")
    )
    with pytest.raises(
        UserError, match=r"^records: have no split 'validation', only train, test"
    ):
        load_problems(splits, role="validation")

"""Records as callers hold them are the same problems in every form, and what holds none is one line."""

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pytest

from slpo_jax.config.load_options import by_argument
from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import load_problems
from slpo_jax.errors import UserError

PROBLEMS = (Problem("Q?\nA. 3\nB. 72", ("1 + 2 = 3",), "72"), Problem("R?\nA. 3.5\nB. 4", (), "3.5"))
RECORDS = [
    {"question": "Q?", "steps": ["1 + 2 = 3"], "choices": ["3", "72"], "answer": 72.0},
    {"question": "R?", "steps": [], "choices": ["3.5", "4"], "answer": 3.5},
]
COLUMNS = {name: [record[name] for record in RECORDS] for name in RECORDS[0]}


def _frame():
    """As a table of parquet is: arrays in cells."""
    frame = pandas.DataFrame(RECORDS)
    frame["steps"] = frame["steps"].map(np.array)
    frame["choices"] = frame["choices"].map(lambda texts: np.array(texts, dtype=object))
    return frame


def _structured():
    kinds = [("question", "U9"), ("steps", object), ("choices", object), ("answer", np.float32)]
    return np.array([tuple(record.values()) for record in RECORDS], kinds)


FORMS = {
    "dicts": lambda: RECORDS,
    "a generator": lambda: iter(RECORDS),
    "problems": lambda: PROBLEMS,
    "a dict of columns": lambda: COLUMNS,
    "a dict of arrays": lambda: {name: pandas.Series(column) for name, column in COLUMNS.items()},
    "a frame with arrays in its cells": _frame,
    "a frame with an index": lambda: _frame().set_index(pandas.Index(["a", "b"])),
    "a series of dicts": lambda: pandas.Series(RECORDS),
    "an array of dicts": lambda: np.array(RECORDS),
    "a structured array": _structured,
    "a records array": lambda: _structured().view(np.recarray),
    "an arrow table": lambda: pa.Table.from_pylist(RECORDS),
    "a data set": lambda: datasets.Dataset.from_list(RECORDS),
    "a polars frame": lambda: pytest.importorskip("polars").DataFrame(RECORDS),
    "a polars series": lambda: pytest.importorskip("polars").Series(RECORDS),
}


@pytest.mark.parametrize("form", FORMS)
def test_problems_in_every_form_that_people_hold(form):
    assert load_problems(FORMS[form]()) == PROBLEMS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "NoneType holds no records; give a file, a list of dicts, a DataFrame or a datasets.Dataset"),
        (5, "int holds no records"),
        (b"Q?", "bytes holds no records"),
        ([], "is empty; give at least one record"),
        (pandas.DataFrame(), "is empty"),
        (RECORDS[0], "is one record; give a list of records"),
        ({"question": ["Q?"], "answer": [1, 2]}, r"has columns of different lengths \(question 1, answer 2\)"),
        ({"train": pandas.DataFrame(RECORDS), "test": pandas.DataFrame()}, "has the splits train, test; give one"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(RECORDS)), "has the splits train; give one"),
        (pandas.DataFrame([["Q?", 1, 2]], columns=["question", "answer", "answer"]), "has two columns 'answer'"),
        (["Q?"], "record 1: not a record with fields"),
        ([("Q?", "5")], "record 1: not a record with fields"),
        ([{"task": 1, "answer": "5"}], "record 1: field 'question' is missing, .* rename the one that holds it to q"),
        (pandas.DataFrame([["Q?", 5]]), "record 1: field 'question' is missing, only 0, 1 are there; rename"),
        ([{"question": "Q?", "answer": object()}], "record 1: field 'answer' is object, not a text"),
        ([{"question": 5.0, "answer": ["5"]}], "record 1: field 'answer' is list, not a text"),
    ],
)  # fmt: skip
def test_what_holds_no_problems_is_a_line(given, message):
    with pytest.raises(UserError, match=f"^{message}") as caught, by_argument():
        load_problems(given)
    assert "\n" not in str(caught.value)

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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "NoneType holds no records; give a file, a list of dicts, a DataFrame or a datasets.Dataset"),
        (b"Q?", "bytes holds no records"),
        ([], "records: holds no problems; give one with at least one"),
        (pandas.DataFrame(), "records: holds no problems"),
        (RECORDS[0], "dict holds no records"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(RECORDS)), "DatasetDict holds no records"),
        (["Q?"], "record 1: not a record with fields"),
        ([{"task": 1, "answer": "5"}], "record 1: field 'question' is missing, .* rename the one that holds it to q"),
        (pandas.DataFrame([["Q?", 5]]), "record 1: field 'question' is missing, only 0, 1 are there; rename"),
        ([{"question": "Q?", "answer": object()}], "record 1: field 'answer' is object, not a text"),
    ],
)  # fmt: skip
def test_what_holds_no_problems_is_a_line(given, message):
    with pytest.raises(UserError, match=f"^{message}") as caught, by_argument():
        load_problems(given)
    assert "\n" not in str(caught.value)

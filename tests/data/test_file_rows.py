"""Numbers keep the text that was written, whatever the source; what a column's type can't keep is said."""

import gzip
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from slpo_jax.data.problems import load_problems

pytestmark = pytest.mark.usefixtures("datasets_cache")

# As they are written, and as canonical decimals: beyond 15 digits and beyond 2^63, where 64 bits end.
WRITTEN = {
    "5186630.5999999996": "5186630.5999999996",
    "9007199254740993": "9007199254740993",
    "123456789012345678901": "123456789012345678901",
    "0.1": "0.1",
    "-2.01e-06": "-0.00000201",
    "72.0": "72",
}
ANSWERS = list(WRITTEN.values())
LINES = [f'{{"question": "Q{n}?", "answer": {text}}}' for n, text in enumerate(WRITTEN)]


def _written(folder: Path, name: str, data: bytes) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return str(folder / name)


def _columns(folder: Path, name: str, answers: pa.Array) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    questions = [f"Q{n}?" for n in range(len(answers))]
    parquet.write_table(pa.table({"question": questions, "answer": answers}), folder / name)
    return str(folder / name)


def test_the_same_records_are_the_same_references_in_every_kind_of_source(tmp_path, warnings):
    lines, listed = "\n".join(LINES).encode(), f"[{', '.join(LINES)}]".encode()
    texts, decimals = pa.array(list(WRITTEN)), pa.array([Decimal(text) for text in WRITTEN])
    sources = [
        _written(tmp_path, "set.jsonl", lines),
        _written(tmp_path, "set.json", listed),
        _written(tmp_path, "lines.json", lines),
        _columns(tmp_path, "texts.parquet", texts),
        _columns(tmp_path, "decimals.parquet", decimals),
        Path(_written(tmp_path / "jsonl", "train.jsonl", lines)).parent,
        Path(_written(tmp_path / "json", "train.json", listed)).parent,
        Path(_written(tmp_path / "gzip", "train.jsonl.gz", gzip.compress(lines))).parent,
        Path(_columns(tmp_path / "texts", "train.parquet", texts)).parent,
        Path(_columns(tmp_path / "decimals", "train.parquet", decimals)).parent,
    ]
    for source in sources:
        assert [problem.answer for problem in load_problems(str(source))] == ANSWERS, source
    assert warnings == []


@pytest.mark.parametrize(
    ("kind", "digits", "dtype", "answers"),
    [
        ("double", 15, np.float64, ["0.1", "5186630.6", "9007199254740992"]),
        ("float", 6, np.float32, ["0.1", "5186630.5", "9007199000000000"]),
        ("halffloat", 3, np.float16, ["0.1", "72.25", "50000"]),
    ],
)
def test_columns_of_floating_point_numbers_are_read_to_their_own_digits_and_named(
    kind, digits, dtype, answers, tmp_path, warnings
):
    column = pa.array([dtype(text) for text in answers])
    path = _columns(tmp_path, "set.parquet", column)
    folder = Path(_columns(tmp_path / "set", "train.parquet", column)).parent
    for source in (path, str(folder)):
        assert [problem.answer for problem in load_problems(source)] == answers
        count = sum("." in text or len(text) > digits for text in answers)
        assert warnings.pop() == (
            f"{source}: {count} answers (0.1, for one) are in a column of type {kind}, which keeps {digits} digits: "
            "longer ones are not as they were written; store answers as texts"
        )
    # Small whole numbers are what was written.
    assert load_problems(_columns(tmp_path, "whole.parquet", pa.array([dtype(27), dtype(-3)])))[1].answer == "-3"
    assert warnings == []


def test_numbers_within_a_column_s_records_too(tmp_path, warnings):
    rewards = pa.array([{"ground_truth": np.float32(0.1)}], pa.struct([("ground_truth", pa.float32())]))
    chat = [[{"role": "user", "content": "Q?"}]]
    parquet.write_table(pa.table({"prompt": chat, "reward_model": rewards}), tmp_path / "set.parquet")
    (problem,) = load_problems(str(tmp_path / "set.parquet"))
    assert (problem.question, problem.answer) == ("Q?", "0.1")
    assert "1 answers (0.1, for one) are in a column of type float" in warnings[0]

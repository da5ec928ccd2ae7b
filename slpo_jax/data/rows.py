"""Row readers: each turns a file, or what a caller holds, into (where, record) pairs; `where` is for messages.

Numbers keep the text that was written, which 64 bits may round: in JSON, CSV, and columns of integers and decimals.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slpo_jax.data.cells import Number
from slpo_jax.data.problem import Problem
from slpo_jax.errors import UserError

if TYPE_CHECKING:
    import pyarrow

Rows = Iterator[tuple[str, Any]]


def _read_json(path: Path) -> Rows:
    text = _read_text(path)
    if text.lstrip().startswith("["):
        for number, record in enumerate(_parse_json(text, path), start=1):
            yield f"{path}, record {number}", record
    else:
        for number, line in _lines(text):
            yield f"{path}, line {number}", _parse_json(line, path, number)


def _read_icot(path: Path) -> Rows:
    for number, line in _lines(_read_text(path)):
        where = f"{path}, line {number}"
        before, hashes, answer = line.rpartition("####")
        question, bars, steps = before.partition("||")
        if not bars or not hashes:
            raise UserError(f"{where}: malformed; expected 'question||steps #### answer'")
        yield where, {"question": question, "cot": steps, "answer": answer.strip()}


def _read_csv(path: Path) -> Rows:
    """Columns lie between tabs, semicolons or commas, by the header."""
    text = _read_text(path)
    header = text.partition("\n")[0]
    delimiter = next((each for each in "\t;" if each in header and "," not in header), ",")
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = list(reader.fieldnames or ())
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path}: has two columns {twice!r}; rename one")
        for record in reader:
            where = f"{path}, line {reader.line_num}"
            if None in record or None in record.values():
                raise UserError(
                    f"{where}: other columns than the header's ({header[:80].strip()}); quote texts with {delimiter!r}"
                )
            yield where, record
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.reader.line_num}: malformed CSV ({error}); mend or remove it") from None


def _read_parquet(path: Path) -> Rows:
    import pyarrow  # takes a while, and most files are texts
    from pyarrow import parquet

    data, number = _read_bytes(path), 0
    try:
        # A batch at a time: the rows of a large file as Python objects take ten times its memory.
        for batch in parquet.read_table(pyarrow.BufferReader(data)).to_batches():
            for record in arrow_records(pyarrow.Table.from_batches([batch])):
                number += 1
                yield f"{path}, row {number}", record
    except (OSError, ValueError) as error:  # arrow's own errors are among them, and texts that aren't UTF-8
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a readable parquet file ({reason}); get or write it again") from None


FILE_READERS: dict[str, Callable[[Path], Rows]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_icot,
    ".parquet": _read_parquet,
}


def arrow_records(table: "pyarrow.Table") -> list[dict[str, Any]]:
    """The rows; floating-point numbers as the shortest decimals that their type reads back."""
    import pyarrow

    numbers = [field.name for field in table.schema if pyarrow.types.is_floating(field.type)]
    for name in numbers:
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(pyarrow.string()))
    records = table.to_pylist()
    for record in records if numbers else ():
        record.update((name, Number(record[name])) for name in numbers if record[name] is not None)
    return records


def dataset_records(dataset: Any) -> Iterator[Any]:
    """The records of a `datasets.Dataset`."""
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        yield from arrow_records(table)


def given_rows(given: Any) -> Rows:
    """The records of what a caller holds.

    Args:
        given: dicts or `Problem`s in a list, a Series or anything that goes through them; a table of pandas, polars or
            pyarrow, or a `datasets.Dataset`.
    Yields:
        (where, record) as the readers of files do.
    Raises:
        UserError: it is something else.
    """
    for number, record in enumerate(_held(given), start=1):
        yield f"record {number}", record


def _held(given: Any) -> Iterable[Any]:
    if hasattr(given, "to_pylist"):  # of pyarrow
        return arrow_records(given)
    if hasattr(given, "to_dicts"):  # of polars
        given = given.to_dicts()
    elif hasattr(given, "columns") and hasattr(given, "to_dict"):  # of pandas
        given = given.to_dict("records")
    elif isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise UserError(
            f"{type(given).__name__} holds no records; give a file, a list of dicts, a DataFrame or a datasets.Dataset"
        )
    elif hasattr(given, "with_format"):  # of `datasets`
        return dataset_records(given)
    return map(_plain, given)


def _plain(value: Any) -> Any:
    """As a file's record has it: floating-point numbers as the texts that Python shows."""
    if isinstance(value, Problem):
        return {**value.columns, "question": value.question, "steps": list(value.steps), "answer": value.answer}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(inner) for inner in value]
    if isinstance(value, float | np.floating | np.integer):
        return Number(value)
    if str(value) in ("<NA>", "NaT"):  # of pandas
        return str(value)
    return value


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Only "\n" ends a line: str.splitlines would also cut at separators that occur inside JSON texts.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}); check the path and its permissions") from None


def _parse_json(text: str, path: Path, line: int = 0) -> Any:
    try:
        # Numbers stay as written: a float would round 3244047.0999999996 and 2.01e-06 for good.
        return json.loads(text, parse_int=Number, parse_float=Number, parse_constant=Number)
    except (json.JSONDecodeError, RecursionError) as error:
        line = line or getattr(error, "lineno", 1)
        reason = getattr(error, "msg", "nested too deeply")
        raise UserError(
            f"{path}, line {line}: malformed JSON ({reason}); mend or remove it: a file is one list of records, or a "
            "record a line"
        ) from None

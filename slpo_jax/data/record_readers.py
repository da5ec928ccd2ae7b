"""Row readers: each turns a file, or what a caller holds, into (where, record) pairs; `where` is for messages.

Numbers keep the text that was written, which 64 bits may round: in JSON, CSV, and columns of integers and decimals.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slpo_jax.data.problem import Problem
from slpo_jax.data.record_texts import Number, constant
from slpo_jax.errors import UserError

if TYPE_CHECKING:
    import pyarrow

Rows = Iterator[tuple[str, Any]]
_FLOATING = re.compile("float|double")  # in the name of a type of arrow


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
    """Read columns that lie between tabs, semicolons or commas, by the header; a record is where it begins."""
    csv.field_size_limit(2**31 - 1)  # the library's own limit is 131,072 characters a cell
    text = _read_text(path)
    header = text.partition("\n")[0]
    delimiter = next((sign for sign in "\t;" if sign in header and "," not in header), ",")
    reader, end = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), 0
    try:
        names = next(reader, [])
        _check_names(names, str(path))
        end = reader.line_num
        for row in reader:
            where, end = f"{path}, line {end + 1}", reader.line_num
            if not row:
                continue
            if len(row) != len(names):
                remedy = f"quote texts with {delimiter!r}" if len(row) > len(names) else "add what is missing"
                raise UserError(
                    f"{where}: {len(row)} field(s) for the header's {len(names)} ({header[:80].strip()}); {remedy}"
                )
            yield where, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {end + 1}: malformed CSV ({error}); mend or remove it") from None


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
    ".ndjson": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_icot,
    ".parquet": _read_parquet,
}


def reader_of(path: Path) -> Callable[[Path], Rows] | None:
    """Return the reader of a file of this name, which may end in .gz; None for another kind."""
    return FILE_READERS.get(Path(path.name.lower().removesuffix(".gz")).suffix)


def arrow_records(table: "pyarrow.Table") -> list[dict[str, Any]]:
    """Return the rows, floating-point numbers as the shortest decimals of their type, also within lists."""
    _check_names(table.column_names)
    columns = {name: _arrow_values(table[name]) for name in table.column_names}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _arrow_values(column: Any) -> list[Any]:
    """Return the values of an array or a column of arrow."""
    values = column.to_pylist()
    return [_shortest(value, column.type) for value in values] if _FLOATING.search(str(column.type)) else values


def _shortest(value: Any, kind: Any) -> Any:
    """Convert a value of arrow: each floating-point number to its shortest decimal, and NaN to None."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_floating(kind):
        return _decimal(kind.to_pandas_dtype()(value))
    if types.is_dictionary(kind):
        return _shortest(value, kind.value_type)
    if isinstance(value, dict):
        return {field.name: _shortest(value[field.name], field.type) for field in kind}
    is_list = isinstance(value, list) and not types.is_map(kind)
    return [_shortest(item, kind.value_type) for item in value] if is_list else value


def _decimal(value: Any) -> Number | None:
    """Convert a float of Python or NumPy to its shortest decimal, NaN to None."""
    return None if value != value else Number(str(value).removesuffix(".0"))


def _check_names(names: Iterable[Any], where: str = "records") -> None:
    """Refuse a table that has two columns of a name.

    Raises:
        UserError: it has.
    """
    names = list(names)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{where}: has two columns {twice!r}; rename one")


def dataset_records(dataset: Any) -> Iterator[Any]:
    """Yield the records of a `datasets.Dataset`."""
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        yield from arrow_records(table)


class ProblemRecord(dict[str, Any]):
    """The record of a `Problem`, whose columns are beside its fields: these have been understood already."""

    columns: Mapping[str, Any]


def select_split(records: Any, role: str) -> tuple[str, Any]:
    """Return what records are called, and the records: of a `datasets.DatasetDict` the split of a role.

    Args:
        records: what a caller holds.
        role: "train", "validation" or "test".
    Raises:
        UserError: there is no such split.
    """
    if not is_dataset_dict(records):
        return "records", records
    if role not in records:
        names = list(records)
        raise UserError(f"records: have no split {role!r}, only {', '.join(names)}; give one, such as [{names[0]!r}]")
    return f"records, split {role}", records[role]


def is_dataset_dict(records: Any) -> bool:
    """Tell whether records are a `datasets.DatasetDict`, with a set by split."""
    return isinstance(records, Mapping) and bool(records) and all(hasattr(x, "with_format") for x in records.values())


def reusable(records: Any) -> Any:
    """Return records that can be gone through twice: the table of a stream of arrow, the list of an iterator."""
    is_stream = hasattr(records, "__arrow_c_stream__") and not hasattr(records, "to_arrow")
    if is_stream and not hasattr(records, "to_pylist") and not hasattr(records, "to_dict"):
        import pyarrow

        return pyarrow.table(records)
    return list(records) if isinstance(records, Iterator) else records


def given_rows(records: Any) -> Rows:
    """Yield the records of what a caller holds.

    Args:
        records: dicts or `Problem`s in a list, a Series or anything that goes through them; a table of pandas, polars
            or pyarrow, or a `datasets.Dataset`.
    Yields:
        (where, record) as the readers of files do.
    Raises:
        UserError: it is something else.
    """
    for number, record in enumerate(_records_of(records), start=1):
        yield f"record {number}", record


def _records_of(records: Any) -> Iterable[Any]:
    records = reusable(records)
    records = records.to_arrow() if hasattr(records, "to_arrow") else records  # of polars
    if hasattr(records, "to_pylist"):  # of pyarrow: a table, or an array of structs
        return arrow_records(records) if hasattr(records, "schema") else _arrow_values(records)
    if hasattr(records, "columns") and hasattr(records, "to_dict"):  # of pandas, which would widen floats
        _check_names(records.columns)
        columns = {name: _pandas_values(records[name]) for name in records.columns}
        rows = zip(*columns.values(), strict=True)
        return ({name: _plain(value) for name, value in zip(columns, row, strict=True)} for row in rows)
    if isinstance(records, Mapping | bytes) or not isinstance(records, Iterable) or getattr(records, "ndim", 1) == 0:
        raise UserError(
            f"{type(records).__name__} holds no records; give a file, a list of dicts, a DataFrame or a "
            "datasets.Dataset"
        )
    return dataset_records(records) if hasattr(records, "with_format") else map(_plain, records)


def _pandas_values(column: Any) -> Iterable[Any]:
    import pyarrow

    if hasattr(column.dtype, "pyarrow_dtype"):
        return _arrow_values(pyarrow.array(column.array))
    return column.array if column.dtype.kind == "f" else column


def _plain(value: Any) -> Any:
    """Convert a value to what a file's record has: shortest texts of numbers, lists of arrays, None for nothing."""
    if isinstance(value, str | bool | None):
        return value
    if isinstance(value, Problem):
        record = ProblemRecord(question=value.question, steps=list(value.steps), answer=value.answer)
        record.columns = value.columns
        return record
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "to_pylist"):  # of pyarrow
        return _arrow_values(value)
    if hasattr(value, "as_py"):
        return _shortest(value.as_py(), value.type)
    if isinstance(value, int):
        return Number(Decimal(value))  # the texts of ints end at some 4,300 digits
    if hasattr(value, "__array__") and not isinstance(value, np.generic):  # of NumPy, JAX, PyTorch
        try:
            array = np.asarray(value)
        except (TypeError, RuntimeError):  # of a type that NumPy has not: no text, and said so where it is used
            return value
        return [_plain(inner) for inner in array] if array.ndim else _plain(array[()])
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, float) or (isinstance(value, np.generic) and value.dtype.kind in "iuf"):
        return _decimal(value)
    return None if str(value) in ("<NA>", "NaT") else value  # of pandas


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
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix.lower() == ".gz" else data
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a readable gzip file ({error}); get or write it again") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}); check the path and its permissions") from None


def _parse_json(text: str, path: Path, line: int = 0) -> Any:
    try:
        # Numbers stay as written: a float would round 3244047.0999999996 and 2.01e-06 for good.
        return json.loads(text, parse_int=Number, parse_float=Number, parse_constant=constant)
    except (json.JSONDecodeError, RecursionError) as error:
        line = line or getattr(error, "lineno", 1)
        reason = getattr(error, "msg", "nested too deeply")
        raise UserError(
            f"{path}, line {line}: malformed JSON ({reason}); mend or remove it: a file is one list of records, or a "
            "record a line"
        ) from None

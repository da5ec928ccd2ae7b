"""Row readers: each turns a file, or what a caller holds, into (where, record) pairs; `where` is for messages.

Numbers keep the text that was written, which 64 bits may round: in JSON, CSV, and columns of integers and decimals.
"""

import csv
import datetime
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
_TABLE_METHODS = ("to_arrow", "to_pylist", "to_dict")
_TIMES = (datetime.date, datetime.time, datetime.timedelta)  # a datetime is a date
# In the names of arrow's types whose values are converted.
_CONVERTED = re.compile("float|double|date|time|duration")


def _read_json(path: Path) -> Rows:
    text = _read_text(path)
    if text.lstrip().startswith("["):
        for number, record in enumerate(_parse_json(text, path), start=1):
            yield f"{path}, record {number}", record
    else:
        for number, line in _lines(text):
            record = _parse_json(line, path, number)
            yield f"{path}, line {number}", record


def _read_icot(path: Path) -> Rows:
    for number, line in _lines(_read_text(path)):
        where = f"{path}, line {number}"
        before, hashes, answer = line.rpartition("####")
        question, bars, steps = before.partition("||")
        if not bars or not hashes:
            raise UserError(
                f"{where}: malformed; expected 'question||steps #### answer'"
            )
        record = {"question": question, "cot": steps, "answer": answer.strip()}
        yield where, record


def _read_csv(path: Path) -> Rows:
    """Read columns that lie between tabs, semicolons or commas, by the header; a record is where it begins."""
    # The library's own limit is 131,072 characters a cell.
    csv.field_size_limit(2**31 - 1)
    text = _read_text(path)
    header, _, _ = text.partition("\n")
    delimiter = ","
    if "," not in header:
        for sign in ";\t":
            if sign in header:
                delimiter = sign
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    end = 0
    try:
        names = next(reader, [])
        _check_names(names, str(path))
        end = reader.line_num
        for row in reader:
            where = f"{path}, line {end + 1}"
            end = reader.line_num
            if not row:
                continue
            if len(row) != len(names):
                remedy = "add what is missing"
                if len(row) > len(names):
                    remedy = f"quote texts with {delimiter!r}"
                shown = header[:80].strip()
                raise UserError(
                    f"{where}: {len(row)} field(s) for the header's {len(names)} ({shown}); {remedy}"
                )
            yield where, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise UserError(
            f"{path}, line {end + 1}: malformed CSV ({error}); mend or remove it"
        ) from None


def _read_parquet(path: Path) -> Rows:
    import pyarrow  # takes a while, and most files are texts
    from pyarrow import parquet

    data = _read_bytes(path)
    number = 0
    try:
        # A batch at a time: the rows of a large file as Python objects take ten times its memory.
        table = parquet.read_table(pyarrow.BufferReader(data))
        for batch in table.to_batches():
            part = pyarrow.Table.from_batches([batch])
            for record in arrow_records(part):
                number += 1
                yield f"{path}, row {number}", record
    except (OSError, ValueError) as error:
        # Arrow's own errors are among them, and those of texts that aren't UTF-8.
        reason, *_ = str(error).splitlines()
        raise UserError(
            f"{path}: not a readable parquet file ({reason}); get or write it again"
        ) from None


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
    name = path.name.lower().removesuffix(".gz")
    return FILE_READERS.get(Path(name).suffix)


def arrow_records(table: "pyarrow.Table") -> list[dict[str, Any]]:
    """Return the rows, floating-point numbers as the shortest decimals of their type, also within lists."""
    _check_names(table.column_names)
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        columns[name] = _arrow_values(table[name])
    records: list[dict[str, Any]] = []
    for row in zip(*columns.values(), strict=True):
        record = dict(zip(columns, row, strict=True))
        records.append(record)
    return records


def _arrow_values(column: Any) -> list[Any]:
    """Return the values of an array or a column of arrow."""
    values = column.to_pylist()
    kind = column.type
    if not _CONVERTED.search(str(kind)):
        return values
    return [_shortest(value, kind) for value in values]


def _shortest(value: Any, kind: Any) -> Any:
    """Convert a value of arrow: each floating-point number to its shortest decimal, NaN to None, a date to a text."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_floating(kind):
        number = kind.to_pandas_dtype()
        return _decimal(number(value))
    if types.is_dictionary(kind):
        return _shortest(value, kind.value_type)
    if isinstance(value, dict):
        inner: dict[str, Any] = {}
        for field in kind:
            inner[field.name] = _shortest(value[field.name], field.type)
        return inner
    if isinstance(value, list) and not types.is_map(kind):
        return [_shortest(item, kind.value_type) for item in value]
    if isinstance(value, _TIMES):
        return str(value)
    return value


def _decimal(value: Any) -> Number | None:
    """Convert a float of Python or NumPy to its shortest decimal, NaN to None."""
    if value != value:
        return None
    text = str(value).removesuffix(".0")
    return Number(text)


def _check_names(names: Iterable[Any], where: str = "records") -> None:
    """Refuse a table that has two columns of a name.

    Raises:
        UserError: it has.
    """
    seen: set[Any] = set()
    for name in names:
        if name in seen:
            raise UserError(f"{where}: has two columns {name!r}; rename one")
        seen.add(name)


def dataset_records(dataset: Any) -> Iterator[Any]:
    """Yield the records of a `datasets.Dataset`, with the names of classes instead of their numbers."""
    classes = {}
    for column, feature in (dataset.features or {}).items():
        if type(feature).__name__ == "ClassLabel":
            classes[column] = feature.names
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        for record in arrow_records(table):
            for column, names in classes.items():
                number = record[column]
                # Without a class it is -1, or there is none.
                if number is None or number < 0:
                    continue
                # A name may be the number itself.
                name = names[number]
                if name != str(number):
                    record[column] = name
            yield record


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
        raise UserError(
            f"records: have no split {role!r}, only {', '.join(names)}; give one, such as [{names[0]!r}]"
        )
    return f"records, split {role}", records[role]


def is_dataset_dict(records: Any) -> bool:
    """Tell whether records are a `datasets.DatasetDict`, with a set by split."""
    if not isinstance(records, Mapping) or not records:
        return False
    return all(hasattr(x, "with_format") for x in records.values())


def reusable(records: Any) -> Any:
    """Return records that can be gone through twice: the table of a stream of arrow, the list of an iterator."""
    is_table = any(hasattr(records, name) for name in _TABLE_METHODS)
    if hasattr(records, "__arrow_c_stream__") and not is_table:
        import pyarrow

        return pyarrow.table(records)
    if isinstance(records, Iterator):
        return list(records)
    return records


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
    # Tables of polars become those of arrow.
    if hasattr(records, "to_arrow"):
        records = records.to_arrow()

    # Arrow has tables, and arrays of structs.
    if hasattr(records, "to_pylist"):
        if hasattr(records, "schema"):
            return arrow_records(records)
        return _arrow_values(records)

    # Tables of pandas, which would widen floats.
    if hasattr(records, "columns") and hasattr(records, "to_dict"):
        _check_names(records.columns)
        return _pandas_records(records)

    # What else goes through records is a list of them, or a data set of `datasets`.
    is_scalar = getattr(records, "ndim", 1) == 0
    is_one = is_scalar or isinstance(records, Mapping | bytes)
    if is_one or not isinstance(records, Iterable):
        raise UserError(
            f"{type(records).__name__} holds no records; give a file, a list of dicts, a DataFrame or a "
            "datasets.Dataset"
        )
    if hasattr(records, "with_format"):
        return dataset_records(records)
    return map(_plain, records)


def _pandas_records(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of pandas."""
    columns: dict[Any, Iterable[Any]] = {}
    for name in table.columns:
        columns[name] = _pandas_values(table[name])
    for row in zip(*columns.values(), strict=True):
        values = map(_plain, row)
        yield dict(zip(columns, values, strict=True))


def _pandas_values(column: Any) -> Iterable[Any]:
    import pyarrow

    if hasattr(column.dtype, "pyarrow_dtype"):
        array = pyarrow.array(column.array)
        return _arrow_values(array)
    if column.dtype.kind == "f":
        return column.array
    return column


def _plain(value: Any) -> Any:
    """Convert a value to what a JSON file's record has: shortest texts of numbers, lists of arrays, texts of dates."""
    if isinstance(value, str | bool | None):
        return value
    if isinstance(value, Problem):
        record = ProblemRecord(
            question=value.question, steps=list(value.steps), answer=value.answer
        )
        record.columns = value.columns
        return record
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "to_pylist"):  # of pyarrow
        return _arrow_values(value)
    if hasattr(value, "as_py"):
        return _shortest(value.as_py(), value.type)
    if isinstance(value, int):
        return Number(Decimal(value))  # the texts of ints end at some 4,300 digits
    # Arrays of NumPy, JAX and PyTorch.
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        try:
            array = np.asarray(value)
        except (TypeError, RuntimeError):
            # NumPy does not have its type: it is no text, which is said where it is used.
            return value
        if array.ndim:
            return [_plain(inner) for inner in array]
        return _plain(array[()])
    if isinstance(value, np.bool_):
        return bool(value)
    is_scalar = isinstance(value, np.generic) and value.dtype.kind in "iuf"
    if isinstance(value, float) or is_scalar:
        return _decimal(value)
    if str(value) in ("<NA>", "NaT"):  # of pandas
        return None
    if isinstance(value, _TIMES):
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
        raise UserError(
            f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        if path.suffix.lower() == ".gz":
            data = gzip.decompress(data)
        return data
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: not a readable gzip file ({error}); get or write it again"
        ) from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(
            f"{path}: can't be read ({error.strerror}); check the path and its permissions"
        ) from None


def _parse_json(text: str, path: Path, line: int = 0) -> Any:
    try:
        # Numbers stay as written: a float would round 3244047.0999999996 and 2.01e-06 for good.
        return json.loads(
            text, parse_int=Number, parse_float=Number, parse_constant=constant
        )
    except (json.JSONDecodeError, RecursionError) as error:
        line = line or getattr(error, "lineno", 1)
        reason = getattr(error, "msg", "nested too deeply")
        raise UserError(
            f"{path}, line {line}: malformed JSON ({reason}); mend or remove it: a file is one list of records, or a "
            "record a line"
        ) from None

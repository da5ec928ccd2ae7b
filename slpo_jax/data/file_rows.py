"""Row readers: each turns one kind of file into (where, record) pairs, `where` being file and line for messages.

Numbers keep the text that was written: in JSON and CSV as it stands, which `datasets` rounds to 64 bits, and in columns
of integers and decimals all digits.
"""

import csv
import functools
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slpo_jax.errors import UserError

if TYPE_CHECKING:
    import pyarrow

Rows = Iterator[tuple[str, Any]]

# A question may hold bars itself; behind those that end it is the first step, or none at all.
_BARS = re.compile(r"\|\|(?=\s*(?:<<|$))")


class Rounded(str):
    """A number of a floating-point column, as the shortest decimal that the column's type reads back.

    Attributes:
        kind: the type, in arrow's word.
        digits: significant digits that the type keeps of any decimal.
        unsure: whether another decimal may have been written: it's a fraction, or has more digits than that.
    """

    kind: str
    digits: int
    unsure: bool

    def __new__(cls, value: float, kind: str) -> "Rounded":
        """As above, `kind` other than "float" and "halffloat" being 64 bits."""
        dtypes: dict[str, type[np.floating]] = {"float": np.float32, "halffloat": np.float16}
        dtype = dtypes.get(kind, np.float64)
        self = super().__new__(cls, dtype(value))
        self.kind, self.digits = kind, int(np.finfo(dtype).precision)
        self.unsure = math.isfinite(value) and (not float(value).is_integer() or abs(value) >= 10.0**self.digits)
        return self


def _read_json(path: Path) -> Rows:
    text = _read_text(path)
    first, _, rest = text.strip().partition("\n")
    if first.startswith("{") and first.rstrip().endswith("}") and rest:  # lines, as `datasets` writes them
        yield from _read_jsonl(path)
        return
    records = _parse_json(text, str(path), line=None)
    if not isinstance(records, list):
        raise UserError(f'{path}: not a list of problems; write [{{"question": ..., "answer": ...}}, ...]')
    for number, record in enumerate(records, start=1):
        yield f"{path}, record {number}", record


def _read_jsonl(path: Path) -> Rows:
    for number, line in _lines(path):
        yield f"{path}, line {number}", _parse_json(line, str(path), number)


def _read_icot(path: Path) -> Rows:
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        before, hashes, answer = line.rpartition("####")
        bars = _BARS.search(before)
        end = bars.start() if bars else before.find("||")
        if end < 0 or not hashes:
            raise UserError(f"{where}: malformed; expected 'question||steps #### answer'")
        question, steps = before[:end], before[end + 2 :]
        if not bars and "||" in steps:
            raise UserError(f"{where}: which '||' ends the question? Write <<..>> after it, or a .jsonl file")
        yield where, {"question": question, "cot": steps, "answer": answer.strip()}


def csv_rows(path: Path, delimiter: str = "") -> Rows:
    """As the readers, whatever the file's name.

    Args:
        delimiter: between columns; "" is a comma, or a semicolon or tab where the header has no comma.
    """
    text = _read_text(path)
    header = text.partition("\n")[0]
    delimiter = delimiter or next((each for each in ",;\t" if each in header), ",")
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = list(reader.fieldnames or ())
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
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


def parquet_rows(path: Path) -> Rows:
    """As the readers, whatever the file's name."""
    import pyarrow  # takes a while, and most files are texts
    from pyarrow import parquet

    data = _read_bytes(path)
    try:
        # A batch at a time: the rows of a large file as Python objects take ten times its memory.
        batches = parquet.read_table(pyarrow.BufferReader(data)).to_batches()
        records = itertools.chain.from_iterable(map(arrow_records, batches))
        for number, record in enumerate(records, start=1):
            yield f"{path}, row {number}", record
    except (OSError, ValueError) as error:  # arrow's own errors are among them, and texts that aren't UTF-8
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a readable parquet file ({reason}); get or write it again") from None


FILE_READERS: dict[str, Callable[[Path], Rows]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": csv_rows,
    ".tsv": functools.partial(csv_rows, delimiter="\t"),
    ".txt": _read_icot,
    ".parquet": parquet_rows,
}


def json_rows(path: Path) -> Rows:
    """As the readers, of a file that is a list or lines, whatever its name."""
    return _read_json(path) if _read_text(path).lstrip().startswith("[") else _read_jsonl(path)


def arrow_records(table: "pyarrow.Table | pyarrow.RecordBatch") -> list[dict[str, Any]]:
    """The rows, their floating-point numbers as `Rounded`."""
    records = table.to_pylist()
    for field in table.schema:
        if re.search("float|double", str(field.type)):
            for record in records:
                record[field.name] = _exact(record[field.name], field.type)
    return records


def _exact(value: Any, kind: Any) -> Any:
    """A value of an arrow type, as above, whatever holds the number."""
    if isinstance(value, float | np.floating):
        return Rounded(float(value), str(kind))
    if isinstance(value, dict) and hasattr(kind, "field"):
        return {name: _exact(inner, kind.field(name).type) for name, inner in value.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_exact(inner, kind.value_type) for inner in value]
    return value


def no_such_file(path: Path) -> UserError:
    """The error of a file that isn't there."""
    return UserError(f"{path}: no such file; check the path")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    # Only "\n" ends a line: str.splitlines would also cut at separators that occur inside JSON texts.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
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
        raise no_such_file(path) from None
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}); check the path and its permissions") from None


def _parse_json(text: str, path: str, line: int | None) -> Any:
    try:
        # Numbers stay as written: a float would round 3244047.0999999996 and 2.01e-06 for good.
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except (json.JSONDecodeError, RecursionError) as error:
        inner = getattr(error, "lineno", 1)
        reason = getattr(error, "msg", "nested too deeply")
        raise UserError(f"{path}, line {line or inner}: malformed JSON ({reason}); mend or remove it") from None

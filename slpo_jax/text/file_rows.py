"""Row readers: each turns one kind of file into (where, record) pairs, `where` being file and line for messages."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slpo_jax.errors import UserError

Rows = Iterator[tuple[str, Any]]


def _read_json(path: Path) -> Rows:
    records = _parse_json(_read_text(path), str(path), line=None)
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
        question, bars, solution = line.partition("||")
        steps, hashes, answer = solution.rpartition("####")
        if not bars or not hashes:
            raise UserError(f"{where}: malformed; expected 'question||steps #### answer'")
        yield where, {"question": question, "cot": steps, "answer": answer.strip()}


def _read_parquet(path: Path) -> Rows:
    import pyarrow  # takes a while, and most files are texts
    from pyarrow import parquet

    data = _read_bytes(path)
    try:
        # A batch at a time: the rows of a large file as Python objects take ten times its memory.
        batches = parquet.read_table(pyarrow.BufferReader(data)).to_batches()
        records = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, record in enumerate(records, start=1):
            yield f"{path}, row {number}", record
    except (OSError, ValueError) as error:  # arrow's own errors are among them, and texts that aren't UTF-8
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a readable parquet file ({reason}); get or write it again") from None


FILE_READERS: dict[str, Callable[[Path], Rows]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".txt": _read_icot,
    ".parquet": _read_parquet,
}


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

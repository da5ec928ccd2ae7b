"""Records written to files, from which they are read as they were given."""

import json
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from slpo_jax.data.layouts import is_known
from slpo_jax.data.problem import Problem
from slpo_jax.data.record_readers import ProblemRecord, given_rows
from slpo_jax.data.record_texts import Number
from slpo_jax.errors import UserError
from slpo_jax.io.files import write_text

_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def records_text(records: Any) -> str:
    """Write what a caller holds as JSON, a record a line.

    Args:
        records: as `given_rows` takes them.
    Raises:
        UserError: they are no records.
    """
    lines: list[str] = []
    for where, record in given_rows(records):
        if not isinstance(record, Mapping):
            raise UserError(
                f"{where}: not a record with fields; expected question, answer and optionally steps"
            )
        # A problem has been read already, so that none of its columns may be read as a part of it again.
        columns = record.columns if isinstance(record, ProblemRecord) else {}
        others = {}
        for name, value in columns.items():
            if not is_known(name):
                others[name] = value
        try:
            line = _json({**others, **record})
        except TypeError as error:
            raise UserError(f"{where}: has {error}; give a list or a text") from None
        lines.append(f"{line}\n")
    return "".join(lines)


def check_name(path: str | Path) -> None:
    """Refuse a file whose name says that it is of another kind.

    Raises:
        UserError: it doesn't end in .jsonl.
    """
    if Path(path).suffix.lower() != ".jsonl":
        raise UserError(f"{path}: is no name of a file of records; end it in .jsonl")


def write_problems(path: str | Path, problems: Iterable[Problem]) -> None:
    """Write problems to a file that `load_problems` reads the same ones from.

    Raises:
        UserError: see `check_name`.
    """
    check_name(path)
    file = Path(path).expanduser()
    text = records_text(list(problems))
    write_text(file, text)


def _json(value: Any) -> str:
    """Write a value as JSON, numbers with the digits that they have."""
    if isinstance(value, Number | Decimal):
        text = str(value)
        is_json = _JSON_NUMBER.fullmatch(text)
        return text if is_json else json.dumps(text)
    if isinstance(value, Mapping):
        fields: list[str] = []
        for name, inner in value.items():
            key = json.dumps(str(name))
            fields.append(f"{key}: {_json(inner)}")
        return "{" + ", ".join(fields) + "}"
    if isinstance(value, list | tuple):
        items = map(_json, value)
        return "[" + ", ".join(items) + "]"
    # As a text it would be read as another value.
    if isinstance(value, set | frozenset | bytes | bytearray):
        kind = type(value).__name__
        raise TypeError(f"a field of type {kind}, which JSON lacks")
    return json.dumps(value, default=str)

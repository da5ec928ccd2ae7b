"""Records as Python holds them: dicts, columns, tables of pandas, polars, arrow and numpy, and data sets."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from slpo_jax.data.dataset_rows import from_arrow
from slpo_jax.data.file_rows import Rows, arrow_records
from slpo_jax.data.problem import Problem
from slpo_jax.errors import UserError


def given_rows(given: Any) -> Rows:
    """The records of what a caller holds.

    Args:
        given: dicts or `Problem`s in a list, a Series or anything that goes through them; a table of pandas, polars or
            pyarrow, a structured array of numpy, a `datasets.Dataset`; or a dict of columns of one length.
    Yields:
        (where, record) as the readers of files do.
    Raises:
        UserError: it is something else, or holds none.
    """
    number = 0
    for number, record in enumerate(_records(given), start=1):
        yield f"record {number}", record
    if not number:
        raise UserError("is empty; give at least one record")


def _records(given: Any) -> Iterable[Any]:
    if hasattr(given, "with_format") and not isinstance(given, Mapping):  # of `datasets`
        return from_arrow(given)
    if hasattr(given, "to_pylist") and hasattr(given, "schema"):  # of pyarrow
        return arrow_records(given)
    return map(_plain, _held(given))


def _held(given: Any) -> Iterable[Any]:
    """The records as they are held, numpy's numbers and arrays in them."""
    if isinstance(given, Mapping):
        return _from_columns(given)
    if hasattr(given, "to_dicts"):  # of polars
        return given.to_dicts()
    if hasattr(given, "to_dict") and hasattr(given, "columns"):  # of pandas
        if not given.columns.is_unique:
            raise UserError(f"has two columns {given.columns[given.columns.duplicated()][0]!r}; rename one")
        return given.to_dict("records")
    if names := getattr(getattr(given, "dtype", None), "names", None):
        return (dict(zip(names, row, strict=True)) for row in given)
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise UserError(
            f"{type(given).__name__} holds no records; give a file, a list of dicts, a DataFrame or a datasets.Dataset"
        )
    return given


def _from_columns(given: Mapping[Any, Any]) -> Iterator[dict[Any, Any]]:
    columns = list(given.values())
    if any(hasattr(column, "columns") or hasattr(column, "column_names") for column in columns):
        raise UserError(f"has the splits {', '.join(map(str, given))}; give one of them")
    if not all(isinstance(column, Iterable) and not isinstance(column, str | bytes | Mapping) for column in columns):
        raise UserError("is one record; give a list of records, or a dict of columns")
    columns = [list(column) for column in columns]
    if len(set(map(len, columns))) > 1:
        sizes = ", ".join(f"{name} {len(column)}" for name, column in zip(given, columns, strict=True))
        raise UserError(f"has columns of different lengths ({sizes}); give them one length")
    return (dict(zip(given, row, strict=True)) for row in zip(*columns, strict=True))


def _plain(value: Any) -> Any:
    """As a file's record has it: floating-point numbers as the texts that Python shows, for a layout's are exact."""
    if isinstance(value, Problem):
        return dataclasses.asdict(value) | {"steps": list(value.steps)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, float | np.floating | np.integer) or str(value) in ("<NA>", "NaT"):  # of pandas
        return str(value)
    return value

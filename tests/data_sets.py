"""Writers of data sets in the forms that they are published in."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet


def write_parquet(path: Path, records: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(records), path)
    return str(path)


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    path.write_text("".join(lines))
    return str(path)


def write_set(folder: Path, splits: dict[str, list[dict[str, Any]]]) -> str:
    """A directory as a set's repository on the hub has it."""
    for split, records in splits.items():
        write_parquet(folder / "data" / f"{split}-00000-of-00001.parquet", records)
    return str(folder)


def rows(*answers: Any) -> list[dict[str, Any]]:
    """Records with these answers."""
    return [{"question": f"What is {answer}?", "answer": answer} for answer in answers]

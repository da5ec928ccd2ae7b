"""What is seen of the first problems' thoughts: `eval/ROW/SET.thoughts.json`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slpo_jax.io.files import to_json, write_text


def write_thoughts(path: Path, evaluation: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes what `evaluate.thought_rows` gave.

    Args:
        evaluation: digest of what it depends on, of the manifest beside it.
    """
    text = to_json({"evaluation": evaluation, "problems": list(rows)}, ensure_ascii=False)
    write_text(path, text + "\n")


def read_thoughts(path: Path, evaluation: str) -> list[dict[str, Any]]:
    """The rows that `write_thoughts` wrote for this very evaluation; [] where there are none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found["problems"] if found["evaluation"] == evaluation else []
    except (OSError, ValueError, TypeError, KeyError):
        return []

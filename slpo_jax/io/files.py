"""Whole files: written at once or not at all, and JSON that says what is wrong with it."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from slpo_jax.errors import UserError


def write_text(path: str | Path, text: str) -> None:
    """Writes a whole file or nothing: readers and interrupted runs never see half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object of the workdir; {} where there is no such file.

    Raises:
        UserError: the file is no JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON; delete it and run the command again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not an object; delete it and run the command again")
    return value

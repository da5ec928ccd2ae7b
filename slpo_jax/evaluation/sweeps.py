"""`thresholds.json`: what each rule that a row could have had reached on the validation split, and which was chosen."""

import json
import math
from pathlib import Path
from typing import Any

from slpo_jax.errors import UserError
from slpo_jax.evaluation.rows import Rows
from slpo_jax.io.files import read_json, write_text

Sweeps = dict[str, dict[str, Any]]
"""Row -> {rule: Acc, "chosen": the rule, "problems": how many of them}."""


def read_sweeps(path: Path) -> Sweeps:
    """The sweeps of a workdir; none where there is no file.

    Raises:
        UserError: the file is malformed.
    """
    found = read_json(path, default={})
    for row, sweep in found.items():
        numbers = sweep.values() if isinstance(sweep, dict) else ()
        known = all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
        if "chosen" not in (sweep if numbers else ()) or not known:
            raise UserError(f"{path}: '{row}' holds no choice; delete the file and run the evaluate stage again")
    return found


def write_sweep(path: Path, row: str, sweep: dict[str, Any] | None) -> None:
    """Put a row's sweep in the place of the one that stood there; None takes that away."""
    known = read_sweeps(path)
    if sweep is None and row not in known:
        return
    known = {name: each for name, each in known.items() if name != row} | ({} if sweep is None else {row: sweep})
    write_text(path, json.dumps(known, indent=1) + "\n")


def sweeps_of(path: Path, rows: Rows) -> Sweeps:
    """Those by which the rules of these rows were chosen."""
    known = read_sweeps(path)
    return {
        name: sweep
        for name, sweep in known.items()
        if name in rows and len(rows[name].rules) > 1 and sweep["chosen"] == rows[name].rule
    }

"""The settings that the evaluated checkpoints were trained with, as far as a report names them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slpo_jax.evaluation.rows import Rows
from slpo_jax.io.files import flatten


def reported_settings(runs: Sequence[Rows]) -> dict[str, dict[str, Any]]:
    """What the checkpoints of some runs' rows were trained with, as far as all runs agree.

    Args:
        runs: the rows of each run.

    Returns:
        {"": settings that all checkpoints share, STAGE: its own, in the rows' order}, each by key of the config.
    """
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for rows in runs:
        for row in rows.values():
            if row.shown:
                by_stage.setdefault(row.stage or row.name, []).append(row.shown)
    agreed = {stage: _agreed(found) for stage, found in by_stage.items()}
    shared = _agreed([*agreed.values()])
    own = {stage: {key: found[key] for key in found if key not in shared} for stage, found in agreed.items()}
    return {"": shared} | own


def differing_settings(runs: Sequence[Rows]) -> list[str]:
    """Keys in which the checkpoints of a row differ between runs, other than the seed and what follows from it."""
    keys: set[str] = set()
    for name in {name for rows in runs for name in rows}:
        found = [flatten(rows[name].settings) for rows in runs if name in rows]
        keys |= {key for one in found for key in one}.difference(_agreed(found), {"seed", "start.digest"})
    return sorted(keys)


def _agreed(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries that are the same in all."""
    if not found:
        return {}
    texts = [{key: json.dumps(value, sort_keys=True) for key, value in one.items()} for one in found]
    return {key: value for key, value in found[0].items() if all(one.get(key) == texts[0][key] for one in texts)}

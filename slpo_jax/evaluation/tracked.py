"""What the trackers get of an evaluation: figures of the report, and some completions as they were written."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slpo_jax.io.workdir import Workdir

_COMPLETIONS = 8  # of each set


def tracked_figures(
    evaluated: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, float]:
    """Return Acc and Pass@k, shares of 1, by SET/ROW/FIGURE, from the report's figures by row and set."""
    figures: dict[str, float] = {}
    for row, sets in evaluated.items():
        for name, found in sets.items():
            for key, figure in found.items():
                if re.fullmatch(r"acc|pass@\d+", key):
                    tag = f"{name}/{row}/{key}"
                    figures[tag] = float(figure)
    return figures


def tracked_completions(
    workdir: Workdir, names: Sequence[str], row: str
) -> list[dict[str, str]]:
    """Return a row's first answers without noise to the problems of these sets, as texts by column."""
    completions = []
    for name in names:
        with workdir.set_files(name, row).records.open(encoding="utf-8") as lines:
            for line in itertools.islice(lines, _COMPLETIONS):
                record = json.loads(line)
                completion = {"set": name, "row": row}
                for column in ("question", "completion", "reference", "correct"):
                    completion[column] = str(record[column])
                completions.append(completion)
    return completions

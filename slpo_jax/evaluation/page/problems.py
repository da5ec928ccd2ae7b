"""The problems that the page can be asked about: per row its rollouts' answers, and what is seen of some thoughts."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slpo_jax.evaluation.records import EvalRecords, Evals
from slpo_jax.io import artifact
from slpo_jax.io.files import digest
from slpo_jax.io.workdir import Workdir

WRONG, RIGHT, CUT = range(3)
"""What an answer was; one that was cut has no end and is wrong."""

Thoughts = dict[tuple[str, str], list[dict[str, Any]]]
"""(row, set) -> what was seen of the first problems' thoughts."""


def thoughts_of(workdir: str | Path, evals: Evals) -> Thoughts:
    """What was seen of thoughts of these very evaluations."""
    found: Thoughts = {}
    for row, sets in evals.items():
        for name in sets:
            files = Workdir(Path(workdir)).set_files(name, row)
            manifest = artifact.read(files.manifest)
            if manifest is not None:
                found[row, name] = artifact.value_of(files.thoughts, digest(manifest.facts)) or []
    return found


def browsed(evals: Evals, thoughts: Thoughts, room: int) -> dict[str, dict[str, Any]]:
    """As many of each set's first problems as there is room for.

    Args:
        evals: row -> set -> records.
        thoughts: see `thoughts_of`.
        room: bytes that the problems may take as JSON.

    Returns:
        {set: {"total": problems of the set, "problems": [[question, reference, outcomes, cells, thoughts], ..]}}, where
        outcomes are [answer, WRONG | RIGHT | CUT], and cells {row: [outcome of the greedy rollout, its latents, and of
        the rollouts with noise: outcome, count, outcome, count, ..]}. Rows on other problems are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for sets in evals.values() for name in sets):
        records = {row: sets[name] for row, sets in evals.items() if name in sets}
        last = [*records.values()][-1]
        records = {row: own for row, own in records.items() if own.same_problems(last)}
        seen = {row: thoughts.get((row, name), []) for row in records}
        found[name] = {"total": len(last.references), "problems": _problems(records, seen)}
    longest = max((len(each["problems"]) for each in found.values()), default=0)
    for index in range(longest):
        for each in found.values():
            room -= len(json.dumps(each["problems"][index : index + 1], ensure_ascii=False).encode())
        if room < 0:
            return {name: {**each, "problems": each["problems"][:index]} for name, each in found.items()}
    return found


def _problems(records: Mapping[str, EvalRecords], seen: Mapping[str, list[dict[str, Any]]]) -> list[list[Any]]:
    first = next(iter(records.values()))
    drawn = {row: _drawn(own) for row, own in records.items()}
    out = []
    for index, reference in enumerate(first.references):
        place: dict[tuple[str | None, int], int] = {}  # of an outcome
        cells = {}
        for row, own in records.items():
            greedy = own.answers[index], _state(own.correct[index], own.cut[index])
            cells[row] = [place.setdefault(greedy, len(place)), int(own.latent_steps[index])]
            for outcome, count in Counter(drawn[row][index]).items():
                cells[row] += [place.setdefault(outcome, len(place)), count]
        thoughts = {row: own[index] for row, own in seen.items() if index < len(own)}
        out.append([first.questions[index], reference, list(map(list, place)), cells, thoughts])
    return out


def _drawn(records: EvalRecords) -> list[list[tuple[str | None, int]]]:
    """By problem, the outcomes of its rollouts with noise."""
    by_problem = [
        np.swapaxes(values_SNM, 0, 1).reshape(len(records.references), -1).tolist()
        for values_SNM in (records.sample_answers, records.sample_correct, records.sample_cut)
    ]
    return [
        [(answer, _state(right, cut)) for answer, right, cut in zip(*of_one, strict=True)]
        for of_one in zip(*by_problem, strict=True)
    ]


def _state(right: bool, cut: bool) -> int:
    return RIGHT if right else CUT if cut else WRONG

"""What one evaluation leaves behind: a JSON line a problem, and the same as arrays.

A workdir holds `eval/ROW/NAME.jsonl`: ROW is a row of the report, NAME the data set.
Arrays are named by axes S (dropout seeds), N (problems), M (samples a seed).
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.evaluation.rows import Rows
from slpo_jax.io import artifact
from slpo_jax.io.files import to_json, write_text
from slpo_jax.io.workdir import Workdir


@dataclass(frozen=True)
class EvalRecords:
    """One data set evaluated with one checkpoint row.

    Attributes:
        index: [N] int, the problem's place in its data set.
        references: N reference answers.
        answers: N of the clean greedy rollout, as the run reads answers: canonical decimals or LaTeX; None for none.
        correct: [N] bool, the clean greedy rollout was right.
        latent_steps: [N] int, latents of the clean greedy rollout.
        problem_steps: [N] float, written steps of the problem, NaN where there are none.
        answer_tokens: [N] int, tokens of the clean greedy rollout's completion: those after its latents, and before
            them those that a thought is written down as.
        cut: [N] bool, the clean greedy rollout had no end within its budget.
        seeds: [S] int, dropout seeds in the order they were drawn.
        sample_correct: [S, N, M] bool.
        sample_latent_steps: [S, N, M] int.
        sample_answers: [S, N, M] object, as `answers`, equal ones of a problem in one form (`answers.in_one_form`).
        sample_cut: [S, N, M] bool.
        sample_scores: [S, N, M] float by scorer.
        searched_correct: [N, S] bool, of the thoughts that were searched for; S is 0 without a search.
        questions: N.
    """

    index: np.ndarray
    references: tuple[str, ...]
    answers: tuple[str | None, ...]
    correct: np.ndarray
    latent_steps: np.ndarray
    problem_steps: np.ndarray
    answer_tokens: np.ndarray
    cut: np.ndarray
    seeds: np.ndarray
    sample_correct: np.ndarray
    sample_latent_steps: np.ndarray
    sample_answers: np.ndarray
    sample_cut: np.ndarray
    sample_scores: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    questions: tuple[str, ...] = ()
    searched_correct: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), bool))

    def same_problems(self, other: "EvalRecords") -> bool:
        """Whether both hold the same problems in the same order, so that they can be paired."""
        texts, others = ((each.questions, each.references) for each in (self, other))
        return np.array_equal(self.index, other.index) and texts == others


Evals = dict[str, dict[str, EvalRecords]]
"""row -> data set -> records, as `read_evals` returns them."""


def write_records(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON line a problem, atomically (temporary file, then rename).

    Args:
        path: `WORKDIR/eval/ROW/NAME.jsonl`; its folder is made.
        rows: objects with the keys that `read_records` reads; others are kept as they are.
    """
    write_text(path, "".join(to_json(row, ensure_ascii=False) + "\n" for row in rows))


def read_records(path: str | Path) -> EvalRecords:
    """Reads what `write_records` wrote.

    It is whole, as its manifest says.
    """
    return arrays_of([json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line])


def arrays_of(rows: Sequence[Mapping[str, Any]]) -> EvalRecords:
    """The arrays of records, at least one, as `evaluate.record_rows` makes them: samples of one seed stand together.

    All have the same seeds and the same number of samples a seed; none at all is fine: S = M = 0.
    """
    seeds = list(dict.fromkeys(sample["seed"] for sample in rows[0]["samples"]))
    scorers = rows[0]["samples"][0].get("scores", {}) if rows[0]["samples"] else {}

    def samples(values: Iterable[Iterable[Any]], dtype: Any) -> np.ndarray:
        out = np.array([list(each) for each in values], dtype=dtype)
        return np.swapaxes(out.reshape(len(rows), len(seeds), -1 if seeds else 0), 0, 1)

    def sampled(key: str, dtype: Any) -> np.ndarray:
        return samples(([sample[key] for sample in row["samples"]] for row in rows), dtype)

    def column(key: str, dtype: Any) -> np.ndarray:
        return np.array([row.get(key) for row in rows], dtype=dtype)

    return EvalRecords(
        index=column("index", np.int64),
        references=tuple(str(row["reference"]) for row in rows),
        answers=tuple(row.get("answer") for row in rows),
        correct=column("correct", bool),
        latent_steps=column("latent_steps", np.int64),
        problem_steps=column("problem_steps", np.float64),  # None becomes NaN
        answer_tokens=np.array([len(row["completion_tokens"]) for row in rows], np.int64),
        cut=column("cut", bool),
        seeds=np.array(seeds, dtype=np.int64),
        sample_correct=sampled("correct", bool),
        sample_latent_steps=sampled("latent_steps", np.int64),
        sample_answers=samples(
            ([each.get("vote") or each["answer"] for each in row["samples"]] for row in rows), object
        ),
        sample_cut=sampled("cut", bool),
        sample_scores={
            name: samples(([each["scores"][name] for each in row["samples"]] for row in rows), np.float64)
            for name in scorers
        },
        questions=tuple(str(row.get("question", "")) for row in rows),
        searched_correct=np.array([[each["correct"] for each in row.get("searched", ())] for row in rows], bool),
    )


def read_evals(workdir: str | Path, rows: Rows) -> tuple[Evals, list[str]]:
    """Reads the records of a workdir's rows.

    Args:
        workdir: of the run.
        rows: what `read_rows` found there.

    Returns:
        row -> set -> records, rows in the report's order, sets by name; and notes on what was left out: records that
        are not to the byte what their manifest says, or were made by another checkpoint, under other settings, or from
        other problems than the newest of their set.

    Raises:
        UserError: there are no records, or a file is malformed.
    """
    folder = Workdir(Path(workdir))
    if not rows:
        raise UserError(f"{folder.eval}: no ROW/NAME.jsonl files; run the evaluate stage first")
    sets: dict[str, list[str]] = {row: [] for row in rows}
    left_out = _left_out(folder, rows)
    for row, name in folder.evaluated():
        if (row, name) not in left_out:
            sets[row].append(name)
    notes = [f"{row} on {name}: left out, {why}; evaluate it again." for (row, name), why in left_out.items()]
    lacking = {
        name: manifest.facts["left_out"] for row, names in sets.items() for name in names
        if (manifest := artifact.read(folder.set_files(name, row).manifest))
    }  # fmt: skip
    notes += [
        f"{name}: {count:,} problem(s) of its source are left out, as their answers can't be compared."
        for name, count in sorted(lacking.items()) if count
    ]  # fmt: skip
    found = {row: {name: read_records(folder.set_files(name, row).records) for name in sets[row]} for row in rows}
    return {row: records for row, records in found.items() if records}, notes


def _left_out(folder: Workdir, rows: Rows) -> dict[tuple[str, str], str]:
    """(row, set) -> why its records are not the row's."""
    why, data = dict[tuple[str, str], str](), dict[str, list[tuple[float, str, str]]]()
    for row, name in folder.evaluated():
        files, facts = folder.set_files(name, row), rows[row]
        manifest = artifact.read(files.manifest)
        if manifest is None:
            why[row, name] = "its evaluation was not finished"
        elif (manifest.facts["checkpoint"], manifest.facts["settings"]) != (facts.checkpoint, facts.evaluation):
            why[row, name] = "it is of another checkpoint or setting"
        elif artifact.changed(files.folder, manifest.files):
            why[row, name] = "its records were changed or are gone"
        else:
            data.setdefault(name, []).append((files.manifest.stat().st_mtime, row, manifest.facts["data"]))
    for name, found in data.items():
        newest = max(found)[2]
        why |= {(row, name): "it is of other problems" for _, row, digest in found if digest != newest}
    return why


def read_metrics(path: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Reads `metrics.jsonl`, in order of step, and notes on what is wrong with it.

    Several rows of one (stage, step) are one, in which the last value of a scalar counts. A line torn by an
    interruption is left out and noted.
    """
    path = Path(path)
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    torn = 0
    for line in path.read_text("utf-8", "replace").split("\n") if path.exists() else ():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.setdefault((str(row["stage"]), int(row["step"])), {}).update(row)
        except (ValueError, TypeError, KeyError):
            torn += 1
    what = "left out of the figures" if rows else "and no other, so the report has nothing of the training"
    notes = [f"{path.name}: {torn} unreadable line(s) {what}."] if torn else []
    return sorted(rows.values(), key=lambda row: row["step"]), notes

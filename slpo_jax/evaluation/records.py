"""Records of an evaluation: a JSON line a problem, and the same as arrays.

A workdir holds `eval/ROW/NAME.jsonl`: ROW is a row of the report, NAME the data set.
Arrays are named by axes S (dropout seeds), N (problems), M (samples a seed).
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.evaluation.report_rows import Rows
from slpo_jax.io import artifact
from slpo_jax.io.files import entries, to_json, write_text
from slpo_jax.io.workdir import Workdir
from slpo_jax.runtime import hosts


@dataclass(frozen=True)
class EvalRecords:
    """A data set evaluated with one checkpoint row.

    Attributes:
        references: N reference answers.
        answers: N of the clean greedy rollout, as the run reads answers: canonical decimals or LaTeX; None for none.
        correct: [N] bool, the clean greedy rollout was right.
        latent_steps: [N] int, latents of the clean greedy rollout.
        problem_steps: [N] float, written steps of the problem, NaN where there are none.
        answer_tokens: [N] int, tokens of the clean greedy rollout's completion: those after its latents, and before
            them those that a thought is written down as.
        sequential_steps: [N] int, passes of the model that one after the other made the clean greedy rollout: its
            latents and the tokens of its completion, where a latent that is written down as a token counts once.
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

    references: tuple[str, ...]
    answers: tuple[str | None, ...]
    correct: np.ndarray
    latent_steps: np.ndarray
    problem_steps: np.ndarray
    answer_tokens: np.ndarray
    sequential_steps: np.ndarray
    cut: np.ndarray
    seeds: np.ndarray
    sample_correct: np.ndarray
    sample_latent_steps: np.ndarray
    sample_answers: np.ndarray
    sample_cut: np.ndarray
    sample_scores: dict[str, np.ndarray]
    searched_correct: np.ndarray
    questions: tuple[str, ...]

    def same_problems(self, other: "EvalRecords") -> bool:
        """Return whether both hold the same problems in the same order, so that they can be paired."""
        if self.questions != other.questions:
            return False
        return self.references == other.references


Record = Mapping[str, Any]
"""A problem's line of a records file, see `completions.record_rows`."""
Evals = dict[str, dict[str, EvalRecords]]
"""row -> data set -> records, as `read_evals` returns them."""
Pair = tuple[str, str]  # of a row and a data set


def write_records(path: str | Path, rows: Iterable[Record]) -> None:
    """Write one JSON line a problem, atomically (temporary file, then rename).

    Args:
        path: `WORKDIR/eval/ROW/NAME.jsonl`; its folder is made.
        rows: objects with the keys that `read_records` reads; others are kept as they are.
    """
    lines: list[str] = []
    for row in rows:
        line = to_json(row, ensure_ascii=False)
        lines.append(f"{line}\n")
    write_text(path, "".join(lines))


def read_records(path: str | Path) -> EvalRecords:
    """Read what `write_records` wrote.

    It is whole, as its manifest says.
    """
    text = Path(path).read_text(encoding="utf-8")
    lines = text.rstrip("\n").split("\n")
    rows = [json.loads(line) for line in lines]
    return arrays_of(rows)


def arrays_of(rows: Sequence[Record]) -> EvalRecords:
    """Turn records, at least one, into arrays, see `completions.record_rows`: samples of one seed stand together.

    All have the same seeds and the same number of samples a seed; none at all is fine: S = M = 0.
    """

    # The fields of the greedy rollouts.
    def column(key: str, dtype: Any) -> np.ndarray:
        values = [row[key] for row in rows]
        return np.array(values, dtype=dtype)

    token_counts = []
    written_counts = []
    searches = []
    for row in rows:
        tokens = row["completion_tokens"]
        token_counts.append(len(tokens))
        written_counts.append(row.get("written_steps", 0))
        searched = row.get("searched", ())
        hits = [search["correct"] for search in searched]
        searches.append(hits)
    latent_steps = column("latent_steps", np.int64)
    written_steps = np.array(written_counts, np.int64)
    answer_tokens = np.array(token_counts, np.int64)
    # A latent that is written down as a token counts once.
    unwritten_steps = latent_steps - written_steps
    sequential_steps = unwritten_steps + answer_tokens

    # The fields of the samples.
    seeds: dict[int, None] = {}
    scorers: Iterable[str] = ()
    for sample in rows[0]["samples"]:
        seeds[sample["seed"]] = None
        scorers = sample.get("scores", ())
    samples: list[Record] = []
    for row in rows:
        samples.extend(row["samples"])

    def by_seed(values: list[Any], dtype: Any) -> np.ndarray:
        # numpy finds out how many samples a seed has; without seeds it can't.
        per_seed = -1 if seeds else 0
        shape = (len(rows), len(seeds), per_seed)
        flat = np.array(values, dtype=dtype)
        values_NSM = flat.reshape(shape)
        return np.swapaxes(values_NSM, 0, 1)

    def sampled(key: str, dtype: Any) -> np.ndarray:
        values = [sample[key] for sample in samples]
        return by_seed(values, dtype)

    # A sample has a vote where its answer is another's in other words.
    votes = []
    for sample in samples:
        vote = sample.get("vote") or sample["answer"]
        votes.append(vote)
    sample_scores: dict[str, np.ndarray] = {}
    for name in scorers:
        scores = [sample["scores"][name] for sample in samples]
        sample_scores[name] = by_seed(scores, np.float64)
    return EvalRecords(
        references=tuple(column("reference", object)),
        answers=tuple(column("answer", object)),
        correct=column("correct", bool),
        latent_steps=latent_steps,
        problem_steps=column("problem_steps", np.float64),  # None becomes NaN
        answer_tokens=answer_tokens,
        sequential_steps=sequential_steps,
        cut=column("cut", bool),
        seeds=np.array(list(seeds), np.int64),
        sample_correct=sampled("correct", bool),
        sample_latent_steps=sampled("latent_steps", np.int64),
        sample_answers=by_seed(votes, object),
        sample_cut=sampled("cut", bool),
        sample_scores=sample_scores,
        questions=tuple(column("question", object)),
        searched_correct=np.array(searches, bool),
    )


def read_evals(workdir: str | Path, rows: Rows) -> tuple[Evals, list[str]]:
    """Read the records of a workdir's rows.

    Args:
        workdir: of the run.
        rows: what `read_rows` found there.

    Returns:
        row -> set -> records, rows in the report's order, sets by name; and notes on what was left out: records that
        are not to the byte what their manifest says, or were made by another checkpoint, under other settings, or from
        other problems than the newest of their set.

    Raises:
        UserError: there are no records.
    """
    folder = Workdir(Path(workdir))
    if not rows:
        raise UserError(
            f"{folder.eval}: no ROW/NAME.jsonl files; run the evaluate stage first"
        )
    # Sort out what is not whole, or was made by something else.
    left_out: dict[Pair, str] = {}
    whole: dict[Pair, Mapping[str, Any]] = {}  # facts of their manifests
    newest: dict[str, tuple[float, str]] = {}  # set -> time and digest of its problems
    for row, name in folder.list_evaluated():
        files = folder.set_files(name, row)
        manifest = artifact.read(files.manifest)
        if manifest is None:
            left_out[row, name] = "its evaluation was not finished"
            continue
        facts = manifest.facts
        entry = rows[row]
        is_checkpoint = facts["checkpoint"] == entry.checkpoint
        if not is_checkpoint or facts["settings"] != entry.evaluation:
            left_out[row, name] = "it is of another checkpoint or setting"
        elif artifact.find_changed(files.folder, manifest.files):
            left_out[row, name] = "its records were changed or are gone"
        else:
            whole[row, name] = facts
            seconds = files.manifest.stat().st_mtime
            stamp = (seconds, facts["data"])
            if name not in newest or stamp > newest[name]:
                newest[name] = stamp

    # Those that are whole, of the newest problems of their set.
    evals: Evals = {row: {} for row in rows}
    without_answers: dict[str, int] = {}
    for (row, name), facts in whole.items():
        _, data = newest[name]
        if facts["data"] != data:
            left_out[row, name] = "it is of other problems"
            continue
        files = folder.set_files(name, row)
        evals[row][name] = read_records(files.records)
        without_answers[name] = facts["left_out"]

    notes: list[str] = []
    for (row, name), why in left_out.items():
        notes.append(f"{row} on {name}: left out, {why}; evaluate it again.")
    for name, count in sorted(without_answers.items()):
        if count:
            notes.append(
                f"{name}: {count:,} problem(s) of its source are left out, as their answers can't be compared."
            )

    # Rows that have any.
    found: Evals = {}
    for row, sets in evals.items():
        if sets:
            found[row] = sets
    return found, notes


PLACES = "rows"
Batch = dict[str, np.ndarray]
"""Finished rollouts: `Completions` of N, and under "rows", int [N], their places in the evaluation."""


@dataclasses.dataclass(frozen=True)
class RolloutCache:
    """The finished batches of one pass over a problem set, `FOLDER/PASS.NUMBER.npz`: none is rolled out twice.

    Attributes:
        folder: of everything that the evaluation has not finished yet.
        evaluation: digest of all that the rollouts depend on; batches of another one are not there.
        name: of the pass: greedy, or a seed's.
    """

    folder: Path
    evaluation: str
    name: str = "rollouts"

    def for_pass(self, name: str) -> "RolloutCache":
        """Return the cache of the same evaluation's other pass."""
        return dataclasses.replace(self, name=name)

    def batches(self) -> list[Batch]:
        """Read the batches that are whole."""
        batches: list[Batch] = []
        pattern = f"{self.name}.*.npz"
        facts = [self.evaluation, self.name]
        for path in entries(self.folder):
            if not path.match(pattern):
                continue
            arrays = artifact.read_arrays(path, facts)
            if arrays is not None:
                batches.append(arrays)
        return batches

    def add(self, number: int, batch: Batch) -> None:
        """Write a batch whole or not at all; of several processes the first does so.

        Args:
            number: of the batch; what had it before is replaced.
        """
        file_name = f"{self.name}.{number}.npz"
        facts = [self.evaluation, self.name]
        artifact.write_arrays(self.folder / file_name, facts, batch)

    def clear(self) -> None:
        """Remove the folder: its evaluation is written down elsewhere."""
        if hosts.is_first():
            shutil.rmtree(self.folder, ignore_errors=True)


def in_order(batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Join batches of rollouts, rows by their `PLACES`, each once."""
    # Where the first rollout of each place is.
    places = np.concatenate([batch[PLACES] for batch in batches])
    _, order = np.unique(places, return_index=True)

    arrays: dict[str, np.ndarray] = {}
    for name in batches[0]:
        if name != PLACES:
            parts = [batch[name] for batch in batches]
            values = np.concatenate(parts)
            arrays[name] = values[order]
    return arrays

"""Small made-up files of an evaluation, for the tests of what reads them."""

import dataclasses

import numpy as np

from slpo_jax.evaluation import records
from slpo_jax.evaluation.report_rows import (
    BEST_FIXED,
    Row,
    read_row,
    read_rows,
    write_row,
)
from slpo_jax.io import artifact
from slpo_jax.io.workdir import Workdir

ROWS = {
    row.name: row
    for row in (
        Row("imitate", "SFT", 0, fixed=True, stage="imitate"),
        Row("imitate_fixed_tmax", "SFT, T_max latents", 1, fixed=True, stage="imitate"),
        Row("imitate_control", "SFT, as many steps more", 2, baselines=("imitate",), stage="imitate_control"),
        Row("cold_start", "cold gate", 3, gated=True, baselines=(BEST_FIXED,), stage="cold_start"),
        Row(
            "slpo", "SLPO", 10, gated=True, baselines=("cold_start", "imitate_control", BEST_FIXED), stage="slpo"
        ),
    )
}  # fmt: skip
"""Rows as a run has them."""


def problem(
    index, right, sample_right=(), latent_steps=3, problem_steps=2, reference="7"
):
    """A row of eval/ROW/NAME.jsonl; sample_right: a list of hits for each seed. What is wrong was cut."""
    samples = [
        {
            "seed": 10 + s,
            "completion": "",
            "answer": "7" if hit else None,
            "latent_steps": latent_steps,
            "cut": not hit,
            "correct": bool(hit),
        }
        for s, hits in enumerate(sample_right)
        for hit in hits
    ]
    return {
        "index": index,
        "question": "q",
        "reference": reference,
        "completion": "### 7",
        "completion_tokens": [5, 6, 7],
        "latent_steps": latent_steps,
        "cut": not right,
        "correct": bool(right),
        "answer": "7" if right else None,
        "problem_steps": problem_steps,
        "samples": samples,
    }


def write_eval(workdir, row, name, right, hits=None, lengths=None, steps=None, **facts):
    """N problems: right [N] of the clean rollout, hits [S, N, M] of the samples; facts: what else the row says."""
    n = len(right)
    hits = np.zeros((0, n, 0)) if hits is None else np.asarray(hits)
    lengths = [3] * n if lengths is None else lengths
    steps = [2] * n if steps is None else steps
    rows = [
        problem(i, right[i], hits[:, i], int(lengths[i]), steps[i]) for i in range(n)
    ]
    write_row(workdir, dataclasses.replace(ROWS.get(row) or Row(row, row, 20), **facts))
    write_lines(workdir, row, name, rows)


def write_lines(workdir, row, name, lines, **facts):
    """A set's records with their manifest, which says that they are of what the row is of; facts: what else it says."""
    files = Workdir(workdir).set_files(name, row)
    of = read_row(workdir, row)
    records.write_records(files.records, lines)
    known = {
        "checkpoint": of.checkpoint,
        "settings": of.evaluation,
        "data": "",
        "left_out": 0,
    }
    artifact.write(files.manifest, known | facts, files=[files.records])


def evals_of(workdir):
    """The records of a workdir, as a report reads them."""
    evals, _ = records.read_evals(workdir, read_rows(workdir))
    return evals

"""Small made-up files of an evaluation, for the tests of what reads them."""

import numpy as np

from slpo_jax.evaluation import records


def problem(index, right, sample_right=(), latent_steps=3, problem_steps=2, reference="7"):
    """A row of eval/ROW/NAME.jsonl; sample_right: a list of hits for each seed."""
    samples = [
        {
            "seed": 10 + s,
            "completion": "",
            "answer": "7" if hit else None,
            "latent_steps": latent_steps,
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
        "completion_tokens": 3,
        "latent_steps": latent_steps,
        "correct": bool(right),
        "answer": "7" if right else None,
        "problem_steps": problem_steps,
        "samples": samples,
    }


def write_eval(workdir, row, name, right, hits=None, lengths=None, steps=None):
    """N problems: right [N] of the clean rollout, hits [S, N, M] of the samples."""
    n = len(right)
    hits = np.zeros((0, n, 0)) if hits is None else np.asarray(hits)
    lengths = [3] * n if lengths is None else lengths
    steps = [2] * n if steps is None else steps
    rows = [problem(i, right[i], hits[:, i], int(lengths[i]), steps[i]) for i in range(n)]
    records.write_records(workdir / "eval" / row / f"{name}.jsonl", rows)

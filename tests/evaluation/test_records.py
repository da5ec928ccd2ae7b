"""What an evaluation leaves behind, written and read back, whole or malformed."""

import numpy as np
import pytest
from eval_files import problem, write_eval

from slpo_jax.evaluation import records


def test_records_round_trip(tmp_path):
    path = tmp_path / "eval" / "slpo" / "alpha.jsonl"
    hits = [[[1, 0, 1], [0, 0, 0]], [[0, 1, 1], [1, 1, 1]]]
    write_eval(tmp_path, "slpo", "alpha", [1, 0], hits, [2, 5], [3, None])
    got = records.read_records(path)
    assert got.sample_correct.astype(int).tolist() == hits
    assert got.sample_answers[0, 0].tolist() == ["7", None, "7"]
    assert got.seeds.tolist() == [10, 11]
    assert got.latent_steps.tolist() == [2, 5]
    assert got.sample_latent_steps[:, :, 0].tolist() == [[2, 5], [2, 5]]
    assert got.answers == ("7", None)
    assert got.problem_steps[0] == 3
    assert np.isnan(got.problem_steps[1])


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "x.jsonl"
    records.write_records(path, [problem(0, 1)])
    before = path.read_bytes()
    with pytest.raises(TypeError, match="JSON"):
        records.write_records(path, [problem(0, 1), {"index": object()}])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_of_a_resumed_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 2, "stage": "slpo", "reward": 0.1}\n{"step": 3, "stage": "slpo", "rew\n'
        '{"step": 1, "stage": "slpo", "reward": 0.3}\n{"step": 2, "stage": "slpo", "reward": 0.2}\n'
    )
    rows, notes = records.read_metrics(path)
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.3), (2, 0.2)]  # the last of a step counts
    assert "1 unreadable line(s)" in notes[0]
    assert records.read_metrics(tmp_path / "none.jsonl") == ([], [])

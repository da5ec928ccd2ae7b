"""The geometry of thoughts by hand, and the command on a real run."""

import json

import numpy as np
import pytest
from small_run import finished_run

from benchmarks import geometry


def test_distance_by_hand():
    """Steps at right angles, then the same direction, then the opposite one: 1, 0 and 2."""
    steps = np.array([[[1.0, 0], [0, 3], [0, 2], [0, -5]], [[1, 1], [2, 2], [3, 3], [1, 1]]])
    np.testing.assert_allclose(geometry.inter_step_distance(steps), [1, 0], atol=1e-12)


def test_ranks_are_the_covariance_s():
    """Its trace over its largest eigenvalue, of each prefix; on a line it is 1."""
    steps = np.random.default_rng(0).normal(size=(3, 5, 7))
    steps[2] = np.outer([0, 1, 2, 5, -3], np.arange(7)) + 4
    found = geometry.prefix_ranks(steps)
    assert found.shape == (3, 4)
    for problem, ranks in zip(steps, found, strict=True):
        for count, rank in enumerate(ranks, start=2):
            covariance = np.cov(problem[:count], rowvar=False)
            assert rank == pytest.approx(np.trace(covariance) / np.linalg.eigvalsh(covariance)[-1])
    np.testing.assert_allclose(found[2], 1)
    assert found[0, -1] > 1.5


def test_relative_change_and_how_sure_it_is():
    """Against the ratio's spread over samples drawn anew."""
    draws = np.random.default_rng(1)

    def pair():
        before = draws.normal(2, 0.5, 400)
        return before, 1.1 * before + draws.normal(0, 0.3, 400)

    change, error = geometry.relative_change(*pair())
    spread = np.std([geometry.relative_change(*pair())[0] for _ in range(400)])
    assert change == pytest.approx(10, abs=4 * error)
    assert error == pytest.approx(spread, rel=0.15)


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    folder = finished_run()
    monkeypatch.chdir(folder)
    checkpoints = [str(folder / "work" / "checkpoints" / stage) for stage in ("cold_start", "slpo")]
    flags = ["--config", str(folder / "small.py"), "--sets", "made", "--problems", "5", "--samples", "3"]
    monkeypatch.setattr(geometry, "set_up", lambda devices: None)
    geometry.main([*checkpoints, *flags, "--json", str(tmp_path / "all.json"), "--figure", str(tmp_path / "ranks.png")])
    before, after = json.loads((tmp_path / "all.json").read_text())["tables"]["made"]
    assert (before["distance_change"], before["rank_change"]) == ([0, 0], [0, 0])
    assert after["distance_change"][0] == pytest.approx(100 * (after["distance"] / before["distance"] - 1))
    assert after["distance_change"][0] != 0
    assert 1 <= after["ranks"][0] <= after["ranks"][1] <= 2  # three latents span two directions
    assert "| work, slpo | " in capsys.readouterr().out
    assert (tmp_path / "ranks.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "CHECKPOINT"),
        (["nowhere", "."], "nowhere: no such checkpoint"),
        (["."], "one before and at least one after"),
        ([".", ".", "--problems", "1"], "--problems: 1 is too few"),
        ([".", ".", "--sets", "luck"], "--sets: luck is none of the config's: large, same, template"),
        ([".", ".", "--figure", "x.pdf"], "--figure: x.pdf"),
    ],
)
def test_bad_flags_are_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as stop:
        geometry.main(["--config", "configs/twelve.py", *flags])
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert said in error

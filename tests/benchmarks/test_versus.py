"""What the comparison of two checkouts says of numbers that are known."""

import math
import subprocess

import numpy as np
import pytest
from scipy import stats

from benchmarks import versus
from benchmarks.measure.report import summary
from slpo_jax.errors import UserError


def test_over_pairs_is_t_s_interval_of_the_logarithms():
    ratios = [0.9, 1.2, 1.1, 1.0]
    found = versus.over_pairs(ratios)
    t = stats.ttest_1samp(np.log(ratios), 0).confidence_interval(0.95)
    assert found == pytest.approx(
        {"mean": stats.gmean(ratios), "low": math.exp(t.low), "high": math.exp(t.high)}
    )
    assert math.isnan(versus.over_pairs([1.5])["low"])


def test_a_row_has_the_ratio_of_each_pair():
    pairs = [
        {
            "step": {
                "other": summary([2.0]),
                "this": summary([2.0 * ratio]),
                "ratio": ratio,
            }
        }
        for ratio in (1.5, 1.0)
    ]
    text = versus.markdown({"machine": {}, "work": {}, "pairs": pairs})
    (row,) = [
        line.split(" | ") for line in text.splitlines() if line.startswith("| step")
    ]
    assert (row[3], row[4]) == ("1.50, 1.00", f"{1.5**0.5:.3f}")


@pytest.mark.nightly
def test_another_checkout_that_can_t_is_named(tmp_path, monkeypatch, capsys):
    """By what it said last, and without leaving a process behind."""
    (tmp_path / "benchmarks").mkdir()
    with pytest.raises(SystemExit) as status:
        versus.main([str(tmp_path), "--shapes", "graph", "--pairs", "1"])
    assert status.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {tmp_path}: its benchmark ended: ")
    assert line.count("\n") == 1
    found = subprocess.run(
        ["pgrep", "-f", str(tmp_path)], capture_output=True, text=True
    )
    assert found.stdout == ""


def test_no_checkout(tmp_path):
    with pytest.raises(UserError, match="no checkout with a folder benchmarks/"):
        versus.parse([str(tmp_path)])

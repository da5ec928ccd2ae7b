"""What the comparison of two checkouts says of numbers that are known."""

import math
import subprocess

import numpy as np
import pytest
from scipy import stats

from benchmarks import versus
from benchmarks.measure.report import summary
from slpo_jax.errors import UserError


def _pair(ratio, faults=(0, 0), **more):
    cell = {"other": summary([2.0]), "this": summary([2.0 * ratio]), "ratio": ratio}
    return {"step": cell | {"faults": dict(zip(versus.SIDES, faults, strict=True))}} | more


def test_over_pairs_is_t_s_interval_of_the_logarithms():
    ratios = [0.9, 1.2, 1.1, 1.0]
    found = versus.over_pairs(ratios)
    t = stats.ttest_1samp(np.log(ratios), 0).confidence_interval(0.95)
    assert found == pytest.approx({"mean": stats.gmean(ratios), "low": math.exp(t.low), "high": math.exp(t.high)})
    assert math.isnan(versus.over_pairs([1.5])["low"])


def test_pairs_of_one_kind_have_a_row_of_their_own():
    pairs = [_pair(1.5, (0, 9000)), _pair(1.0), _pair(0.8, (9000, 9000)), _pair(1.21)]
    result = {"machine": {}, "work": {}, "definitions": [], "pairs": pairs}
    rows = [line.split(" | ") for line in versus.markdown(result).splitlines() if line.startswith("| step")]
    assert [row[0] for row in rows] == ["| step", "| step, memory kept", "| step, memory faulted"]
    assert [row[3] for row in rows] == ["1.50, 1.00, 0.80, 1.21", "1.00, 1.21", "0.80"]
    assert rows[1][4] == "1.100"
    alike = {"machine": {}, "work": {}, "definitions": [], "pairs": pairs[1:2]}
    assert versus.markdown(alike).count("| step") == 1


@pytest.mark.nightly
def test_another_checkout_that_can_t_is_named(tmp_path, monkeypatch, capsys):
    """By what it said last, and without leaving a process behind."""
    (tmp_path / "benchmarks").mkdir()
    with pytest.raises(SystemExit) as status:
        versus.main([str(tmp_path), "--shapes", "quickstart", "--pairs", "1"])
    assert status.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {tmp_path}: its benchmark ended: ")
    assert line.count("\n") == 1
    found = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert found.stdout == ""


def test_no_checkout(tmp_path):
    with pytest.raises(UserError, match="no checkout with a folder benchmarks/"):
        versus.parse([str(tmp_path)])

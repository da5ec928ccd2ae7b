"""A step beside its prediction, at tiny shapes on the CPU."""

import pytest

from benchmarks import predicted


@pytest.mark.nightly
def test_a_step_has_a_prediction_and_a_measurement(cpu_devices):
    found = predicted.benchmark(predicted.parse(["--tiny"]))
    rows = {what: (before, after) for what, before, after in found["rows"]}
    tflop, rate = rows["products of a device"]
    assert float(tflop.split()[0]) > 0
    assert float(rate.split()[0]) > 0
    assert float(rows["a step (s)"][1]) > 0
    assert "| a step (s) |" in predicted.markdown(found)

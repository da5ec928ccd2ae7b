"""What is told of a run of a real model: from made-up rows to tables."""

import pytest

from benchmarks import real_tables


def test_speeds_are_of_each_program_s_own_steps():
    """CODI's begin where CoT-SFT's end, in the same stage's rows; an evaluation has none."""
    rows = [{"name": name, "stage": stage, "until": until, "times": times, "flops": 2e12, "memory": 3e9,
             "compile_seconds": 5.0}
            for name, stage, until, times in (("CoT-SFT", "imitate", 10, 10), ("CODI", "imitate", 30, 20),
                                              ("evaluation", "", 0, 7))]  # fmt: skip
    metrics = [{"stage": "imitate", "step": step, "seconds": seconds}
               for step, seconds in ((5, 1.0), (10, 1.0), (20, 0.25), (25, 0.5), (30, 0.5))]  # fmt: skip
    metrics += [
        {"stage": "imitate", "step": 30, "valid_accuracy": 0.5},
        {"stage": "slpo", "step": 5, "seconds": 9.0},
    ]
    table = real_tables.programs_table(rows, metrics)
    speeds = {row[0]: row[4:] for row in table["rows"]}
    assert speeds["CoT-SFT"] == [
        1.0,
        2.0,
        pytest.approx(100 * 2 / 989),
    ]
    assert speeds["CODI"] == [
        2.0,
        4.0,
        pytest.approx(100 * 4 / 989),
    ]
    assert speeds["evaluation"] == [None] * 3


def test_what_is_told_of_rows_is_the_report_s():
    """Shares in percent with their errors, latents as they are; differences with their intervals."""
    entry = {"set": "gsm8k", "a": "slpo", "b": "control", "metric": "acc", "difference": 0.02, "low": 0.01,
             "high": 0.03}  # fmt: skip
    report = {"eval": {"slpo": {"gsm8k": {"acc": 0.25, "acc_se": 0.01, "pass@8": 0.5, "latent_steps": 3.0}}},
              "differences": [entry, entry | {"b": "best_fixed"}]}  # fmt: skip
    tables = real_tables.quality_tables(report, ("control", "cold_start"))
    assert tables["right answers"]["columns"] == [
        "",
        "Acc",
        "Pass@1",
        "Pass@8",
        "Pass@16",
        "latents",
    ]
    assert tables["right answers"]["rows"] == [
        ["SLPO, GSM8K", {"value": 25.0, "se": 1.0}, None, 50.0, None, 3.0]
    ]
    assert list(tables) == ["right answers", "minus control"]
    assert tables["minus control"]["rows"][0][1] == pytest.approx(
        {"value": 2.0, "low": 1.0, "high": 3.0}
    )


def test_minutes_are_those_of_all_that_led_to_a_row():
    """Those of imitation are in the gate's, and with them in an objective's; evaluations at other lengths have none."""
    report = {"eval": {row: {"gsm8k": {"acc": 0.25, "acc_se": 0.01, "pass@16": 0.5}}
                       for row in ("imitate", "imitate_fixed_tmax", "cold_start", "slpo", "more")}}  # fmt: skip
    metrics = [{"stage": stage, "step": step, "seconds": seconds}
               for stage, seconds in (("imitate", 6.0), ("cold_start", 3.0), ("slpo", 1.5), ("more", 1.5))
               for step in (10, 20)]  # fmt: skip
    starts = {"cold_start": "imitate", "slpo": "cold_start", "more": "slpo"}
    table = real_tables.minutes_table(report, metrics, starts)
    assert table["columns"] == ["", "minutes", "Acc", "Pass@16"]
    assert table["rows"][0] == [
        "SFT, GSM8K",
        2.0,
        {"value": 25.0, "se": 1.0},
        50.0,
    ]
    assert [row[1] for row in table["rows"]] == [
        2.0,
        3.0,
        3.5,
        4.0,
    ]

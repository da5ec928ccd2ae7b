"""The report from end to end on small made-up workdirs."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from eval_files import ROWS, evals_of, problem, write_eval, write_lines
from refused import one_line
from slpo_jax.cli import commands
from slpo_jax.errors import UserError
from slpo_jax.evaluation import curves, records, report, report_rows
from slpo_jax.evaluation.headline import headline_text, make_headline
from slpo_jax.evaluation.render import about_rows
from slpo_jax.evaluation.report_rows import read_rows
from slpo_jax.io import artifact
from slpo_jax.io.workdir import Workdir
from slpo_jax.stages import ABOUT

SWEPT = {
    "cold_start": {
        "rules": (0.5, 0.6),
        "rule": 0.6,
        "sweep": {"0.5": 0.25, "0.6": 0.5, "chosen": 0.6, "problems": 9},
    },
    "imitate_control": {
        "rules": (1, 12),
        "rule": 1,
        "sweep": {"12": 0.5, "1": 0.75, "chosen": 1, "problems": 9},
    },
}


@pytest.fixture
def workdir(tmp_path):
    """Two sets, five rows: SLPO 30 of 40, the cold gate 10 of 40, all else 20 of 40."""
    rng = np.random.default_rng(0)
    steps = [int(s) for s in rng.integers(1, 5, 40)]
    for name in ("alpha", "beta"):
        for row in ROWS:
            count = {"slpo": 30, "cold_start": 10}.get(row, 20)
            hits = rng.random((3, 40, 16)) < count / 40
            lengths = np.array(steps) + 1 if ROWS[row].gated else [4] * 40
            swept = SWEPT.get(row, {})
            write_eval(
                tmp_path,
                row,
                name,
                np.arange(40) < count,
                hits,
                lengths,
                steps,
                shown={"seed": 3},
                **swept,
            )
    metrics = [
        {"step": s, "stage": "slpo", "reward": s / 10, "latent_steps": 3.0, "loss": 0.1}
        for s in range(10)
    ]
    metrics += [
        {"step": s, "stage": "imitate", "loss": 1.0 / (s + 1), "accuracy": 0.5}
        for s in range(60)
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(m) + "\n" for m in metrics)
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"seed": 4, "evaluate": {"datasets": ["beta", "alpha"]}})
    )
    return tmp_path


def test_report_end_to_end(workdir):
    returned = report.write_report(workdir)
    out = json.loads((workdir / "report.json").read_text())
    assert out == returned
    assert list(out["eval"]) == list(ROWS)
    figures = out["eval"]["slpo"]["alpha"]
    assert list(out["eval"]["slpo"]) == [
        "beta",
        "alpha",
    ]  # the order of config.evaluate.datasets
    assert (figures["n"], figures["acc"], figures["latent_steps"]) == (
        40,
        0.75,
        figures["sample_latent_steps"],
    )
    assert figures["pearson_steps_r"] == pytest.approx(1.0)
    assert {"pass@1", "pass@8", "pass@16", "maj@16", "pass@8_seed_se"} <= set(figures)
    assert out["thresholds"]["cold_start"]["chosen"] == 0.6
    assert out["average"]["slpo"]["acc"] == 0.75
    found = {(e["set"], e["a"], e["b"], e["metric"]): e for e in out["differences"]}
    acc = found["alpha", "slpo", "cold_start", "acc"]
    assert acc["difference"] == pytest.approx(0.5)
    assert acc["excludes_zero"]
    assert 0 < acc["low"] < 0.5 < acc["high"]
    control = found["alpha", "imitate_control", "imitate", "acc"]
    assert (
        control["difference"],
        control["low"],
        control["high"],
        control["excludes_zero"],
    ) == (0, 0, 0, False)
    assert ("average", "slpo", "best_fixed", "pass@16") in found


@pytest.mark.slow
def test_markdown_is_a_screen(workdir, tmp_path):
    """The first lines, the means, and of how many problems they are."""
    # Fewer than the 40 of the other rows.
    write_eval(workdir, "imitate", "alpha", [1] * 20)
    headline = report.write_report(workdir)["headline"]
    blocks = (workdir / "report.md").read_text().split("\n\n")
    assert blocks[0] == "# Evaluation report"
    assert blocks[1] == "### mean of 2 sets (60 to 80 problems)"
    first = blocks[2].splitlines()
    cells = ["SLPO", "75.0 ± 4.8"]  # sqrt(.75 * .25 / 80) = .0484
    assert first[-1].startswith(f"| {' | '.join(cells)} |")
    assert first[-1] == f"| {' | '.join(headline['rows'][-1]['cells'])} |"
    assert "### mean of the sets (60 to 80 problems)" in blocks
    assert len((workdir / "report.md").read_text().splitlines()) < 50
    write_eval(tmp_path / "one_set", "slpo", "alpha", [1, 0])
    report.write_report(tmp_path / "one_set")
    blocks = (tmp_path / "one_set" / "report.md").read_text().split("\n\n")
    assert blocks[1] == "### alpha (2 problems)"


GOOD = (0.012, 0.003, 0.021)
BAD = (-0.02, -0.03, -0.01)
NONE = (0.004, -0.005, 0.013)
G = "▲ +1.2 [+0.3, +2.1]"
B = "▼ -2.0 [-3.0, -1.0]"
N = "+0.4 [-0.5, +1.3]"
STAGES = {
    "imitate": {"stage": "imitate"},
    "imitate_control": {"stage": "imitate"},
    "cold_start": {"stage": "cold_start"},
    "slpo": {"stage": "rl", "start": {"stage": "cold_start"}},
}


def _entry(metric, interval, b="cold_start", a="slpo", name="alpha"):
    """A difference as a report has it; interval: its mean and ends."""
    mean, low, high = interval
    return {
        "set": name,
        "a": a,
        "b": b,
        "metric": metric,
        "difference": mean,
        "low": low,
        "high": high,
        "excludes_zero": low > 0 or high < 0,
    }


def _made_up(entries, figures, **more):
    """A report of four rows on the set alpha, with these differences; figures: of every row."""
    rows = {}
    evaluated = {}
    for name, settings in STAGES.items():
        label = ROWS[name].label
        rows[name] = {"label": label, "settings": settings, "stage": name}
        evaluated[name] = {"alpha": {"n": 1000, "acc": 0.5, **figures}}
    made = {"rows": rows, "eval": evaluated, "average": {}, "differences": entries}
    return made | more


MORE = "SFT, as many steps more"
# Differences of SLPO; its control, then the cells of those.
CONTROLS = {
    "where it started, as no other is there": (
        [_entry("acc", NONE), _entry("pass@8", GOOD), _entry("pass@16", BAD)],
        ["cold gate", N, G],
    ),
    "imitation, though it started elsewhere": (
        [
            _entry("acc", GOOD),
            _entry("acc", BAD, "imitate"),
            _entry("pass@8", NONE, "imitate"),
        ],
        ["SFT", B, N],
    ),
    "the hardest to beat": (
        [
            _entry("acc", GOOD, "imitate"),
            _entry("acc", NONE, "imitate_control"),
            _entry("acc", NONE),
        ],
        [MORE, N, "–"],
    ),
    "of equal ones that of equal steps": (
        [_entry("acc", NONE, "imitate"), _entry("acc", NONE, "imitate_control")],
        [MORE, N, "–"],
    ),
    "the best fixed length": (
        [_entry("acc", GOOD, "best_fixed")],
        ["best fixed length", G, "–"],
    ),
    "nothing": ([], ["–", "–", "–"]),
}


@pytest.mark.parametrize("case", CONTROLS)
def test_each_row_stands_beside_its_control(case):
    """Of rows without rewards the best, and else where it started; Acc, and Pass@8 or the largest k."""
    entries, cells = CONTROLS[case]
    figures = {"pass@4": 0.6, "pass@8": 0.7, "pass@16": 0.8, "sequential_steps": 4.0}
    found = make_headline(_made_up(entries, figures))
    assert found["title"] == "alpha (1,000 problems)"
    minus = ["Acc − control", "Pass@8 − control"]
    assert found["columns"] == ["row", "Acc", "Pass@8", "steps", "control", *minus]
    assert found["rows"][-1]["cells"] == [
        "SLPO",
        "50.0",
        "70.0",
        "4.00",
        *cells,
    ]
    assert found["warnings"] == []


def test_a_row_with_rewards_is_no_control():
    """Where neither imitation nor where it started was evaluated."""
    made = _made_up([_entry("acc", GOOD, "cold_start")], {})
    made["rows"]["cold_start"]["settings"] = made["rows"]["slpo"]["settings"]
    made["rows"]["slpo"]["settings"] = {"stage": "rl", "start": {"stage": "other"}}
    row = make_headline(made)["rows"][-1]
    assert (row["row"], row["control"]) == ("slpo", None)


def test_a_stage_without_rewards_is_a_control(monkeypatch):
    """Whatever its name, and where the row started too."""
    entries = [_entry("acc", GOOD, "imitate"), _entry("acc", NONE, "cold_start")]
    row = make_headline(_made_up(entries, {}))["rows"][-1]
    assert row["control"] == "imitate"
    about = dataclasses.replace(ABOUT["cold_start"], rewarded=False)
    monkeypatch.setitem(ABOUT, "cold_start", about)
    row = make_headline(_made_up(entries, {}))["rows"][-1]
    assert row["control"] == "cold_start"


def test_the_first_lines_are_of_the_mean_of_the_sets():
    """Where there is one; several runs are said; without Pass@8 the largest k is shown."""
    entries = [
        _entry("acc", BAD),
        _entry("acc", GOOD, name="average"),
        _entry("pass@4", NONE, name="average"),
    ]
    figures = {"n": 2000, "acc": 0.25, "pass@2": 0.5, "pass@4": 0.75}
    made = _made_up(entries, {}, average={"slpo": figures}, runs=["a", "b"])
    made["eval"]["slpo"]["beta"] = figures
    found = make_headline(made)
    assert found["title"] == "mean of 2 sets (2,000 problems, 2 training runs)"
    (row,) = found["rows"]
    assert row["cells"] == ["SLPO", "25.0", "75.0", "–", "cold gate", G, N]
    title, header, line, *_ = headline_text(found).splitlines()
    assert title == found["title"]
    for column in ("Acc", "Pass@4", "control", "Acc − control"):
        # Figures stand below the ends of their columns' names.
        cell = row["cells"][found["columns"].index(column)]
        assert line.index(cell) + len(cell) == header.index(column) + len(column)


LEVEL = "in training no reward differed from the others of its problem, so none taught anything"
CUT = "every answer was truncated"
# The share of SLPO's rollouts that were cut, what its training logged, and what is said.
WARNINGS = [
    (1, {}, [CUT]),
    (0.9, {}, []),
    (0.9, {"mixed": [[5, 9], [0.0, 0.0]]}, [LEVEL]),
    (1, {"mixed": [[5, 9], [0.0, 0.0]]}, [CUT, LEVEL]),
    (0.9, {"mixed": [[5, 9], [0.0, 0.1]]}, []),
    (
        0.9,
        {
            "mixed": [[5], [0.0]],
            "reference_log_likelihood": [[5], [-1.0]],
        },
        [],
    ),
]


@pytest.mark.parametrize(("cut", "training", "reasons"), WARNINGS)
def test_what_leaves_no_room_for_a_difference_is_said(cut, training, reasons):
    made = _made_up([], {"cut": 0.5}, training={"slpo": training})
    made["eval"]["slpo"]["alpha"] |= {"cut": cut, "sample_cut": cut}
    said = [f"SLPO: {'; '.join(reasons)}."] if reasons else []
    assert make_headline(made)["warnings"] == said


# The share of right texts as imitation went on, Acc on its best set, and whether that is memorised.
MEMORISED = [
    ([0.2, 0.95], 0.16, True),
    ([0.2, 0.95], 0.31, True),
    ([0.2, 0.95], 0.32, False),
    ([0.95, 0.85], 0.16, False),
    ([], 0.16, False),
]


@pytest.mark.parametrize(("accuracies", "best", "is_said"), MEMORISED)
def test_imitation_that_has_memorised_its_demonstrations_says_so(
    accuracies, best, is_said
):
    training = {"loss": [[1], [0.5]]}
    if accuracies:
        training["accuracy"] = [[1, 2], accuracies]
    made = _made_up([], {}, training={"imitate": training})
    made["eval"]["imitate"] = {
        "deep": {"n": 9, "acc": 0.01},
        "alpha": {"n": 9, "acc": best},
    }
    said = make_headline(made)["warnings"]
    assert len(said) == is_said
    if is_said:
        assert "95 %" in said[0]
        assert f"{100 * best:.0f} %" in said[0]


def test_a_run_of_cut_answers_and_level_rewards_says_so(tmp_path):
    nothing = np.zeros((1, 40, 8))
    write_eval(tmp_path, "cold_start", "alpha", [0] * 40, nothing)
    settings = {"stage": "rl"}
    write_eval(tmp_path, "slpo", "alpha", [0] * 40, nothing, settings=settings)
    logged = {"step": 1, "stage": "slpo", "mixed": 0.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(logged) + "\n")
    headline = report.write_report(tmp_path)["headline"]
    cold, slpo = headline["warnings"]
    assert cold == f"cold gate: {CUT}."
    assert slpo == f"SLPO: {CUT}; {LEVEL}."
    text = (tmp_path / "report.md").read_text()
    assert slpo in text
    assert "| SLPO | 0.0 [0.0, 8.8] | 0.0 [0.0, 8.8] |" in text
    write_eval(tmp_path / "one", "slpo", "alpha", [0] * 40)
    alone = report.write_report(tmp_path / "one")["headline"]
    assert [row["control"] for row in alone["rows"]] == [None]
    out = report.compare_runs([tmp_path / "one", tmp_path], tmp_path / "all")
    interval = out["eval"]["slpo"]["alpha"]["intervals"]["acc"]
    assert interval == pytest.approx([0, 0.0876], abs=1e-4)


QUESTION = "Which?\nA. one\nB. two\nC. three\nD. four"
# By set: questions and references, what one guess gets right, and what eight do.
CHANCE = {
    "two": ([("q", "TRUE"), ("q", "true."), ("q", "true"), ("q", "no")], 0.75, 1.0, "the commonest answer, TRUE,"),
    "many": ([("q", str(n)) for n in range(10)], 0.1, 0.8, "the commonest answer, 0,"),
    "letters": ([(QUESTION, letter) for letter in "ABCD"], 0.25, 1 - 0.75**8, "one of the 4 candidates"),
    "texts": ([(QUESTION, "two"), (QUESTION + "\nE. five", "one")] * 4, 0.5, 1.0, "the commonest answer, two,"),
    "mixed": ([(QUESTION, "two"), (QUESTION + "\nE. five", "one"), (QUESTION, "three"), (QUESTION + "\nE. 5", "5")] * 2,
              0.25, 1.0, "the commonest answer, two,"),
    "prosqa": ([(f"Is Tom a {n}pus or {n}mus?", f"Tom is a {n}pus.") for n in "abcd"], 0.5, 1 - 0.5**8,
               "one of the 2 candidates"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANCE)
def test_the_report_has_a_line_on_chance(tmp_path, name):
    problems, one, eight, said = CHANCE[name]
    lines = [problem(i, True, [[1] * 8]) for i in range(len(problems))]
    asked = [
        line | {"question": each[0], "reference": each[1]}
        for line, each in zip(lines, problems, strict=True)
    ]
    report_rows.write_row(tmp_path, report_rows.Row("slpo", "SLPO"))
    write_lines(tmp_path, "slpo", name, asked)
    found = report.write_report(tmp_path)["chance"][name]
    assert (found["acc"], found["pass@8"]) == pytest.approx((one, eight))
    assert found["text"].startswith(
        f"Chance level on {name}: {said} is right on {100 * one:.1f} %; one of "
    )
    assert found["text"].endswith(
        f" is on {100 * eight:.1f} %, which Pass@8 is to be read against."
    )
    assert found["text"] in (tmp_path / "report.md").read_text()
    write_lines(tmp_path, "slpo", name, [each | {"samples": []} for each in asked])
    assert report.write_report(tmp_path)["chance"][name]["text"].endswith(
        f"is right on {100 * one:.1f} %."
    )


def test_settings_are_those_of_the_checkpoints(tmp_path):
    """Once those that all have, then each one's own."""
    shared = {"seed": 0, "max_latents": 3}
    for row, own in (
        ("imitate", {"imitate.final_steps": 40}),
        ("slpo", {"rl.steps": 6, "max_latents": 4}),
    ):
        write_eval(tmp_path, row, "alpha", [1, 0], shown=shared | own)
    out = report.write_report(tmp_path)
    own = {
        "imitate": {"max_latents": 3, "imitate.final_steps": 40},
        "slpo": {"rl.steps": 6, "max_latents": 4},
    }
    assert out["settings"] == {"": {"seed": 0}} | own


def test_curves_are_those_of_the_records(tmp_path):
    """Stop times counted, logged scalars as they are, and the seconds of all steps so far."""
    write_eval(
        tmp_path,
        "slpo",
        "alpha",
        [1] * 4,
        np.eye(4)[None, :, :2],
        lengths=[
            1,
            3,
            3,
            0,
        ],
    )
    logged = [{"step": 10, "loss": 2.0, "seconds": 0.2}, {"step": 15, "valid_accuracy": 0.5},
              {"step": 20, "loss": 1.0, "seconds": 0.4}, {"step": 30, "loss": float("nan")},
              {"step": 40, "loss": None}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"stage": "slpo"} | row) + "\n" for row in logged)
    )
    out = report.write_report(tmp_path)
    assert out == json.loads((tmp_path / "report.json").read_text())
    assert out["stop_times"] == {
        "slpo": {
            "alpha": {
                "greedy": [1, 1, 0, 2],
                "noisy": [2, 2, 0, 4],
            }
        }
    }
    assert out["training"] == {
        "slpo": {
            "loss": [[10, 20], [2.0, 1.0]],
            "seconds": [[10, 20], [0.2, 0.4]],
            "valid_accuracy": [[15], [0.5]],
            "elapsed": [[10, 20], [2.0, 6.0]],
        }
    }
    assert out["curves"]["slpo"]["alpha"]["value"] == [0.25, 0.5]


def test_one_row_without_samples_or_steps(tmp_path):
    write_eval(
        tmp_path,
        "imitate",
        "alpha",
        [1, 0, 1, 1],
        steps=[None] * 4,
    )
    out = report.write_report(tmp_path)
    assert out["eval"] == {"imitate": {"alpha": out["eval"]["imitate"]["alpha"]}}
    assert out["eval"]["imitate"]["alpha"]["acc"] == 0.75
    assert (out["differences"], out["curves"], out["training"]) == (
        [],
        {"imitate": {}},
        {},
    )
    row = "| SFT | 75.0 ± 21.7 | 3.00 ± 0.00 | 6.00 ± 0.00 | 25.0 ± 21.7 |"
    assert row in (tmp_path / "report.md").read_text()


def test_rows_on_different_problems_are_not_compared(tmp_path):
    write_eval(tmp_path, "slpo", "alpha", [1, 0, 1])
    write_eval(tmp_path, "cold_start", "alpha", [1, 0])
    out = report.write_report(tmp_path)
    assert out["differences"] == []
    assert "the problems differ" in out["notes"][0]
    assert out["notes"][0] in (tmp_path / "report.md").read_text()


def test_a_row_is_what_it_says_of_itself(tmp_path):
    """Its place, its label, what it is compared with and whether a gate chooses; its name says nothing."""
    for name, order, facts in (
        ("zeta", 1, dict(label="the base", fixed=True)),
        ("alpha_row", 2, dict(label="the other base", fixed=True)),
        ("slpo", 3, dict(label="no gate here", gated=False, baselines=("zeta",))),
        (
            "beta_row",
            4,
            dict(label="mine", gated=True, baselines=("slpo", "best_fixed", "absent")),
        ),
    ):
        right = np.arange(8) < order
        lengths = range(1, 9)
        write_eval(
            tmp_path,
            name,
            "alpha",
            right,
            lengths=lengths,
            steps=range(1, 9),
            order=order,
            **facts,
        )
    out = report.write_report(tmp_path)
    assert list(out["eval"]) == ["zeta", "alpha_row", "slpo", "beta_row"]
    pairs = {
        (e["a"], e["b"], e["b_row"]): e["difference"]
        for e in out["differences"]
        if e["metric"] == "acc"
    }
    assert pairs == {
        ("beta_row", "slpo", "slpo"): 1 / 8,
        ("beta_row", "best_fixed", "alpha_row"): 2 / 8,
        ("slpo", "zeta", "zeta"): 2 / 8,
    }
    about = about_rows(out["rows"])["best_fixed"]
    assert about.startswith('The best of "the base", "the other base"')


@pytest.mark.parametrize("fault", ["gone", "empty", "a key changed"])
def test_a_row_that_says_nothing_of_itself_is_named(workdir, fault):
    path = workdir / "eval" / "slpo" / "row.json"
    text = path.read_text()
    path.unlink()
    if fault != "gone":
        path.write_text(
            "" if fault == "empty" else text.replace('"order": ', '"order": 1')
        )
    one_line(
        lambda: report.write_report(workdir),
        str(path),
        "missing" if fault == "gone" else "is damaged",
    )


def _plotted(workdir):
    return curves.pass_at_k_figure(
        {row: sets["alpha"] for row, sets in evals_of(workdir).items()}
    ).axes


def test_many_samples_have_larger_k(tmp_path):
    """P@32 and P@64, maj@64, and curves up to 64."""
    hits = np.zeros((1, 4, 64))
    hits[0, 1, 40] = hits[0, 2, 20] = hits[0, 3, :] = 1  # solved within 64, 32 and 1
    write_eval(tmp_path, "slpo", "alpha", [1, 0, 0, 1], hits)
    found = report.write_report(tmp_path)["eval"]["slpo"]["alpha"]
    # One of 64 samples is among k of them with k/64.
    wanted = [(1 + 2 * k / 64) / 4 for k in (1, 2, 4, 8, 16, 32, 64)]
    assert [found[f"pass@{k}"] for k in (1, 2, 4, 8, 16, 32, 64)] == pytest.approx(
        wanted
    )
    assert found["maj@64"] == pytest.approx(
        0.75
    )  # wrong samples have no answer here, and don't vote
    text = (tmp_path / "report.md").read_text()
    assert (
        "| row | Acc | P@1 | P@8 | P@16 | P@32 | P@64 | maj@64 | #L | steps | truncated |"
        in text
    )
    (axis,) = _plotted(tmp_path)
    assert axis.lines[0].get_xdata().tolist() == list(range(1, 65))
    assert [tick.get_text() for tick in axis.get_xticklabels()] == [
        "1",
        "2",
        "4",
        "8",
        "16",
        "32",
        "64",
    ]


@pytest.mark.parametrize(("seeds", "per_seed"), [(2, 4), (3, 1)])
def test_what_is_printed_of_pass_at_k_is_what_is_plotted(tmp_path, seeds, per_seed):
    """1 - C(n - c, k) / C(n, k) of a problem with c of n = S*M right, up to k = M, or to S where M is 1."""
    right = np.random.default_rng(0).random((seeds, 6, per_seed)) < 0.4
    write_eval(
        tmp_path,
        "imitate",
        "alpha",
        [1] * 6,
        np.zeros((1, 6, 16)),
    )
    write_eval(tmp_path, "slpo", "alpha", [1] * 6, right)
    (axis,) = _plotted(tmp_path)
    assert axis.get_xticks().tolist() == [
        1,
        2,
        4,
        8,
        16,
    ]  # of the row that has the most
    (_, line) = axis.lines
    (_, band) = axis.collections
    n = seeds * per_seed
    counts = right.sum(axis=(0, 2))
    most = per_seed if per_seed > 1 else seeds
    ks = range(1, most + 1)
    by_problem = 100 * np.array(
        [[1 - math.comb(n - c, k) / math.comb(n, k) for c in counts] for k in ks]
    )
    np.testing.assert_allclose(
        line.get_xydata(), list(zip(ks, by_problem.mean(axis=1), strict=True))
    )
    figured = report.write_report(tmp_path)["eval"]["slpo"]["alpha"]
    assert [figured[f"pass@{k}"] for k in (1, 2, most)] == pytest.approx(
        by_problem.mean(axis=1)[[0, 1, -1]] / 100
    )
    corners = band.get_paths()[0].vertices
    for k, values in zip(ks, by_problem, strict=True):
        at = corners[corners[:, 0] == k, 1]
        expected = np.clip(
            values.mean()
            + stats.sem(values)
            * np.array(
                [
                    -1,
                    1,
                ]
            ),
            0,
            100,
        )
        np.testing.assert_allclose([at.min(), at.max()], expected)


def test_compare_runs_by_hand(tmp_path):
    for run, count in (("a", 30), ("b", 26)):
        write_eval(
            tmp_path / run,
            "slpo",
            "alpha",
            np.arange(40) < count,
            settings={"seed": 1, "rl": {"lr": count}},
        )
        write_eval(tmp_path / run, "cold_start", "alpha", np.arange(40) < 20)
    write_eval(tmp_path / "a", "imitate", "alpha", [1] * 40)
    for run, count in (("a", 5), ("b", 10)):
        write_eval(tmp_path / run, "cold_start", "beta", [1] * count)
    out = report.compare_runs(
        [
            tmp_path / "a",
            tmp_path / "b",
        ],
        tmp_path / "all",
    )
    assert out == json.loads((tmp_path / "all" / "report.json").read_text())
    figures = out["eval"]["slpo"]["alpha"]
    assert figures["acc"] == pytest.approx(0.70)
    assert figures["acc_se"] == pytest.approx(0.05)  # s = .1 / sqrt(2), over sqrt(2)
    assert figures["per_run"]["acc"] == [0.75, 0.65]
    (acc,) = [e for e in out["differences"] if e["metric"] == "acc"]
    assert acc["difference"] == pytest.approx(0.2)
    assert acc["per_run"] == pytest.approx([0.25, 0.15])
    assert acc["runs"] == 2
    text = (tmp_path / "all" / "report.md").read_text()
    assert "| SLPO | 70.0 ± 5.0 |" in text
    notes = " ".join(out["notes"])
    assert "imitate on alpha: left out, not every run has it" in notes
    assert "cold_start on beta: left out, its problems differ from run to run" in notes
    assert "beta" not in out["eval"]["cold_start"]
    assert "settings differ in: rl.lr." in notes
    assert "share config.seed" in notes


def test_what_one_run_does_not_have_has_no_mean(tmp_path):
    """All its thoughts are equally long, and correlate with nothing."""
    for run, lengths in (
        (
            "a",
            [
                1,
                2,
                3,
                6,
            ],
        ),
        ("b", [3] * 4),
    ):
        write_eval(
            tmp_path / run,
            "slpo",
            "alpha",
            [1] * 4,
            lengths=lengths,
            steps=[1, 2, 3, 4],
        )
    found = report.compare_runs(
        [
            tmp_path / "a",
            tmp_path / "b",
        ],
        tmp_path / "all",
    )["eval"]["slpo"]["alpha"]
    assert found.get("pearson_steps_r") is None
    assert found["latent_steps"] == 3
    assert not [key for key in found if key.endswith("_p") or "_se_" in key]


def test_mean_of_the_sets_by_hand(tmp_path):
    write_eval(tmp_path, "slpo", "alpha", [1, 1, 1, 0])
    write_eval(tmp_path, "slpo", "beta", [1, 0] * 8)
    write_eval(tmp_path, "imitate", "alpha", [1, 1, 1, 0])
    (average,) = report.write_report(tmp_path)[
        "average"
    ].values()  # a row without one of the sets has none
    assert average["acc"] == pytest.approx(0.625)
    # errors sqrt(3/16/4) and sqrt(1/4/16), independent
    assert average["acc_se"] == pytest.approx((3 / 64 + 1 / 64) ** 0.5 / 2)


@pytest.mark.parametrize("right", [0, 1])
def test_interval_of_a_mean_of_sets_that_are_all_alike(tmp_path, right):
    """Of sets of one size it is Wilson's of all problems together; SciPy has that."""
    for name in ("alpha", "beta", "gamma"):
        write_eval(tmp_path, "slpo", name, [right] * 8)
    (average,) = report.write_report(tmp_path)["average"].values()
    expected = stats.binomtest(24 * right, 24).proportion_ci(method="wilson")
    assert average["intervals"]["acc"] == pytest.approx([expected.low, expected.high])


def test_mean_of_sets_of_one_problem_has_every_figure(tmp_path):
    """One problem has a Pass@k, and no error of it; nor has the mean, but for Acc's."""
    write_eval(
        tmp_path,
        "slpo",
        "alpha",
        [1],
        [[[1, 0]], [[0, 0]]],
    )
    write_eval(
        tmp_path,
        "slpo",
        "beta",
        [1, 0],
        [[[1, 1], [1, 0]], [[0, 1], [0, 0]]],
    )
    average = report.write_report(tmp_path)["average"]["slpo"]
    assert (average["pass@1"], average["pass@2"]) == (
        (0.25 + 0.5) / 2,
        (0.5 + 0.75) / 2,
    )
    assert average["pass@1_se"] is None
    assert average["acc_se"] == pytest.approx(0.125**0.5 / 2)
    table = (
        (tmp_path / "report.md").read_text().split("mean of the sets (3 problems)")[1]
    )
    assert "| SLPO | 75.0 ± 17.7 | 37.5 | 62.5 |" in table


def test_the_command_says_what_it_could_not_read(tmp_path, capsys):
    write_eval(tmp_path, "slpo", "alpha", [1, 0, 1])
    (tmp_path / "metrics.jsonl").write_text("xx\n")
    commands.report([str(tmp_path)])
    said = "metrics.jsonl: 1 unreadable line(s) and no other, so the report has nothing of the training.\n"
    assert capsys.readouterr().err == said


@pytest.mark.slow
def test_command_line(workdir, tmp_path, capsys):
    commands.report([str(workdir)])
    *first, path = capsys.readouterr().out.splitlines()
    assert path == str(workdir / "report.html")
    assert first[0] == "mean of 2 sets (80 problems)"
    commands.report([str(workdir), "--out", str(tmp_path / "all")])
    assert (tmp_path / "all" / "report.md").exists()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="--out"):
        commands.report([str(workdir), str(tmp_path / "all")])
    for runs, out in (
        ([workdir], file),
        ([workdir], workdir),
        ([workdir, workdir / "."], tmp_path / "all"),
    ):
        with pytest.raises(UserError) as error:
            commands.report([*map(str, runs), "--out", str(out)])
        said = f"compare: --out ({out}) and the runs have to be different folders; name each of them once"
        assert str(error.value) == said
    with pytest.raises(UserError, match=r"/eval.*evaluate"):
        commands.report([str(tmp_path / "all")])


@pytest.mark.slow
def test_what_only_a_report_needs_is_imported_for_one(workdir):
    code = "import sys; from slpo_jax.evaluation import report; heavy = ('jax', 'scipy.stats'); "
    code += "print([m for m in heavy if m in sys.modules]); report.write_report(sys.argv[1]); "
    code += "print([m for m in (*heavy, 'matplotlib') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(workdir)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["[]", "['scipy.stats']"]


def test_records_round_trip(tmp_path):
    path = tmp_path / "eval" / "slpo" / "alpha.jsonl"
    hits = [
        [[1, 0, 1], [0, 0, 0]],
        [[0, 1, 1], [1, 1, 1]],
    ]
    write_eval(
        tmp_path,
        "slpo",
        "alpha",
        [1, 0],
        hits,
        [2, 5],
        [3, None],
    )
    got = records.read_records(path)
    assert got.sample_correct.astype(int).tolist() == hits
    assert got.sample_answers[0, 0].tolist() == ["7", None, "7"]
    assert got.seeds.tolist() == [10, 11]
    assert got.latent_steps.tolist() == [2, 5]
    assert got.sample_latent_steps[:, :, 0].tolist() == [
        [2, 5],
        [2, 5],
    ]
    assert got.answers == ("7", None)
    assert got.problem_steps[0] == 3
    assert np.isnan(got.problem_steps[1])


def test_sequential_steps_count_each_pass_once():
    """Latents and tokens; of a thought that is written down, the tokens have its latents among them."""
    silent = problem(0, True, latent_steps=4)
    written = problem(0, True, latent_steps=2) | {"written_steps": 2}
    assert records.arrays_of([silent]).sequential_steps.tolist() == [4 + 3]
    assert records.arrays_of([written]).sequential_steps.tolist() == [3]


def _time(workdir, milliseconds, **changes):
    """What a run measured on the set beta, of the rows as they are now."""
    rows = {
        name: [row.checkpoint, row.evaluation]
        for name, row in read_rows(workdir).items()
    } | changes
    value = {"set": "beta", "batch": 32, "device": "1 x cpu", "rows": milliseconds}
    artifact.write(Workdir(workdir).times, {"rows": rows}, value)


def test_milliseconds_stand_in_figures_and_means(workdir, tmp_path):
    """Those of rows that are still the same; over runs their mean and its error."""
    _time(
        workdir, {"slpo": 0.5, "cold_start": 2.0}, cold_start=["another checkpoint", {}]
    )
    out = report.write_report(workdir)
    assert (
        out["eval"]["slpo"]["beta"]["milliseconds"]
        == out["average"]["slpo"]["milliseconds"]
        == 0.5
    )
    assert "milliseconds" not in out["eval"]["slpo"]["alpha"]
    assert "milliseconds" not in out["average"]["cold_start"]
    text = (workdir / "report.md").read_text()
    _, figures = text.split("### mean of the sets")
    head, *table = [line for line in figures.splitlines() if line.startswith("|")]
    place = [name.strip() for name in head.split("|")].index("ms")
    assert table[-1].split("|")[place].strip() == "0.5"
    other = tmp_path / "other"
    shutil.copytree(workdir, other, ignore=shutil.ignore_patterns("other", "report.*"))
    _time(other, {"slpo": 0.7})
    both = report.compare_runs([workdir, other], tmp_path / "both")
    figures = both["average"]["slpo"]
    assert figures["milliseconds"] == pytest.approx(0.6)
    assert figures["milliseconds_se"] == pytest.approx(0.1)


def test_metrics_of_a_resumed_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 2, "stage": "slpo", "reward": 0.1}\n{"step": 3, "stage": "slpo", "rew\n\xff\xfe\x00\n'
        b'{"step": 1, "stage": "slpo", "reward": 0.3}\n{"step": 2, "stage": "slpo", "reward": 0.2}\n'
    )
    rows, notes = curves.read_metrics(path)
    assert [(row["step"], row["reward"]) for row in rows] == [
        (1, 0.3),
        (2, 0.2),
    ]  # the last of a step counts
    assert notes == ["metrics.jsonl: 2 unreadable line(s) left out of the figures."]
    assert curves.read_metrics(tmp_path / "none.jsonl") == ([], [])

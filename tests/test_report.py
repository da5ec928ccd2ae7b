"""The report from end to end on small made-up workdirs."""

import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from slpo_jax.errors import UserError
from slpo_jax.evaluation import records, report


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


@pytest.fixture
def workdir(tmp_path):
    """Two sets, five rows: SLPO 30 of 40, the cold gate 10 of 40, all else 20 of 40."""
    rng = np.random.default_rng(0)
    steps = [int(s) for s in rng.integers(1, 5, 40)]
    for name in ("alpha", "beta"):
        for row in records.ROWS:
            count = {"slpo": 30, "cold_start": 10}.get(row, 20)
            hits = rng.random((3, 40, 16)) < count / 40
            lengths = np.array(steps) + 1 if records.is_gated(row) else [4] * 40
            write_eval(tmp_path, row, name, np.arange(40) < count, hits, lengths, steps)
    metrics = [{"step": s, "stage": "slpo", "reward": s / 10, "latent_steps": 3.0, "loss": 0.1} for s in range(10)]
    metrics += [{"step": s, "stage": "imitate", "loss": 1.0 / (s + 1), "accuracy": 0.5} for s in range(60)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    sweeps = {
        "cold_start": {"0.5": 0.25, "0.6": 0.5, "chosen": 0.6},
        "imitate_control": {"12": 0.5, "3": 0.75, "chosen": 3},
    }
    (tmp_path / "thresholds.json").write_text(json.dumps(sweeps))
    (tmp_path / "config.json").write_text(json.dumps({"seed": 3, "evaluate": {"datasets": ["beta", "alpha"]}}))
    return tmp_path


def test_report_end_to_end(workdir):
    returned = report.write_report(workdir)
    out = json.loads((workdir / "report.json").read_text())
    assert out == returned
    assert list(out["eval"]) == list(records.ROWS)
    figures = out["eval"]["slpo"]["alpha"]
    assert list(out["eval"]["slpo"]) == ["beta", "alpha"]  # the order of config.evaluate.datasets
    assert (figures["n"], figures["acc"], figures["latent_steps"]) == (40, 0.75, figures["sample_latent_steps"])
    assert figures["pearson_steps_r"] == pytest.approx(1.0)
    assert {"pass@1", "pass@8", "pass@16", "maj@16", "pass@16_unbiased", "pass@8_seed_se"} <= set(figures)
    assert out["thresholds"]["cold_start"]["chosen"] == 0.6
    assert out["average"]["slpo"]["acc"] == 0.75
    found = {(e["set"], e["a"], e["b"], e["metric"]): e for e in out["differences"]}
    acc = found["alpha", "slpo", "cold_start", "acc"]
    assert acc["difference"] == pytest.approx(0.5)
    assert acc["excludes_zero"]
    assert 0 < acc["low"] < 0.5 < acc["high"]
    control = found["alpha", "imitate_control", "imitate", "acc"]
    assert (control["difference"], control["low"], control["high"], control["excludes_zero"]) == (0, 0, 0, False)
    assert ("average", "slpo", "imitate_best_fixed", "pass@16") in found


def test_report_markdown_says_what_the_numbers_say(workdir):
    report.write_report(workdir)
    text = (workdir / "report.md").read_text()
    assert "| SLPO | 75.0 ± 6.8 |" in text  # sqrt(.75 * .25 / 40) = .0685
    assert "alpha (40 problems)" in text
    assert "**+50.0** [+" in text
    slpo, control = (
        next(line for line in text.split("\n") if line.startswith(f"- **{pair}**"))
        for pair in ("SLPO − cold gate", "imitation control − imitation, own length")
    )
    assert "of 12 intervals" in slpo
    assert "0 below zero" in slpo
    assert "alpha: Acc +50.0" in slpo
    assert "Acc" not in control.replace("(Acc and P@k)", "")
    assert "SLPO on alpha: more latents on problems with more steps (r = 1.00, p < 0.001)" in text
    assert "| threshold | 0.5 | 0.6 |\n| --- | ---: | ---: |\n| cold gate: Acc | 25.0 | **50.0** |" in text
    assert "| latents | 3 | 12 |\n| --- | ---: | ---: |\n| imitation control: Acc | **75.0** | 50.0 |" in text
    assert "`seed` = 3" in text


def test_report_is_a_pure_function_of_the_workdir(workdir):
    report.write_report(workdir)
    first = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    report.write_report(workdir)
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == first


def test_figures_are_drawn_and_embedded(workdir):
    out = report.write_report(workdir)
    names = ["pass_at_k.png", "training.png", "stop_times.png", "difficulty.png"]
    assert out["figures"] == [f"figures/{name}" for name in names]
    text = (workdir / "report.md").read_text()
    for name in names:
        head = (workdir / "figures" / name).read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", head[16:24])
        assert width > 400
        assert height > 300
        assert f"](figures/{name})" in text


def test_one_row_without_samples_or_steps(tmp_path):
    write_eval(tmp_path, "imitate", "alpha", [1, 0, 1, 1], steps=[None] * 4)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "pass_at_k.png").write_bytes(b"of an earlier evaluation")
    out = report.write_report(tmp_path)
    assert out["eval"] == {"imitate": {"alpha": out["eval"]["imitate"]["alpha"]}}
    assert out["eval"]["imitate"]["alpha"]["acc"] == 0.75
    assert (out["differences"], out["figures"]) == ([], [])
    assert not list((tmp_path / "figures").iterdir())
    assert "| imitation, own length | 75.0 ± 21.7 | 3.00 ± 0.00 |" in (tmp_path / "report.md").read_text()


def test_few_samples_show_the_largest_k(tmp_path):
    write_eval(tmp_path, "slpo", "alpha", [1, 0], np.ones((1, 2, 4)))
    report.write_report(tmp_path)
    assert "| row | Acc | P@1 | P@4 | #L |" in (tmp_path / "report.md").read_text()


def test_rows_on_different_problems_are_not_compared(tmp_path):
    write_eval(tmp_path, "slpo", "alpha", [1, 0, 1])
    write_eval(tmp_path, "cold_start", "alpha", [1, 0])
    out = report.write_report(tmp_path)
    assert out["differences"] == []
    assert "the problems differ" in out["notes"][0]
    assert out["notes"][0] in (tmp_path / "report.md").read_text()


def test_unknown_rows_are_reported_after_the_known(tmp_path):
    write_eval(tmp_path, "ablation", "alpha", [1, 0])
    write_eval(tmp_path, "slpo", "alpha", [1, 0])
    assert list(report.write_report(tmp_path)["eval"]) == ["slpo", "ablation"]


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


def test_compare_runs_by_hand(tmp_path):
    for run, count in (("a", 30), ("b", 26)):
        write_eval(tmp_path / run, "slpo", "alpha", np.arange(40) < count)
        write_eval(tmp_path / run, "cold_start", "alpha", np.arange(40) < 20)
        (tmp_path / run / "config.json").write_text(json.dumps({"seed": 1, "lr": count}))
    write_eval(tmp_path / "a", "imitate", "alpha", [1] * 40)
    out = report.compare_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
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
    assert "+25.0, +15.0" in text
    notes = " ".join(out["notes"])
    assert "imitate on alpha: left out" in notes
    assert "configurations differ in: lr." in notes
    assert "share config.seed" in notes


@pytest.mark.parametrize(
    ("second", "verdict"), [([2, 3, 5, 6], "more latents on"), ([6, 5, 3, 2], "no clear tie of latents to")]
)
def test_correlation_over_runs_is_told_only_if_all_agree(tmp_path, second, verdict):
    for run, lengths in (("a", [1, 2, 3, 6]), ("b", second)):
        write_eval(tmp_path / run, "slpo", "alpha", [1] * 4, lengths=lengths, steps=[1, 2, 3, 4])
    out = report.compare_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    by_run = [stats.pearsonr([1, 2, 3, 4], lengths).statistic for lengths in ([1, 2, 3, 6], second)]
    assert out["eval"]["slpo"]["alpha"]["pearson_steps_r"] == pytest.approx(np.mean(by_run))
    text = (tmp_path / "all" / "report.md").read_text()
    assert f"{verdict} problems with more steps (r = {np.mean(by_run):.2f}, by run {min(by_run):.2f} to" in text


def test_mean_of_the_sets_by_hand(tmp_path):
    write_eval(tmp_path, "slpo", "alpha", [1, 1, 1, 0])
    write_eval(tmp_path, "slpo", "beta", [1, 0] * 8)
    average = report.write_report(tmp_path)["average"]["slpo"]
    assert average["acc"] == pytest.approx(0.625)
    # errors sqrt(3/16/4) and sqrt(1/4/16), independent
    assert average["acc_se"] == pytest.approx((3 / 64 + 1 / 64) ** 0.5 / 2)


def test_compare_one_run_is_its_own_report(workdir, tmp_path):
    single = report.write_report(workdir)
    out = report.compare_runs([workdir], tmp_path / "all")
    assert out["eval"] == single["eval"]
    assert out["differences"] == single["differences"]


def test_compare_refuses_the_same_run_twice(workdir, tmp_path):
    with pytest.raises(UserError, match="twice"):
        report.compare_runs([workdir, workdir / "."], tmp_path / "all")
    with pytest.raises(UserError, match="--out"):
        report.compare_runs([workdir], workdir)


def test_command_line(workdir, tmp_path, capsys):
    assert report.main([str(workdir)]) == 0
    assert capsys.readouterr().out.strip() == str(workdir / "report.md")
    assert report.main([str(workdir), "--out", str(tmp_path / "all")]) == 0
    assert (tmp_path / "all" / "report.md").exists()
    assert report.main([str(workdir), str(tmp_path / "all")]) == 2
    assert "--out" in capsys.readouterr().err


def test_command_line_of_a_folder_without_evaluation(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "slpo_jax.evaluation.report", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().split("\n")) == 1
    assert f"{tmp_path}/eval" in done.stderr
    assert "evaluate" in done.stderr


def test_no_jax_and_no_pyplot_is_imported():
    code = (
        "import sys, slpo_jax.evaluation.report; print([m for m in ('jax', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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


def test_samples_are_grouped_by_seed_whatever_their_order(tmp_path):
    rows = [problem(i, 1, [[1, 0], [0, 0]]) for i in range(2)]
    rows[1]["samples"] = [rows[1]["samples"][i] for i in (2, 0, 3, 1)]
    records.write_records(tmp_path / "x.jsonl", rows)
    assert records.read_records(tmp_path / "x.jsonl").sample_correct[:, 1].tolist() == [[True, False], [False, False]]


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "x.jsonl"
    records.write_records(path, [problem(0, 1)])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        records.write_records(path, [problem(0, 1), {"index": float("nan")}])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no problems"),
        (json.dumps(problem(0, 1)) + "\n{not json\n", "line 2: not JSON"),
        ("[1]\n", "line 1: not an object"),
        (json.dumps({k: v for k, v in problem(0, 1).items() if k != "correct"}), "line 1: 'correct' is missing"),
        (json.dumps(problem(0, 1) | {"latent_steps": "3"}), "line 1: 'latent_steps'"),
        (json.dumps(problem(0, 1, [[1]])) + "\n" + json.dumps(problem(1, 1, [[1, 0]])), "line 2: samples a seed"),
        (json.dumps(problem(0, 1, [[1]])) + "\n" + json.dumps(problem(1, 1, [[1], [0]])), "line 2: samples a seed"),
    ],
)
def test_malformed_records_name_the_file_and_line(tmp_path, text, expected):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        records.read_records(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_records_are_a_user_error(tmp_path):
    with pytest.raises(UserError, match="evaluate"):
        records.read_records(tmp_path / "x.jsonl")

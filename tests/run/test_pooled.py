"""Runs in groups: their figures, and differences that are paired over runs, problems and seeds."""

import dataclasses
import json
import re
import types

import numpy as np
import pytest

import comparison
import figure
import jobs
import pooled
import small_run
from eval_files import write_eval
from jobs import Run, Table

GROUPS = {"one": ("a",), "two": ("b", "c")}
SEEDS = (0, 1)
SETS = ("real", "made")
N = 40


@pytest.fixture
def finished(tmp_path):
    """The table, its folder, and [seed, set, N] of who was right, by run and row."""
    (tmp_path / "small.py").write_text(small_run.CONFIG)
    runs = [
        Run(name, f"{tmp_path}/small.py", group=group)
        for group, names in GROUPS.items()
        for name in names
    ]
    runs.append(Run("late", f"{tmp_path}/small.py", group="three"))
    table = Table(
        tuple(runs),
        ("imitate", "slpo"),
        ("imitate",),
        SEEDS,
        ("acc", "pass@1"),
        beside="one",
    )
    rng = np.random.default_rng(0)
    right = {}
    for place, run in enumerate(runs):
        for seed in SEEDS[: 1 if run.name == "late" else None]:
            job = jobs.make_job(table, run, tmp_path, seed, None)
            for row, share in (("imitate", 0.3), ("slpo", 0.5 + 0.1 * place)):
                for name in SETS:
                    hits = rng.random(N) < share
                    right.setdefault((run.name, row), []).append(hits)
                    baselines = ("imitate",) if row == "slpo" else ()
                    write_eval(
                        job.workdir,
                        row,
                        name,
                        hits,
                        hits[None, :, None],
                        baselines=baselines,
                        stage="",
                    )
            rows = [
                {"stage": row, "step": s, "seconds": 0.5 + place}
                for row in table.rows
                for s in (20, 40)
            ]
            rows.append({"stage": "imitate", "step": 41, "accuracy": 0.5 + 0.2 * seed})
            rows += [{"stage": "imitate", "step": 42, "answered": 1.0}] * (
                run.name in GROUPS["two"]
            )
            (job.workdir / "metrics.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in rows)
            )
            (job.workdir / "config.json").write_text(
                '{"imitate": {"max_latent_stage": 3}}'
            )
            (job.workdir / jobs.DONE).write_text(json.dumps(job.finished_facts()))
    return (
        table,
        tmp_path,
        {
            key: np.reshape(x, (-1, len(SETS), N)).astype(float)
            for key, x in right.items()
        },
    )


def lines(found, name):
    return {row[0]: row[1:] for row in found[name]["rows"]}


def test_a_group_is_the_mean_of_its_runs_and_paired(finished):
    table, root, right = finished
    found = pooled.pool(table, root)
    alone = lines(comparison.compare(table, root)[0], "minus SFT")["a: SLPO"]
    # Of one run the difference and its interval are the report's; of all, the mean.
    gains = lines(found, "groups, minus SFT")
    for mine, theirs in zip(gains["one: SLPO"], alone, strict=True):
        assert mine == pytest.approx(theirs)
    each = {name: right[name, "slpo"] - right[name, "imitate"] for name in "abc"}
    two = (each["b"] + each["c"]) / 2
    assert gains["two: SLPO"][0]["value"] == pytest.approx(100 * two.mean())
    assert gains["all: SLPO"][1]["value"] == pytest.approx(
        100 * (each["a"] + two).mean() / 2
    )
    beside = lines(found, "SFT, minus one")
    base = (right["b", "imitate"] + right["c", "imitate"]) / 2 - right["a", "imitate"]
    assert set(beside) == {"two"}
    assert beside["two"][0]["value"] == pytest.approx(100 * base.mean())
    # Seeds are drawn alike for all sets, problems anew for each.
    rng = np.random.default_rng(5)
    draws = [_draw(two, rng) for _ in range(4000)]
    low, high = 100 * np.quantile(draws, (0.025, 0.975))
    assert gains["two: SLPO"][0]["low"] == pytest.approx(low, abs=1.0)
    assert gains["two: SLPO"][0]["high"] == pytest.approx(high, abs=1.0)


def test_rows_of_all_runs_are_set_beside_a_row_of_another_seed_by_seed(finished):
    table, root, right = finished
    found = lines(
        pooled.pool(dataclasses.replace(table, across=(("a", "slpo"),)), root),
        "minus a: SLPO",
    )
    assert set(found) == {
        "a: SFT",
        *(f"{run}: {row}" for run in ("b", "c", "late") for row in ("SFT", "SLPO")),
    }
    gain = right["b", "slpo"] - right["a", "slpo"]
    assert found["b: SLPO"][0]["value"] == pytest.approx(100 * gain.mean())
    rng = np.random.default_rng(5)
    draws = [_draw(gain, rng) for _ in range(4000)]
    assert found["b: SLPO"][0]["low"] == pytest.approx(
        100 * np.quantile(draws, 0.025), abs=1.0
    )
    late = (
        right["late", "slpo"][0] - right["a", "slpo"][0]
    )  # the only seed that both have
    assert found["late: SLPO"][0]["value"] == pytest.approx(100 * late.mean())


def _draw(difference_SKN, rng):
    seeds = rng.integers(2, size=2)
    return np.mean(
        [difference_SKN[seeds, s][:, rng.integers(N, size=N)] for s in range(len(SETS))]
    )


def test_levels_have_training_and_what_is_not_finished_is_named(finished):
    table, root, right = finished
    found = pooled.pool(table, root)
    assert found["groups"]["columns"] == ["", "Acc", "Pass@1", "seconds", "learned"]
    rows = lines(found, "groups")
    assert list(rows) == ["one: SFT", "one: SLPO", "two: SFT", "two: SLPO"]
    by_seed = 100 * np.mean(
        [right[name, "slpo"].mean(axis=(1, 2)) for name in "bc"], axis=0
    )
    acc, _, seconds, learned = rows["two: SLPO"]
    assert acc == pytest.approx(
        {"value": by_seed.mean(), "se": abs(by_seed[0] - by_seed[1]) / 2}
    )
    assert seconds == pytest.approx({"value": 40 * (1.5 + 2.5) / 2, "se": 0.0})
    assert learned is None  # of the rows that no stage says
    assert rows["one: SFT"][-1] == pytest.approx({"value": 60.0, "se": 10.0})
    assert rows["two: SFT"][-1] == {"value": 100.0, "se": 0.0}
    assert found["left out"]["rows"] == [["late", "1"]]


def test_figures_of_each_set(finished):
    table, root, right = finished
    found = pooled.pool(dataclasses.replace(table, by_set=("acc",)), root)
    own = comparison.compare(dataclasses.replace(table, by_set=("acc",)), root)[0]
    single = comparison.compare(
        dataclasses.replace(table, runs=table.runs[:1], by_set=("acc",)), root
    )[0]
    slpo, base = (
        (right["b", row] + right["c", row]) / 2 for row in ("slpo", "imitate")
    )
    assert found["SFT"]["columns"] == ["", *sorted(SETS), "seconds", "learned"]
    assert lines(found, "SFT")["two"][2:] == lines(found, "groups")["two: SFT"][-2:]
    assert found["groups, Acc by set"]["columns"] == ["", *sorted(SETS)]
    expected = {
        ("SFT", "two"): base,
        ("groups, Acc by set", "two: SLPO"): slpo,
        ("groups, minus SFT, Acc by set", "two: SLPO"): slpo - base,
        ("SFT, minus one, Acc by set", "two"): base - right["a", "imitate"],
    }
    for place, name in enumerate(sorted(SETS)):
        of = SETS.index(name)
        alone = lines(own, "Acc by set")["a: SLPO"][place]["value"]
        assert alone == pytest.approx(100 * right["a", "slpo"][:, of].mean())
        by_seed = lines(single, "Acc by seed")[f"SLPO: {name}"]
        assert by_seed == pytest.approx(100 * right["a", "slpo"][:, of].mean(axis=-1))
        for (part, row), of_sets in expected.items():
            assert lines(found, part)[row][place]["value"] == pytest.approx(
                100 * of_sets[:, of].mean()
            )


def test_points_are_where_their_figures_are():
    """A row's dot stands at its steps and its Acc, on axes that begin at 0."""
    steps = {
        "columns": ["", "depth 1", "depth 5"],
        "rows": [["a", {}, {"value": 8.0}], ["b", {}, {"value": 33.0}]],
    }
    acc = {"columns": ["", "depth 1", "depth 5"], "rows": [["a", {}, {"value": 95.0, "se": 2.0}],
                                                           ["b", {}, {"value": 50.0, "se": 1.0}]]}  # fmt: skip
    drawn = figure.points(steps, acc, "depth 5", ("sequential steps", "Acc (%)"))
    dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)
    (xa, ya), (xb, yb) = [tuple(map(float, dot)) for dot in dots]
    ticks = {
        text: float(x)
        for x, text in re.findall(
            r'<text x="([\d.]+)" y="\d+" text-anchor="middle">(\d+)<', drawn
        )
    }
    assert (xb - ticks["0"]) / (xa - ticks["0"]) == pytest.approx(33 / 8, abs=0.01)
    heights = {
        text: float(y) - 4
        for y, text in re.findall(r'y="([\d.]+)" text-anchor="end">(\d+)<', drawn)
    }
    for y, value in ((ya, 95), (yb, 50)):
        assert (heights["0"] - y) / (heights["0"] - heights["100"]) == pytest.approx(
            value / 100, abs=0.01
        )


def test_latents_against_depth(monkeypatch, tmp_path):
    """Numpy's own correlation, of sets that are repeated until each weighs the same; none deeper than any stage."""
    rng = np.random.default_rng(0)
    sets = {
        str(n): types.SimpleNamespace(
            problem_steps=np.full(n, float(n)), latent_steps=rng.integers(1, 4, n)
        )
        for n in (2, 3, 4)
    }
    (tmp_path / "config.json").write_text('{"imitate": {"max_latent_stage": 3}}')
    monkeypatch.setattr(comparison, "read_rows", lambda _: {})
    monkeypatch.setattr(comparison, "read_evals", lambda *_: ({"slpo": sets}, []))
    steps, latents = (
        np.concatenate(
            [
                np.repeat(getattr(sets[name], key), times)
                for name, times in (("2", 3), ("3", 2))
            ]
        )
        for key in ("problem_steps", "latent_steps")
    )
    assert comparison.depth_correlation(tmp_path, "slpo") == pytest.approx(
        np.corrcoef(steps, latents)[0, 1]
    )
    for records in sets.values():
        records.latent_steps = np.full(len(records.latent_steps), 3)
    assert comparison.depth_correlation(tmp_path, "slpo") is None

"""Tables of runs: what is run, in which order and only once, and their comparison."""

import dataclasses
import json
import shutil
import types

import pytest

import comparison
import jobs
import reproduce
import small_run
from jobs import Run, Table
from runs import TABLES
from slpo_jax.config import read_config
from slpo_jax.run.provenance import evaluated_settings

# The same stage from the same start: its programs are compiled by then.
AGAIN = {"stages": ("rl", "evaluate"), "init": "{after}/checkpoints/cold_start"}


def tiny_table(folder, **changes):
    config = str(folder / "small.py")
    runs = (
        Run("main", config),
        Run("again", config, AGAIN, "main"),
        Run("other", config, seeds=(5,)),
    )
    return Table(
        **{
            "runs": runs,
            "seeds": (0,),
            "minus": ("cold_start",),
            "metrics": ("acc", "pass@1"),
        }
        | changes
    )


def test_plan_names_every_run_once_with_what_it_comes_after(tmp_path):
    (tmp_path / "small.py").write_text(small_run.CONFIG)
    table = tiny_table(tmp_path, seeds=(0, 1))

    def planned(seeds, only):
        return [
            (job.run.name, job.seed)
            for job in jobs.plan(table, tmp_path, seeds, only, None)
        ]

    assert planned([], []) == [
        ("main", 0),
        ("main", 1),
        ("again", 0),
        ("again", 1),
        ("other", 5),
    ]
    assert planned([7], ["again"]) == [("main", 7), ("again", 7)]
    job = jobs.plan(table, tmp_path, [], ["again"], 4)[-1]
    assert {
        f"--config={tmp_path}/small.py",
        f"--workdir={tmp_path}/again/seed_1",
        "--config.seed=1",
        "--config.evaluate.limit=4",
        "--config.stages=('rl', 'evaluate')",
        f"--config.init={tmp_path}/main/seed_1/checkpoints/cold_start",
    } <= set(job.arguments)
    assert job.lender == tmp_path / "main/seed_1"


def test_a_table_and_a_checkout_may_be_moved(tmp_path, monkeypatch):
    """What was run stays finished, though every path in its command is another."""

    def planned(name):
        found = jobs.plan(TABLES["figure4"], tmp_path / name, [0], [], None)
        return [job.arguments for job in found], [job.facts for job in found]

    (here, facts), elsewhere = planned("here"), planned("there")
    (tmp_path / "copy").symlink_to(jobs.ROOT)
    monkeypatch.setattr(jobs, "ROOT", tmp_path / "copy")
    for arguments, same in (elsewhere, planned("here")):
        assert not set(here) & set(arguments)
        assert same == facts
    assert str(tmp_path) not in json.dumps(facts)
    assert len({json.dumps(each) for each in facts}) == len(facts)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_table_sets_keys_that_its_configs_have_and_compares_rows_that_are_alike(
    name,
):
    """Rows that a run takes are, of the same samples and evaluated on all its sets."""
    runs = TABLES[name].runs
    configs = {}
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        configs[run.name] = config = jobs.load_config(run.config)
        before = config.copy_and_resolve_references()
        config.update_from_flattened_dict(dict(run.overrides))
        assert (config != before) == bool(run.overrides)
        assert set(run.rows) <= {
            *config.rl.objectives,
            "imitate",
            "imitate_fixed_tmax",
            "imitate_control",
            "checkpoint",
        }
        if not run.after or run.alone:
            continue
        lender = configs[run.after]  # a KeyError: it would come later
        sets = [
            set(each.evaluate.datasets or each.data.eval) for each in (config, lender)
        ]
        assert sets[0] <= sets[1], run.label
        assert _comparable(config) == _comparable(lender), run.label


def _comparable(config):
    """The settings in which rows that are compared have to agree."""
    evaluate = config.evaluate
    every = evaluated_settings(read_config(config))
    found = {
        key: value
        for key, value in every.items()
        if key.startswith(("evaluate.", "dropout."))
    }
    return found | {
        "samples": evaluate.samples,
        "seeds": evaluate.samples and evaluate.seeds,
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the small config as the table "tiny", whose runs are forked; `commands` has those of each run."""
    folder = small_run.new_folder(tmp_path)
    commands = []
    monkeypatch.setitem(TABLES, "tiny", tiny_table(folder))

    def run(command, **_):
        commands.append(command)
        done = small_run.run(*command[3:], folder=folder, status=None)
        return types.SimpleNamespace(returncode=done.status)

    monkeypatch.setattr(jobs, "subprocess", types.SimpleNamespace(run=run))
    return folder, commands


@pytest.mark.slow
def test_a_table_is_run_once_and_compared(folder, capsys):
    folder, commands = folder
    # What is there already is not done again.
    shutil.copytree(small_run.finished_run() / "work", folder / "out/main/seed_0")
    flags = ["tiny", f"--workdir={folder / 'out'}", "--only=again"]
    assert reproduce.main(flags) == 0, capsys.readouterr().err
    assert len(commands) == 2
    printed = capsys.readouterr().out
    assert "[1/2] main, seed 0: " in printed
    assert "[2/2] again, seed 0: " in printed

    out = folder / "out"
    found = json.loads((out / "tiny.json").read_text())
    assert (found["command"], found["seeds"]) == (
        "python launch/reproduce.py tiny --only=again",
        [0],
    )
    rows, minus = (found["tables"][name] for name in ("rows", "minus cold gate"))
    assert rows["columns"] == minus["columns"] == ["", "Acc", "Pass@1"]
    assert [row[0] for row in rows["rows"]] == ["main", "again"]
    for (label, acc, _), (_, _, difference) in zip(
        rows["rows"], minus["rows"], strict=True
    ):
        report = json.loads((out / label / "seed_0" / "report.json").read_text())
        assert acc["value"] == 100 * report["average"]["slpo"]["acc"]
        (entry,) = (
            entry
            for entry in report["differences"]
            if (entry["a"], entry["b"], entry["set"], entry["metric"])
            == ("slpo", "cold_start", "average", "pass@1")
        )
        assert difference["value"] == 100 * entry["difference"]
    assert (
        f"| again | {rows['rows'][1][1]['value']:.2f} ± "
        in (out / "tiny.md").read_text()
    )

    assert reproduce.main(flags) == 0
    assert len(commands) == 2
    assert capsys.readouterr().out.count("finished before") == 2
    first = jobs.plan(TABLES["tiny"], out, [], ["main"], None)
    assert [job.is_finished for job in first] == [True]
    assert not jobs.plan(TABLES["tiny"], out, [], ["main"], 3)[
        0
    ].is_finished  # another evaluation
    # A set that is lost is no reason to compare the others alone.
    next((out / "main/seed_0/eval/slpo").glob("*.jsonl")).unlink()
    assert not first[0].is_finished
    tables, _ = comparison.compare(TABLES["tiny"], out)
    assert [row[0] for row in tables["rows"]["rows"]] == ["again"]
    assert (
        "main/seed_0: left out, it was run with other settings or data, or its results"
        in capsys.readouterr().out
    )
    assert reproduce.main(flags) == 0
    assert len(commands) == 3
    assert json.loads((out / "tiny.json").read_text()) == found


def test_data_that_changed_and_other_limits_and_starts_are_other_runs(folder, capsys):
    """Not run again for nothing, and not compared with runs of other problems."""
    folder, _ = folder
    table = TABLES["tiny"]
    out = folder / "out"
    source = folder / "real.json"
    main, *others = table.runs
    changed = dataclasses.replace(
        table, runs=(Run("main", main.config, {"imitate.final_steps": 12}), *others)
    )
    (_, again, third), (_, other, same) = (
        jobs.plan(each, out, [], [], None) for each in (table, changed)
    )
    assert (again.arguments, third.facts) == (other.arguments, same.facts)
    assert again.facts != other.facts  # the run before it is another
    table = dataclasses.replace(
        table, runs=(Run("main", main.config, {"data.eval.real": str(source)}),)
    )

    def job(limit=None):
        jobs._files_digest.cache_clear()
        return jobs.plan(table, out, [], [], limit)[0]

    job().workdir.mkdir(parents=True)
    (job().workdir / jobs.DONE).write_text(json.dumps(job().finished_facts()))
    assert job().is_finished
    assert not job(limit=3).is_finished
    assert comparison.compare(table, out, 3)[0]["rows"]["rows"] == []
    assert (
        f"{out}/main/seed_0: left out, it was run with other settings or data"
        in capsys.readouterr().out
    )
    source.write_text(source.read_text().replace("has 1 ", "has 9 "))
    assert not job().is_finished


def test_a_run_that_fails_ends_with_one_line(folder, capsys, monkeypatch, tmp_path):
    def fails(command, stdout, **_):
        stdout.write("a long story\nerror: config.seed: no\n")
        return types.SimpleNamespace(returncode=2)

    monkeypatch.setattr(jobs, "subprocess", types.SimpleNamespace(run=fails))
    assert reproduce.main(["tiny", f"--workdir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: {tmp_path}/main/seed_0: its run ended with status 2 (error: config.seed: no); "
    )
    assert error.count("\n") == 1
    assert not (tmp_path / "main/seed_0" / jobs.DONE).exists()


def test_settings_above_are_counted_for_each_baseline_and_for_all():
    """A value above 0, and in brackets an interval above 0, of each run's sets."""
    figure = {"value": 0.02, "low": 0.01, "high": 0.03}
    below = {"value": -0.02, "low": -0.03, "high": 0.01}
    wide = figure | {"low": -1}
    counts: dict = {}
    for _ in range(2):
        sets = {"cold_start": {"a": figure, "b": below, "c": wide, "average": below},
                "reference": {"a": below, "b": figure, "c": figure, "average": below}}  # fmt: skip
        comparison._count(
            counts,
            "answer_only, equal seconds",
            {b: {"acc": x} for b, x in sets.items()},
        )
    comparison._count(
        counts, "slpo", {"cold_start": {"acc": {"a": figure}}, "lacking": {}}
    )
    rows = comparison._count_settings(["", "Acc", "pass@1"], counts, ("acc", "pass@1"))[
        "rows"
    ]
    assert rows == [
        ["answer_only, equal seconds, above cold gate", "4 (2) of 6", None],
        ["answer_only, equal seconds, above SFT on keys", "4 (4) of 6", None],
        ["answer_only, equal seconds, above all of them", "2 (0) of 6", None],
        ["SLPO, above cold gate", "1 (1) of 1", None],
    ]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["luck"], "luck"),
        (["ablations", "--only=luck"], "--only: no run luck; give some of main, "),
        (["ablations", "--seeds=a"], "--seeds: a"),
        (["ablations", "--limit=0"], "--limit: 0"),
        (
            ["ablations", "--only=main", "--workdir=/dev/null/x"],
            "--workdir: /dev/null/x: Not a directory; ",
        ),
    ],
)
def test_bad_flags_end_with_one_line_and_status_2(flags, fault, capsys):
    assert reproduce.main(flags) == 2
    out, error = capsys.readouterr()
    assert (out, error.startswith("error: "), error.count("\n")) == ("", True, 1)
    assert fault in error


def test_rates_are_the_best_by_the_mean_of_the_figures():
    tried = {
        "1e_05": (4.0, 5.0),
        "3e_05": (6.0, 4.0),
        "1e_04": (5.0, 5.0),
    }  # the last two are equal
    lines = {
        f"codi: pass_at_k_{rate}": {"acc": {"value": a}, "pass@8": {"value": b}}
        for rate, (a, b) in tried.items()
    }
    lines |= {
        f"further_{rate}: further": {"acc": {"value": a}}
        for rate, (a, _) in tried.items()
    }
    lines |= {f"slpo_{rate}": {"acc": {"value": 1.0}} for rate in tried} | {
        "main": {"acc": {"value": 9.0}},
        "x_1e_05": {},
    }
    found = comparison.best_rates(lines, ("acc", "pass@8"))
    assert found["columns"] == ["", "1e-05", "3e-05", "1e-04", "best"]
    assert found["rows"] == [
        ["codi: pass_at_k", 4.5, 5.0, 5.0, "3e-05"],
        ["further: further", 4.0, 6.0, 5.0, "3e-05"], ["slpo", 1.0, 1.0, 1.0, "1e-05"],
    ]  # fmt: skip
    assert comparison.best_rates({"main": lines["main"]}, ("acc",)) is None

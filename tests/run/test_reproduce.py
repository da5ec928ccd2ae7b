"""Grids of runs: what is run, in which order and only once, and their comparison."""

import copy
import dataclasses
import importlib
import json
import shutil
import types

import comparison
import jobs
import over_training
import pytest
import rates
import reproduce
import small_run
import timings
from grid import Grid, Run
from grids import GRIDS, TIMINGS
from twelve import TWELVE

from slpo_jax.config import check
from slpo_jax.errors import UserError
from slpo_jax.run.digests import settings_of
from slpo_jax.run.take_rows import COMPARABLE

# The same stage from the same start: its programs are compiled by then.
AGAIN = {"stages": ("rl", "evaluate"), "init": "{after}/checkpoints/cold_start"}


def tiny_grid(folder, **changes):
    runs = (Run("main"), Run("again", AGAIN, after="main"), Run("other", {}, seeds=(5,)))
    return Grid(
        **{"config": str(folder / "small.py"), "runs": runs, "seeds": (0,), "metrics": ("acc", "pass@1")} | changes
    )


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(flags):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "reproduce", interrupted)
    assert reproduce.main(["twelve"]) == 130
    assert capsys.readouterr().err == "\ninterrupted; the same command goes on from what is finished\n"


def test_plan_names_every_run_once_with_what_it_comes_after(tmp_path):
    (tmp_path / "small.py").write_text(small_run.CONFIG)
    grid = tiny_grid(tmp_path, seeds=(0, 1))
    assert [(job.label, job.seed) for job in jobs.plan(grid, tmp_path, [], [], None)] == [
        ("main", 0),
        ("main", 1),
        ("again", 0),
        ("again", 1),
        ("other", 5),
    ]
    assert [(job.label, job.seed) for job in jobs.plan(grid, tmp_path, [7], ["again"], None)] == [
        ("main", 7),
        ("again", 7),
    ]
    job = jobs.plan(grid, tmp_path, [], ["again"], 4)[-1]
    assert {
        f"--config={tmp_path}/small.py",
        f"--workdir={tmp_path}/again/seed_1",
        "--config.seed=1",
        "--config.evaluate.limit=4",
        "--config.stages=('rl', 'evaluate')",
        f"--config.init={tmp_path}/main/seed_1/checkpoints/cold_start",
        f"--config.evaluate.rows_from={tmp_path}/main/seed_1",
    } <= set(job.arguments)


def test_a_workdir_that_can_not_be_is_one_line(capsys):
    assert reproduce.main(["ablations", "--workdir=/dev/null/x", "--only=main"]) == 2
    assert capsys.readouterr() == ("", "error: --workdir: /dev/null/x: Not a directory; give another\n")


def test_a_run_is_another_when_the_one_before_it_is(tmp_path):
    (tmp_path / "small.py").write_text(small_run.CONFIG)
    grid = tiny_grid(tmp_path)
    other = dataclasses.replace(grid, runs=(Run("main", {"imitate.final_steps": 12}), *grid.runs[1:]))
    (_, again, third), (_, changed, same) = (jobs.plan(each, tmp_path, [], [], None) for each in (grid, other))
    assert again.arguments == changed.arguments
    assert again.facts != changed.facts
    assert third.facts == same.facts


def test_a_grid_and_a_checkout_may_be_moved(tmp_path, monkeypatch):
    """What was run stays finished, though every path in its command is another."""

    def planned(name):
        found = jobs.plan(GRIDS["advantages"], tmp_path / name, [0], [], None)
        return [job.arguments for job in found], [job.facts for job in found]

    (here, facts), elsewhere = planned("here"), planned("there")
    (tmp_path / "copy").symlink_to(jobs.ROOT)
    monkeypatch.setattr(jobs, "ROOT", tmp_path / "copy")
    for arguments, same in (elsewhere, planned("here")):
        assert not set(here) & set(arguments)
        assert same == facts
    assert str(tmp_path) not in json.dumps(facts)
    assert len({json.dumps(each) for each in facts}) == len(facts)


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_every_grid_sets_keys_that_its_config_has(name):
    grid = GRIDS[name]
    labels = [run.label for run in grid.runs]
    assert len(set(labels)) == len(labels)
    for place, run in enumerate(grid.runs):
        assert not run.after or run.after in labels[:place]
        config = jobs.load_config(run.config or grid.config)
        before = config.copy_and_resolve_references()
        config.update_from_flattened_dict({key: run.overrides[key] for key in run.overrides})
        assert (config != before) == bool(run.overrides)


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_rows_that_a_run_takes_can_be_compared_with_its_own(name):
    """As `run.take_rows` asks of them: the same samples, and evaluated on all its sets."""
    runs = {run.label: run for run in GRIDS[name].runs}
    for run in (run for run in runs.values() if run.after and not run.alone):
        config, lender = (jobs.load_config(each.config or GRIDS[name].config) for each in (run, runs[run.after]))
        config.update_from_flattened_dict(dict(run.overrides))
        lender.update_from_flattened_dict(dict(runs[run.after].overrides))
        sets = [set(each.evaluate.datasets or each.data.eval) for each in (config, lender)]
        assert sets[0] <= sets[1], run.label
        assert {key: settings_of(config).get(key) for key in COMPARABLE} == {
            key: settings_of(lender).get(key) for key in COMPARABLE
        }, run.label


def test_text_s_runs_take_as_many_steps():
    """iCoT's final_steps are all after cot_steps; the others' are those of the last stage."""
    totals = {}
    for run in GRIDS["text"].runs:
        config = jobs.load_config(GRIDS["text"].config)
        config.update_from_flattened_dict(run.overrides)
        check(config)
        imitate = config.imitate
        totals[run.label] = imitate.cot_steps + imitate.final_steps
        if imitate.recipe == "steps":
            totals[run.label] += imitate.stage_steps * imitate.max_latent_stage
    assert totals == dict.fromkeys(("cot_sft", "no_thought", "icot"), 15_500)


def test_ablations_are_factors_of_the_configs_own_values():
    config = jobs.load_config(GRIDS["ablations"].config)
    runs = {run.label: run.overrides for run in GRIDS["ablations"].runs}
    rate = "rl.optimizer.learning_rate"
    for label, factor in (("lr_third", 1 / 3), ("lr_x_3", 3), ("lr_x_10", 10)):
        assert runs[label][rate] == pytest.approx(factor * config.rl.optimizer.learning_rate)
    assert 4 * runs["batch_quarter"]["rl.batch_size"] == config.rl.batch_size


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the small config as the grid "tiny", whose runs are forked; `commands` has those of each run."""
    folder, commands = small_run.new_folder(tmp_path), []
    monkeypatch.setitem(GRIDS, "tiny", tiny_grid(folder))

    def run(command, **_):
        commands.append(command)
        done = small_run.run(*command[3:], folder=folder)
        return types.SimpleNamespace(returncode=done.status)

    monkeypatch.setattr(jobs, "subprocess", types.SimpleNamespace(run=run))
    return folder, commands


@pytest.mark.slow
def test_grid_is_run_once_and_compared(folder, capsys):
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
    assert list(found) == ["main", "again"]
    for label, figures in found.items():
        report = json.loads((out / label / "seed_0" / "report.json").read_text())
        assert figures["seeds"] == 1
        assert figures["means"]["acc"]["value"] == report["average"]["slpo"]["acc"]
        (entry,) = (
            entry
            for entry in report["differences"]
            if (entry["a"], entry["b"], entry["set"], entry["metric"]) == ("slpo", "cold_start", "average", "pass@1")
        )
        assert figures["differences"]["cold_start"]["pass@1"]["value"] == entry["difference"]
    assert {"slpo", "cold_start", "imitate"} <= {path.name for path in (out / "again/seed_0/eval").iterdir()}
    assert f"| again | 1 | {100 * found['again']['means']['acc']['value']:.2f} ± " in (out / "tiny.md").read_text()
    assert (out / "tiny.png").stat().st_size > 5_000

    assert reproduce.main(flags) == 0
    assert len(commands) == 2
    assert capsys.readouterr().out.count("finished before") == 2
    first = jobs.plan(GRIDS["tiny"], out, [], ["main"], None)
    assert [job.is_finished for job in first] == [True]
    assert not jobs.plan(GRIDS["tiny"], out, [], ["main"], 3)[0].is_finished  # another evaluation
    main, again, other = GRIDS["tiny"].runs
    runs = (main, dataclasses.replace(again, rows=("slpo",)), other)
    both = dataclasses.replace(GRIDS["tiny"], rows=("cold_start", "slpo"), runs=runs)
    assert list(comparison.compare(both, out)) == ["main, cold_start", "main, slpo", "again, slpo"]
    # A set that is lost is no reason to compare the others alone.
    next((out / "main/seed_0/eval/slpo").glob("*.jsonl")).unlink()
    assert not first[0].is_finished
    assert list(comparison.compare(GRIDS["tiny"], out)) == ["again"]
    assert "main/seed_0: left out, it was run with other settings or data, or its results" in capsys.readouterr().out
    assert reproduce.main(flags) == 0
    assert len(commands) == 3
    assert json.loads((out / "tiny.json").read_text()) == found


def test_data_that_changed_and_other_limits_are_other_runs(folder, capsys):
    """Not run again for nothing, and not compared with runs of other problems."""
    folder, _ = folder
    grid, out = GRIDS["tiny"], folder / "out"
    source = folder / "real.json"
    grid = dataclasses.replace(grid, runs=(Run("main", {"data.eval.real": str(source)}),))

    def job(limit=None):
        jobs._files_digest.cache_clear()
        return jobs.plan(grid, out, [], [], limit)[0]

    job().workdir.mkdir(parents=True)
    (job().workdir / jobs.DONE).write_text(json.dumps(job().finished_facts()))
    assert job().is_finished
    assert not job(limit=3).is_finished
    assert comparison.compare(grid, out, 3) == {}
    assert f"{out}/main/seed_0: left out, it was run with other settings or data" in capsys.readouterr().out
    source.write_text(source.read_text().replace("has 1 ", "has 9 "))
    assert not job().is_finished
    assert comparison.compare(grid, out) == {}


def test_a_run_that_fails_ends_with_one_line(folder, capsys, monkeypatch, tmp_path):
    def fails(command, stdout, **_):
        stdout.write("a long story\nerror: config.seed: no\n")
        return types.SimpleNamespace(returncode=2)

    monkeypatch.setattr(jobs, "subprocess", types.SimpleNamespace(run=fails))
    assert reproduce.main(["tiny", f"--workdir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/main/seed_0: its run ended with status 2 (error: config.seed: no); ")
    assert error.count("\n") == 1
    assert not (tmp_path / "main/seed_0" / jobs.DONE).exists()


def test_tables_have_a_line_a_label_and_say_what_excludes_zero():
    grid = Grid("", (), minus=("cold_start", "control"), metrics=("acc", "latent_steps"))
    figure = {"value": 0.02, "low": 0.01, "high": 0.03}
    below = {"value": -0.02, "low": -0.03, "high": 0.01}
    figures = {
        "row": "mine",
        "kind": "mine, longer",
        "seeds": 2,
        "means": {"acc": figure},
        "differences": {"cold_start": {"acc": figure, "latent_steps": figure | {"low": -1}}},
        "by_set": {
            "cold_start": {"acc": {"a": figure, "b": below, "c": figure | {"low": -1}}},
            "control": {"acc": {"a": below, "b": figure, "c": figure}},
        },
    }
    lines = comparison.markdown(grid, {"one": figures, "two": figures}).splitlines()
    assert lines.count("| mine, longer | cold_start | 4 (2) of 6 |  |") == 1
    assert lines.count("| mine, longer | control | 4 (4) of 6 |  |") == 1
    assert lines.count("| mine, longer | all of them | 2 (0) of 6 |  |") == 1
    assert lines.count("| one | 2 | 2.00 ± 1.00 |  |") == 1
    third = dataclasses.replace(grid, minus=(*grid.minus, "mine"))  # the row itself, which it can't be above
    assert "| mine, longer | all of them | 1 (0) of 3 |  |" in comparison.markdown(third, {"one": figures})
    third = dataclasses.replace(grid, minus=(*grid.minus, "lacking"))
    assert "all of them" not in comparison.markdown(third, {"one": figures})
    baseline = figures | {"differences": {"cold_start": {}}}
    assert list(comparison.shown(grid, {"base": baseline, "one": figures})) == ["one"]
    assert list(comparison.shown(grid, {"base": baseline})) == ["base"]
    assert lines.count("| two | 2 | **+2.00 [+1.00, +3.00]** | +0.02 [-1.00, +0.03] |") == 1
    assert not any("minus" in line for line in comparison.markdown(Grid("", (), minus=()), {}).splitlines())


@pytest.mark.parametrize("name", sorted(TIMINGS))
def test_timings_are_the_benchmarks_page_numbers_and_picture(name, tmp_path, monkeypatch, capsys):
    """Measured anew at every call; a bar's height is the parts' sum over the step that both sides are relative to."""
    timing, commands, bars = TIMINGS[name], [], []
    module = importlib.import_module(f"benchmarks.{timing.module}")
    own = [
        {"implementation": "slpo_jax", "passes": 4, "group": 8, "relative": 1.0, "step": {"median": 6.0}},
        {"implementation": "slpo_jax", "passes": 4, "group": 4, "relative": 0.5, "step": {"median": 3.0}},
    ]
    for row, seconds in zip(own, ([1.0, 2.0, 3.0, 0.0], [1.0, 1.0, 1.5, -0.5]), strict=True):
        row |= {part: {"median": x} for part, x in zip(timing.parts, seconds, strict=True)}
    paper = [module._row_of_the_paper(pair) for pair in ((4, 8), (4, 4))]

    def run(command, **_):
        commands.append(command)
        (tmp_path / "out" / f"{name}.json").write_text(json.dumps({"rows": own, "paper": paper}))
        return types.SimpleNamespace(returncode=len(commands) // 3, stdout="a page\n")

    monkeypatch.setattr(timings, "subprocess", types.SimpleNamespace(run=run, PIPE=None))
    drawn = timings.Figure.subplots

    def subplots(figure):
        axis = drawn(figure)
        bars.append(axis)
        return axis

    monkeypatch.setattr(timings.Figure, "subplots", subplots)
    for _ in range(2):
        assert reproduce.main([name, f"--workdir={tmp_path / 'out'}"]) == 0
    assert len(commands) == 2
    assert commands[0][1:3] == ["-m", f"benchmarks.{timing.module}"]
    module.parse(commands[0][3:])
    assert capsys.readouterr().out.count("a page") == 2
    assert (tmp_path / "out" / f"{name}.md").read_text() == "a page\n"
    assert (tmp_path / "out" / f"{name}.png").stat().st_size > 1000
    tops = {}
    for bar in bars[0].patches:
        centre = round(bar.get_x() + bar.get_width() / 2, 2)
        tops[centre] = max(tops.get(centre, 0.0), bar.get_y() + bar.get_height())
    assert tops == {-0.2: 1.0, 0.2: pytest.approx(1.0), 0.8: pytest.approx(3.5 / 6), 1.2: pytest.approx(0.676 / 1.13)}
    assert reproduce.main([name, f"--workdir={tmp_path / 'out'}"]) == 2
    assert f"benchmarks.{timing.module}: ended with status 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["luck"], "luck"),
        (["ablations", "--only=luck"], "--only: no run luck; give some of main, "),
        (["ablations", "--seeds=a"], "--seeds: a"),
        (["ablations", "--limit=0"], "--limit: 0"),
        (["cost", "--limit=1"], "--limit: cost has no runs"),
    ],
)
def test_bad_flags_end_with_one_line_and_status_2(flags, fault, capsys):
    assert reproduce.main(flags) == 2
    out, error = capsys.readouterr()
    assert (out, error.startswith("error: "), error.count("\n")) == ("", True, 1)
    assert fault in error


def _line(acc, pass_8):
    values = {"acc": acc, "pass@1": 0.01, "pass@8": pass_8, "pass@16": -0.02}
    return {"differences": {"cold_start": {name: {"value": value} for name, value in values.items()}}}


def test_curves_over_training_are_those_of_the_rows_that_are_compared(tmp_path):
    grid = tiny_grid(tmp_path, runs=(Run("a", rows=("one",)), Run("b", rows=("two",))), over_training=("length",))
    rows = [("imitate", 1, 9.0), ("one", 1, 3.0), ("one", 2, 5.0), ("two", 1, 8.0)]
    for seed, more, finished in ((0, 0.0, True), (1, 2.0, True), (2, 50.0, False)):
        folder = tmp_path / "a" / f"seed_{seed}"
        folder.mkdir(parents=True)
        lines = [json.dumps({"stage": stage, "step": step, "length": x + more}) for stage, step, x in rows]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        if finished:
            (folder / jobs.DONE).write_text("{}")
    found = over_training.curves(grid, tmp_path, "length")
    assert found == {"a": {1: [3.0, 5.0], 2: [5.0, 7.0]}}
    over_training.draw_curves(grid, tmp_path, ("length", "reward"), tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 5000
    over_training.draw_curves(grid, tmp_path, ("reward",), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_rates_are_the_best_by_the_mean_of_four_figures():
    tried = {1e-5: (0.04, 0.05), 3e-5: (0.06, 0.04), 1e-4: (0.05, 0.05)}  # the last two are equal
    line = "codi_gpt2, {}".format
    found = {
        line(TWELVE["variant"](name, rate)): _line(*(figures if name == "pass_at_k" else (0.0, 0.0)))
        for name in TWELVE["COMPARED"]
        for rate, figures in tried.items()
    }
    assert set(TWELVE["RATES"]) == set(tried)
    gains = rates.gains("twelve_rates", found)
    assert rates.choose(gains)["codi_gpt2"]["pass_at_k"] == 3e-5
    assert rates.choose(gains)["codi_gpt2"]["reward"] == 1e-5, "of equal ones the lowest"
    table = rates.markdown("twelve_rates", gains)
    assert "| codi_gpt2 | 1e-05 | 3e-05 | 1e-04 |\n" in table
    assert "\n| `pass_at_k` | +2.0 | **+2.2** | +2.2 |\n" in table
    last = line("pass_at_k_1e_04")
    broken = copy.deepcopy(found[last])
    broken["differences"]["cold_start"]["acc"]["value"] = float("nan")
    for damaged in (broken, {}, 3, {**found[last], "seeds": 7}):
        with pytest.raises(UserError, match=rf"twelve_rates\.json: {last} is damaged, or of other seeds; run launch/"):
            rates.gains("twelve_rates", {**found, last: damaged})
    del found[last]
    with pytest.raises(UserError, match=rf"lacks {last}; run launch/reproduce.py twelve_rates"):
        rates.gains("twelve_rates", found)
    one_alone = {line(TWELVE["variant"]("reward", rate)): found[line("reward_1e_05")] for rate in tried}
    assert set(rates.gains("twelve_rates", one_alone)["codi_gpt2"]) == {"reward"}, "each run may have some"
    with pytest.raises(UserError, match="holds none of its runs"):
        rates.gains("twelve_rates", {"codi_gpt9, x": found[line("reward_1e_05")]})


def test_what_is_wrong_in_the_rates_command_is_one_line(tmp_path, capsys):
    assert rates.main(["no_rates"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: argument name: invalid choice: 'no_rates'")
    assert err.count("\n") == 1
    assert rates.main([f"--workdir={tmp_path}"]) == 2
    assert f"; run launch/reproduce.py twelve_rates --workdir={tmp_path} first\n" in capsys.readouterr().err

"""Grids of runs: what is run, in which order and only once, and their comparison."""

import dataclasses
import json
import shutil
import types

import pytest
import rates
import reproduce
import small_run
from grids import GRIDS, TWELVE, Grid, Run

from slpo_jax.errors import UserError

# The same stage from the same start: its programs are compiled by then.
AGAIN = {"stages": ("rl", "evaluate"), "init": "{after}/checkpoints/cold_start"}


def tiny_grid(folder, **changes):
    runs = (Run("main"), Run("again", AGAIN, after="main"), Run("other", {}, seeds=(5,)))
    return Grid(
        **{"config": str(folder / "small.py"), "runs": runs, "seeds": (0,), "metrics": ("acc", "pass@1")} | changes
    )


def test_plan_names_every_run_once_with_what_it_comes_after(tmp_path):
    (tmp_path / "small.py").write_text(small_run.CONFIG)
    grid = tiny_grid(tmp_path, seeds=(0, 1))
    jobs = reproduce.plan(grid, tmp_path, [], [], None)
    assert [(job.label, job.seed) for job in jobs] == [
        ("main", 0),
        ("main", 1),
        ("again", 0),
        ("again", 1),
        ("other", 5),
    ]
    assert [(job.label, job.seed) for job in reproduce.plan(grid, tmp_path, [7], ["again"], None)] == [
        ("main", 7),
        ("again", 7),
    ]
    job = reproduce.plan(grid, tmp_path, [], ["again"], 4)[-1]
    assert {
        f"--config={tmp_path}/small.py",
        f"--workdir={tmp_path}/again/seed_1",
        "--config.seed=1",
        "--config.evaluate.limit=4",
        "--config.stages=('rl', 'evaluate')",
        f"--config.init={tmp_path}/main/seed_1/checkpoints/cold_start",
        f"--config.evaluate.rows_from={tmp_path}/main/seed_1",
    } <= set(job.arguments)


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_every_grid_sets_keys_that_its_config_has(name):
    grid = GRIDS[name]
    labels = [run.label for run in grid.runs]
    assert len(set(labels)) == len(labels)
    for place, run in enumerate(grid.runs):
        assert not run.after or run.after in labels[:place]
        config = reproduce.load_config(grid.config)
        before = config.copy_and_resolve_references()
        config.update_from_flattened_dict({key: run.overrides[key] for key in run.overrides})
        assert (config != before) == bool(run.overrides)


def test_ablations_are_factors_of_the_configs_own_values():
    config = reproduce.load_config(GRIDS["ablations"].config)
    runs = {run.label: run.overrides for run in GRIDS["ablations"].runs}
    rate = "rl.optimizer.learning_rate"
    for label, factor in (("lr_third", 1 / 3), ("lr_x_3", 3), ("lr_x_10", 10)):
        assert runs[label][rate] == pytest.approx(factor * config.rl.optimizer.learning_rate)
    assert 4 * runs["batch_quarter"]["rl.batch_size"] == config.rl.batch_size


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the small config as the grid "tiny", whose runs are forked; `commands` has those of each run."""
    folder, commands = small_run.new_folder(tmp_path), []
    monkeypatch.setitem(reproduce.GRIDS, "tiny", tiny_grid(folder))

    def run(command, **_):
        commands.append(command)
        done = small_run.run(*command[3:], folder=folder)
        return types.SimpleNamespace(returncode=done.status)

    monkeypatch.setattr(reproduce, "subprocess", types.SimpleNamespace(run=run))
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
    found = json.loads((out / "comparison.json").read_text())
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
        assert figures["differences"]["pass@1"]["value"] == entry["difference"]
    assert {"slpo", "cold_start", "imitate"} <= {path.name for path in (out / "again/seed_0/eval").iterdir()}
    assert (
        f"| again | 1 | {100 * found['again']['means']['acc']['value']:.2f} ± " in (out / "comparison.md").read_text()
    )
    assert (out / "comparison.png").stat().st_size > 5_000

    assert reproduce.main(flags) == 0
    assert len(commands) == 2
    assert capsys.readouterr().out.count("finished before") == 2
    first = reproduce.plan(reproduce.GRIDS["tiny"], out, [], ["main"], None)
    assert [job.is_finished for job in first] == [True]
    assert not reproduce.plan(reproduce.GRIDS["tiny"], out, [], ["main"], 3)[0].is_finished  # another evaluation


def test_data_that_changed_and_other_limits_are_other_runs(folder, capsys):
    """Not run again for nothing, and not compared with runs of other problems."""
    folder, _ = folder
    grid, out = reproduce.GRIDS["tiny"], folder / "out"
    source = folder / "real.json"
    grid = dataclasses.replace(grid, runs=(Run("main", {"data.eval.real": str(source)}),))

    def job(limit=None):
        reproduce._files_digest.cache_clear()
        return reproduce.plan(grid, out, [], [], limit)[0]

    job().workdir.mkdir(parents=True)
    (job().workdir / reproduce.DONE).write_text(json.dumps(job().facts))
    assert job().is_finished
    assert not job(limit=3).is_finished
    assert reproduce.compare(grid, out, 3) == {}
    assert f"{out}/main/seed_0: left out, it was run with other settings or data" in capsys.readouterr().out
    source.write_text(source.read_text().replace("has 1 ", "has 9 "))
    assert not job().is_finished
    assert reproduce.compare(grid, out) == {}


def test_a_run_that_fails_ends_with_one_line(folder, capsys, monkeypatch, tmp_path):
    def fails(command, stdout, **_):
        stdout.write("a long story\nerror: config.seed: no\n")
        return types.SimpleNamespace(returncode=2)

    monkeypatch.setattr(reproduce, "subprocess", types.SimpleNamespace(run=fails))
    assert reproduce.main(["tiny", f"--workdir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/main/seed_0: its run ended with status 2 (error: config.seed: no); ")
    assert error.count("\n") == 1
    assert not (tmp_path / "main/seed_0" / reproduce.DONE).exists()


def test_tables_have_a_line_a_label_and_say_what_excludes_zero():
    grid = Grid("", (), metrics=("acc", "latent_steps"))
    figure = {"value": 0.02, "low": 0.01, "high": 0.03}
    figures = {
        "seeds": 2,
        "means": {"acc": figure},
        "differences": {"acc": figure, "latent_steps": figure | {"low": -1}},
    }
    lines = reproduce.markdown(grid, {"one": figures, "two": figures}).splitlines()
    assert lines.count("| one | 2 | 2.00 ± 1.00 |  |") == 1
    assert lines.count("| two | 2 | **+2.00 [+1.00, +3.00]** | +0.02 [-1.00, +0.03] |") == 1
    assert not any("minus" in line for line in reproduce.markdown(Grid("", (), minus=""), {}).splitlines())


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["luck"], "luck"),
        (["ablations", "--only=luck"], "--only: no run luck; give some of main, "),
        (["ablations", "--seeds=a"], "--seeds: a"),
        (["ablations", "--limit=0"], "--limit: 0"),
    ],
)
def test_bad_flags_end_with_one_line_and_status_2(flags, fault, capsys):
    assert reproduce.main(flags) == 2
    out, error = capsys.readouterr()
    assert (out, error.startswith("error: "), error.count("\n")) == ("", True, 1)
    assert fault in error


def _line(acc, pass_8):
    values = {"acc": acc, "pass@1": 0.4, "pass@8": pass_8, "pass@16": 0.6}
    return {"means": {name: {"value": value} for name, value in values.items()}}


def test_rates_are_the_best_by_the_mean_of_four_figures():
    tried = {1e-5: (0.4, 0.5), 3e-5: (0.6, 0.4), 1e-4: (0.5, 0.5)}  # the last two are equal
    found = {f"codi_llama, {TWELVE['variant']('pass_at_k', rate)}": _line(*figures) for rate, figures in tried.items()}
    assert set(TWELVE["RATES"]) == set(tried)
    assert rates.choose(found) == {"codi_llama": {"pass_at_k": 3e-5}}
    found.popitem()
    with pytest.raises(UserError, match=r"lacks codi_llama, pass_at_k_1e-04; run launch/reproduce.py twelve_rates"):
        rates.choose(found)

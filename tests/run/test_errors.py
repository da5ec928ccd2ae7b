"""Bad input ends in status 2 and one line with the key or file and the remedy, and breaks nothing for the next run."""

import json
import socket

import pytest
from refused import refusal
from same_run import differences
from small_run import new_folder, run

from slpo_jax.config import Config
from slpo_jax.errors import UserError
from slpo_jax.io.workdir import Workdir
from slpo_jax.run.sources import load_set
from slpo_jax.run.validate import check_prompts

ONE_STAGE = "--config.stages=('imitate',)"
FEW_STEPS = [
    "--config.imitate.cot_steps=2", "--config.imitate.final_steps=2", "--config.imitate.control=False",
    "--config.evaluate.samples=0",
]  # fmt: skip
GOOD = '{"question": "Tom has 1 pens . How many now ?", "steps": ["1 + 2 = 3"], "answer": "3"}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_folder(tmp_path_factory.mktemp("errors"))


def _error_of(done) -> str:
    """The one line, after checks that hold for every error."""
    assert done.status == 2, done.stderr
    *before, line = done.stderr.splitlines()  # the header, and what was done before
    assert "error" not in "".join(before)
    assert line.startswith("error: ")
    assert len(line) < 400
    assert "Traceback" not in done.stderr + done.stdout
    return line.removeprefix("error: ")


def test_a_workdir_that_another_run_works_in(folder):
    """Refused while the other lives, whose files stay as they are; whoever comes after it is let in."""
    workdir = Workdir(folder / "work" / "shared")
    workdir.root.mkdir(parents=True)
    with workdir.in_use():
        line = refusal("train", "small.py", "--workdir=work/shared", folder=folder)
        assert line.startswith("--workdir=work/shared: another run is at work in it")
        assert [path.name for path in workdir.root.iterdir()] == [workdir.lock.name]
    with workdir.in_use():
        pass


def test_a_coordinator_s_port_that_another_program_has(folder):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        cluster = [f"--coordinator=localhost:{port}", "--processes=2", "--process=0"]
        line = refusal("train", "small.py", *cluster, folder=folder)
    assert line.startswith(f"--coordinator: port {port} can't be had (")


def test_long_problem_of_slots_that_the_positions_cut():
    """A larger bucket would be cut as well."""
    prompts = [[0] * 12, [0] * 22]
    with pytest.raises(UserError, match=r"22 tokens, more than the 12 positions .*; lower config.max_latents or"):
        check_prompts("config.data.train", prompts, 12, is_cut=True)
    with pytest.raises(UserError, match=r"22 tokens, more than the 20 of config\.prompt_slots; add a larger bucket"):
        check_prompts("config.data.train", prompts, 20, is_cut=False)


@pytest.mark.slow
def test_debug_shows_where(folder):
    done = run("--config=small.py", "--workdir=work/debug", "--config.rl.group=1", "--debug", folder=folder)
    assert done.status != 0
    assert "Traceback" in done.stderr
    assert "config.rl.group" in done.stderr


@pytest.mark.slow
def test_a_failed_run_binds_nobody(folder):
    """The right command, in the workdir in which the wrong one failed, begins as in a new one."""
    for wrong in ("--config.imitate.micro_batches=3", "--config.data.train=nowhere.jsonl"):
        _error_of(run("--config=small.py", "--workdir=work/again", wrong, folder=folder))
    done = run("--config=small.py", "--workdir=work/again", ONE_STAGE, *FEW_STEPS, folder=folder)
    assert done.status == 0, done.stderr
    before = (folder / "work" / "again" / "config.json").read_text()
    # Nor does a wrong one afterwards do harm.
    wrong = run("--config=small.py", "--workdir=work/again", ONE_STAGE, *FEW_STEPS, "--config.seed=3", folder=folder)
    assert "config.seed: " in _error_of(wrong)
    assert (folder / "work" / "again" / "config.json").read_text() == before


@pytest.mark.slow
def test_a_set_of_one_s_own_is_evaluated(folder):
    """Its name is not in the config file; both ways to write a flag."""
    (folder / "mine.jsonl").write_text(GOOD * 2)
    both = "--config.stages=('imitate','evaluate')"
    sets = ["--config.data.eval.mine=mine.jsonl", "--config.data.eval.other", "mine.jsonl"]
    chosen = "--config.evaluate.datasets=('mine','other')"
    done = run("--config=small.py", "--workdir=work/mine", both, *FEW_STEPS, *sets, chosen, folder=folder)
    assert done.status == 0, done.stderr
    report = json.loads((folder / "work" / "mine" / "report.json").read_text())
    assert {name: figures["n"] for name, figures in report["eval"]["imitate"].items()} == {"mine": 2, "other": 2}
    config = json.loads((folder / "work" / "mine" / "config.json").read_text())
    assert config["data"]["eval"]["mine"] == "mine.jsonl"
    assert "\r" not in done.stderr  # a log file gets lines
    lines = done.stderr.splitlines()
    assert [number for number, line in enumerate(lines) if "workdir work/mine" in line] == [0]
    assert "model: coconut_gpt2, 5,265 parameters" in lines
    assert "imitate: begins at step 0 of 4" in lines
    assert any(line.startswith("imitate: 4/4 steps") for line in lines)
    assert [line for line in lines if line.startswith("evaluate: ")]
    said = done.stderr.index("config.data.train: 136 problems, 1.0 steps each, answers are numbers")
    assert said < done.stderr.index("imitate: ")


@pytest.mark.slow
def test_a_finished_stage_needs_no_training_data(folder):
    """A workdir can be evaluated where the data that it was trained on is not."""
    copied = folder / "copied.jsonl"
    copied.write_text((folder / "train.jsonl").read_text())
    flags = ["--config=small.py", "--workdir=work/moved", *FEW_STEPS, "--config.data.train=copied.jsonl"]
    assert run(*flags, ONE_STAGE, folder=folder).status == 0
    copied.unlink()
    done = run(*flags, "--config.stages=('imitate','evaluate')", folder=folder)
    assert done.status == 0, done.stderr


FILLING = """
import pathlib
import resource
import threading
import time


def _fill():
    while not pathlib.Path("work/checkpoints/imitate/2/checksums.json").exists():
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


if pathlib.Path("fills").exists():
    threading.Thread(target=_fill, daemon=True).start()
"""


@pytest.mark.slow
def test_a_disk_that_fills_during_a_save(tmp_path):
    """No file can grow beyond some bytes any more after the first checkpoint; it stays, and is gone on from."""
    folder, flags = new_folder(tmp_path), ["--config.imitate.control=False", "--config.model.n_embd=64", ONE_STAGE]
    flags += ["--config.log_every=3", "--config.checkpoint_every=2", "--config.imitate.cot_steps=0"]
    with (folder / "small.py").open("a") as file:
        file.write(FILLING)
    (folder / "fills").touch()
    error = _error_of(run("--config=small.py", "--workdir=work", *flags, folder=folder))
    assert error.endswith(
        "work/checkpoints/imitate: the checkpoint can't be written (File too large); make room, and the same command "
        "goes on from the one before"
    )
    assert Workdir(folder / "work").stage("imitate").steps
    (folder / "fills").unlink()
    for workdir in ("work", "whole"):
        assert run("--config=small.py", f"--workdir={workdir}", *flags, folder=folder).status == 0
    assert differences(folder / "work", folder / "whole") == []


def test_no_records():
    with pytest.raises(UserError, match=r"^problems: is empty; give at least one record$"):
        load_set(Config().data, "problems", [])

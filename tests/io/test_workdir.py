"""The paths of a workdir against what a run leaves there."""

from pathlib import Path

import pytest

from slpo_jax.io.workdir import StageFolder, Workdir
from small_run import finished_run


def _known(workdir: Workdir) -> set[Path]:
    """Every path that a workdir has a name for."""
    paths = {
        workdir.config,
        workdir.metrics,
        workdir.report_json,
        workdir.report_md,
        workdir.lock,
    }
    paths |= {workdir.report_html, workdir.trackers, workdir.times}
    for stage in workdir.finished_stages():
        folder = workdir.stage_folder(stage)
        paths |= {
            folder.config,
            folder.inputs,
            folder.finished,
            folder.rule,
            workdir.digest(stage),
        }
    for row, name in [
        *workdir.list_evaluated(),
        *(("", name) for _, name in workdir.list_evaluated()),
    ]:
        files = workdir.set_files(name, row)
        paths |= {files.records, files.latents, files.manifest, files.thoughts}
    return paths | {workdir.row_facts(row) for row, _ in workdir.list_evaluated()}


@pytest.mark.slow
def test_a_run_leaves_nothing_that_has_no_name():
    workdir = Workdir(finished_run() / "work")
    folders = {workdir.tensorboard, workdir.reasoner}
    stages = [*map(workdir.stage_folder, workdir.finished_stages())]
    folders |= {stage.path / str(step) for stage in stages for step in stage.steps}
    assert all(folder.is_dir() for folder in folders)
    files = {
        path
        for path in workdir.root.rglob("*")
        if path.is_file() and not folders & set(path.parents)
    }
    assert files <= _known(workdir)
    assert {
        workdir.config,
        workdir.metrics,
        workdir.report_md,
        workdir.stage_folder("slpo").finished,
    } <= files
    assert ("slpo", "real") in workdir.list_evaluated()


def test_a_checkpoint_knows_the_run_around_it():
    stage = StageFolder(Path("work/checkpoints/slpo"))
    assert (
        StageFolder.of(stage.path).path
        == StageFolder.of(stage.path / "40").path
        == stage.path
    )
    assert (stage.name, str(stage.workdir)) == ("slpo", "work")


def test_steps_are_numbers_and_ascend(tmp_path):
    for name in ("9", "10", "reasoner", "10.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
    stage = StageFolder(tmp_path)
    assert stage.steps == [9, 10]
    assert not stage.is_finished
    stage.finished.write_text("10\n")
    assert stage.is_finished

"""What a checkpoint is: ours and others', asked once."""

import json
import re
import shutil

import pytest
from safetensors.numpy import load_file

import slpo_jax as slpo
from asked import RUN, T, edit, workdir
from slpo_jax.api.conversion import export_checkpoint, import_checkpoint
from slpo_jax.checkpoints import saved_config
from slpo_jax.checkpoints.external import ExternalCheckpoint
from slpo_jax.checkpoints.identity import NativeCheckpoint, identify, newest_checkpoint
from slpo_jax.checkpoints.saved_config import config_of, stopping_of
from slpo_jax.errors import UserError
from slpo_jax.evaluation.report_rows import Row, write_row
from slpo_jax.io import orbax
from slpo_jax.io import workdir as workdirs
from slpo_jax.io.workdir import Workdir


@pytest.fixture(scope="module", params=list(RUN))
def case(request, tmp_path_factory):
    """(reasoner, its workdir, the export of its cold start)."""
    folder = tmp_path_factory.mktemp(request.param)
    work = workdir(request.param, folder / "work")
    export_checkpoint(work / "checkpoints" / "cold_start", folder / "exported")
    return request.param, work, folder / "exported"


def test_ours_and_the_run_around_it(case):
    reasoner, work, _ = case
    found = identify(str(work))
    assert found.reasoner == reasoner
    folder = found.stage_folder
    assert (folder.workdir.root, folder.path) == (
        work,
        Workdir(work).stage_folder("cold_start").path,
    )
    assert isinstance(found, NativeCheckpoint)
    assert (found.gate_hidden, found.gate_trained) == (0, True)
    assert len(found.tokenizer()) == found.description.model.vocab_size
    before = identify(str(work / "checkpoints" / "imitate"))
    assert (before.gate_hidden, before.gate_trained) == (0, False)
    said = folder.config.read_text()
    edit(folder.config, gate={"enabled": False})  # so it was not used
    assert not identify(str(work)).gate_trained
    folder.config.write_text(said)
    assert (
        identify(str(work / "checkpoints" / "imitate" / "0")).stage_folder.path
        == before.stage_folder.path
    )


def test_parameters_are_hashed_once_and_settings_read_once(case, monkeypatch):
    """On the way from a workdir to a reasoner."""
    calls = []

    def count(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given: calls.append(name) or function(*given)
        )

    count(orbax, "damage")
    count(workdirs, "read_json")  # the stage's config.json
    count(saved_config, "read_rule")
    slpo.load(case[1] / "checkpoints" / "imitate")
    assert sorted(calls) == ["damage", "read_json", "read_rule"]


def test_of_several_objectives_the_last_named_is_the_newest(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"rl": {"objectives": ["slpo", "exact"]}})
    )
    for stage in ("cold_start", "slpo", "exact"):
        (tmp_path / "checkpoints" / stage / "5" / "params").mkdir(parents=True)
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoints" / "exact")


@pytest.mark.parametrize(
    ("finished", "unfinished", "newest", "said"),
    [
        ("imitate cold_start slpo exact", "", "exact", ""),
        ("imitate cold_start slpo", "exact", "slpo", "exact is not finished"),
        ("imitate cold_start", "exact slpo", "cold_start", "exact is not finished"),
        ("imitate", "cold_start", "imitate", "cold_start is not finished"),
        ("imitate cold_start grpo", "exact", "grpo", "exact is not finished"),
        (
            "imitate cold_start grpo",
            "",
            "grpo",
            "what .*config.json names is not there",
        ),
        ("imitate cold_start", "grpo", "cold_start", ""),
        ("", "imitate slpo", "slpo", ""),
    ],
)
def test_what_is_finished_is_newer_than_what_is_not(
    tmp_path, warnings, finished, unfinished, newest, said
):
    """The config names slpo and exact; grpo is of an earlier one. An unfinished one may not be a reasoner's yet."""
    (tmp_path / "config.json").write_text(
        json.dumps({"rl": {"objectives": ["slpo", "exact"]}})
    )
    work = Workdir(tmp_path)
    for name in (*finished.split(), *unfinished.split()):
        (work.stage_folder(name).path / "5" / "params").mkdir(parents=True)
        if name in finished.split():
            work.stage_folder(name).finished.write_text("5\n")
    assert newest_checkpoint(str(tmp_path)) == str(work.stage_folder(newest).path)
    assert len(warnings) == bool(said)
    if said:
        taken = work.stage_folder(newest).path
        assert re.match(
            rf"{taken}: .*{said}, so this is taken; another is given as ", warnings[0]
        )


def test_an_export_and_what_is_left_without_our_files(case, tmp_path):
    reasoner, _, exported = case
    found = identify(str(exported))
    assert (type(found), found.reasoner, found.gate_trained, found.stage_folder) == (
        ExternalCheckpoint,
        reasoner,
        True,
        None,
    )
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in exported.glob("*.*"):
        if not file.name.startswith("reasoner."):
            (plain / file.name).write_bytes(file.read_bytes())
    found = identify(str(plain))
    assert (found.architecture, found.description) == (None, None)
    assert found.reasoner == f"coconut_{reasoner.partition('_')[2]}"


def test_what_lies_near_an_import_is_not_its_run(case, tmp_path):
    reasoner, _, exported = case
    imported = tmp_path / "near" / "imported"
    import_checkpoint(exported, imported)
    edit(tmp_path / "config.json", max_latents=T + 5)
    write_row(
        tmp_path, Row("imported", "", stage="imported", stopping="threshold", rule=0.75)
    )
    found = identify(str(imported))
    assert (found.stage_folder.workdir, found.gate_trained) == (None, True)
    config = config_of(found)
    assert (config.max_latents, stopping_of(config, found)) == (
        T,
        ("threshold", RUN[reasoner]),
    )  # the export's own
    (imported / "reasoner" / "reasoner.json").unlink()
    with pytest.raises(UserError, match=r"reasoner/reasoner\.json"):
        identify(str(imported))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"vocab_size": 999},
            r"tensor \S+ has shape \[\d+, \d+\], the model's config says \[",
        ),
        (
            {"n_layer": 1},
            r"has h_1/attn/c_attn/bias too, which is no part of the model",
        ),
        ({"n_layer": 3}, r"tensor transformer\.h\.2\.\S+ is missing"),
    ],
)
def test_an_edited_config_is_not_exported(case, tmp_path, changes, part):
    _, work, _ = case
    shutil.copytree(work, tmp_path / "work")
    edit(tmp_path / "work" / "checkpoints" / "reasoner" / "config.json", **changes)
    with pytest.raises(UserError, match=f"cold_start: {part}"):
        export_checkpoint(
            tmp_path / "work" / "checkpoints" / "cold_start", tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_without_a_gate_is_exported_without_one(case, tmp_path):
    """Its parameters have a random one, as all have."""
    _, work, _ = case
    shutil.copytree(work, tmp_path / "work")
    stages = tmp_path / "work" / "checkpoints"
    for file in (tmp_path / "work" / "config.json", *stages.glob("*/config.json")):
        gate = json.loads(file.read_text()).get("gate")
        if gate and file.parent != stages / "reasoner":
            edit(file, gate=gate | {"enabled": False})
    stage = stages / "cold_start"
    written = export_checkpoint(stage, tmp_path / "command").description
    slpo.load(stage).export(tmp_path / "call")
    assert (written.gate, written.gate_trained) == (None, False)
    for folder in (tmp_path / "command", tmp_path / "call"):
        assert json.loads((folder / "reasoner.json").read_text())["gate"] is None
        assert "gate" not in (folder / "README.md").read_text()
        side = folder / "reasoner.safetensors"
        assert not (
            side.exists()
            and [name for name in load_file(side) if name.startswith("gate.")]
        )
        assert slpo.load(folder).solver.stopping == "length"


@pytest.mark.parametrize("lora_alpha", [-3.0, float("nan")])
def test_an_update_s_scale_is_a_positive_number(tmp_path, lora_alpha):
    with pytest.raises(UserError, match=rf"^config\.lora_alpha: {lora_alpha} "):
        identify(str(tmp_path), lora_alpha=lora_alpha)

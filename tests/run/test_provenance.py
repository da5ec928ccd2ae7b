"""What a stage is bound to: its settings, the bytes of its data, and the start that it was trained from."""

import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from small_run import load_config, write_problems

from slpo_jax.config import Config, read_config
from slpo_jax.config.presets import objective_variant
from slpo_jax.config.sections import changed, values
from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten
from slpo_jax.io.orbax import save_params
from slpo_jax.policy.latent_policies import LATENT_POLICIES
from slpo_jax.run.experiment import build
from slpo_jax.run.plan import check_stages, run_stages
from slpo_jax.run.provenance import check_starts, ensure_manifest, evaluated_settings, settings_of, starting_stage
from slpo_jax.run.rows import reported_settings
from slpo_jax.training.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("cpu_devices")
ORDER = ("imitate", "imitate_control", "cold_start", "slpo")


class Workdir:
    """A workdir with every stage finished, of parameters that nobody asks for."""

    def __init__(self, folder):
        self.folder, self.work = folder, folder / "work"
        write_problems(folder)
        for stage in ORDER:
            self.train(stage)

    def experiment(self, **changes):
        return build(read_config(self.config(**changes)), self.work)

    def config(self, **changes):
        config = load_config()
        config.data.update(train=str(self.folder / "train.jsonl"), valid=str(self.folder / "valid.txt"))
        config.data.eval.real = str(self.folder / "real.json")
        config.update_from_flattened_dict(changes)
        return config

    def train(self, stage, **changes):
        experiment = self.experiment(**changes)
        folder = experiment.workdir.stage(stage)
        shutil.rmtree(folder.path, ignore_errors=True)
        ensure_manifest(experiment, stage)
        save_params(folder.path, {"reasoner": {"w": jnp.ones(2)}})
        folder.finished.write_text("0\n")

    def error(self, key, **changes):
        """The one line of a run that is refused before its first stage."""
        with pytest.raises(UserError, match=f"^{key}: ") as raised:
            check_stages(self.experiment(**changes))
        assert "delete" in str(raised.value) or "set it back" in str(raised.value)
        return str(raised.value)

    def delete(self, stage):
        shutil.rmtree(self.work / "checkpoints" / stage)


@pytest.fixture
def run(tmp_path):
    return Workdir(tmp_path)


def _path(run, stage):
    return f"{re.escape(str(run.work))}/checkpoints/{stage}"


def test_the_same_command_again_is_fine(run):
    check_stages(run.experiment())
    check_stages(run.experiment(stages=("evaluate",)))


@pytest.mark.parametrize("key", ["train", "valid"])
def test_a_data_file_that_changed_under_its_name(run, key):
    path = run.folder / {"train": "train.jsonl", "valid": "valid.txt"}[key]
    before = path.read_bytes()
    path.write_bytes(before + before.splitlines(keepends=True)[0])
    assert str(path) in run.error(f"config.data.{key}")
    check_stages(run.experiment(stages=("evaluate",)))  # which trains nothing
    path.write_bytes(before)
    check_stages(run.experiment())


def test_a_stage_trained_again_with_other_settings_unbinds_what_was_made_of_it(run):
    again = {"imitate.final_steps": 7, "imitate.control": False}
    run.delete("imitate_control")
    run.train("imitate", **again)
    for stages in (("cold_start",), ("evaluate",), ("imitate", "cold_start", "rl", "evaluate")):
        error = run.error(_path(run, "cold_start"), stages=stages, **again)
        assert "began from another imitate than is there now" in error
    run.train("cold_start", **again)
    # The objective's start is bound to its own start in turn.
    assert "began from another cold_start" in run.error(_path(run, "slpo"), **again)
    run.train("slpo", **again)
    check_stages(run.experiment(**again))


def test_a_stage_that_is_to_be_trained_again_counts_as_what_it_will_be(run):
    run.delete("imitate")
    check_stages(run.experiment())
    run.delete("imitate_control")
    error = run.error(_path(run, "cold_start"), **{"imitate.final_steps": 7, "imitate.control": False})
    assert "began from another imitate" in error


def test_a_start_that_is_gone_binds_nobody(run):
    """What was made of it is there."""
    run.delete("imitate")
    check_stages(run.experiment(stages=("rl", "evaluate")))


def test_a_start_that_was_not_there_when_the_stage_began(tmp_path):
    folder = tmp_path / "late"
    folder.mkdir()
    run = Workdir(folder)
    run.delete("cold_start")
    run.train("slpo", stages=("rl",))
    facts = json.loads((run.work / "checkpoints/slpo/config.json").read_text())
    assert facts["start"]["stage"] == "imitate"
    assert "began from imitate, and would now from cold_start" in run.error(_path(run, "slpo"))


def test_files_of_the_first_start_that_changed(run, tmp_path):
    init = tmp_path / "other" / "checkpoints" / "imitate"
    shutil.copytree(run.work / "checkpoints", init.parent)
    run.delete("imitate")
    changes = {"init": str(init), "stages": ("cold_start",)}
    for stage in ("imitate_control", "cold_start", "slpo"):
        run.delete(stage)
    experiment = run.experiment(**changes)
    assert starting_stage(experiment, "cold_start") == ""
    run.train("cold_start", **changes)
    check_stages(run.experiment(**changes))
    shutil.rmtree(init / "0")
    save_params(init, {"reasoner": {"w": jnp.zeros(2)}})
    assert "began from another config.init" in run.error(_path(run, "cold_start"), **changes)
    with pytest.raises(UserError, match=r"config\.init"):
        check_starts(run.experiment(**changes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ('{"seed": ', "is no JSON .*"),
        ('{"start": null}', "'start' is no object"),
        ('{"files": null}', "'files' is no object"),
    ],
)
def test_facts_that_are_lost_or_damaged_name_the_folder_to_delete(run, text, said):
    """Nothing else says what the checkpoint was trained with, and the next run would write down its own."""
    path = run.work / "checkpoints" / "cold_start" / "config.json"
    path.unlink() if text is None else path.write_text(text)
    for changes in ({}, {"stages": ("evaluate",)}):
        with pytest.raises(UserError, match=f"config.json: {said}.*; delete {_path(run, 'cold_start')}"):
            check_stages(run.experiment(**changes))


def _text(name="gumbel", **settings):
    changes = {"reasoner": "text_gpt2", "gate.enabled": False, "imitate.c_thought": 0, "dropout.rate": 0.0}
    settings = {f"latent_policy.{name}.{key}": value for key, value in settings.items()}
    return changes | {"imitate.control": False, "rl.objectives": ("exact",), "latent_policy.name": name} | settings


def test_imitation_is_bound_to_no_latent_policy_that_it_doesn_t_use(run):
    """A text's has no latents, so any latent policy may follow, but for one whose parameters are saved beside."""
    for stage in ORDER:
        run.delete(stage)
    imitation, both = {"stages": ("imitate",)}, {"stages": ("imitate", "rl")}
    run.train("imitate", **_text(tau=0.5), **imitation)
    run.train("exact", **_text(tau=0.5), **both)
    check_stages(run.experiment(**_text(tau=0.5), **both))
    check_stages(run.experiment(**_text(tau=0.7), **imitation))
    check_stages(run.experiment(**_text("noisy_soft"), **imitation))
    assert "stage exact was run with" in run.error(r"config\.latent_policy\.gumbel\.tau", **_text(tau=0.7), **both)
    run.error(r"config\.latent_policy\.name", **_text("hybrid"), **imitation)
    run.train("imitate", **_text("hybrid"), **imitation)
    run.error(r"config\.latent_policy\.hybrid\.r_min", **_text("hybrid", r_min=0.9), **imitation)
    run.error(r"config\.latent_policy\.name", **_text(), **imitation)


@pytest.mark.parametrize(
    "changes",
    [
        {"imitate.micro_batches": 2, "imitate.icot.tokens_per_epoch": 3},
        {"imitate.control": False},
        {"rl.capacities": ((0.5, 0.5), (1.0, 1.0))},
        {"model.scan_layers": True, "model.remat": True},
    ],
)
def test_what_changes_no_number_may_change(run, changes):
    """As docs/configuration.md lists it."""
    changed = run.config(**changes)
    assert changed.to_json_best_effort() != run.config().to_json_best_effort()
    check_stages(run.experiment(**changes))


def test_data_may_lie_elsewhere(run, tmp_path):
    """Files of the same bytes are the same data, wherever they are; a name of no file is what it says."""
    for stage in ORDER:
        run.delete(stage)
    start = {"stages": ("imitate",)}
    run.train("imitate", **start)
    moved = shutil.copy(run.folder / "train.jsonl", tmp_path / "moved.jsonl")
    check_stages(run.experiment(**start, **{"data.train": str(moved)}))
    run.error(r"config\.data\.train", **start, **{"data.train": "synthetic:train"})
    with Path(moved).open("a") as file:
        file.write("\n")
    assert "has changed since" in run.error(r"config\.data\.train", **start, **{"data.train": str(moved)})


@pytest.mark.parametrize(
    ("own", "shared"),
    [
        ({"learning_rate": 0.25}, {"rl.optimizer.learning_rate": 0.5}),
        ({"schedule": "cosine"}, {"rl.optimizer.schedule": "linear"}),
        ({"steps": 3}, {"rl.steps": 77}),
    ],
)
def test_an_objective_does_not_care_for_what_it_has_of_its_own(run, own, shared):
    for stage in ORDER:
        run.delete(stage)
    ((name, value),) = own.items()
    (key,), mine = shared, {f"objective.exact.{name}": value}
    run.train("exact", **_text(), stages=("rl",))
    run.error(rf"config\.{key}", **_text(), stages=("rl",), **shared)
    run.train("exact", **_text(), stages=("rl",), **mine)
    check_stages(run.experiment(**_text(), stages=("rl",), **mine, **shared))
    run.error(rf"config\.objective\.exact\.{name}", **_text(), stages=("rl",), **shared)


def test_a_report_names_what_is_not_at_its_default(run):
    config = run.config(**{"rl.steps": 7})
    objective_variant(config, "mine", "grpo", clip=0.5)
    config.rl.objectives = ("mine",)
    shown = reported_settings(settings_of(read_config(config), "mine"))
    assert {key: value for key, value in shown.items() if key.startswith(("objective.", "rl.s", "seed", "gate"))} == {
        "seed": 0, "objective.mine.kind": "grpo", "objective.mine.clip": 0.5, "rl.steps": 7
    }  # fmt: skip


def test_an_objective_after_another_depends_on_it(run):
    """On what it was trained with, whether it is there, unfinished, or to be trained again."""
    two = {"rl.objectives": ("slpo", "answer_only"), "objective.answer_only.after": "slpo", "stages": ("rl",)}
    experiment = run.experiment(**two)
    assert (starting_stage(experiment, "slpo"), starting_stage(experiment, "answer_only")) == ("cold_start", "slpo")
    run.train("answer_only", **two)
    check_stages(run.experiment(**two))
    check_stages(run.experiment(**two | {"rl.objectives": ("answer_only",)}))
    run.error(r"config\.objective\.answer_only\.after", **two | {"objective.answer_only.after": ""})
    run.delete("slpo")
    check_stages(run.experiment(**two))
    check_stages(run.experiment(stages=("evaluate",)))
    other = two | {"objective.slpo.learning_rate": 0.25}
    assert "began from another slpo" in run.error(_path(run, "answer_only"), **other)
    run.train("slpo", **other | {"rl.objectives": ("slpo",)})
    for changes in (other, {"stages": ("evaluate",)}):
        assert "began from another slpo" in run.error(_path(run, "answer_only"), **changes)


def test_a_refused_command_leaves_the_config_of_the_one_before(run):
    """Also where a stage's parameters or its longest problem decide."""
    for stage in ORDER:
        run.delete(stage)
    workdir = run.experiment().workdir
    workdir.config.write_text("before")
    wordy = {"question": "Tom has 1 pens . How many now ?", "steps": ["1 + 2 = 3"] * 7, "answer": "3"}
    (run.folder / "wordy.jsonl").write_text(json.dumps(wordy))

    def refused(key, **changes):
        with pytest.raises(UserError, match=f"^config.{key}: "):
            run_stages(read_config(run.config(**changes)), run.work)
        assert workdir.config.read_text() == "before"

    refused("model.n_positions", **{"data.train": str(run.folder / "wordy.jsonl")})
    run.train("imitate", **_text(), stages=("imitate",))
    for stages in (("rl",), ("evaluate",)):
        refused("latent_policy.name", **_text("hybrid"), stages=stages)
    refused("model.n_layer", **_text(), **{"model.n_layer": 2}, stages=("rl",))
    init = str(run.folder / "init" / "imitate")
    shutil.copytree(workdir.stage("imitate").path, init)
    shutil.copytree(workdir.reasoner, run.folder / "init" / "reasoner")
    run.delete("imitate")
    refused("latent_policy.name", **_text("hybrid"), init=init, stages=("evaluate",))


def test_a_file_that_is_no_step_is_none(run):
    (run.work / "checkpoints/imitate/²").touch()
    check_starts(run.experiment())


# Of results: speed, memory and places alone; or what of it there is, told by what was done.
FREE = {
    "stages", "log_every", "checkpoint_every", "max_skipped_steps", "stuck_after", "cpu_devices", "sharding.fsdp",
    "model.remat", "model.scan_layers", "imitate.micro_batches", "imitate.control", "imitate.no_thought",
    "cold_start.micro_batches",
    "rl.micro_batches", "rl.capacities", "rl.objectives", "evaluate.batch_size", "evaluate.prompt_multiple",
    "evaluate.datasets", "evaluate.limit", "evaluate.samples", "evaluate.seeds", "evaluate.thresholds",
    "evaluate.save_latents", "evaluate.probed", "evaluate.rows_from", "evaluate.scorers", "evaluate.reward_model",
    "evaluate.beams", "evaluate.candidates", "latent_rm.micro_batches", "trackers",
}  # fmt: skip


def test_every_other_key_is_bound_to_a_stage_or_an_evaluation():
    config = Config()
    found = set(evaluated_settings(config))
    for stage in ("imitate", "cold_start", "latent_rm", *config.objective):
        found |= flatten(settings_of(config, stage)).keys()
    others = [f"latent_policy.{name}" for name in LATENT_POLICIES if name != config.latent_policy.name]
    others += [f"imitate.{name}" for name in RECIPES if name != "curriculum"]
    every = {key for key in flatten(values(config)) if not key.startswith(tuple(others))}
    assert every - found == FREE
    icot = settings_of(changed(config, {"imitate.recipe": "icot"}), "imitate")["imitate"]
    assert icot.keys() & RECIPES.keys() == {"icot"}

"""What a checkpoint was made with goes with it, and what is set otherwise is said."""

import dataclasses
import json
import shutil

import pytest

from asked import ANSWER, RUN, T, checkpoint, edit, run_config, workdir
from slpo_jax.api.conversion import export_checkpoint, import_checkpoint
from slpo_jax.api.load_options import by_argument
from slpo_jax.api.solver import load_solver
from slpo_jax.api.trained_reasoner import load
from slpo_jax.checkpoints.checkpoint import find_checkpoint
from slpo_jax.checkpoints.identity import identify
from slpo_jax.checkpoints.saved_config import config_of, stopping_of
from slpo_jax.config import Config, default_config, read_config
from slpo_jax.config.overrides import values
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.evaluation.report_rows import Row, read_row, write_rule
from slpo_jax.io.workdir import Workdir
from slpo_jax.policy.noise import DropoutConfig
from slpo_jax.rewards.reward import REWARDS, RewardEntry
from slpo_jax.run.experiment import build
from slpo_jax.run.run_stages import check_stages
from slpo_jax.run.setup import assemble

REASONER = "coconut_gpt2"
STAGES = ("imitate", "cold_start")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return workdir(REASONER, tmp_path_factory.mktemp("made") / "work")


@pytest.fixture(scope="module")
def exported(work, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "it"
    export_checkpoint(work / "checkpoints" / "cold_start", folder)
    return folder


def _passed_on(its, folder):
    """A checkpoint, moved away from its run; its export, that one's import, and the export of that."""
    moved = folder / "moved"
    shutil.copytree(its, moved / "its")
    shutil.copytree(its.parent / "reasoner", moved / "reasoner")
    yield moved / "its"
    export_checkpoint(its, folder / "exported")
    yield folder / "exported"
    import_checkpoint(folder / "exported", folder / "imported")
    yield folder / "imported"
    export_checkpoint(folder / "imported", folder / "again")
    yield folder / "again"


@pytest.mark.parametrize(
    ("stage", "stopping"),
    [("cold_start", ("threshold", RUN[REASONER])), ("imitate", ("length", 2))],
)
def test_t_and_threshold_go_with_a_checkpoint(work, tmp_path, stage, stopping):
    for place in _passed_on(work / "checkpoints" / stage, tmp_path):
        identity = identify(str(place))
        config = config_of(identity)
        assert stopping_of(config, identity) == stopping, place
        assert (config.max_latents, config.max_answer_tokens) == (T, ANSWER)
        assert config.dropout == DropoutConfig(0.3, "all")
        assert config.gate.enabled == (stage == "cold_start")
    for folder in ("exported", "again"):
        settings = json.loads(
            (tmp_path / folder / "generation_config.json").read_text()
        )
        gated = stopping[0] == "threshold"
        rule = stopping[1]
        assert (settings["max_latents"], settings["stop_threshold"]) == (
            (T, rule) if gated else (rule, None)
        )
        assert settings["max_new_tokens"] == ANSWER
        card = (tmp_path / folder / "README.md").read_text()
        how = f"at most {T} latents, until the gate's stop probability reaches {stopping[1]}"
        assert (
            f"{how if stage == 'cold_start' else '2 latents'} and answers of at most {ANSWER} tokens"
            in card
        )


@pytest.mark.slow
@pytest.mark.parametrize("format", ["", "Tom has {question} How many ?"])
@pytest.mark.parametrize("reasoner", ["coconut_gpt2", "text_gpt2"])
def test_format_and_closing_go_with_a_checkpoint(tmp_path, reasoner, format):
    """Every prompt, and what ends a thought."""
    config = run_config(reasoner)
    config.gate.enabled = False
    config.latent_policy.name = "latent" if reasoner == "coconut_gpt2" else "soft"
    config.prompt.update(format=format, closing="He buys" if format else "")
    config.evaluate.max_answer_tokens = ANSWER - 1
    its = checkpoint(config, tmp_path / "work")
    template = load_solver(str(its)).setup.template
    for place in list(_passed_on(its, tmp_path))[1:]:
        found = load_solver(str(place)).setup.template
        assert (found.prompt("5 pens"), found.closing_ids) == (
            template.prompt("5 pens"),
            template.closing_ids,
        ), place
    if reasoner == "coconut_gpt2":
        assert (
            json.loads((tmp_path / "exported/generation_config.json").read_text())[
                "max_new_tokens"
            ]
            == ANSWER - 1
        )
    card = (tmp_path / "exported" / "README.md").read_text()
    assert (
        f"asked with `prompt.format={format!r}, prompt.closing='He buys'`" in card
    ) == bool(format)


def test_latent_policy_and_prompt_go_with_a_checkpoint(tmp_path):
    config = run_config("text_gpt2")
    config.gate.enabled = False
    config.latent_policy.name = "noisy_soft"
    config.latent_policy.noisy_soft.temperature = 0.7
    config.prompt.update(instruction="Count .", answers="last_number")
    config.evaluate.update(max_answer_tokens=5, temperature=0.6)
    its = checkpoint(config, tmp_path / "work")
    for place in list(_passed_on(its, tmp_path))[1:]:
        identity = identify(str(place))
        found = config_of(identity)
        assert (
            found.latent_policy.name,
            found.latent_policy.noisy_soft.temperature,
        ) == ("noisy_soft", 0.7)
        assert stopping_of(found, identity) == ("length", T)
        assert found.prompt == PromptConfig(
            instruction="Count .", answers="last_number"
        )
        assert (found.evaluate.max_answer_tokens, found.evaluate.temperature) == (
            5,
            0.6,
        )


def _evaluation(tmp_path, source, **changes):
    """An evaluation alone, in which nothing but `changes` is set."""
    config = default_config()
    config.update(stages=("evaluate",), init=str(source), prompt_slots=(16, 20))
    config.data.eval.made = "synthetic:test"
    config.data.synthetic.update(max_value=20, max_steps=2, test_size=8)
    config.update_from_flattened_dict(changes)
    experiment = build(read_config(config), tmp_path / "evaluated")
    experiment.log.close()
    return experiment


def _evaluated(*arguments, **changes):
    return _evaluation(*arguments, **changes).config


KEPT = {
    "max_latents": T,
    "min_latents": 1,
    "max_answer_tokens": ANSWER,
    "dropout.rate": 0.3,
    "dropout.where": "all",
}


def test_an_evaluation_alone_says_what_is_not_its_checkpoint_s(
    work, exported, tmp_path, caplog
):
    """A checkpoint of T = 4 and 0.92, where the config is at its T of 12 and five thresholds to choose from."""
    for source in (work, work / "checkpoints" / "cold_start", exported):
        config = _evaluated(tmp_path, source)
        assert (config.max_latents, len(config.evaluate.thresholds)) == (12, 5)
        (line,) = caplog.messages
        assert f"config.max_latents=12 and not {T}" in line
        assert f"config.max_answer_tokens=16 and not {ANSWER}" in line
        assert f"and not ({RUN[REASONER]},)" in line
        caplog.clear()
        _evaluated(
            tmp_path, source, **KEPT, **{"evaluate.thresholds": (RUN[REASONER],)}
        )
        assert caplog.messages == []
    _evaluated(
        tmp_path, work / "checkpoints" / "imitate", **KEPT, **{"gate.enabled": False}
    )
    assert f"config.max_latents={T} and not 2" in caplog.text  # imitation's own number
    caplog.clear()
    _evaluated(tmp_path, work, **KEPT | {"max_latents": 12, "stages": ("cold_start",)})
    (line,) = caplog.messages  # of a training that begins there
    assert line.endswith(f"but with config.max_latents=12 and not {T}")


def test_a_base_that_is_not_needed_is_not_looked_up_and_said(
    work, exported, tmp_path, caplog
):
    for source in (work, exported):
        _evaluated(tmp_path, source, base="nobody/here")
        assert f"config.base: nobody/here is not used, {source}" in caplog.text
        caplog.clear()
    _evaluated(
        tmp_path / "new",
        "",
        base="nobody/here",
        tokenizer="synthetic:20",
        reasoner=REASONER,
    )
    assert "config.base: nobody/here is not used, config.init is not set" in caplog.text


def test_an_evaluation_says_what_is_not_its_workdir_s_stages(work, tmp_path, caplog):
    shutil.copytree(work, tmp_path / "evaluated")
    for stage in ("imitate", "cold_start"):
        (tmp_path / "evaluated" / "checkpoints" / stage / "finished").write_text("0\n")
    its = {"tokenizer": "synthetic:20", "reasoner": REASONER}
    _evaluated(tmp_path, "", **its, **KEPT)
    assert caplog.messages == []
    _evaluated(tmp_path, "", **its, **KEPT | {"max_latents": 12})
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "cold_start",
        "imitate",
    ]
    assert all(f"config.max_latents=12 and not {T}" in line for line in caplog.messages)


def test_a_threshold_that_was_chosen_at_another_t_is_better_than_none(work, tmp_path):
    """As an evaluation at another T leaves it, until one is chosen at the checkpoint's own; a length is none."""
    shutil.copytree(work, tmp_path / "work", ignore=shutil.ignore_patterns("rule.json"))
    stage = Workdir(tmp_path / "work").stage_folder("cold_start")
    row = read_row(tmp_path / "work", "cold_start")
    two = dataclasses.replace(row, rules=(0.25, 0.625))

    def left(rule, alike, row=row, **other):
        write_rule(stage, dataclasses.replace(row, rule=rule, **other), alike)
        identity = identify(str(stage.path))
        return stopping_of(config_of(identity), identity)

    assert left(3, False, stopping="length") == ("threshold", None)
    assert left(0.625, False, two) == ("threshold", 0.625)
    assert left(0.25, False) == ("threshold", 0.25)
    assert left(0.75, True) == ("threshold", 0.75)  # the only one, at its own T
    assert left(0.25, False, two) == left(0.25, True) == ("threshold", 0.75)
    assert left(0.625, True, two) == ("threshold", 0.625)


def test_a_threshold_of_what_was_there_before_is_not_the_checkpoint_s(work, tmp_path):
    shutil.copytree(work, tmp_path / "work")
    stage = Workdir(tmp_path / "work").stage_folder("cold_start")
    edit(stage.config, seed=8)
    identity = identify(str(stage.path))
    assert stopping_of(config_of(identity), identity) == ("threshold", None)
    write_rule(stage, Row("", "", stopping="threshold", rule=0.7), alike=True)
    assert stopping_of(config_of(identity), identity) == ("threshold", 0.7)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rule", value) for value in ("x", 5, float("nan"))),
        ("max_answer_tokens", None),
        ("max_latents", "six"),
        ("max_latents", -2),
        ("dropout", None),
    ],
)
def test_an_export_s_settings_are_checked_where_they_are_read(
    exported, tmp_path, key, value
):
    shutil.copytree(exported, tmp_path / "it")
    file = tmp_path / "it" / "reasoner.json"
    said = json.loads(file.read_text())
    edit(
        file,
        **{key: value} if key == "rule" else {"config": said["config"] | {key: value}},
    )
    message = rf"^{tmp_path}/it: reasoner\.json: (key {key}: |null in a section)"
    with pytest.raises(UserError, match=message) as error, by_argument():
        load_solver(str(tmp_path / "it"))
    assert "--max" not in str(error.value)  # it is no flag that is at fault


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [("config.json", "layer_norm_epsilon", 1e-3), ("reasoner.json", "eos_ids", [])],
)
def test_an_export_that_was_edited_says_so(
    exported, tmp_path, caplog, file, key, value
):
    shutil.copytree(exported, tmp_path / "it")
    with caplog.at_level("WARNING"):
        identify(str(tmp_path / "it"))
        assert "changed since" not in caplog.text
        edit(tmp_path / "it" / file, **{key: value})
        identify(str(tmp_path / "it"))
    assert (
        f"{tmp_path}/it: {file} changed since it was written, as its checksums.json has it"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-2, "key max_latents: -2 is not valid"),
        (None, "key max_latents: is missing, as in what other versions of"),
    ],
)
def test_a_run_s_settings_are_checked_where_they_are_read(work, tmp_path, value, said):
    shutil.copytree(work, tmp_path / "work")
    edit(tmp_path / "work/checkpoints/cold_start/config.json", max_latents=value)
    with pytest.raises(
        UserError, match=rf"checkpoints/cold_start/config\.json: {said}"
    ):
        load_solver(str(tmp_path / "work"))


def test_a_checkpoint_without_its_config_is_refused(work, tmp_path):
    """As an import of an earlier version is, whose settings lay elsewhere."""
    shutil.copytree(work, tmp_path / "work")
    file = tmp_path / "work/checkpoints/cold_start/config.json"
    file.unlink()
    for act in (load, lambda source: export_checkpoint(source, tmp_path / "new")):
        with pytest.raises(UserError, match=f"^{file}: no such file, which says what "):
            act(tmp_path / "work")


def test_a_stage_s_config_is_whole_and_what_it_ran_by(work):
    """Read as any config, it makes that stage again; a converted one names no places."""
    whole = {
        stage: json.loads((work / "checkpoints" / stage / "config.json").read_text())
        for stage in STAGES
    }
    ran = {stage: read_config(saved) for stage, saved in whole.items()}
    assert {stage: config.stages for stage, config in ran.items()} == {
        stage: (stage,) for stage in STAGES
    }
    assert all(values(Config()).keys() == saved.keys() for saved in whole.values())
    assert [ran[stage].gate.enabled for stage in STAGES] == [
        False,
        True,
    ]  # imitation trains none
    assert ran["cold_start"].max_latents == T


def test_a_converted_checkpoint_names_no_places(work, exported, tmp_path):
    import_checkpoint(exported, tmp_path / "imported")
    kept = json.loads((exported / "reasoner.json").read_text())["config"]
    assert values(Config()).keys() == kept.keys()
    assert str(work) not in json.dumps(kept)
    assert json.loads((tmp_path / "imported" / "config.json").read_text()) == kept


def test_a_gate_without_a_validation_set_names_the_way_out(work, tmp_path):
    shutil.copytree(
        work, tmp_path / "work", ignore=shutil.ignore_patterns("rule.json", "eval")
    )

    with pytest.raises(
        UserError,
        match=r"config\.data\.valid: not set.*--config\.evaluate\.thresholds='\(0\.5,\)'",
    ):
        check_stages(_evaluation(tmp_path, tmp_path / "work", **KEPT))
    check_stages(
        _evaluation(
            tmp_path, tmp_path / "work", **KEPT, **{"evaluate.thresholds": (0.5,)}
        )
    )


@pytest.mark.slow
def test_solve_says_what_is_not_the_checkpoint_s(work, tmp_path, caplog):
    load_solver(str(work))
    load_solver(str(work), threshold=RUN[REASONER], max_answer_tokens=ANSWER)
    assert not caplog.messages
    shutil.copytree(
        work, tmp_path / "work", ignore=shutil.ignore_patterns("rule.json", "eval")
    )
    load_solver(str(tmp_path / "work"), latents=T)  # which needs none
    assert "no threshold was chosen" not in caplog.text
    load_solver(str(tmp_path / "work"))
    assert "no threshold was chosen for its gate, so 0.5" in caplog.text
    caplog.clear()
    assert (
        load_solver(
            str(work), latents=3, max_answer_tokens=9
        ).setup.config.evaluate.max_answer_tokens
        == 9
    )
    assert (
        f"--latents=3 and not 'the threshold {RUN[REASONER]}', --max_answer_tokens=9 and not {ANSWER}"
        in caplog.text
    )


# The tokens that end what a text reasoner writes: from the checkpoint's files, through Orbax and back.

ROWS = len(load_tokenizer("synthetic:20")) + 1  # and ####


def _config(init="", **changes):
    config = run_config("text_llama")
    config.update(
        init=str(init), tokenizer="" if init else "synthetic:20", max_latents=0
    )
    config.gate.enabled = False
    config.update(changes)
    return config


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A model as others publish it: of our export only Hugging Face's files."""
    folder = tmp_path_factory.mktemp("end_tokens")
    export_checkpoint(checkpoint(_config(), folder / "ours"), folder / "published")
    for file in (folder / "published").glob("reasoner.*"):
        file.unlink()
    return folder / "published"


def _ends(source, base=""):
    return find_checkpoint(
        read_config(_config(source, base=str(base)))
    ).template.eos_ids


def test_end_tokens_go_there_and_back(published, tmp_path):
    eos = find_checkpoint(read_config(_config())).template.eos_id
    assert json.loads((published / "config.json").read_text())["eos_token_id"] == eos
    assert _ends(published) == (eos,)
    edit(published / "config.json", eos_token_id=[7, eos])
    assert _ends(published) == (eos, 7)
    edit(published / "generation_config.json", eos_token_id=[9, eos, 5, 9])
    assert _ends(published) == (eos, 9, 5), (
        "generation's own words go first, and each counts once"
    )
    assert _ends(published / "model.safetensors", published) == (eos, 9, 5), (
        "a file's are its base's"
    )
    # A latent reasoner's answers end with its eos alone, as before.
    latent = find_checkpoint(
        read_config(_config(published, reasoner="coconut_llama", max_latents=1))
    ).template
    assert latent.eos_ids == (latent.eos_id,) == (eos,)

    import_checkpoint(published, tmp_path / "orbax", reasoner=_config().reasoner)
    setup = assemble(read_config(_config(tmp_path / "orbax")))
    assert setup.policy.config.eos_ids == setup.template.eos_ids == (eos, 9, 5)
    export_checkpoint(tmp_path / "orbax", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())[
        "eos_token_id"
    ] == [eos, 9, 5]
    assert _ends(tmp_path / "again") == (eos, 9, 5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("</s>", "its eos_token_id is '</s>', neither a token's id nor a list of ids"),
        ([2, -1], "neither a token's id"),
        ([2, ROWS], f"eos_token_id {ROWS} is beyond its {ROWS} tokens"),
    ],
)
def test_what_is_no_end_token_is_a_line(published, value, message):
    edit(published / "generation_config.json", eos_token_id=value)
    with pytest.raises(UserError, match=message):
        _ends(published)


def test_a_run_s_own_reward_judges_where_it_is_registered(
    work, tmp_path, monkeypatch, caplog
):
    shutil.copytree(work, tmp_path / "work")
    edit(identify(str(tmp_path / "work")).stage_folder.config, reward="long")
    export_checkpoint(tmp_path / "work", tmp_path / "exported")
    load(tmp_path / "work").export(tmp_path / "api")
    export_checkpoint(work, tmp_path / "plain")
    for name in ("work", "exported", "api", "plain"):
        caplog.clear()
        assert config_of(identify(str(tmp_path / name))).weighted == (("correct", 1.0),)
        assert ("its reward long is not registered here" in caplog.text) == (
            name != "plain"
        )
    caplog.clear()
    monkeypatch.setitem(
        REWARDS, "long", RewardEntry(lambda completion: len(completion) > 2)
    )
    for name in ("work", "exported", "api"):
        assert config_of(identify(str(tmp_path / name))).weighted == (("long", 1.0),)
    assert caplog.text == ""

"""What a run says and refuses before any work where rewards are its user's own, and what binds its results."""

from functools import partial

import numpy as np
import pytest

from data_sets import write_jsonl
from refused import one_line
from slpo_jax.config import read_config
from slpo_jax.errors import UserError
from slpo_jax.rewards.functions import code_of
from slpo_jax.rewards.reward import CORRECT, REWARDS, RewardEntry
from slpo_jax.run.experiment import build
from slpo_jax.run.imitation_plan import choose_problems
from slpo_jax.run.provenance import (
    ensure_manifest,
    evaluated_settings,
    problems_facts,
    settings_of,
)
from slpo_jax.run.run_stages import check_stages
from slpo_jax.run.sources import data_summary
from small_run import load_config

ASKED = [
    {"question": f"Tom has {n} pens . How many now ?", "target": n}
    for n in range(1, 13)
]
ANSWERED = [
    row
    | {
        "answer": str(row["target"]),
        "steps": [f"{row['target']} + 0 = {row['target']}"],
    }
    for row in ASKED
]


def near(target, completion):
    return float(str(target) in completion)


def short(completion):
    return float(len(completion) < 3)


def broken(completion):
    return {"what nobody says": 1.0}[completion]


def verl_style(solution_str, ground_truth):
    return float(solution_str == ground_truth)


def one_of_many(completions):
    return [1.0]


def takes_all(completion, **columns):
    return 1.0


def after(completion, is_right):
    return "good"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """(records, settings..) -> a run that would be trained on these."""
    for function in (near, short, broken, one_of_many, verl_style, takes_all, after):
        monkeypatch.setitem(REWARDS, function.__name__, RewardEntry(function))

    def experiment(records, **changes):
        config = load_config()
        source = write_jsonl(tmp_path / "train.jsonl", records)
        config.data.update(train=source, valid="")
        config.data.eval.made = source
        usual = {
            "stages": ("rl", "evaluate"),
            "evaluate.datasets": ("made",),
            "gate.enabled": False,
            "reward": "near",
        }
        config.update_from_flattened_dict(usual | changes)
        return build(read_config(config), tmp_path / "work")

    return experiment


def test_problems_without_answers_are_counted_and_not_imitated(made):
    experiment = made([*ASKED, ANSWERED[0]])
    check_stages(experiment)
    assert (len(experiment.train), experiment.train.answers[0]) == (13, [])
    first, fields, *_, example = data_summary(
        "config.data.train", experiment.train, experiment.config.weighted
    )
    assert first.startswith(
        "config.data.train: 13 problems, 12 without an answer, 0.1 steps each, 12 without steps"
    )
    assert "reward from target" in fields
    assert example.endswith(r"How many now ?\n' | '' | ''")
    imitates = made(
        [*ASKED, *ANSWERED], stages=("imitate", "rl"), **{"imitate.control": False}
    )
    assert len(imitates.train) == 24
    check_stages(imitates)


def test_columns_of_a_reward_that_takes_all_are_used(made):
    experiment = made(
        [row | {"pair": [1, 2], "kind": "a"} for row in ANSWERED], reward="takes_all"
    )
    lines = data_summary(
        "config.data.train", experiment.train, experiment.config.weighted
    )
    assert not any("not used" in line for line in lines)
    assert any("reward from target, pair, kind" in line for line in lines)


def test_a_reward_is_tried_on_answers_as_rollouts_have_them(made, monkeypatch):
    seen = []

    def anchored(completion, latents, answer):
        seen.append((completion, latents, answer))
        return float(completion.startswith("#"))

    def ended(completions, completion_ids):
        seen.append(completion_ids)
        return [1.0] * len(completions)

    for function in (anchored, ended):
        monkeypatch.setitem(REWARDS, function.__name__, RewardEntry(function))
    experiment = made(ANSWERED, reward="", rewards=(("anchored", 1.0), ("ended", 1.0)))
    check_stages(experiment)
    ids = experiment.train.answers[0]
    text = experiment.template.tokenizer.decode(ids)
    assert seen[0] == (text, experiment.config.max_latents, ANSWERED[0]["answer"])
    assert text == text.strip()
    (first, *_), *_ = [call for call in seen if isinstance(call, list)]
    assert first == [*ids, experiment.template.eos_id]


@pytest.mark.parametrize(
    ("records", "changes", "says"),
    [
        (ASKED, {"stages": ("imitate",), "imitate.control": False},
         "stages: imitate, but none of the 12 problems of config.data.train has an answer to imitate; take it out"),
        (ASKED, {"rl.objectives": ("pathwise",)},
         "objective.pathwise: learns the reference answers, and 12 of 12 problems .* have none; set its estimator to"),
        (ASKED, {"reward": CORRECT, "rl.objectives": ("slpo",)}, "data.train: .*train.jsonl, line 1: no answer, nor"),
        (ASKED[:3] + [{"question": "Tom has 9 pens .", "answer": "9"}], {},
         "reward: near names 'target', a column that 1 of 4 records in config.data.train don't have, the first is "),
        (ASKED, {"reward": "broken"}, "reward: broken fails on the answers of the first 8 records in "),
        (ASKED, {"reward": "", "rewards": (("near", 1.0), ("broken", 1.0))},
         "reward: broken fails on the answers of the first 8 records in "),
        (ASKED, {"reward": "", "rewards": (("near", 1.0), ("after", 1.0))},
         "reward: after gives 'good' for .*; return a finite number"),
        (ASKED, {"reward": "verl_style"}, "reward: verl_style names 'ground_truth', .*; what .* call so is answer "),
        (ASKED, {"reward": "one_of_many"}, "reward: one_of_many gives 1 values for 8 completions; return a list "),
    ],
)  # fmt: skip
def test_what_can_not_be_trained_on_is_one_line_before_any_work(
    made, records, changes, says
):
    if changes.get("reward") == CORRECT:
        records = [{"question": row["question"], "answer": None} for row in records]
    one_line(lambda: check_stages(made(records, **changes)), match=rf"^config\.{says}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": "none"}, "reward: 'none' is not valid; give one of correct"),
        (
            {"reward": "near", "rewards": (("short", 1.0),)},
            "reward: 'near' is not valid; config.rewards is given too",
        ),
        (
            {"reward": "", "rewards": (("near", 1.0), ("near", 2.0))},
            "rewards: .*; 'near' is there twice; give it once",
        ),
        (
            {"reward": "", "rewards": (("none", 1.0),)},
            "rewards: .*; 'none' is none of correct, ",
        ),
        (
            {"reward": "relative_length"},
            "rewards: .*relative_length compares right completions; put one that",
        ),
        (
            {"reward": "", "rewards": ("near",)},
            "rewards: .* is not valid; give a tuple",
        ),
    ],
)
def test_rewards_that_are_none(made, changes, says):
    with pytest.raises(UserError, match=rf"^config\.{says}"):
        made(ASKED, **changes)


def test_results_are_bound_to_names_weights_and_columns(made):
    experiment = made(ANSWERED)
    assert (
        settings_of(experiment.config, "slpo")["reward"]
        == evaluated_settings(experiment.config)["reward"]
        == "near"
    )
    both = made(ANSWERED, reward="", rewards=(("near", 1.0), ("short", 0.5))).config
    assert settings_of(both, "slpo")["rewards"] == [["near", 1.0], ["short", 0.5]]
    assert "reward" not in evaluated_settings(both)
    default, named = (
        evaluated_settings(made(ANSWERED, reward=name).config) for name in ("", CORRECT)
    )
    assert default == named
    before = problems_facts(experiment.train, 0)
    changed = problems_facts(
        made([row | {"target": row["target"] + 1} for row in ANSWERED]).train, 0
    )
    assert before["data"] != changed["data"]
    assert before["prompts"] == changed["prompts"]


def test_solutions_of_other_problems_are_imitated(made, tmp_path):
    """`config.data.demos` is copied, `train` earns rewards, and the tokenizer knows the words of both."""
    rest = [
        {"question": f"Ann has {n} pears . How many now ?", "target": n}
        for n in range(1, 13)
    ]
    demos = {
        "data.demos": write_jsonl(tmp_path / "demos.jsonl", ANSWERED),
        "stages": ("imitate", "rl", "evaluate"),
    }
    small = {"tokenizer": "words", "imitate.control": False}
    experiment = made(rest, **demos, **small)
    check_stages(experiment)
    assert ([*map(len, experiment.demos.steps)], experiment.train.steps) == (
        [1] * 12,
        [[]] * 12,
    )
    copied = choose_problems(
        experiment, experiment.recipe, experiment.recipe.phases(experiment.demos, 2)
    )
    assert [each.question for each in copied.problems] == [
        row["question"] for row in ANSWERED
    ]
    assert all(
        "<unk>" not in experiment.template.tokenizer.decode(ids)
        for ids in experiment.train.prompts
    )
    first, *_, example = data_summary(
        "config.data.demos", experiment.demos, experiment.config.weighted
    )
    assert first.startswith("config.data.demos: 12 problems, 1.0 steps each")
    assert "1 + 0 = 1" in example
    ensure_manifest(experiment.stage("imitate"))
    files = experiment.stage("imitate").folder.read_inputs()["files"]
    assert {"data.train", "data.demos"} <= files.keys()
    none = (
        r"^config\.stages: imitate, but none of the 12 problems of config\.data\.demos"
    )
    with pytest.raises(UserError, match=none):
        check_stages(
            made(
                ANSWERED,
                **small
                | demos
                | {"data.demos": write_jsonl(tmp_path / "bare.jsonl", ASKED)},
            )
        )


def test_an_edited_reward_is_another(made, monkeypatch):
    """Its results are made anew, and what was trained with it is no start for what is trained with another."""
    stage = made(ASKED).stage("slpo")
    config, before = (
        stage.experiment.config,
        evaluated_settings(stage.experiment.config),
    )
    assert {"reward", "reward_code.near"} <= before.keys()
    for name in ("imitate", "slpo"):
        ensure_manifest(stage.experiment.stage(name))
        (
            stage.experiment.stage(name).folder.path / "0"
        ).mkdir()  # as if it had a checkpoint
    ensure_manifest(stage)

    def near(target, completion):
        return float(str(target) == completion)

    monkeypatch.setitem(REWARDS, "near", RewardEntry(near))
    assert evaluated_settings(config)["reward_code.near"] != before["reward_code.near"]
    ensure_manifest(stage.experiment.stage("imitate"))  # which no reward teaches
    with pytest.raises(
        UserError,
        match=r"^config\.reward: near has changed since .*slpo began; bring the old one",
    ):
        ensure_manifest(stage)
    assert code_of(REWARDS["countdown"].function) == ""


class Near:
    """A reward with a state; one that can't be hashed, since it says when two are equal."""

    def __init__(self, most):
        self.most = most

    def __eq__(self, other):
        return self.most == other.most

    def __call__(self, completion, most=1):
        return float(len(completion) <= most)


def test_a_partial_has_the_code_of_its_function_and_its_arguments():
    def near(completion, most, among):
        return float(len(completion) <= most)

    def far(completion, most, among):
        return float(len(completion) > most)

    codes = [
        code_of(function)
        for function in (near, partial(near, most=1), partial(near, most=2),
                         partial(near, 1), partial(far, most=1), partial(partial(near, most=1), 2))
    ]  # fmt: skip
    assert len({*codes, ""}) == 7
    same = [code_of(partial(near, among=one)) for one in (object(), object())]
    assert same[0] == same[1] != codes[0]
    lists = [
        code_of(partial(near, among=among))
        for among in (["1"], ["2"], np.arange(2), np.arange(3))
    ]
    assert len({*lists, *same}) == 5
    assert code_of(Near(1)) == code_of(Near) != ""


def test_repeated_rows_that_go_with_the_validation_set_are_said(made, tmp_path, caplog):
    """What is set apart from the source itself is no loss, but its repetitions are one."""
    source = write_jsonl(tmp_path / "twice.jsonl", ANSWERED * 2)
    experiment = made(
        ANSWERED, **{"data.train": source, "data.valid": f"{source}[valid]"}
    )
    parts = len(experiment.train), len(experiment.valid)
    count = 24 - sum(parts)
    assert count > 0
    assert (
        f"config.data.train: left out {count} of 24 problems, which are also in config.data.valid"
        in caplog.text
    )

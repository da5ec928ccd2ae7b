"""Objectives, advantages and latent policies that can't be used are refused in one line, before any work."""

import json
from types import SimpleNamespace

import pytest
from small_run import load_config

from slpo_jax.config import objective_of, objective_variant, read_config
from slpo_jax.config.validate import check
from slpo_jax.errors import UserError
from slpo_jax.io.workdir import Workdir
from slpo_jax.rewards.reward import CORRECT, REWARDS
from slpo_jax.run.experiment import build
from slpo_jax.run.plan import check_stages
from slpo_jax.run.rl import make_objective, optimizer_config
from slpo_jax.run.stage import Stage, close_stage
from slpo_jax.run.validate import check_answers
from slpo_jax.stages import SECTIONS


def _check_all(config, tmp_path) -> None:
    check(config)
    experiment = build(read_config(config), tmp_path / "work")
    try:
        check_stages(experiment)
    finally:
        experiment.log.close()


def _refused(config, tmp_path) -> str:
    """The one line that a run of this config ends with."""
    with pytest.raises(UserError) as caught:
        _check_all(config, tmp_path)
    assert not (tmp_path / "work" / "checkpoints").exists()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 300
    return line


@pytest.mark.parametrize(("estimator", "said"), [("pass_at_k", True), ("mixture", True), ("reward", False)])
@pytest.mark.parametrize("reward", [CORRECT, "mine"])
def test_that_pathwise_learns_references_whatever_the_reward_is_said_before(
    estimator, said, reward, tmp_path, warnings, monkeypatch
):
    monkeypatch.setitem(REWARDS, "mine", lambda question, reference, text: float(len(text)))
    config = load_config()
    config.update(reward=reward, stages=("imitate", "rl"))
    config.rl.update(objectives=("pathwise",), temperature=1.0)
    config.objective.pathwise.estimator = estimator
    _check_all(config, tmp_path)
    lines = [line for line in warnings if "config.reward=mine" in line]
    assert len(lines) == (said and reward == "mine")
    assert all(line.startswith("config.objective.pathwise: learns the reference answers") for line in lines)


@pytest.mark.parametrize(
    ("changes", "key", "budget"),
    [
        ({"stages": ("imitate",), "max_answer_tokens": 2}, "data.train", "max_answer_tokens"),
        ({"stages": ("cold_start",), "max_answer_tokens": 2}, "data.train", "max_answer_tokens"),
        ({"stages": ("rl",), "max_answer_tokens": 2}, "data.train", "max_answer_tokens"),
        ({"evaluate.max_answer_tokens": 2}, "data.eval.made", "evaluate.max_answer_tokens"),
        (
            {"stages": ("imitate", "cold_start"), "evaluate.max_answer_tokens": 2},
            "data.valid",
            "evaluate.max_answer_tokens",
        ),
    ],
)
def test_every_stage_checks_that_references_are_not_cut(changes, key, budget, tmp_path):
    """A sum's answer is #, its number and an end: three tokens."""
    config = load_config()
    config.update_from_flattened_dict(changes)
    expected = f"config.{key}: the answer of problem 0 takes 3 tokens with its end, more than config.{budget} (2); "
    assert _refused(config, tmp_path) == expected + "raise it, or drop the problem"
    config.update_from_flattened_dict({name: 3 for name in changes if name != "stages"})
    _check_all(config, tmp_path)


def test_some_references_of_an_evaluated_set_that_are_cut_are_counted(warnings):
    problems, budget = (
        SimpleNamespace(answers=[[0] * length for length in (2, 4, 5, 7)]),
        ("evaluate.max_answer_tokens", 5),
    )
    check_answers("config.data.eval.hard", problems, range(2), *budget)
    assert not warnings
    check_answers("config.data.eval.hard", problems, range(4), *budget)
    (line,) = warnings
    assert line == (
        "config.data.eval.hard: the answers of 2 of 4 problems take more tokens than "
        "config.evaluate.max_answer_tokens (5), up to 8; they count as wrong"
    )
    with pytest.raises(UserError, match=r"^config\.data\.train: the answer of problem 3 takes 8 tokens"):
        check_answers("config.data.train", problems, range(4), "max_answer_tokens", 7)


@pytest.mark.parametrize(
    "name",
    [
        *SECTIONS,
        "imitate_control",
        "imitate_no_thought",
        "imitate_fixed_tmax",
        "cold_start_best",
        "slpo_best",
        "imitate_adapter",
        "reasoner",
        "checkpoint",
    ],
)
def test_an_objective_can_t_have_the_name_of_another_stage_or_row(name, tmp_path):
    config = load_config()
    objective_variant(config, name, "answer_only")
    config.rl.objectives = ("slpo", name)
    line = _refused(config, tmp_path)
    assert line.startswith(f"config.objective.{name}: ")
    assert "use another" in line


def test_an_objective_s_own_rate_and_schedule_are_its_optimizer_s(tmp_path):
    config = load_config()
    config.rl.objectives = ("slpo", "answer_only")
    config.rl.optimizer.update(learning_rate=0.25, schedule="linear", final_fraction=0.5)
    config.objective.answer_only.update(learning_rate=0.125, schedule="constant", steps=50)
    config.objective.grpo.update(updates=3, steps=40)
    experiment = build(read_config(config), tmp_path / "work")
    found = [optimizer_config(experiment, make_objective(experiment, name)) for name in config.rl.objectives]
    several = optimizer_config(experiment, objective_of(experiment.config, "grpo"))
    experiment.log.close()
    assert [each.learning_rate for each in found] == [0.25, 0.125]
    assert [each.schedule for each in found] == ["linear", "constant"]
    assert [each.total_steps for each in found] == [config.rl.steps, 50]
    assert several.total_steps == 3 * 40  # a schedule counts updates
    assert {each.final_fraction for each in found} == {0.5}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"gate.enabled": True}, "config.stages: best_of_n stops by the gate"),
        ({"gate.enabled": True, "stages": ("best_of_n",)}, "config.stages: best_of_n stops by the gate"),
        ({"best_of_n.scorer": "gate"}, "config.best_of_n.scorer: gate asks the gate"),
        (
            {"best_of_n.scorer": "latent_rm"},
            "config.best_of_n.scorer: 'latent_rm' is not valid; give one of",
        ),
        ({"reward": "mine"}, "config.stages: best_of_n verifies on the device"),
        ({"best_of_n.batch_size": 5}, "config.best_of_n.batch_size: 5 is not a multiple of"),
    ],
)
def test_what_best_of_n_can_t_use(changes, key, tmp_path, monkeypatch):
    monkeypatch.setitem(REWARDS, "mine", lambda question, reference, text: float(len(text)))
    config = load_config()
    config.update_from_flattened_dict({"gate.enabled": False, "stages": ("imitate", "best_of_n"), **changes})
    assert _refused(config, tmp_path).startswith(key)


@pytest.mark.parametrize(("solved", "said"), [((0, 0), True), ((0, 0.5), False), ((), False)])
def test_a_stage_without_a_right_rollout_says_so_at_its_end(solved, said, tmp_path, warnings):
    rows = [{"stage": "slpo", "step": step, "solved": share} for step, share in enumerate(solved)]
    rows += [{"stage": "other", "step": 1, "solved": 0}, {"stage": "slpo", "step": 9, "loss": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = SimpleNamespace(params={}, step=9)
    stage = Stage(SimpleNamespace(workdir=Workdir(tmp_path)), "slpo")
    close_stage(stage, SimpleNamespace(finish=lambda *_: None), state)
    assert ["slpo: no rollout was right" in line for line in warnings] == [True] * said
    assert (tmp_path / "checkpoints/slpo/finished").read_text() == "9\n"


@pytest.mark.parametrize("name", ["a/b", "", "a b"])
def test_an_objective_s_name_is_one_of_files(name, tmp_path):
    config = load_config()
    objective_variant(config, name, "answer_only")
    assert _refused(config, tmp_path).startswith(f"config.objective.{name}: ")


def test_a_variant_needs_a_kind(tmp_path):
    config = load_config()
    objective_variant(config, "mine", "slpo")
    config.objective.mine.kind = "slpp"
    assert _refused(config, tmp_path).startswith("config.objective.mine.kind: 'slpp' is not valid")
    with pytest.raises(UserError, match=r"^config.objective.mine.kind: 'slpp' is unknown; use one of slpo"):
        objective_variant(load_config(), "mine", "slpp")
    with pytest.raises(UserError, match=r"^config.objective.mine.passses"):
        objective_variant(load_config(), "mine", "slpo", passses=3)
    objective_variant(config, "mine", "slpo", passes="many")
    assert _refused(config, tmp_path).startswith("config.objective.mine.passes: 'many' is not valid")


@pytest.mark.parametrize(
    "changes",
    [
        {"objective.pathwise.estimator": "reward"},
        {"objective.pathwise.estimator": "mixture", "objective.pathwise.mixture_weight": 0.0},
        {"latent_policy.name": "additive"},
        {"gate.enabled": True},
    ],
)
def test_pathwise_where_something_is_drawn(changes, tmp_path):
    """An answer, nothing that is compared, a thought, or its length."""
    config = load_config()
    refused = {"rl.objectives": ("pathwise",), "dropout.rate": 0.0, "gate.enabled": False, "stages": ("imitate", "rl")}
    config.update_from_flattened_dict(refused | changes)
    _check_all(config, tmp_path)


def test_the_config_itself_is_fine(tmp_path):
    """Or what is above would be refused for nothing; under a name that a section of the config has, too."""
    config = load_config()
    objective_variant(config, "gate", "pathwise", estimator="reward")
    config.rl.objectives = ("slpo", "gate", "answer_only", "pathwise")
    _check_all(config, tmp_path)

"""What of a run goes wrong, or is said, apart from refusals; and nothing is broken for the next run."""

import json
import socket
from types import SimpleNamespace

import pytest

from refused import refusal
from slpo_jax.config.validate import check
from slpo_jax.errors import UserError
from slpo_jax.io.workdir import Workdir
from slpo_jax.rewards.reward import CORRECT, REWARDS
from slpo_jax.run.experiment import build
from slpo_jax.run.plan import check_stages
from slpo_jax.run.stage import Stage, close_stage
from slpo_jax.run.validate import check_answers, check_prompts
from small_run import load_config, new_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_folder(tmp_path_factory.mktemp("errors"))


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
    with pytest.raises(UserError, match=r"22 tokens, more than the 12 positions .*; lower config.max_latents or"):
        check_prompts("config.data.train", [[0] * 12, [0] * 22], 12, is_cut=True)


@pytest.mark.parametrize(("reward", "estimator", "said"), [
    ("mine", "pass_at_k", 1), ("mine", "mixture", 1), ("mine", "reward", 0), (CORRECT, "pass_at_k", 0),
])  # fmt: skip
def test_that_pathwise_learns_references_whatever_the_reward_is_said_before(
    estimator, said, reward, tmp_path, warnings, monkeypatch
):
    monkeypatch.setitem(REWARDS, "mine", lambda question, reference, text: float(len(text)))
    changes = {"reward": reward, "objective.pathwise.estimator": estimator, "rl.temperature": 1.0}
    _check(tmp_path, {"stages": ("imitate", "rl"), "rl.objectives": ("pathwise",)} | changes)
    lines = [line for line in warnings if "config.reward=mine" in line]
    assert [line[:58] for line in lines] == ["config.objective.pathwise: learns the reference answers, wh"[:58]] * said


@pytest.mark.parametrize("changes", [
    {"objective.pathwise.estimator": "reward"},
    {"objective.pathwise.estimator": "mixture", "objective.pathwise.mixture_weight": 0.0},
    {"latent_policy.name": "additive"},
    {"gate.enabled": True},
])  # fmt: skip
def test_pathwise_where_something_is_drawn(changes, tmp_path):
    """An answer, nothing that is compared, a thought, or its length: else it is refused, see golden/refusals.txt."""
    refused = {"rl.objectives": ("pathwise",), "dropout.rate": 0.0, "gate.enabled": False, "stages": ("imitate", "rl")}
    _check(tmp_path, refused | changes)


def _check(folder, changes):
    config = load_config()
    config.update_from_flattened_dict(changes)
    check_stages(build(check(config), folder / "work"))


def test_some_references_of_an_evaluated_set_that_are_cut_are_counted(warnings):
    problems, budget = (
        SimpleNamespace(answers=[[0] * length for length in (2, 4, 5, 7)]),
        ("evaluate.max_answer_tokens", 5),
    )
    check_answers("config.data.eval.hard", problems, range(2), *budget)
    assert not warnings
    check_answers("config.data.eval.hard", problems, range(4), *budget)
    said = (
        "config.data.eval.hard: the answers of 2 of 4 problems take more tokens than config.evaluate.max_answer_tokens"
    )
    assert warnings == [f"{said} (5), up to 8; they count as wrong"]
    with pytest.raises(UserError, match=r"^config\.data\.train: the answer of problem 3 takes 8 tokens"):
        check_answers("config.data.train", problems, range(4), "max_answer_tokens", 7)


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

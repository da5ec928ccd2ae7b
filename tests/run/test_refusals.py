"""Bad input ends in one line with the key or file and the remedy, before any work.

`REFUSED` has commands; `CHECKED` has settings that the checkpoint, the problems or a method refuse.
"""

import json
import os
import shlex
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from asked import contents, workdir
from refused import refusal
from slpo_jax.config.config_checks import check
from slpo_jax.errors import UserError
from slpo_jax.io.workdir import Workdir
from slpo_jax.rewards.reward import CORRECT, REWARDS, RewardEntry
from slpo_jax.run.experiment import Stage, build
from slpo_jax.run.run_checks import check_answers, check_prompts
from slpo_jax.run.run_stages import check_stages
from slpo_jax.run.train_stage import close_stage
from small_run import load_config, new_folder

GOOD = '{"question": "Tom has 1 pens . How many now ?", "steps": ["1 + 2 = 3"], "answer": "3"}\n'
FILES = {
    "broken.jsonl": GOOD + '{"question": "Tom has\n',
    "noanswer.json": '[{"question": "Tom has 1 pens ."}]',
    "long.jsonl": GOOD * 3 + GOOD.replace("pens . ", "pens . " + "He buys 2 . " * 4),
    "typo.py": "import sys; sys.path.insert(0, '.')\nfrom small import get_config as small\n\n\ndef get_config():\n"
    "    config = small()\n    config.rl.stepz = 3\n    return config\n",
}
# A command that is refused, what its line begins with, and what else the line names.
REFUSED = [
    ("train small.py --config.nosuch=1", "config.nosuch", "stages"),
    ("train small.py --wrokdir=x", "unrecognized arguments: --wrokdir", "--workdir"),
    ("train typo.py", "--config=typo.py", "stepz"),
    ("train small.py --config.rl.group=1", "config.rl.group", "2 or more"),
    (
        "train small.py --config.data.train=broken.jsonl",
        "config.data.train",
        "broken.jsonl, line 2",
    ),
    (
        "train small.py --config.data.train=noanswer.json",
        "config.data.train",
        "config.data.fields.answer",
    ),
    (
        "train small.py --config.data.train=valid.txt",
        "config.data.train",
        "config.data.valid",
    ),
    (
        "train small.py --config.data.train=long.jsonl",
        "config.data.train",
        "config.prompt_slots",
    ),
    (
        "train small.py --config.dropout.rate=0.0",
        "config.objective.slpo.latent_weight",
        "config.dropout.rate",
    ),
    ("solve ./nowhere 'How many ?'", "checkpoint", "./nowhere"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = new_folder(tmp_path_factory.mktemp("refusals"))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    workdir("coconut_gpt2", folder / "asked")
    return folder


def _files(folder: Path) -> dict[str, bytes]:
    return {
        name: text
        for name, text in contents(folder).items()
        if not name.endswith((".pyc", ".lock"))
    }


@pytest.mark.parametrize(("command", "begins", "names"), REFUSED)
def test_one_line_and_nothing_else(command, begins, names, folder):
    before = _files(folder)
    line = refusal(*shlex.split(command), folder=folder)
    assert line.startswith(begins)
    assert names in line
    assert _files(folder) == before


BEST_OF_N = {"gate.enabled": False, "stages": ("imitate", "best_of_n")}
LATENT_RM = {"gate.enabled": False, "imitate.control": False, "stages": ("imitate", "latent_rm", "evaluate"),
             "evaluate.scorers": ("latent_rm",), "evaluate.samples": 4, "evaluate.beams": 2,
             "evaluate.candidates": 2}  # fmt: skip
IN_WORDS = {
    "reasoner": "text_gpt2",
    "gate.enabled": False,
    "imitate.c_thought": 0,
    "stages": ("imitate",),
}
SOFT = {"latent_policy.name": "soft"}
# Further settings and data of the small config that are refused: the line's key, and what else the line names.
CHECKED = [
    ({"stages": ("imitate",), "max_answer_tokens": 2}, "data.train", "config.max_answer_tokens"),
    ({"stages": ("cold_start",), "max_answer_tokens": 2}, "data.train", "config.max_answer_tokens"),
    ({"evaluate.max_answer_tokens": 2}, "data.eval.made", "config.evaluate.max_answer_tokens"),
    ({"stages": ("imitate", "cold_start"), "evaluate.max_answer_tokens": 2}, "data.valid",
     "config.evaluate.max_answer_tokens"),
    (BEST_OF_N | {"gate.enabled": True}, "stages", "cold_start"),
    (BEST_OF_N | {"gate.enabled": True, "stages": ("best_of_n",)}, "stages", "best_of_n"),
    (BEST_OF_N | {"best_of_n.scorer": "gate"}, "best_of_n.scorer", "gate"),
    (BEST_OF_N | {"best_of_n.scorer": "latent_rm"}, "best_of_n.scorer", "latent_rm"),
    (BEST_OF_N | {"reward": "mine", "reward_processes": 1}, "reward_processes", "mine"),
    (BEST_OF_N | {"best_of_n.batch_size": 5}, "best_of_n.batch_size", "5"),
    (LATENT_RM | {"stages": ("imitate", "evaluate")}, "evaluate.scorers", "latent_rm"),
    (LATENT_RM | {"stages": ("imitate", "evaluate"), "evaluate.scorers": ()}, "evaluate.beams", "latent_rm"),
    (LATENT_RM | {"dropout.rate": 0.0}, "latent_rm.dropout", ""),
    (LATENT_RM | {"evaluate.scorers": ("gate",)}, "evaluate.scorers", "config.gate"),
    (IN_WORDS | SOFT | {"latent_policy.soft.end_text": "how many"}, "latent_policy.soft.end_text", "how many"),
    (IN_WORDS | {"latent_policy.name": "gumbel", "latent_policy.gumbel.end_text": "zebra"},
     "latent_policy.gumbel.end_text", "zebra"),
    ({"latent_policy.name": "hybrid"}, "latent_policy.name", "coconut_gpt2"),
    ({"latent_policy.name": "colar"}, "latent_policy.name", "coconut"),
    (IN_WORDS | {"latent_policy.name": "hybrid", "max_latents": 0}, "max_latents", "0"),
    ({"imitate.lora.rank": 2, "imitate.no_thought": True}, "imitate.no_thought", "False"),
    ({"imitate.max_tokens": 3, "stages": ("imitate",)}, "imitate.max_tokens", "3"),
    ({"imitate.recipe": "icot", "imitate.c_thought": 0, "max_latents": 0, "gate.enabled": False, "imitate.cot_steps": 4,
      "imitate.final_steps": 18, "imitate.control": False, "stages": ("imitate",), "imitate.icot.tokens_per_epoch": 6},
     "imitate.final_steps", "18"),
    ({"objective.pathwise.estimator": "reward", "rl.objectives": ("pathwise",), "rl.temperature": 0.0},
     "objective.pathwise.estimator", "config.rl.top_k"),
    ({"rl.objectives": ("pathwise",), "dropout.rate": 0.0, "gate.enabled": False, "stages": ("imitate", "rl")},
     "objective.pathwise.estimator", "config.dropout.rate"),
]  # fmt: skip


def _check(folder, changes):
    config = load_config()
    config.update_from_flattened_dict(changes)
    check_stages(build(check(config), folder / "work"))


@pytest.mark.parametrize(("changes", "key", "names"), CHECKED)
def test_one_line_before_the_first_stage(
    changes, key, names, tmp_path, cpu_devices, monkeypatch
):
    monkeypatch.setitem(
        REWARDS, "mine", RewardEntry(lambda completion, left=(line for line in ()): 1.0)
    )
    with pytest.raises(UserError) as caught:
        _check(tmp_path, changes)
    line = str(caught.value)
    assert line.startswith(f"config.{key}: ")
    assert names in line
    assert "\n" not in line
    assert len(line) < 300
    assert not (tmp_path / "work" / "checkpoints").exists()


# What is refused by what is there, or said and not refused.


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


def test_a_smoke_test_refuses_batches_and_warm_ups_that_the_run_would(
    folder, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which it changes
    flags = "--config.imitate.optimizer.warmup_steps=20", "--config.rl.micro_batches=3"
    line = refusal("train", "small.py", "--smoke", *flags, folder=folder)
    assert line.startswith("config.imitate.optimizer.warmup_steps: 20 is not valid; ")
    assert "; and config.rl.batch_size: 4 is not a multiple of " in line


def test_long_problem_of_slots_that_the_positions_cut():
    """A larger bucket would be cut as well."""
    with pytest.raises(UserError, match=r"^config\.data\.train: .*config\.max_latents"):
        check_prompts("config.data.train", [[0] * 12, [0] * 22], 12, is_cut=True)


@pytest.mark.parametrize(("reward", "estimator", "said"), [
    ("mine", "pass_at_k", 1), ("mine", "mixture", 1), ("mine", "reward", 0), (CORRECT, "pass_at_k", 0),
])  # fmt: skip
def test_that_pathwise_learns_references_whatever_the_reward_is_said_before(
    estimator, said, reward, tmp_path, warnings, monkeypatch
):
    monkeypatch.setitem(
        REWARDS, "mine", RewardEntry(lambda completion: float(len(completion)))
    )
    changes = {
        "reward": reward,
        "objective.pathwise.estimator": estimator,
        "rl.temperature": 1.0,
    }
    _check(
        tmp_path,
        {"stages": ("imitate", "rl"), "rl.objectives": ("pathwise",)} | changes,
    )
    lines = [line for line in warnings if "config.reward=mine" in line]
    assert [line[:58] for line in lines] == [
        "config.objective.pathwise: learns the reference answers, wh"[:58]
    ] * said


@pytest.mark.parametrize("changes", [
    {"objective.pathwise.estimator": "reward"},
    {"objective.pathwise.estimator": "mixture", "objective.pathwise.mixture_weight": 0.0},
    {"latent_policy.name": "additive"},
    {"gate.enabled": True},
])  # fmt: skip
def test_pathwise_where_something_is_drawn(changes, tmp_path):
    """An answer, nothing that is compared, a thought, or its length: else it is refused, as `CHECKED` has it."""
    undrawn = {
        "rl.objectives": ("pathwise",),
        "dropout.rate": 0.0,
        "gate.enabled": False,
        "stages": ("imitate", "rl"),
    }
    _check(tmp_path, undrawn | changes)


def test_some_references_of_an_evaluated_set_that_are_cut_are_counted(warnings):
    problems = SimpleNamespace(answers=[[0] * n for n in (2, 4, 5, 7)])
    budget = "evaluate.max_answer_tokens"
    check_answers("config.data.eval.hard", problems, range(2), budget, 5)
    assert not warnings
    check_answers("config.data.eval.hard", problems, range(4), budget, 5)
    said = f"config.data.eval.hard: the answers of 2 of 4 problems take more tokens than config.{budget} (5), up to 8"
    assert warnings == [f"{said}; they count as wrong"]
    with pytest.raises(UserError, match=r"^config\.data\.train: .*problem 3 .*8 "):
        check_answers("config.data.train", problems, range(4), "max_answer_tokens", 7)


@pytest.mark.parametrize(
    ("solved", "said"), [((0, 0), True), ((0, 0.5), False), ((), False)]
)
def test_a_stage_without_a_right_rollout_says_so_at_its_end(
    solved, said, tmp_path, warnings
):
    rows = [
        {"stage": "slpo", "step": step, "solved": share}
        for step, share in enumerate(solved)
    ]
    rows += [
        {"stage": "other", "step": 1, "solved": 0},
        {"stage": "slpo", "step": 9, "loss": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    state = SimpleNamespace(params={}, step=9)
    stage = Stage(SimpleNamespace(workdir=Workdir(tmp_path)), "slpo")
    close_stage(stage, SimpleNamespace(finish=lambda *_: None), state)
    assert ["slpo: no rollout was right" in line for line in warnings] == [True] * said
    assert (tmp_path / "checkpoints/slpo/finished").read_text() == "9\n"

"""A latent policy of one's own, with parameters, and a reward: trained, resumed, reported, asked.

tests/test_docs.py has the other sorts.
"""

import contextlib
import importlib.util
import json
import sys

import pytest

import slpo_jax
from refused import refusal
from same_run import assert_same_run, checkpoint_of, rows_of
from slpo_jax.api.solver import load_solver, solve
from slpo_jax.config.registry import read_registrations
from slpo_jax.errors import UserError
from slpo_jax.policy.latent_policies import LATENT_POLICIES
from slpo_jax.rewards.reward import REWARDS
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.recipes import RECIPES
from small_run import CONFIG, new_folder, run

OWN = '''
import dataclasses
from pathlib import Path

import jax.numpy as jnp

import slpo_jax
from slpo_jax.settings import setting
from slpo_jax.models.parts import LATENT_POLICY
from slpo_jax.policy.latent_policies import LATENT_POLICIES, LatentPolicy, LatentPolicySettings

asked = []


class Off(BaseException):
    """What nothing catches."""


@dataclasses.dataclass(frozen=True)
class Shifted(LatentPolicySettings):
    """The reasoner's latents and a vector of its own."""

    of_latents = True
    has_parameters = True

    start: float = setting(0.5, least=0)

    def __call__(self, reasoner, gate):
        latent = LATENT_POLICIES["latent"]()(reasoner, gate)
        return dataclasses.replace(
            latent,
            init=lambda key: {"shift": jnp.full(reasoner.width, self.start)},
            feed=lambda params, latents_BLD: latents_BLD + params[LATENT_POLICY]["shift"][None, None],
        )


def digits(answer, completion):
    """One for each token that has digits, of an answer that ended."""
    asked.append(answer)
    if Path("crash").exists() and len(asked) > 60:
        raise Off("the machine goes off")
    return sum(any(map(str.isdigit, word)) for word in completion.split())


slpo_jax.register_latent_policy("shifted", Shifted)
slpo_jax.register_reward("digits", digits)


def get_config():
    config = small()
    config.stages = ("imitate", "rl", "evaluate")
    config.gate.enabled = False
    config.latent_policy.name = "shifted"
    config.latent_policy.shifted.start = 0.25
    config.reward = "digits"
    config.imitate.update(control=False, cot_steps=0, final_steps=24)
    config.rl.update(objectives=("answer_only",), batch_size=8, group=8, steps=4)
    config.checkpoint_every = 1
    return config
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run that crashed within its second step and went on in `work`, and of one that nobody interrupted."""
    found = new_folder(tmp_path_factory.mktemp("own"))
    (found / "own.py").write_text(CONFIG.replace("get_config", "small") + OWN)
    (found / "crash").touch()
    done = run("--config=own.py", "--workdir=work", folder=found, status=None)
    assert "the machine goes off" in done.stderr
    (found / "crash").unlink()
    for workdir in ("work", "whole"):
        run("--config=own.py", f"--workdir={workdir}", folder=found)
    return found


@pytest.mark.slow
def test_they_train_and_go_on(folder):
    rows = [row for row in rows_of(folder / "work") if row["stage"] == "answer_only"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert any(row["reward"] > 0 for row in rows)
    assert_same_run(folder / "work", folder / "whole", "answer_only")
    assert any(
        "shift" in path for path in checkpoint_of(folder / "work", "answer_only")
    )
    facts = json.loads(
        (folder / "work" / "checkpoints" / "answer_only" / "config.json").read_text()
    )
    assert facts["reward"] == "digits"
    assert (facts["latent_policy"]["name"], facts["latent_policy"]["shifted"]) == (
        "shifted",
        {"start": 0.25},
    )


@pytest.mark.slow
def test_they_are_reported(folder):
    report = json.loads((folder / "work" / "report.json").read_text())
    assert list(report["eval"]) == ["imitate", "imitate_fixed_tmax", "answer_only"]
    for line in (
        (folder / "work" / "eval" / "answer_only" / "made.jsonl")
        .read_text()
        .splitlines()
    ):
        for sample in json.loads(line)["samples"]:
            assert sample["correct"] == (
                any(map(str.isdigit, sample["completion"])) and not sample["cut"]
            )
    key = "config.latent_policy.shifted.start"
    changed = run(
        "--config=own.py", "--workdir=work", f"--{key}=4.0", folder=folder, status=2
    )
    assert changed.stderr.splitlines()[-1].startswith(
        f"error: {key}: is 4.0, and 0.25 is what"
    )


@pytest.fixture
def registries():
    """Those of this process, put back afterwards."""
    kept = [
        (registry, dict(registry)) for registry in (LATENT_POLICIES, REWARDS, RECIPES)
    ]
    yield
    for registry, members in kept:
        registry.clear()
        registry.update(members)


@pytest.mark.slow
def test_they_are_asked(folder, registries):
    said = r"'shifted' is not valid; give one of latent, additive.*; register it \(a command's --register\), or mend"
    with pytest.raises(UserError, match=said):
        load_solver(str(folder / "work"))
    read_registrations(str(folder / "own.py"))
    assert (
        len(solve(load_solver(str(folder / "work")), "Tom has 3 pens .").latents) == 3
    )


@pytest.mark.slow
def test_another_config_takes_them_by_name(folder, registries):
    line = refusal(
        "train", "small.py", "--register=own.py", "--config.reward=none", folder=folder
    )
    assert line.startswith(
        "config.reward: 'none' is not valid; give one of correct, countdown, gym, relative_length, digits"
    )


@pytest.mark.parametrize(
    ("what", "name", "value", "fault"),
    [
        ("objective", "slpo", OBJECTIVES["exact"], "'slpo' is one of ours; use another name"),
        ("objective", "my own", OBJECTIVES["exact"], "'my own' is to be a config's key"),
        ("latent_policy", "mine", OBJECTIVES["exact"], "mine: .*Exact'> is no dataclass that extends LatentPolicySe"),
        ("recipe", "icot", RECIPES["icot"], "'icot' is one of ours"),
        ("recipe", "lora", OBJECTIVES["exact"], "'lora' is a key of config.imitate"),
    ],
)  # fmt: skip
def test_what_can_not_be_registered_is_one_line(registries, what, name, value, fault):
    with pytest.raises(UserError, match=rf"^register_{what}: {fault}"):
        getattr(slpo_jax, f"register_{what}")(name, value)


def test_folders_of_a_file_s_own_stay_and_ours_go(registries, tmp_path, monkeypatch):
    """Where it put them: before ours, behind them, or in a list of its own; one that was there before stays too."""
    there = str(tmp_path.resolve())
    # The first file that is run in a process leaves a folder there, for the processes that this one spawns.
    (tmp_path / "first.py").touch()
    read_registrations(str(tmp_path / "first.py"))
    monkeypatch.setattr(sys, "path", [there, *sys.path])
    for number, (own, expected) in enumerate({
        "sys.path.insert(0, '/mine')": ["/mine", *sys.path],
        "sys.path[1:1] = ['/mine']": ["/mine", *sys.path],
        "sys.path.append('/mine')": [*sys.path, "/mine"],
        "sys.path = ['/mine', *sys.path]": ["/mine", *sys.path],
        "sys.path.pop(0)": sys.path,
        "sys.path.insert(0, '/mine'); 1 / 0": ["/mine", *sys.path],
    }.items()):  # fmt: skip
        file = tmp_path / f"inserts_{number}.py"
        file.write_text(f"import sys\n{own}\n")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*sys.path])
            with (
                pytest.raises(UserError) if "1 / 0" in own else contextlib.nullcontext()
            ):
                read_registrations(str(file))
            assert sys.path == expected


def test_a_file_may_be_read_again(registries, tmp_path):
    (tmp_path / "registers_mine.py").write_text(
        "import slpo_jax\nslpo_jax.register_reward('mine', lambda completion: 1.0)\n"
    )
    for _ in range(2):
        read_registrations(str(tmp_path / "registers_mine.py"))
    assert [*REWARDS] == ["correct", "countdown", "gym", "relative_length", "mine"]
    files = {
        "bad.py": "1 / 0",
        "quits.py": "raise SystemExit(0)",
        "lines.py": "raise RuntimeError('two\\nlines')",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    for name, fault in (
        ("bad.py", "ZeroDivisionError: division by zero; mend the file"), ("no.py", "no such file"),
        ("quits.py", "SystemExit: 0; mend the file"), ("lines.py", "RuntimeError: two lines; mend the file"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=rf"^--register={tmp_path / name}: {fault}"):
            read_registrations(str(tmp_path / name))
    assert importlib.util.find_spec("registers_mine") is None

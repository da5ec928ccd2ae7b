"""What the pages say: links and paths lead somewhere, names and keys exist, commands parse, and the examples run."""

import dataclasses
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import slpo_jax
from commands import config_of, fault, trains
from configs._presets import SOFT_METHODS
from eval_files import write_eval
from slpo_jax.architectures import ARCHITECTURES
from slpo_jax.config import config_checks, default_config
from slpo_jax.config.registry import read_registrations
from slpo_jax.evaluation.curves import scalars
from slpo_jax.evaluation.records import read_records
from slpo_jax.evaluation.statistics import summarise
from slpo_jax.io.workdir import Workdir
from slpo_jax.policy.advantage import ADVANTAGES
from slpo_jax.policy.latent_policies import LATENT_POLICIES
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.rewards.reward import REWARDS
from slpo_jax.run.experiment import build
from slpo_jax.run.run_stages import check_stages
from slpo_jax.training import rl_loss, rollouts
from slpo_jax.training.metrics import TRACKERS, MetricsLog
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.recipes import RECIPES, ImitateSettings
from small_steps import (
    ALWAYS,
    GROUP,
    NEVER,
    POLICY,
    REASONER,
    prompted_batch,
    rigged_reward,
    small_params,
)
from tiny import GATE, compiled

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
METHODS = [ROOT / "docs" / f"methods{part}.md" for part in ("", "_soft", "_text")]
EXTEND = ROOT / "docs" / "extend.md"
OF_A_RUN = {
    "checkpoints",
    "labels",
    "eval",
    "tensorboard",
    "wandb",
    "report.md",
    "runs",
}  # in a workdir
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_EXAMPLE = re.compile(
    r"`(\S+\.py)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_FILE = re.compile(r"[\w.*/-]+\.(?:py|md|sh|sbatch|ipynb|yml|toml|png)(?::\w+)?")


def of(pages):
    return pytest.mark.parametrize("page", pages, ids=[page.name for page in pages])


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def fenced(page: Path, section: str = "") -> list[tuple[str, str]]:
    """(language, text) of each code block of a page, or of one of its sections."""
    text = page.read_text()
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return _FENCE.findall(text)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in fenced(page) if kind == language]


def example_paths() -> set[str]:
    return {path for path, _ in examples()}


def examples() -> list[tuple[str, str]]:
    """(file, code) of those that register something."""
    pages = (
        ROOT / "README.md",
        EXTEND,
        ROOT / "docs" / "rewards.md",
        ROOT / "docs" / "tutorial.md",
    )
    return _EXAMPLE.findall("".join(page.read_text() for page in pages))


def found(path: str) -> bool:
    """Whether it is there, from the repository's root or the package's."""
    path = path.partition(":")[0]
    return any(any(base.glob(path.rstrip("/"))) for base in (ROOT, ROOT / "slpo_jax"))


@of(PAGES)
def test_links_lead_to_files(page):
    targets = [
        to
        for to in re.findall(r"\]\(([^)\s]+)\)", prose(page))
        if not to.startswith("https://")
    ]
    assert all(
        (page.parent / target.partition("#")[0]).is_file() for target in targets
    ), targets
    assert targets or page.parent != ROOT  # the root's pages lead to the others


@of(PAGES)
def test_paths_are_there(page):
    quoted = [
        text
        for text in re.findall(r"`([^`\n]+)`", prose(page))
        if text not in example_paths()
    ]
    files = [
        text
        for text in quoted
        if _FILE.fullmatch(text) and text.partition("/")[0] not in OF_A_RUN
    ]
    folders = [text for text in quoted if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/", text)]
    folders = [text for text in folders if text.partition("/")[0] not in OF_A_RUN]
    missing = [path for path in files + folders if not found(path)]
    assert not missing
    if page.name in ("CONTRIBUTING.md", "methods.md", "extend.md"):
        assert len(files) + len(folders) > 3, "nothing was looked for"


@of(PAGES)
def test_names_are_in_their_files(page):
    named = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", prose(page))
    for path, names in named:
        source = (ROOT / "slpo_jax" / path).read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(
                rf"^(?:def|class) {name}\b|^{name}\b.*=", source, re.MULTILINE
            ), f"{path}: {name}"
    assert len(named) > 10 or page.name != "methods.md"


def holds(node, key: str) -> bool:
    """Whether a config has a key, in which NAME stands for any objective or data set, STAGE for any stage."""
    first, _, rest = key.partition(".")
    if first == "STAGE":
        return all(
            holds(node[stage], rest) for stage in ("imitate", "cold_start", "rl")
        )
    if first == "NAME":
        return (
            all(
                holds(child, rest)
                for child in node.values()
                if isinstance(child, ConfigDict)
            )
            if rest
            else True
        )
    return first in node and (not rest or holds(node[first], rest))


@of(PAGES)
def test_config_keys_exist(page):
    config = default_config()
    text = prose(page)
    quoted = [
        key.partition("=")[0]
        for key in re.findall(r"`(?:--)?config\.(?!json`)([\w.]+(?:=\S*)?)`", text)
    ]
    sections = "|".join(
        key for key, value in config.items() if isinstance(value, ConfigDict)
    )
    quoted += re.findall(rf"`((?:STAGE|{sections})\.(?!py`)[\w.]+)`", text)
    quoted = [key for key in quoted if "right_answers" not in key]
    assert not [key for key in quoted if not holds(config, key)]
    assert len(quoted) > 5 or page.name not in ("train.md", "methods.md")


def commands(page: Path) -> list[list[str]]:
    """The arguments of every command of a page."""
    return [words for text in blocks(page, "bash") for words in commands_of(text)]


def commands_of(text: str) -> list[list[str]]:
    """The arguments of every command of a block."""
    lines = text.replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in line.split("&&")]
    return [
        _as_module(shlex.split(part, comments=True)) for part in parts if part.strip()
    ]


def _as_module(words: list[str]) -> list[str]:
    """`slpo COMMAND ..` as `python -m slpo_jax COMMAND ..`, and train as its module."""
    if words[:2] != ["slpo", "train"]:
        return ["python", "-m", "slpo_jax", *words[1:]] if words[0] == "slpo" else words
    config = [] if words[2].startswith("-") else [f"--config={words[2]}"]
    return ["python", "-m", "slpo_jax.main", *config, *words[2 + len(config) :]]


def mentioned(page: Path) -> list[list[str]]:
    """Commands in a page's sentences, without those that stand for several: [--flag], FILE|DIR, .., COMMAND."""
    quoted = [
        " ".join(text.split())
        for text in re.findall(r"`((?:python|slpo) [^`]+)`", prose(page))
    ]
    return [
        shlex.split(text)
        for text in quoted
        if not re.search(r"[][|]|\.\.|COMMAND", text)
    ]


@of(PAGES)
def test_commands_can_be_begun(page, monkeypatch, example):
    """Their programs, flags, configs and tables are there; methods of the page's own are registered first."""
    monkeypatch.chdir(ROOT)
    found = commands(page) + mentioned(page)
    for words in found:
        for file in [word for word in words if word.startswith("--register=")]:
            example(Path(file.partition("=")[2]).stem)
        assert fault(words) == ""
    assert any(map(trains, found)) or page.name not in (
        "README.md",
        "train.md",
        "methods.md",
    )


@pytest.mark.nightly
def test_methods_would_begin(tmp_path, monkeypatch):
    """Each way to imitate can use the embedded problems: nothing is missing, and phases have room for warm-ups."""
    monkeypatch.chdir(ROOT)
    configs = [
        config_of(words)
        for page in METHODS
        for words in commands(page)
        if "slpo_jax.main" in words
    ]
    ways = {
        str((config.reasoner, config.imitate, config.prompt)): config
        for config in configs
    }
    for i, config in enumerate(ways.values()):
        check_stages(build(config, tmp_path / str(i)))
    assert len(ways) > 8


def test_a_second_name_can_be_given():
    """As docs/train.md shows."""
    config = importlib.import_module("configs.quickstart").get_config()
    (code,) = blocks(ROOT / "docs" / "train.md", "python")
    exec(code, {"config": config})
    assert config_checks.check(config).objective["slpo_grpo"].advantage == "grpo"


def test_the_python_page_has_every_public_name():
    (members,) = re.findall(
        r"members: \[(.*?)\]", (ROOT / "docs" / "api.md").read_text(), re.DOTALL
    )
    assert sorted(re.split(r",\s+", members)) == sorted(slpo_jax.__all__)


def test_methods_are_all_there():
    said = set(re.findall(r"\w+", "".join(page.read_text() for page in METHODS)))
    assert (
        not {
            *LATENT_POLICIES,
            *OBJECTIVES,
            *ADVANTAGES,
            *RECIPES,
            *ARCHITECTURES,
            *SOFT_METHODS,
        }
        - said
    )


def test_reference_is_current(monkeypatch):
    """docs/configuration.md is what `python docs/configuration.py` writes, and says of every key what it is."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    configuration = importlib.import_module("configuration")
    assert configuration.PAGE.read_text() == configuration.render(), (
        "run python docs/configuration.py"
    )
    rows = [
        line
        for line in configuration.PAGE.read_text().splitlines()
        if line.startswith("|`")
    ]
    assert not [row for row in rows if row.endswith("||")]
    keys = [
        key
        for key, value in default_config().items()
        if not isinstance(value, ConfigDict)
    ]
    assert set(keys) <= {row.split("`")[1] for row in rows}


def defined() -> set[str]:
    """The figures that docs/evaluate.md explains; of pass@1, pass@8, .. it says pass@k."""
    return set(re.findall(r"`([\w@.]+)`", (ROOT / "docs" / "evaluate.md").read_text()))


def test_figures_are_defined(tmp_path):
    write_eval(
        tmp_path,
        "slpo",
        "same",
        [True, False, True],
        np.ones((2, 3, 8)),
        steps=[1, 2, 3],
    )
    figures = summarise(read_records(tmp_path / "eval" / "slpo" / "same.jsonl"))
    names = {
        re.sub(r"@\d+", "@k", re.sub(r"(_seed)?_se$|_[rpn]$", "", name))
        for name in figures
    }
    assert len(names) > 10
    assert not names - {name.removesuffix("_r") for name in defined()}


def test_what_training_logs_is_defined_on_the_page():
    table = (ROOT / "docs" / "evaluate.md").read_text().split("## metrics.jsonl")[1]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")]
    told = [name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)]
    assert set(told) - {"step", "stage"} == set(scalars())


REGISTRIES = (OBJECTIVES, LATENT_POLICIES, RECIPES, SCORERS, REWARDS, TRACKERS)


@pytest.fixture
def example(tmp_path):
    """name -> the module of the docs' example of that name, which registers what it has."""
    before = [dict(registry) for registry in REGISTRIES]

    def load(name: str):
        read_registrations(str(_example_file(name, tmp_path)))
        return sys.modules[f"slpo_jax_{name}"]

    yield load
    for registry, was in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(was)


def _example_file(name: str, folder: Path) -> Path:
    file = folder / f"{name}.py"
    file.write_text({Path(path).stem: code for path, code in examples()}[name])
    return file


# In one capacity, which the examples know nothing of.
PLAIN = dataclasses.replace(POLICY, capacities=((1.0, 1.0),))


def _step(policy, objective):
    """References -> gradient and metrics of one step's loss."""
    loss_fn = rl_loss.make_rollout_and_loss(policy, objective, rigged_reward, GROUP)
    graded = compiled(jax.grad(loss_fn, has_aux=True))

    def step(references):
        gradient, sums = graded(
            small_params(), prompted_batch(references), jax.random.key(1)
        )
        metrics = {name: float(total / count) for name, (total, count) in sums.items()}
        return jax.tree.map(np.asarray, gradient), metrics

    return step


@pytest.mark.slow
def test_example_of_an_objective(example):
    """Right rollouts are imitated: the gradient is that of their mean likelihood, and wrong ones leave no trace."""
    example("right_answers")
    objective = OBJECTIVES["right_answers"](answer_weight=0.5)
    step = _step(PLAIN, objective)
    right, metrics = step((ALWAYS,) * 4)
    expected = -(0.5 * metrics["answer_log_likelihood"] + _mean_stop(PLAIN)) * 4
    assert metrics["reward"] == 1
    assert metrics["loss"] == pytest.approx(expected / 4, rel=1e-5)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(right["gate"]))
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(right["reasoner"]))
    wrong, metrics = step((NEVER,) * 4)
    assert metrics["loss"] == metrics["reward"] == 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(wrong))


def _mean_stop(policy) -> float:
    """The mean of log P(tau) by hand, of the step that `_gradient` takes."""
    key = jax.random.key(1)
    batch = prompted_batch((ALWAYS,) * 4)
    roll_out = compiled(
        lambda params: rollouts.roll_out(
            policy, params, batch, rigged_reward, GROUP, key
        )
    )
    trajectories, _ = roll_out(small_params())
    logits = policy.latent_policy.stop_logits(small_params(), trajectories.actions)
    rho = np.asarray(jax.nn.sigmoid(logits), np.float64)
    logs = []
    for row, length in zip(rho, np.asarray(trajectories.lengths), strict=True):
        fires = 1.0 if length == len(row) else row[length - 1]
        logs.append(np.log(fires) + np.log1p(-row[: length - 1]).sum())
    return float(np.mean(logs))


@pytest.mark.slow
def test_example_of_a_latent_policy(example):
    """Its probabilities sum to one, its draws follow them, and the objective `exact` trains on it."""
    example("tokens")
    latent_policy = LATENT_POLICIES["tokens"](temperature=2.0)(
        REASONER.in_tree(), GATE.in_tree()
    )
    params = small_params()
    vocabulary = 61
    hidden = jnp.asarray(
        np.random.default_rng(0).normal(size=(1, 1, REASONER.width)), jnp.float32
    )
    every = jnp.arange(vocabulary)[:, None]
    log_prob = compiled(latent_policy.log_prob)(
        params, jnp.repeat(hidden, vocabulary, axis=0), every
    )
    assert float(jnp.exp(log_prob).sum()) == pytest.approx(1, abs=1e-5)
    keys = jax.random.split(jax.random.key(0), (1, 4000))
    drawn = compiled(latent_policy.draw)(params, jnp.repeat(hidden, 4000, axis=1), keys)
    shares = np.bincount(np.asarray(drawn[0]), minlength=vocabulary) / 4000
    np.testing.assert_allclose(shares, np.exp(log_prob[:, 0]), atol=0.03)
    assert int(latent_policy.draw(params, hidden)[0, 0]) == int(log_prob[:, 0].argmax())

    policy = dataclasses.replace(PLAIN, latent_policy=latent_policy).with_config(
        dropout_rate=0.0
    )
    objective = OBJECTIVES["exact"]()
    objective.check("config.objective.exact", policy, GROUP)
    gradient, metrics = _step(policy, objective)((0, 1, 0, 1))
    assert 0 < metrics["reward"] < 1
    assert metrics["latent_log_likelihood"] < -1
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient["reasoner"]))


def test_example_of_a_recipe(example):
    def drawn(policy, params, batch, key):
        x = jax.random.normal(key)
        return x, {"loss": (x, 2.0)}, None

    example("averaged")
    own = dataclasses.replace(RECIPES["curriculum"]()(ImitateSettings()), loss=drawn)
    recipe = RECIPES["averaged"](masks=3)(ImitateSettings(), own)
    key = jax.random.key(0)
    expected = np.mean(
        [jax.random.normal(jax.random.fold_in(key, i)) for i in range(3)]
    )
    loss, metrics, _ = recipe.loss(None, None, None, key)
    np.testing.assert_allclose(
        [loss, *metrics["loss"]], [expected, expected, 2.0], rtol=1e-6
    )


def test_examples_of_a_scorer_and_a_reward(example):
    for name in ("sure_stop", "used"):
        example(name)
    logits_NT = np.random.default_rng(0).normal(size=(3, 4))
    lengths_N = np.array([1, 4, 2])
    policy = SimpleNamespace(
        latent_policy=SimpleNamespace(stop_logits=lambda params, actions: actions)
    )
    trajectories = SimpleNamespace(
        actions=jnp.asarray(logits_NT), lengths=jnp.asarray(lengths_N)
    )
    expected = [
        1 / (1 + np.exp(-row[length - 1]))
        for row, length in zip(logits_NT, lengths_N, strict=True)
    ]
    np.testing.assert_allclose(
        SCORERS["sure_stop"].score(policy, None, None, trajectories),
        expected,
        rtol=1e-5,
    )
    used = REWARDS["used"].function
    numbers = [9, 5, 18]
    assert [
        used(numbers=numbers, completion=text)
        for text in ("### 18 - 9 * 5", "### 18 + 95", "")
    ] == [1, 1 / 3, 0]


def test_example_of_a_tracker(example, tmp_path):
    example("lines")
    log = MetricsLog(Workdir(tmp_path))
    log.start(["lines"], {})
    log.write("slpo", 20, {"reward": 0.5, "loss": 1.0})
    log.close()
    assert (tmp_path / "rewards.txt").read_text() == "slpo/reward 20 0.5\n"


def test_example_of_an_architecture(example):
    damped = example("damped").Damped(factor=0.25)
    hidden_BLD = (
        np.random.default_rng(0).normal(size=(1, 2, REASONER.width)).astype(np.float32)
    )
    np.testing.assert_allclose(
        damped.on(REASONER.config).transition({}, hidden_BLD), 0.25 * hidden_BLD
    )
    assert damped.layers == (("scale", 0.25),)  # by which exports think in PyTorch
    assert damped.unwrap({}, "") is None


@pytest.mark.slow
def test_examples_work_together(tmp_path):
    """As users' files beside a config: imitation, both objectives, the scorer's figures."""
    names = ("right_answers", "tokens", "averaged", "sure_stop")
    small = {
        "rl.steps": 1, "rl.batch_size": 4, "rl.group": 2, "rl.capacities": "((1.0,1.0),)", "cpu_devices": 1,
        "rl.optimizer.warmup_steps": 0, "data.chain.demos_size": 16, "data.chain.train_size": 16,
        "data.chain.valid_size": 4, "data.chain.test_size": 4, "model.n_layer": 1, "imitate.stage_until": 0.0,
        "imitate.cot_steps": 0, "imitate.stage_steps": 0, "imitate.final_steps": 1, "imitate.batch_size": 4,
        "imitate.control": False, "imitate.recipe": "averaged", "imitate.optimizer.warmup_steps": 0,
        "stages": "('imitate','cold_start','rl','evaluate')", "gate.enabled": True, "dropout.rate": 0.0,
        "cold_start.steps": 1, "cold_start.batch_size": 4, "cold_start.evaluate_every": 1,
        "cold_start.micro_batches": 1, "latent_policy.name": "tokens", "rl.objectives": "('exact','right_answers')",
        "evaluate.scorers": "('sure_stop',)", "evaluate.samples": 2, "evaluate.seeds": 1,
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "slpo_jax.main",
        f"--config={ROOT / 'configs' / 'quickstart.py'}",
    ]
    command += [f"--register={_example_file(name, tmp_path)}" for name in names]
    command += [
        "--workdir=work",
        *(f"--config.{key}={value}" for key, value in small.items()),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "work" / "report.json").read_text())["eval"]
    assert "best@2_sure_stop" in rows["right_answers"]["test"]
    assert "best@2_sure_stop" in rows["exact"]["test"]

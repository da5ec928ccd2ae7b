"""The benchmark of Pass@k evaluation at tiny shapes: both implementations do the same work, and its figures add up."""

import dataclasses
import functools
import json
import sys
from importlib.util import find_spec

import jax
import numpy as np
import pytest

from benchmarks import passk
from benchmarks.measure import passk_work
from benchmarks.measure.passk_work import GSM8K_LENGTHS, PasskShapes
from benchmarks.measure.workload import load_config, random_problems
from benchmarks.passk import OURS
from slpo_jax.config import read_config
from slpo_jax.errors import UserError
from slpo_jax.run.experiment import build

PROBLEMS = 5
SAMPLES = 2
BATCH = 4
LATENTS = 3
ANSWER = 3
SLOTS = 4
CHANGES = {
    "model.n_layer": 1, "model.n_embd": 16, "max_latents": LATENTS, "max_answer_tokens": SLOTS, "cpu_devices": 1,
    "prompt_slots": (12, 32), "evaluate.batch_size": BATCH, "data.graph.train_size": 20, "data.graph.valid_size": 10,
    "data.graph.test_size": 10,
}  # fmt: skip
QUANTILES = ((0, 5), (0.5, 9), (1, 20))
TINY = PasskShapes("graph.py", CHANGES, PROBLEMS, ANSWER, prompt_quantiles=QUANTILES)
NAMES = [
    OURS,
    "torch, file's order",
    "torch, sorted by length",
    "torch, sorted and compiled",
]


def make_work(tmp_path, **changes):
    shapes = dataclasses.replace(TINY, changes=CHANGES | changes)
    return passk_work.make_work(
        shapes, load_config(shapes), PROBLEMS, SAMPLES, tmp_path
    )


@pytest.fixture(scope="module")
def result():
    torch = "eager" if find_spec("torch") else "none"
    flags = passk.parse(
        [
            "--problems",
            str(PROBLEMS),
            "--samples",
            str(SAMPLES),
            "--rounds",
            "2",
            "--torch",
            torch,
        ]
    )
    return passk.benchmark(TINY, load_config(TINY), flags)


@pytest.mark.nightly
def test_implementations_answer_the_same_prompts(tmp_path, monkeypatch):
    """Without dropout all say the same; of weights whose answers depend on the prompt."""
    torch = pytest.importorskip("torch")
    traced = []
    compile_fast = functools.partial(
        torch.compile, backend=lambda module, _: traced.append(module) or module
    )
    monkeypatch.setattr(torch, "compile", compile_fast)
    work = make_work(
        tmp_path, **{"dropout.rate": 0.0, "objective.slpo.latent_weight": 0.0}
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), work.params
    )
    work = dataclasses.replace(work, params=params)
    found = {name: run(0) for name, run in passk.make_runs(work, "compiled").items()}
    assert list(found) == NAMES
    assert len(traced) > 1  # more than the trial of the compiler
    tokens_NA, latents_N = found[OURS]
    assert len(np.unique(tokens_NA[::SAMPLES], axis=0)) == PROBLEMS
    for tokens, latents in found.values():
        np.testing.assert_array_equal(tokens, tokens_NA)
        np.testing.assert_array_equal(latents, latents_N)


def test_implementations_take_turns_and_the_first_round_is_warm_up():
    asked = []

    def run(name):
        return lambda seed: (
            asked.append((name, seed))
            or (np.array([[1, 7, 0], [1, 2, 3]]), np.array([4, 2]))
        )

    measured = passk.measure({name: run(name) for name in (OURS, "torch")}, rounds=2)
    assert asked == [(name, seed) for seed in range(3) for name in (OURS, "torch")]
    ours, theirs = passk.make_rows(measured, problems=1, samples=2, eos_id=7)
    assert ours["first_seconds"] == measured[OURS][0].seconds
    assert ours["seconds"]["values"] == [each.seconds for each in measured[OURS][1:]]
    assert (theirs["latents"], theirs["answer_tokens"]) == (
        [2, 4],
        [2, 3],
    )  # a row without eos has all slots
    seconds = np.array(theirs["seconds"]["values"])
    np.testing.assert_allclose(theirs["problems_per_second"]["values"], 1 / seconds)
    np.testing.assert_allclose(theirs["rollouts_per_second"]["values"], 2 / seconds)
    np.testing.assert_allclose(
        theirs["ratio_vs_torch"]["values"], seconds / ours["seconds"]["values"]
    )
    assert ours["compile_seconds"] == ours["first_seconds"] - ours["seconds"]["median"]
    assert "compile_seconds" not in theirs
    assert "ratio_vs_torch" not in ours


@pytest.mark.nightly
def test_report_has_every_row_and_the_json_every_number(result):
    text = passk.markdown(result)
    assert json.loads(json.dumps(result)) == result
    assert [row["implementation"] for row in result["rows"]] == NAMES[
        : 3 if find_spec("torch") else 1
    ]
    assert all(
        (row["latents"], row["answer_tokens"]) == ([LATENTS] * 2, [ANSWER] * 2)
        for row in result["rows"]
    )
    lines = text.split("\n\n")[1].splitlines()
    assert len(lines) == 2 + len(result["rows"])
    assert len({line.count("|") for line in lines}) == 1
    assert (
        f"| {OURS} | {result['rows'][0]['problems_per_second']['median']:.2f} (" in text
    )
    assert (
        f"problems {PROBLEMS}; k {SAMPLES}; batch size {BATCH}; mean prompt tokens "
        in text
    )


def test_works_without_torch(tmp_path, monkeypatch):
    work = make_work(
        tmp_path
    )  # transformers, which is imported here, remembers whether there is torch
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "benchmarks.witness.step", raising=False)
    assert list(passk.make_runs(work, "none")) == [OURS]
    with pytest.raises(UserError, match=r"^--torch: .*torch==2.13.0.*--torch none"):
        passk.make_runs(work, "eager")


def test_graph_has_its_test_sets_own_prompts(tmp_path):
    shapes = PasskShapes("graph.py", CHANGES, PROBLEMS, ANSWER, test_set="depth_2")
    config = load_config(shapes)
    work = passk_work.make_work(shapes, config, 7, SAMPLES, tmp_path / "work")
    assert (
        work.problems.prompts
        == build(read_config(config), tmp_path / "other")
        .test_set("depth_2")
        .prompts[:7]
    )
    with pytest.raises(UserError, match=r"--problems: 11 .*10"):
        passk_work.make_work(shapes, config, 11, SAMPLES, tmp_path / "work")


def test_random_prompts_have_the_quantiles_lengths(tmp_path):
    template = make_work(tmp_path).experiment.template
    lengths = np.array(
        list(map(len, random_problems(2_000, GSM8K_LENGTHS, template, 0).prompts))
    )
    shares, tokens = np.transpose(GSM8K_LENGTHS)
    np.testing.assert_allclose(np.quantile(lengths, shares), tokens, atol=2)
    assert abs(lengths.mean() - 59.5) < 1
    assert abs(np.corrcoef(lengths[1:], lengths[:-1])[0, 1]) < 0.1  # in no order
    few = list(map(len, random_problems(32, GSM8K_LENGTHS, template, 0).prompts))
    assert abs(np.mean(few) - lengths.mean()) < 3
    assert few == list(
        map(len, random_problems(32, GSM8K_LENGTHS, template, 0).prompts)
    )
    assert few != list(
        map(len, random_problems(32, GSM8K_LENGTHS, template, 1).prompts)
    )

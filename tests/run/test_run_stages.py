"""What is known of the data before the first stage: solutions that lack steps, and problems that two sets share."""

import json
import re
from pathlib import Path

import pytest

from asked import QUESTION, T, run_config
from codi_run import small_config
from imitation import Crash, crash
from slpo_jax.config import config_checks, read_config
from slpo_jax.data.problem import Problem
from slpo_jax.errors import UserError
from slpo_jax.run import train_imitation
from slpo_jax.run.experiment import build, rows
from slpo_jax.run.run_stages import check_stages
from slpo_jax.run.setup import assemble
from slpo_jax.run.sources import TRAIN, VALID, data_summary
from slpo_jax.run.train_rl import make_optimizer_config, make_training_policy
from small_run import load_config

ICOT = {"recipe": "icot", "c_thought": 0, "final_steps": 400}
ANSWERS = {"cot_steps": 0, "stage_steps": 0, "c_thought": 0}
# What is trained, and the least number of steps of which some are written.
RECIPES = {
    "CoT-SFT": ({"final_steps": 0, "max_latent_stage": 0}, 1),
    "curriculum": ({"cot_steps": 0, "stage_steps": 4}, 1),
    "iCoT": (ICOT, 1),
    "iCoT without CoT-SFT": (ICOT | {"cot_steps": 0}, 1),
    "CODI": ({}, 2),
    "CODI with last steps": ({"distil": {"last_step": True}}, 1),
    "answers alone": (ANSWERS, 0),
}


def _config(name: str, folder: Path):
    config = small_config(folder) if name.startswith("CODI") else load_config()
    config.stages = ("imitate",)
    config.imitate.control = False
    config.data.valid = ""
    if name.startswith("iCoT"):
        config.max_latents = 0
        config.gate.enabled = False
    config.imitate.optimizer.warmup_steps = 0
    config.imitate.update(RECIPES[name][0])
    config_checks.check(config)
    return config


def _with_steps(config, path: Path, counts: list[int]) -> None:
    """Let `config` train on its problems with other numbers of steps, as far as `counts` go."""
    rows = [
        json.loads(line) for line in Path(config.data.train).read_text().splitlines()
    ]
    rows = [
        row | {"steps": (row["steps"] * 2)[:count]}
        for row, count in zip(rows, counts, strict=False)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.data.train = str(path)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_writes_steps_needs_some(name, tmp_path, monkeypatch, warnings):
    config = _config(name, tmp_path)
    fewest = RECIPES[name][1]
    _with_steps(config, tmp_path / "none.jsonl", [max(0, fewest - 1)] * 20)
    experiment = build(read_config(config), tmp_path / "none")
    if fewest:
        message = f"config.data.train: none of its 20 problems has {fewest} step(s) to imitate"
        with pytest.raises(
            UserError,
            match=f"^{re.escape(message)}[^\n]*; give solutions in a field that docs/data.md names",
        ):
            check_stages(experiment)
    else:
        check_stages(experiment)
    config = _config(name, tmp_path)
    _with_steps(config, tmp_path / "some.jsonl", [0, 0, 0, fewest, 2])
    experiment = build(read_config(config), tmp_path / "some")
    plans = check_stages(experiment)
    monkeypatch.setattr(train_imitation, "make_optimizer", crash)
    with pytest.raises(Crash):
        train_imitation.train(plans["imitate"])
    line = "imitate: 3 of 5 problems have no steps: just answers are written"
    assert [each for each in warnings if "steps" in each] == ([line] if fewest else [])


def test_words_alone_have_no_number_of_latents_to_choose(tmp_path):
    config = _config("CoT-SFT", tmp_path)
    config.update(max_latents=0, min_latents=1)
    config.gate.enabled = False
    config.imitate.final_latents = "steps"
    experiment = build(config_checks.check(config), tmp_path / "run")
    assert {row.rules for row in rows(experiment)} == {(0,)}


def test_problems_that_sets_share_are_counted(tmp_path, warnings):
    config = load_config()
    train = Path(config.data.train).read_text().splitlines()
    (tmp_path / "valid.jsonl").write_text("\n".join(train[:3]))
    # Of five, two are trained on and one is chosen by; white space makes no difference.
    mine = "\n".join(
        [*train[2:5], *(line.replace(" now ?", " now now ?") for line in train[5:7])]
    )
    (tmp_path / "mine.jsonl").write_text(mine.replace(" has", "  has"))
    config.stages, config.data.valid = (
        ("imitate", "evaluate"),
        str(tmp_path / "valid.jsonl"),
    )
    config.data.eval.mine = str(tmp_path / "mine.jsonl")
    config.evaluate.datasets = ("mine", "made", "twin")
    (tmp_path / "twin.jsonl").write_text("\n".join(mine.splitlines()[4:]))
    config.data.eval.twin = str(tmp_path / "twin.jsonl")
    check_stages(build(read_config(config), tmp_path / "work"))
    assert [line for line in warnings if "also in" in line] == [
        f"config.data.train: left out 3 of {len(train)} problems, which are also in config.data.valid",
        "config.data.eval.mine: 2 of 5 problems are also in config.data.train",
        "config.data.eval.mine: 1 of 5 problems are also in config.data.valid",
        "config.data.eval.twin: 1 of 1 problems are also in config.data.eval.mine",
    ]


def test_solutions_may_have_unknown_words_where_no_step_is_written(tmp_path):
    config = load_config()
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"question": "Tom has 1 pens . How many now ?", "answer": "1", "rationale": "Obviously one."}\n'
    )
    config.data.train = config.data.eval.mine = str(path)
    config.stages = ("rl", "evaluate")
    experiment = build(read_config(config), tmp_path / "work")
    assert experiment.train.problems == experiment.test_set("mine").problems
    assert experiment.train.problems[0].steps == ("Obviously one.",)
    config.stages = ("imitate",)
    with pytest.raises(UserError, match=r"config\.data\.train: .*: 'Obviously one\.'"):
        _ = build(read_config(config), tmp_path / "work").train


def test_all_that_is_too_long_is_said_at_once(tmp_path):
    config = load_config()
    config.stages = ("imitate", "rl", "evaluate")
    warmups = {
        "imitate": 5,
        "cold_start": 8,
        "rl": 7,
    }  # of 4, 7 and 6 steps; the cold start isn't asked for
    for stage, steps in warmups.items():
        config[stage].optimizer.warmup_steps = steps
    settings = config_checks.check(config)
    with pytest.raises(UserError) as caught:
        check_stages(build(settings, tmp_path / "work"))
    said = [text.partition(":")[0] for text in str(caught.value).split("; and ")]
    assert said == [
        "config.imitate.optimizer.warmup_steps",
        "config.rl.optimizer.warmup_steps",
    ]


def test_what_was_understood_is_said_before_training(tmp_path):
    config = _config("CoT-SFT", tmp_path)
    path = tmp_path / "set.jsonl"
    answers = [([], "4.0"), (["1 + 2 = 3", "3 + 1 = 4"], "4"), (["1 + 2 = 3"], "3")]
    rows = [
        {"id": "1", "question": "Tom has 1 pens .", "steps": each, "answer": said}
        for each, said in answers
    ]
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [rows[1], rows[0], rows[2]])
    )
    config.data.train = config.data.eval.mine = str(path)
    experiment = build(read_config(config), tmp_path / "work")
    answers_are = "answers are numbers, read after the last #"
    assert data_summary("config.data.train", experiment.train) == [
        f"config.data.train: 3 problems, 1.0 steps each, 1 without steps, {answers_are}",
        "  question from question; answer from answer; steps from steps",
        "  not used: id",
        r"  the first: 'Tom has 1 pens .\n' | '1 + 2 = 3\n3 + 1 = 4\n' | '### 4'",
    ]
    said = data_summary("config.data.eval.mine", experiment.test_set("mine"))
    assert (said[0], len(said)) == (
        f"config.data.eval.mine: 3 problems, {answers_are}",
        3,
    )


def test_training_rollouts_are_sampled_as_the_config_says(tmp_path):
    config = load_config()
    config.rl.update(top_k=7, top_p=0.75, temperature=0.5, stopping="threshold")
    config.objective.grpo.temperature = 1.25
    config.evaluate.update(
        top_k=3, top_p=0.25, temperature=2.0
    )  # which is not training's
    experiment = build(read_config(config), tmp_path / "work")
    for name, temperature in (("slpo", 0.5), ("grpo", 1.25)):
        found = make_training_policy(experiment, experiment.stage(name).settings).config
        assert (found.top_k, found.top_p, found.temperature, found.stopping) == (
            7,
            0.75,
            temperature,
            "threshold",
        )


def test_an_objective_s_own_rate_and_schedule_are_its_optimizer_s(tmp_path):
    config = load_config()
    config.rl.optimizer.update(
        learning_rate=0.25, schedule="linear", final_fraction=0.5
    )
    config.objective.answer_only.update(
        learning_rate=0.125, schedule="constant", steps=50
    )
    config.objective.grpo.update(updates=3, steps=40)
    experiment = build(read_config(config), tmp_path / "work")
    found = [make_optimizer_config(experiment.stage(name).settings, experiment.config.objective[name])
             for name in ("slpo", "answer_only", "grpo")]  # fmt: skip
    assert [
        (each.learning_rate, each.schedule, each.total_steps, each.final_fraction)
        for each in found
    ] == [
        (0.25, "linear", config.rl.steps, 0.5),
        (0.125, "constant", 50, 0.5),
        (0.25, "linear", 3 * 40, 0.5),  # a schedule counts updates
    ]


def test_the_limit_of_evaluations_is_none_of_training():
    config = run_config("coconut_gpt2")
    config.evaluate.limit = 1
    setup = assemble(read_config(config))
    problems = [Problem(n * f"{QUESTION} ", (), "5") for n in (1, 3)]
    assert len(setup.encode(VALID, problems)) == 2
    with pytest.raises(UserError, match=r"^config\.data\.train: problem 1 .*\d+"):
        setup.encode(TRAIN, problems)


def test_evaluations_have_budget_noise_and_sampling_of_their_own():
    config = run_config("coconut_gpt2")
    own = {
        "max_answer_tokens": 2,
        "dropout": 0.25,
        "temperature": 0.7,
        "top_k": 3,
        "top_p": 0.5,
    }
    config.evaluate.update(own)
    setup = assemble(read_config(config))
    found = setup.evaluator.policy.config
    assert (
        setup.most_prompt == config.model.n_positions - T - own["max_answer_tokens"]
    ), "the last token is not fed"
    assert (
        found.answer_slots,
        found.dropout_rate,
        found.temperature,
        found.top_k,
        found.top_p,
    ) == (*own.values(),)

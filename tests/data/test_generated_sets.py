"""reasoning-gym's tasks as sources of problems, and what judges them."""

import builtins
import pickle

import pytest

from refused import one_line
from slpo_jax.config import Config
from slpo_jax.config.overrides import Text, merge_settings
from slpo_jax.data.generated_sets import GymConfig, common_ends
from slpo_jax.data.problems import load_problems
from slpo_jax.errors import UserError
from slpo_jax.rewards.task_rewards import gym, gym_dataset

SMALL = {"train_size": 64, "valid_size": 8, "test_size": 8}
NO_KEY = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks whose entries have no answer."""
JUNK = ("", "42", "abc", "[1, 2]", "{}", "1 2\n3 4", "(", "None", "é", "-1/0")


@pytest.fixture(autouse=True)
def _package():
    pytest.importorskip("reasoning_gym")


def _set(task, name, **changes):
    return load_problems(
        f"gym:{task}@{name}",
        GymConfig(**SMALL | changes),
        answers="texts",
        unanswered=True,
    )


def _judged(completion, problem):
    return gym(completion, **problem.columns)


def test_settings_come_from_the_config_and_sets_are_apart_by_question():
    flags = {
        "settings.chain_sum.min_terms": "2",
        "settings.chain_sum.max_terms": "3",
        "train_size": "100",
    }
    data = merge_settings(
        Config(), {f"data.gym.{key}": Text(value) for key, value in flags.items()}
    ).data
    read = {role: load_problems("gym:chain_sum", data.of_task("gym:chain_sum"), role, "texts")
            for role in ("train", "validation", "test")}  # fmt: skip
    questions = [
        {problem.question for problem in problems} for problems in read.values()
    ]
    # Some questions came twice.
    assert list(map(len, questions)) == list(map(len, read.values())) == [100, 197, 200]
    assert len(set.union(*questions)) == 497
    other = _set("chain_sum", "test", seed=1, test_size=200, settings=data.gym.settings)
    assert not {problem.question for problem in other} & questions[0]
    for problem in read["test"]:
        expression = problem.columns["entry"]["metadata"]["expression"]
        assert len(expression.split()) in (3, 5)
        assert problem.answer == str(eval(expression))
        texts = problem.answer, f"### {problem.answer}", "7 ### x"
        assert [_judged(text, problem) for text in texts] == [1.0, 1.0, 0.0]


def test_what_all_questions_have_in_common_can_be_left_out():
    whole, bare = (_set("chain_sum", "train", bare=bare) for bare in (False, True))
    assert [each.question for each in bare] == [
        each.columns["entry"]["metadata"]["expression"] for each in whole
    ]
    assert common_ends(["a b 12 c d", "a b 13 d d"]) == ("a b ", " d")
    assert common_ends(["ab", "ac"]) == ("", "")


def test_lines_of_an_answer_stay_apart():
    problem = _set("spiral_matrix", "test")[0]
    assert _judged(f"The answer is: {problem.answer}\n", problem) == 1.0
    grid = _set("game_of_life", "test")[0]
    assert _judged(f"### {grid.answer}", grid) == 1.0


@pytest.mark.parametrize(
    ("source", "settings", "said"),
    [
        ("chainsum", {}, "gym:chainsum: no such task; there are chain_sum, .*106 in all"),
        ("composite", {}, "gym:composite: it is made of other tasks"),
        ("chain_sum@dev", {}, "gym:chain_sum@dev: no such set; give one of train, valid, test"),
        ("chain_sum", {"chain_sum": {"terms": 3}}, "settings.chain_sum.terms: the task has no such setting"),
        ("chain_sum", {"chain_sum": {"min_terms": 0}}, "config.data.gym.settings.chain_sum: .*must be positive"),
        ("rush_hour", {}, "gym:rush_hour: no problem has an answer that can be compared"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(source, settings, said):
    one_line(
        lambda: load_problems(f"gym:{source}", GymConfig(settings=settings, **SMALL)),
        match=said,
    )


def test_without_the_package_a_line_says_how_to_get_it(monkeypatch):
    def missing(name, *args, real=builtins.__import__):
        if name.startswith("reasoning_gym"):
            raise ModuleNotFoundError(name)
        return real(name, *args)

    gym_dataset.cache_clear()
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"gym:lcm: .*slpo_jax\[gym\]"):
        load_problems("gym:lcm", GymConfig(seed=7))


@pytest.mark.nightly
def test_every_task_generates_encodes_and_judges():
    """All but `composite`; a key earns 1, and what can't be read raises nothing."""
    from reasoning_gym.factory import DATASETS

    from slpo_jax.architectures.architecture import Text
    from slpo_jax.data.batches import encode_problems
    from slpo_jax.data.chat import PromptConfig
    from slpo_jax.data.tokenizer import byte_tokenizer

    template = Text().template(byte_tokenizer(), prompt=PromptConfig(answers="texts"))
    without = set()
    lost = set()
    bad = set()
    sizes = {"train_size": 8, "valid_size": 1, "test_size": 1}
    assert len(DATASETS) >= 106
    for task in sorted(DATASETS.keys() - {"composite"}):
        problems = _set(task, "train", **sizes)
        encoded = encode_problems(template, problems)
        assert len(encoded) == len(problems) >= 1, task
        pickle.dumps([problem.columns for problem in problems])
        for problem in problems[:3]:
            if not problem.answer:
                without.add(task)
            elif _judged(template.answer_text(problem.answer), problem) != 1.0:
                lost.add((task, problem.answer))
            bad |= {
                (task, text) for text in JUNK if not 0 <= _judged(text, problem) <= 1
            }
    assert (without, lost, bad) == (NO_KEY, set(), set())

"""Countdown's problems: what they say is so, their right answers by brute force, and sets that keep apart."""

import itertools
from collections import Counter

import numpy as np
import pytest

from slpo_jax.architectures.coconut import Coconut
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.generated import CountdownConfig, countdown_words, solutions, task_reward
from slpo_jax.data.problems import load_problems
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.rewards.reward import Reward
from slpo_jax.rewards.task_rewards import countdown

SIZES = {"demos_size": 800, "train_size": 1000, "valid_size": 100, "test_size": 200}
CONFIG = CountdownConfig(operations=("+", "-", "*", "/"), **SIZES)
SETS = ("demos", "train", "valid", "test", "2", "3", "4", "5")


def _content(problem):
    return tuple(sorted(problem.columns["numbers"])), problem.columns["goal"]


@pytest.mark.parametrize("name", SETS)
def test_a_demonstration_reaches_the_goal_in_its_steps(name):
    words = {*countdown_words(CONFIG.goal)}
    for problem in load_problems(f"countdown:{name}", CONFIG):
        numbers, goal = problem.columns["numbers"], problem.columns["goal"]
        assert problem.question == f"{' '.join(map(str, numbers))} = {goal}"
        first, *rest = problem.answer.split()
        value, steps = int(first), []
        for sign, number in zip(rest[::2], rest[1::2], strict=True):
            made = eval(f"{value} {sign} {number}")
            assert made == int(made)
            assert 0 <= made <= 99
            steps.append(f"{value} {sign} {number} = {int(made)}")
            value = int(made)
        assert (problem.steps, value) == (tuple(steps), goal)
        assert sorted(map(int, [first, *rest[1::2]])) == sorted(numbers)
        assert countdown(numbers, goal, f"### {problem.answer}", problem.columns["operations"]) == 1.0
        assert {*problem.question.split(), *problem.answer.split(), *" ".join(steps).split()} <= words
        assert len(numbers) in ({int(name)} if name.isdecimal() else {3, 4})


@pytest.mark.parametrize("operations", ["+-*", "+-*/"])
def test_right_answers_are_those_that_the_verifier_takes(operations):
    sets = [load_problems(f"countdown:{name}", CONFIG)[:12] for name in ("test", "2")]
    problems = [problem.columns for problems in sets for problem in problems]
    for columns in [*problems, {"numbers": [2, 2, 4], "goal": 8}, {"numbers": [3, 3, 3], "goal": 9}]:
        numbers, goal = columns["numbers"], columns["goal"]
        answers = {
            " ".join([str(order[0]), *(f"{sign} {number}" for sign, number in zip(signs, order[1:], strict=True))])
            for order in itertools.permutations(numbers)
            for signs in itertools.product(operations, repeat=len(numbers) - 1)
        }
        right = sum(countdown(numbers, goal, answer, operations) == 1.0 for answer in answers)
        assert solutions(numbers, goal, operations) == right
        if operations == "+-*/" and "solutions" in columns:
            assert columns["solutions"] == right > 0


def test_a_reward_judges_tokens_alike_on_host_and_device():
    """Of the task's own tokenizer: demonstrations, and those with some tokens changed."""
    template = Coconut().template(load_tokenizer("countdown:99"), prompt=PromptConfig(answers="texts"))
    reward = Reward(task_reward("countdown:test"), template.answer_style, template.token_bytes, template.eos_ids)
    problems, rng = load_problems("countdown:test", CONFIG), np.random.default_rng(0)
    ids = template.answer_ids([problem.answer for problem in problems], Counter())
    tokens_NA = np.full((len(problems), 12), template.eos_id)
    for tokens_A, own in zip(tokens_NA, ids, strict=True):
        tokens_A[: len(own)] = own
        tokens_A[rng.integers(0, 12, rng.integers(3))] = rng.integers(0, len(template.token_bytes))
    on_device = reward.on_device(tokens_NA, reward.encoded(problems, reward.width(problems)))
    expected = reward.on_host(tokens_NA, problems)
    assert 50 < expected.sum() < 150
    assert on_device.tolist() == (expected == 1).tolist()


@pytest.mark.parametrize("seed", [0, 1])
def test_sets_are_apart_by_numbers_and_goal_whatever_the_seed_and_the_operations(seed):
    other = CountdownConfig(seed=seed, operations=("+", "*"), **SIZES)
    sets = {name: {_content(each) for each in load_problems(f"countdown:{name}", CONFIG if name == "demos" else other)}
            for name in SETS}  # fmt: skip
    assert all(not one & two for one, two in itertools.combinations(sets.values(), 2))
    assert [len(sets[name]) for name in ("valid", "test", "3", "4")] == [100, 200, 200, 200]  # none comes twice
    larger = CountdownConfig(**vars(CONFIG) | {"train_size": 1200})
    assert load_problems("countdown:train", larger)[:1000] == load_problems("countdown:train", CONFIG)


def test_numbers_of_demonstrations_and_right_answers_are_as_asked_for():
    settings = CountdownConfig(numbers=(3, 5), demo_numbers=(3, 4), solutions=(2, 8), **SIZES)
    counts = {name: Counter(len(each.columns["numbers"]) for each in load_problems(f"countdown:{name}", settings))
              for name in ("demos", "train")}  # fmt: skip
    assert (counts["demos"].keys(), counts["train"].keys()) == ({3, 4}, {3, 4, 5})
    assert min(counts["demos"].values()) > 150
    assert {each.columns["solutions"] for each in load_problems("countdown:train", settings)} <= {*range(2, 9)}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: load_problems("countdown:7"), "countdown:7: no such set; .* demos, train, .* numbers from 2 to 6"),
        (lambda: load_problems("countdown:test", CountdownConfig(solutions=(9_999, 0))), "problems; .*raise config"),
        (lambda: load_problems("countdown:test", CountdownConfig(largest=3, goal=2, operations=("+",))), "no such"),
        (lambda: CountdownConfig(operations=("^",)), r"operations: .*'\^' is none of"),
        (lambda: CountdownConfig(numbers=(4, 3)), "CountdownConfig.numbers: .*the fewest and the most"),
        (lambda: CountdownConfig(demo_numbers=(3,)), "CountdownConfig.demo_numbers: .*the fewest and the most"),
        (lambda: CountdownConfig(solutions=(8, 2)), "CountdownConfig.solutions: .*the fewest and the most"),
        (lambda: load_tokenizer("countdown:0"), "config.tokenizer: countdown:0: 0 is not valid; .* from 1"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(make, said):
    with pytest.raises(UserError, match=said) as found:
        make()
    assert "\n" not in str(found.value)

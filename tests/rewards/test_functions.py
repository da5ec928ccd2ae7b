"""What a reward is given and may give: functions of what they name, one by one or, as TRL's, of lists."""

import sys

import numpy as np
import pytest

from slpo_jax.config.registry import register_reward
from slpo_jax.data.chat import PromptConfig, text_template
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import byte_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.rewards.functions import asked_of, names_of
from slpo_jax.rewards.reward import CORRECT, REWARDS, DeviceReward, Reward, RewardEntry
from slpo_jax.rewards.verifier import byte_table, is_after_mark

PROBLEMS = [Problem(f"pick {a}", (f"{a}",), "", {"pair": [a, a + 1]}) for a in (3, 7)]
TEXTS = ["4", "5"]
TEMPLATE = text_template(byte_tokenizer(), PromptConfig())


def either(pair, completion):
    return completion in map(str, pair)


def trl_style(completions, prompts, pair, **columns):
    assert columns == {"steps": [["3"], ["7"]], "question": prompts, "answer": ["", ""]}
    return [float(c in map(str, p)) for c, p in zip(completions, pair, strict=True)]


def reward(*names):
    return Reward(names, TEMPLATE.answer_style, TEMPLATE.token_bytes, TEMPLATE.eos_ids)


def tokens_of(*texts):
    """One that ends with ~ has no end."""
    rows = np.full((len(texts), 12), TEMPLATE.tokenizer("~")["input_ids"][0], np.int32)
    for row, text in zip(rows, texts, strict=True):
        ids = [*TEMPLATE.tokenizer(text)["input_ids"], *[TEMPLATE.eos_id] * (not text.endswith("~"))]
        row[: len(ids)] = ids
    return rows


@pytest.fixture
def registered(monkeypatch):
    """A function registers under its own name."""
    return lambda *made: [monkeypatch.setitem(REWARDS, each.__name__, RewardEntry(each)) for each in made]


@pytest.mark.parametrize("function", [either, trl_style, lambda question, completion, other=5: other == 5 and
                                      (question, completion) == ("pick 3", "4")])  # fmt: skip
def test_a_function_gets_what_it_names(function):
    assert asked_of(function, PROBLEMS, TEXTS) == [1.0, 0.0]


def test_what_a_function_names():
    assert names_of(either).columns == {"pair"}
    assert names_of(trl_style).columns is None
    assert not RewardEntry(either).needs_answer
    assert not RewardEntry(lambda completion, answer="": 1.0).needs_answer
    assert RewardEntry(lambda completion, answer: 1.0).needs_answer
    for function in (lambda *texts: 1.0, lambda question, /, completion: 1.0, lambda: 1.0):
        with pytest.raises(UserError, match=r"^reward: <lambda> (names nothing|takes question) .*; give it arguments"):
            register_reward("mine", function)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("good", r"f gives 'good' for 'pick 3'; return a finite number"),
        (float("nan"), r"f gives nan for 'pick 3'; return a finite number"),
        ([1.0], r"f gives \[1.0\] for 'pick 3'; return a finite number"),
        (10**400, r"f gives an integer beyond float32 for 'pick 3'; return a finite number"),
    ],
)
def test_what_is_no_number_is_one_line(given, said):
    with pytest.raises(UserError, match=f"^config.reward: {said}$"):
        asked_of(lambda completion: given, PROBLEMS, TEXTS, "f")


@pytest.mark.parametrize(
    ("given", "said"),
    [([1.0], "1 values"), ([1.0] * 3, "3 values"), (0.5, "0.5"), ("ab", "'ab'"), (["1", 2.0], "'1' for 'pick 3'")],
)
def test_a_list_has_a_number_for_each(given, said):
    with pytest.raises(UserError, match=rf"^config\.reward: f .*{said}"):
        asked_of(lambda completions: given, PROBLEMS, TEXTS, "f")


def test_a_failed_verdict_earns_nothing_and_is_said_once(registered, warnings):
    def fails_on_4(completion):
        if completion == "5":
            sys.exit(3)
        return 1 / (int(completion) - 4)

    registered(fails_on_4)
    found = reward(("fails_on_4", 1.0)).verdicts(tokens_of("4", "3", "4", "6~", "5"), PROBLEMS * 2 + PROBLEMS[:1])
    assert found.failed.tolist() == [True, False, True, False, True]
    assert found.total.tolist() == [0, -1, 0, 0, 0]
    assert warnings == [
        f"reward: fails_on_4 failed on a completion, which earns 0: {error}"
        for error in ("ZeroDivisionError: division by zero", "SystemExit: 3")
    ]
    assert asked_of(lambda completions: [None, 1.0], PROBLEMS, TEXTS) == [None, 1.0]


def test_a_function_that_only_fails_ends_the_run(registered):
    def broken(completion):
        return nothing  # noqa: F821

    registered(broken)
    judge = reward(("broken", 1.0))
    for _ in range(3):  # which counts for nothing
        assert judge.tried([judge.read(row) for row in tokens_of(*"1" * 8)], PROBLEMS * 4).failed.all()
    judge.verdicts(tokens_of(*"1" * 14), PROBLEMS * 7)
    with pytest.raises(UserError, match=r"^config\.reward: broken gave no verdict .* any of its first 16 completions"):
        judge.verdicts(tokens_of("1", "2"), PROBLEMS)


def test_several_earn_their_weighted_sum_and_the_first_says_what_is_right(registered):
    def short(completion):
        return 3.0 * (len(completion) < 2)

    registered(either, short)
    asked, tokens = [*PROBLEMS, *PROBLEMS], tokens_of("3~", "8", "5", "14")
    judge = reward(("either", 1.0), ("short", -0.5))
    found = judge.verdicts(tokens, asked)
    assert found.by_name["either"].tolist() == [0, 1, 0, 0]
    assert found.by_name["short"].tolist() == [0, 3, 3, 0]
    assert found.total.tolist() == [0, -0.5, -1.5, 0]
    assert judge.right([judge.read(row) for row in tokens], asked) == [False, True, False, False]
    assert reward(("short", 1.0), ("either", 1.0)).right([judge.read(row) for row in tokens], asked)[2]
    assert judge.on_device is None


def test_only_one_reward_of_weight_1_is_judged_on_the_device(registered):
    """A verifier in both forms says the same in both: here the answers' own, of a column."""
    column = DeviceReward(byte_table, lambda problem: str(problem.columns["pair"][0]).encode(), is_after_mark)
    REWARDS["first"] = RewardEntry(lambda pair, completion: completion.split()[-1] == str(pair[0]), column)
    try:
        judge, tokens, asked = reward(("first", 1.0)), tokens_of("### 3", "### 3", "### 7", "### 7~"), PROBLEMS * 2
        said = judge.on_device(tokens, judge.encoded(asked, judge.width(asked)))
        assert said.tolist() == judge.on_host(tokens, asked).tolist() == [1, 0, 0, 0]
        assert reward(("first", 2.0)).on_device is None
        assert reward(("first", 1.0), (CORRECT, 1.0)).on_device is None
    finally:
        del REWARDS["first"]

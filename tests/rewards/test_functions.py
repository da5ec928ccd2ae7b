"""What a reward is given and may give: functions of what they name, one by one or, as TRL's, of lists."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.config.registry import register_reward
from slpo_jax.data.chat import PromptConfig, text_template
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import byte_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.rewards.functions import Written, asked_of, names_of
from slpo_jax.rewards.reward import CORRECT, REWARDS, DeviceReward, Reward, RewardEntry
from slpo_jax.rewards.verifier import byte_table, is_after_mark

PROBLEMS = [Problem(f"pick {a}", (f"{a}",), "", {"pair": [a, a + 1]}) for a in (3, 7)]
TEXTS = [Written("4", (4, 0), 2), Written("5", (5, 1, 0), 3)]
TEMPLATE = text_template(byte_tokenizer(), PromptConfig())


def either(pair, completion):
    return completion in map(str, pair)


def trl_style(completions, prompts, pair, **columns):
    own = {
        "completion_ids": [[4, 0], [5, 1, 0]],
        "latents": [2, 3],
        "truncated": [False, False],
    }
    assert (
        columns
        == {"steps": [["3"], ["7"]], "question": prompts, "answer": ["", ""]} | own
    )
    return [float(c in map(str, p)) for c, p in zip(completions, pair, strict=True)]


def reward(*names):
    return Reward(names, TEMPLATE.answer_style, TEMPLATE.token_bytes, TEMPLATE.eos_ids)


def tokens_of(*texts):
    """One that ends with ~ has no end."""
    rows = np.full((len(texts), 12), TEMPLATE.tokenizer("~")["input_ids"][0], np.int32)
    for row, text in zip(rows, texts, strict=True):
        ids = [
            *TEMPLATE.tokenizer(text)["input_ids"],
            *[TEMPLATE.eos_id] * (not text.endswith("~")),
        ]
        row[: len(ids)] = ids
    return rows


@pytest.fixture
def registered(monkeypatch):
    """A function registers under its own name."""
    return lambda *made: [
        monkeypatch.setitem(REWARDS, each.__name__, RewardEntry(each)) for each in made
    ]


@pytest.mark.parametrize("function", [either, trl_style, lambda question, completion, other=5: other == 5 and
                                      (question, completion) == ("pick 3", "4")])  # fmt: skip
def test_a_function_gets_what_it_names(function):
    assert asked_of(function, PROBLEMS, TEXTS) == [1.0, 0.0]


def test_steps_are_the_problem_s_and_not_a_column_of_that_name():
    columns = {"steps": "1 + 1 = 2\n2 + 1 = 3"}
    problem = Problem("1 + 1 + 1", ("1 + 1 = 2", "2 + 1 = 3"), "3", columns)
    seen = []

    def one(completion, steps):
        seen.append(steps)
        return 1.0

    def many(completions, steps, **rest):
        seen.extend(steps)
        return [1.0]

    for function in (one, many):
        asked_of(function, [problem], TEXTS[:1])
    assert seen == [["1 + 1 = 2", "2 + 1 = 3"]] * 2


def test_what_a_function_names():
    assert names_of(either).columns == {"pair"}
    assert names_of(trl_style).columns is None
    assert not RewardEntry(either).needs_answer
    assert not RewardEntry(lambda completion, answer="": 1.0).needs_answer
    assert RewardEntry(lambda completion, answer: 1.0).needs_answer
    for function in (
        lambda *texts: 1.0,
        lambda question, /, completion: 1.0,
        lambda: 1.0,
    ):
        with pytest.raises(
            UserError,
            match=r"^reward: <lambda> (names nothing|takes question) .*; give it arguments",
        ):
            register_reward("mine", function)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("good", r"f gives 'good' for 'pick 3'; return a finite number"),
        ([1.0], r"f gives \[1.0\] for 'pick 3'; return a finite number"),
        (
            10**400,
            r"f gives an integer beyond float32 for 'pick 3'; return a finite number",
        ),
    ],
)
def test_what_is_no_number_is_one_line(given, said):
    with pytest.raises(UserError, match=f"^config.reward: {said}$"):
        asked_of(lambda completion: given, PROBLEMS, TEXTS, "f")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1.0], "1 values"),
        ([1.0] * 3, "3 values"),
        (0.5, "0.5"),
        ("ab", "'ab'"),
        (["1", 2.0], "'1' for 'pick 3'"),
    ],
)
def test_a_list_has_a_number_for_each(given, said):
    with pytest.raises(UserError, match=rf"^config\.reward: f .*{said}"):
        asked_of(lambda completions: given, PROBLEMS, TEXTS, "f")


def judged(judge, texts, problems, **how):
    return judge.judge([judge.read(row) for row in tokens_of(*texts)], problems, **how)


def test_a_failed_verdict_is_none_and_is_said_once(registered, warnings):
    def fails_on_4(completion):
        if completion == "5":
            sys.exit(3)
        return 1 / (int(completion) - 4)

    registered(fails_on_4)
    found = judged(
        reward(("fails_on_4", 1.0)),
        ["4", "3", "4", "6~", "5"],
        PROBLEMS * 2 + PROBLEMS[:1],
    )
    assert found.failed.tolist() == [True, False, True, False, True]
    assert found.cut.tolist() == [False, False, False, True, False]
    assert found.unjudged.tolist() == [True, False, True, True, True]
    assert found.total.tolist() == [0, -1, 0, 0, 0]
    assert warnings == [
        f"reward: fails_on_4 failed on a completion, which isn't judged: {error}"
        for error in ("ZeroDivisionError: division by zero", "SystemExit: 3")
    ]
    assert asked_of(lambda completions: [None, 1.0], PROBLEMS, TEXTS) == [None, 1.0]


def test_none_is_not_applicable_and_ends_nothing(registered, warnings):
    """However often it comes, and however often the process has begun anew."""

    def of_threes(question, completion):
        return float(completion == "3") if "3" in question else None

    def of_others(question, completion):
        return None if "3" in question else 2.0 * (completion == "7")

    def never(completion):
        return None

    registered(of_threes, of_others, never)
    judge = reward(("of_threes", 1.0), ("of_others", 0.5))
    found = judged(
        judge, ["3", "7", "7", "3", "7~"], [*PROBLEMS, *PROBLEMS, PROBLEMS[1]]
    )
    assert found.total.tolist() == [1, 1, 0, 0, 0]
    assert found.right.tolist() == [True, True, False, False, False]
    assert found.unjudged.tolist() == [False, False, False, False, True]
    np.testing.assert_array_equal(
        found.by_name["of_threes"], [1, np.nan, 0, np.nan, np.nan]
    )
    rows = [judge.read(row) for row in tokens_of("3", "7", "7", "3", "7~")]
    assert (
        judge.right(rows, [*PROBLEMS, *PROBLEMS, PROBLEMS[1]]) == found.right.tolist()
    )
    nothing = judged(reward(("never", 1.0)), ["1"] * 40, PROBLEMS * 20)
    assert nothing.unjudged.all()
    assert not nothing.failed.any()
    assert [line for line in warnings if "never" in line] == [
        "reward: never gave None on a completion, which counts as not applicable"
    ]


def test_none_on_some_of_a_problem_s_completions_is_no_way_out(registered):
    def picky(completion):
        return None if completion == "1" else -5.0

    def one(completion):
        return 1.0

    registered(picky, one)
    texts, problems = ["1", "2", "2"], [PROBLEMS[0]] * 3
    found = judged(reward(("picky", 1.0)), texts, problems)
    assert found.unjudged.tolist() == [True, False, False]
    # The next reward says what is right of it, in training as in an evaluation.
    judge = reward(("picky", 1.0), ("one", 1.0))
    found = judged(judge, texts, problems)
    assert found.unjudged.tolist() == [True, False, False]
    rows = [judge.read(row) for row in tokens_of(*texts)]
    assert found.right.tolist() == judge.right(rows, problems) == [True, False, False]


def test_a_function_of_many_gets_the_whole_group(registered):
    """Truncated ones too, of which its verdict counts only if it names them."""
    seen = []

    def lengths(completions, truncated, latents):
        seen.append((completions, truncated, latents))
        return [-float(len(completion)) for completion in completions]

    def shapes(completions, **columns):
        seen.append((completions, columns["truncated"], columns["latents"]))
        return [-1.0] * len(completions)

    registered(lengths, shapes)
    texts = ["4", "55~", "666"]
    problems = [PROBLEMS[0]] * 3
    for name, unjudged in (("lengths", [False] * 3), ("shapes", [False, True, False])):
        judge = reward((name, 1.0))
        rows = [
            judge.read(row, latents)
            for row, latents in zip(tokens_of(*texts), (2, 3, 1), strict=True)
        ]
        found = judge.judge(rows, problems)
        (texts_seen, truncated, latents), *_ = seen
        assert (len(texts_seen), truncated, latents) == (
            3,
            [False, True, False],
            [2, 3, 1],
        )
        assert found.unjudged.tolist() == unjudged
        assert not any(judge.right(rows, problems))
        seen.clear()


def test_what_a_truncated_completion_may_be_judged_by(registered):
    judge = reward((CORRECT, 1.0))
    problems = [Problem("?", (), "4")] * 2
    assert judged(judge, ["### 4", "### 4~"], problems).total.tolist() == [1, 0]
    as_text = judged(
        reward((CORRECT, 1.0)), ["### 4", "### 4"], problems, with_truncated=True
    )
    assert as_text.total.tolist() == [1, 1]

    def of_text(completion):
        return float(completion.startswith("4"))

    def overlong(truncated):
        return -0.5 if truncated else 0.0

    registered(of_text, overlong)
    assert judged(
        reward(("of_text", 1.0)), ["4", "4~"], problems, with_truncated=True
    ).total.tolist() == [1, 1]
    # One that names it judges a truncated completion, whether another leaves it out or reads its text.
    for names in (("of_text", "overlong"), ("overlong", "of_text")):
        judge = reward(*((name, 1.0) for name in names))
        found = judged(judge, ["4", "4~"], problems)
        assert found.total.tolist() == [1, -0.5]
        assert not found.unjudged.any()
        found = judged(judge, ["4", "4~"], problems, with_truncated=True)
        assert found.total.tolist() == [1, 0.5]
        assert not found.right[1] or names[0] == "of_text"
    alone = judged(reward(("of_text", 1.0)), ["4", "4~"], problems)
    assert alone.unjudged.tolist() == [False, True]


def test_a_function_may_use_up_what_it_is_given():
    """A list of a record is the function's own, whether it sees one completion or many, or a chat."""
    chat = [{"role": "user", "content": "pick"}]
    problems = [Problem("pick", (), "", {"allowed": ["4"], "prompt": chat})]

    def of_one(completion, allowed):
        allowed.remove(completion)
        return 1.0

    def of_many(completions, prompts, allowed):
        for texts, prompt, own in zip(completions, prompts, allowed, strict=True):
            prompt.append(texts)
            own.remove(texts[0]["content"])
        return [1.0] * len(completions)

    def of_all(completion, **columns):
        return of_one(completion, columns["allowed"])

    for function in (of_one, of_many, of_all):
        for _ in range(2):
            verdicts = asked_of(function, problems * 2, [Written("4"), Written("4")])
            assert verdicts == [1.0, 1.0]
    assert problems[0].columns["allowed"] == ["4"]
    assert len(chat) == 1


@pytest.mark.parametrize(
    "kind", [list[dict], list[list[dict[str, str]]], "list[list[dict]]"]
)
def test_an_annotation_of_dicts_asks_for_chats(kind):
    def of_chats(completions):
        return [float(len(turns[-1]["content"])) for turns in completions]

    of_chats.__annotations__ = {"completions": kind}
    assert asked_of(of_chats, PROBLEMS, TEXTS) == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["numpy", "jax", "torch", "verl"])
def test_numbers_of_other_programs_are_read(kind):
    def given(completion):
        value = float(completion) / 8
        if kind == "torch":
            return pytest.importorskip("torch").tensor(value)
        return {
            "numpy": np.float32,
            "jax": jnp.float32,
            "verl": lambda x: {"score": x, "acc": True},
        }[kind](value)

    def of_lists(completions):
        return np.array([float(completion) / 8 for completion in completions])

    assert (
        asked_of(given, PROBLEMS, TEXTS)
        == asked_of(of_lists, PROBLEMS, TEXTS)
        == [0.5, 0.625]
    )


def test_an_async_function_is_one_line():
    async def later(completion):
        return 1.0

    with pytest.raises(
        UserError, match=r"^reward: later is an async function; give a plain one"
    ):
        register_reward("later", later)


def test_completions_are_chats_where_prompts_are():
    chat = [{"role": "user", "content": "pick 3"}]
    chats = [
        Problem("pick 3", (), "", {"prompt": chat}),
        Problem("pick 7", (), "", {"prompt": chat}),
    ]
    seen = []

    def of_any(prompts, completions):
        seen.append((prompts, completions))
        return [1.0] * len(prompts)

    def of_chats(completions: list[list[dict[str, str]]], prompts):
        return of_any(prompts, completions)

    said = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    assert (
        asked_of(of_any, chats, TEXTS)
        == asked_of(of_any, PROBLEMS, TEXTS)
        == asked_of(of_chats, PROBLEMS, TEXTS)
    )
    asked = [[{"role": "user", "content": problem.question}] for problem in PROBLEMS]
    assert seen == [
        ([chat, chat], said),
        (["pick 3", "pick 7"], ["4", "5"]),
        (asked, said),
    ]


@pytest.mark.nightly
def test_trl_s_own_rewards_say_what_they_say_in_trl():
    rewards = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    texts = [
        r"<think>a</think> \boxed{\frac{1}{3}}",
        r"\boxed{\frac{1}{2}}",
        r"\boxed{\frac{1}{3}} no",
    ]
    ids = [[1, 2, 3] * 5, [7] * 30, [9] * 12]
    problems = [Problem("?", (), "1/3", {"solution": r"\frac{1}{3}"})] * 3
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    made = {
        "get_soft_overlong_punishment": (25, 20),
        "get_cosine_scaled_reward": (100,),
        "get_repetition_penalty_reward": (),
    }
    names = [name for name in rewards._import_structure.values() for name in name]
    assert {"accuracy_reward", "think_format_reward", "reasoning_accuracy_reward"} <= {
        *names
    }
    for name in names:
        function = getattr(rewards, name)
        function = function(*made[name]) if name in made else function
        expected = function(
            completions=completions, solution=[r"\frac{1}{3}"] * 3, completion_ids=ids
        )
        written = [
            Written(text, tuple(tokens))
            for text, tokens in zip(texts, ids, strict=True)
        ]
        assert asked_of(function, problems, written) == expected, name
        assert len(set(expected)) > 1, name


def test_several_earn_their_weighted_sum_and_the_first_says_what_is_right(registered):
    def short(completion):
        return 3.0 * (len(completion) < 2)

    registered(either, short)
    asked = [*PROBLEMS, *PROBLEMS]
    tokens = tokens_of("3~", "8", "5", "14")
    judge = reward(("either", 1.0), ("short", -0.5))
    found = judge.judge([judge.read(row) for row in tokens], asked)
    np.testing.assert_array_equal(found.by_name["either"], [np.nan, 1, 0, 0])
    np.testing.assert_array_equal(found.by_name["short"], [np.nan, 3, 3, 0])
    assert found.total.tolist() == [0, -0.5, -1.5, 0]
    assert judge.right([judge.read(row) for row in tokens], asked) == [
        False,
        True,
        False,
        False,
    ]
    assert reward(("short", 1.0), ("either", 1.0)).right(
        [judge.read(row) for row in tokens], asked
    )[2]
    assert judge.on_device is None


@pytest.mark.slow
def test_only_one_reward_of_weight_1_is_judged_on_the_device(registered):
    """A verifier in both forms says the same in both: here the answers' own, of a column."""
    column = DeviceReward(
        byte_table,
        lambda problem: str(problem.columns["pair"][0]).encode(),
        is_after_mark,
    )
    REWARDS["first"] = RewardEntry(
        lambda pair, completion: completion.split()[-1] == str(pair[0]), column
    )
    try:
        judge = reward(("first", 1.0))
        tokens = tokens_of("### 3", "### 3", "### 7", "### 7~")
        asked = PROBLEMS * 2
        said = judge.on_device(tokens, judge.encode(asked, judge.width(asked)))
        assert said.tolist() == judge.on_host(tokens, asked).tolist() == [1, 0, 0, 0]
        assert reward(("first", 2.0)).on_device is None
        assert reward(("first", 1.0), (CORRECT, 1.0)).on_device is None
    finally:
        del REWARDS["first"]

"""Generated tasks: Python evaluates chains and countdowns, a search finds the ends of graphs, and sets keep apart."""

import itertools
import re
from collections import Counter, deque

import numpy as np
import pytest

from refused import one_line
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.cli.train import smoke
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.generated import (
    GENERATED,
    ChainConfig,
    CountdownConfig,
    GraphConfig,
    countdown_words,
    solutions,
    task_reward,
)
from slpo_jax.data.problems import DataConfig, load_problems
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.rewards.reward import Reward
from slpo_jax.rewards.task_rewards import countdown

SIZES = {"train_size": 3000, "valid_size": 100, "test_size": 200}
CHAIN = ChainConfig(modulus=23, operations=("+", "-", "*"), **SIZES)
GRAPH = GraphConfig(nodes=14, **SIZES)
BOTH = [("chain", CHAIN), ("graph", GRAPH)]
SETS = ("train", "valid", "test", "1", "2", "3", "4")


@pytest.mark.parametrize("name", SETS)
def test_chains_are_what_python_makes_of_them_from_left_to_right(name):
    for problem in load_problems(f"chain:{name}", CHAIN):
        first, *rest = re.findall(r"(?:[-+*] )?\d+", problem.question)
        assert " ".join([first, *rest]) == problem.question
        value = int(first)
        steps = []
        for operation in rest:
            result = eval(f"{value} {operation}") % 23
            steps.append(f"{value} {operation} = {result}")
            value = result
        assert (problem.steps, problem.answer) == (tuple(steps), str(value))


def test_chains_of_one_depth_have_demonstrations_apart_from_all_other_sets():
    settings = ChainConfig(
        depth=4,
        least_depth=4,
        demos_size=450,
        train_size=3000,
        valid_size=100,
        test_size=200,
    )
    sets = {
        name: load_problems(f"chain:{name}", settings)
        for name in ("demos", "train", "valid", "test", "4")
    }
    questions = {
        name: {problem.question for problem in problems}
        for name, problems in sets.items()
    }
    assert {name: len(found) for name, found in questions.items()} == {
        "demos": 450, "train": 3000, "valid": 100, "test": 200, "4": 200
    }  # fmt: skip
    assert len(set().union(*questions.values())) == 450 + 3000 + 100 + 200 + 200
    assert {len(problem.steps) for problem in sets["demos"]} == {1, 2, 3, 4}
    others = [
        problem
        for name, problems in sets.items()
        if name != "demos"
        for problem in problems
    ]
    assert {len(problem.steps) for problem in others} == {4}
    fewer = ChainConfig(depth=4, least_depth=4, demos_size=64)
    assert [*load_problems("chain:demos", fewer)] == [*sets["demos"]][:64]


def test_a_product_forgets_nothing():
    """Different values stay different: the factors are coprime to the modulus, and none is 1."""
    chains = [
        problem.question
        for problem in load_problems("chain:train", ChainConfig(train_size=3000))
    ]
    assert {
        factor for question in chains for factor in re.findall(r"\* (\d+)", question)
    } == {"3", "7", "9"}


def _content(question):
    edges, rest = question.split(" ends ")
    (first, second), begin = rest.split(" from ")[0].split(), rest.split(" from ")[1]
    return (
        frozenset(tuple(edge.split(">")) for edge in edges.split()),
        frozenset({first, second}),
        begin,
        first,
    )


def _distances(edges, begin):
    found = {begin: 0}
    queue = deque([begin])
    while queue:
        node = queue.popleft()
        for one, other in edges:
            if one == node and other not in found:
                found[other] = found[node] + 1
                queue.append(other)
    return found


@pytest.mark.parametrize("name", SETS)
def test_graphs_reach_one_end_and_both_are_as_deep(name):
    firsts = []
    problems = load_problems(f"graph:{name}", GRAPH)
    for problem in problems:
        edges, ends, begin, first = _content(problem.question)
        distances = _distances(edges, begin)
        assert (
            [end for end in ends if end in distances]
            == [problem.answer]
            == [problem.steps[-1]]
        )
        assert distances[problem.answer] == len(problem.steps)
        assert not {one for one, _ in edges} & ends  # it is an end
        assert all(
            edge in edges
            for edge in zip((begin, *problem.steps), problem.steps, strict=False)
        )
        (other,) = ends - {problem.answer}
        roots = {one for one, _ in edges} - {two for _, two in edges} - {begin}
        assert [_distances(edges, root)[other] for root in roots] == [
            len(problem.steps)
        ]
        assert len(edges) == 2 * len(problem.steps)
        firsts.append(first == problem.answer)
    # Five standard errors.
    assert abs(sum(firsts) / len(firsts) - 0.5) < 2.5 / len(firsts) ** 0.5


@pytest.mark.parametrize(("task", "settings"), BOTH)
def test_depths_are_those_asked_for_and_the_training_s_are_alike(task, settings):
    for name in SETS[3:]:
        problems = load_problems(f"{task}:{name}", settings)
        assert {len(problem.steps) for problem in problems} == {int(name)}
    counts = Counter(
        len(problem.steps) for problem in load_problems(f"{task}:train", settings)
    )
    assert counts.keys() == {1, 2, 3}
    assert min(counts.values()) > 1000 - 5 * 26  # Five standard errors.
    assert {
        len(problem.steps) for problem in load_problems(f"{task}:test", settings)
    } == {1, 2, 3}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("task", "settings"), BOTH)
def test_no_held_out_problem_is_trained_on_whatever_the_seed(task, settings, seed):
    """Nor is one in two held-out sets that mix; an edge's place, or an end's, makes no other problem."""
    content = (lambda question: _content(question)[:3]) if task == "graph" else str
    other = type(settings)(**{**vars(settings), "seed": seed})
    train = {
        content(problem.question)
        for problem in load_problems(f"{task}:train", settings)
    }
    held_out = [
        [content(each.question) for each in load_problems(f"{task}:{name}", other)]
        for name in SETS[1:]
    ]
    every = [each for found in held_out for each in found]
    assert not train & set(every)
    assert len(every) == len(set(every))


@pytest.mark.parametrize(("task", "settings"), BOTH)
def test_sets_are_the_same_again_and_the_beginning_of_larger_ones(task, settings):
    larger = type(settings)(**{**vars(settings), "train_size": 3500})
    assert load_problems(f"{task}:train", larger)[:3000] == load_problems(
        f"{task}:train", settings
    )
    other = type(settings)(**{**vars(settings), "seed": 1})
    assert load_problems(f"{task}:test", other) != load_problems(
        f"{task}:test", settings
    )


def test_few_problems_are_said():
    """Of a chain of one step modulo 7 there are 7 (6 + 5) = 77, and all are trained on or in one of three sets."""
    settings = ChainConfig(depth=1, modulus=7)
    said = {}
    for name in ("train", "valid", "test", "1"):
        problems = load_problems(f"chain:{name}", settings)
        questions = said[name] = {problem.question for problem in problems}
        # The few come again and again.
        assert len(problems) == (60_000 if name == "train" else len(questions))
        (line,) = problems.warnings
        assert line.startswith(f"chain:{name}: {len(questions)} of ")
        assert line.endswith("raise config.data.chain.modulus, or add operations")
    assert sum(map(len, said.values())) == len(set.union(*said.values())) == 77
    assert load_problems("chain:valid", CHAIN).warnings == ()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: load_problems("chain:0"), "chain:0: no such set; give one of train, valid, test or a number of steps"),
        (lambda: load_problems("graph:5"), "graph:5: no such set; .* from 1 to 4"),
        (lambda: load_problems("graph:large"), "graph:large: no such set"),
        (lambda: load_problems("chain:1", ChainConfig(modulus=3, operations=("+",))), "such problems; .*raise config"),
        (lambda: ChainConfig(depth=0), "ChainConfig.depth: 0 is not valid"),
        (lambda: ChainConfig(least_depth=4), "ChainConfig.least_depth: .*more than depth"),
        (lambda: load_problems("chain:demos"), "chain:demos: no such set; give one of train, valid, test or a number"),
        (lambda: ChainConfig(modulus=2), "ChainConfig.modulus: 2 is not valid"),
        (lambda: ChainConfig(operations=("/",)), "ChainConfig.operations: .*'/' is none of"),
        (lambda: GraphConfig(depth=0), "GraphConfig.depth: 0 is not valid"),
        (lambda: GraphConfig(depth=12), "GraphConfig.nodes: 10 is not valid; 12 hops need 26"),
        (lambda: load_problems("countdown:7"), "countdown:7: no such set; .* demos, train, .* numbers from 2 to 6"),
        (lambda: load_problems("countdown:test", CountdownConfig(solutions=(9_999, 0))), "problems; .*raise config"),
        (lambda: load_problems("countdown:test", CountdownConfig(largest=3, goal=2, operations=("+",))), "no such"),
        (lambda: CountdownConfig(operations=("^",)), r"operations: .*'\^' is none of"),
        (lambda: CountdownConfig(numbers=(4, 3)), "CountdownConfig.numbers: .*the fewest and the most"),
        (lambda: CountdownConfig(demo_numbers=(3,)), "CountdownConfig.demo_numbers: .*the fewest and the most"),
        (lambda: CountdownConfig(solutions=(8, 2)), "CountdownConfig.solutions: .*the fewest and the most"),
        (lambda: load_tokenizer("countdown:0"), "config.tokenizer: countdown:0: 0 is not valid; .* from 1"),
        (lambda: load_tokenizer("graph:1000"), "config.tokenizer: graph:1000: 1000 is not valid; .* to 200"),
        (lambda: load_tokenizer("graph:"), "config.tokenizer: graph:: its number is missing; write e.g. graph:30"),
        (lambda: load_tokenizer("chain:1"), "config.tokenizer: chain:1: 1 is not valid; .* to 1000"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(make, said):
    one_line(make, match=said)


def test_an_edge_is_a_word_of_the_graphs_tokenizer():
    template = Coconut().template(load_tokenizer("graph:14"))
    problems = load_problems("graph:test", GRAPH)
    encoded = encode_problems(template, problems)
    for problem, prompt, steps in zip(
        problems, encoded.prompts, encoded.steps, strict=True
    ):
        # The line break and the start marker.
        assert len(prompt) == len(problem.question.split()) + 2
        assert [len(step) for step in steps] == [2] * len(problem.steps)
    with pytest.raises(
        UserError, match=r"the tokenizer doesn't know .*config\.tokenizer"
    ):
        encode_problems(Coconut().template(load_tokenizer("graph:4")), problems)


def test_every_task_has_its_section():
    """And a smoke test cuts each."""
    from slpo_jax.config import Config

    assert {name: getattr(DataConfig(), name) for name in GENERATED} == {
        name: task.settings() for name, task in GENERATED.items()
    }
    data = smoke(Config())[0].data
    assert {getattr(data, name).train_size for name in GENERATED} == {512}


COUNTDOWN_SIZES = {
    "demos_size": 800,
    "train_size": 1000,
    "valid_size": 100,
    "test_size": 200,
}
COUNTDOWN = CountdownConfig(operations=("+", "-", "*", "/"), **COUNTDOWN_SIZES)
DRAWN = ("demos", "train", "valid", "test", "2", "3", "4", "5")


def _asked(problem):
    return tuple(sorted(problem.columns["numbers"])), problem.columns["goal"]


@pytest.mark.parametrize("name", DRAWN)
def test_a_demonstration_reaches_the_goal_in_its_steps(name):
    words = {*countdown_words(COUNTDOWN.goal)}
    for problem in load_problems(f"countdown:{name}", COUNTDOWN):
        numbers = problem.columns["numbers"]
        goal = problem.columns["goal"]
        assert problem.question == f"{' '.join(map(str, numbers))} = {goal}"
        first, *rest = problem.answer.split()
        value = int(first)
        steps = []
        for sign, number in zip(rest[::2], rest[1::2], strict=True):
            made = eval(f"{value} {sign} {number}")
            assert made == int(made)
            assert 0 <= made <= 99
            steps.append(f"{value} {sign} {number} = {int(made)}")
            value = int(made)
        assert (problem.steps, value) == (tuple(steps), goal)
        assert sorted(map(int, [first, *rest[1::2]])) == sorted(numbers)
        assert (
            countdown(
                numbers, goal, f"### {problem.answer}", problem.columns["operations"]
            )
            == 1.0
        )
        assert {
            *problem.question.split(),
            *problem.answer.split(),
            *" ".join(steps).split(),
        } <= words
        assert len(numbers) in ({int(name)} if name.isdecimal() else {3, 4})


@pytest.mark.parametrize("operations", ["+-*", "+-*/"])
def test_right_answers_are_those_that_the_verifier_takes(operations):
    sets = [
        load_problems(f"countdown:{name}", COUNTDOWN)[:12] for name in ("test", "2")
    ]
    problems = [problem.columns for problems in sets for problem in problems]
    for columns in [
        *problems,
        {"numbers": [2, 2, 4], "goal": 8},
        {"numbers": [3, 3, 3], "goal": 9},
    ]:
        numbers = columns["numbers"]
        goal = columns["goal"]
        answers = {
            " ".join(
                [
                    str(order[0]),
                    *(
                        f"{sign} {number}"
                        for sign, number in zip(signs, order[1:], strict=True)
                    ),
                ]
            )
            for order in itertools.permutations(numbers)
            for signs in itertools.product(operations, repeat=len(numbers) - 1)
        }
        right = sum(
            countdown(numbers, goal, answer, operations) == 1.0 for answer in answers
        )
        assert solutions(numbers, goal, operations) == right
        if operations == "+-*/" and "solutions" in columns:
            assert columns["solutions"] == right > 0


@pytest.mark.slow
def test_a_reward_judges_tokens_alike_on_host_and_device():
    """Of the task's own tokenizer: demonstrations, and those with some tokens changed."""
    template = Coconut().template(
        load_tokenizer("countdown:99"), prompt=PromptConfig(answers="texts")
    )
    reward = Reward(
        task_reward("countdown:test"),
        template.answer_style,
        template.token_bytes,
        template.eos_ids,
    )
    problems = load_problems("countdown:test", COUNTDOWN)
    rng = np.random.default_rng(0)
    ids = template.answer_ids([problem.answer for problem in problems], Counter())
    tokens_NA = np.full((len(problems), 12), template.eos_id)
    for tokens_A, own in zip(tokens_NA, ids, strict=True):
        tokens_A[: len(own)] = own
        tokens_A[rng.integers(0, 12, rng.integers(3))] = rng.integers(
            0, len(template.token_bytes)
        )
    on_device = reward.on_device(
        tokens_NA, reward.encode(problems, reward.width(problems))
    )
    expected = reward.on_host(tokens_NA, problems)
    assert 50 < expected.sum() < 150
    assert on_device.tolist() == (expected == 1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_sets_are_apart_by_numbers_and_goal_whatever_the_seed_and_the_operations(seed):
    other = CountdownConfig(seed=seed, operations=("+", "*"), **COUNTDOWN_SIZES)
    configs = {name: COUNTDOWN if name == "demos" else other for name in DRAWN}
    sets = {name: {_asked(each) for each in load_problems(f"countdown:{name}", config)}
            for name, config in configs.items()}  # fmt: skip
    assert all(not one & two for one, two in itertools.combinations(sets.values(), 2))
    # None comes twice.
    assert [len(sets[name]) for name in ("valid", "test", "3", "4")] == [
        100,
        200,
        200,
        200,
    ]
    larger = CountdownConfig(**vars(COUNTDOWN) | {"train_size": 1200})
    assert load_problems("countdown:train", larger)[:1000] == load_problems(
        "countdown:train", COUNTDOWN
    )


def test_numbers_of_demonstrations_and_right_answers_are_as_asked_for():
    settings = CountdownConfig(
        numbers=(3, 5), demo_numbers=(3, 4), solutions=(2, 8), **COUNTDOWN_SIZES
    )
    counts = {name: Counter(len(each.columns["numbers"]) for each in load_problems(f"countdown:{name}", settings))
              for name in ("demos", "train")}  # fmt: skip
    assert (counts["demos"].keys(), counts["train"].keys()) == ({3, 4}, {3, 4, 5})
    assert min(counts["demos"].values()) > 150
    assert {
        each.columns["solutions"] for each in load_problems("countdown:train", settings)
    } <= {*range(2, 9)}

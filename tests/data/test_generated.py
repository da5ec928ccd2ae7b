"""Generated tasks: Python evaluates the chains, a search of the graphs finds the ends, and the sets keep apart."""

import re
from collections import Counter, deque

import pytest

from slpo_jax.architectures.coconut import Coconut
from slpo_jax.cli.train import smoke
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.generated import GENERATED, ChainConfig, GraphConfig
from slpo_jax.data.problems import DataConfig, load_problems
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError

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
        value, steps = int(first), []
        for operation in rest:
            result = eval(f"{value} {operation}") % 23
            steps.append(f"{value} {operation} = {result}")
            value = result
        assert (problem.steps, problem.answer) == (tuple(steps), str(value))


def test_a_product_forgets_nothing():
    """Different values stay different: the factors are coprime to the modulus, and none is 1."""
    chains = [problem.question for problem in load_problems("chain:train", ChainConfig(train_size=3000))]
    assert {factor for question in chains for factor in re.findall(r"\* (\d+)", question)} == {"3", "7", "9"}


def _content(question):
    edges, rest = question.split(" ends ")
    (first, second), begin = rest.split(" from ")[0].split(), rest.split(" from ")[1]
    return frozenset(tuple(edge.split(">")) for edge in edges.split()), frozenset({first, second}), begin, first


def _distances(edges, begin):
    found, queue = {begin: 0}, deque([begin])
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
        assert [end for end in ends if end in distances] == [problem.answer] == [problem.steps[-1]]
        assert distances[problem.answer] == len(problem.steps)
        assert not {one for one, _ in edges} & ends  # it is an end
        assert all(edge in edges for edge in zip((begin, *problem.steps), problem.steps, strict=False))
        (other,) = ends - {problem.answer}
        roots = {one for one, _ in edges} - {two for _, two in edges} - {begin}
        assert [_distances(edges, root)[other] for root in roots] == [len(problem.steps)]
        assert len(edges) == 2 * len(problem.steps)
        firsts.append(first == problem.answer)
    assert abs(sum(firsts) / len(firsts) - 0.5) < 2.5 / len(firsts) ** 0.5  # five standard errors


@pytest.mark.parametrize(("task", "settings"), BOTH)
def test_depths_are_those_asked_for_and_the_training_s_are_alike(task, settings):
    for name in SETS[3:]:
        problems = load_problems(f"{task}:{name}", settings)
        assert {len(problem.steps) for problem in problems} == {int(name)}
    counts = Counter(len(problem.steps) for problem in load_problems(f"{task}:train", settings))
    assert counts.keys() == {1, 2, 3}
    assert min(counts.values()) > 1000 - 5 * 26  # five standard errors
    assert {len(problem.steps) for problem in load_problems(f"{task}:test", settings)} == {1, 2, 3}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("task", "settings"), BOTH)
def test_no_held_out_problem_is_trained_on_whatever_the_seed(task, settings, seed):
    """Nor is one in two held-out sets that mix; an edge's place, or an end's, makes no other problem."""
    content = (lambda question: _content(question)[:3]) if task == "graph" else str
    other = type(settings)(**{**vars(settings), "seed": seed})
    train = {content(problem.question) for problem in load_problems(f"{task}:train", settings)}
    held_out = [[content(each.question) for each in load_problems(f"{task}:{name}", other)] for name in SETS[1:]]
    every = [each for found in held_out for each in found]
    assert not train & set(every)
    assert len(every) == len(set(every))


@pytest.mark.parametrize(("task", "settings"), BOTH)
def test_sets_are_the_same_again_and_the_beginning_of_larger_ones(task, settings):
    larger = type(settings)(**{**vars(settings), "train_size": 3500})
    assert load_problems(f"{task}:train", larger)[:3000] == load_problems(f"{task}:train", settings)
    other = type(settings)(**{**vars(settings), "seed": 1})
    assert load_problems(f"{task}:test", other) != load_problems(f"{task}:test", settings)


def test_few_problems_are_said():
    """Of a chain of one step modulo 7 there are 7 (6 + 5) = 77, and all are trained on or in one of three sets."""
    settings, said = ChainConfig(depth=1, modulus=7), {}
    for name in ("train", "valid", "test", "1"):
        problems = load_problems(f"chain:{name}", settings)
        questions = said[name] = {problem.question for problem in problems}
        assert len(problems) == (60_000 if name == "train" else len(questions))  # few come again and again
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
        (lambda: ChainConfig(modulus=2), "ChainConfig.modulus: 2 is not valid"),
        (lambda: ChainConfig(operations=("/",)), "ChainConfig.operations: .*'/' is none of"),
        (lambda: GraphConfig(depth=0), "GraphConfig.depth: 0 is not valid"),
        (lambda: GraphConfig(depth=12), "GraphConfig.nodes: 10 is not valid; 12 hops need 26"),
        (lambda: load_tokenizer("graph:1000"), "config.tokenizer: graph:1000: 1000 is not valid; .* to 200"),
        (lambda: load_tokenizer("graph:"), "config.tokenizer: graph:: its number is missing; write e.g. graph:30"),
        (lambda: load_tokenizer("chain:1"), "config.tokenizer: chain:1: 1 is not valid; .* to 1000"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(make, said):
    with pytest.raises(UserError, match=said) as found:
        make()
    assert "\n" not in str(found.value)


def test_an_edge_is_a_word_of_the_graphs_tokenizer():
    template = Coconut().template(load_tokenizer("graph:14"))
    problems = load_problems("graph:test", GRAPH)
    encoded = encode_problems(template, problems)
    for problem, prompt, steps in zip(problems, encoded.prompts, encoded.steps, strict=True):
        assert len(prompt) == len(problem.question.split()) + 2  # the line break and the start marker
        assert [len(step) for step in steps] == [2] * len(problem.steps)
    with pytest.raises(UserError, match=r"the tokenizer doesn't know .*config\.tokenizer"):
        encode_problems(Coconut().template(load_tokenizer("graph:4")), problems)


def test_every_task_has_its_section():
    """And a smoke test cuts each."""
    from slpo_jax.config import Config

    assert {name: getattr(DataConfig(), name) for name in GENERATED} == {
        name: task.settings() for name, task in GENERATED.items()
    }
    data = smoke(Config())[0].data
    assert {getattr(data, name).train_size for name in GENERATED} == {512}

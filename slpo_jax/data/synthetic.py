"""Seeded multi-step arithmetic word problems, short enough to learn from nothing on a CPU.

Two templates tell the same kind of story in other words and another order:

  story:  Tom has 5 apples . He buys 3 . He doubles them . How many now ?
  puzzle: How many apples has Tom ? There were 5 . 3 came . All doubled .

Training is mostly stories; a share of puzzles, nearly all of one step, teaches the puzzle's words. The held-out sets
mirror the paper's: "test" (same distribution), "large" (GSM-Hard) and "template" (MultiArith).
"""

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from slpo_jax.data.problem import Problem
from slpo_jax.errors import UserError
from slpo_jax.settings import Checked, setting

HELD_OUT_NAMES = ("test", "large", "template", "valid")
NAMES = ("train", *HELD_OUT_NAMES)

_PEOPLE = {
    "Tom": "He", "Ben": "He", "Sam": "He", "Leo": "He",
    "Mia": "She", "Eva": "She", "Zoe": "She", "Amy": "She",
}  # fmt: skip
_OBJECTS = ("apples", "pens", "books", "cards", "shells", "coins", "cups", "toys")
_STORY_VERBS = {
    "+": ("buys", "finds", "wins", "gets"),
    "-": ("loses", "sells", "drops", "uses"),
}
_STORY_FACTORS = {2: "doubles", 3: "triples"}
_PUZZLE_VERBS = {
    "+": ("came", "arrived", "appeared", "joined"),
    "-": ("left", "went", "vanished", "broke"),
}
_PUZZLE_FACTORS = {2: "doubled", 3: "tripled"}
_FRAME_WORDS = ("has", "them", "How", "many", "now", "There", "were", "All", ".", "?")
OPERATORS = ("+", "-", "x", "=")

T = TypeVar("T")

# Problems drawn at a time; fixed, so that a smaller set is the beginning of a larger one
_BLOCK = 4096
# This share of problems has operands of at most max_value // 3 alone; "large" draws from above that.
_SMALL = 0.8
# Of all problems, this share is in the second template, and of these have a number of steps from the whole range; the
# others have one step.
_PUZZLES = 0.2
_LONG_PUZZLES = 0.1
_DRAWS_A_STEP = 3  # operation, operand, verb
_DRAWS_A_PROBLEM = 6  # person, object, regime, template, number of steps, first value


@dataclass(frozen=True)
class SyntheticConfig(Checked):
    """What the generated sets look like: the section `config.data.synthetic`.

    Attributes:
        max_value: every operand and every intermediate result is in 0..max_value.
        max_steps: problems have 1..max_steps steps ("template": 2..max_steps).
        train_size: number of training problems; a smaller set is the beginning of a larger one.
        valid_size: number of validation problems.
        test_size: number of problems in each of "test", "large" and "template".
        written_share: share of training problems whose steps are written; of the others there is the answer alone.
        seed: seed of all sets.
    """

    max_value: int = setting(30, least=6)
    max_steps: int = setting(3, least=2)
    train_size: int = setting(30_000, least=1)
    valid_size: int = setting(500, least=1)
    test_size: int = setting(1_000, least=1)
    written_share: float = setting(1.0, least=0, most=1)
    seed: int = setting(0, least=0)


@dataclass(frozen=True)
class _Step:
    operator: str
    operand: int
    verb: float  # uniform draw; the template makes a word of it
    text: str
    value: int


@lru_cache(maxsize=16)
def synthetic_problems(name: str, config: SyntheticConfig) -> tuple[Problem, ...]:
    """Generate one set; a pure function of its arguments.

    No question occurs twice, within a set or in two sets, so "train" excludes everything held out.

    Args:
        name: "train", "valid", "test" (all three the same distribution), "large" (large operands only) or
            "template" (the second template, 2..max_steps steps).
        config: sizes, ranges and seed.
    Returns:
        the problems; steps read "5 + 3 = 8".
    Raises:
        UserError: unknown name, or fewer distinct problems than asked for.
    """
    if name not in NAMES:
        raise UserError(
            f"synthetic:{name}: no such set; give one of {', '.join(NAMES)}"
        )
    # Leave out the questions of the sets that are made before this one, "train" last of all.
    questions: set[str] = set()
    for other in (*HELD_OUT_NAMES, "train"):
        if other == name:
            break
        for problem in synthetic_problems(other, config):
            questions.add(problem.question)

    sizes = {"train": config.train_size, "valid": config.valid_size}
    size = sizes.get(name, config.test_size)
    problems: list[Problem] = []
    most_draws = 20 * size + 10_000
    candidates = _candidates(name, config)
    for problem in itertools.islice(candidates, most_draws):
        if problem.question in questions:
            continue
        questions.add(problem.question)
        problems.append(problem)
        if len(problems) == size:
            return tuple(problems)
    raise UserError(
        f"synthetic:{name}: only {len(problems)} distinct problems of {size} found in {most_draws} draws; "
        "set a smaller size, or a larger synthetic max_value or max_steps"
    )


def vocabulary() -> tuple[str, ...]:
    """Return every word of both templates and of the steps, without the numbers."""
    words = [*_FRAME_WORDS, *OPERATORS]
    words += [*_PEOPLE, *_PEOPLE.values(), *_OBJECTS]
    for verbs in (*_STORY_VERBS.values(), *_PUZZLE_VERBS.values()):
        words += verbs
    words += _STORY_FACTORS.values()
    words += _PUZZLE_FACTORS.values()
    return tuple(dict.fromkeys(words))


def synthetic_words(max_value: int) -> tuple[str, ...]:
    """Return `vocabulary`, and the numbers up to the largest."""
    numbers = map(str, range(max_value + 1))
    return (*vocabulary(), *numbers)


def _candidates(name: str, config: SyntheticConfig) -> Iterator[Problem]:
    seed_of_name = zlib.crc32(name.encode())
    rng = np.random.default_rng([config.seed, seed_of_name])
    width = _DRAWS_A_PROBLEM + _DRAWS_A_STEP * config.max_steps
    while True:
        # One row of uniforms a problem: much faster than a generator call for every choice.
        rows = rng.random((_BLOCK, width))
        for row in rows.tolist():
            yield _make(name, config, row)


def _make(name: str, config: SyntheticConfig, row: list[float]) -> Problem:
    """Make one problem from one row of uniforms in [0, 1)."""
    person, thing, regime, template, length, first = row[:_DRAWS_A_PROBLEM]
    small = config.max_value // 3
    if name == "large":
        low = small + 1
        high = config.max_value
    else:
        low = 1
        is_small = regime < _SMALL
        high = small if is_small else config.max_value

    # Choose the template and the number of steps.
    if name == "template":
        is_puzzle = True
        count = _scale_draw(length, 2, config.max_steps)
    else:
        is_puzzle = name != "large" and template < _PUZZLES
        # Among puzzles that draw is uniform below their share, so it can decide their length too.
        long_share = _PUZZLES * _LONG_PUZZLES
        is_short = is_puzzle and template >= long_share
        count = 1
        if not is_short:
            count = _scale_draw(length, 1, config.max_steps)

    # Each step draws from its own part of the row.
    start = _scale_draw(first, low, high)
    value = start
    steps: list[_Step] = []
    begin = _DRAWS_A_PROBLEM
    for _ in range(count):
        end = begin + _DRAWS_A_STEP
        draws = row[begin:end]
        step = _step(value, low, high, config.max_value, draws)
        steps.append(step)
        value = step.value
        begin = end

    # Tell it.
    tell = _puzzle if is_puzzle else _story
    name_of_person = _pick(person, tuple(_PEOPLE))
    name_of_thing = _pick(thing, _OBJECTS)
    question = tell(name_of_person, name_of_thing, start, steps)

    # By the question alone, so that the problems are the same ones at every share.
    digest = zlib.crc32(question.encode())
    threshold = config.written_share * 2**32
    is_written = digest < threshold
    texts: tuple[str, ...] = ()
    if name != "train" or is_written:
        texts = tuple(step.text for step in steps)
    return Problem(question, texts, str(value))


def _step(value: int, low: int, high: int, max_value: int, draws: list[float]) -> _Step:
    """Make a step from `value` with an operand in low..high that stays in 0..max_value; there always is one."""
    choice, operand_draw, verb = draws
    factors = [factor for factor in _STORY_FACTORS if value * factor <= max_value]
    # Sums and differences are drawn twice as often as products.
    operators: list[str] = []
    if value + low <= max_value:
        operators += ["+", "+"]
    if value >= low:
        operators += ["-", "-"]
        if factors:
            operators.append("x")
    operator = _pick(choice, operators)
    if operator == "x":
        operand = _pick(operand_draw, factors)
    else:
        room = max_value - value if operator == "+" else value
        most = min(high, room)
        operand = _scale_draw(operand_draw, low, most)
    results = {
        "+": value + operand,
        "-": value - operand,
        "x": value * operand,
    }
    result = results[operator]
    text = f"{value} {operator} {operand} = {result}"
    return _Step(
        operator=operator,
        operand=operand,
        verb=verb,
        text=text,
        value=result,
    )


def _story(person: str, thing: str, start: int, steps: list[_Step]) -> str:
    pronoun = _PEOPLE[person]
    sentences = [f"{person} has {start} {thing} ."]
    for step in steps:
        if step.operator == "x":
            verb = _STORY_FACTORS[step.operand]
            sentences.append(f"{pronoun} {verb} them .")
        else:
            verbs = _STORY_VERBS[step.operator]
            verb = _pick(step.verb, verbs)
            sentences.append(f"{pronoun} {verb} {step.operand} .")
    sentences.append("How many now ?")
    return " ".join(sentences)


def _puzzle(person: str, thing: str, start: int, steps: list[_Step]) -> str:
    sentences = [f"How many {thing} has {person} ? There were {start} ."]
    for step in steps:
        if step.operator == "x":
            verb = _PUZZLE_FACTORS[step.operand]
            sentences.append(f"All {verb} .")
        else:
            verbs = _PUZZLE_VERBS[step.operator]
            verb = _pick(step.verb, verbs)
            sentences.append(f"{step.operand} {verb} .")
    return " ".join(sentences)


def _pick(draw: float, items: Sequence[T]) -> T:
    place = int(draw * len(items))
    return items[place]


def _scale_draw(draw: float, low: int, high: int) -> int:
    count = high - low + 1
    return low + int(draw * count)

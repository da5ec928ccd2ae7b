"""Generated sets of problems, kept apart by what the problems say: of our own tasks, and of reasoning-gym.

A hash of a problem's content decides whether it may be trained on, or which held-out set it may be in, so that no seed,
no size and no other setting puts one into two of them. Our own are by their number of steps; reasoning-gym's are
`gym:TASK`, or `gym:TASK@train`, `@valid` and `@test`, and their content is the question.
"""

import functools
import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from slpo_jax.data.problem import Problem, Problems
from slpo_jax.errors import UserError
from slpo_jax.rewards.task_rewards import GYM, gym_dataset
from slpo_jax.runtime.progress import if_slow
from slpo_jax.settings import Checked, FieldError, setting

_OF_TEN = ("train",) * 8 + ("valid", "test")  # of reasoning-gym's problems
_COMPARED = 64  # questions that are looked at for what all have in common


@dataclass(frozen=True)
class SetsConfig(Checked):
    """What the settings of generated tasks have in common: the sizes of sets, and which problems are in which.

    Attributes:
        train_size: number of training problems, in which one may come again; a smaller set is the beginning of a
            larger one.
        valid_size: number of validation problems.
        test_size: number of problems of `NAME:test` and of `NAME:NUMBER`.
        seed: seed of all sets.
    """

    train_size: int = setting(60_000, least=1)
    valid_size: int = setting(500, least=1)
    test_size: int = setting(1_000, least=1)
    seed: int = setting(0, least=0)

    unit: ClassVar[str] = "steps"  # that problems have a number of

    @property
    def of_ten(self) -> tuple[str, ...]:
        """Whose problem it is, by the last digit of its hash; "" is `NAME:NUMBER`'s."""
        return ("train",) * 7 + ("valid", "test", "")

    def comes_again(self, name: str) -> bool:
        """Tell whether a set may hold a problem more than once."""
        return name in ("train", "demos")

    def mixed(self, name: str) -> range:
        """Return the numbers in a set that has several."""
        raise NotImplementedError

    @property
    def alone(self) -> range:
        """The numbers of `NAME:NUMBER`."""
        raise NotImplementedError


@dataclass(frozen=True)
class DepthConfig(SetsConfig):
    """The settings of tasks whose problems differ by the number of their steps.

    Attributes:
        depth: problems have `least_depth` .. depth steps; `NAME:DEPTH` may have more.
        least_depth: above 1, no problem comes twice in a set.
    """

    depth: int = setting(3, least=1, most=100)
    least_depth: int = setting(1, least=1, most=100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least_depth > self.depth:
            raise FieldError(
                self, "least_depth", f"it is more than depth ({self.depth}); lower it"
            )

    def mixed(self, name: str) -> range:
        return range(self.least_depth, self.depth + 1)

    def comes_again(self, name: str) -> bool:
        return self.least_depth == 1 and super().comes_again(name)

    @property
    def most_depth(self) -> int:
        """The largest DEPTH of `NAME:DEPTH`."""
        return 100

    @property
    def alone(self) -> range:
        return range(1, self.most_depth + 1)


Make = Callable[[Any, int, np.random.Generator], tuple[Problem, str] | None]
"""(settings, number, randomness) -> a problem, and its content, the same in whatever order it is told; or none."""
Complete = Callable[[Any, Problem], Problem | None]
"""(settings, problem) -> the problem with what takes time to find out, or none."""


def sets_apart(
    task: str,
    make: Make,
    more: str,
    complete: Complete = lambda settings, problem: problem,
) -> Callable[[str, Any], Problems]:
    """Return the generator of a task: (name of a set, settings) -> its problems, a pure function.

    "train", "valid" and "test", and what else is in `SetsConfig.of_ten`, mix problems by their number of steps (or
    what `SetsConfig.unit` says); a number is a test set of just so many. In a held-out set no problem comes twice;
    where there are too few it is smaller. In others they may come again (`SetsConfig.comes_again`), so that few short
    problems are no small share.

    Args:
        more: the setting that makes more problems when it is raised.
        complete: of a problem that is in the set.
    """
    remedy = f"for more raise config.data.{task}.{more}"

    @functools.lru_cache(maxsize=16)
    def generate(name: str, settings: Any) -> Problems:
        source = f"{task}:{name}"
        return _generate(source, name, settings, make, complete, remedy)

    return generate


def _generate(
    source: str,
    name: str,
    settings: SetsConfig,
    make: Make,
    complete: Complete,
    remedy: str,
) -> Problems:
    numbers = _numbers(source, name, settings)
    part = name if name in settings.of_ten else ""
    size_name = f"{part or 'test'}_size"
    size = getattr(settings, size_name)
    seed_of_name = zlib.crc32(name.encode())
    rng = np.random.default_rng([settings.seed, seed_of_name])
    problems = list[Problem]()
    contents = set[str]()
    idle = 0
    counts = Counter[int]()
    label = f"{source}: generating {size:,} problems"
    tell = if_slow(label, size)
    # Draw until there are enough, or too many draws in a row gave no problem that is taken.
    while len(problems) < size:
        most_idle = 200 * len(contents) + 10_000
        if idle >= most_idle:
            break
        draw = rng.random()
        place = int(draw * len(numbers))
        number = numbers[place]
        drawn = make(settings, number, rng)
        # Where none is found, `make` has tried often.
        idle += 1 if drawn else 1_000
        if drawn is None:
            continue
        problem, content = drawn
        if part_of(content, settings.of_ten) != part:
            continue
        is_repeated = content in contents
        if is_repeated and not settings.comes_again(part):
            continue
        completed = complete(settings, problem)
        if completed is not None:
            problems.append(completed)
            contents.add(content)
            counts[number] += 1
            idle = 0
            tell(len(problems))

    # Warn of a set that is too small, repeats itself, or has too few problems with one of the numbers.
    if not problems:
        raise UserError(f"{source}: there are no such problems; {remedy}")
    count_of_each = [counts[number] for number in numbers]
    fewest = min(count_of_each)
    # Nine of ten have to differ, and each number to have half of its share.
    is_whole = len(problems) == size
    differ = 10 * len(contents) >= 9 * size
    are_even = 2 * fewest * len(numbers) >= size
    if is_whole and differ and are_even:
        return Problems(problems)
    shares: list[str] = []
    for count, number in zip(count_of_each, numbers, strict=True):
        shares.append(f"{count:,} of {number}")
    listed = ", ".join(shares)
    line = f"{source}: {len(contents):,} of {size:,} problems differ (all by {settings.unit}: {listed})"
    if is_whole and differ:
        line = (
            f"{source}: its {size:,} problems are uneven by {settings.unit}: {listed}"
        )
    line = f"{line}; {remedy}"
    return Problems(problems, warnings=(line,))


def _numbers(source: str, name: str, settings: SetsConfig) -> range:
    """Return the numbers of steps, or what the unit is, in a set."""
    if name and name in settings.of_ten:
        return settings.mixed(name)
    number = int(name) if name.isdecimal() else 0
    alone = settings.alone
    if number not in alone:
        parts = dict.fromkeys(settings.of_ten)
        parts.pop("", None)
        names = ", ".join(parts)
        raise UserError(
            f"{source}: no such set; give one of {names} or a number "
            f"of {settings.unit} from {alone[0]} to {alone[-1]}"
        )
    return range(number, number + 1)


def part_of(content: str, of_ten: tuple[str, ...]) -> str:
    """Return the set that a problem may be in."""
    hashed = hashlib.blake2b(content.encode(), digest_size=4)
    number = int.from_bytes(hashed.digest())
    last_digit = number % 10
    return of_ten[last_digit]


@dataclass(frozen=True)
class GymConfig(Checked):
    """How problems of reasoning-gym are made: the section `config.data.gym`.

    Attributes:
        settings: TASK = settings of its own, as reasoning-gym's config of it names them.
        train_size: number of training problems; a smaller set is the beginning of a larger one of most tasks.
        valid_size: number of validation problems.
        test_size: number of test problems.
        seed: seed of all sets.
        bare: leave out the words that all questions begin and end with.
    """

    settings: dict[str, dict[str, Any]] = setting({})
    train_size: int = setting(1_600, least=1)
    valid_size: int = setting(200, least=1)
    test_size: int = setting(200, least=1)
    seed: int = setting(0, least=0)
    bare: bool = False


def is_gym(source: Any) -> bool:
    """Tell whether a source is a task of reasoning-gym."""
    return isinstance(source, str) and source.startswith(f"{GYM}:")


def gym_problems(source: str, config: GymConfig, role: str) -> Problems:
    """Return the problems of a task, without steps, and with what `rewards.task_rewards` judges them by.

    Args:
        source: "gym:TASK" or "gym:TASK@SET".
        role: the set where the source names none.
    Returns:
        problems, of which no two have the same question, with a warning where they are fewer than were asked for.
    Raises:
        UserError: see `gym_dataset`; or there is no such set, or nothing in it.
    """
    task_and_set = source.removeprefix(f"{GYM}:")
    task, at, name = task_and_set.partition("@")
    part = name
    if not at:
        part = "valid" if role == "validation" else role
    if part not in _OF_TEN:
        names = ", ".join(dict.fromkeys(_OF_TEN))
        raise UserError(f"{source}: no such set; give one of {names}")
    sizes = {
        "train": config.train_size,
        "valid": config.valid_size,
        "test": config.test_size,
    }
    size = sizes[part]

    # Draw a fifth more than is needed for the set that needs the most, given its share of ten.
    draws = 0
    for set_name, most in sizes.items():
        needed = 12 * most / _OF_TEN.count(set_name)
        draws = max(draws, math.ceil(needed))
    own_settings = config.settings.get(task, {})
    settings = json.dumps(own_settings, sort_keys=True)
    count = max(draws, _COMPARED)
    entries = _entries(task, settings, config.seed, count)

    # Find the words to leave out.
    before = ""
    after = ""
    if config.bare:
        compared = entries[:_COMPARED]
        questions = [entry["question"] for entry in compared]
        before, after = common_ends(questions)

    # Of entries with the same question the first counts, in the place of the last.
    entry_of: dict[str, dict[str, Any]] = {}
    for entry in reversed(entries):
        question = entry["question"]
        if part_of(question, _OF_TEN) == part:
            entry_of[question] = entry
    problems: list[Problem] = []
    for question, entry in reversed(entry_of.items()):
        columns = {"entry": entry, "task": task, "settings": settings}
        text = _without_ends(question, before, after)
        # Some tasks have no answers.
        answer = entry["answer"] or ""
        problem = Problem(text, steps=(), answer=answer, columns=columns)
        problems.append(problem)
    problems = problems[:size]
    if not problems:
        raise UserError(
            f"{source}: none of {draws:,} problems is in this set; raise config.data.gym.{part}_size"
        )
    if len(problems) >= 0.9 * size:
        return Problems(problems)
    remedy = f"the task repeats itself: widen config.data.gym.settings.{task}"
    line = f"{source}: {len(problems):,} of {size:,} problems; {remedy}"
    return Problems(problems, warnings=(line,))


@functools.lru_cache(maxsize=16)
def _entries(task: str, settings: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Generate entries of a task, from which all its sets are taken."""
    dataset = gym_dataset(task, settings, seed, count)
    entries = list[dict[str, Any]]()
    label = f"{GYM}:{task}: generating {count:,} problems"
    tell = if_slow(label, count)
    for place in range(count):
        entries.append(dataset[place])
        tell(place + 1)
    return entries


def common_ends(texts: Sequence[str]) -> tuple[str, str]:
    """Return the whole words that all of some texts begin with, and those that they end with."""
    before = _common(texts)
    last_space = max(before.rfind(" "), before.rfind("\n"))
    before = before[: last_space + 1]

    # The ends are the beginnings of the texts read backwards.
    backwards = [text[::-1] for text in texts]
    behind = _common(backwards)
    last_space = max(behind.rfind(" "), behind.rfind("\n"))
    behind = behind[: last_space + 1]
    return before, behind[::-1]


def _common(texts: Sequence[str]) -> str:
    """Return the characters that all texts begin with."""
    first = min(texts)
    last = max(texts)
    length = 0
    for letter, other in zip(first, last, strict=False):
        if letter != other:
            break
        length += 1
    return first[:length]


def _without_ends(text: str, before: str, after: str) -> str:
    rest = text.removeprefix(before)
    inner = rest.removesuffix(after).strip()
    return inner or rest.strip() or text

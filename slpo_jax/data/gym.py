"""Problems of reasoning-gym: `gym:TASK`, or `gym:TASK@train`, `@valid` and `@test`, kept apart by their questions.

A hash of a question decides which set it may be in, so that no seed, no size and no other setting puts one into two.
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slpo_jax.data.generated_sets import part_of
from slpo_jax.data.problem import Problem, Problems
from slpo_jax.errors import UserError
from slpo_jax.rewards.gym_tasks import GYM, gym_dataset
from slpo_jax.runtime.progress import if_slow
from slpo_jax.settings import Checked, setting

_OF_TEN = ("train",) * 8 + ("valid", "test")
_COMPARED = 64  # questions that are looked at for what all have in common


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
    """Return the problems of a task, without steps, and with what `rewards.gym_tasks` judges them by.

    Args:
        source: "gym:TASK" or "gym:TASK@SET".
        role: the set where the source names none.
    Returns:
        problems, of which no two have the same question, with a warning where they are fewer than were asked for.
    Raises:
        UserError: see `gym_dataset`; or there is no such set, or nothing in it.
    """
    task, at, name = source.removeprefix(f"{GYM}:").partition("@")
    part = name if at else {"validation": "valid"}.get(role, role)
    if part not in _OF_TEN:
        raise UserError(f"{source}: no such set; give one of {', '.join(dict.fromkeys(_OF_TEN))}")
    size = getattr(config, f"{part}_size")
    sizes = {"train": config.train_size, "valid": config.valid_size, "test": config.test_size}
    draws = max(math.ceil(12 * most / _OF_TEN.count(set_name)) for set_name, most in sizes.items())
    settings = json.dumps(config.settings.get(task, {}), sort_keys=True)
    entries = _entries(task, settings, config.seed, max(draws, _COMPARED))
    before, after = common_ends([entry["question"] for entry in entries[:_COMPARED]]) if config.bare else ("", "")
    entry_of = {entry["question"]: entry for entry in reversed(entries) if part_of(entry["question"], _OF_TEN) == part}
    problems = [
        Problem(
            _without_ends(question, before, after),
            (),
            entry["answer"] or "",  # some tasks have none
            {"entry": entry, "task": task, "settings": settings},
        )
        for question, entry in reversed(entry_of.items())
    ][:size]
    if not problems:
        raise UserError(f"{source}: none of {draws:,} problems is in this set; raise config.data.gym.{part}_size")
    few = len(problems) < 0.9 * size  # a fifth more than are needed were drawn
    remedy = "the task repeats itself: widen config.data.gym.settings"
    line = f"{source}: {len(problems):,} of {size:,} problems; {remedy}.{task}"
    return Problems(problems, warnings=(line,) * few)


@functools.lru_cache(maxsize=16)
def _entries(task: str, settings: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Generate entries of a task, from which all its sets are taken."""
    dataset, entries = gym_dataset(task, settings, seed, count), list[dict[str, Any]]()
    tell = if_slow(f"{GYM}:{task}: generating {count:,} problems", count)
    while len(entries) < count:
        entries.append(dataset[len(entries)])
        tell(len(entries))
    return entries


def common_ends(texts: Sequence[str]) -> tuple[str, str]:
    """Return the whole words that all of some texts begin with, and those that they end with."""
    before, after = _common(texts), _common([text[::-1] for text in texts])[::-1]
    before = before[: max(map(before.rfind, " \n")) + 1]
    starts = [place for place in map(after.find, " \n") if place >= 0]
    return before, after[min(starts) :] if starts else ""


def _common(texts: Sequence[str]) -> str:
    """Return the characters that all texts begin with."""
    first, last = min(texts), max(texts)
    return first[: next((place for place, letter in enumerate(first) if last[place : place + 1] != letter), len(first))]


def _without_ends(text: str, before: str, after: str) -> str:
    rest = text.removeprefix(before)
    return rest.removesuffix(after).strip() or rest.strip() or text

"""Generated sets of problems by their number of steps, kept apart by what the problems say.

A hash of a problem's content decides whether it may be trained on, or which held-out set it may be in, so that no seed
and no size puts one into two of them.
"""

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from slpo_jax.config.bounds import Checked, setting
from slpo_jax.data.problem import Problem
from slpo_jax.errors import UserError

_MIXED = ("train", "valid", "test")
_OF_TEN = ("train",) * 7 + ("valid", "test", "")  # whose problem it is, by the last digit of its hash; "" is DEPTH's


@dataclass(frozen=True)
class DepthConfig(Checked):
    """What the settings of such tasks have in common.

    Attributes:
        depth: problems have 1 .. depth steps; `NAME:DEPTH` may have more.
        train_size: number of training problems, in which one may come again; a smaller set is the beginning of a
            larger one.
        valid_size: number of validation problems.
        test_size: number of problems of `NAME:test` and of `NAME:DEPTH`.
        seed: of all sets.
    """

    depth: int = setting(3, least=1, most=100)
    train_size: int = setting(60_000, least=1)
    valid_size: int = setting(500, least=1)
    test_size: int = setting(1_000, least=1)
    seed: int = setting(0, least=0)

    @property
    def most_depth(self) -> int:
        """Of `NAME:DEPTH`."""
        return 100


Generated = tuple[tuple[Problem, ...], str]
"""Problems, and a line on those that were left out, "" where there is nothing to say."""
Make = Callable[[Any, int, np.random.Generator], tuple[Problem, str]]
"""(settings, number of steps, randomness) -> a problem, and its content, the same in whatever order it is told."""


def sets_by_depth(task: str, make: Make, more: str) -> Callable[[str, Any], Generated]:
    """The generator of a task: (name of a set, settings) -> `Generated`, a pure function.

    "train", "valid" and "test" mix 1 .. `depth` steps, a number is a test set of just so many. In a held-out set no
    problem comes twice; where there are too few it is smaller. In training they come again, so that few short problems
    are no small share.

    Args:
        more: the setting that makes more problems when it is raised.
    """
    remedy = f"for more raise config.data.{task}.{more}"
    return lru_cache(maxsize=16)(lambda name, settings: _generated(f"{task}:{name}", name, settings, make, remedy))


def _generated(source: str, name: str, settings: DepthConfig, make: Make, remedy: str) -> Generated:
    depths, part = _depths(source, name, settings), name if name in _MIXED else ""
    size = {"train": settings.train_size, "valid": settings.valid_size}.get(name, settings.test_size)
    rng = np.random.default_rng([settings.seed, zlib.crc32(name.encode())])
    problems, known, idle = list[Problem](), set[str](), 0
    while len(problems) < size and idle < 200 * len(known) + 10_000:  # draws without a problem that is taken
        problem, content = make(settings, depths[int(rng.random() * len(depths))], rng)
        idle += 1
        if _part(content) == part and (name == "train" or content not in known):
            problems.append(problem)
            known.add(content)
            idle = 0
    if not problems:
        raise UserError(f"{source}: there are no such problems; {remedy}")
    counts = Counter(len(problem.steps) for problem in problems)
    fewest = len(depths) * min(counts[depth] for depth in depths)
    if len(problems) == size and 10 * len(known) >= 9 * size and 2 * fewest >= size:
        return tuple(problems), ""
    found = ", ".join(f"{counts[depth]:,} of {depth}" for depth in depths)
    return tuple(problems), f"{source}: {len(known):,} of {size:,} problems differ (all by steps: {found}); {remedy}"


def _depths(source: str, name: str, settings: DepthConfig) -> range:
    """The numbers of steps in a set."""
    if name in _MIXED:
        return range(1, settings.depth + 1)
    depth = int(name) if name.isdecimal() else 0
    if not 1 <= depth <= settings.most_depth:
        raise UserError(
            f"{source}: no such set; give one of {', '.join(_MIXED)} or a number of steps from 1 to "
            f"{settings.most_depth}"
        )
    return range(depth, depth + 1)


def _part(content: str) -> str:
    """The set that a problem may be in."""
    return _OF_TEN[int.from_bytes(hashlib.blake2b(content.encode(), digest_size=4).digest()) % 10]

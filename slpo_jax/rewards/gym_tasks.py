"""Tasks of reasoning-gym: data sets by name, and their own `score_answer` as a reward, on the host.

The package is an extra, `pip install 'slpo_jax[gym]'`. What a task needs beyond its name and its settings is
refused.
"""

import dataclasses
import difflib
import functools
import json
import re
from typing import Any

from slpo_jax.errors import UserError, in_a_line

GYM = "gym"
# Of templates. Fewer than three # are no mark, as they may be an answer's own.
_MARK = re.compile(r"#{3,}(?=\s|\Z)|answer(?:\s+is:|(?:\*\*)?:)", re.IGNORECASE)
_REFUSED = {"composite": "it is made of other tasks; name one of them"}


@functools.lru_cache(maxsize=128)
def gym_dataset(task: str, settings: str, seed: int = 0, size: int = 1) -> Any:
    """Make a data set of reasoning-gym.

    Args:
        task: its name.
        settings: its own, as JSON.
        seed: of its problems.
        size: how many there are.
    Raises:
        UserError: the package, the task or a setting is not there, or a setting can't be used.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError:
        raise UserError(f"gym:{task}: reasoning-gym is not installed; pip install 'slpo_jax[gym]'") from None
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, 3, 0.5) or sorted(DATASETS)[:3]
        raise UserError(f"gym:{task}: no such task; there are {', '.join(near)}, .. ({len(DATASETS)} in all)")
    if task in _REFUSED:
        raise UserError(f"gym:{task}: {_REFUSED[task]}")
    values, key = json.loads(settings), f"config.data.gym.settings.{task}"
    names = [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
    if unknown := sorted({*values} - {*names}):
        raise UserError(f"{key}.{unknown[0]}: the task has no such setting; it has {', '.join(names)}")
    try:
        return reasoning_gym.create_dataset(task, **values, seed=seed, size=size)
    except Exception as error:  # each task checks in its own way
        raise UserError(f"{key}: {in_a_line(error)}; the task refuses {values or f'{size:,} problems'}") from error


def gym(completion: str, entry: dict[str, Any], task: str, settings: str) -> float:
    """Score, by a task's `score_answer`, what stands behind the last mark.

    Args:
        entry: the problem as the data set has it.
        task, settings: see `gym_dataset`.
    """
    try:
        return float(gym_dataset(task, settings).score_answer(_answer(completion), entry))
    except UserError:
        raise
    except Exception:  # some tasks fail on an answer that they can't read, such as prime_factorization on letters
        return 0.0


def _answer(completion: str) -> str:
    """Return what follows the last mark, or all of a text without one; line breaks stay."""
    return _MARK.split(completion)[-1].strip()
